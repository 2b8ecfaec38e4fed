"""Runs a test's body on N ranks: as threads of this process, or as processes, under mpirun or forked.

Threads share the interpreter, so a body must not use torch's global random generator.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from typing import Any

import farandole
import warm_ranks

THIS_DIR = pathlib.Path(__file__).resolve().parent
REPOSITORY = THIS_DIR.parent.parent
#: How long ranks may take: a guard against hangs, on a loaded machine, too. pytest's own (pyproject.toml) is twice it.
GUARD_S = 300
#: Of processes that tests start.
PYTHON_PATH = os.pathsep.join(filter(None, [str(THIS_DIR), os.environ.get("PYTHONPATH")]))


def free_port() -> int:
    """A TCP port of this host that nobody listens at."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def wait_for(found: Callable[[], Any], timeout_s: float = 30) -> Any:
    """Until it says something; that."""
    end_s = time.monotonic() + timeout_s
    while not (said := found()):
        assert time.monotonic() < end_s
        time.sleep(0.02)
    return said


def run_threads(size: int, body: Callable[[int], Any], timeout_s: float = GUARD_S) -> list[Any]:
    """Calls ``body(rank)`` on every rank and gives the results by rank.

    Raises:
        BaseException: The first error, by rank, that is not merely the echo of another's.
        TimeoutError: A rank was not done in time.
    """
    return farandole.in_process(size, timeout_s).run(lambda: body(farandole.rank()))


def on_threads(size: int) -> Callable[[Callable[..., object]], Callable[..., None]]:
    """Decorates a test that runs on every rank and takes its rank first, before fixtures and parameters."""

    def decorate(test: Callable[..., object]) -> Callable[..., None]:
        def run(**given: object) -> None:
            run_threads(size, lambda rank: test(rank, **given))

        _, *others = inspect.signature(test).parameters.values()
        functools.update_wrapper(run, test)
        run.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]  # which pytest reads
        return run

    return decorate


def count_events(function: Callable[[], Any], counts: Callable[[Any, str], bool]) -> int:
    """For how many of Python's profiling events on this thread, while ``function`` runs, ``counts(frame, event)``."""
    count = 0

    def on_event(frame: Any, event: str, _detail: Any) -> None:
        nonlocal count
        count += counts(frame, event)

    sys.setprofile(on_event)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def descendants(pid: int) -> set[int]:
    """And the process itself."""
    lists = pathlib.Path(f"/proc/{pid}/task").glob("*/children")  # each thread's own
    children: list[str] = []
    for one in lists:
        with contextlib.suppress(OSError):  # it has just ended
            children += one.read_text().split()
    return {pid}.union(*(descendants(int(child)) for child in children))


def run_and_leave_nothing(command: Sequence[str], timeout_s: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """As subprocess.run does, but after an error, the test's own time-out too, no descendant is left.

    A launcher that is killed cannot end its ranks, which are in process groups of their own.
    """
    with subprocess.Popen(command, text=True, **options) as process:
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except BaseException:
            for pid in descendants(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def mpirun(
    size: int, arguments: Sequence[str], timeout_s: float = GUARD_S, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs this Python with ``arguments`` under mpirun; stdout holds stderr too."""
    environment = os.environ | variables
    environment |= {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMP_NUM_THREADS": "1",
    }
    paths = [str(THIS_DIR), str(REPOSITORY / "examples"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    command = ["mpirun", "--oversubscribe", "-np", str(size), sys.executable, *arguments]
    for _ in range(3):
        done = run_and_leave_nothing(
            command, timeout_s, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        # Open MPI 5, now and then, before it starts any rank.
        if "PMIx server's listener thread failed to start" not in done.stdout:
            break
    return done


def run_mpi(size: int, script: str, timeout_s: float = GUARD_S, **variables: str) -> list[str]:
    """Runs the text of a script on every rank, where ``tell(value)`` is at hand.

    Returns:
        What each rank told, by rank, one line per call. (Lines that ranks print may be mixed.)
    Raises:
        AssertionError: The job failed; with its output.
    """

    def run(text: str) -> None:
        done = mpirun(size, ["-c", text], timeout_s, **variables)
        assert done.returncode == 0, f"exit code {done.returncode}:\n{done.stdout}"

    return _told(size, script, run)


def run_forked(size: int, script: str, timeout_s: float = GUARD_S, **variables: str) -> list[str]:
    """As run_mpi, on ranks that start_forked starts."""
    return _told(size, script, lambda text: communicate(start_forked(size, ["-c", text], **variables), None, timeout_s))


def _told(size: int, script: str, run: Callable[[str], object]) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        run(_TELL.format(folder=folder) + textwrap.dedent(script))
        files = [pathlib.Path(folder, str(rank)) for rank in range(size)]
        return [file.read_text().strip() if file.exists() else "" for file in files]


_TELL = """
def tell(value):
    import os
    rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["RANK"]
    with open(os.path.join({folder!r}, rank), "a") as file:
        print(value, file=file)
"""
#: Of launchers, which the tests' own environment may have.
_FOREIGN = ("OMPI_", "PMIX_", "PMI_", "SLURM_", "FARANDOLE_RANK", "FARANDOLE_SIZE", "MASTER_", "TORCHELASTIC_")


def environment(**variables: str) -> dict[str, str]:
    """Of a process that no launcher has started."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
    return own | {"PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1"} | variables


def start_forked(size: int, arguments: Sequence[object], **variables: str) -> list[warm_ranks.WarmRank]:
    """Starts processes that have imported torch, told by the variables of env:// where rank 0 is; without MPI."""
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    return [warm_ranks.start(arguments, environment(**variables, **place)) for place in places]


def communicate(ranks: Sequence[Any], codes: Sequence[int] | None = None, timeout_s: float = GUARD_S) -> list[str]:
    """What processes have written by their end, which is with these exit codes, or 0."""
    try:
        outputs = [rank.communicate(timeout=timeout_s)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == (codes or [0] * len(ranks)), "\n".join(outputs)
    return outputs


def stopped_in_an_allreduce(rank: int) -> str:
    """A script whose ranks say with which error they end when `rank` is stopped in an allreduce."""
    return f'''
import os, subprocess
import numpy as np
import farandole as fl
fl.init()
if fl.rank() == {rank}:  # is stopped, sooner or later, in the middle of an allreduce
    subprocess.Popen(["sh", "-c", f"""
        while kill -STOP {{os.getpid()}}; do sleep 3; kill -CONT {{os.getpid()}}; sleep 0.5; done
    """], stderr=subprocess.DEVNULL)
try:
    while True:
        fl.allreduce(np.ones(2_000_000), name="again")
except fl.HorovodInternalError as error:
    print("rank", fl.rank(), error, flush=True)
'''
