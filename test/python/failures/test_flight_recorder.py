"""The flight recorder: its files after a death, at a stall and on SIGUSR1; what they say; running ranks."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import farandole as fl
from farandole import _flight_folder, flight, ps
from farandole.__main__ import main
from ranks import PYTHON_PATH, free_port, run_threads, wait_for

pytestmark = pytest.mark.once

RANKS = 3
PROLOGUE = """
import os, signal, sys, time
import numpy as np
import farandole as fl
fl.init()
fl.allreduce(np.ones(4, np.float32), name="x")
def stay():
    print("here", flush=True)
    sys.stdin.read()
"""


class Job:
    """A context: ranks that share memory and write into ``folder``; the ranks that ``stay()`` do until the end."""

    def __init__(self, folder, script, **variables):
        common = {"FARANDOLE_SIZE": str(RANKS), "FARANDOLE_ADDRESS": f"127.0.0.1:{free_port()}"}
        common |= {"FARANDOLE_FLIGHT_RECORDER_DIR": str(folder), "PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1"}
        self.ranks = [
            subprocess.Popen(
                [sys.executable, "-c", PROLOGUE + script],
                env=os.environ | common | variables | {"FARANDOLE_RANK": str(rank)},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(RANKS)
        ]  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for rank in self.ranks:
            rank.kill()
            rank.communicate()

    def wait(self):
        """Until all have ended; what they said."""
        return [rank.communicate(timeout=60) for rank in self.ranks]

    def wait_until_here(self, ranks):
        for rank in ranks:
            assert self.ranks[rank].stdout.readline() == "here\n", self.ranks[rank].stderr.read()


def files(folder):
    """What the ranks have written, by rank."""
    said = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return {one["rank"]: one for one in said}


def wait_for_files(folder, ranks):
    """Until there are files of exactly these ranks; what they say."""
    end_s = time.monotonic() + 30
    while set(said := files(folder)) != set(ranks):
        assert time.monotonic() < end_s, [(rank, one["reason"], one["written_by"]) for rank, one in said.items()]
        time.sleep(0.02)
    return said


def explained(folder, capsys):
    assert main(["explain", str(folder)]) == 0
    return capsys.readouterr().out


def test_after_a_death_each_rank_has_a_file_and_they_name_the_dead(tmp_path, capsys):
    script = """
if fl.rank() == 1:
    time.sleep(1)  # until the others wait
    os.kill(os.getpid(), signal.SIGKILL)
fl.allreduce(np.ones(4, np.float32), name="y")
"""
    with Job(tmp_path, script) as job:
        job.wait()
        pid = job.ranks[1].pid
    said = wait_for_files(tmp_path, range(RANKS))
    assert said[0]["error"]["ranks"] == said[2]["error"]["ranks"] == [1]
    assert said[0]["error"]["last"] == 'allreduce "x"'
    assert said[1]["error"] is None and said[1]["written_by"] == 0 and said[1]["pid"] == pid
    steps = [(event["step"], event["name"], event["bytes"]) for event in said[1]["events"] if event["call"]]
    assert steps == [("submitted", "x", 16)]
    text = explained(tmp_path, capsys)
    assert f"rank 1 (pid {pid}" in text.splitlines()[0]
    assert f"The last that rank 1 (pid {pid}" in text
    assert 'submitted was allreduce "x" (call 1)' in text and "it had ended." in text
    assert 'Ranks 0 and 2 have waited for rank 1 in allreduce "y" (call 2) since ' in text


def test_sigusr1_writes_a_file_and_the_rank_goes_on(tmp_path, capsys):
    with Job(tmp_path, "stay()\nfl.allreduce(np.ones(4), name='y')\nprint('end')") as job:
        job.wait_until_here(range(RANKS))
        assert not files(tmp_path)
        for rank in (0, 2):
            job.ranks[rank].send_signal(signal.SIGUSR1)
        said = wait_for_files(tmp_path, (0, 2))
        assert {one["reason"] for one in said.values()} == {"SIGUSR1"}
        text = explained(tmp_path, capsys)
        assert "No rank has ended by an error" in text and "There is no file of rank 1." in text
        for rank in job.ranks:
            rank.stdin.close()
            rank.stdin = None
        assert [out for out, _ in job.wait()] == ["end\n"] * RANKS


def test_a_program_that_uses_sigusr1_itself_keeps_it(tmp_path):
    script = """
