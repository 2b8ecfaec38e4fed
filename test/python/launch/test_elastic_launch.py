"""farandolerun --elastic: what is started again, and when a job ends. Ranks are programs that join nothing."""

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess

import pytest

from test_launch import CLEAN, ELSEWHERE, PYTHON, agent

pytestmark = pytest.mark.once

#: A rank that listens, says where and who it is, and obeys commands: lines in a file of its number's or its pid's name.
MEMBER = """
import json, os, pathlib, signal, socket, sys, time
folder = pathlib.Path(sys.argv[1])
listener = socket.create_server(("127.0.0.1", 0))
address = "127.0.0.1:%d" % listener.getsockname()[1]
with open(os.environ["_FARANDOLE_REPORT"], "w") as file:
    file.write(json.dumps({"member": address}) + "\\n")
def leave(*_):
    print("notice", flush=True)
    sys.exit(0 if (folder / "leave").exists() else 143)
signal.signal(signal.SIGTERM, leave)
rank, members = os.environ.get("FARANDOLE_RANK", "-"), os.environ.get("FARANDOLE_MEMBERS", "")
print("up", os.getpid(), rank, os.environ.get("HOST_MARK", "here"), address, members, flush=True)
while not (folder / "end").exists():
    time.sleep(0.02)
    for _ in range(100 if (folder / "talk").exists() else 0):
        print("x" * 100, flush=True)
    (folder / f"talked.{os.getpid()}").touch() if (folder / "talk").exists() else None
"""
UP = re.compile(r"\[(\d+)\] up (\d+) (\d+|-) (\S+) (\S+) (\S*)\n")


class Rank:
    """What a rank has said of itself."""

    def __init__(self, found):
        number, pid, rank, self.host, self.address, members = found.groups()
        self.number, self.pid, self.rank = int(number), int(pid), rank
        self.members = set(members.split(",")) - {""}

    def kill(self, number=signal.SIGKILL):
        os.kill(self.pid, number)


def parent_of(rank):
    """The supervisor of its host."""
    with open(f"/proc/{rank.pid}/stat") as file:
        return int(file.read().rpartition(") ")[2].split()[1])


