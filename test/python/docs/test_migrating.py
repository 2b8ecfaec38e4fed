"""docs/horovod.md: its tables of names, flags and variables, against Horovod's lists and what happens here."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

import farandole
from farandole import _horovod
from farandole.runner import cli
from ranks import REPOSITORY

PAGE = (REPOSITORY / "docs" / "horovod.md").read_text()

# The 63 long flags of horovodrun, with a value where they take one.
FLAGS = """--version --num-proc=3 --check-build --disable-cache --start-timeout=9 --network-interfaces=a,b
--network-interface=a --output-filename=dir --verbose --config-file=config.yaml --ssh-port=22
--ssh-identity-file=key --fusion-threshold-mb=1 --cycle-time-ms=1 --cache-capacity=1 --hierarchical-allreduce
--no-hierarchical-allreduce --hierarchical-allgather --no-hierarchical-allgather --torus-allreduce
--no-torus-allreduce --autotune --no-autotune --autotune-log-file=log --autotune-warmup-samples=1
--autotune-steps-per-sample=1 --autotune-bayes-opt-max-samples=1 --autotune-gaussian-process-noise=0.5 --min-np=1
--min-num-proc=1 --max-np=1 --max-num-proc=1 --slots-per-host=3 --elastic-timeout=1 --reset-limit=1
--blacklist-cooldown-range=1,2 --timeline-filename=t.json --timeline-mark-cycles --no-timeline-mark-cycles
--no-stall-check --stall-check --stall-check-warning-time-seconds=1 --stall-check-shutdown-time-seconds=1
--mpi-threads-disable --no-mpi-threads-disable --mpi-args=-v --tcp --binding-args=-v --num-nccl-streams=1
--thread-affinity=0,1 --gloo-timeout-seconds=1 --log-level=INFO --log-with-timestamp --log-without-timestamp
--prefix-output-with-timestamp --log-hide-timestamp --no-log-hide-timestamp --hosts=localhost:2 --hostfile=hosts
--host-discovery-script=./script --gloo --mpi --jsrun""".split()

# The 47 HOROVOD_* variables that its core and launcher read, with a value.
VARIABLES = """FUSION_THRESHOLD=1 CYCLE_TIME=1 CACHE_CAPACITY=1 HIERARCHICAL_ALLREDUCE=1 HIERARCHICAL_ALLGATHER=1
TORUS_ALLREDUCE=1 BATCH_D2D_MEMCOPIES=1 NUM_NCCL_STREAMS=1 ENABLE_ASYNC_COMPLETION=1 DISABLE_GROUP_FUSION=1
ENABLE_XLA_OPS=1 DYNAMIC_PROCESS_SETS=1 ELASTIC=1 TIMELINE=DYNAMIC TIMELINE_MARK_CYCLES=1 AUTOTUNE=1 AUTOTUNE_LOG=x
AUTOTUNE_WARMUP_SAMPLES=1 AUTOTUNE_STEPS_PER_SAMPLE=1 AUTOTUNE_BAYES_OPT_MAX_SAMPLES=1
AUTOTUNE_GAUSSIAN_PROCESS_NOISE=1 STALL_CHECK_DISABLE=true STALL_CHECK_TIME_SECONDS=9 STALL_SHUTDOWN_TIME_SECONDS=9
CONTROLLER=gloo CPU_OPERATIONS=mpi MPI_THREADS_DISABLE=1 ADASUM_MPI_CHUNK_SIZE=1 THREAD_AFFINITY=0 GLOO_IFACE=x
GLOO_TIMEOUT_SECONDS=1 GLOO_RENDEZVOUS_ADDR=x GLOO_RENDEZVOUS_PORT=1 HOSTNAME=x RANK=0 SIZE=1 LOCAL_RANK=0
LOCAL_SIZE=1 CROSS_RANK=0 CROSS_SIZE=1 LOG_LEVEL=warning LOG_HIDE_TIME=1 DISABLE_NVTX_RANGES=1 CCL_CACHE=1
START_TIMEOUT=9 ELASTIC_TIMEOUT=1 SECRET_KEY=x""".split()


# The names of horovod.torch.
NAMES = """elastic Compression DistributedOptimizer SyncBatchNorm HorovodInternalError ProcessSet
global_process_set allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters allreduce
allreduce_async allreduce_ allreduce_async_ grouped_allreduce grouped_allreduce_async grouped_allreduce_
grouped_allreduce_async_ sparse_allreduce_async allgather allgather_async grouped_allgather
grouped_allgather_async broadcast broadcast_async broadcast_ broadcast_async_ alltoall alltoall_async
reducescatter reducescatter_async grouped_reducescatter grouped_reducescatter_async join barrier poll
synchronize init shutdown is_initialized start_timeline stop_timeline size local_size cross_size rank
local_rank cross_rank mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built
ccl_built cuda_built rocm_built add_process_set remove_process_set Average Sum Adasum Min Max
Product""".split()


def table(heading):
    """name -> what is said in the second column of the table below a heading."""
    text = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| ([a-z ]+) \|", text, re.M)
    assert len(rows) == len(dict(rows)), "a name stands twice"
    return dict(rows)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text("timeline: {mark_cycles: true}\n")
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    (tmp_path / "script").write_text("#!/bin/sh\necho localhost:2\n")
    (tmp_path / "script").chmod(0o755)
    monkeypatch.chdir(tmp_path)


def test_the_lists_are_complete():
    assert (len(set(NAMES)), len(set(FLAGS)), len(set(VARIABLES))) == (67, 63, 47)


def test_every_name_is_in_the_table_and_in_the_package():
    text = PAGE.partition("\n## Names\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ((?:`\w+` ?)+) \|", text, re.M)
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(listed) == sorted(NAMES)
    import farandole.torch

    assert [name for name in NAMES if not hasattr(farandole.torch, name)] == []
    assert list(table("Flags")) == [flag.partition("=")[0] for flag in FLAGS]
    assert list(table("Variables")) == [variable.partition("=")[0] for variable in VARIABLES]


# What an honoured flag puts into the command line that --dry-run prints.
EFFECTS = {
    "--num-proc": "-np 3", "--start-timeout": "FARANDOLE_INIT_TIMEOUT_S=9",
    "--network-interfaces": "NCCL_SOCKET_IFNAME=a,b", "--network-interface": "NCCL_SOCKET_IFNAME=a",
    "--config-file": "FARANDOLE_TIMELINE_MARK_CYCLES=1", "--ssh-port": "-p 22", "--ssh-identity-file": "-i key",
    "--fusion-threshold-mb": "FARANDOLE_FUSION_THRESHOLD=1048576",
    "--no-hierarchical-allreduce": "FARANDOLE_HIERARCHICAL_ALLREDUCE=0", "--slots-per-host": "-H one:3",
    "--timeline-filename": "FARANDOLE_TIMELINE=t.json", "--timeline-mark-cycles": "FARANDOLE_TIMELINE_MARK_CYCLES=1",
    "--autotune": "FARANDOLE_AUTOTUNE=1", "--no-autotune": "FARANDOLE_AUTOTUNE=0",
    "--autotune-log-file": "FARANDOLE_AUTOTUNE_LOG=log",
    "--no-stall-check": "FARANDOLE_STALL_CHECK_DISABLE=1",
    "--stall-check-warning-time-seconds": "FARANDOLE_STALL_WARNING_S=1",
    "--stall-check-shutdown-time-seconds": "FARANDOLE_STALL_SHUTDOWN_S=1", "--mpi-args": "--bind-to none -v",
    "--tcp": "NCCL_IB_DISABLE=1", "--binding-args": "-v", "--log-level": "FARANDOLE_LOG_LEVEL=info",
    "--hosts": "-H localhost:2", "--hostfile": "-H localhost:2", "--host-discovery-script": "-H localhost:2",
    "--mpi": "mpirun", "--min-np": "elastic: 1 to 2 ranks", "--min-num-proc": "elastic: 1 to 2 ranks",
    "--max-np": "elastic: 1 to 1 ranks", "--max-num-proc": "elastic: 1 to 1 ranks",
    "--elastic-timeout": "ends after 1 s", "--reset-limit": "again at most 1 times",
    "--blacklist-cooldown-range": "after 1 to 2 s",
}  # fmt: skip
UNDONE = {
    "--stall-check": "--no-stall-check", "--no-timeline-mark-cycles": "--timeline-mark-cycles",
}  # fmt: skip
# Those flags besides which a test needs others than -np 2 --mpi.
BESIDES = {
    "--num-proc": ["--mpi"], "--ssh-port": ["--mpi", "-H", "a,b"], "--ssh-identity-file": ["--mpi", "-H", "a,b"],
    "--slots-per-host": ["--mpi", "-H", "one"], "--mpi": ["-np", "2"],
    "--min-np": ["-np", "2"], "--min-num-proc": ["-np", "2"], "--max-np": ["-np", "1"], "--max-num-proc": ["-np", "1"],
    "--elastic-timeout": ["-np", "2", "--elastic"], "--reset-limit": ["-np", "2", "--elastic"],
    "--blacklist-cooldown-range": ["-np", "2", "--elastic"],
}  # fmt: skip
OF_OUTPUT = {"--version", "--check-build", "--verbose", "--output-filename", "--prefix-output-with-timestamp"}


def command_line(capsys, *flags):
    """What a job's command line would be."""
    assert cli.main(["--dry-run", *flags, "true"]) == 0
    return capsys.readouterr().out


