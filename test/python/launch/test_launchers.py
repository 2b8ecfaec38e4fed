"""One training, the same weights, whatever starts its ranks."""

import os
import re
import shutil
import subprocess
import sys

import pytest

import farandole
from hosts import TwoHosts, or_skip
from ranks import PYTHON_PATH, THIS_DIR, free_port
from slurm import Slurm
from small_training import train

pytestmark = pytest.mark.mpi

SCRIPT = [sys.executable, str(THIS_DIR / "small_training.py")]
CLEAN = {
    name: value for name, value in os.environ.items() if not name.startswith(("OMPI_COMM", "PMIX_", "FARANDOLE_RANK"))
} | {"PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1"}  # fmt: skip
AS_ROOT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_mpi_yield_when_idle": "1",
}  # fmt: skip


@pytest.fixture(scope="module")
def digests():
    """The digest by the number of ranks, as ranks that are threads have it."""
    return {size: farandole.in_process(size).run(train)[0] for size in (2, 3, 4)}


def run(*command, timeout_s=90, **variables):
    return subprocess.run(
        command, env=CLEAN | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=timeout_s, check=False,
    )  # fmt: skip


def check(done, digest, size=2):
    found = re.findall(rf"weights (\w+) of {size} ranks", done.stdout)
    assert done.returncode == 0 and found == [digest] * size, done.stdout


@pytest.mark.parametrize("flags", [[], ["--gloo"], ["--mpi"]])
def test_farandolerun(digests, flags):
    check(run(sys.executable, "-m", "farandole.runner", "-np", "2", *flags, *SCRIPT), digests[2])


@pytest.mark.once
def test_farandolerun_on_more_ranks_than_cores(digests):
    check(run(sys.executable, "-m", "farandole.runner", "-np", "4", *SCRIPT), digests[4], 4)


def test_mpirun(digests):
    check(run("mpirun", "--oversubscribe", "-np", "2", *SCRIPT, **AS_ROOT), digests[2])


@pytest.mark.torch
def test_torchrun(digests):
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *SCRIPT[1:]]
    check(run(*command), digests[2])


@pytest.mark.once
def test_spawn(digests):
    script = "import farandole, small_training\nfarandole.spawn(small_training.train_and_print, nprocs=2)"
    check(run(sys.executable, "-c", script), digests[2])


@pytest.mark.once
@pytest.mark.parametrize("is_ipv6", [False, True])
@pytest.mark.parametrize("is_reversed", [False, True])
def test_two_hosts(digests, tmp_path, is_ipv6, is_reversed):
    with or_skip(TwoHosts(tmp_path, is_ipv6=is_ipv6)) as hosts:
        job = hosts.farandolerun(1, SCRIPT, is_reversed=is_reversed)
        output, _ = job.communicate(timeout=90)
    check(subprocess.CompletedProcess(job.args, job.returncode, output), digests[2])


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    try:
        with Slurm(tmp_path_factory.mktemp("slurm")) as cluster:
            cluster.environment |= CLEAN
            yield cluster
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 2), (2, 3)])
@pytest.mark.once
def test_farandolerun_in_a_slurm_allocation(digests, slurm, nodes, ranks):
    command = [sys.executable, "-m", "farandole.runner", *SCRIPT]
    check(slurm.run(*command, nodes=nodes, tasks=ranks), digests[ranks], ranks)


@pytest.mark.once
def test_ranks_have_the_variables_of_their_own_node(slurm, tmp_path):
    """And not those of the node on which the launcher runs, as are the GPUs that Slurm gave the job there."""
    prolog = tmp_path / "prolog"
    prolog.write_text('#!/bin/sh\necho "export CUDA_VISIBLE_DEVICES=of-$SLURMD_NODENAME"\n')
    prolog.chmod(0o755)
    variables = ["env", f"SLURM_TASK_PROLOG={prolog}", "CUDA_VISIBLE_DEVICES=of-launcher", "SLURMD_NODENAME=launcher"]
    show = ["sh", "-c", "echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES"]
    done = slurm.run(*variables, sys.executable, "-m", "farandole.runner", *show, nodes=2, tasks=2)
    assert "[0] n1 of-n1\n" in done.stdout and "[1] n2 of-n2\n" in done.stdout, done.stdout


@pytest.mark.once
def test_slurms_warning_reaches_the_ranks_once(slurm, tmp_path):
    (tmp_path / "rank.py").write_text("""import os, pathlib, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
pathlib.Path("up." + os.environ["FARANDOLE_RANK"]).touch()
signal.sigwait({signal.SIGUSR1})
print("got it, then", signal.sigtimedwait({signal.SIGUSR1}, 0.5))
""")
    script = f"""cd {tmp_path}
{sys.executable} -m farandole.runner {sys.executable} rank.py &
until [ -e up.0 ] && [ -e up.1 ]; do sleep 0.1; done
scancel --signal=USR1 $SLURM_JOB_ID
wait $!
"""
    done = slurm.run("sh", "-c", script, nodes=2, tasks=2)
    assert "[0] got it, then None\n" in done.stdout and "[1] got it, then None\n" in done.stdout, done.stdout
    assert done.returncode == 0, done.stdout


