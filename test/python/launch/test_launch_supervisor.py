"""The rank's end of a launch, against a made-up launcher; and the launcher's end of that connection."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading

import pytest

from farandole.runner import cli, job, supervisor
from farandole.runner.output import Writer

pytestmark = pytest.mark.once

FILE = supervisor.__file__
CLEAN = {
    name: value for name, value in os.environ.items()
    if not name.startswith(("OMPI_", "PMIX_")) and name != supervisor.THREADS
}  # fmt: skip


class FakeLauncher:
    """Listens, starts one supervisor, and reads its messages one by one."""

    def __init__(self, *program, runs_function=False, rank=5, **variables):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            said = {
                "token": "t", "addresses": [f"127.0.0.1:{port}"], "runs_function": runs_function,
                "tmpdirs": ["/of/mpirun", "/of/the/ranks"], "environment": {"of-the.job": "two\nlines"},
            }  # fmt: skip
            environment = CLEAN | variables | {
                supervisor.VARIABLE: json.dumps(said), "OMPI_COMM_WORLD_RANK": str(rank),
            }  # fmt: skip
            command = [sys.executable, "-I", "-S", FILE, *program]
            self.process = subprocess.Popen(command, env=environment, start_new_session=True)
            listener.settimeout(30)
            self.channel = supervisor.Channel.over(listener.accept()[0])
        self.rank = rank

    def send(self, kind, payload=b""):
        self.channel.send(kind, payload, self.rank)

    def message(self):
        message = self.channel.receive()
        assert message is not None, "the supervisor left"
        return message.kind, message.payload

    def until_exit(self):
        """What came on stdout and stderr before EXIT, and the code."""
        texts = {supervisor.OUT: b"", supervisor.ERR: b"", supervisor.WANT: b""}
        while (got := self.message())[0] != supervisor.EXIT:
            texts[got[0]] += got[1]
        self.end = json.loads(got[1])
        return texts[supervisor.OUT], texts[supervisor.ERR], self.end["code"]

    def close(self):
        self.channel.close()
        self.process.kill()
        self.process.wait(30)


@pytest.fixture
def start():
    started = []

    def start_one(*program, **variables):
        started.append(FakeLauncher(*program, **variables))
        return started[-1]

    yield start_one
    for one in started:
        one.close()


def test_a_rank_says_who_it_is_what_it_wrote_and_how_it_ended(start):
    launcher = start("sh", "-c", "echo out; echo err >&2; exit 3")
    kind, hello = launcher.message()
    assert (kind, json.loads(hello)) == (
        supervisor.HELLO, {"token": "t", "rank": 5, "host": socket.gethostname(), "threads": ""},
    )  # fmt: skip
    assert launcher.until_exit() == (b"out\n", b"err\n", 3)


@pytest.mark.parametrize("code", [0, 3])
def test_it_stays_until_its_last_words_were_read(start, code):
    """Else the kernel may drop what the launcher has not read, and mpirun knows of a failure early."""
    launcher = start("sh", "-c", f"exit {code}")
    launcher.message()
    launcher.until_exit()
    with pytest.raises(subprocess.TimeoutExpired):
        launcher.process.wait(0.3)
    launcher.send(supervisor.GO)
    assert launcher.process.wait(30) == code


def test_it_ends_by_the_programs_signal(start):
    launcher = start("sh", "-c", "kill -11 $$")
    launcher.message()
    assert launcher.until_exit()[2] == -11
    launcher.send(supervisor.GO)
    assert launcher.process.wait(30) == -11


def test_signals_reach_the_program_and_mpiruns_do_not_end_the_supervisor(start):
    launcher = start("sh", "-c", "trap 'echo got; exit 4' TERM; echo up; while :; do sleep 0.05; done")
    launcher.message()
    assert launcher.message() == (supervisor.OUT, b"up\n")
    os.killpg(launcher.process.pid, signal.SIGTERM)
    out, _, code = launcher.until_exit()
    assert (out, code) == (b"got\n", 4)
    assert launcher.end["by_mpirun"]


def test_the_program_and_what_it_started_end_when_the_launcher_is_gone(start):
    launcher = start("sh", "-c", "sleep 600 & echo $!; wait")
    launcher.message()
    started = os.pidfd_open(int(launcher.message()[1]))
    launcher.channel.close()
    assert launcher.process.wait(30) != 0
    ended, _, _ = select.select([started], [], [], 30)
    os.close(started)
    assert ended


def test_a_program_that_cannot_be_started_is_named(start):
    launcher = start("/no/such/program")
    launcher.message()
    _, err, code = launcher.until_exit()
    assert code == supervisor.CANNOT_START
    assert err.startswith(b'farandolerun: cannot start "/no/such/program" on ')


@pytest.mark.parametrize(
    ("given", "expected"), [("/of/mpirun", "/of/the/ranks"), ("/of/another/host", "/of/another/host")]
)
def test_the_program_has_the_temporary_folder_of_its_host(start, given, expected):
    supervised = start("sh", "-c", "echo $TMPDIR", TMPDIR=given)
    supervised.message()
    assert supervised.until_exit() == (f"{expected}\n".encode(), b"", 0)


def test_the_program_has_variables_that_mpirun_does_not_forward(start):
    supervised = start("printenv", "of-the.job")
    supervised.message()
    assert supervised.until_exit() == (b"two\nlines\n", b"", 0)


def test_without_a_launcher_it_becomes_the_program():
    environment = {name: value for name, value in os.environ.items() if name != supervisor.VARIABLE}
    command = [sys.executable, "-I", "-S", FILE, "sh", "-c", "echo $0; exit 6", "itself"]
    done = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=30)
    assert (done.returncode, done.stdout) == (6, b"itself\n")


def test_a_launcher_that_cannot_be_reached_is_reported_with_the_reason():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    said = {
        "token": "t", "addresses": [f"127.0.0.1:{port}"], "runs_function": False, "tmpdirs": [None] * 2,
        "environment": {},
    }  # fmt: skip
    environment = os.environ | {supervisor.VARIABLE: json.dumps(said), "OMPI_COMM_WORLD_RANK": "0"}
    done = subprocess.run(
        [sys.executable, "-I", "-S", FILE, "true"],
        env=environment, capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    assert done.returncode == 1
    assert f"cannot reach the launcher at 127.0.0.1:{port}: " in done.stderr


@pytest.mark.parametrize(
    ("end", "text", "is_consequence"),
    [
        ("raise KeyError('own')", "KeyError: 'own'", False),
        ("raise fl.AbortedError('rank 1 has left')", "AbortedError: rank 1 has left", True),
        ("raise fl.OperationTimeoutError('init: rank 1 has not come')", "init: rank 1 has not come", True),
        (
            "error = fl.HorovodInternalError('rank 1 failed'); error.failed_ranks = (1,); raise error",
            "rank 1 failed",
            True,
        ),
        ("fl.init(); error = fl.AbortedError('bad batch'); error.failed_ranks = (0,); raise error", "bad batch", False),
        ("raise RuntimeError('training failed') from fl.PeerLostError('rank 1')", "training failed", True),
        ("fl.AbortedError('rank 1'); raise KeyError('own')", "KeyError: 'own'", False),
        ("fl.AbortedError('rank 1 has left'); sys.exit(1)", "", True),
    ],
)
def test_a_rank_reports_the_error_that_ends_it_and_whether_another_rank_is_to_blame(start, end, text, is_consequence):
    launcher = start(sys.executable, "-c", f"import sys, farandole as fl\n{end}")
    launcher.message()
    reports = []
    while (got := launcher.message())[0] != supervisor.EXIT:
        reports += [json.loads(got[1])] if got[0] == supervisor.REPORT else []
    assert len(reports) == 1 and reports[0]["is_consequence"] == is_consequence
    assert text in reports[0]["text"] and ("Traceback" in reports[0]["text"]) == bool(text)


def test_programs_that_a_rank_starts_report_nothing(start):
    script = f"""
