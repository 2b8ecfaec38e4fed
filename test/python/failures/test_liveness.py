"""How soon all ranks know that one has died, stands still or cannot be reached; and what is no alarm.

With FARANDOLE_TEST_LONG=1 what is no alarm takes as long as docs/reliability.md promises: all stand still for 30 s, an
import of 20 s, a checkpoint of 60 s, 64 ranks on few cores.
"""

import contextlib
import ctypes
import json
import os
import pathlib
import signal
import sys
import time

import pytest

from hosts import FIRST_ADDRESS, TwoHosts, or_skip
from ranks import descendants, free_port

pytestmark = [pytest.mark.mpi, pytest.mark.once]

STUCK_MPI = pathlib.Path(os.environ.get("FARANDOLE_TEST_BUILD_DIR", "nowhere"), "test/fakes/libfarandole_stuck_mpi.so")

RANKS = 4
#: Bounds of docs/reliability.md, three times: for a machine that others use, too.
DEATH_S, SILENCE_S = 3 * 1.0, 3 * 3.0
#: On every rank, also where a broken connection is seen first. The second: systems that do not tell the signal.
DEATHS = "was killed by signal 9", "has died"
IS_LONG = "FARANDOLE_TEST_LONG" in os.environ

#: Works, in the way of argv[2], until there is an error, which it leaves in a file of the folder argv[1].
RANK = """
import ctypes, json, os, pathlib, sys, time
folder, way = pathlib.Path(sys.argv[1]), sys.argv[2]
log = os.open(folder / "log", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
os.dup2(log, 1), os.dup2(log, 2)
import numpy as np
import farandole as fl

libc, libc_with_gil = ctypes.CDLL(None), ctypes.PyDLL(None)
away_s = float(os.environ.get("AWAY_S", 0))

def leave(name, value):
    (folder / f"{name}.part").write_text(json.dumps(value))
    (folder / f"{name}.part").rename(folder / str(name))

def train():
    import torch
    import farandole.torch as ft
    model = torch.nn.Linear(100, 100)
    optimizer = ft.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    def step():
        optimizer.zero_grad()
        model(torch.ones(1, 100)).sum().backward()
        optimizer.step()
    return step

def reduce():
    fl.allreduce(np.ones(1000), name="x")

def reduce_after(call):
    def step():
        call()
        reduce()
    return step

def away(call):
    def once():
        if fl.rank() == 1 and (folder / "1").exists() and not (folder / "back").exists():  # not before the work begins
            call()
            leave("back", True)
    return reduce_after(once)

def import_slowly():
    loop = f"while time.monotonic() < {time.monotonic() + away_s}: sum(range(9999)), time.sleep(0.01)"
    (folder / "slow.py").write_text("import time" + chr(10) + loop)
    sys.path.insert(0, str(folder))
    import slow

def write_checkpoint():
    end_s = time.monotonic() + away_s
    while time.monotonic() < end_s:
        np.ones(1 << 20).tofile(folder / "checkpoint")
        time.sleep(0.05)

fl.init()
step = {
    "synchronize": lambda: reduce,
    "backward": train,
    "c_call": lambda: reduce_after(lambda: libc.usleep(300_000)),
    "gil": lambda: away(lambda: libc_with_gil.usleep(int(away_s * 1e6))),
    "import": lambda: away(import_slowly),
    "checkpoint": lambda: away(write_checkpoint),
}[way]()
step()
fl.barrier()
leave(fl.rank(), os.getpid())
try:
    while not (folder / "end").exists():
        step()
        time.sleep(0.001)
        (folder / f"{fl.rank()}.steps").write_text("")  # the time of its last step
except fl.HorovodInternalError as error:
    leave(f"{fl.rank()}.error", [time.monotonic(), str(error), list(error.failed_ranks)])
    time.sleep(1)  # the end of a rank is no news while the others hear of the first
"""


def wait_until(is_so, timeout_s, what):
    end_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < end_s, what()
        time.sleep(0.01)


