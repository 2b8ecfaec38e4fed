"""farandole top, and what farandole ps says as JSON: of jobs that run, and of ranks as they may be."""

import fcntl
import json
import os
import pathlib
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time

import pytest
import torch

import farandole.torch as hvd
import ranks
from farandole import flight, ps, top
from farandole.__main__ import main
from hosts import TwoHosts, or_skip

sys.path.append(str(ranks.REPOSITORY / "test" / "fault"))

from late_ranks import Slow

pytestmark = pytest.mark.once

FARANDOLE = [sys.executable, "-m", "farandole"]
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"


def train():
    """What each rank runs, until it is ended: rank 1 takes three times as long as rank 0."""
    hvd.init()
    model = torch.nn.Linear(1000, 100)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
    while True:
        optimizer.zero_grad()
        x = torch.ones(4, 1000, requires_grad=True)
        model(Slow.apply(x, time.sleep, 0.03 if hvd.rank() == 1 else 0.01)).sum().backward()
        optimizer.step()


def run(*arguments, **variables):
    return subprocess.run(
        [*FARANDOLE, *arguments], env=os.environ | {"PYTHONPATH": ranks.PYTHON_PATH} | variables,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


class Running:
    """A context: the job above, of two ranks on this host."""

    def __enter__(self):
        command = [sys.executable, "-m", "farandole.runner", "-np", "2", sys.executable, __file__]
        self._launcher = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": ranks.PYTHON_PATH})
        self.ranks = ranks.wait_for(self.find, 60)
        return self

    def __exit__(self, *_):
        self._launcher.terminate()
        assert self._launcher.wait(60)

    def find(self):
        """What its ranks do, once they have done some steps."""
        mine = ranks.descendants(self._launcher.pid)
        done = run("ps", "--json")
        assert done.returncode == 0, done.stderr
        for job in json.loads(done.stdout)["jobs"]:
            found = job["ranks"]
            if {one["pid"] for one in found} <= mine and min(one["steps"] for one in found) > 30:
                return found
        return None


@pytest.fixture(scope="module")
def job():
    with Running() as running:
        yield running


def test_ps_says_it_as_json(job):
    first, second = job.ranks
    assert (first["rank"], second["rank"]) == (0, 1) and first["size"] == 2
    assert first["host"] == socket.gethostname() and first["job"] == second["job"] != ""
    assert second["late_ms"] > 10 and first["late_ms"] == 0
    assert second["mean_step_ms"] == second["step_ns"] / second["steps"] / 1e6 > 30
    assert first["blocked_ns"] > second["blocked_ns"] >= 0
    # The gradients of each step, 400,400 bytes, as often as there are steps.
    assert 0.1 < first["bytes_per_s"] / (400_400e3 / first["mean_step_ms"]) < 10
    assert first["state"] == "running" and first["last"].startswith("allreduce ")


def test_top_prints_once_where_there_is_no_terminal(job):
    done = run("top", "--interval", "0.5")
    assert done.returncode == 0 and done.stderr == ""
    lines = done.stdout.splitlines()
    assert all(len(line) <= 80 and line.isprintable() for line in lines), done.stdout
    (at,) = [i for i, line in enumerate(lines) if line.split()[2:3] == [str(job.ranks[1]["pid"])]]
    late_ms, step_ms = lines[at].split()[4], lines[at].split()[3]
    assert float(late_ms) > 10 and float(step_ms) > 30
    assert lines[at - 1].split()[4] == "0.0"
    assert re.match(r"  Rank 1 makes the others wait [\d.]+ ms of [\d.]+ in each step\.$", lines[at - 3])
    assert re.match(rf"2 of 2 ranks, on {socket.gethostname()}: [\d.]+ ms a step, [\d.]+ MB/s$", lines[at - 4])


class Terminal:
    """A context: a terminal of 24 lines and so many columns, and top in it."""

    def __init__(self, columns=80, command=(*FARANDOLE, "top", "--interval", "0.2"), stderr=None):
        self.ours, self.theirs = os.openpty()
        self.resize(columns)
        self.before = termios.tcgetattr(self.theirs)
        self.text = ""
        environment = os.environ | {"PYTHONPATH": ranks.PYTHON_PATH, "TERM": "xterm"}
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *command], stdin=self.theirs, stdout=self.theirs, stderr=stderr or self.theirs,
            env=environment,
        )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)

    def resize(self, columns):
        fcntl.ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))

    def read(self, until):
        """Until something is true; the text since the call before."""
        begin, end_s = len(self.text), time.monotonic() + 60
        while not until(self.text[begin:]):
            assert time.monotonic() < end_s, self.text
            if select.select([self.ours], [], [], 0.1)[0]:
                self.text += os.read(self.ours, 1 << 16).decode()
        return self.text[begin:]

    def end(self):
        """Reads until the process has ended. Its exit code."""
        self.read(lambda _: self.process.poll() is not None)
        if select.select([self.ours], [], [], 0)[0]:
            self.text += os.read(self.ours, 1 << 16).decode()
        return self.process.returncode

    def is_as_before(self):
        return termios.tcgetattr(self.theirs) == self.before


