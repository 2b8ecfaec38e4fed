"""Wrong use of farandolerun: one message, exit code 2. And what the flags mean."""

import importlib
import os
import re
import shlex
import socket
import subprocess
import sys

import pytest

from farandole.runner import cli, hosts, mpirun, supervisor
from ranks import REPOSITORY

pytestmark = pytest.mark.once

PAIR = mpirun.Pair(mpirun.Found("/opt/a/bin/mpirun", "4.1.4"), mpirun.Found("/l", "4.1.4"))
PAIR_5 = mpirun.Pair(mpirun.Found("/opt/b/bin/mpirun", "5.0.11"), mpirun.Found("/l", "5.0.11"), mpirun.Found())

# What is typed in a folder with a script "x.py" and a hostfile "bad", and the message.
WRONG = [
    ([], "the number of ranks is missing: give -np N"),
    (["-np", "2"], "the program to run is missing: farandolerun -np N PROGRAM ..."),
    (["-np", "0", "true"], 'argument -np/--num-proc: "0" is not a whole number of ranks from 1'),
    (["-np", "two", "true"], 'argument -np/--num-proc: "two" is not a whole number of ranks from 1'),
    (["-np", "2", "nowhere"], 'the program "nowhere" was not found'),
    (["-np", "2", "x.py"], 'the program "x.py" cannot be executed; put python before it'),
    (["-np", "2", "--verbos", "true"], "--verbos is not an option; did you mean --verbose?"),
    (["-np", "2", "--no-gloo", "true"], "--no-gloo is not an option; did you mean --gloo?"),
    (["-np", "2", "--cycle-time-ms", "x", "true"],
     'argument --cycle-time-ms: "x" is not a number of milliseconds from 0'),
    (["-np", "2", "--autotune-gaussian-process-noise", "1.5", "true"],
     'argument --autotune-gaussian-process-noise: "1.5" is not a number from 0 to 1'),
    (["--host-discovery-script", "./fails", "true"],
     '--host-discovery-script "./fails" ended with exit code 3: no such list'),
    (["--host-discovery-script", "./absent", "true"],
     '--host-discovery-script "./absent" cannot be run: No such file or directory'),
    (["-np", "2", "--config-file", "absent.yaml", "true"],
     '--config-file "absent.yaml" cannot be read: No such file or directory'),
    (["-np", "2", "--config-file", "slip.yaml", "true"],
     '--config-file "slip.yaml": --fusion-treshold-mb=3 is not an option; did you mean --fusion-threshold-mb?'),
    (["-np", "2", "--config-file", "section.yaml", "true"],
     '--config-file "section.yaml": "timelines" is not a section; did you mean timeline?'),
    (["-np", "2", "--config-file", "value.yaml", "true"],
     '--config-file "value.yaml": argument --fusion-threshold-mb: "much" is not a number of MB from 0'),
    (["-np", "4", "-H", "a:1,b:2", "true"], "-np 4 ranks do not fit into the 3 slots of the hosts given"),
    (["-H", "a:x", "true"], '-H "a:x": "a:x" is not a host, "HOST:SLOTS" or "HOST slots=SLOTS"'),
    (["-H", "2001:db8::2:4", "true"],
     '-H "2001:db8::2:4": "2001:db8::2:4" is not a host, "HOST:SLOTS" or "HOST slots=SLOTS"; '
     "an IPv6 address stands in brackets"),
    (["-H", "[2001:2]:4", "true"], '-H "[2001:2]:4": "[2001:2]:4" is not a host, "HOST:SLOTS" or "HOST slots=SLOTS"; '
     "an IPv6 address stands in brackets"),
    (["-H", "[2001:db8::2]:4", "--mpi", "true"], "mpirun takes no IPv6 address; give the hosts of --mpi by name"),
    (["-H", ",", "true"], '-H "," names no host'),
    (["-H", "a", "--hostfile", "bad", "true"], "-H and --hostfile both say where ranks go; give one of them"),
    (["--hostfile", "absent", "true"], '--hostfile "absent" cannot be read: No such file or directory'),
    (["--hostfile", "bad", "true"], '--hostfile "bad": "b four" is not a host, "HOST:SLOTS" or "HOST slots=SLOTS"'),
    (["-np", "2", "--fusion-threshold-mb", "-1", "true"],
     'argument --fusion-threshold-mb: "-1" is not a number of MB from 0'),
    (["-np", "2", "--mpi-args", "--x 'y", "true"],
     "--mpi-args=\"--x 'y\" is not a list of words: no closing quotation"),
    (["-np", "2", "--gloo", "--mpi-args=-q", "true"],
     "--mpi-args is for mpirun, which --gloo does without; give one of them"),
    (["-np", "2", "--elastic", "--mpi", "true"],
     "--elastic needs TCP, as MPI ends all ranks with the first; leave --mpi out"),
    (["-np", "2", "--max-np", "2", "--min-np", "3", "true"], "--max-np 2 is less than --min-np 3"),
    (["-np", "4", "--min-np", "1", "--max-np", "2", "true"], "-np 4 is not between --min-np 1 and --max-np 2"),
    (["-np", "2", "--elastic", "--blacklist-cooldown-range", "3", "2", "true"],
     "--blacklist-cooldown-range 3 2: the first is the least"),
    (["-np", "2", "--output-filename", "x.py", "true"], '--output-filename "x.py" cannot be made: Not a directory'),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "x.py").write_text("print(1)")
    (tmp_path / "bad").write_text("a slots=2  # fine\nb four\n")
    (tmp_path / "slip.yaml").write_text("params:\n  fusion_treshold_mb: 3\n")
    (tmp_path / "section.yaml").write_text("timelines:\n  filename: x\n")
    (tmp_path / "value.yaml").write_text("params:\n  fusion_threshold_mb: much\n")
    (tmp_path / "fails").write_text("#!/bin/sh\necho no such list >&2; exit 3\n")
    (tmp_path / "fails").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith(("OMPI_", "SLURM_", "PBS_", "LSB_", "FARANDOLE_NETWORK")):
            monkeypatch.delenv(name)
    return tmp_path


