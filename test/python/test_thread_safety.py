"""Calls of several threads of one rank that meet: what stays alive, who gets the result."""

import os
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

import farandole
from farandole import _context, _work
from ranks import run_threads


def in_threads(*bodies):
    """What the bodies give, or their errors; they run at once in the caller's context."""
    results = [None] * len(bodies)
    rank = _context.current()

    def run(i, body):
        with _context.using(rank):
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


class Changing(dict):
    """A dictionary into which another thread puts something when somebody begins to look at it."""

    changes = 3

    def __iter__(self):
        iterator = super().__iter__()
        if self.changes > 0:
            self.changes -= 1
            self[Finished(self)] = None
        return iterator


class Finished:
    def __init__(self, held):
        self.held = held

    def release_if_finished(self):
        self.held.pop(self, None)
        return True


def test_a_start_survives_that_another_thread_starts_something():
    def body(rank):
        mine = _context.current()
        mine.in_flight = Changing()
        mine.in_flight[Finished(mine.in_flight)] = None
        return farandole.allreduce(np.ones(2), op=farandole.Sum).tolist()

    assert run_threads(2, body) == [[2.0, 2.0]] * 2


def test_the_memory_of_an_operation_that_another_thread_is_starting_is_kept():
    def body(rank):
        mine = _context.current()
        call = _work.Call(_work.Parameters(_work.BARRIER), None, (), (), (), "memory", lambda: None)
        starting = _work.Handle(mine, call)
        _work.release_finished(mine)
        assert starting in mine.in_flight
        starting.clear()
        assert starting not in mine.in_flight

    run_threads(1, body)


@pytest.mark.parametrize("function", ["allreduce_async", "allgather_async"])
def test_two_threads_that_synchronize_one_handle_get_a_result_and_a_value_error(function):
    def body(rank):
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

    run_threads(2, body)


def test_two_threads_that_synchronize_a_failed_handle_get_errors_that_say_so():
    def body(rank):
        handle = farandole.allreduce_async(np.ones(2 + rank), name="x")
        wait = lambda: farandole.synchronize(handle)  # noqa: E731
        results = in_threads(wait, wait)
        kinds = sorted(type(result).__name__ for result in results)
        assert kinds == ["MismatchError", "ValueError"], results

    run_threads(2, body)


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