class Job:
    """A context: ranks of two hosts that work; over TCP without a launcher, or under farandolerun, or mpirun."""

    def __init__(self, folder, network, hosts, way="synchronize", size=RANKS, **variables):
        self.folder, self.size = folder, size
        (folder / "log").touch()
        command = [sys.executable, "-c", RANK, str(folder), way]
        if network == "mpi":
            variables |= {"OMPI_MCA_orte_enable_recovery": "1"}
            self._processes = [hosts.start(size // 2, command, **variables)]
        elif network == "farandolerun":
            self._processes = [hosts.farandolerun(size // 2, command, **variables)]
        else:
            variables |= {"FARANDOLE_SIZE": str(size), "FARANDOLE_ADDRESS": f"{FIRST_ADDRESS}:{free_port()}"}
            self._processes = [
                hosts.start_rank(2 * rank // size, command, FARANDOLE_RANK=str(rank), **variables)
                for rank in range(size)
            ]
        self.pids = []

    def __enter__(self):
        files = [self.folder / str(rank) for rank in range(self.size)]
        try:
            wait_until(lambda: all(file.exists() for file in files), 240 if IS_LONG else 60, self.said)
        except BaseException:
            self.__exit__()
            raise
        self.pids = [json.loads(file.read_text()) for file in files]
        return self

    def __exit__(self, *_):
        for pid in self.pids:
            for number in (signal.SIGCONT, signal.SIGKILL):
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    break
        for process in self._processes:
            process.kill()
            process.wait()
            process.stdout.close()  # daemons of mpirun's may have it still

    @contextlib.contextmanager
    def stopped(self):
        """All ranks, and the launcher with what it has started."""
        pids = set(self.pids).union(*(descendants(process.pid) for process in self._processes))
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    def said(self):
        """What has been printed, for a test that fails."""
        return (self.folder / "log").read_text()

    def errors(self):
        """By rank: when, the text, the ranks that are named."""
        found = {rank: self.folder / f"{rank}.error" for rank in range(self.size)}
        return {rank: json.loads(file.read_text()) for rank, file in found.items() if file.exists()}

    def errors_of(self, ranks, timeout_s):
        """Once all these have one."""
        wait_until(lambda: set(ranks) <= self.errors().keys(), timeout_s, lambda: (self.errors(), self.said()))
        return [self.errors()[rank] for rank in ranks]

    def expect_progress(self):
        """Every rank makes one more step, and none has an error."""
        files = [self.folder / f"{rank}.steps" for rank in range(self.size)]
        now_s = time.time()
        wait_until(lambda: all(file.exists() and file.stat().st_mtime > now_s for file in files), 60, self.errors)
        assert not self.errors()


@contextlib.contextmanager
def debugged(pid):
    """As a debugger does it, stops all threads of a process."""
    attach, detach, wait_for_threads = 16, 17, 0x40000000
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    threads = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    for thread in threads:
        if ptrace(attach, thread, None, None) != 0:
            pytest.skip(f"no process can be traced here: {os.strerror(ctypes.get_errno())}")
        os.waitpid(thread, wait_for_threads)
    try:
        yield
    finally:
        for thread in threads:
            ptrace(detach, thread, None, None)


def check_news(job, victim, bound_s, began_s, *words):
    others = [rank for rank in range(RANKS) if rank != victim]
    errors = job.errors_of(others, bound_s + 30)
    took_s = [round(when - began_s, 3) for when, _, _ in errors]
    print("seconds:", took_s)
    for _, text, named in errors:
        assert named == [victim], text
        assert any(word in text for word in words), text
    assert max(took_s) <= bound_s, took_s


@pytest.fixture
def hosts(tmp_path):
    folder = tmp_path / "hosts"
    folder.mkdir()
    with or_skip(TwoHosts(folder)) as played:
        yield played


networks = pytest.mark.parametrize("network", ["tcp", "mpi"])


@pytest.mark.parametrize(("network", "victim"), [("tcp", 0), ("mpi", 0), ("tcp", 1), ("mpi", 2), ("tcp", 3)])
def test_a_death_is_known_to_all(hosts, network, victim, tmp_path):
    with Job(tmp_path, network, hosts) as job:
        began_s = time.monotonic()
        os.kill(job.pids[victim], signal.SIGKILL)
        check_news(job, victim, DEATH_S, began_s, *DEATHS)


@pytest.mark.parametrize("way", ["backward", "c_call"])
def test_a_death_is_known_wherever_a_rank_waits(hosts, way, tmp_path):
    with Job(tmp_path, "tcp", hosts, way) as job:
        began_s = time.monotonic()
        os.kill(job.pids[2], signal.SIGKILL)
        check_news(job, 2, DEATH_S, began_s, *DEATHS)


@pytest.mark.parametrize(("network", "victim"), [("tcp", 0), ("mpi", 0), ("tcp", 2), ("mpi", 3)])
def test_a_rank_that_is_stopped_is_known_to_all(hosts, network, victim, tmp_path):
    with Job(tmp_path, network, hosts) as job:
        began_s = time.monotonic()
        os.kill(job.pids[victim], signal.SIGSTOP)
        check_news(job, victim, SILENCE_S, began_s, "stopped")
        os.kill(job.pids[victim], signal.SIGCONT)
        (_, text, named) = job.errors_of([victim], 30)[0]
        assert named == [victim], text  # it learns why it was given up


@networks
def test_a_cut_link_is_known_on_both_sides(hosts, network, tmp_path):
    with Job(tmp_path, network, hosts) as job:
        began_s = time.monotonic()
        hosts.cut()
        errors = job.errors_of(range(RANKS), SILENCE_S + 30)
        print("seconds:", [round(when - began_s, 3) for when, _, _ in errors])
        for rank, (when, text, named) in enumerate(errors):
            here, there = (0, 2) if rank < 2 else (2, 0)
            assert named == [there], text
            assert f"rank {there} (host played{there // 2 + 1}) cannot be reached from rank {here} (host" in text
            assert when - began_s <= SILENCE_S, text


@networks
def test_without_patience_a_stopped_rank_is_waited_for(hosts, network, tmp_path):
    with Job(tmp_path, network, hosts, FARANDOLE_LIVENESS_TIMEOUT_S="0") as job:
        os.kill(job.pids[2], signal.SIGSTOP)
        time.sleep(5)
        assert not job.errors()
        os.kill(job.pids[2], signal.SIGCONT)
        job.expect_progress()


@pytest.mark.parametrize("network", ["tcp", "mpi", "farandolerun"])
def test_no_alarm_while_all_stand_still(hosts, network, tmp_path):
    with Job(tmp_path, network, hosts) as job:
        with job.stopped():
            time.sleep(30 if IS_LONG else 6)
        job.expect_progress()
        time.sleep(3)
        job.expect_progress()


#: "gil": in C code with the interpreter's lock.
@pytest.mark.parametrize(("way", "long_s"), [("gil", 20), ("import", 20), ("checkpoint", 60)])
def test_no_alarm_but_the_stall_report_while_a_rank_is_away(hosts, way, long_s, tmp_path):
    away_s = long_s if IS_LONG else 6
    with Job(tmp_path, "tcp", hosts, way, AWAY_S=str(away_s), FARANDOLE_STALL_WARNING_S="2") as job:
        back = tmp_path / "back"
        wait_until(lambda: back.exists() or job.errors(), away_s + 30, job.said)
        job.expect_progress()
        assert "stalled for" in job.said()


def test_no_alarm_while_a_debugger_stops_a_rank(hosts, tmp_path):
    with Job(tmp_path, "tcp", hosts) as job:
        with debugged(job.pids[1]):
            time.sleep(6)
            assert not job.errors(), job.errors()
        job.expect_progress()


def test_no_alarm_with_many_ranks_on_few_cores(hosts, tmp_path):
    with Job(tmp_path, "tcp", hosts, size=64 if IS_LONG else 16) as job:
        time.sleep(8)
        job.expect_progress()


#: Two ranks, each on its own host. The engines of those in argv[2], 0 at least, do not come back from MPI.
STUCK = """
import os, pathlib, sys, threading, time
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
stuck = pathlib.Path(sys.argv[1], str(rank))
os.environ["FARANDOLE_TEST_STUCK_MPI"] = str(stuck)
os.environ["FARANDOLE_PLANE_TIMEOUT_S"] = "1" if rank == 0 else "1000"
import numpy as np
import farandole as fl

fl.init()
x = np.ones(1 << 18, np.float32)
fl.allreduce(x, name="x")

def follow():  # in the same allreduce
    while not pathlib.Path(sys.argv[1], "0.stuck").exists():
        time.sleep(0.01)
    stuck.touch()

if rank == 0:
    stuck.touch()
elif "1" in sys.argv[2]:
    threading.Thread(target=follow, daemon=True).start()
try:
    while True:
        handle = fl.allreduce_async(x, name="x")
        while not fl.poll(handle):  # nor is this thread in MPI itself
            time.sleep(0.01)
        fl.synchronize(handle)
except fl.HorovodInternalError as error:
    pathlib.Path(sys.argv[1], f"{rank}.error").write_text(str(error))
time.sleep(60)  # the test ends it before
"""


@pytest.mark.parametrize("stuck", ["0", "01"])
@pytest.mark.skipif(not STUCK_MPI.exists(), reason=f"there is no {STUCK_MPI}")
def test_the_error_of_a_stuck_engine_reaches_another_host_even_one_that_is_stuck(hosts, stuck, tmp_path):
    variables = {"LD_PRELOAD": str(STUCK_MPI)}
    job = hosts.start(1, [sys.executable, "-c", STUCK, str(tmp_path), stuck], **variables)
    errors = [tmp_path / f"{rank}.error" for rank in (0, 1)]
    try:
        wait_until(lambda: all(error.exists() for error in errors), 60, lambda: [e for e in errors if e.exists()])
    finally:
        job.kill()
        job.wait()
        job.stdout.close()
    assert {path.name for path in tmp_path.glob("*.stuck")} == {f"{rank}.stuck" for rank in stuck}
    for error in errors:
        assert "rank 0: the engine has been inside one library call" in error.read_text().replace(" failed", "")


def test_a_job_over_mpi_runs_without_the_sockets_that_nobody_reaches(hosts, tmp_path):
    with Job(tmp_path, "mpi", hosts, FARANDOLE_INTERFACE="lo") as job:
        job.expect_progress()
        wait_until(lambda: job.said().count("is not noticed") == 2, 30, job.said)
        time.sleep(3)
        job.expect_progress()


def test_a_job_over_mpi_runs_without_sockets(hosts, tmp_path):
    with Job(tmp_path, "mpi", hosts, FARANDOLE_INTERFACE="nowhere0") as job:
        job.expect_progress()
        assert job.said().count("ranks of other hosts are not watched") == 1, job.said()
