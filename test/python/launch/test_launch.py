"""farandolerun runs jobs: lines, failures, signals. Most ranks are plain shells, which start quickly."""

import contextlib
import os
import pty
import re
import select
import shlex
import signal
import socket
import subprocess
import sys

import pytest

from ranks import THIS_DIR

pytestmark = [pytest.mark.mpi, pytest.mark.once]

PYTHON = sys.executable
# Nothing may come in from a rank that runs the tests, nor the permissions it gave to mpirun.
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_"))} | {
    "OMP_NUM_THREADS": "1"
}  # else the launcher says how it sets them
RANK = "${FARANDOLE_RANK:-$OMPI_COMM_WORLD_RANK}"  # with and without mpirun
PRELUDE = "import os, sys, numpy as np, farandole as fl\nfl.init()\nfl.allreduce(np.ones(1))\n"


@contextlib.contextmanager
def start(*arguments, before=(), **variables):
    """A launcher that runs, and is killed at the end; ``before`` are words before it."""
    job = subprocess.Popen(
        [*before, PYTHON, "-m", "farandole.runner", *map(str, arguments)], env=CLEAN | variables, cwd=THIS_DIR,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        yield job
    finally:
        job.kill()


def wait_until_up(job):
    """Both ranks have said so."""
    assert [job.stdout.readline()[4:] for _ in range(2)] == ["up\n"] * 2


def launch(*arguments, stdin="", **variables):
    with start(*arguments, **variables) as job:
        out, err = job.communicate(stdin, timeout=60)
    return subprocess.CompletedProcess(job.args, job.returncode, out, err)


def lines_of(text):
    return sorted(text.splitlines())


CORES = len(os.sched_getaffinity(0))
PATHS = os.pathsep.join(filter(None, ["/no/where", CLEAN.get("PYTHONPATH")]))
SHOW_SETTINGS = "echo $FARANDOLE_FUSION_THRESHOLD $FARANDOLE_STALL_CHECK_DISABLE $HOROVOD_X $PYTHONPATH"
#: Arguments, input and variables; the lines of both streams (None: any), and the exit code.
JOBS = {
    "ranks find each other, each line carries its rank": (
        ["-np", 3, PYTHON, "-c", PRELUDE + "print(fl.rank(), fl.size())"], {},
        ["[0] 0 3", "[1] 1 3", "[2] 2 3"], [], 0,
    ),
    "more ranks than cores": (
        ["-np", 2 * CORES + 1, "sh", "-c", f"echo {RANK}"], {},
        sorted(f"[{rank}] {rank}" for rank in range(2 * CORES + 1)), None, 0,
    ),
    "output keeps its stream, an unfinished line is finished": (
        ["-np", 2, "sh", "-c", "echo out; printf err >&2"], {}, ["[0] out", "[1] out"], ["[0] err", "[1] err"], 0,
    ),
    "input goes to rank 0 and ends there": (["-np", 2, "cat"], {"stdin": "hello\n"}, ["[0] hello"], None, 0),
    "more input than any buffer takes": (
        ["-np", 2, PYTHON, "-S", "-c", "import sys; print(len(sys.stdin.read()))"], {"stdin": "x" * 2_000_000},
        ["[0] 2000000", "[1] 0"], None, 0,
    ),
    "the code of a program that joins no job": (["-np", 2, "sh", "-c", f"exit $((7 * {RANK}))"], {}, [], None, 7),
    "settings and paths reach the ranks": (
        ["--fusion-threshold-mb", "0.5", "--no-stall-check", "-H", "localhost:1", "sh", "-c", SHOW_SETTINGS],
        {"HOROVOD_X": "a b", "PYTHONPATH": PATHS}, [f"[0] 524288 1 a b {PATHS}"], None, 0,
    ),
    "flags that mean nothing are said": (["-np", 2, "--cycle-time-ms", "5", "true"], {}, [], [
        "farandolerun: --cycle-time-ms means nothing here: there is no cycle; a tensor is sent when all ranks are ready"
    ], 0),
}  # fmt: skip


@pytest.mark.parametrize("case", JOBS)
def test_what_a_job_prints(case):
    arguments, given, out, err, code = JOBS[case]
    done = launch(*arguments, **given)
    assert (done.returncode, lines_of(done.stdout)) == (code, out), done.stderr
    assert err is None or lines_of(done.stderr) == err


@pytest.mark.parametrize(("script", "count"), [("", 1), ("import farandole; farandole.init()", 0)])
def test_programs_that_did_not_join_an_elastic_job_are_told_once(script, count):
    done = launch("-np", 2, "--elastic", PYTHON, "-c", script)
    hints = [line for line in done.stderr.splitlines() if line.startswith("farandolerun: no rank has joined the job: ")]
    assert (done.returncode, len(hints)) == (0, count), done.stderr


@pytest.mark.parametrize("path", ["/bin:/usr/bin", None], ids=["bin first", "empty environment"])
def test_a_job_needs_nothing_of_its_environment(path):
    environment = {} if path is None else {"PATH": path}
    if "PYTHONPATH" in CLEAN:  # where this Python finds Farandole
        environment["PYTHONPATH"] = CLEAN["PYTHONPATH"]
    command = [PYTHON, "-m", "farandole.runner", "-np", "2", PYTHON, "-c", PRELUDE + "print(fl.size())"]
    done = subprocess.run(command, env=environment, cwd=THIS_DIR, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert lines_of(done.stdout) == ["[0] 2", "[1] 2"]


def test_long_lines_of_many_ranks_do_not_mix():
    script = "for i in range(200): print(str(i % 10) * 9000)"
    done = launch("-np", 3, PYTHON, "-S", "-c", script)
    pattern = re.compile(r"\[[012]\] (\d)\1{8999}")
    lines = done.stdout.splitlines()
    assert len(lines) == 600 and all(pattern.fullmatch(line) for line in lines)


def test_output_files_hold_what_each_rank_wrote(tmp_path):
    folder = tmp_path / "a" / "b"
    script = f"echo out {RANK}; echo err {RANK} >&2"
    assert launch("-np", 2, "--output-filename", folder, "sh", "-c", script).returncode == 0
    written = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("std*")}
    assert written == {f"rank.{rank}/std{stream}": f"{stream} {rank}\n" for rank in (0, 1) for stream in ("out", "err")}


@pytest.mark.parametrize("ranks, size", [(2, 1_000_000), (1, 5_000_000)])  # of one rank nothing can come between
def test_a_line_longer_than_any_buffer_stays_whole(ranks, size):
    script = f"import sys; sys.stdout.write('x' * {size} + '\\n')"
    done = launch("-np", ranks, PYTHON, "-S", "-c", script)
    assert [len(line) for line in done.stdout.splitlines()] == [size + 4] * ranks


def test_a_line_without_an_end_is_shown_while_it_grows():
    script = "import sys; sys.stdout.write('x' * 3_000_000); sys.stdout.flush(); print(sys.stdin.readline(), end='')"
    with start("-np", 1, PYTHON, "-S", "-c", script) as job:
        assert len(job.stdout.read(2_000_000)) == 2_000_000
        out, _ = job.communicate("end\n", timeout=60)
    assert (job.returncode, out.strip("x")) == (0, "end\n")


def test_stderr_comes_while_a_rank_handles_an_exception():
    """The job goes on after a traceback; its next lines come before the job ends."""
    script = "echo 'Traceback (most recent call last)' >&2; echo next >&2; read line; echo $line >&2"
    with start("-np", 1, "sh", "-c", script) as job:
        assert job.stderr.readline() == "[0] Traceback (most recent call last)\n"
        assert job.stderr.readline() == "[0] next\n"
        _, err = job.communicate("read\n", timeout=60)
    assert (job.returncode, err) == (0, "[0] read\n")


@pytest.mark.parametrize("start_of_rank_1", [
    "os._exit(0)", "time.sleep(1.5); os._exit(0)", "fl.init(); fl.allreduce(np.ones(1)); os._exit(0)",
    "fl.init(); fl.allreduce(np.ones(1)); sys.exit()",
])  # fmt: skip
def test_a_rank_that_leaves_with_0_is_blamed_and_not_those_it_left(start_of_rank_1):
    script = f"""
import os, sys, time, numpy as np, farandole as fl
if os.environ["FARANDOLE_RANK"] == "1": {start_of_rank_1}
fl.init()
for _ in range(2): fl.allreduce(np.ones(1))
"""
    done = launch("-np", 3, "--start-timeout", 5, PYTHON, "-c", script)
    assert done.returncode == 1, done.stderr
    assert "farandolerun: rank 1 failed first: it ended with exit code 0 " in done.stderr, done.stderr
    assert "rank 0 failed" not in done.stderr and "rank 2 failed" not in done.stderr


def test_a_debugger_on_rank_0_can_be_used_from_a_terminal():
    """A prompt has no end of line; what is typed reaches rank 0 alone."""
    script = "import os\nx = 41\nif os.environ['FARANDOLE_RANK'] == '0': breakpoint()\nprint('done', x)"
    command = [PYTHON, "-m", "farandole.runner", "-np", "2", PYTHON, "-c", script]
    child, terminal = pty.fork()
    if child == 0:
        os.execve(command[0], command, CLEAN)
    shown = b""

    def wait_for(text):
        nonlocal shown
        while text not in shown:
            assert select.select([terminal], [], [], 60)[0], shown
            shown += os.read(terminal, 4096)
        shown = shown.partition(text)[2]

    try:
        wait_for(b"[0] (Pdb) ")
        os.write(terminal, b"x = x + 1\n")
        wait_for(b"[0] (Pdb) ")
        os.write(terminal, b"continue\n")
        wait_for(b"[0] done 42")
    finally:
        os.close(terminal)
        os.waitpid(child, 0)


def test_a_file_is_read_from_where_it_stands(tmp_path):
    (tmp_path / "lines").write_text("one\ntwo\n")
    script = "read line; exec " + shlex.join([PYTHON, "-m", "farandole.runner", "-np", "2", "cat"])
    with (tmp_path / "lines").open() as file:
        done = subprocess.run(["sh", "-c", script], stdin=file, env=CLEAN, capture_output=True, timeout=60, check=True)
    assert done.stdout == b"[0] two\n"


def test_the_first_failing_ranks_traceback_can_be_read_in_one_piece():
    broken = PRELUDE + "if fl.rank() == 1: raise KeyError('broken')\nfl.allreduce(np.ones(1), name='x')"
    done = launch("-np", 3, PYTHON, "-c", broken)
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert lines[0] == "farandolerun: rank 1 has failed: KeyError: 'broken'", done.stderr
    of_others = [number for number, line in enumerate(lines) if line.startswith(("[0]", "[2]", "[0,2]"))]
    verdict = next(line for line in lines if "rank 1 failed first, with exit code 1; pid " in line)
    if lines.index("[1] KeyError: 'broken'") > min(of_others):  # mixed: it is shown again
        assert verdict.endswith("; its error once more:")
        again = lines[lines.index(verdict) + 1 :]
        assert all(line.startswith("[1] ") for line in again) and again[-1] == "[1] KeyError: 'broken'"
    assert lines.count(verdict) == 1
    assert not any(line.startswith("[mpirun]") for line in lines)


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("os.kill(os.getpid(), 9)", 137, ", ended by SIGKILL (exit code 137); pid "),
        ("os._exit(7)", 7, ", with exit code 7; pid "),
        ("sys.exit(3)", 3, ", with exit code 3; pid "),
        ("os.kill(os.getpid(), signal.SIGSTOP)", 1, ": it is stopped (SIGSTOP or Ctrl-Z); it has not run for "),
    ],
)
def test_how_a_rank_ends_is_said_with_what_the_others_know_of_it(end, code, said):
    script = (
        PRELUDE
        + f"""
import os, signal
if fl.rank() == 1:
    fl.allreduce(np.ones(1), name="x")
    {end}
while True:
    fl.allreduce(np.ones(1), name="x")
"""
    )
    done = launch("-np", 3, PYTHON, "-c", script)
    assert done.returncode == code
    verdicts = [line for line in done.stderr.splitlines() if line.startswith("farandolerun: rank ")]
    assert verdicts[0].startswith("farandolerun: rank 1 (pid ") and len(verdicts) == 2, done.stderr
    assert verdicts[1].startswith(f"farandolerun: rank 1 failed first{said}"), done.stderr