import signal
before = signal.signal(signal.SIGUSR1, lambda *_: print("mine", flush=True))
import farandole as fl
fl.init()
signal.raise_signal(signal.SIGUSR1)
"""
    environment = os.environ | {"FARANDOLE_FLIGHT_RECORDER_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "mine\n"), done.stderr
    assert not files(tmp_path)


def test_a_stall_is_explained_while_it_lasts(tmp_path, capsys):
    script = "stay() if fl.rank() == 2 else fl.allreduce(np.ones(4), name='y')"
    with Job(tmp_path, script, FARANDOLE_STALL_WARNING_S="0.5") as job:
        job.wait_until_here([2])
        said = wait_for_files(tmp_path, range(RANKS))
        assert {one["reason"] for one in said.values()} == {"stall"}
        assert 'Ranks 0 and 1 have waited for rank 2 in allreduce "y" (call 2) since ' in explained(tmp_path, capsys)


def test_where_the_orders_of_ranks_part_is_named(tmp_path, capsys):
    script = """
fl.allreduce(np.ones(4), name="loss")
fl.allreduce(np.ones(4), name="validation" if fl.rank() == 1 else "train")
"""
    with Job(tmp_path, script, FARANDOLE_STALL_WARNING_S="0.5", FARANDOLE_STALL_SHUTDOWN_S="1") as job:
        job.wait()
    wait_for_files(tmp_path, range(RANKS))
    text = explained(tmp_path, capsys)
    assert 'differs at call 3: rank 0 submitted allreduce "train" and rank 1 allreduce "validation"' in text
    assert 'Rank 1 has waited for ranks 0 and 2 in allreduce "validation"' in text


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FARANDOLE_FLIGHT_RECORDER_DIR", raising=False)

    def body(rank):
        with pytest.raises(fl.MismatchError):
            fl.allreduce(np.ones(2 + rank), name="x")

    run_threads(2, body)
    assert not list(tmp_path.iterdir())


_FAILS = """
import os
import numpy as np
import farandole as fl
fl.init()
if fl.rank() == 1:
    os.kill(os.getpid(), 9)
