"""One rank's final error ends the calls of all ranks, though nobody's process ends."""

import pathlib
import textwrap

import numpy as np
import pytest

import farandole as fl
from farandole import _alltoall
from ranks import mpirun, run_threads


def expect_a_row_less(rank):
    """On ``rank`` of this process or thread the next alltoall fails, as after a broken exchange."""
    moving = _alltoall._Exchange.moving

    def moving_wrongly(self, name, failed):
        if fl.rank() == rank:
            self._heard[2, 0] -= 1  # rank 2 says otherwise
        return moving(self, name, failed)

    _alltoall._Exchange.moving = moving_wrongly
    return lambda: setattr(_alltoall._Exchange, "moving", moving)


def fail_on_rank_1():
    """Rank 1 cannot take its rows; the others wait for its vote."""
    try:
        fl.alltoall(np.arange(4.0).repeat(2), name="rows")
        fl.allreduce(np.ones(1), name="never")
    except fl.HorovodInternalError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("no error came")


def test_reaches_ranks_that_are_threads():
    undo = expect_a_row_less(rank=1)
    told = {}
    try:
        with pytest.raises(fl.HorovodInternalError, match="rank 2 sends"):  # shutdown says it too
            run_threads(4, lambda rank: told.update({rank: fail_on_rank_1()}), timeout_s=10)
    finally:
        undo()
    assert sorted(told) == [0, 1, 2, 3], told
    check(told)


def test_reaches_ranks_that_are_processes(tmp_path):
    script = f"""
        import os, pathlib, time
        import farandole as fl
        import test_final_error as test

        fl.init()
        test.expect_a_row_less(rank=1)
        error = test.fail_on_rank_1()
        folder = pathlib.Path({str(tmp_path)!r})
        (folder / f"{{fl.rank()}}.part").write_text(f"{{time.monotonic()}} {{error}}")
        (folder / f"{{fl.rank()}}.part").rename(folder / str(fl.rank()))
        # No rank ends before all have heard, so that the launcher ends nobody.
        until = time.monotonic() + 10
        while len([*folder.glob("[0-9]")]) < 4 and time.monotonic() < until:
            time.sleep(0.01)
        os._exit(0)
    """
    done = mpirun(4, ["-c", textwrap.dedent(script)])
    files = [pathlib.Path(tmp_path, str(rank)) for rank in range(4)]
    silent = [rank for rank, file in enumerate(files) if not file.exists()]
    assert not silent, f"ranks {silent} did not hear of the error\n{done.stdout}"
    times, texts = zip(*(file.read_text().split(" ", 1) for file in files), strict=True)
    check(texts)
    assert max(map(float, times)) - float(times[1]) < 3, times  # 1 s, and what noise may add


def check(told):
    """All ranks name rank 1 and the cause."""
    cause = told[1].split(": ", 1)[1]
    assert "rank 2 sends rank 1 16 bytes, rank 1 expects 8" in cause
    for rank in (0, 2, 3):
        name, text = told[rank].split(": ", 1)
        assert text.endswith(cause.removeprefix("rank 1: ")), told
        assert text.startswith("rank 1 failed: "), told