def words_of(flag):
    name, _, value = flag.partition("=")
    return [name, *value.split(",")] if name == "--blacklist-cooldown-range" else [flag]


def flags_said_to_be(*what):
    return [flag for flag in FLAGS if table("Flags")[flag.partition("=")[0]] in what]


@pytest.mark.mpi
@pytest.mark.once
@pytest.mark.parametrize("flag", flags_said_to_be("ignored", "done anyway"))
def test_a_flag_without_an_effect_changes_nothing_and_what_is_ignored_is_named(folder, flag, capsys):
    name = flag.partition("=")[0]
    notes = cli.parse(["-np", "2", *words_of(flag), "true"]).notes
    named = [f"{name} means nothing here: "] if table("Flags")[name] == "ignored" else []
    assert [note[: note.index(": ") + 2] for note in notes] == named
    assert command_line(capsys, "-np", "2", *words_of(flag)) == command_line(capsys, "-np", "2")


@pytest.mark.mpi
@pytest.mark.once
@pytest.mark.parametrize(
    "flag", [flag for flag in flags_said_to_be("honoured") if flag.partition("=")[0] not in OF_OUTPUT]
)
def test_an_honoured_flag_is_in_the_command_line_of_the_job(folder, flag, capsys):
    name = flag.partition("=")[0]
    besides = BESIDES.get(name, ["-np", "2", "--mpi"])
    if name in UNDONE:
        plain = command_line(capsys, *besides)
        assert command_line(capsys, *besides, UNDONE[name]) != plain
        assert command_line(capsys, *besides, UNDONE[name], flag) == plain
    else:
        assert EFFECTS[name] in command_line(capsys, *besides, *words_of(flag))
        assert EFFECTS[name] not in command_line(capsys, *(["-np", "2"] if name == "--num-proc" else []), *besides)