def frames_of(text):
    """The lines of each whole frame."""
    return [frame.replace("\x1b[K", "").split("\r\n") for frame in re.findall(r"\x1b\[H(.*?)\x1b\[J", text, re.S)]


@pytest.mark.parametrize(
    "end, code", [(b"\x03", 0), (b"q", 0), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=["Ctrl-C", "q", "SIGTERM", "SIGHUP"],
)  # fmt: skip
def test_top_leaves_the_terminal_as_it_was(job, end, code):
    with Terminal() as terminal:
        said = terminal.read(lambda text: " makes the others wait " in text and len(frames_of(text)) > 2)
        assert not terminal.is_as_before()
        if isinstance(end, bytes):
            os.write(terminal.ours, end)
        else:
            terminal.process.send_signal(end)
        assert terminal.end() == code
        assert terminal.is_as_before()
    assert terminal.text.startswith(ENTER) and terminal.text.endswith(LEAVE)
    assert terminal.text.count(ENTER) == terminal.text.count(LEAVE) == 1
    assert any(str(job.ranks[1]["pid"]) in line for line in frames_of(said)[-1])
    assert max(len(line) for frame in frames_of(said) for line in frame) <= 80


def test_top_ends_with_its_terminal(tmp_path):
    with open(tmp_path / "stderr", "w+") as stderr, Terminal(stderr=stderr) as terminal:
        terminal.read(frames_of)
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), terminal.ours)  # which closes it
        assert terminal.process.wait(60) == 129
        assert pathlib.Path(stderr.name).read_text() == ""


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_top_that_is_ended_ends_what_asks(tmp_path, number, code):
    agent = tmp_path / "agent"
    agent.write_text(f"#!/bin/sh\nsleep 600 &\necho $! $$ > {tmp_path}/part\nmv {tmp_path}/part {tmp_path}/pids\n")
    agent.chmod(0o755)
    environment = os.environ | {"PYTHONPATH": ranks.PYTHON_PATH, "FARANDOLE_AGENT": str(agent)}
    with subprocess.Popen([*FARANDOLE, "top", "--once", "-H", "a"], env=environment) as process:
        ranks.wait_for((tmp_path / "pids").exists, 60)
        asking, starter = (pathlib.Path("/proc", pid, "stat") for pid in (tmp_path / "pids").read_text().split())
        ranks.wait_for(lambda: " Z " in starter.read_text(), 60)
        process.send_signal(number)
        assert process.wait(60) == code
    ranks.wait_for(lambda: not asking.exists() or " Z " in asking.read_text(), 5)


def test_an_error_of_top_leaves_the_terminal_as_it_was():
    script = "from farandole import top\ntop.lines_of = top.Watch.lines = None\ntop.main([])"
    with Terminal(command=(sys.executable, "-c", script)) as terminal:
        assert terminal.end() == 1 and terminal.is_as_before()
    assert terminal.text.startswith(ENTER + LEAVE) and "TypeError" in terminal.text