def test_programs_that_show_their_own_errors_are_told_apart_by_what_the_engine_said():
    script = (
        PRELUDE
        + """
import traceback
try:
    if fl.rank() == 1: raise KeyError("broken")
    fl.allreduce(np.ones(1), name="x")
except Exception:
    traceback.print_exc()
    sys.exit(1)
"""
    )
    done = launch("-np", 3, PYTHON, "-c", script)
    assert done.returncode == 1
    assert "farandolerun: rank 1 failed first, with exit code 1; pid " in done.stderr, done.stderr


@pytest.mark.parametrize(
    "before_end", ["", "import time; time.sleep(rank == 0)", "fl.shutdown()"], ids=["at once", "last", "left"]
)  # fmt: skip
@pytest.mark.parametrize(("code", "said"), [(0, ""), (3, "farandolerun: rank 0 failed first, with exit code 3\n")])
def test_an_error_that_every_rank_has_handled_is_not_told(code, said, before_end):
    """Nor is it the reason of a later end, also of a rank that all others have left by then."""
    script = (
        PRELUDE
        + f"""
rank = fl.rank()
try:
    fl.allgather_object((i for i in "ab") if rank == 1 else 5)
except Exception:
    fl.allreduce(np.ones(1))
    {before_end}
    sys.exit({code} if rank == 0 else 0)
"""
    )
    done = launch("-np", 2, PYTHON, "-c", script)
    assert (done.returncode, done.stderr) == (code, said)