@pytest.mark.mpi
@pytest.mark.once
def test_flags_about_the_output_do_what_the_page_says(folder, capfd):
    flags = ["--verbose", "--output-filename=dir", "--prefix-output-with-timestamp"]
    assert cli.main(["-np", "1", *flags, "echo", "hello"]) == 0
    shown = capfd.readouterr()
    assert re.search(r"^.*\d\d:\d\d:\d\d.* hello$", shown.out, re.M), shown.out
    assert "supervisor.py" in shown.out + shown.err and "echo hello" in shown.out + shown.err
    assert pathlib.Path("dir/rank.0/stdout").read_text().endswith("hello\n")
    assert (cli.main(["--version"]), cli.main(["--check-build"])) == (0, 0)
    assert f"farandolerun {farandole.__version__}" in (told := capfd.readouterr().out)
    assert "Available Controllers" in told


def test_a_variable_does_what_the_page_says():
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_COMM", "PMIX"))}
    environment |= dict(f"HOROVOD_{variable}".split("=") for variable in VARIABLES)
    script = "import farandole; farandole.init(); print(farandole.size())"
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    (line,) = done.stderr.splitlines()
    named = re.findall(r"HOROVOD_(\w+)", line.partition("ignored, without a meaning here: ")[2])
    ignored = [name for name, said in table("Variables").items() if said == "ignored"]
    assert sorted(named) == sorted(ignored)


# Any text is a file, any a switch, and any a network where there is one rank; their effects are tested elsewhere.
TAKE_ANYTHING = {
    "GLOO_IFACE", "TIMELINE", "AUTOTUNE_LOG", "TIMELINE_MARK_CYCLES", "STALL_CHECK_DISABLE", "HIERARCHICAL_ALLREDUCE",
    "AUTOTUNE",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [name for name, said in table("Variables").items() if said == "honoured" and name not in TAKE_ANYTHING]
)
def test_junk_in_an_honoured_variable_is_an_error_that_names_it(name):
    variables = {f"HOROVOD_{name}": "junk"}
    if name in ("RANK", "LOCAL_RANK", "LOCAL_SIZE", "SIZE"):
        variables = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"} | variables
    environment = {one: value for one, value in os.environ.items() if not one.startswith(("OMPI_COMM", "PMIX"))}
    script = "import farandole; farandole.init()"
    done = subprocess.run([sys.executable, "-c", script], env=environment | variables, capture_output=True, text=True)
    assert done.returncode != 0 and f'HOROVOD_{name}="junk"' in done.stderr


