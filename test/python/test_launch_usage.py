"""Wrong use of farandolerun: one sentence, exit code 2. And what the flags mean."""

import importlib
import os
import re
import subprocess
import sys

import pytest

from farandole.run import arguments, command_line, hosts, main, mpi
from ranks import REPOSITORY

PAIR = mpi.Pair(
    mpi.Program("/opt/a/bin/mpirun", "4.1.4"),
    mpi.Library("/l", "4.1.4"),
    mpi.Library("/l", "4.1.4"),
)
PAIR_5 = mpi.Pair(
    mpi.Program("/opt/b/bin/mpirun", "5.0.11"), mpi.Library("/l", "5.0.11"), mpi.Library()
)

# What is typed in a folder with a script "x.py" and a hostfile "bad", and the sentence.
WRONG = [
    ([], "the number of ranks is missing: give -np N"),
    (["-np", "2"], "the program to run is missing: farandolerun -np N PROGRAM ..."),
    (["-np", "0", "true"], 'argument -np/--num-proc: "0" is not a whole number of ranks from 1'),
    (["-np", "two", "true"], 'argument -np/--num-proc: "two" is not a whole number of ranks from 1'),
    (["-np", "2", "nowhere"], 'the program "nowhere" was not found'),
    (["-np", "2", "x.py"], 'the program "x.py" cannot be executed; put python before it'),
    (["-np", "2", "--verbos", "true"], "--verbos is not an option; did you mean --verbose?"),
    (["-np", "2", "--gloo", "true"],
     "--gloo of horovodrun is not supported: ranks are started by MPI; leave it out"),
    (["-np", "2", "--cycle-time-ms", "5", "true"],
     "--cycle-time-ms of horovodrun is not supported: there is no cycle; a tensor travels when it is "
     "ready everywhere; leave it out"),
    (["-np", "2", "--min-np", "1", "true"],
     "--min-np of horovodrun is not supported: the number of ranks is fixed for a job here; leave it out"),
    (["-np", "2", "--no-torus-allreduce", "true"],
     "--no-torus-allreduce of horovodrun is not supported: the way over the hosts is not a choice of "
     "the user; leave it out"),
    (["-np", "4", "-H", "a:1,b:2", "true"], "-np 4 ranks do not fit into the 3 slots of the hosts given"),
    (["-H", "a:x", "true"], '-H "a:x": the slots "x" are not a whole number from 1'),
    (["-H", "a:1,,b", "true"], '-H "a:1,,b": "" is not the name of a host'),
    (["-H", "a", "--hostfile", "bad", "true"], "-H and --hostfile both say where ranks go; give one of them"),
    (["--hostfile", "absent", "true"], '--hostfile "absent" cannot be read: No such file or directory'),
    (["--hostfile", "bad", "true"], '--hostfile "bad", line 2: "b four" is not "host slots=N"'),
    (["-np", "2", "--fusion-threshold-mb", "-1", "true"],
     'argument --fusion-threshold-mb: "-1" is not a number of MB from 0'),
    (["-np", "2", "--mpi-args", "--x 'y", "true"],
     "--mpi-args=\"--x 'y\" is not a list of words: no closing quotation"),
    (["-np", "2", "--output-filename", "x.py", "true"], '--output-filename "x.py" cannot be made: File exists'),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "x.py").write_text("print(1)")
    (tmp_path / "bad").write_text("a slots=2  # fine\nb four\n")
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith(("OMPI_", "SLURM_", "PBS_", "LSB_")):
            monkeypatch.delenv(name)
    return tmp_path


@pytest.mark.parametrize(
    "typed, sentence", WRONG, ids=[" ".join(typed) or "nothing" for typed, _ in WRONG]
)
def test_wrong_use_is_one_sentence_and_code_2(folder, monkeypatch, capfd, typed, sentence):
    monkeypatch.setattr(mpi, "find_pair", lambda _: PAIR)
    assert main.main(typed) == 2
    out, err = capfd.readouterr()
    assert (out, err) == ("", f"farandolerun: {sentence}\n")


def test_every_refused_flag_of_horovodrun_is_refused_with_its_reason():
    for flag, reason in arguments.REFUSED.items():
        with pytest.raises(arguments.UsageError, match=f"^{flag} .*{re.escape(reason)}"):
            arguments.parse(["-np", "2", flag, "1", "true"])


def test_a_rank_cannot_launch(folder, monkeypatch, capfd):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert main.main(["-np", "2", "true"]) == 2
    assert capfd.readouterr().err == (
        "farandolerun: this is a rank of a job already; farandolerun cannot be started under mpirun\n"
    )


def test_flags_become_settings():
    flags = (
        "-np 2 --fusion-threshold-mb 64 --stall-check-warning-time-seconds 7.5 --log-level debug "
        "--stall-check-shutdown-time-seconds 30"
    )
    options = arguments.parse(
        [*flags.split(), "--start-timeout", "90", "--mpi", "--disable-cache", "true"]
    )
    assert options.settings == {
        "FARANDOLE_FUSION_THRESHOLD": str(64 << 20),
        "FARANDOLE_STALL_WARNING_S": "7.5",
        "FARANDOLE_STALL_SHUTDOWN_S": "30",
        "FARANDOLE_LOG_LEVEL": "debug",
        "FARANDOLE_INIT_TIMEOUT_S": "90",
    }
    assert options.start_timeout_s == 90


