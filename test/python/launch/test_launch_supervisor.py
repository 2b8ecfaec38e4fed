"""The rank's end of a launch, against a made-up launcher; and the launcher's end of that connection."""

import contextlib
import functools
import json
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading

import pytest

from farandole.runner import acceptor, cli, job, supervisor
from farandole.runner.output import Writer
from strangers import Strangers, hello

pytestmark = pytest.mark.once

FILE = supervisor.__file__
CLEAN = {
    name: value for name, value in os.environ.items()
    if not name.startswith(("OMPI_", "PMIX_")) and name != supervisor.THREADS
}  # fmt: skip


class Port:
    """An acceptor at the loopback, and the connections that it has taken."""

    def __init__(self, token):
        listener = supervisor.open_listener("127.0.0.1")
        self.address = supervisor.join_address(*listener.getsockname())
        self.taken = queue.SimpleQueue()
        self.acceptor = acceptor.Acceptor(listener, token, self.taken.put)


@contextlib.contextmanager
def open_port(token="t"):
    port = Port(token)
    yield port
    port.acceptor.close()


def start_for_mpirun(address, *program, runs_function=False, version=supervisor.PROTOCOL, how=None, **variables):
    said = {
        "version": version, "token": "t", "addresses": [address], "machine": supervisor.machine(),
        "runs_function": runs_function, "tmpdirs": ["/of/mpirun", "/of/the/ranks"],
        "environment": {"of-the.job": "two\nlines"}, "size": 2, "master_port": 0,
    }  # fmt: skip
    environment = CLEAN | variables | {supervisor.VARIABLE: json.dumps(said)}
    command = [sys.executable, "-I", "-S", FILE, *program]
    return subprocess.Popen(command, env=environment, start_new_session=True, **(how or {}))


def next_output(one):
    """Of any rank."""
    while (message := one.channel.receive()).kind != supervisor.OUT:
        pass
    return message.payload


@contextlib.contextmanager
def expect_end(payload):
    """The process of this number ends within, or soon after, the body."""
    process = os.pidfd_open(int(payload))
    try:
        yield
        assert select.select([process], [], [], 30)[0]
    finally:
        os.close(process)


class Begun:
    """Has a process and a channel to it."""

    def close(self):
        self.channel.close()
        self.process.kill()
        self.process.wait(30)


class FakeLauncher(Begun):
    """Listens, starts one supervisor, and reads its messages one by one."""

    def __init__(self, *program, runs_function=False, rank=5, **variables):
        with open_port() as port:
            variables |= {"OMPI_COMM_WORLD_RANK": str(rank)}
            self.process = start_for_mpirun(port.address, *program, runs_function=runs_function, **variables)
            self.channel = supervisor.Channel.over(port.taken.get(timeout=30))
        self.rank = rank
        kind, said = self.message()
        assert kind == supervisor.HELLO
        self.hello = json.loads(said)

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


@pytest.fixture
def begin():
    """Starts one of a class, and closes it with the test."""
    with contextlib.ExitStack() as begun:

        def begin_one(kind, *command, **how):
            one = kind(*command, **how)
            begun.callback(one.close)
            return one

        yield begin_one


@pytest.fixture
def start(begin):
    return functools.partial(begin, FakeLauncher)


@pytest.mark.parametrize(("command", "variables", "out", "err", "code"), [
    (["sh", "-c", "echo out; echo err >&2; exit 3"], {}, "out\n", "err\n", 3),
    (["printenv", "TMPDIR"], {"TMPDIR": "/of/mpirun"}, "/of/the/ranks\n", "", 0),  # the temporary folder of its host
    (["printenv", "TMPDIR"], {"TMPDIR": "/of/another/host"}, "/of/another/host\n", "", 0),
    (["printenv", "of-the.job"], {}, "two\nlines\n", "", 0),  # which mpirun does not forward
])  # fmt: skip
def test_what_a_rank_wrote_and_how_it_ended(start, command, variables, out, err, code):
    launcher = start(*command, **variables)
    assert launcher.hello == {
        "version": supervisor.PROTOCOL, "rank": 5, "host": socket.gethostname(), "threads": ""
    }  # fmt: skip
    assert launcher.until_exit() == (out.encode(), err.encode(), code)


@pytest.mark.parametrize(("end", "code"), [("exit 0", 0), ("exit 3", 3), ("kill -11 $$", -11)])
def test_it_stays_until_its_last_words_were_read_and_ends_as_the_program(start, end, code):
    """Else the kernel may drop what the launcher has not read, and mpirun knows of a failure early."""
    launcher = start("sh", "-c", end)
    assert launcher.until_exit()[2] == code
    with pytest.raises(subprocess.TimeoutExpired):
        launcher.process.wait(0.3)
    launcher.send(supervisor.GO)
    assert launcher.process.wait(30) == code