import os, subprocess, sys, farandole
subprocess.run([sys.executable, "-c", "import farandole; raise KeyError('theirs')"])
if os.fork() == 0: raise KeyError("the child's")
os.wait()
print("end", os.environ.get("{supervisor.REPORT_VARIABLE}"))
"""
    launcher = start(sys.executable, "-c", script)
    launcher.message()
    out, err, code = launcher.until_exit()  # a report is a KeyError there
    assert (out, code) == (b"end None\n", 0) and b"theirs" in err and b"the child's" in err


def test_a_signal_from_the_launcher_is_not_mpiruns(start):
    launcher = start("sleep", "600")
    launcher.message()
    launcher.send(supervisor.SIGNAL, bytes([signal.SIGTERM]))
    assert launcher.until_exit()[2] == -signal.SIGTERM
    assert not launcher.end["by_mpirun"]


def test_rank_0_reads_what_the_launcher_sends_and_asks_for_more(start):
    launcher = start("cat", rank=0)
    launcher.message()
    text = os.urandom(supervisor.INPUT_BYTES)
    came, wants = b"", 0
    for data in (text, text, text, b"end", b""):
        while wants == 0:
            kind, payload = launcher.message()
            wants += kind == supervisor.WANT
            came += payload
        wants -= 1
        launcher.send(supervisor.INPUT, data)
    out, _, code = launcher.until_exit()
    assert (came + out, code) == (3 * text + b"end", 0)


def test_a_program_that_closes_its_input_goes_on(start):
    launcher = start("sh", "-c", "exec <&-; echo closed; sleep 0.2; echo done", rank=0)
    launcher.message()
    assert launcher.message()[0] == supervisor.WANT
    assert launcher.message() == (supervisor.OUT, b"closed\n")
    launcher.send(supervisor.INPUT, b"x")
    assert launcher.until_exit() == (b"done\n", b"", 0)


def test_a_function_comes_in_and_its_result_goes_out(start):
    copy = f"cat >${supervisor.RESULT_VARIABLE}"
    launcher = start("sh", "-c", copy, runs_function=True)
    launcher.message()
    assert launcher.message()[0] == supervisor.WANT
    launcher.send(supervisor.INPUT, b"function")
    came = dict([launcher.message(), launcher.message()])
    assert came == {supervisor.WANT: b"", supervisor.RESULT: b"function"}
    launcher.send(supervisor.INPUT)
    assert launcher.until_exit()[2] == 0


@pytest.mark.parametrize("given, ranks, expected", [
    ({}, 2, max(1, len(os.sched_getaffinity(0)) // 2)),
    ({}, 1000, 1),
    ({"OMP_NUM_THREADS": "7"}, 2, 7),
])  # fmt: skip
def test_threads_share_the_cores_unless_the_user_says_how_many(start, given, ranks, expected):
    variables = {"OMPI_COMM_WORLD_LOCAL_SIZE": str(ranks), **given}
    launcher = start("sh", "-c", "echo $OMP_NUM_THREADS", **variables)
    said = json.loads(launcher.message()[1])["threads"]
    assert launcher.until_exit()[0] == f"{expected}\n".encode()
    assert said == ("" if given else f"OMP_NUM_THREADS={expected} on each of {ranks} ranks; "
                    "set it to choose another number")  # fmt: skip


# A host's


class FakeHost:
    """Starts the supervisor of a host as the launcher does, and reads its messages one by one."""

    SUPERVISOR = (sys.executable, "-I", "-S", FILE)

    def __init__(self, *command, ranks=(2, 3), size=4, **start):
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                self.SUPERVISOR, env=CLEAN, stdin=theirs, stdout=theirs, start_new_session=True
            )
        self.channel = supervisor.Channel.over(ours)
        self.send(supervisor.CONNECT, {"key": "ab" * 32, "token": "t", "id": 7, "addresses": []})
        self.hello = json.loads(self.channel.receive().payload)
        self.send(supervisor.START, {
            "ranks": ranks, "size": size, "command": command, "folder": "/", "environment": None,
            "runs_function": False, "listen": None, "address": "a:1",
        } | start)  # fmt: skip
        self.ready = json.loads(self.channel.receive().payload)

    def send(self, kind, said):
        self.channel.send(kind, json.dumps(said).encode())

    def until_the_end(self):
        """What each rank wrote to stdout, and the codes."""
        texts, codes = {}, {}
        while message := self.channel.receive():
            if message.kind == supervisor.EXIT:
                codes[message.rank] = json.loads(message.payload)["code"]
            elif message.kind == supervisor.OUT:
                texts[message.rank] = texts.get(message.rank, b"") + message.payload
        assert self.process.wait(30) == 0
        return texts, codes

    def close(self):
        self.channel.close()
        self.process.kill()
        self.process.wait(30)


@pytest.fixture
def start_host():
    started = []

    def start_one(*command, **how):
        started.append(FakeHost(*command, **how))
        return started[-1]

    yield start_one
    for one in started:
        one.close()


def test_the_supervisor_of_a_host_runs_its_ranks_with_their_numbers_and_the_key(start_host):
    numbers = "$FARANDOLE_RANK $FARANDOLE_SIZE $FARANDOLE_LOCAL_RANK $FARANDOLE_LOCAL_SIZE $FARANDOLE_ADDRESS"
    key = "$(od -An -tx1 -w32 /proc/self/fd/$FARANDOLE_KEY_FD | tr -d ' ')"
    host = start_host("sh", "-c", f"echo {numbers} $PWD {key}; exit $FARANDOLE_LOCAL_RANK")
    assert (host.hello["token"], host.hello["id"], host.ready["address"]) == ("t", 7, "a:1")
    texts, codes = host.until_the_end()
    assert texts == {
        rank: f"{rank} 4 {rank - 2} 2 a:1 / {'ab' * 32}\n".encode() for rank in (2, 3)
    } and codes == {2: 0, 3: 1}


def test_the_host_of_rank_0_listens_before_the_program_runs(start_host):
    script = """
