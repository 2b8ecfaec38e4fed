"""farandolerun over mpirun: which one is used with which libmpi, by made-up installations; and jobs."""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys

import pytest

from farandole.runner import mpirun
from farandole.runner.mpirun import UsageError
from ranks import THIS_DIR
from strangers import Strangers
from test_launch import CLEAN, PRELUDE, PYTHON, RANK, launch, lines_of, start, wait_until_up

pytestmark = pytest.mark.mpi

LIBMPI_4 = mpirun.Found("/no/such/prefix/lib/libmpi.so.40", "4.1.4")
LIBMPI_5 = "lib/libmpi.so.40"


def make_mpirun(prefix, text):
    """Writes an mpirun that says ``text``, and a file where its libmpi would be."""
    path = prefix / "bin" / "mpirun"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\necho '{text}'\n")
    path.chmod(0o755)
    library = prefix / LIBMPI_5
    library.parent.mkdir()
    library.write_text("")
    return str(path)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with folders for a Python environment and for a PATH, and a loader whose answers are given."""
    loads = {"": LIBMPI_4}

    def load(library, environment):
        return loads.get(library, mpirun.Found(error="no such file"))

    monkeypatch.setattr(mpirun, "library_of_ranks", load)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    return tmp_path, loads


def environment_of(folder):
    return {"PATH": f"{folder}/bin:/bin"}


@pytest.mark.parametrize("text, version", [
    ("mpirun (Open MPI) 4.1.4\n\nReport bugs", "4.1.4"),
    ("Open MPI v5.0.11, package: Open MPI user@host", "5.0.11"),
    ("mpirun (Open MPI) 5.1.0a1", "5.1.0a1"),
    ("HYDRA build details:\n Version: 4.2", ""),
])  # fmt: skip
def test_versions_are_read(text, version):
    assert mpirun.version_in(text) == version


def test_an_mpirun_that_matches_what_is_loaded_changes_nothing(machine):
    folder, _ = machine
    path = make_mpirun(folder / "sys", "mpirun (Open MPI) 4.1.4")
    pair = mpirun.find_pair(environment_of(folder / "sys"))
    assert (pair.program, pair.library, pair.differ) == (mpirun.Found(path, "4.1.4"), LIBMPI_4, "")
    assert pair.environment() == {}


def test_the_python_environments_mpirun_comes_first_and_brings_its_library(machine, monkeypatch):
    folder, loads = machine
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    make_mpirun(folder / "sys", "mpirun (Open MPI) 4.1.4")
    make_mpirun(folder / "venv", "mpirun (Open MPI) 5.0.11")
    library = str(folder / "venv" / LIBMPI_5)
    loads[library] = mpirun.Found(library, "5.0.11")
    pair = mpirun.find_pair(environment_of(folder / "sys"))
    assert (pair.program.version, pair.library.path, pair.differ) == ("5.0.11", library, "")
    assert pair.environment() == {
        "FARANDOLE_MPI_LIBRARY": library,
        "LD_LIBRARY_PATH": str(pathlib.Path(library).parent),
    }


def test_an_mpirun_whose_library_cannot_be_loaded_is_said_to_differ(machine):
    folder, _ = machine
    path = make_mpirun(folder / "sys", "mpirun (Open MPI) 5.0.11")
    assert mpirun.find_pair(environment_of(folder / "sys")).differ == (
        f"mpirun is Open MPI 5.0.11 ({path}), but the ranks load Open MPI 4.1.4 (/no/such/prefix/lib/libmpi.so.40)"
    )


def test_a_library_that_was_named_is_kept_and_brings_its_mpirun(machine):
    folder, loads = machine
    make_mpirun(folder / "sys", "mpirun (Open MPI) 4.1.4")
    make_mpirun(folder / "opt", "mpirun (Open MPI) 5.0.11")
    library = str(folder / "opt" / LIBMPI_5)
    loads[library] = mpirun.Found(library, "5.0.11")
    environment = environment_of(folder / "sys") | {"FARANDOLE_MPI_LIBRARY": library}
    pair = mpirun.find_pair(environment)
    assert pair.program.path == str(folder / "opt" / "bin" / "mpirun")
    assert pair.differ == "" and pair.environment() == {}


def test_a_named_library_that_cannot_be_loaded_is_refused(machine):
    folder, _ = machine
    with pytest.raises(UsageError, match='FARANDOLE_MPI_LIBRARY="/x" cannot be loaded: no such file'):
        mpirun.find_pair(environment_of(folder) | {"FARANDOLE_MPI_LIBRARY": "/x"})


def test_another_mpis_mpirun_is_no_mpirun(machine):
    folder, _ = machine
    path = make_mpirun(folder / "sys", "HYDRA build details")
    with pytest.raises(UsageError, match=f"no mpirun of Open MPI was found .{path} is another MPI's.; install one: "):
        mpirun.find_pair(environment_of(folder / "sys"))


def test_an_mpirun_in_a_folder_that_is_a_link_is_used_where_it_is(machine):
    folder, _ = machine
    path = make_mpirun(folder / "root" / "usr", "mpirun (Open MPI) 4.1.4")
    (folder / "root" / "bin").symlink_to("usr/bin")
    pair = mpirun.find_pair({"PATH": str(folder / "root" / "bin")})
    assert pair.program.path == path


def test_this_machines_ranks_load_the_libmpi_that_is_named_here():
    pair = mpirun.find_pair(os.environ)
    assert pair.differ == ""
    script = "import farandole, numpy; farandole.init(); print(open('/proc/self/maps').read())"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMPI_")}
    done = subprocess.run(
        [sys.executable, "-m", "farandole.runner", "--mpi", "-np", "2", sys.executable, "-c", script],
        capture_output=True, text=True, timeout=60, env=environment,
    )  # fmt: skip
    mapped = {line.split()[-1] for line in done.stdout.splitlines() if "/libmpi.so" in line}
    assert mapped == {os.path.realpath(pair.library.path)}


# Jobs that mpirun starts.


@pytest.mark.parametrize("flags", [[], ["--mpi"], ["--mpi", "--tcp"]])
def test_ranks_of_one_host_listen_on_no_network(flags):
    script = (
        PRELUDE
        + """
files = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
mine = {os.readlink(file) for file in files if os.path.islink(file)}  # one was that of listdir
for table in ("tcp", "tcp6"):
    for line in open(f"/proc/self/net/{table}").readlines()[1:]:
        _, local, _, state, *_, inode = line.split()[:10]
        if state == "0A" and f"socket:[{inode}]" in mine and not local.startswith("0100007F:"):
            print("listens on", local)
print("done")
"""
    )
    done = launch("-np", 2, *flags, PYTHON, "-c", script)
    assert lines_of(done.stdout) == ["[0] done", "[1] done"], done.stdout + done.stderr


@pytest.mark.parametrize(
    ("limit", "ranks", "message"),
    [(40, 2, ""), (48, 8, 'farandolerun: "ulimit -n" allows 48 open files, but 8 ranks need 58 here\n')],
)
def test_too_few_open_files_are_reported_at_once(limit, ranks, message):
    command = [PYTHON, "-m", "farandole.runner", "--start-timeout", "600", "--mpi", "-np", str(ranks), "echo", "up"]
    done = subprocess.run(
        ["sh", "-c", f'ulimit -n {limit}; exec "$@"', "sh", *command], env=CLEAN, cwd=THIS_DIR,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stderr == message and done.returncode == (2 if message else 0)
    assert done.stdout.count("up") == (0 if message else ranks)


@pytest.mark.parametrize("network", ["--gloo", "--mpi"])
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_the_signals_of_a_user_reach_all_ranks(network, number):
    script = f"trap 'echo got it; exit 0' {number.name[3:]}; echo up; while sleep 0.1; do :; done"
    with start("-np", 2, network, "sh", "-c", script) as job:
        wait_until_up(job)
        job.send_signal(number)
        out, err = job.communicate(timeout=60)
    assert (lines_of(out), err, job.returncode) == (["[0] got it", "[1] got it"], "", 0)


@pytest.mark.parametrize("network", ["--gloo", "--mpi"])
def test_a_second_ctrl_c_leaves_no_files_of_the_job_and_those_of_others(tmp_path, network):
    """mpirun is killed then, and removes neither its own files nor the ranks' shared memory."""
    script = (
        PRELUDE
        + """
import signal, sys
for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)
maps = {line.split()[-1] for line in open("/proc/self/maps") if "segment" in line}
print(os.environ["TMPDIR"], *[path for path in maps if path.startswith("/dev/shm/")], flush=True)
signal.pause()
"""
    )
    neighbours = tmp_path / f"ompi.{socket.gethostname()}.0" / "pid.1"
    neighbours.mkdir(parents=True)
    with start("-np", 2, network, PYTHON, "-c", script, TMPDIR=str(tmp_path)) as job:
        told = [job.stdout.readline().split()[1:] for _ in range(2)]
        os.killpg(job.pid, signal.SIGINT)
        assert job.stderr.readline() == "farandolerun: SIGINT: ending all ranks\n"
        os.killpg(job.pid, signal.SIGINT)
        job.communicate(timeout=60)
    assert job.returncode == 128 + signal.SIGINT
    segments = {segment for _, *of_rank in told for segment in of_rank}
    assert {folder for folder, *_ in told} == {str(tmp_path)} and (segments or network == "--gloo")
    assert [segment for segment in segments if os.path.exists(segment)] == []
    assert list(tmp_path.rglob("*")) == [neighbours.parent, neighbours]