def test_signals_reach_the_program_and_mpiruns_do_not_end_the_supervisor(start):
    launcher = start("sh", "-c", "trap 'echo got; exit 4' TERM; echo up; while :; do sleep 0.05; done")
    assert launcher.message() == (supervisor.OUT, b"up\n")
    os.killpg(launcher.process.pid, signal.SIGTERM)
    out, _, code = launcher.until_exit()
    assert (out, code) == (b"got\n", 4)
    assert launcher.end["by_mpirun"]


def test_a_program_that_cannot_be_started_is_named(start):
    launcher = start("/no/such/program")
    _, err, code = launcher.until_exit()
    assert code == supervisor.CANNOT_START
    assert err.startswith(b'farandolerun: cannot start "/no/such/program" on ')


def test_without_a_launcher_it_becomes_the_program():
    environment = {name: value for name, value in os.environ.items() if name != supervisor.VARIABLE}
    command = [sys.executable, "-I", "-S", FILE, "sh", "-c", "echo $0; exit 6", "itself"]
    done = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=30)
    assert (done.returncode, done.stdout) == (6, b"itself\n")


def until_it_gives_up(address, **said):
    how = {"stderr": subprocess.PIPE, "text": True}
    process = start_for_mpirun(address, "echo", "it runs", how=how, OMPI_COMM_WORLD_RANK="0", **said)
    try:
        return process.communicate(timeout=60)[1], process.returncode
    finally:
        process.kill()


def test_a_launcher_that_cannot_be_reached_is_reported_with_the_reason():
    with open_port() as port:
        pass
    err, code = until_it_gives_up(port.address)
    assert code == 1 and f"cannot reach the launcher at {port.address}: " in err


def test_a_program_at_the_launchers_address_that_does_not_know_the_token_is_told_nothing():
    """Neither runs the rank's program, nor does the supervisor send more than 32 random bytes."""
    heard = []

    def answer(listener):
        connection, _ = listener.accept()
        with connection:
            heard.append(connection.recv(4096))
            connection.sendall(os.urandom(2 * supervisor.PROOF_BYTES))
            heard.append(connection.recv(4096))

    with supervisor.open_listener("127.0.0.1") as listener:
        thread = threading.Thread(target=answer, args=[listener])
        thread.start()
        address = supervisor.join_address(*listener.getsockname())
        err, code = until_it_gives_up(address)
        thread.join()
    assert code == 1 and err.endswith(f"{address}: what listens there does not know the token of this job\n")
    assert [len(one) for one in heard] == [supervisor.PROOF_BYTES, 0]


def test_a_launcher_of_another_version_is_one_message():
    message = f"farandolerun: {socket.gethostname()} has another version of Farandole than the launcher\n"
    assert until_it_gives_up("127.0.0.1:1", version=1) == (message, 1)
    connect = json.dumps({"key": "ab" * 32, "token": "t", "id": 7, "addresses": []}).encode()  # of version 1
    done = subprocess.run(
        [sys.executable, "-I", "-S", FILE], input=message_of(supervisor.CONNECT, connect), env=CLEAN,
        capture_output=True, check=False, timeout=30,
    )  # fmt: skip
    assert (done.stdout, done.stderr.decode(), done.returncode) == (b"", message, 1)


def test_own_addresses_are_left_out_on_other_machines():
    addresses = ["127.0.0.1:1", "[::1]:1", "192.0.2.1:1"]
    assert supervisor.leave_out_own(addresses, "another") == addresses[2:]
    assert supervisor.leave_out_own(addresses, supervisor.machine()) == addresses
    assert supervisor.leave_out_own(addresses[:1], "another") == addresses[:1]  # all there is


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
    out, err, code = launcher.until_exit()  # a report is a KeyError there
    assert (out, code) == (b"end None\n", 0) and b"theirs" in err and b"the child's" in err


def test_a_signal_from_the_launcher_is_not_mpiruns(start):
    launcher = start("sleep", "600")
    launcher.send(supervisor.SIGNAL, bytes([signal.SIGTERM]))
    assert launcher.until_exit()[2] == -signal.SIGTERM
    assert not launcher.end["by_mpirun"]


def test_rank_0_reads_what_the_launcher_sends_and_asks_for_more(start):
    launcher = start("cat", rank=0)
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
    assert launcher.message()[0] == supervisor.WANT
    assert launcher.message() == (supervisor.OUT, b"closed\n")
    launcher.send(supervisor.INPUT, b"x")
    assert launcher.until_exit() == (b"done\n", b"", 0)