import os, socket
listener = socket.socket(fileno=int(os.environ["FARANDOLE_LISTEN_FD"]))
client = socket.create_connection(listener.getsockname())
print(os.environ["FARANDOLE_ADDRESS"], listener.accept()[1] == client.getsockname())
"""
    host = start_host(sys.executable, "-c", script, ranks=[0], listen="127.0.0.1", address="127.0.0.1")
    texts, codes = host.until_the_end()
    assert texts == {0: f"{host.ready['address']} True\n".encode()} and codes == {0: 0}


def test_the_key_is_in_no_environment_and_no_command_line(start_host):
    host = start_host("sh", "-c", "env; cat /proc/$PPID/cmdline /proc/$PPID/environ")
    texts, _ = host.until_the_end()
    assert not any(b"abababab" in text for text in texts.values())


def test_programs_have_no_descriptors_but_theirs(start_host):
    texts, _ = start_host("ls", "/proc/self/fd", ranks=[1]).until_the_end()
    assert len(texts[1].split()) == 5  # three streams, the key, the folder


def test_a_host_ends_all_that_its_ranks_started_when_the_launcher_is_gone(start_host):
    host = start_host("sh", "-c", "sleep 600 & echo $!; wait")
    started = []
    while len(started) < 2:
        message = host.channel.receive()
        if message.kind == supervisor.OUT:
            started.append(os.pidfd_open(int(message.payload)))
    host.channel.close()
    for one in started:
        ended, _, _ = select.select([one], [], [], 30)
        os.close(one)
        assert ended


@pytest.mark.parametrize("script", ["echo $$; exec sleep 600", "sleep 600 & echo $!; wait"], ids=["it", "its child"])
@pytest.mark.parametrize("starts", ["start", "start_host"], ids=["mpirun", "host"])
def test_programs_end_with_a_supervisor_that_is_killed(request, starts, script):
    one = request.getfixturevalue(starts)("sh", "-c", script)
    while (message := one.channel.receive()).kind != supervisor.OUT:
        pass
    program = os.pidfd_open(int(message.payload))
    one.process.kill()
    assert select.select([program], [], [], 30)[0]
    os.close(program)


def test_a_program_whose_supervisor_was_killed_before_the_kernel_knew_ends(monkeypatch):
    monkeypatch.setattr(os, "getppid", lambda: 1)  # who takes the program over
    program = supervisor.Program(1, ["sleep", "5"], {}, has_input=False, leads_group=True)
    assert program.finish() == -signal.SIGKILL


def test_a_kernel_without_pidfds_and_a_python_without_them_will_do(start_host, monkeypatch):
    lacking = f"import os, runpy; del os.pidfd_open; runpy.run_path({FILE!r}, run_name='__main__')"
    monkeypatch.setattr(FakeHost, "SUPERVISOR", [sys.executable, "-I", "-S", "-c", lacking])
    host = start_host("sh", "-c", "echo up; exit 3", ranks=[1])
    assert host.until_the_end() == ({1: b"up\n"}, {1: 3})


def test_a_rank_that_ends_badly_takes_what_it_started_along(start_host):
    host = start_host("sh", "-c", "sleep 600 & echo $!; exit 3", ranks=[1])
    while (message := host.channel.receive()).kind != supervisor.OUT:
        pass
    left = os.pidfd_open(int(message.payload))
    assert host.until_the_end()[1] == {1: 3}
    assert select.select([left], [], [], 30)[0]
    os.close(left)


# The launcher's end


@pytest.fixture
def pair():
    """A channel and the socket its supervisor would hold."""
    mine, theirs = socket.socketpair()
    with mine, theirs:
        yield supervisor.Channel.over(mine), theirs


def message(kind, payload):
    return supervisor.HEADER.pack(kind, 3, 0.0, len(payload)) + payload


def test_a_clock_that_is_set_back_does_not_mix_a_ranks_output():
    def said(text, time_s):
        return supervisor.Message(supervisor.OUT, text, time_s)

    found = [("a", said(b"1", 9.0)), ("a", said(b"2", 5.0)), ("b", said(b"3", 7.0)), ("a", said(b"4", 6.0))]
    assert b"".join(message.payload for _, message in job.in_order(found)) == b"3124"


def hello(token="secret"):
    payload = json.dumps({"token": token, "rank": 3, "host": "h", "threads": ""}).encode()
    return message(supervisor.HELLO, payload)


def test_messages_come_out_whole_however_they_are_split(pair):
    channel, theirs = pair
    data = hello() + message(supervisor.OUT, b"abc") + message(supervisor.EXIT, b"{}")

    def send():
        for byte in data:
            theirs.send(bytes([byte]))
        theirs.close()

    threading.Thread(target=send).start()
    assert job.is_ours(channel.receive(), "secret")
    found = [channel.receive(), channel.receive()]
    assert [(one.kind, one.payload, one.rank) for one in found] == [
        (supervisor.OUT, b"abc", 3), (supervisor.EXIT, b"{}", 3),
    ]  # fmt: skip
    assert channel.receive() is None


@pytest.mark.parametrize("said", [
    hello(token="guess"),
    message(supervisor.OUT, b"x"),
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    message(supervisor.HELLO, b"[]"),
])  # fmt: skip
def test_a_stranger_is_dropped(pair, said):
    channel, theirs = pair
    theirs.send(said)
    theirs.close()
    assert not job.is_ours(channel.receive(), "secret")


def test_supervisors_of_this_machine_connect_over_the_loopback_only():
    options = cli.parse(["-np", "2", "true"])
    for is_here in (True, False):
        one = job.Job(options, Writer(None, None))
        addresses = one.open_listener(is_here)
        one._is_over = True
        assert [address.startswith("127.0.0.1:") for address in addresses] == [is_here] * len(addresses)