class Launcher:
    """A launcher of members that runs."""

    def __init__(self, folder, *arguments, program=MEMBER, **variables):
        words = [PYTHON, "-m", "farandole.runner", "--elastic", *map(str, arguments), PYTHON, "-S", "-c", program]
        self.process = subprocess.Popen(
            [*words, str(folder)], env=CLEAN | variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        self.said = ""

    def wait_for(self, pattern):
        """The match in what it says from now on."""
        while not (found := re.search(pattern, self.said)):
            assert select.select([self.process.stdout], [], [], 60)[0], self.said
            more = os.read(self.process.stdout.fileno(), 65536).decode()
            assert more, f"it has ended: {self.said}"
            self.said += more
        self.said = self.said[: found.start()] + self.said[found.end() :]
        return found

    def ranks(self, count):
        """So many that come up next, by number."""
        found = [Rank(self.wait_for(UP)) for _ in range(count)]
        return sorted(found, key=lambda one: one.number)

    def end(self):
        """The exit code, and what it had still to say."""
        text, _ = self.process.communicate(timeout=60)
        return self.process.returncode, self.said + text


@pytest.fixture
def launch(tmp_path):
    """Starts launchers whose members end when the file "end" is there, at the end of the test at last."""
    with contextlib.ExitStack() as begun:

        def launch_one(*arguments, **how):
            one = Launcher(tmp_path, *arguments, **how)
            begun.callback(one.process.wait, 60)
            begun.callback(one.process.kill)
            return one

        yield launch_one
        (tmp_path / "end").touch()


def finish(folder, launcher):
    (folder / "end").touch()
    return launcher.end()


def test_a_rank_that_is_lost_is_started_again_as_a_newcomer_after_waits_that_double(tmp_path, launch):
    job = launch("-np", 3, "--blacklist-cooldown-range", "0.1", "0.4")
    first, second, third = job.ranks(3)
    assert [one.rank for one in (first, second, third)] == ["0", "1", "2"]
    for wait in ("0.1", "0.2", "0.4", "0.4"):
        first.kill()
        text = r"farandolerun: rank 0 on host \S+ ended by SIGKILL; 2 ranks go on; it is started again in "
        job.wait_for(rf"{text}{wait} s\n")
        (first,) = job.ranks(1)
        assert (first.number, first.rank, first.members) == (0, "-", {second.address, third.address})
    assert finish(tmp_path, job) == (0, "")


def test_a_newcomer_that_comes_after_the_end_is_ended_without_a_word(tmp_path, launch):
    late = """
import os, time
if "FARANDOLE_MEMBERS" in os.environ:
    print("asks", flush=True)
    time.sleep(600)
"""
    job = launch("-np", 2, "--blacklist-cooldown-range", "0.1", "0.1", program=late + MEMBER)
    job.ranks(2)[0].kill()
    job.wait_for(r"[^\n]* is started again in 0.1 s\n")
    job.wait_for(r"\[0\] asks\n")
    assert finish(tmp_path, job) == (0, "")


@pytest.mark.parametrize(("end", "said"), [
    ("75", r"has halted \(exit code 75\), as it reached too few of the others"), ("3", "ended with exit code 3"),
])  # fmt: skip
def test_how_a_rank_was_lost_is_said(tmp_path, launch, end, said):
    program = f"{MEMBER}\nif rank == '1': time.sleep(0.3); os._exit({end})".replace(
        "while not", "while rank != '1' and not"
    )
    job = launch("-np", 2, "--blacklist-cooldown-range", "0.1", "1", program=program)
    job.ranks(2)
    job.wait_for(rf"rank 1 on host \S+ {said}; 1 rank goes on; it is started again in 0.1 s")
    job.ranks(1)
    assert finish(tmp_path, job)[0] == 0


def test_the_reset_limit_counts_all_restarts_and_the_last_rank_ends_the_job(launch):
    job = launch("-np", 2, "--blacklist-cooldown-range", "0.1", "0.1", "--reset-limit", 1)
    ranks = job.ranks(2)
    ranks[1].kill()
    ranks[1:] = job.ranks(1)
    ranks[1].kill()
    job.wait_for(r"rank 1 on .*; 1 rank goes on; it is not started again, as --reset-limit 1 is reached\n")
    ranks[0].kill()
    code, text = job.end()
    assert code == 137 and "no rank goes on" in text
    assert "farandolerun: all ranks are lost; nothing is started again, as --reset-limit 1 is reached\n" in text


def test_ranks_that_are_all_lost_from_outside_start_anew_with_another_key(tmp_path, launch):
    show = "print('key', os.read(int(os.environ['FARANDOLE_KEY_FD']), 32).hex(), flush=True)\nrank, members"
    job = launch("-np", 2, "--blacklist-cooldown-range", "0.1", "1", program=MEMBER.replace("rank, members", show, 1))
    keys = set()
    for _ in range(2):
        keys |= {frozenset(job.wait_for(r"key (\w{64})")[1] for _ in range(2))}
        for one in job.ranks(2):
            assert one.rank == str(one.number) and not one.members
            one.kill()
    job.wait_for("all ranks are lost; all are started anew in 0.1 s")
    job.wait_for("all ranks are lost; all are started anew in 0.2 s")
    assert [len(one) for one in keys] == [1, 1]
    job.ranks(2)
    assert finish(tmp_path, job)[0] == 0


@pytest.mark.parametrize(("failed", "said"), [
    ("[1]", "all ranks are lost; all are started anew in 4 s"),  # rank 1, which was killed, is the cause
    ("[]", "no rank is left, and not all were ended from outside: the job ends"),  # all disagree
])  # fmt: skip
def test_errors_of_ranks_that_another_one_caused_start_all_anew_and_others_end_the_job(tmp_path, launch, failed, said):
    error = {"text": "PeerLostError: it is lost", "is_consequence": True, "facts": {"failed_ranks": json.loads(failed)}}
    report = f"open(os.environ['_FARANDOLE_REPORT'], 'w').write({json.dumps(error)!r} + chr(10))"
    fails = f"\nif members == '' and not (folder / 'once').exists():\n    {report}\n    sys.exit(1)"
    job = launch("-np", 2, "--blacklist-cooldown-range", 4, 4, program=MEMBER + fails)
    job.ranks(2)[1].kill()
    (tmp_path / "end").touch()
    job.wait_for("rank 0 on host .* ended with exit code 1: PeerLostError: it is lost; no rank goes on")
    (tmp_path / "once").touch()
    job.wait_for(said)
    assert job.end()[0] == (0 if "anew" in said else 1)


@pytest.mark.parametrize(("end", "code", "said"), [
    ("os._exit(3)", 3, "rank 1 failed first, with exit code 3"),
    ("sys.exit(0)", 0, ""),
])  # fmt: skip
def test_before_the_job_has_begun_a_program_fails_or_ends_as_in_any_other(launch, end, code, said):
    program = f"import os, sys, time\nif os.environ['FARANDOLE_RANK'] == '1': {end}\ntime.sleep(1)"
    found, text = launch("-np", 2, program=program).end()
    assert found == code and said in text and "again" not in text


def test_a_rank_that_is_killed_before_the_job_has_begun_starts_it_anew(tmp_path, launch):
    once = """
import os, sys, time
mine = sys.argv[1] + "/once" + os.environ["FARANDOLE_RANK"]
if not os.path.exists(mine):
    open(mine, "w")
    while mine[-1] == "0" or not os.path.exists(mine[:-1] + "0"):
        time.sleep(0.01)
    os.kill(os.getpid(), 9)
"""
    job = launch("-np", 2, program=once + MEMBER)
    job.wait_for("rank 1 on host .* ended by SIGKILL before the job had begun; all are started anew in 1 s")
    assert [one.rank for one in job.ranks(2)] == ["0", "1"]
    assert finish(tmp_path, job)[0] == 0


def reports(error, **facts):
    """Of a rank that ends by an error."""
    report = {"text": error, "is_consequence": False, "facts": facts}
    return f"open(os.environ['_FARANDOLE_REPORT'], 'w').write({json.dumps(report)!r} + chr(10)); sys.exit(1)"


def test_an_error_of_all_ranks_ends_the_job_with_one_line(launch):
    fails = f"time.sleep(0.1 * int(rank))\n{reports('KeyError: 7')}\nwhile not"
    job = launch("-np", 3, program=MEMBER.replace("while not", fails))
    job.ranks(3)
    said = "farandolerun: all ranks that were left, 0, 1, 2, ended with exit code 1: KeyError: 7: the job ends\n"
    assert job.end() == (1, said)


def test_a_newcomer_that_does_not_fit_to_the_others_is_not_started_again(tmp_path, launch):
    refuses = reports("MismatchError: seed", is_shared=True)
    refused = f"import os, sys\nif 'FARANDOLE_MEMBERS' in os.environ: {refuses}"
    job = launch("-np", 2, "--blacklist-cooldown-range", "0.1", "0.1", program=refused + MEMBER)
    job.ranks(2)[1].kill()
    job.wait_for("[^\n]* it is started again in 0.1 s\n")
    said = "ended with exit code 1: MismatchError: seed; 1 rank goes on; it is not started again, as the others would "
    job.wait_for(rf"[^\n]*rank 1 on host \S+ {said}refuse it again\n")
    assert finish(tmp_path, job) == (0, "")


@pytest.mark.parametrize("program", [MEMBER, "import time; print('waits', flush=True); time.sleep(600)"])
def test_notice_to_all_hosts_ends_the_job_as_sigterm_does(tmp_path, launch, program):
    (tmp_path / "leave").touch()
    job = launch("-np", 2, program=program)
    job.wait_for("up|waits")
    children = f"/proc/{job.process.pid}/task/{job.process.pid}/children"
    with open(children) as file:
        os.kill(int(file.read()), signal.SIGTERM)  # to the supervisor
    code, text = job.end()
    assert code == 143 and "and no host is left: the job ends\n" in text, text


def test_too_few_ranks_for_too_long_end_the_job_with_the_code_of_the_last_loss(launch):
    job = launch(
        "-np", 2, "--min-np", 2, "--elastic-timeout", "0.5", "--blacklist-cooldown-range", "60", "60"
    )  # fmt: skip
    job.ranks(2)[1].kill()
    code, text = job.end()
    assert code == 137
    assert "farandolerun: for 0.5 s (--elastic-timeout) there have been fewer than 2 ranks (--min-np): 1\n" in text
    assert "[0] notice\n" in text


@pytest.fixture
def hosts(tmp_path):
    """Writes the list that a discovery script prints, and if ``is_read`` waits until it has done so."""
    script, listed, seen = tmp_path / "hosts.sh", tmp_path / "hosts", tmp_path / "seen"
    script.write_text(f"#!/bin/sh\ncp {listed} {seen}.new && cat {seen}.new && mv {seen}.new {seen}\n")
    script.chmod(0o755)

    def write(text, is_read=False):
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").rename(listed)
        while is_read and seen.read_text() != text:
            pass
        return ["--host-discovery-script", script]

    return write


def test_hosts_come_and_go_with_the_discovery_script(tmp_path, launch, hosts):
    job = launch(*hosts("far-a:1\nfar-b:1\n"), "--max-np", 3, **agent(tmp_path, ELSEWHERE))
    first = job.ranks(2)
    assert [one.host for one in first] == ["far-a", "far-b"]
    hosts("far-a:1\nfar-b:1\nfar-c:4\n")
    (third,) = job.ranks(1)  # --max-np
    assert (third.host, third.number, third.members) == ("far-c", 2, {one.address for one in first})
    (tmp_path / "leave").touch()
    hosts("far-a:1\nfar-c:4\n")
    job.wait_for(r"far-b is not listed any more; told to leave: 1\n")
    job.wait_for(r"\[1\] notice\n")
    (fourth,) = job.ranks(1)
    assert (fourth.host, fourth.number, fourth.members) == ("far-c", 1, {first[0].address, third.address})
    hosts("")  # what says nothing is broken
    job.wait_for(r'hosts.sh" names no host; the hosts stay as they were\n')
    assert finish(tmp_path, job)[0] == 0


def test_of_a_host_with_fewer_slots_those_leave_that_have_not_joined_yet(tmp_path, launch, hosts):
    waits = 'while (folder / "late").exists():\n    (folder / "waits").touch()\n    time.sleep(0.02)\n'
    program = MEMBER.replace("listener =", f"{waits}listener =", 1)
    job = launch(*hosts("localhost:2\n"), "--blacklist-cooldown-range", 0.1, 1, program=program)
    ranks = job.ranks(2)
    (tmp_path / "late").touch()
    ranks[0].kill()
    while not (tmp_path / "waits").exists():
        pass
    hosts("localhost:1\n")
    job.wait_for(r"localhost has 1 slot now; told to leave: 0\n")
    (tmp_path / "late").unlink()
    assert finish(tmp_path, job)[0] == 0


def test_a_host_that_gives_notice_leaves_and_gets_no_rank_until_it_is_listed_anew(tmp_path, launch, hosts):
    """SIGTERM to its supervisor."""
    job = launch(*hosts("localhost:1\nfar:2\n"), **agent(tmp_path, ELSEWHERE))
    ranks = job.ranks(3)
    os.kill(parent_of(ranks[1]), signal.SIGTERM)
    job.wait_for(r"far gives notice; told to leave: 1, 2\n")
    for _ in range(2):
        job.wait_for(r"\[[12]\] notice\n")
        job.wait_for(r"rank [12] on host \S+ ended with exit code 143; (1 rank goes|2 ranks go) on\n")
    hosts("localhost:1\n", is_read=True)
    assert not UP.search(job.said)
    hosts("localhost:1\nfar:1\n")
    assert job.ranks(1)[0].host == "far"
    assert finish(tmp_path, job)[0] == 0


def test_a_supervisor_that_is_killed_takes_its_ranks_along_and_is_started_again(tmp_path, launch):
    job = launch(
        "-H", "localhost:1,far:1", "--blacklist-cooldown-range", "0.1", "1", **agent(tmp_path, ELSEWHERE)
    )  # fmt: skip
    first, second = job.ranks(2)
    os.kill(parent_of(second), signal.SIGKILL)
    job.wait_for(r"far does not report its ranks any more; it is tried again in 0.1 s\n")
    (again,) = job.ranks(1)
    assert (again.host, again.members) == ("far", {first.address})
    assert finish(tmp_path, job)[0] == 0


@pytest.mark.parametrize("lives", [True, False])
def test_ranks_that_have_halted_begin_no_job_beside_others_that_may_go_on_out_of_reach(tmp_path, launch, lives):
    cut, halts = tmp_path / "cut", MEMBER.replace("else 143", "else 75")
    reach = agent(tmp_path, f"[ ! -e {cut} ] || exit 9\n{ELSEWHERE}")
    job = launch("-H", "localhost:1,far:1", "--blacklist-cooldown-range", "0.1", "0.2", program=halts, **reach)
    first, second = job.ranks(2)
    cut.touch()
    os.kill(parent_of(second), signal.SIGKILL)
    job.wait_for("rank 1 on host far has gone")
    first.kill(signal.SIGTERM)
    job.wait_for(r"1 may go on: nothing is started anew before far can be reached\n")
    with contextlib.ExitStack() as stack:
        if lives:
            host, _, port = second.address.partition(":")
            stack.enter_context(socket.create_server((host, int(port))))
        cut.unlink()
        if lives:
            assert job.ranks(1)[0].members == {second.address}
        else:
            job.wait_for("all ranks are lost; all are started anew")
            assert [one.rank for one in job.ranks(2)] == ["0", "1"]
    assert finish(tmp_path, job)[0] == 0


@pytest.mark.parametrize("sees_notes", [True, False])  # without, as of another host, their ports count
def test_a_launcher_that_is_killed_can_be_started_again_and_the_ranks_go_on_meanwhile(tmp_path, launch, sees_notes):
    how = ["-np", 3, "--job", tmp_path / "job", "--blacklist-cooldown-range", "0.1", "1"]
    one = launch(*how)
    ranks = one.ranks(3)
    refused = launch(*how)
    assert refused.end() == (2, f'farandolerun: --job "{tmp_path}/job": another farandolerun runs this job\n')
    one.process.kill()
    one.process.wait()
    (tmp_path / "talk").touch()
    ranks[2].kill()
    talked = [tmp_path / f"talked.{rank.pid}" for rank in ranks[:2]]
    while not all(file.exists() for file in talked):  # they write more than a pipe holds
        pass
    (tmp_path / "talk").unlink()
    for note in () if sees_notes else (tmp_path / "job").glob("rank.*"):
        note.unlink()
    two = launch(*how)
    two.wait_for(r"ranks 0, 1 of this job live, started by an earlier farandolerun: ")
    (third,) = two.ranks(1)
    assert (third.number, third.members) == (2, {rank.address for rank in ranks[:2]})
    ranks[0].kill()
    end = "ended by SIGKILL" if sees_notes else "has gone, and how it ended is not known"
    two.wait_for(rf"rank 0 on host localhost {end}; 2 ranks go on; it is started again in 0.1 s\n")
    (first,) = two.ranks(1)
    assert (first.number, first.members) == (0, {ranks[1].address, third.address})
    third.kill()
    two.ranks(1)
    assert finish(tmp_path, two)[0] == 0
    assert os.listdir(tmp_path / "job") == ["lock"]


def test_a_rank_that_had_not_said_where_it_listens_when_the_launcher_was_killed_is_found(tmp_path, launch):
    slow = MEMBER.replace(
        "with open", "while os.environ['FARANDOLE_RANK'] == '1' and not (folder / 'say').exists(): pass\nwith open"
    )
    one = launch("-np", 2, "--job", tmp_path / "job", program=slow)
    (first,) = one.ranks(1)
    one.process.kill()
    one.process.wait()
    two = launch("-np", 3, "--job", tmp_path / "job", program=MEMBER)
    two.wait_for("ranks 0, 1 of this job live")
    assert two.ranks(1)[0].members == {first.address}
    (tmp_path / "say").touch()
    note = tmp_path / "job" / "rank.1"
    while b"member" not in note.read_bytes():
        pass
    first.kill()
    (again,) = two.ranks(1)
    assert again.number == 0 and json.loads(note.read_text())["member"] in again.members
    assert finish(tmp_path, two)[0] == 0


def test_a_folder_of_a_job_that_is_gone_starts_another(tmp_path, launch):
    one = launch("-np", 1, "--job", tmp_path / "job")
    (rank,) = one.ranks(1)
    one.process.kill()
    one.process.wait()
    rank.kill()
    two = launch("-np", 1, "--job", tmp_path / "job")
    assert two.ranks(1)[0].rank == "0"
    two.process.send_signal(signal.SIGTERM)
    code, text = two.end()
    assert code == 143 and "[0] notice\n" in text


def test_a_folder_that_others_can_read_is_refused(tmp_path, launch):
    (tmp_path / "job").mkdir(mode=0o755)
    code, text = launch("-np", 1, "--job", tmp_path / "job").end()
    assert (code, text) == (2, f'farandolerun: --job "{tmp_path}/job": the folder must belong to you, with mode 0700\n')