def test_who_cannot_reach_rank_0_is_told_from_those_that_wait_for_it():
    elsewhere = f"[ {RANK} = 0 ] || FARANDOLE_ADDRESS=no.such.host.invalid:1"
    script = f"{elsewhere}; exec {PYTHON} -c 'import farandole; farandole.init()'"
    done = launch("-np", 2, "sh", "-c", script, FARANDOLE_INIT_TIMEOUT_S="2")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("farandolerun: no rank failed first: rank 1 did not reach rank 0 at no.such.host.invalid:1 ")
    assert last.endswith("; exit code 1") and done.returncode == 1


def test_a_hangup_does_not_end_a_job_under_nohup():
    script = "echo up; read line && echo $line; true"
    with start("-np", 2, "sh", "-c", script, before=["nohup"]) as job:
        wait_until_up(job)
        job.send_signal(signal.SIGHUP)
        out, _ = job.communicate("on\n", timeout=60)
    assert job.returncode == 0 and "[0] on\n" in out


def test_a_reader_that_goes_away_ends_the_job():
    with start("-np", 2, "sh", "-c", "while :; do echo x; done") as job:
        job.stdout.readline()
        job.stdout.close()
        assert job.wait(timeout=60) == 128 + signal.SIGPIPE
    assert job.stderr.read() == "farandolerun: stdout cannot be written any more: its reader has gone\n"