def test_top_that_is_stopped_leaves_the_terminal_meanwhile(job):
    with Terminal() as terminal:
        terminal.read(frames_of)
        os.write(terminal.ours, b"\x1a")  # Ctrl-Z
        terminal.read(lambda text: text.endswith(LEAVE))
        ranks.wait_for(lambda: " T " in pathlib.Path(f"/proc/{terminal.process.pid}/stat").read_text(), 60)
        assert terminal.is_as_before()
        terminal.process.send_signal(signal.SIGCONT)
        terminal.read(lambda text: text.startswith(ENTER) and frames_of(text))
        os.write(terminal.ours, b"q")
        assert terminal.end() == 0 and terminal.is_as_before()


def test_top_takes_the_size_that_the_terminal_has(job):
    with Terminal(command=(*FARANDOLE, "top", "--interval", "500")) as terminal:
        terminal.read(frames_of)  # there is no other for long, but for what follows
        terminal.resize(30)
        (frame, *_) = frames_of(terminal.read(frames_of))
        assert 25 < max(map(len, frame)) <= 30 and len(frame) <= 24


@pytest.mark.parametrize("command", ["ps", "ps --json", "top --once --interval 0.1"])
def test_who_has_read_enough_gets_no_traceback(command):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as closed:
        environment = os.environ | {"PYTHONPATH": ranks.PYTHON_PATH}
        done = subprocess.run(
            [*FARANDOLE, *command.split()], stdout=closed, stderr=subprocess.PIPE, env=environment, timeout=60
        )
    assert (done.returncode, done.stderr) == (141, b"")


