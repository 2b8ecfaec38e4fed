"""farandole.spawn: ranks that are processes of multiprocessing, and the rank that failed first."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

import farandole

pytestmark = [pytest.mark.mpi, pytest.mark.once, pytest.mark.usefixtures("no_launcher")]


def total(rank, queue, scale):
    import numpy as np

    farandole.init()
    ours = farandole.allreduce(np.full(2, rank + 1.0), op=farandole.Sum, name="x")
    queue.put((rank, farandole.rank(), farandole.local_size(), float(ours[0]) * scale))


def fail(rank):
    import numpy as np

    farandole.init()
    if rank == 1:
        raise KeyError("broken")
    farandole.allreduce(np.ones(1), name="x")


def leave(rank):
    if rank == 1:
        os._exit(9)
    time.sleep(600)


def wait(rank):
    time.sleep(600)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_ranks_know_each_other_and_get_queues(method):
    queue = multiprocessing.get_context(method).Queue()
    farandole.spawn(total, args=(queue, 10), nprocs=3, start_method=method)
    assert sorted(queue.get(timeout=30) for _ in range(3)) == [(rank, rank, 3, 60.0) for rank in range(3)]


def test_the_rank_that_failed_first_is_named_with_its_traceback():
    """Rank 0 fails because of it, and says so."""
    with pytest.raises(RuntimeError) as raised:
        farandole.spawn(fail, nprocs=2)
    lines = str(raised.value).splitlines()
    assert lines[0].startswith("rank 1 failed first, with exit code 1; pid ")
    assert lines[1].startswith("Traceback") and lines[-1] == "KeyError: 'broken'"


def test_a_rank_that_ends_without_a_word_is_named_and_the_others_are_ended():
    started = farandole.spawn(leave, nprocs=2, join=False)
    with pytest.raises(RuntimeError, match="^rank 1 failed first, with exit code 9$"):
        started.join()
    assert not any(process.is_alive() for process in started.processes)


def test_without_join_the_caller_waits_as_long_as_it_likes():
    started = farandole.spawn(wait, nprocs=2, join=False)
    assert started.join(timeout=0.1) is False
    assert len(set(started.pids())) == 2
    started.processes[0].kill()
    with pytest.raises(RuntimeError, match="^rank 0 failed first, ended by SIGKILL"):
        started.join()


def test_spawn_leaves_no_descriptors_and_no_variables():
    def state():
        return len(os.listdir("/proc/self/fd")), dict(os.environ)

    def start():
        with pytest.raises(RuntimeError):
            farandole.spawn(leave, nprocs=2)

    start()
    before = state()
    start()
    assert state() == before


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_ranks_end_if_their_parent_is_killed_before_they_run(tmp_path, method):
    script = tmp_path / "job.py"
    script.write_text(f"""
import os, pathlib, signal, time
import farandole

def kill(pid):  # in a rank, as the arguments come
    os.kill(pid, signal.SIGKILL)
    stat = pathlib.Path(f"/proc/{{pid}}/stat")
    while stat.exists() and stat.read_text().split()[2] != "Z":
        time.sleep(0.01)

class Deadly:
    def __reduce__(self):
        return kill, (os.getpid(),)

def wait(rank, _):
    print("ran", flush=True)
    time.sleep(30)

if __name__ == "__main__":
    farandole.spawn(wait, (Deadly(),), nprocs=1, start_method="{method}")
""")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=25)  # until none writes
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")


def test_the_start_method_may_be_the_default_of_multiprocessing(monkeypatch):
    """A fork server, whose processes have another parent than who called spawn(), as from Python 3.14 on."""
    forkserver = multiprocessing.get_context("forkserver")
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: forkserver)
    farandole.spawn(print, nprocs=2, start_method=None)


def test_a_rank_cannot_spawn(monkeypatch):
    monkeypatch.setenv("FARANDOLE_RANK", "0")
    with pytest.raises(RuntimeError, match="by a rank of a job"):
        farandole.spawn(wait, nprocs=2)