def test_a_full_disk_is_one_message_and_exit_code_1(tmp_path):
    command = [PYTHON, "-m", "farandole.runner", "-np", "2", "sh", "-c", "echo x; sleep 0.3; echo y"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, env=CLEAN, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.stderr == "farandolerun: stdout cannot be written any more: No space left on device\n"
    assert done.returncode == 1


def test_threads_are_set_and_said_once():
    cores = len(os.sched_getaffinity(0))
    threads = max(1, cores // 3)
    done = launch("-np", 3, "sh", "-c", "echo $OMP_NUM_THREADS", OMP_NUM_THREADS="")
    assert lines_of(done.stdout) == [f"[{rank}] {threads}" for rank in range(3)]
    assert done.stderr == (
        f"farandolerun: OMP_NUM_THREADS={threads} on each of 3 ranks; set it to choose another number\n"
    )
    assert launch("-np", 3, "--tcp", "sh", "-c", "echo $OMP_NUM_THREADS").stderr == ""


def agent(folder, script):
    """A program for FARANDOLE_AGENT that runs a command on another host, which is this one: agent HOST COMMAND..."""
    path = folder / "agent"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return {"FARANDOLE_AGENT": str(path)}


ELSEWHERE = 'host=$1; shift; exec env -i HOST_MARK="$host" HOME="$HOME" PATH=/usr/bin:/bin "$@"'


def test_ranks_on_other_hosts_get_the_environment_without_mpirun(tmp_path):
    script = f"echo {RANK} $HOST_MARK $FARANDOLE_WINDOW $MY_OWN $SSH_MARK; exit {RANK}"
    variables = {"FARANDOLE_WINDOW": "3", "MY_OWN": "a  \n b", "SSH_MARK": "here"}
    done = launch("-H", "far-a:1,far-b:1", "sh", "-c", script, **variables, **agent(tmp_path, ELSEWHERE))
    assert lines_of(done.stdout) == ["[0] 0 far-a 3 a b", "[1] 1 far-b 3 a b"], done.stderr
    assert done.returncode == 1 and "rank 1 failed first" in done.stderr


def test_variables_with_unusual_names_reach_other_hosts_too(tmp_path):
    unusual = {"my-own.name": "a  b\nc", "f()": "\xe4"}
    done = launch("-H", "far:1", "printenv", *unusual, **unusual, **agent(tmp_path, ELSEWHERE))
    assert done.stdout == "[0] a  b\n[0] c\n[0] \xe4\n", done.stderr


def test_threads_are_said_of_the_first_host_that_shares_its_cores(tmp_path):
    done = launch("-H", "localhost:1,far:2", "true", OMP_NUM_THREADS="", **agent(tmp_path, ELSEWHERE))
    where = f"on each of 2 ranks of {socket.gethostname()}; set it to choose another number"
    assert done.stderr == f"farandolerun: OMP_NUM_THREADS={max(1, CORES // 2)} {where}\n"


def test_threads_of_an_elastic_job_are_said_of_all_that_there_may_be():
    done = launch("-H", "localhost:2", "-np", 1, "--elastic", "true", OMP_NUM_THREADS="")
    where = f"on each of 2 ranks that {socket.gethostname()} has room for; set it to choose another number"
    assert done.stderr == f"farandolerun: OMP_NUM_THREADS={max(1, CORES // 2)} {where}\n"


DIFFERS = PRELUDE + """
try:
    fl.allreduce(np.ones(2 + fl.rank()), name="x")
except fl.MismatchError as error:
    raise RuntimeError("in a step") from error
"""


@pytest.mark.parametrize("full", ["", "1"])
def test_a_traceback_shows_the_programs_frames_alone_unless_all_are_asked_for(full):
    done = launch("-np", 2, PYTHON, "-c", DIFFERS, FARANDOLE_FULL_TRACEBACK=full)
    assert done.returncode == 1
    assert ("ops.py" in done.stderr) == bool(full), done.stderr
    marks = re.findall(r"\[([\d,-]+)\] RuntimeError: in a step", done.stderr)
    assert "".join(sorted(set("".join(marks)) - {"-", ","})) == "01"  # "0-1", unless one came late
    assert "direct cause of the following" in done.stderr and "MismatchError: allreduce" in done.stderr


_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK")
SHOW_TORCHRUNS = f"echo {' '.join(f'${name}' for name in _OF_TORCHRUN)} $MASTER_ADDR:$MASTER_PORT"


def test_ranks_have_the_variables_of_torchrun(tmp_path):
    done = launch("-H", "localhost:1,far:2", "sh", "-c", SHOW_TORCHRUNS, RANK="7", **agent(tmp_path, ELSEWHERE))
    places, masters = zip(*(line.rsplit(" ", 1) for line in lines_of(done.stdout)))
    assert places == ("[0] 0 3 0 1 0 0", "[1] 1 3 0 2 1 1", "[2] 2 3 1 2 1 1"), done.stderr
    assert len(set(masters)) == 1 and re.fullmatch(r"\S+:\d+", masters[0])


def test_ranks_keep_the_users_own_place_of_torchs_store():
    done = launch("-np", 1, "sh", "-c", SHOW_TORCHRUNS, MASTER_ADDR="own", MASTER_PORT="77")
    assert done.stdout == "[0] 0 1 0 1 0 0 own:77\n", done.stderr
    done = launch("-np", 1, "sh", "-c", SHOW_TORCHRUNS, MASTER_ADDR="own")  # of a cluster's profile
    assert re.fullmatch(r"\[0\] 0 1 0 1 0 0 127\.0\.0\.1:\d+\n", done.stdout), done.stderr


def test_ranks_of_an_elastic_job_whose_numbers_change_have_none_of_torchruns():
    assert launch("-np", 2, "--elastic", "sh", "-c", SHOW_TORCHRUNS).stdout == "[0] :\n[1] :\n"


def test_the_port_of_torchs_store_is_kept_for_it():
    """Whoever asks the kernel for a port does not get it, and rank 0 can listen there."""
    script = """
import os, socket
port = int(os.environ["MASTER_PORT"])
with socket.socket() as stranger:
    try:
        stranger.bind(("", port))
    except OSError:
        print("kept")
socket.create_server(("", port)).close()
"""
    assert launch("-np", 1, PYTHON, "-c", script).stdout == "[0] kept\n"


@pytest.mark.parametrize("hosts", ["localhost:1,far:2", "far:2,localhost:1"])
def test_ranks_of_several_hosts_know_where_rank_0_listens(tmp_path, hosts):
    done = launch("-H", hosts, "sh", "-c", f"echo $FARANDOLE_ADDRESS; [ {RANK} != 0 ] || cat", stdin="in\n",
                  **agent(tmp_path, ELSEWHERE))  # fmt: skip
    lines = lines_of(done.stdout)
    assert "[0] in" in lines and len(lines) == 4, done.stderr
    assert len({line[4:] for line in lines if line != "[0] in"}) == 1


def test_a_host_that_cannot_be_reached_is_named_at_once(tmp_path):
    refuses = agent(tmp_path, 'echo "no route to $1" >&2; exit 9')
    done = launch("-H", "localhost:1,far:1", "--start-timeout", 600, "sleep", "600", **refuses)
    assert done.returncode == 1
    why = f"far could not be started: {tmp_path}/agent ended with exit code 9"
    assert done.stderr.splitlines() == ["[far] no route to far", f"farandolerun: {why}"]


def test_hosts_that_never_come_are_named_by_their_ranks(tmp_path):
    done = launch("-H", "localhost:1,far:2", "--start-timeout", 3, "sleep", "600", **agent(tmp_path, "exec sleep 600"))
    assert done.returncode == 1
    assert "2 of 3 ranks did not start within 3 s (--start-timeout): 1, 2" in done.stderr


def test_a_host_that_is_lost_ends_the_job(tmp_path):
    script = f"[ {RANK} = 1 ] && kill -9 $PPID; exec sleep 600"
    done = launch("-H", "localhost:1,far:1", "sh", "-c", script, **agent(tmp_path, ELSEWHERE))
    assert done.returncode == 1
    assert "farandolerun: rank 1 was lost first: " in done.stderr


NESTED = "[" * 100_000


@pytest.mark.parametrize("said", [
    "{", NESTED, "[]", '{"text": 1, "is_consequence": false}', '{"text": ""}', "\\377",
    '{"text": "", "is_consequence": true, "facts": [1]}',
    '{"text": "", "is_consequence": true, "facts": {"failed_ranks": ["a"], "last_age_s": "long"}}',
], ids=lambda said: said[:20])  # fmt: skip
def test_a_report_that_cannot_be_read_is_dropped_with_one_line(said):
    """What counts is then how the rank ended."""
    report = "printf '%b\\n' \"$SAID\" >$_FARANDOLE_REPORT"
    script = f"[ {RANK} = 1 ] || exec sleep 60; {report}; {report}; exit 3"
    done = launch("-np", 2, "sh", "-c", script, SAID=said)
    lines = done.stderr.splitlines()
    assert done.returncode == 3 and len(lines) == 2, done.stderr
    host = socket.gethostname()
    assert lines[0].startswith(f"farandolerun: a message from host {host} cannot be read and is dropped: ")
    assert lines[1] == "farandolerun: rank 1 failed first, with exit code 3"


@pytest.mark.parametrize("failed", [0, 99])  # the latter of another job, within the program
def test_facts_of_a_report_may_be_missing_or_unknown(failed):
    facts = f'{{"failed_ranks": [{failed}], "last": "x", "last_age_s": null, "unknown": []}}'
    report = f'{{"text": "", "is_consequence": true, "facts": {facts}}}'
    script = f"[ {RANK} = 1 ] && echo '{report}' >$_FARANDOLE_REPORT; exit {RANK}"
    done = launch("-np", 2, "sh", "-c", script)
    assert done.returncode == 1 and not re.search("Traceback|cannot be read|rank 99", done.stderr), done.stderr


SUPERVISOR_THAT_SAYS = """
import sys
from farandole.runner import supervisor
channel = supervisor.Channel(sys.stdin.buffer, sys.stdout.buffer)
channel.receive()
channel.send(supervisor.HELLO, {payload!r})
channel.receive()
"""


@pytest.mark.parametrize("payload", [
    b"", b"\xff", b"[]", NESTED.encode(), b'{"version": 1, "host": "far", "token": "t", "id": 1}',
    b'{"version": 3, "host": "far", "id": 7}', b'{"version": 3, "host": "far", "id": []}',
    b'{"version": 3, "host": [], "id": 1}',
], ids=lambda payload: payload.decode(errors="replace")[:40])  # fmt: skip
def test_a_supervisor_that_cannot_be_read_is_one_line_with_its_host(tmp_path, payload):
    (tmp_path / "says.py").write_text(SUPERVISOR_THAT_SAYS.format(payload=payload))
    says = agent(tmp_path, shlex.join([PYTHON, str(tmp_path / "says.py")]))
    done = launch("-H", "localhost:1,far:1", "sleep", "600", **says)
    lines = done.stderr.splitlines()
    assert done.returncode == 1 and len(lines) == 2, done.stderr
    assert lines[0].startswith("farandolerun: a message from host far cannot be read and is dropped: it ")
    assert lines[1] == f"farandolerun: far could not be started: {tmp_path}/agent ended with exit code 0"


@pytest.mark.parametrize("hosts", [[], ["-H", "localhost:1,far:1"]])
def test_a_working_directory_that_was_removed_is_one_line(tmp_path, hosts):
    run = "import os, sys; os.rmdir(os.getcwd()); from farandole.runner.cli import main; sys.exit(main(sys.argv[1:]))"
    (tmp_path / "gone").mkdir()
    done = subprocess.run(
        [PYTHON, "-c", run, "-np", "2", *hosts, "echo", "it runs"], cwd=tmp_path / "gone",
        env=CLEAN | agent(tmp_path, f"cd {tmp_path}\n{ELSEWHERE}"), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    message = f"the working directory on {socket.gethostname()} cannot be read: No such file or directory"
    assert lines_of(done.stdout) == ["[0] it runs", "[1] it runs"], done.stderr
    own = [line for line in done.stderr.splitlines() if line.startswith("farandolerun: ")]  # and what sh says of it
    assert own == [f"farandolerun: {message}"] and done.returncode == 0


def test_the_key_is_in_no_command_line_and_no_environment_of_any_process(tmp_path):
    script = """
import os, pathlib
key = os.read(int(os.environ["FARANDOLE_KEY_FD"]), 99)
files = [file for name in ("cmdline", "environ") for file in pathlib.Path("/proc").glob(f"[0-9]*/{name}")]
found = []
for file in files:
    try: found += [file] if key in (text := file.read_bytes()) or key.hex().encode() in text else []
    except OSError: pass
print(len(key), found)
"""
    done = launch("-H", "localhost:1,far:1", PYTHON, "-S", "-c", script, **agent(tmp_path, ELSEWHERE))
    assert lines_of(done.stdout) == ["[0] 32 []", "[1] 32 []"], done.stderr
