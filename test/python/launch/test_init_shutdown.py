"""init() and shutdown() that cannot end: they are bounded, Ctrl-C acts, and the process can exit."""

import os
import re
import subprocess
import sys
import textwrap
import time

import pytest

from ranks import mpirun, run_mpi

pytestmark = pytest.mark.mpi

PRELUDE = """
import ctypes, os, signal, sys, time
import numpy as np
import farandole as fl

rank = int(os.environ.get("FARANDOLE_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
began = time.monotonic()

def interrupt_after(seconds):
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)

def start_mpi():
    mpi = ctypes.CDLL("libmpi.so.40", mode=ctypes.RTLD_GLOBAL)
    assert mpi.MPI_Init_thread(None, None, 3, ctypes.byref(ctypes.c_int())) == 0
"""

# Far beyond every bound below: a rank that waits for its peer fails the test.
LATE_S = 25


def script(text):
    return PRELUDE + f"LATE_S = {LATE_S}\n" + textwrap.dedent(text)


def run_to_exit_code_7(text, **variables):
    """Runs two ranks of which one ends the job, in time, with exit code 7. Returns the output."""
    began = time.monotonic()
    done = mpirun(2, ["-c", script(text)], **variables)
    took_s = time.monotonic() - began
    assert done.returncode == 7, f"exit code {done.returncode}:\n{done.stdout}"
    assert took_s < LATE_S - 5, f"{took_s} s:\n{done.stdout}"
    return done.stdout


@pytest.mark.parametrize(("starts", "lacks"), [("None", "all 2 ranks"), ("start_mpi()", "not all 2 ranks")])
def test_init_without_a_peer_times_out_and_the_process_can_exit(starts, lacks):
    output = run_to_exit_code_7(
        f"""
        if rank == 1:
            {starts}
            sys.exit(time.sleep(LATE_S))
        for _ in range(2):
            try:
                fl.init()
            except fl.HorovodInternalError as error:
                print(f"{{type(error).__name__}} after {{time.monotonic() - began:.0f}} s: {{error}}")
        sys.exit(7)
        """,
        FARANDOLE_INIT_TIMEOUT_S="2",
    )
    first, second = re.findall(r"(\w+Error) after (\d+) s: (.*)", output)
    assert first[0] == "OperationTimeoutError" and int(first[1]) < 10, output
    assert lacks in first[2] and "FARANDOLE_INIT_TIMEOUT_S" in first[2], output
    assert ("MPI_Init_thread" in first[2]) == (starts == "None"), output
    assert "earlier init()" in second[2] and int(second[1]) < 10, output


def test_ctrl_c_ends_init_and_the_process_can_exit():
    output = run_to_exit_code_7(
        """
        if rank == 1:
            sys.exit(time.sleep(LATE_S))
        interrupt_after(0.5)
        try:
            fl.init()
        except KeyboardInterrupt:
            print(f"interrupted after {time.monotonic() - began:.0f} s")
        sys.exit(7)
        """
    )
    assert int(re.search(r"interrupted after (\d+) s", output)[1]) < 10, output


def test_init_and_shutdown_go_on_after_ctrl_c_when_they_are_called_again():
    told = run_mpi(
        2,
        script("""
            for call in (fl.init, fl.shutdown):
                if rank == 1:
                    time.sleep(1.5)
                else:
                    interrupt_after(0.3)
                    try:
                        call()
                    except KeyboardInterrupt:
                        tell(("interrupted", fl.is_initialized()))
                call()
                fl.init()  # a second life, once the first has ended
                tell(fl.allreduce(np.ones(1), op=fl.Sum).item())
        """),
    )
    assert told == ["('interrupted', False)\n2.0\n('interrupted', False)\n2.0", "2.0\n2.0"]


def test_ctrl_c_ends_shutdown_every_time_and_the_process_can_exit():
    output = run_to_exit_code_7(
        """
        fl.init()
        if rank == 1:
            sys.exit(time.sleep(LATE_S))
        for _ in range(2):
            interrupt_after(0.3)
            began = time.monotonic()
            try:
                fl.shutdown()
            except KeyboardInterrupt:
                print(f"interrupted after {time.monotonic() - began:.0f} s")
        sys.exit(7)
        """,
        FARANDOLE_SHUTDOWN_TIMEOUT_S="3",
    )
    first, second = re.findall(r"interrupted after (\d+) s", output)
    assert int(first) < 3 and int(second) < 3, output
    assert "ranks still at work may be ended now" in output, output


def launch(launcher, size, text, **variables):
    """Runs a script under ``mpirun`` or ``farandolerun``."""
    if launcher == "mpirun":
        return mpirun(size, ["-c", script(text)], **variables)
    command = [sys.executable, "-m", "farandole.runner", "-np", str(size), sys.executable, "-c"]
    return subprocess.run(
        [*command, script(text)], env=os.environ | variables, timeout=60, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


on_both_launchers = pytest.mark.parametrize(
    "launcher", ["mpirun", pytest.param("farandolerun", marks=pytest.mark.once)]
)
# The others work on for longer than a rank waits for them that ends with an error.
SHORT = {"FARANDOLE_SHUTDOWN_TIMEOUT_S": "1"}
WORK_ON = """
def work_on(step=lambda: None):
    for _ in range(60):
        time.sleep(0.1)
        step()
    print(f"rank {rank} is done", flush=True)
"""


@on_both_launchers
@pytest.mark.parametrize("end", ["sys.exit()", "fl.shutdown()"])
def test_a_rank_that_ends_first_does_not_end_the_others_and_their_process_set(launcher, end):
    text = f"""
        fl.init()
        others = fl.add_process_set([0, 2])
        if rank == 1:
            {end}
        else:
            work_on(lambda: fl.allreduce(np.ones(1), process_set=others))
    """
    done = launch(launcher, 3, WORK_ON + textwrap.dedent(text), **SHORT)
    assert done.returncode == 0, done.stdout
    assert "rank 0 is done" in done.stdout and "rank 2 is done" in done.stdout, done.stdout


@pytest.mark.once
def test_the_threads_of_a_rank_have_names():
    program = """
import pathlib, farandole
farandole.init()
print(*sorted(path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm")), sep="\\n")
farandole.shutdown()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert {"farandole-eng", "farandole-watch"} <= set(done.stdout.split("\n"))


@pytest.mark.once
def test_cycles_leave_descriptors_threads_and_memory_as_they_were():
    run_mpi(
        2,
        """
        import os, torch
        import numpy as np
        import farandole.torch as fl

        def used():
            pages = int(open("/proc/self/statm").read().split()[1])
            return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), pages >> 8

        def cycle():
            fl.init()
            weight = torch.nn.Parameter(torch.ones(1000))
            optimizer = fl.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
            for _ in range(3):
                optimizer.zero_grad()
                (weight * fl.rank()).sum().backward()
                optimizer.step()
            own = fl.add_process_set([0])
            if fl.rank() == 0:
                assert fl.allgather(torch.ones(2), process_set=own).tolist() == [1] * 2
            fl.shutdown()

        for _ in range(20):
            cycle()
        before = used()
        for _ in range(60):
            cycle()
        after = used()
        assert after[:2] == before[:2], (before, after)  # descriptors, threads
        assert after[2] - before[2] < 3, (before, after)  # MiB
        """,
    )
