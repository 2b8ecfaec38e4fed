"""The rank's end of a launch, against a made-up launcher."""

import json
import os
import select
import signal
import socket
import subprocess
import sys

import pytest

from farandole.run import supervise

FILE = supervise.__file__


class FakeLauncher:
    """Listens, starts one supervisor, and reads its messages one by one."""

    def __init__(self, *program):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            job = {"token": "t", "addresses": [f"127.0.0.1:{port}"], "stdin": None}
            environment = os.environ | {
                supervise.VARIABLE: json.dumps(job), "OMPI_COMM_WORLD_RANK": "5",
            }  # fmt: skip
            command = [sys.executable, "-I", "-S", FILE, *program]
            self.process = subprocess.Popen(command, env=environment, start_new_session=True)
            listener.settimeout(30)
            self.connection, _ = listener.accept()
        self.connection.settimeout(30)

    def read(self, size):
        data = b""
        while len(data) < size:
            part = self.connection.recv(size - len(data))
            assert part, "the supervisor left"
            data += part
        return data

    def message(self):
        kind, _, length = supervise.HEADER.unpack(self.read(supervise.HEADER.size))
        return kind, self.read(length)

    def until_exit(self):
        """What came on stdout and stderr before EXIT, and the code."""
        texts = {supervise.OUT: b"", supervise.ERR: b""}
        while (got := self.message())[0] != supervise.EXIT:
            texts[got[0]] += got[1]
        return *texts.values(), json.loads(got[1])["code"]

    def close(self):
        self.connection.close()
        self.process.kill()
        self.process.wait(30)


@pytest.fixture
def start():
    started = []

    def start_one(*program):
        started.append(FakeLauncher(*program))
        return started[-1]

    yield start_one
    for one in started:
        one.close()


def test_a_rank_says_who_it_is_what_it_wrote_and_how_it_ended(start):
    launcher = start("sh", "-c", "echo out; echo err >&2; exit 3")
    kind, hello = launcher.message()
    assert (kind, json.loads(hello)) == (
        supervise.HELLO, {"token": "t", "rank": 5, "host": socket.gethostname()},
    )  # fmt: skip
    assert launcher.until_exit() == (b"out\n", b"err\n", 3)


@pytest.mark.parametrize("code", [0, 3])
def test_it_stays_until_its_last_words_were_read(start, code):
    """Else the kernel may drop what the launcher has not read, and mpirun knows of a failure early."""
    launcher = start("sh", "-c", f"exit {code}")
    launcher.message()
    launcher.until_exit()
    launcher.connection.settimeout(0.3)
    with pytest.raises(TimeoutError):
        launcher.connection.recv(1)
    launcher.connection.send(supervise.GO)
    assert launcher.process.wait(30) == code


def test_it_ends_by_the_programs_signal(start):
    launcher = start("sh", "-c", "kill -11 $$")
    launcher.message()
    assert launcher.until_exit()[2] == -11
    launcher.connection.send(supervise.GO)
    assert launcher.process.wait(30) == -11


def test_signals_reach_the_program_and_mpiruns_do_not_end_the_supervisor(start):
    launcher = start(
        "sh", "-c", "trap 'echo got; exit 4' TERM; echo up; while :; do sleep 0.05; done"
    )
    launcher.message()
    assert launcher.message() == (supervise.OUT, b"up\n")
    os.killpg(launcher.process.pid, signal.SIGTERM)
    out, _, code = launcher.until_exit()
    assert (out, code) == (b"got\n", 4)


def test_the_program_and_what_it_started_end_when_the_launcher_is_gone(start):
    launcher = start("sh", "-c", "sleep 600 & echo $!; wait")
    launcher.message()
    started = os.pidfd_open(int(launcher.message()[1]))
    launcher.connection.close()
    assert launcher.process.wait(30) != 0
    ended, _, _ = select.select([started], [], [], 30)
    os.close(started)
    assert ended


def test_a_program_that_cannot_be_started_is_named(start):
    launcher = start("/no/such/program")
    launcher.message()
    _, err, code = launcher.until_exit()
    assert code == supervise.CANNOT_START
    assert err.startswith(b'farandolerun: cannot start "/no/such/program" on ')


def test_without_a_launcher_it_becomes_the_program():
    environment = {name: value for name, value in os.environ.items() if name != supervise.VARIABLE}
    command = [sys.executable, "-I", "-S", FILE, "sh", "-c", "echo $0; exit 6", "itself"]
    done = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=30)
    assert (done.returncode, done.stdout) == (6, b"itself\n")


def test_a_launcher_that_cannot_be_reached_is_told_with_the_reason():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    job = {"token": "t", "addresses": [f"127.0.0.1:{port}"], "stdin": None}
    environment = os.environ | {supervise.VARIABLE: json.dumps(job), "OMPI_COMM_WORLD_RANK": "0"}
    done = subprocess.run(
        [sys.executable, "-I", "-S", FILE, "true"],
        env=environment, capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    assert done.returncode == 1
    assert f"cannot reach the launcher at 127.0.0.1:{port}: " in done.stderr