def test_another_pipe_that_breaks_is_an_error(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(ps, "main", lambda _: os.write(writer, b"x"))
    with pytest.raises(BrokenPipeError):
        main(["ps"])
    os.close(writer)


def rank(number, size=64, steps=(100, 100 * 60_000_000, 100 * 20_000_000), **changes):
    common = {
        "host": "a", "pid": 1000 + number, "job": "", "state": "running", "waits_in": "", "waits_s": 0.0,
        "last": "", "last_s": 0.0, "bytes_per_s": 1e6,
    }  # fmt: skip
    return ps.Rank(number, size, **common | changes, steps=flight.Steps(*steps))


def test_of_many_ranks_the_ten_worst_are_shown():
    late = {5: 8, 37: 12}  # ms of a step of 60
    job = [
        rank(i, steps=(100, 6 * 10**9, (20 - late.get(i, 0)) * 10**8), waits_in='allreduce "x"', waits_s=i / 1000)
        for i in range(64)
    ]
    job[60] = job[60]._replace(state="stopped")
    lines = list(top.lines_of(job, 10))
    assert lines[0] == "64 of 64 ranks, on a: 60 ms a step, 64.0 MB/s"
    assert lines[1] == "  Rank 37 makes the others wait 12 ms of 60 in each step."
    assert lines[2] == "  Rank 5 makes the others wait 8 ms of 60 in each step."
    rows = [line.split() for line in lines[4:-1]]
    assert [row[0] for row in rows] == ["60", "37", "5", "63", "62", "61", "59", "58", "57", "56"]
    assert rows[1] == ["37", "a", "1037", "60.0", "12.0", "1.0", *'0.0 s in allreduce "x"'.split()]
    assert rows[0][-1] == "stopped" and rows[3][4] == "0.0"
    assert lines[-1] == "  54 more: 60 ms a step, 54.0 MB/s; 54 wait, for 0.1 s at most"


def test_who_keeps_all_others_waiting_is_among_the_worst():
    job = [rank(i, waits_in='broadcast "y"', waits_s=3 + i / 100) for i in range(64)]
    job[17] = rank(17)
    lines = list(top.lines_of(job, 10))
    assert lines[1] == '  Rank 17 has not come to broadcast "y" for 3.6 s.'
    assert lines[3].split()[0] == "17" and lines[4].split()[0] == "63"

    def blames(job, age_s=0):
        return [line for line in top.lines_of(job, 10, age_s) if "not come" in line]

    assert blames(job) and not blames(job[:-1])  # rank 63 may be at it
    assert not blames(job, 3)  # rank 17 may have come since it was looked at
    job[40] = rank(40, waits_in='allreduce "z"', waits_s=0.1)  # its oldest operation: "y" has perhaps ended
    assert blames(job) == lines[1:2]


def test_what_a_terminal_would_obey_is_escaped():
    (line,) = [
        line
        for line in top.lines_of([rank(0, 1, host="\x1b[2J\u202e", waits_in='allreduce "\r\n\u4e00"')], 10)
        if line.split()[0] == "0"
    ]
    assert line.isascii() and line.isprintable() and '"\\r\\n\\u4e00"' in line


def test_the_steps_are_those_since_the_last_look():
    intervals = top.Intervals()

    def looked(*steps):
        job = [rank(i, steps=(count, count * 1000, count * blocked)) for i, (count, blocked) in enumerate(steps)]
        return [(one.steps.steps, one.steps.blocked_ns) for one in intervals.since([job])[0]]

    assert looked((10, 1), (10, 2)) == [(10, 10), (10, 20)]  # since they began
    assert looked((11, 1), (10, 2)) == [(10, 10), (10, 20)]  # rank 1 has not ended a step yet
    assert looked((12, 1), (11, 2)) == [(2, 2), (1, 2)]
    assert looked((14, 1), (11, 2)) == [(2, 2), (0, 0)]  # rank 1 has joined
    assert looked((16, 1), (5, 2)) == [(2, 2), (0, 0)]  # it has begun anew
    assert looked((17, 1), (6, 2)) == [(1, 1), (1, 2)]
    assert looked((18, 1), (7, 2), (90, 3)) == [(1, 1), (1, 2), (0, 0)]  # rank 2 was not known


def test_the_steps_stay_until_all_hosts_have_answered_again():
    intervals = top.Intervals()

    def looked(*job):
        return [one.steps.steps for one in intervals.since([job])[0]]

    def of_rank_0(count):
        return rank(0, 2, (count, 0, 0))

    old, new = (rank(1, 2, (count, 0, 0), host="b") for count in (100, 120))
    assert looked(of_rank_0(100), old) == [100, 100]
    assert looked(of_rank_0(105), old) == looked(of_rank_0(112), old) == [100, 100]
    assert looked(of_rank_0(118), new) == [18, 20]
    assert looked(of_rank_0(125), new) == [18, 20]


def test_bandwidth_is_of_operations_that_ended_lately():
    def bytes_per_s(*operations):
        events = [
            flight.Event("submitted", "allreduce", "x", 0, 1, "OK", 100 - began, ended is not None, 1000,
                         ended_s=0 if ended is None else 100 - ended)
            for began, ended in operations
        ]  # fmt: skip
        return ps._look_at(flight.Flight(0, 1, os.getpid(), "a", events), 100).bytes_per_s

    assert bytes_per_s() == bytes_per_s((8, 6)) == bytes_per_s((8, None)) == 0
    assert bytes_per_s((8, 1)) == 200
    assert bytes_per_s((2, 1), (1, 0.5)) == 1000
    assert bytes_per_s((0.01, 0)) == 1000


def test_ranks_of_a_job_are_put_together_unless_they_may_be_of_two():
    def merged(*groups):
        return [[(one.rank, one.host) for one in job] for job in ps.merge(groups)]

    a, b = [rank(0, 2, host="a")], [rank(1, 2, host="b")]
    assert merged(b, a) == [[(0, "a"), (1, "b")]]
    assert len(merged(a, a)) == len(merged(a, [rank(1, 3, host="b")])) == len(merged(a, [rank(1, 2)])) == 2
    assert len(merged([rank(0, 2, job="x")], [rank(1, 2, job="y", host="b")])) == 2
    assert merged([rank(0, 2, job="x")], [rank(1, 2, job="x")]) == [[(0, "a"), (1, "a")]]
    # Of newcomers no job is known.
    assert merged([rank(1, 3)], [rank(2, 3)], [rank(0, 3, job="x")]) == [[(0, "a"), (1, "a"), (2, "a")]]
    assert len(merged([rank(0, 3, job="x")], [rank(1, 3)], [rank(2, 3, job="y")])) == 2


def test_a_newcomer_is_of_a_job_that_is_not_known():
    def job_of(**variables):
        with subprocess.Popen(["sleep", "600"], env=variables) as process:
            ranks.wait_for(lambda: pathlib.Path(f"/proc/{process.pid}/cmdline").read_bytes().startswith(b"sleep"), 60)
            said = ps._job_of(process.pid)
            process.kill()
        return said

    assert job_of(FARANDOLE_ADDRESS="a:1", SLURM_JOB_ID="7") == "a:1"
    assert job_of(FARANDOLE_MEMBERS="a:2", SLURM_JOB_ID="7") == ""


def test_a_host_that_cannot_be_asked_is_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(top, "_ASK_S", 1.0)
    agent = tmp_path / "agent"
    agent.write_text(
        "#!/bin/sh\ncase $1 in slow) sleep 600;; odd) echo '{\"jobs\": [7]}';; "
        "closed) echo 'no\033[2J route' >&2; exit 9;; none) echo '{\"jobs\": []}';; esac\n"
    )
    agent.chmod(0o755)
    monkeypatch.setenv("FARANDOLE_AGENT", str(agent))
    asked = top.find_hosts("slow,odd,closed,none")
    with top.concurrent.futures.ThreadPoolExecutor(4) as pool:
        for host in asked:
            host.update(pool)
        for host in asked:
            host.wait()
    assert list(top.Watch(asked, 10).lines()) == [
        "slow has not answered within 1 s",
        "odd cannot be asked: this is not what farandole ps --json prints: '{\"jobs\": [7]}\\n'",
        "closed cannot be asked: no\\x1b[2J route",
        "no ranks of this user run here",
    ]


@pytest.mark.parametrize("agent, told", [("", '"ssh", which'), ("missing", '"missing", which'), ("'", "No closing")])
def test_hosts_that_nothing_reaches_are_lines(agent, told):
    done = run("top", "--once", "--interval", "0.1", "-H", "a,localhost", FARANDOLE_AGENT=agent, PATH="/nowhere")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"a cannot be asked: {told}") and "Traceback" not in done.stderr