@pytest.mark.once
def test_slurms_notice_to_a_node_reaches_its_ranks_once_and_the_others_go_on(slurm, tmp_path):
    (tmp_path / "rank.py").write_text("""import os, pathlib, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
with open(os.environ["_FARANDOLE_REPORT"], "w") as file: file.write('{"member": "127.0.0.1:1"}\\n')
pathlib.Path("up." + os.environ["FARANDOLE_RANK"]).touch()
if os.environ["SLURMD_NODENAME"] == "n2":
    signal.sigwait({signal.SIGTERM})
    print("got it, then", signal.sigtimedwait({signal.SIGTERM}, 0.5))
    sys.exit(143)
while not os.path.exists("end"): signal.sigtimedwait({signal.SIGTERM}, 0.1)
""")
    script = f"""cd {tmp_path}
{sys.executable} -m farandole.runner --elastic {sys.executable} rank.py 2>&1 | tee said &
until [ -e up.0 ] && [ -e up.1 ]; do sleep 0.1; done
step=$(squeue --steps --noheader --format="%i %N" | sed -n 's/ n2$//p')
scancel --signal=TERM $step
until grep -q "exit code 143" said; do sleep 0.1; done
touch end
wait
"""
    done = slurm.run("sh", "-c", script, nodes=2, tasks=2)
    assert "n2 gives notice; told to leave: 1\n" in done.stdout, done.stdout
    assert "[1] got it, then None\n" in done.stdout and "1 rank goes on\n" in done.stdout, done.stdout
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 2)])
@pytest.mark.once
def test_srun_without_mpi(digests, slurm, nodes, ranks):
    check(slurm.run("srun", "--mpi=none", *SCRIPT, nodes=nodes, tasks=ranks), digests[ranks], ranks)


@pytest.mark.once
def test_srun_with_a_key_and_ports_as_the_documents_have_it(digests, slurm, tmp_path):
    """And without the bytes of the key there is no job."""
    key = tmp_path / "key"
    words = ["env", f"FARANDOLE_KEY_FILE={key}", "FARANDOLE_PORTS=14000-14999", "srun", "--mpi=none", *SCRIPT]
    make = f'umask 077 && head -c $0 /dev/urandom >{key} && exec "$@"'
    check(slurm.run("sh", "-c", make, "32", *words), digests[2])
    assert f"FARANDOLE_KEY_FILE={key}: it does not hold 32 bytes" in slurm.run("sh", "-c", make, "31", *words).stdout


@pytest.fixture(scope="module")
def tutorial_digest():
    """Of the tutorial's script over gloo, on two ranks."""
    done = run(*tutorial("spawn", "gloo", str(free_port())))
    [digest] = set(re.findall(r"weights (\w+) of 2 ranks", done.stdout)) or {done.stdout}
    return digest


def tutorial(*arguments):
    return [sys.executable, str(THIS_DIR / "tutorial_job.py"), *arguments]


@pytest.mark.once
def test_a_script_of_torch_distributed_is_spawned(tutorial_digest):
    check(run(*tutorial("spawn", "farandole", str(free_port()))), tutorial_digest)


@pytest.mark.once
@pytest.mark.parametrize("launcher", ["torch.distributed.run", "torch.distributed.launch"])
def test_torchs_launchers_start_a_script_of_torch_distributed(tutorial_digest, launcher):
    command = [sys.executable, "-m", launcher, "--nproc_per_node=2", f"--master_port={free_port()}"]
    check(run(*command, *tutorial("env", "farandole")[1:]), tutorial_digest)


@pytest.mark.once
@pytest.mark.parametrize(("nodes", "how"), [(1, "slurm"), (2, "slurm"), (2, "slurm-file")])
def test_srun_starts_a_script_of_torch_distributed(tutorial_digest, slurm, tmp_path, nodes, how):
    place = str(free_port()) if how == "slurm" else str(tmp_path / "ranks")
    command = ["srun", "--mpi=none", *tutorial(how, "farandole", place)]
    check(slurm.run(*command, nodes=nodes, tasks=2), tutorial_digest)


@pytest.mark.once
def test_an_installation_without_mpirun_needs_none(digests, tmp_path):
    """Nothing that belongs to MPI is on the PATH, and the plug-in cannot be loaded."""
    path = os.path.dirname(shutil.which("true") or "/bin/true")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "true").symlink_to(f"{path}/true")
    variables = {"PATH": str(tmp_path / "bin"), "FARANDOLE_MPI_PLUGIN": "/no/such/plugin"}
    check(run(sys.executable, "-m", "farandole.runner", "-np", "2", *SCRIPT, **variables), digests[2])
