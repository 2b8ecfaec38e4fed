"""How jobs end: the right exit code on every rank, in time, nothing said after success, and nothing left behind."""

import dataclasses
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from ranks import PYTHON_PATH, THIS_DIR, free_port

pytestmark = [pytest.mark.mpi, pytest.mark.once]

SIZE = 3
#: From what ends a job to the end of its last process. The bound is 5 s; machines may be three times as slow.
BOUND_S = 15
#: Of one rank that works on alone, after the last collective.
EVALUATION_S = float(os.environ.get("FARANDOLE_TEST_EVALUATION_S", "8"))
EVALUATION = f"""
if rank == 0:
    until = time.monotonic() + {EVALUATION_S}
    while time.monotonic() < until:
        sum(range(10000)), time.sleep(0.02)
"""

# Every rank notes which shared memory it has, by name; "up" says that all have come so far.
PRELUDE = """
import atexit, os, pathlib, signal, sys, threading, time
import numpy as np
import farandole as fl
fl.init()
rank, folder = fl.rank(), pathlib.Path(os.environ["FARANDOLE_TEST_FOLDER"])
fl.allreduce(np.ones(1000), name="first")
maps = {line.split()[-1] for line in open("/proc/self/maps") if "/dev/shm/" in line}
(folder / f"maps.{rank}").write_text(" ".join(maps))
(folder / f"pid.{rank}").write_text(str(os.getpid()))
fl.barrier()
def wait():
    fl.allreduce(np.ones(1), name="never")
def begin():
    (folder / "begin").touch()
"""


@dataclasses.dataclass
class Ended:
    """How a job ended.

    Attributes:
        codes: Exit codes: the launcher's, or without one those of the ranks.
        took_s: From the file "begin", which a rank made, to the end.
        err: What was written to stderr.
    """

    codes: list[int]
    took_s: float
    err: str


def commands(launcher, program):
    python = [sys.executable, "-c", program]
    if launcher == "farandolerun":
        return [([sys.executable, "-m", "farandole.runner", "-np", str(SIZE), *python], {})]
    if launcher == "mpirun":
        return [(["mpirun", "--oversubscribe", "-np", str(SIZE), *python], {})]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(SIZE)}
    return [
        (python, address | {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(SIZE)})
        for rank in range(SIZE)
    ]


def start(launcher, text, folder):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "FARANDOLE_"))}
    clean |= {
        "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHON_PATH, "TMPDIR": str(folder / "tmp"),
        "FARANDOLE_TEST_FOLDER": str(folder), "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_mpi_yield_when_idle": "1",
    }  # fmt: skip
    (folder / "tmp").mkdir()
    processes = []
    for command, variables in commands(launcher, PRELUDE + text):
        with (folder / f"err.{len(processes)}").open("w") as err:
            processes.append(
                subprocess.Popen(
                    command, env=clean | variables, cwd=THIS_DIR, stderr=err, stdout=subprocess.DEVNULL,
                    stdin=subprocess.DEVNULL, process_group=processes[0].pid if processes else 0,
                )
            )  # fmt: skip
    return processes


def wait_for(path, processes):
    deadline_s = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline_s and any(one.poll() is None for one in processes), path
        time.sleep(0.02)
    return path


def runs(pid):
    """Whether it does, and is more than an entry that its new parent has not removed yet."""
    try:
        return pathlib.Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def finish(processes, folder):
    """Waits for the end and checks that nothing of the job is left."""
    try:
        codes = [one.wait(timeout=90) for one in processes]
        while any(runs((folder / f"pid.{rank}").read_text()) for rank in range(SIZE)):
            assert time.time() < (folder / "begin").stat().st_mtime + BOUND_S, "processes are left"
            time.sleep(0.02)
        took_s = time.time() - (folder / "begin").stat().st_mtime
    finally:
        for one in processes:
            one.kill()
    segments = " ".join((folder / f"maps.{rank}").read_text() for rank in range(SIZE)).split()
    assert [one for one in segments if os.path.exists(one)] == []
    assert list((folder / "tmp").rglob("*")) == []
    err = "".join(path.read_text() for path in sorted(folder.glob("err.*")))
    assert took_s < BOUND_S, f"{took_s} s\n{err}"
    return Ended(codes, took_s, err)


def run(launcher, text, folder):
    return finish(start(launcher, text, folder), folder)


on_all_launchers = pytest.mark.parametrize("launcher", ["farandolerun", "mpirun", "env"])

