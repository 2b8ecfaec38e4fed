"""Runs a test's body on N ranks: as threads of this process, or as processes under mpirun.

Threads share the interpreter, so a body must not use torch's global random generator.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Sequence
from typing import Any

from farandole import _core, basics

THIS_DIR = pathlib.Path(__file__).resolve().parent
REPOSITORY = THIS_DIR.parent.parent
#: Of processes that tests start.
PYTHON_PATH = os.pathsep.join(filter(None, [str(THIS_DIR), os.environ.get("PYTHONPATH")]))


class _RankThread(threading.Thread):
    """One rank: opens its context, runs the body, leaves."""

    def __init__(self, context: _core.Context, body: Callable[[int], Any]) -> None:
        super().__init__(daemon=True)
        self._context = context
        self._body = body
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            context = basics.Context(self._context)
            with basics.using(context):
                try:
                    self.result = self._body(context.topology.rank)
                finally:
                    context.close()
        except BaseException as error:
            self.error = error


def run_threads(size: int, body: Callable[[int], Any], timeout_s: float = 60) -> list[Any]:
    """Calls ``body(rank)`` on every rank and gives the results by rank.

    Raises:
        BaseException: The first error, by rank, that is not merely the echo of another's.
        AssertionError: A rank was not done in time.
    """
    threads = [_RankThread(context, body) for context in _core.Context.in_process(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    errors = [thread.error for thread in threads if thread.error is not None]
    for error in sorted(errors, key=_is_echo):
        raise error
    alive = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    assert not alive, f"ranks {alive} of {size} did not finish in {timeout_s} s"
    return [thread.result for thread in threads]


def _is_echo(error: BaseException) -> bool:
    return type(error).__name__ in ("AbortedError", "OperationTimeoutError")


def mpirun(
    size: int, arguments: Sequence[str], timeout_s: float = 60, **variables: str
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
        done = subprocess.run(
            command, env=environment, timeout=timeout_s, text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        # Open MPI 5, now and then, before it starts any rank.
        if "PMIx server's listener thread failed to start" not in done.stdout:
            break
    return done


def run_mpi(size: int, script: str, timeout_s: float = 60, **variables: str) -> list[str]:
    """Runs the text of a script on every rank, where ``tell(value)`` is at hand.

    Returns:
        What each rank told, by rank, one line per call. (Lines that ranks print may be mixed.)
    Raises:
        AssertionError: The job failed; with its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        text = _TELL.format(folder=folder) + textwrap.dedent(script)
        done = mpirun(size, ["-c", text], timeout_s, **variables)
        assert done.returncode == 0, f"exit code {done.returncode}:\n{done.stdout}"
        files = [pathlib.Path(folder, str(rank)) for rank in range(size)]
        return [file.read_text().strip() if file.exists() else "" for file in files]


_TELL = """
def tell(value):
    import os
    with open(os.path.join({folder!r}, os.environ["OMPI_COMM_WORLD_RANK"]), "a") as file:
        print(value, file=file)
"""