def test_a_function_comes_in_and_its_result_goes_out(start):
    copy = f"cat >${supervisor.RESULT_VARIABLE}"
    launcher = start("sh", "-c", copy, runs_function=True)
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
    said = launcher.hello["threads"]
    assert launcher.until_exit()[0] == f"{expected}\n".encode()
    assert said == ("" if given else f"OMP_NUM_THREADS={expected} on each of {ranks} ranks; "
                    "set it to choose another number")  # fmt: skip


# A host's


class FakeHost(Begun):
    """Starts the supervisor of a host as the launcher does, and reads its messages one by one."""

    SUPERVISOR = (sys.executable, "-I", "-S", FILE)

    def __init__(self, *command, ranks=(2, 3), size=4, **start):
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                self.SUPERVISOR, env=CLEAN, stdin=theirs, stdout=theirs, start_new_session=True
            )
        self.channel = supervisor.Channel.over(ours)
        self.send(supervisor.CONNECT, {"version": supervisor.PROTOCOL, "key": "ab" * 32, "id": 7, "addresses": []})
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


@pytest.fixture
def start_host(begin):
    return functools.partial(begin, FakeHost)


def test_the_supervisor_of_a_host_runs_its_ranks_with_their_numbers_and_the_key(start_host):
    numbers = "$FARANDOLE_RANK $FARANDOLE_SIZE $FARANDOLE_LOCAL_RANK $FARANDOLE_LOCAL_SIZE $FARANDOLE_ADDRESS"
    key = "$(od -An -tx1 -w32 /proc/self/fd/$FARANDOLE_KEY_FD | tr -d ' ')"
    host = start_host("sh", "-c", f"echo {numbers} $PWD {key}; exit $FARANDOLE_LOCAL_RANK")
    assert (host.hello["id"], host.ready["address"]) == (7, "a:1")
    texts, codes = host.until_the_end()
    assert texts == {
        rank: f"{rank} 4 {rank - 2} 2 a:1 / {'ab' * 32}\n".encode() for rank in (2, 3)
    } and codes == {2: 0, 3: 1}


@pytest.mark.parametrize(("listen", "said", "reached"), [
    ("127.0.0.1", "127.0.0.1", ["127.0.0.1"]),
    ("", "far-a", ["127.0.0.1", "::1"]),  # the other hosts may know either address by that name
    ("", "fd00::1", ["::1"]),
])  # fmt: skip
def test_the_host_of_rank_0_listens_before_the_program_runs(start_host, listen, said, reached):
    script = f"""
import os, socket
listener = socket.socket(fileno=int(os.environ["FARANDOLE_LISTEN_FD"]))
clients = [socket.create_connection((host, listener.getsockname()[1])) for host in {reached}]
print(os.environ["FARANDOLE_ADDRESS"], *[listener.accept()[1][1] == one.getsockname()[1] for one in clients])
"""
    host = start_host(sys.executable, "-c", script, ranks=[0], listen=listen, address=said)
    texts, codes = host.until_the_end()
    words = [host.ready["address"]] + ["True"] * len(reached)
    assert texts == {0: f"{' '.join(words)}\n".encode()} and codes == {0: 0}
    assert supervisor.split_address(host.ready["address"])[0] == said


def test_the_key_is_in_no_environment_and_no_command_line(start_host):
    host = start_host("sh", "-c", "env; cat /proc/$PPID/cmdline /proc/$PPID/environ")
    texts, _ = host.until_the_end()
    assert not any(b"abababab" in text for text in texts.values())


def test_programs_have_no_descriptors_but_theirs(start_host):
    texts, _ = start_host("ls", "/proc/self/fd", ranks=[1]).until_the_end()
    assert len(texts[1].split()) == 5  # three streams, the key, the folder


@pytest.mark.parametrize("script", ["echo $$; exec sleep 600", "sleep 600 & echo $!; wait"], ids=["it", "its child"])
@pytest.mark.parametrize("starts", ["start", "start_host"], ids=["mpirun", "host"])
@pytest.mark.parametrize("is_killed", [True, False], ids=["supervisor killed", "launcher gone"])
def test_programs_end_with_their_supervisor_and_their_launcher(request, starts, script, is_killed):
    one = request.getfixturevalue(starts)("sh", "-c", script)
    with contextlib.ExitStack() as ends:
        for _ in range(2 if starts == "start_host" else 1):
            ends.enter_context(expect_end(next_output(one)))
        one.process.kill() if is_killed else one.channel.close()


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
    with expect_end(next_output(host)):
        assert host.until_the_end()[1] == {1: 3}


# The launcher's end


@pytest.fixture
def pair():
    """A channel and the socket its supervisor would hold."""
    mine, theirs = socket.socketpair()
    with mine, theirs:
        yield supervisor.Channel.over(mine), theirs