WELL = {
    "returns": "begin()",
    "shuts_down": "begin(); fl.shutdown()",
    "exits_with_0": "begin(); sys.exit(0)",
    "evaluates_on_one_rank": EVALUATION + "begin()",
    "evaluates_on_one_rank_and_shuts_down": EVALUATION + "begin(); fl.shutdown()",
    "with_work_in_flight": """
handles = [fl.allreduce_async(np.ones(1 << 18), name=str(i)) for i in range(60)]
(folder / f"submitted.{rank}").touch()
while len(list(folder.glob("submitted.*"))) < fl.size():
    pass
begin()
""",
    "with_a_daemon_thread_in_a_collective": (
        "threading.Thread(target=wait, daemon=True).start(); time.sleep(0.3); begin()"
    ),
}


@on_all_launchers
@pytest.mark.parametrize("end", WELL)
def test_success_is_0_everywhere_and_silent(launcher, end, tmp_path):
    ended = run(launcher, WELL[end], tmp_path)
    lines = ended.err.splitlines()
    if end == "with_work_in_flight":  # what another rank had not announced when the first one left has failed
        lines = [line for line in lines if "never synchronized" not in line]
    assert set(ended.codes) == {0} and lines == [], ended


BADLY = {
    "raises": ("begin(); raise ValueError('broken')", 1),
    "exits_with_3": ("begin(); sys.exit(3)", 3),
    "exits_with_4_at_once": ("begin(); os._exit(4)", 4),
    "exits_with_0_at_once": ("begin(); os._exit(0)", None),
    "is_killed": ("begin(); os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    "is_terminated": ("begin(); os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
}


#: Each end under each launcher, and each with others that wait and that compute; but without a launcher nobody ends
#: these, and a process that ends with 0 harms none yet.
WHILE_OTHERS_COMPUTE = [
    ("farandolerun", "raises"), ("mpirun", "exits_with_3"), ("farandolerun", "exits_with_4_at_once"),
    ("mpirun", "is_killed"), ("farandolerun", "is_terminated"),
]  # fmt: skip


@on_all_launchers
@pytest.mark.parametrize("end", BADLY)
def test_a_rank_that_ends_badly_ends_the_job_by_its_code(launcher, end, tmp_path):
    others = "time.sleep(100)" if (launcher, end) in WHILE_OTHERS_COMPUTE else "wait()"
    text, code = BADLY[end]
    ended = run(launcher, f"if rank == 1: {text}\n{others}", tmp_path)
    if launcher == "env":
        assert ended.codes[1] == (code or 0), ended
        assert 0 not in (ended.codes[0], ended.codes[2]), ended
        assert "rank 1" in ended.err, ended
    elif code is None:
        assert ended.codes[0] != 0, ended
    elif launcher == "mpirun" and end == "exits_with_3":
        assert ended.codes[0] in (1, 3), ended  # mpirun's is that of the first process to end: here a race
    else:
        assert ended.codes[0] == (code if code > 0 else 128 - code), ended


# All pairs of two of these four.
@pytest.mark.parametrize(("launcher", "at", "number", "state"), [
    ("farandolerun", "group", signal.SIGINT, "in_a_collective"),
    ("farandolerun", "launcher", signal.SIGTERM, "at_work"),
    ("farandolerun", "launcher", signal.SIGINT, "at_its_end"),
    ("farandolerun", "group", signal.SIGTERM, "at_its_end"),
    ("mpirun", "launcher", signal.SIGTERM, "in_a_collective"),
    ("mpirun", "group", signal.SIGINT, "at_work"),
    ("mpirun", "launcher", signal.SIGINT, "at_its_end"),
    ("env", "group", signal.SIGTERM, "in_a_collective"),
    ("env", "group", signal.SIGINT, "at_work"),
    ("env", "group", signal.SIGTERM, "at_its_end"),
])  # fmt: skip
def test_a_signal_ends_all_ranks(launcher, at, number, state, tmp_path):
    what = {
        "in_a_collective": "if rank == 0: time.sleep(100)\nwait()",
        "at_work": "time.sleep(100)",
        "at_its_end": "if rank == 0: time.sleep(100)",
    }
    processes = start(launcher, what[state], tmp_path)
    for rank in range(SIZE):
        wait_for(tmp_path / f"pid.{rank}", processes)
    time.sleep(0.5)
    (tmp_path / "begin").touch()
    if at == "group":
        os.killpg(processes[0].pid, number)
    else:
        processes[0].send_signal(number)
    ended = finish(processes, tmp_path)
    # mpirun's own is 1.
    assert set(ended.codes) <= ({1} if launcher == "mpirun" else {128 + number, -number}), ended
    assert not re.search(r"Fatal|core dumped|SIGSEGV", ended.err), ended