def test_the_programs_own_flags_are_left_alone():
    options = arguments.parse(["-np", "2", "--", "true", "-np", "7", "--verbose", "--gloo"])
    assert options.command == ("true", "-np", "7", "--verbose", "--gloo")
    assert options.np == 2 and not options.verbose


def test_hosts_give_the_number_of_ranks_and_repeated_ones_more_slots(tmp_path):
    assert arguments.parse(["-H", "a:2,b:3", "true"]).np == 5
    file = tmp_path / "hosts"
    file.write_text("# mine\na slots=2\n\nb\nb\n")
    assert hosts.read_hostfile(str(file)) == [("a", 2), ("b", 2)]


def words(typed, pair=PAIR, **environment):
    options = arguments.parse([*typed.split(), "true"])
    return " ".join(command_line.make_command(options, pair, environment))


def test_on_one_machine_nothing_needs_to_be_passed_on(folder):
    command = words("-np 4", MY_OWN="1")
    assert command.startswith("/opt/a/bin/mpirun ") and command.endswith("supervise.py true")
    assert "-np 4 --oversubscribe --bind-to none --mca mpi_yield_when_idle 1" in command
    assert " -x " not in command and "--prefix" not in command


def test_other_hosts_get_the_environment_but_what_belongs_to_a_host(folder):
    passed = {
        "FARANDOLE_WINDOW": "3",
        "HOROVOD_X": "1",
        "PYTHONPATH": "p",
        "PATH": "q",
        "MY_OWN": "1",
    }
    kept = {
        "HOME": "h",
        "HOSTNAME": "n",
        "SSH_AUTH_SOCK": "s",
        "TMPDIR": "t",
        "OMPI_MCA_btl": "tcp",
        "A B": "1",
    }
    command = words("-H a:2,b:2", **passed, **kept)
    named = {word for before, word in zip(command.split(), command.split()[1:]) if before == "-x"}
    assert named == {*passed, command_line.supervise.VARIABLE}
    assert "-np 4 -H a:2,b:2" in command and "--prefix /opt/a" in command
    assert "--oversubscribe" not in command


def test_each_open_mpi_is_told_in_its_own_words(folder):
    flags = "-H a:1 -p 2222 -i key --network-interfaces eth1"
    old, new = words(flags), words(flags, PAIR_5)
    assert (
        "--mca plm_rsh_args -p 2222 -i key --mca btl_tcp_if_include eth1 --mca oob_tcp_if_include eth1"
        in old
    )
    assert (
        "--prtemca plm_ssh_args -p 2222 -i key --mca btl_tcp_if_include eth1 --prtemca prte_if_include eth1"
        in new
    )


def test_the_users_own_words_for_mpirun_come_last_and_replace_ours(folder):
    options = arguments.parse(
        ["-np", "2", "--binding-args=--bind-to core", "--mpi-args=--mca btl self", "true"]
    )
    command = " ".join(
        command_line.make_command(options, PAIR, {"OMPI_MCA_mpi_yield_when_idle": "0"})
    )
    assert "--bind-to none" not in command and "mpi_yield_when_idle" not in command
    assert "--bind-to core --mca btl self " in command


def test_dry_run_prints_a_line_that_runs(tmp_path):
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("OMPI_")
    }

    def run(*command, **options):
        return subprocess.run(
            command, env=environment, timeout=60, capture_output=True, text=True, **options
        )

    launched = run(
        sys.executable, "-m", "farandole.run", "-np", "2", "--dry-run", "sh", "-c", "echo 'a  b'"
    )
    assert launched.returncode == 0 and launched.stderr == ""
    done = run("sh", "-c", launched.stdout)
    assert (done.returncode, done.stdout) == (0, "a  b\na  b\n"), done.stderr


def test_version_and_build_are_told(capfd):
    assert main.main(["--version"]) == 0
    assert capfd.readouterr().out.startswith("farandolerun 0.")
    assert main.main(["--check-build"]) == 0
    said = capfd.readouterr().out
    assert "[X] MPI" in said and "] NCCL" in said and "] CUDA (through host memory)" in said


def test_launching_loads_neither_torch_nor_mpi():
    script = (
        "import sys, farandole.run.main; maps = open('/proc/self/maps').read();"
        "print('torch' in sys.modules, 'libmpi.so' in maps)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False False\n"


def test_both_names_are_the_same_program():
    text = (REPOSITORY / "pyproject.toml").read_text()
    scripts = dict(re.findall(r'^(\w+) = "(farandole\.[\w.]+:\w+)"$', text, re.M))
    assert scripts["farandolerun"] == scripts["horovodrun"]
    for target in scripts.values():
        module, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module(module), function))
