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
from farandole import flight, ps
from farandole.__main__ import main
from ranks import PYTHON_PATH, free_port, run_threads

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


def wait_for(found, timeout_s=30):
    """Until it says something; that."""
    end_s = time.monotonic() + timeout_s
    while not (said := found()):
        assert time.monotonic() < end_s
        time.sleep(0.02)
    return said


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


def test_ps_lists_ranks_that_share_no_memory():
    def body(rank):
        fl.allreduce(np.ones(2), name="alone")
        return any(one.pid == os.getpid() and one.last().name == "alone" for job in flight.running() for one in job)

    assert all(run_threads(2, body))