def message_of(kind, payload):
    return supervisor.HEADER.pack(kind, 3, 0.0, len(payload)) + payload


def test_a_clock_that_is_set_back_does_not_mix_a_ranks_output():
    def said(text, time_s):
        return supervisor.Message(supervisor.OUT, text, time_s)

    found = [("a", said(b"1", 9.0)), ("a", said(b"2", 5.0)), ("b", said(b"3", 7.0)), ("a", said(b"4", 6.0))]
    assert b"".join(message.payload for _, message in job.in_order(found)) == b"3124"


def test_messages_come_out_whole_however_they_are_split(pair):
    channel, theirs = pair
    sent = [(supervisor.HELLO, b"{}"), (supervisor.OUT, b"abc"), (supervisor.EXIT, b"")]
    data = b"".join(message_of(*one) for one in sent)

    def send():
        for byte in data:
            theirs.send(bytes([byte]))
        theirs.close()

    threading.Thread(target=send).start()
    found = [channel.receive() for _ in sent]
    assert [(one.kind, one.payload, one.rank) for one in found] == [(*one, 3) for one in sent]
    assert channel.receive() is None


@pytest.mark.parametrize(("said", "why"), [
    (b"", "closed the connection before it had proven"),
    (hello()[:20], "closed the connection before it had proven"),
    (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "does not speak as a supervisor of this version"),
    (message_of(supervisor.HELLO, b'{"token": "t"}'), "does not speak as a supervisor of this version"),
    (hello() + b"x" * (1 << 20), "does not know the token of this job"),
], ids=["nothing", "half", "a browser", "version 1", "too much"])  # fmt: skip
def test_a_stranger_is_dropped_and_the_reason_kept(said, why):
    with open_port() as port:
        with socket.create_connection(supervisor.split_address(port.address)) as stranger:
            where = supervisor.join_address(*stranger.getsockname())
            with contextlib.suppress(OSError):  # dropped before all is sent
                stranger.sendall(said)
                stranger.shutdown(socket.SHUT_WR)
            heard = b""
            with contextlib.suppress(OSError):
                while more := stranger.recv(4096):
                    heard += more
        assert len(heard) in (0, 2 * supervisor.PROOF_BYTES)
        supervisor.connect([port.address], "t").close()
        port.taken.get(timeout=30).close()
        assert port.acceptor.refused.startswith(f"{where} {why}") and port.taken.empty()


def test_who_knows_another_token_gets_in_nowhere():
    with open_port() as port, pytest.raises(OSError, match="does not know the token of this job"):
        supervisor.connect([port.address], "guess")
    assert port.taken.empty()


def test_strangers_keep_no_supervisor_out_and_cost_no_threads():
    """They keep coming: silent ones, slow ones, such that send too much, or a wrong proof."""
    with open_port() as port, Strangers(port.address, 10_000) as strangers:
        strangers.wait_for(640)
        threads = threading.active_count()
        for _ in range(8):
            supervisor.connect([port.address], "t").close()
            port.taken.get(timeout=30).close()
        assert threading.active_count() == threads and port.taken.empty()
        port.acceptor.close()
        strangers.wait_until_all_are_dropped()


def test_supervisors_of_this_machine_connect_over_the_loopback_only():
    options = cli.parse(["-np", "2", "true"])
    for is_here in (True, False):
        one = job.Job(options, Writer(None, None))
        addresses = one.open_listener(is_here)["addresses"]
        one._acceptor.close()
        hosts = {supervisor.split_address(address)[0] for address in addresses}
        assert hosts == ({"127.0.0.1"} if is_here else set(job.find_addresses()) or {"127.0.0.1"})


def test_addresses_of_a_host_are_those_of_its_interfaces_and_networks(tmp_path, monkeypatch):
    table = tmp_path / "if_inet6"
    rows = [
        ("1", "10 80 lo"), ("fe80" + "1".zfill(28), "20 80 eth0"), ("fd00" + "2".zfill(28), "00 82 eth0"),
        ("fd00" + "3".zfill(28), "00 c0 eth0"), ("fd01" + "4".zfill(28), "00 00 eth1"),
    ]  # fmt: skip
    table.write_text("".join(f"{digits:0>32} 02 40 {rest}\n" for digits, rest in rows))
    monkeypatch.setattr(job, "_IPV6_ADDRESSES", str(table))

    def found(names=""):
        return [address for address in job.find_addresses(names) if ":" in address]

    assert found() == ["fd00::2", "fd01::4"]
    assert found("eth1,eth2") == found("fd01::/16") == ["fd01::4"] and job.find_addresses("127.0.0.0/8,no/where") == []