@pytest.mark.parametrize(
    ("variables", "ours", "value"),
    [
        ({"HOROVOD_FUSION_THRESHOLD": "1024"}, "FUSION_THRESHOLD", "1024"),
        ({"HOROVOD_FUSION_THRESHOLD": "1024", "FARANDOLE_FUSION_THRESHOLD": "2048"}, "FUSION_THRESHOLD", "2048"),
        ({"HOROVOD_FUSION_THRESHOLD": "512", "FARANDOLE_FUSION_THRESHOLD": ""}, "FUSION_THRESHOLD", "512"),
        ({"HOROVOD_STALL_CHECK_TIME_SECONDS": "60"}, "STALL_WARNING_S", "60"),
        *[({"HOROVOD_STALL_CHECK_DISABLE": one}, "STALL_CHECK_DISABLE", "1") for one in ("1", "2", " 1", "+3", "1x")],
        *[({"HOROVOD_STALL_CHECK_DISABLE": one}, "STALL_CHECK_DISABLE", "0") for one in ("0", "-1", "true", "x1")],
    ],
)
def test_a_variable_of_horovod_is_read_as_horovod_reads_it_where_ours_is_not_set(variables, ours, value, monkeypatch):
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    before = dict(os.environ)
    with _horovod.settings():
        assert os.environ[f"FARANDOLE_{ours}"] == value
    assert {name: text for name, text in os.environ.items() if text} == {
        name: text for name, text in before.items() if text
    }


#: By file, tests and what of Horovod's elastic they show, with docs/horovod.md where it is another thing here.
ELASTIC = {
    "test_elastic": {
        "callbacks_run_after_each_restore_in_their_order":
            "run: func(state, *args, **kwargs); on_reset, reset, register_reset_callbacks",
        "what_was_set_before_the_function_runs_is_what_it_gets":
            "run: sync, then func",
        "a_failed_collective_goes_on_from_the_last_commit_as_if_it_had_not_failed":
            "run: an internal error restores",
        "what_is_said_of_hosts_interrupts_all_ranks_without_a_step_back":
            "run: an interrupt keeps the state; check_host_updates, on_hosts_updated, skip_sync; notification_manager",
        "other_exceptions_and_interrupts_leave_the_function":
            "run: other exceptions leave",
        "what_fails_again_and_again_without_a_commit_is_raised":
            "run: failures without end",
        "a_reset_function_is_called_after_each_restore_and_before_callbacks":
            "run_fn(func, reset)",
        "a_state_of_the_users_own_class":
            "State: a class of the user's",
        "horovods_first_arguments_are_taken":
            "State(bcast_object, get_rank)",
        "all_kinds_of_attributes_are_saved_restored_and_synchronized":
            "ObjectState, TorchState: save, restore, sync, commit",
        "types_can_have_handlers_of_their_own_and_attributes_be_reassigned":
            "TorchState: attributes may be reassigned; registry",
        "the_ranks_share_out_the_whole_data_set":
            "ElasticSampler: len, iter, num_replicas, rank",
        "an_epoch_is_gone_on_with_after_a_commit":
            "ElasticSampler: record_batch, set_epoch, state_dict",
        "a_sampler_goes_where_another_one_stood":
            "ElasticSampler: load_state_dict, remaining_indices",
        "indices_that_are_not_the_next_ones_are_refused":
            "ElasticSampler: record_indices",
        "a_lost_rank_ends_the_function_with_one_sentence":
            "a lost rank of a fixed job",
    },
    "test_reinit": {
        "the_same_optimizer_goes_on_whoever_is_lost_and_whoever_comes":
            "run: ranks and size are new; ElasticSampler: reset with other ranks",
    },
    "test_compat": {
        "modules_have_the_names_that_scripts_import":
            "exceptions and modules",
        "a_mismatch_of_versions_is_an_import_error_that_knows_them":
            "HorovodVersionMismatchError",
    },
    "test_elastic_launch": {
        "hosts_come_and_go_with_the_discovery_script":
            "discovery is polled; max np",
        "a_rank_that_is_lost_is_started_again_as_a_newcomer_after_waits_that_double":
            "cooldown doubles",
        "too_few_ranks_for_too_long_end_the_job_with_the_code_of_the_last_loss":
            "min np, elastic timeout",
        "the_reset_limit_counts_all_restarts_and_the_last_rank_ends_the_job":
            "reset limit",
        "a_supervisor_that_is_killed_takes_its_ranks_along_and_is_started_again":
            "ranks stay on their hosts",
        "ranks_that_are_all_lost_from_outside_start_anew_with_another_key":
            "no old host is left",
        "how_a_rank_was_lost_is_said":
            "a failed worker and its host",
        "a_host_that_gives_notice_leaves_and_gets_no_rank_until_it_is_listed_anew":
            "notice of a host",
    },
}  # fmt: skip


def test_each_row_of_horovods_elastic_has_its_test():
    tests = {file.stem: file.read_text() for file in (REPOSITORY / "test" / "python").rglob("test_*.py")}
    assert [name for file, rows in ELASTIC.items() for name in rows if f"def test_{name}(" not in tests[file]] == []