fl.allreduce(np.ones(2), name="y")
"""

_LEAVES = """
import os, signal
import farandole as fl
fl.init()
os.kill(os.getpid(), signal.SIGUSR1)
fl.shutdown()
"""


def environment_with(state, **variables):
    own = {name: value for name, value in os.environ.items() if name != _flight_folder.VARIABLE}
    return own | {"XDG_STATE_HOME": str(state), "PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1"} | variables


def fail_under_farandolerun(state, script=_FAILS, code=128 + signal.SIGKILL, hosts=(), **variables):
    """The last line of the launcher, which ends with this code."""
    command = [sys.executable, "-m", "farandole.runner", "-np", "2", *hosts, sys.executable, "-c", script]
    environment = environment_with(state, **variables)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    return done.stderr.splitlines()[-1]


SAYS = "what the ranks did last: farandole explain "


def test_a_job_that_fails_leaves_files_in_a_folder_that_the_launcher_names(tmp_path, capsys, monkeypatch):
    line = fail_under_farandolerun(tmp_path)
    assert line.startswith(f"farandolerun: {SAYS}{tmp_path}/farandole/")
    (folder,) = (tmp_path / "farandole").iterdir()
    assert line.endswith(f" {folder}") and folder.stat().st_mode & 0o777 == 0o700
    assert set(files(folder)) == {0, 1}
    text = explained(folder, capsys)
    assert text.startswith("The job ended by this error: rank 1 (pid ")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert main(["explain"]) == 0
    head, _, rest = capsys.readouterr().out.partition("\n")
    assert head.startswith("The last job that left files, at 2") and head.endswith(f", in {folder}:") and rest == text


@pytest.mark.parametrize("off", ["", "none"])
def test_a_job_that_fails_leaves_nothing_where_that_is_off(tmp_path, off):
    assert SAYS not in fail_under_farandolerun(tmp_path, FARANDOLE_FLIGHT_RECORDER_DIR=off)
    assert not list(tmp_path.iterdir())


def test_an_error_of_the_program_alone_leaves_no_folder(tmp_path):
    assert SAYS not in fail_under_farandolerun(tmp_path, "raise KeyError('x')", 1)
    assert not list(tmp_path.iterdir())


def test_a_folder_whose_name_has_a_space_is_named_as_a_shell_reads_it(tmp_path):
    line = fail_under_farandolerun(tmp_path / "a b")
    (folder,) = (tmp_path / "a b" / "farandole").iterdir()
    assert line == f"farandolerun: {SAYS}'{folder}'"


def test_ranks_of_another_host_leave_files_below_its_own_users(tmp_path):
    agent = tmp_path / "agent"
    agent.write_text(f"#!/bin/sh\nshift; HOME={tmp_path}/theirs exec \"$@\"\n")
    agent.chmod(0o755)
    for host in ("ours", "theirs"):
        (tmp_path / host).mkdir()
    place = {"HOME": str(tmp_path / "ours"), "FARANDOLE_AGENT": str(agent)}
    script = _FAILS.replace("rank() == 1", "rank() == 0")
    line = fail_under_farandolerun("", script, hosts=["-H", "localhost:1,far:1"], **place)
    (folder,) = tmp_path.glob("theirs/.local/state/farandole/*")
    assert 1 in files(folder) and not list((tmp_path / "ours").iterdir())
    named = tmp_path / "ours/.local/state/farandole" / folder.name
    assert line == f"farandolerun: {SAYS}{named}, on the hosts where they have left files"


@pytest.mark.parametrize("is_wanted", [False, True])
def test_the_folders_above_that_of_the_user_are_not_made(tmp_path, is_wanted):
    folder = tmp_path / ("." if is_wanted else "made") / "not" / "mounted"
    given = f"{tmp_path}/./not/mounted" if is_wanted else str(folder)
    environment = environment_with(tmp_path, FARANDOLE_FLIGHT_RECORDER_DIR=given)
    subprocess.run([sys.executable, "-c", _LEAVES], env=environment, check=True, timeout=60)
    assert len(files(folder)) == is_wanted and folder.exists() == is_wanted
    assert is_wanted or not list(tmp_path.iterdir())


@pytest.mark.parametrize("local_rank", ["", "0", "1"])
def test_under_another_launcher_the_first_rank_of_a_host_names_the_folder(tmp_path, local_rank):
    place = {"LOCAL_RANK": local_rank} if local_rank else {}
    place |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _FAILS], env=environment_with(tmp_path, **place, RANK=str(rank)),
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [rank.communicate(timeout=60)[1] for rank in ranks]
    (folder,) = (tmp_path / "farandole").iterdir()
    assert (said[0].splitlines()[-1] == f"farandole: {SAYS}{folder}") == (local_rank != "1")
    assert said[0].count(SAYS) == (local_rank != "1")
    assert set(files(folder)) == {0, 1}


_NAMES = {  # what a launcher sets beside the size: the name of the job's folder, by default the parent's
    "torchrun with a run id": ({"TORCHELASTIC_RUN_ID": "a/b"}, "a_b"),
    "torchrun without": ({"TORCHELASTIC_RUN_ID": "none"}, None),
    "Open MPI": ({"PMIX_NAMESPACE": "prterun-a-1@1"}, "prterun-a-1_1"),
    "srun": ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": "2"}, "7_2"),
    "torchrun in a shell of srun": ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": "1"}, None),
}


@pytest.mark.parametrize("case", _NAMES)
def test_ranks_with_different_parents_find_the_folder_of_their_job(tmp_path, case):
    given, name = _NAMES[case]
    script = "from farandole import _flight_folder; print(_flight_folder.for_rank())"
    environment = environment_with(tmp_path, **given, WORLD_SIZE="2")
    wrapped = ["sh", "-c", '"$@"; true', "sh", sys.executable, "-c", script]
    said = {subprocess.check_output(wrapped, env=environment, text=True, timeout=60) for _ in range(2)}
    assert said == {f"/.{tmp_path}/farandole/{name}\n"} if name else len(said) == 2


@pytest.mark.parametrize("size", [64, 65])
def test_a_large_job_has_no_folder_unless_asked(tmp_path, monkeypatch, size):
    monkeypatch.delenv(_flight_folder.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", str(size))
    monkeypatch.setattr(_flight_folder, "_chosen", "")
    assert bool(_flight_folder.for_launcher(size)) == bool(_flight_folder.for_rank()) == (size == 64)


def test_only_the_folders_of_the_last_jobs_stay(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    now_s = time.time()
    for number in range(14):
        folder = tmp_path / "farandole" / str(number)
        folder.mkdir(parents=True)
        leave(folder, 0, 1, [])
        age_s = 40 * 86400 if number == 2 else number * 3700
        os.utime(folder, (now_s - age_s, now_s - age_s))
    (tmp_path / "farandole" / "12" / "mine").touch()
    os.utime(tmp_path / "farandole" / "12", (now_s - 12 * 3700, now_s - 12 * 3700))
    assert _flight_folder.has_files(str(tmp_path / "farandole" / "0"))
    kept = {path.name for path in (tmp_path / "farandole").iterdir()}
    assert kept == {"0", "1", *map(str, range(3, 11)), "12"}  # where files are that no rank has left
    assert (tmp_path / "farandole" / "12" / "mine").exists()


def test_folders_of_jobs_that_may_still_run_stay_and_what_is_no_folder_is_no_jobs(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    parent = tmp_path / "farandole"
    for number in range(14):
        (parent / str(number)).mkdir(parents=True)
        leave(parent / str(number), 0, 1, [])
        os.utime(parent / str(number), (time.time() - 1000 + number,) * 2)
    assert _flight_folder.has_files(str(parent / "0"))
    assert len(list(parent.iterdir())) == 14
    (parent / "notes").touch()
    (parent / "link").symlink_to(tmp_path)
    (parent / "gone").symlink_to(tmp_path / "gone")
    assert _flight_folder.newest() == parent / "13"


def test_a_file_that_cannot_be_read_is_named(tmp_path, capsys):
    assert main(["explain", str(tmp_path)]) == 1
    assert f"{tmp_path}: no files of flight recorders" in capsys.readouterr().err
    (tmp_path / "farandole-job-rank0.json").write_text('{"rank": 0')
    assert main(["explain", str(tmp_path)]) == 1
    assert f"{tmp_path}/farandole-job-rank0.json: cannot be read" in capsys.readouterr().err


def event(name, **changes):
    said = {"step": "submitted", "kind": "allreduce", "name": name, "set": 0, "call": 1, "bytes": 4,
            "dtype": "float32", "code": "OK", "at_ns": 10**9, "finished_ns": 0}  # fmt: skip
    return said | changes


def leave(folder, rank, size, events, **changes):
    """A file as a rank writes it."""
    said = {"rank": rank, "size": size, "pid": 7, "host": "h", "events": events, "job": "j", "reason": "stall",
            "written_ns": 2 * 10**9, "error": None}  # fmt: skip
    (folder / f"farandole-j-rank{rank}.json").write_text(json.dumps(said | changes))


@pytest.mark.parametrize("rank_1", ["has no file", "has an older file"])
def test_who_has_left_no_file_since_is_not_said_to_be_missing(tmp_path, capsys, rank_1):
    leave(tmp_path, 0, 4, [event("y")])
    leave(tmp_path, 2, 4, [])
    leave(tmp_path, 3, 4, [event("y")])
    if rank_1 == "has an older file":
        leave(tmp_path, 1, 4, [], written_ns=10**8)
    text = explained(tmp_path, capsys)
    assert 'Ranks 0 and 3 have waited for rank 2 in allreduce "y" (call 1) since ' in text
    assert "; no file says whether rank 1 submitted it." in text
    (tmp_path / "farandole-j-rank2.json").unlink()
    text = explained(tmp_path, capsys)
    assert 'Ranks 0 and 3 have waited in allreduce "y"' in text and "whether ranks 1 and 2 submitted it." in text


def _deep(path):
    path.write_text("[" * 200_000)


def _large(path):
    with path.open("wb") as file:
        file.truncate(1 << 24)


def _linked(path):
    (path.parent / "elsewhere").write_text("{}")
    path.symlink_to(path.parent / "elsewhere")


def _owned_by_another(path):
    leave(path.parent, 1, 2, [])
    os.chown(path, 12345, 12345)


_BAD_FILES = {
    "random bytes": lambda path: path.write_bytes(os.urandom(1000)),
    "deeply nested": _deep,
    "large": _large,
    "a link": _linked,
    "a pipe": os.mkfifo,
    "of another user": _owned_by_another,
    "many ranks": lambda path: leave(path.parent, 1, 10**15, []),
    "text for a number": lambda path: leave(path.parent, 1, 2, [event("y", at_ns="1")]),
    "a number for a text": lambda path: leave(path.parent, 1, 2, [event(7)]),
    "a number that is none": lambda path: leave(path.parent, 1, 2, [], written_ns=float("inf")),
}


@pytest.mark.parametrize("case", _BAD_FILES)
def test_one_bad_file_is_one_line(tmp_path, capsys, case):
    if case == "of another user" and os.geteuid() != 0:
        pytest.skip("only root can give files away")
    leave(tmp_path, 0, 2, [event("y")])
    path = tmp_path / "farandole-j-rank1.json"
    _BAD_FILES[case](path)
    assert main(["explain", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert err.startswith(f"farandole explain: {path}: cannot be read: ") and err.count("\n") == 1
    assert 'Rank 0 has waited in allreduce "y"' in out


def test_what_a_terminal_would_obey_is_escaped(tmp_path, capsys):
    leave(tmp_path, 0, 2, [event("a\x1b[2J\r\n\u202eb")], reason="c\x07")
    leave(tmp_path, 1, 2, [])
    text = explained(tmp_path, capsys)
    assert '"a\\x1b[2J\\r\\n\\u202eb"' in text and "written for: c\\x07" in text
    assert all(line.isprintable() for line in text.splitlines())


@pytest.mark.parametrize("names_ranks", [True, False])
def test_the_error_of_a_job_names_ranks_before_it_is_what_most_have(tmp_path, capsys, names_ranks):
    errors = [{"ranks": [], "message": "the job ends"}] * 2 + [{"ranks": [2] * names_ranks, "message": "a cause"}]
    for rank, error in enumerate(errors):
        leave(tmp_path, rank, 3, [], error=error)
    message = "a cause" if names_ranks else "the job ends"
    assert f"The job ended by this error: {message}\n" in explained(tmp_path, capsys)


def test_ps_lists_running_ranks_and_what_they_wait_for(tmp_path, capsys):
    script = "stay() if fl.rank() == 2 else fl.allreduce(np.ones(4), name='y')"
    with Job(tmp_path, script) as job:
        job.wait_until_here([2])
        pids = [rank.pid for rank in job.ranks]

        def lines():
            assert main(["ps"]) == 0
            said = capsys.readouterr().out.splitlines()
            return [line for line in said if any(str(pid) in line.split() for pid in pids)]

        mine = wait_for(lambda: sum('waits in allreduce "y"' in line for line in lines()) == 2 and lines())
        assert len(mine) == RANKS and ' allreduce "y", ' in mine[0] and 'waits in allreduce "y" for ' in mine[0]
        assert ' allreduce "x", ' in mine[2] and mine[2].endswith("running")
        job.ranks[2].send_signal(signal.SIGSTOP)
        wait_for(lambda: lines()[2].endswith("stopped"))
    wait_for(lambda: not lines())


def test_ps_reads_no_more_ranks_than_the_memory_holds():
    ring = bytearray(flight._RING)
    flight._HEADER.pack_into(ring, 0, flight._MAGIC, 1, 2**32 - 1, 0, os.getpid(), 0)
    flight._EVENT.pack_into(ring, 2 * flight._LINE, 1, 1, 0, 0, 0, 0, 0, 1, 0, 0, 1, b"a\x1bb")
    memory = os.memfd_create("flight-farandole")
    try:
        os.write(memory, ring)
        (mine,) = [job for job in flight.running() if job[0].size == 2**32 - 1]
        (line,) = [line for line in ps.list_jobs() if f" {os.getpid()} " in line]
    finally:
        os.close(memory)
    assert len(mine) == 1 and 'allreduce "a\\x1bb"' in line


def test_ps_finds_a_rank_that_opens_and_closes_files_meanwhile():
    script = f"""
import fcntl, os, struct
ring = bytearray({flight._RING})
ring[:{flight._HEADER.size}] = struct.pack({flight._HEADER.format!r}, {flight._MAGIC!r}, 0, 1, 0, os.getpid(), 0)
memory = os.memfd_create("flight-farandole")
os.write(memory, ring)
fcntl.fcntl(memory, fcntl.F_DUPFD, 100)  # a number after those of the files
os.close(memory)
print("here", flush=True)
while True:
    for file in [os.open("/dev/null", os.O_RDONLY) for _ in range(9)]:
        os.close(file)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as rank:
        try:
            assert rank.stdout.readline() == "here\n"
            assert all(any(job[0].pid == rank.pid for job in flight.running()) for _ in range(8))
        finally:
            rank.kill()


def test_ps_lists_ranks_that_share_no_memory():
    def body(rank):
        fl.allreduce(np.ones(2), name="alone")
        return any(one.pid == os.getpid() and one.last().name == "alone" for job in flight.running() for one in job)

    assert all(run_threads(2, body))
