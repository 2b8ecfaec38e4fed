"""Calls of several threads of one rank that meet: what stays alive, who gets the result."""

import os
import queue
import subprocess
import sys
import textwrap
import threading
import weakref

import numpy as np
import pytest

import farandole
from farandole import basics
from ranks import on_threads, run_threads


def in_threads(*bodies):
    """What the bodies give, or their errors; they run at once in the caller's context."""
    results = [None] * len(bodies)
    rank = basics.current()

    def run(i, body):
        with basics.using(rank):
            try:
                results[i] = body()
            except Exception as error:
                results[i] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(bodies)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    return results


@on_threads(2)
def test_many_threads_start_operations_and_let_memory_go_at_once(rank):
    """Each start lets go of what is complete, whoever started it, while others start and wait."""
    def reduce(thread):
        total = 0
        for i in range(50):
            handle = farandole.allreduce_async(np.ones(2), name=f"{thread} {i}", op=farandole.Sum)
            if i % 3 == 0:
                del handle  # its memory is the context's now
            else:
                total += farandole.synchronize(handle).sum()
        return total

    threads = [lambda thread=thread: reduce(thread) for thread in range(4)]
    results = in_threads(*threads)
    farandole.allreduce(np.ones(1))
    farandole.allreduce(np.ones(1))
    assert (results, basics.current().core.in_flight) == ([33 * 4.0] * 4, 0)


def test_the_memory_of_an_operation_in_flight_is_kept_whoever_drops_it():
    dropped = threading.Event()

    def body(rank):
        mine = np.ones(1000)
        watched = weakref.ref(mine)
        if rank == 1:
            dropped.wait(30)
        handle = farandole.allreduce_async_(mine, name="x", op=farandole.Sum)
        del mine
        is_kept = watched() is not None
        if rank == 0:
            in_threads(lambda: farandole.allreduce_async(np.ones(1), name="y"))
            is_kept = is_kept and watched() is not None
            dropped.set()
        else:
            farandole.allreduce(np.ones(1), name="y")
        sums = farandole.synchronize(handle)
        assert sums is watched()
        del sums, handle
        return is_kept, watched() is None

    assert run_threads(2, body) == [(True, True)] * 2


@pytest.mark.parametrize("function", ["allreduce_async", "allgather_async"])
@on_threads(2)
def test_two_threads_that_synchronize_one_handle_get_a_result_and_a_value_error(rank, function):
    if rank == 1:
        for i in range(20):
            farandole.barrier()
            farandole.synchronize(getattr(farandole, function)(np.ones(2), name=f"x{i}"))
        return
    for i in range(20):
        handle = getattr(farandole, function)(np.ones(2), name=f"x{i}")
        wait = lambda handle=handle: farandole.synchronize(handle)  # noqa: E731
        poll = lambda handle=handle: farandole.poll(handle)  # noqa: E731
        results = in_threads(wait, wait, poll, farandole.barrier)
        arrays = [r for r in results[:2] if isinstance(r, np.ndarray)]
        errors = [r for r in results[:2] if isinstance(r, ValueError)]
        assert len(arrays) == 1 and len(errors) == 1, results
        assert "has been cleared" in str(errors[0])
        assert isinstance(results[2], bool | ValueError), results


@on_threads(2)
def test_two_threads_that_synchronize_a_failed_handle_get_errors_that_say_so(rank):
    handle = farandole.allreduce_async(np.ones(2 + rank), name="x")
    wait = lambda: farandole.synchronize(handle)  # noqa: E731
    results = in_threads(wait, wait)
    kinds = sorted(type(result).__name__ for result in results)
    assert kinds == ["MismatchError", "ValueError"], results


TIMELINE = """
    import os, sys, threading
    import farandole
    farandole.init()
    path = sys.argv[1]
    started = threading.Thread(target=farandole.start_timeline, args=[path])
    started.start()  # opening a pipe waits for a reader
    stopped = threading.Thread(target=farandole.stop_timeline)
    stopped.start()
    with open(path) as pipe:
        started.join()
        stopped.join()
"""


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_other_threads_run_while_a_timeline_is_opened_and_closed(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    script = textwrap.dedent(TIMELINE)
    alone = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_COMM_", "PMIX_"))}
    subprocess.run([sys.executable, "-c", script, str(path)], timeout=20, check=True, env=alone)


def test_a_callback_comes_once_here_if_the_work_is_done_and_else_on_a_thread_of_the_library():
    calls = queue.SimpleQueue()

    def reduce(i):
        return farandole.allreduce_async(np.ones(2), name=f"t {i}", op=farandole.Sum)

    def body(rank):
        if rank == 1:
            calls.get(timeout=60)  # rank 0 has asked
            return [float(farandole.synchronize(reduce(i)).sum()) for i in range(2)]
        outcomes, context = queue.SimpleQueue(), basics.current()

        def told(handle):
            total = float(handle.wait().sum())
            with basics.using(context):  # a callback may start works and wait for them
                total += float(farandole.synchronize(reduce(1)).sum())
            outcomes.put((threading.get_ident(), total))

        first = reduce(0)
        first.when_done(lambda: told(first))
        calls.put("asked")
        ident, total = outcomes.get(timeout=60)
        first.when_done(lambda: outcomes.put(threading.get_ident()))
        assert outcomes.get_nowait() == threading.get_ident() != ident and outcomes.empty()
        return total

    assert run_threads(2, body) == [8.0, [4.0, 4.0]]


def test_what_a_callback_raises_is_reported_and_harms_nobody(monkeypatch):
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: reported.append(str(what.exc_value)))

    def body(_):
        for i in range(3):
            handle = farandole.allreduce_async(np.ones(2), name=f"t {i}", op=farandole.Sum)
            handle.when_done(lambda: 1 // 0)
            farandole.synchronize(handle)

    run_threads(2, body)
    assert reported == ["integer division or modulo by zero"] * 6
