"""farandole.stop_requested: a signal to any rank, or to the launcher, stops all ranks after the same step."""

import os
import signal
import threading

import numpy as np
import pytest

import farandole as fl
from farandole import _signals
from ranks import communicate, run_threads, start_forked
from test_launch import PYTHON, start

SIGNALLED_IN = 5  # the step

#: Argument: the rank that gets a signal. Another argument: what is called instead of the loop.
LOOP = f"""
import os, signal, sys
import numpy as np
import farandole as fl

fl.init()
step = 0
while not fl.stop_requested():
    fl.allreduce(np.ones(1), name="loss")
    step += 1
    if step == {SIGNALLED_IN}:
        if sys.argv[1] == str(fl.rank()):
            os.kill(os.getpid(), signal.SIGTERM)
        print("up", flush=True)
assert fl.stop_requested()  # of this rank alone, no other is waited for
fl.barrier()
print("stopped in", step, flush=True)
"""


@pytest.mark.once
@pytest.mark.parametrize("flags", [(), ("--elastic",)])
def test_sigterm_to_a_rank_stops_all_after_the_same_step(flags):
    with start(*flags, "-np", 3, PYTHON, "-c", LOOP, 2) as job:
        out, err = job.communicate(timeout=60)
    stopped = [line for line in out.splitlines() if "stopped" in line]
    assert sorted(stopped) == [f"[{rank}] stopped in {SIGNALLED_IN + 1}" for rank in range(3)], out + err
    assert job.returncode == 0


@pytest.mark.once
@pytest.mark.parametrize("flags", [(), ("--elastic",), pytest.param(("--mpi",), marks=pytest.mark.mpi)])
def test_sigterm_to_the_launcher_stops_all_after_the_same_step_and_gives_them_time(flags):
    with start(*flags, "-np", 2, PYTHON, "-c", LOOP, "none") as job:
        assert [job.stdout.readline()[4:] for _ in range(2)] == ["up\n"] * 2
        job.terminate()
        out, err = job.communicate(timeout=60)
    assert len({line[4:] for line in out.splitlines()}) == 1 and out.count("stopped in") == 2, out
    assert "SIGTERM: asking all ranks to stop, which another signal ends\n" in err
    assert job.returncode == 128 + signal.SIGTERM


def test_what_one_rank_wants_all_are_told_in_the_same_call():
    def body(rank):
        calls = 0
        while not fl.stop_requested(rank == 1 and calls >= 3, signals=()):
            fl.allreduce(np.ones(1))
            calls += 1
        assert all(fl.stop_requested(signals=()) for _ in range(1 + rank))  # waits for nobody
        fl.barrier()
        return calls

    assert run_threads(3, body) == [4] * 3


def test_a_rank_that_has_joined_is_not_waited_for_and_one_that_has_left_is_an_error():
    def body(rank):
        calls = [fl.stop_requested(signals=()) for _ in range(3 + 3 * (rank < 2))]
        fl.join()
        fl.barrier()
        if rank == 2:
            return calls
        with pytest.raises(fl.HorovodInternalError, match=r"rank 2 .*left"):
            for _ in range(3):
                fl.stop_requested(signals=())
        return calls

    assert run_threads(3, body) == [[False] * 6] * 2 + [[False] * 3]


def test_alone_it_comes_at_once_and_again_in_the_next_generation():
    program = (
        "import os, signal, farandole as fl\nfl.init(elastic=True)\n"
        "assert not fl.stop_requested()\n"
        "assert fl.stop_requested(True) and fl.stop_requested()\n"
        "fl.reinit()\nassert fl.stop_requested()\nfl.shutdown()\nfl.init()\nassert not fl.stop_requested()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\nassert fl.stop_requested()\nfl.shutdown()\n"
        "try: fl.stop_requested()\nexcept fl.HorovodInternalError as error: print(error)\n"
    )
    (said,) = communicate(start_forked(1, ["-c", program]))
    assert said.startswith("Farandole has not been initialized")


def test_in_another_than_the_main_thread_it_warns_that_it_sets_no_handler():
    before = signal.getsignal(signal.SIGTERM)

    def body(_rank):
        assert threading.current_thread() is not threading.main_thread()
        fl.stop_requested()

    with pytest.warns(RuntimeWarning, match="its first call is to be on the main thread"):
        run_threads(1, body)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.fixture
def notes():
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR2, signal.SIGINT)}
    seen = []
    one = _signals.SignalNotes(seen.append)
    yield one, seen
    one.close()
    for number, handler in before.items():
        signal.signal(number, handler)


def test_handlers_of_the_program_are_called_too_and_come_back(notes):
    one, seen = notes
    own = []
    signal.signal(signal.SIGUSR2, lambda *_: own.append(1))
    handler = signal.getsignal(signal.SIGUSR2)
    assert one.add([signal.SIGUSR2, signal.SIGINT]) and one.add([signal.SIGUSR2])
    os.kill(os.getpid(), signal.SIGUSR2)
    os.kill(os.getpid(), signal.SIGINT)  # no KeyboardInterrupt
    assert (seen, own) == ([signal.SIGUSR2, signal.SIGINT], [1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # set later
    one.close()
    assert (signal.getsignal(signal.SIGUSR2), signal.getsignal(signal.SIGINT)) == (handler, signal.SIG_IGN)


def test_a_forked_child_ends_as_if_no_handler_were_there(notes):
    one, _ = notes
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    one.add([signal.SIGUSR2])
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGUSR2)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGUSR2
