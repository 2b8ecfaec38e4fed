"""One rank's final error ends the calls of all ranks, though nobody's process ends."""

import pathlib
import textwrap

import pytest
import torch

import farandole as fl
import farandole.torch as flt
from fake_gpu import VARIABLES, needs_fake_gpu, pose
from ranks import mpirun, run_threads

pytestmark = [pytest.mark.mpi, needs_fake_gpu]


def fail_on_rank_1(gpus):
    """Rank 1's GPU fails at work; the others wait for its part, or for its vote."""
    try:
        flt.allreduce(torch.ones(1), name="well")
        handle = flt.allreduce_async(torch.ones(4), name="fails")
        if fl.rank() == 1:
            gpus.mine.fail()
        flt.synchronize(handle)
        flt.allreduce(torch.ones(1), name="never")
    except fl.HorovodInternalError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("no error came")


def check_threads():
    """Four ranks in this process, whose GPUs are of no use afterwards."""
    told = {}
    for gpus in pose(shared=False):

        def body(rank, gpus=gpus):
            told[rank] = fail_on_rank_1(gpus)

        run_threads(4, body, timeout_s=10)  # shutdown does not say it again
    assert sorted(told) == [0, 1, 2, 3], told
    check(told)


def test_reaches_ranks_that_are_threads():
    done = mpirun(1, ["-c", "import test_final_error as test; test.check_threads()"])
    assert done.returncode == 0, done.stdout


def test_reaches_ranks_that_are_processes(tmp_path):
    script = f"""
        import os, pathlib, time
        import farandole as fl
        import test_final_error as test

        fl.init()
        for gpus in test.pose(shared=False):
            error = test.fail_on_rank_1(gpus)
        folder = pathlib.Path({str(tmp_path)!r})
        (folder / f"{{fl.rank()}}.part").write_text(f"{{time.monotonic()}} {{error}}")
        (folder / f"{{fl.rank()}}.part").rename(folder / str(fl.rank()))
        # No rank ends before all have heard, so that the launcher ends nobody.
        until = time.monotonic() + 10
        while len([*folder.glob("[0-9]")]) < 4 and time.monotonic() < until:
            time.sleep(0.01)
        os._exit(0)
    """
    done = mpirun(4, ["-c", textwrap.dedent(script)], **VARIABLES)
    files = [pathlib.Path(tmp_path, str(rank)) for rank in range(4)]
    silent = [rank for rank, file in enumerate(files) if not file.exists()]
    assert not silent, f"ranks {silent} did not hear of the error\n{done.stdout}"
    times, texts = zip(*(file.read_text().split(" ", 1) for file in files), strict=True)
    check(texts)
    assert max(map(float, times)) - float(times[1]) < 3, times  # 1 s, and what noise may add


def check(told):
    """All ranks name rank 1 and the cause."""
    cause = "on fake CUDA device 1: an illegal memory access was encountered (injected)"
    assert cause in told[1], told
    for rank in (0, 2, 3):
        text = told[rank].split(": ", 1)[1]
        assert text.startswith("rank 1 failed: ") and cause in text, told