@pytest.mark.parametrize("typed, message", WRONG, ids=[" ".join(typed) or "nothing" for typed, _ in WRONG])
def test_wrong_use_is_one_message_and_code_2(folder, monkeypatch, capfd, typed, message):
    monkeypatch.setattr(mpirun, "find_pair", lambda _: PAIR)
    assert cli.main(typed) == 2
    out, err = capfd.readouterr()
    assert (out, err) == ("", f"farandolerun: {message}\n")


def test_help_has_groups_and_an_example(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0 and "\n  farandolerun -np 4 python train.py " in text
    places = [text.index(f"\n{title}:\n") for title in (*cli._FLAGS, "examples")]
    assert places == sorted(places) and places[0] < text.index("--num-proc") < places[1]


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_RANK", "FARANDOLE_RANK", "TORCHELASTIC_RUN_ID"])
def test_a_rank_cannot_launch(folder, monkeypatch, capfd, variable):
    monkeypatch.setenv(variable, "0")
    assert cli.main(["-np", "2", "true"]) == 2
    assert capfd.readouterr().err == (
        f"farandolerun: this is a rank of a job already ({variable} is set); farandolerun cannot be started by a rank\n"
    )


def test_mpirun_is_used_where_it_is_asked_for_or_a_flag_or_a_scheduler_needs_it(folder, monkeypatch):
    def network(typed, **variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        found = cli.parse([*typed.split(), "true"]).network
        for name in variables:
            monkeypatch.delenv(name)
        return found

    assert network("-np 2") == network("-np 2 --gloo") == network("-np 2 --tcp") == "tcp"
    assert network("-np 2 --mpi") == network("-np 2 --mpi-args=-q") == network("-np 2 --binding-args=-q") == "mpi"
    assert network("-np 2", FARANDOLE_NETWORK="mpi") == network("-np 2", PBS_NODEFILE="f") == "mpi"
    assert network("-np 2 --gloo", FARANDOLE_NETWORK="mpi") == network("-H a:2", PBS_NODEFILE="f") == "tcp"


def test_flags_become_settings():
    flags = (
        "-np 2 --fusion-threshold-mb 64 --stall-check-warning-time-seconds 7.5 --log-level debug "
        "--stall-check-shutdown-time-seconds 30"
    )
    options = cli.parse([*flags.split(), "--start-timeout", "90", "--mpi", "--disable-cache", "true"])
    assert options.settings == {
        "FARANDOLE_FUSION_THRESHOLD": str(64 << 20),
        "FARANDOLE_STALL_WARNING_S": "7.5",
        "FARANDOLE_STALL_SHUTDOWN_S": "30",
        "FARANDOLE_LOG_LEVEL": "debug",
        "FARANDOLE_INIT_TIMEOUT_S": "90",
    }
    assert options.start_timeout_s == 90
    assert options.notes == ()


def test_a_flag_without_a_meaning_is_noted_and_can_be_taken_back():
    typed = ["-np", "2", "--cycle-time-ms", "5", "--mpi-threads-disable", "--torus-allreduce",
             "--no-mpi-threads-disable", "true"]  # fmt: skip
    assert cli.parse(typed).notes == (
        "--cycle-time-ms means nothing here: there is no cycle; a tensor is sent when all ranks are ready",
        "--torus-allreduce means nothing here: allgathers go from rank to rank; NCCL chooses for itself",
    )


CONFIG = """
controller: gloo
params: {fusion_threshold_mb: 32, cycle_time_ms: 10, hierarchical_allreduce: true, hierarchical_allgather: false}
autotune: {enabled: true, log_file: log.txt, gaussian_process_noise: 0.9}
timeline: {filename: t.json, mark_cycles: true}
stall_check: {enabled: false, warning_time_seconds: 120, shutdown_time_seconds: 240}
library_options: {mpi_threads_disable: true, num_nccl_streams: 2, mlsl_bgt_affinity: 1}
logging: {level: info, hide_timestamp: true}
"""


def test_a_configuration_file_stands_for_flags_and_flags_win(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    options = cli.parse(["-np", "2", "--config-file", str(file), "true"])
    assert options.settings == {
        "FARANDOLE_FUSION_THRESHOLD": str(32 << 20), "FARANDOLE_TIMELINE": "t.json",
        "FARANDOLE_TIMELINE_MARK_CYCLES": "1", "FARANDOLE_STALL_CHECK_DISABLE": "1",
        "FARANDOLE_STALL_WARNING_S": "120", "FARANDOLE_STALL_SHUTDOWN_S": "240",
        "FARANDOLE_LOG_LEVEL": "info", "FARANDOLE_AUTOTUNE": "1", "FARANDOLE_AUTOTUNE_LOG": "log.txt",
    }  # fmt: skip
    assert [note.partition(" ")[0] for note in options.notes] == [
        "--cycle-time-ms", "--autotune-gaussian-process-noise", "--mpi-threads-disable", "--num-nccl-streams",
        "--thread-affinity",
    ]  # fmt: skip
    assert options.network == "tcp"
    flags = "--fusion-threshold-mb 1 --stall-check --no-timeline-mark-cycles --no-autotune --mpi"
    options = cli.parse(["-np", "2", "--config-file", str(file), *flags.split(), "true"])
    assert options.settings["FARANDOLE_FUSION_THRESHOLD"] == str(1 << 20)
    undone = {"FARANDOLE_STALL_CHECK_DISABLE", "FARANDOLE_TIMELINE_MARK_CYCLES"}
    assert not undone & options.settings.keys()
    assert options.settings["FARANDOLE_AUTOTUNE"] == "0", "else the variables of the environment would count"
    assert options.network == "mpi"


def test_the_launchers_own_time_limit_follows_the_variable_of_init(monkeypatch):
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "7")
    assert cli.parse(["-np", "2", "true"]).start_timeout_s == 7
    assert cli.parse(["-np", "2", "--start-timeout", "9", "true"]).start_timeout_s == 9
    monkeypatch.setenv("FARANDOLE_INIT_TIMEOUT_S", "8")
    assert cli.parse(["-np", "2", "true"]).start_timeout_s == 8


def test_the_programs_own_flags_are_left_alone():
    options = cli.parse(["-np", "2", "--", "true", "-np", "7", "--verbose", "--gloo"])
    assert options.command == ("true", "-np", "7", "--verbose", "--gloo")
    assert options.np == 2 and not options.verbose


def test_numbers_of_ranks_or_a_script_make_a_job_elastic(folder):
    def found(typed):
        options = cli.parse([*typed.split(), "true"])
        return (options.np, options.min_np, options.most_np, options.hosts) if options.is_elastic else options.notes

    (folder / "script").write_text("#!/bin/sh\necho a:2\n")
    (folder / "script").chmod(0o755)
    script, hosts = "--host-discovery-script ./script", (("a", 2),)
    assert found("-np 2 --elastic") == (2, 1, 2, (("localhost", 2),))
    assert found("--min-num-proc 2 --max-num-proc 3") == (3, 2, 3, (("localhost", 3),))
    assert found(f"-np 4 --min-np 2 {script}") == (4, 2, float("inf"), hosts)
    assert found(f"{script} --max-np 1") == (1, 1, 1, hosts)
    assert found(f"--mpi {script}") == ()
    assert found("-np 2 --reset-limit 3") == (
        "--reset-limit means nothing here: the number of ranks is fixed without --elastic",
    )


def test_hosts_give_the_number_of_ranks_and_repeated_ones_more_slots(tmp_path):
    assert cli.parse(["-H", "a:2,b:3", "true"]).np == 5
    file = tmp_path / "hosts"
    file.write_text("# mine\na slots=2\n\nb\nb\n")
    assert cli.parse_hosts(file.read_text().splitlines(), "") == [("a", 2), ("b", 2)]
    file.write_text("[2001:db8::1] slots=2\n[2001:DB8::0:1]:3\n[fe80::1%eth0]\n[::ffff:10.0.0.1]\n")
    assert cli.parse_hosts(file.read_text().splitlines(), "") == [
        ("2001:db8::1", 5), ("fe80::1%eth0", 1), ("::ffff:10.0.0.1", 1),
    ]  # fmt: skip
    assert cli.parse(["-H", "[2001:db8::1]:2,b:3", "true"]).hosts == (("2001:db8::1", 2), ("b", 3))


def test_a_discovery_script_names_the_hosts_once(tmp_path):
    script = tmp_path / "hosts"
    script.write_text("#!/bin/sh\necho a:2\necho\necho b\n")
    script.chmod(0o755)
    options = cli.parse(["--host-discovery-script", str(script), "--slots-per-host", "3", "true"])
    assert (options.hosts, options.np) == ((("a", 2), ("b", 3)), 5)


def words(typed, pair=PAIR, **environment):
    options = cli.parse([*typed.split(), "true"])
    return " ".join(mpirun.make_command(options, pair, environment))


def test_on_one_machine_nothing_needs_to_be_passed_on(folder):
    command = words("-np 4", MY_OWN="1")
    assert command.startswith("/opt/a/bin/mpirun ") and command.endswith("supervisor.py true")
    assert "-np 4 --oversubscribe --bind-to none --mca mpi_yield_when_idle 1" in command
    assert " -x " not in command and "--prefix" not in command


def test_other_hosts_get_the_environment_but_what_belongs_to_a_host(folder):
    passed = {"FARANDOLE_WINDOW": "3", "HOROVOD_X": "1", "PYTHONPATH": "p", "PATH": "q", "MY_OWN": "1"}
    kept = {"HOME": "h", "HOSTNAME": "n", "SSH_AUTH_SOCK": "s", "TMPDIR": "t", "OMPI_MCA_btl": "tcp"}
    beside = {"A B": "1", "f()": "()", "TWO_LINES": "1\n2"}
    command = words("-H a:2,b:2", **passed, **kept, **beside)
    named = {word for before, word in zip(command.split(), command.split()[1:]) if before == "-x"}
    assert named == {*passed, supervisor.VARIABLE}
    assert "-np 4 -H a:2,b:2" in command and "--prefix /opt/a" in command
    assert "--oversubscribe" not in command
    assert mpirun._find_unusual(passed | kept | beside) == beside


def test_each_open_mpi_gets_its_own_words(folder):
    flags = "-H a:1 -p 2222 -i key --network-interfaces eth1"
    old, new = words(flags), words(flags, PAIR_5)
    seconds = "{0} oob_tcp_keepalive_time 5 {0} oob_tcp_keepalive_intvl 5 {0} oob_tcp_keepalive_probes 6"
    assert seconds.format("--mca") in old and seconds.format("--prtemca") in new
    assert "--mca plm_rsh_args -p 2222 -i key --mca btl_tcp_if_include eth1 --mca oob_tcp_if_include eth1" in old
    assert "--prtemca plm_ssh_args -p 2222 -i key --mca btl_tcp_if_include eth1 --prtemca prte_if_include eth1" in new


def test_the_users_own_words_for_mpirun_come_last_and_replace_ours(folder):
    options = cli.parse(["-np", "2", "--binding-args=--bind-to core", "--mpi-args=--mca btl self", "true"])
    command = " ".join(mpirun.make_command(options, PAIR, {"OMPI_MCA_mpi_yield_when_idle": "0"}))
    assert "--bind-to none" not in command and "mpi_yield_when_idle" not in command
    assert "--bind-to core --mca btl self " in command


def test_tcp_leaves_the_other_networks_out(folder):
    options = cli.parse(["-np", "2", "--tcp", "true"])
    environment = mpirun.make_environment(options, PAIR, {})
    assert environment["NCCL_IB_DISABLE"] == "1"
    assert "--mca pml ob1 --mca btl ^openib," in " ".join(mpirun.make_command(options, PAIR, environment))


def hosts_of(*typed, **environment):
    return hosts.place(cli.parse([*typed, "true"]), {"PATH": os.environ["PATH"]} | environment)


def test_hosts_are_filled_in_their_order_and_this_one_is_one():
    here = socket.gethostname()
    placed = hosts_of("-np", "6", "-H", f"[::1]:1,far-a:2,{here}:1,far-b:9", FARANDOLE_AGENT="env -u X")
    assert [(one.name, [*one.ranks], one.is_here) for one in placed] == [
        ("localhost", [0, 1], True), ("far-a", [2, 3], False), ("far-b", [4, 5], False),
    ]  # fmt: skip
    stub = [sys.executable, "-I", "-S", supervisor.__file__]
    assert placed[0].command == stub and placed[1].command == ["env", "-u", "X", "far-a", *stub]


def test_other_hosts_are_reached_by_ssh_which_asks_nothing(folder):
    ssh = folder / "ssh"
    ssh.write_text("")
    ssh.chmod(0o755)
    (placed,) = hosts_of("-H", "far:1", "-p", "22", "-i", "key", PATH=str(folder))
    assert placed.command[:4] == ["ssh", "-T", "-o", "BatchMode=yes"]
    assert placed.command[-6:-1] == ["-p", "22", "-i", "key", "far"]
    assert hosts_of("-H", "[2001:db8::2]:1", PATH=str(folder))[0].command[-2] == "2001:db8::2"  # as ssh wants it
    assert shlex.split(placed.command[-1]) == [sys.executable, "-I", "-S", supervisor.__file__]
    with pytest.raises(hosts.UsageError, match='"ssh", which starts the ranks on far, was not found'):
        hosts_of("-H", "far:1", PATH="/no/where")


def test_a_slurm_allocation_says_hosts_and_tasks(folder, monkeypatch):
    script = "#!/bin/sh\n[ $3 != gone ] || { echo no $3 >&2; exit 1; }\nprintf 'n1\nn2\nn3\n'\n"
    (folder / "scontrol").write_text(script)
    (folder / "scontrol").chmod(0o755)
    allocation = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "4(x2),1"}
    for name, value in (allocation | {"PATH": f"{folder}:{os.environ['PATH']}"}).items():
        monkeypatch.setenv(name, value)
    options = cli.parse(["true"])
    assert (options.hosts, options.np, options.is_slurm) == ((("n1", 4), ("n2", 4), ("n3", 1)), 9, True)
    assert cli.parse(["-H", "a:2", "true"]).hosts == (("a", 2),)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gone")
    with pytest.raises(hosts.UsageError, match='^SLURM_JOB_NODELIST="gone" cannot be read: no gone$'):
        cli.parse(["true"])


@pytest.mark.mpi
def test_dry_run_prints_a_line_that_runs(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMPI_")}

    def run(*command, **options):
        return subprocess.run(command, env=environment, timeout=60, capture_output=True, text=True, **options)

    launched = run(
        sys.executable, "-m", "farandole.runner", "-np", "2", "--mpi", "--dry-run", "sh", "-c", "echo 'a  b'"
    )
    assert launched.returncode == 0 and launched.stderr == ""
    done = run("sh", "-c", launched.stdout)
    assert (done.returncode, done.stdout) == (0, "a  b\na  b\n"), done.stderr


def test_version_and_build_are_printed(capfd):
    assert cli.main(["--version"]) == 0
    assert capfd.readouterr().out.startswith("farandolerun 0.")
    assert cli.main(["--check-build"]) == 0
    said = capfd.readouterr().out
    assert "[X] MPI" in said and "] NCCL" in said and "] CUDA (through host memory)" in said


def test_launching_loads_neither_torch_nor_mpi():
    script = (
        "import sys, farandole.runner.cli; maps = open('/proc/self/maps').read();"
        "print('torch' in sys.modules, 'libmpi.so' in maps)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


def test_the_console_scripts_are_there():
    text = (REPOSITORY / "pyproject.toml").read_text()
    scripts = dict(re.findall(r'^(\w+) = "(farandole\.[\w.]+:\w+)"$', text, re.M))
    assert {"farandole", "farandolerun", "horovodrun"} <= set(scripts)
    for target in scripts.values():
        module, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module(module), function))