def test_mpirun_that_starts_nothing_is_reported_with_its_words():
    done = launch("-np", 2, "--mpi-args=--no-such-option", "true")
    assert done.returncode not in (0, 2)
    assert "[mpirun] " in done.stderr and "no-such-option" in done.stderr
    assert done.stderr.splitlines()[-1].endswith("after 0 of 2 ranks had started")


def remote_shell(folder, script):
    """Words for mpirun to reach other hosts by a script instead of ssh: script HOST COMMAND...

    $HOST_TMP is a folder for the host's temporary files: daemons that share one race to create its folders.
    """
    shell = folder / "shell"
    shell.write_text(f'#!/bin/sh\nHOST_TMP=$(mktemp -d "{folder}/XXXXXX")\n{script}\n')
    shell.chmod(0o755)
    is_old = mpirun.find_pair(CLEAN).program.version.startswith("4.")
    if not is_old:
        return f"--prtemca plm_ssh_agent {shell}"
    # Daemons of 4.1 map the topology into a gap they find in their memory; some die of what grows there.
    return f"--mca plm_rsh_agent {shell} --mca rtc_hwloc_vmhole none"


def test_ranks_on_other_hosts_get_the_environment_and_send_their_lines(tmp_path):
    """Hosts that are this machine, reached with an empty environment as over ssh."""
    agent = remote_shell(tmp_path, 'shift; exec env -i HOME="$HOME" TMPDIR="$HOST_TMP" PATH=/usr/bin:/bin sh -c "$*"')
    script = f"echo {RANK} $FARANDOLE_WINDOW $MY_OWN $SSH_MARK; exit {RANK}"
    variables = {"FARANDOLE_WINDOW": "3", "MY_OWN": "a  b", "SSH_MARK": "here"}
    done = launch("-H", "far-a:1,far-b:1", "--mpi-args", agent, "sh", "-c", script, **variables)
    assert lines_of(done.stdout) == ["[0] 0 3 a b", "[1] 1 3 a b"], done.stderr
    assert done.returncode == 1 and "rank 1 failed first" in done.stderr


def test_ranks_that_do_not_start_are_named_in_time(tmp_path):
    agent = remote_shell(tmp_path, "exec sleep 600")
    done = launch("-H", "far:2", "--start-timeout", 1, "--mpi-args", agent, "true")
    assert done.returncode == 1
    message = "2 of 2 ranks did not start within 1 s (--start-timeout): 0, 1"
    assert message in done.stderr, done.stderr


def port_of(process):
    """Where the launcher listens for supervisors."""
    files = []
    for file in pathlib.Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            files.append(os.readlink(file))
    for table in ("tcp", "tcp6"):
        for line in pathlib.Path(f"/proc/{process.pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in files:
                return int(local.rpartition(":")[2], 16)
    return None


@pytest.mark.parametrize("comes", [True, False])
def test_strangers_at_the_launchers_port_delay_neither_start_nor_end(tmp_path, comes):
    """They are there before the ranks are, and stay for as long as they are let."""
    (tmp_path / "wait").touch()
    wait = f"while [ -e {tmp_path}/wait ]; do sleep 0.1; done"
    agent = remote_shell(tmp_path, f'{wait}; shift; exec sh -c "$*"')
    timeout_s = 60 if comes else 5
    with start("-H", "far:2", "--start-timeout", timeout_s, "--mpi-args", agent, "sh", "-c", f"echo {RANK}") as job:
        while (port := port_of(job)) is None:
            assert job.poll() is None
        with Strangers(f"127.0.0.1:{port}", 10_000) as strangers:
            if comes:
                strangers.wait_for(200)
                (tmp_path / "wait").unlink()
            out, err = job.communicate(timeout=60)
            strangers.wait_until_all_are_dropped()
    assert (lines_of(out), job.returncode) == ((["[0] 0", "[1] 1"], 0) if comes else ([], 1)), err
    if not comes:
        said = next(line for line in err.splitlines() if "2 of 2 ranks did not start within 5 s" in line)
        assert "; connections refused: 127.0.0.1:" in said


@pytest.mark.parametrize(("network", "lost"), [("--gloo", 0), ("--mpi", 1)])
def test_a_rank_that_vanishes_is_named(network, lost):
    """Its supervisor is killed, as by a host that fails; then nobody reports how the rank ended.

    mpirun starts one for each rank; without it the host has one.
    """
    script = f"[ {RANK} = 1 ] && kill -9 $PPID; exec sleep 60"
    done = launch("-np", 2, network, "sh", "-c", script)
    assert done.returncode == 1
    assert f"farandolerun: rank {lost} was lost first: {socket.gethostname()} does not" in done.stderr