def test_what_is_asked_wrongly_is_one_message(capsys):
    assert main(["top", "-H", "a b"]) == 2
    assert 'farandole top: -H "a b": "a b" is not a host' in capsys.readouterr().err
    for words, told in (
        (["--interval", "0"], '"0" is not a number from 0.1'),
        (["--rows", "x"], '"x" is not a number'),
    ):
        with pytest.raises(SystemExit):
            main(["top", *words])
        assert told in capsys.readouterr().err


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with or_skip(TwoHosts(tmp_path_factory.mktemp("hosts"), has_own_processes=True)) as played:
        launcher = played.farandolerun(1, [sys.executable, __file__])
        yield played
    launcher.communicate(timeout=60)


@pytest.mark.parametrize("given", ["10.77.0.1,10.77.0.2", "10.77.0.2,10.77.0.3"])
def test_the_ranks_of_a_job_on_two_hosts(hosts, given):
    is_whole = "10.77.0.3" not in given

    def found():
        process = hosts.start_rank(0, [*FARANDOLE, "top", "--once", "--interval", "0.5", "-H", given])
        said, _ = process.communicate(timeout=60)
        assert process.returncode == 0, said
        told = "  Rank 1 makes the others wait " if is_whole else "1 of 2 ranks, on played2: "
        return said if told in said and "no steps" not in said else None

    said = ranks.wait_for(found, 60)  # ranks start one after another
    rows = [line.split()[:2] for line in said.splitlines()]
    assert ["1", "played2"] in rows
    assert (["0", "played1"] in rows) == ("2 of 2 ranks, on 2 hosts: " in said) == is_whole
    assert ("10.77.0.3 cannot be asked: exit code 9" in said) == ("cannot be asked" in said) != is_whole


if __name__ == "__main__":
    train()
