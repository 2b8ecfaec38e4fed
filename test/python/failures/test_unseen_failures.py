"""Operations whose outcome nobody has seen: failures that nobody waited for, interrupted calls."""

import re
import time
import warnings

import numpy as np
import pytest

import farandole
from farandole import basics
from ranks import mpirun, run_mpi, run_threads


def warnings_of(body):
    """What two ranks warn of when they leave after ``body``."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_threads(2, body)
    return sorted(str(w.message) for w in caught if "never synchronized" in str(w.message))


@pytest.mark.parametrize("function", ["allreduce_async", "allgather_async"])
@pytest.mark.parametrize("is_dropped", [True, False])
def test_a_failure_that_nobody_synchronized_is_told_once(function, is_dropped):
    kept = []

    def body(rank):
        handle = getattr(farandole, function)(np.ones((2, 2 + rank)), name="forgotten")
        while not farandole.poll(handle):
            time.sleep(0.001)
        if not is_dropped:
            kept.append(handle)
        del handle
        farandole.barrier()

    lines = warnings_of(body)
    assert [line.split(":")[0] for line in lines] == ["rank 0", "rank 1"]
    wanted = rf'{function[:9]}.* "forgotten": rank 0 sent float64 \[.,2\], rank 1 sent .*\[.,3\]'
    assert all("operation failed and was" in line for line in lines), lines
    assert all(re.search(wanted, line) for line in lines), lines


def test_several_failures_that_nobody_synchronized_are_counted():
    def body(rank):
        for name in "abc":
            farandole.allreduce_async(np.ones(2 + rank), name=name)
            farandole.barrier()

    lines = warnings_of(body)
    assert len(lines) == 2
    wanted = 'operations failed and were never synchronized; the first: allreduce "a": '
    assert all(f"3 asynchronous {wanted}" in line for line in lines), lines


def test_nothing_is_told_of_failures_that_were_seen_and_of_successes_that_were_not():
    def body(rank):
        handle = farandole.allreduce_async(np.ones(2 + rank), name="seen")
        farandole.barrier()
        farandole.allreduce(np.ones(2))  # by now the handle's memory has been let go
        for call in (
            lambda: farandole.synchronize(handle),
            lambda: farandole.allreduce(np.ones(2 + rank), name="blocking"),
            lambda: farandole.allgather(np.ones((2, 2 + rank)), name="blocking"),
            lambda: farandole.synchronize(farandole.allgather_async(np.ones((2, 2 + rank)))),
        ):
            with pytest.raises(farandole.MismatchError):
                call()
        farandole.allreduce_async(np.ones(2), name="good")
        farandole.barrier()
        farandole.barrier()

    assert warnings_of(body) == []


@pytest.mark.mpi
def test_at_exit_it_is_one_line():
    done = mpirun(
        2,
        ["-c", """
import numpy as np
import farandole
farandole.init()
farandole.allreduce_async(np.ones(2 + farandole.rank()), name="forgotten")
farandole.barrier()
"""],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    lines = sorted(done.stdout.splitlines())
    assert len(lines) == 2, done.stdout
    for rank, line in enumerate(lines):
        assert f"RuntimeWarning: rank {rank}: an asynchronous operation failed" in line
        assert '"forgotten"' in line


INTERRUPTED = """
    import os, signal, threading, time
    import numpy as np
    import torch
    import farandole
    import farandole.torch as ft
    from farandole import basics

    def interrupt():
        while not basics.current().core.in_flight:
            time.sleep(0.01)
        time.sleep(0.15)
        os.kill(os.getpid(), signal.SIGINT)

    class Halved(ft.Compression.none):
        @staticmethod
        def compress(tensor):
            return tensor / 2, None

        @staticmethod
        def decompress(tensor, context):
            return tensor * 2

    farandole.init()
    rank = farandole.rank()
    mine = np.full((2, 1), 1.0 + rank)
    tensor = torch.full((2, 1), 1.0 + rank)
    calls = dict(
        n1=lambda n: farandole.allreduce(mine, name=n, op=farandole.Sum),
        n2=lambda n: farandole.allreduce_(mine.copy(), name=n, op=farandole.Sum),
        n3=lambda n: farandole.allgather(mine, name=n),
        n4=lambda n: farandole.alltoall(mine, name=n),
        n5=lambda n: farandole.alltoall(mine, [1, 1], name=n)[0],
        o1=lambda n: farandole.broadcast_object(mine if rank == 0 else None, 0, name=n),
        o2=lambda n: farandole.broadcast_object(mine if rank == 1 else None, 1, name=n),
        o3=lambda n: farandole.allgather_object(mine, name=n)[0],
        t1=lambda n: ft.allreduce(tensor, name=n, op=ft.Sum),
        t2=lambda n: ft.allreduce_(tensor.clone(), name=n, op=ft.Sum),
        t3=lambda n: ft.allgather(tensor, name=n),
        t4=lambda n: ft.alltoall(tensor, name=n),
        t5=lambda n: ft.allreduce(tensor, name=n, op=ft.Sum, compression=Halved),
        t6=lambda n: ft.grouped_allreduce([tensor], name=n, op=ft.Sum, compression=Halved)[0],
    )
    first = lambda result: result[0] if isinstance(result, (tuple, list)) else result
    for name, call in calls.items():
        if rank == 0:
            threading.Thread(target=interrupt).start()
            try:
                call(name)
            except KeyboardInterrupt:
                pass
            else:
                raise SystemExit(f"{name} was not interrupted")
            of_another_shape = [farandole.allreduce, farandole.allreduce_async] if name == "n1" else []
            for second in [call, *(lambda n, other=other: other(np.ones(3), name=n) for other in of_another_shape)]:
                try:
                    second(name)
                except ValueError as error:
                    way = f"farandole.synchronize(farandole.interrupted({name!r}))"
                    assert way in str(error), error
                else:
                    raise SystemExit(f"{name} was called twice")
            handle = farandole.interrupted(name)
            assert handle is ft.interrupted()
            farandole.allreduce(np.ones(1), name="go")
            result = first(farandole.synchronize(handle))
            try:
                farandole.interrupted(name)
                raise SystemExit(f"{name} was found again")
            except ValueError:
                pass
        else:
            farandole.allreduce(np.ones(1), name="go")
            result = call(name)
        again = call(name)
        assert type(result) is type(again) and result.tolist() == again.tolist(), (result, again)
        tell(name)
"""


@pytest.mark.mpi
def test_an_interrupted_call_says_how_to_go_on_and_that_works():
    told = run_mpi(2, INTERRUPTED)
    assert told[0] == told[1] and len(told[0].split()) == 14


def test_without_an_interrupted_call_there_is_none_to_be_had():
    def body(rank):
        farandole.allreduce(np.ones(1), name="x")
        for name in (None, "x"):
            with pytest.raises(ValueError, match="no interrupted call"):
                farandole.interrupted(name)
        assert basics.current().core.find_interrupted(None) is None

    run_threads(1, body)
