"""Under the mpiexec of other MPI libraries, and srun's PMI, ranks meet by PMI or through an mpi4py communicator."""

import os
import subprocess
import sys

import pytest

import farandole
from small_training import train
from test_launchers import CLEAN, SCRIPT, check, slurm  # noqa: F401 slurm is a fixture

pytestmark = [pytest.mark.mpi, pytest.mark.once]

#: Of each library a folder with bin/mpiexec.hydra and lib, as PyPI's wheels mpich and impi-rt install them.
FOLDERS = {"MPICH": "FARANDOLE_TEST_MPICH", "Intel": "FARANDOLE_TEST_INTEL_MPI"}


@pytest.fixture(scope="module", params=FOLDERS)
def mpiexec(request):
    """Runs so many ranks of a command; stdout holds stderr too."""
    folder = os.environ.get(FOLDERS[request.param])
    if folder is None:
        pytest.skip(f"{FOLDERS[request.param]} is not set")

    def run(size, *command, **variables):
        return subprocess.run(
            [f"{folder}/bin/mpiexec.hydra", "-n", str(size), *command],
            env=CLEAN | {"LD_LIBRARY_PATH": f"{folder}/lib"} | variables, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=90, check=False,
        )  # fmt: skip

    run.name = request.param
    return run


def python(text):
    return sys.executable, "-c", "import farandole as fl, numpy as np\n" + text


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_meet_by_pmi(mpiexec, size):
    check(mpiexec(size, *SCRIPT), farandole.in_process(size).run(train)[0], size)


@pytest.mark.parametrize("is_first", [True, False])
def test_the_program_may_use_mpi_itself(mpiexec, is_first):
    use = "from mpi4py import MPI\nassert MPI.COMM_WORLD.allreduce(1) == 2\n"
    job = "for _ in range(2):\n  fl.init()\n  assert fl.allreduce(np.ones(1), op=fl.Sum)[0] == 2\n  fl.shutdown()\n"
    done = mpiexec(2, *python(use + job if is_first else job + use))
    assert (done.returncode, done.stdout) == (0, "")


def test_ranks_meet_through_a_communicator(mpiexec):
    job = """
import os
from mpi4py import MPI
assert {!r} in MPI.Get_library_version()
del os.environ["PMI_FD"]  # they do not meet by PMI
for _ in range(2):
    fl.init(comm=MPI.COMM_WORLD)
    assert fl.allreduce(np.ones(1), op=fl.Sum)[0] == fl.size() == 3
    fl.shutdown()
"""
    done = mpiexec(3, *python(job.format(mpiexec.name)))
    assert (done.returncode, done.stdout) == (0, "")


def test_a_rank_that_ends_is_named(mpiexec):
    job = """
fl.init()
if fl.rank() == 1:
    raise SystemExit(3)
try:
    fl.allreduce(np.ones(1))
except fl.HorovodInternalError as error:
    print(error, flush=True)
    raise SystemExit(4)
"""
    done = mpiexec(3, *python(job))
    assert done.stdout.count("rank 1 (pid ") == 2, done.stdout
    assert done.returncode == 3 | 4  # of Hydra


def test_a_rank_that_does_not_come_is_waited_for_in_words(mpiexec):
    job = """
import time
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 0:
    time.sleep(4)
else:
    fl.init()
"""
    done = mpiexec(2, *python(job), FARANDOLE_INIT_TIMEOUT_S="1")
    assert "the launcher's barrier waits for a rank that has not called init()" in done.stdout, done.stdout


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 2), (2, 3)])
def test_srun_with_pmi2(slurm, nodes, ranks):  # noqa: F811
    done = slurm.run("srun", "--mpi=pmi2", *SCRIPT, nodes=nodes, tasks=ranks)
    check(done, farandole.in_process(ranks).run(train)[0], ranks)
