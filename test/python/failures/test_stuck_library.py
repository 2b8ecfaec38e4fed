"""A call of MPI that does not return: shutdown(), join() and exit are bounded, and late is harmless."""

import os
import pathlib
import textwrap

import pytest

from ranks import mpirun

BUILD = pathlib.Path(os.environ.get("FARANDOLE_TEST_BUILD_DIR", "nowhere"))
STUCK_MPI = BUILD / "test/fakes/libfarandole_stuck_mpi.so"

pytestmark = [pytest.mark.mpi, pytest.mark.skipif(not STUCK_MPI.exists(), reason=f"there is no {STUCK_MPI}")]

PRELUDE = """
import pathlib, sys, time
import numpy as np
import farandole as fl

fl.init()
stuck = pathlib.Path({path!r})

def await_file(suffix):
    while not pathlib.Path(str(stuck) + suffix).exists():
        time.sleep(0.01)

def print_error(call):
    began = time.monotonic()
    try:
        call()
    except fl.HorovodInternalError as error:
        print(f"{{type(error).__name__}} after {{time.monotonic() - began:.0f}} s: {{error}}")

x = np.ones(1 << 18, np.float32)
if fl.rank() == 1:
    fl.allreduce_async_(x)
    sys.exit(time.sleep(50))  # rank 0 ends the job long before
stuck.touch()
handle = fl.allreduce_async_(x)
await_file(".stuck")
"""


def run(folder, text):
    """Runs two ranks; a call of MPI on rank 0 does not return, and it must exit with code 7."""
    path = str(folder / "stuck")
    done = mpirun(
        2,
        ["-c", PRELUDE.format(path=path) + textwrap.dedent(text)],
        FARANDOLE_SHARED_MEMORY="0",  # so that tensors pass through MPI
        FARANDOLE_SHUTDOWN_TIMEOUT_S="0.5",
        FARANDOLE_TEST_STUCK_MPI=path,
        LD_PRELOAD=str(STUCK_MPI),
    )
    assert done.returncode == 7, f"exit code {done.returncode}:\n{done.stdout}"
    return done.stdout


@pytest.mark.once
def test_shutdown_ends_and_a_late_return_touches_no_tensor(tmp_path):
    output = run(
        tmp_path,
        """
        print_error(fl.shutdown)
        x.fill(5)
        stuck.unlink()
        await_file(".returned")
        time.sleep(0.3)  # for what must not happen
        print("untouched:", bool((x == 5).all()))
        sys.exit(7)
        """,
    )
    assert "OperationTimeoutError after" in output and "inside one library call" in output, output
    assert "untouched: True" in output, output


@pytest.mark.once
def test_join_ends(tmp_path):
    output = run(tmp_path, "print_error(fl.join); sys.exit(7)")
    assert "OperationTimeoutError after" in output and "inside one library call" in output, output


def test_the_process_can_exit(tmp_path):
    run(tmp_path, "sys.exit(7)")
