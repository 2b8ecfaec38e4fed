"""Runs one rank's program for the launcher: carries its output and input, and reports how it ended.

Started by mpirun instead of the program, as ``python -I -S supervisor.py PROGRAM ARGUMENTS...``; a
file of its own that imports no package, so that a rank starts 30 ms later and not 200. Without
:data:`VARIABLE` in the environment (somebody typed what ``--dry-run`` printed) it becomes the program.

Everything goes over one connection to the launcher: mpirun forwards output in blocks of 4 KiB that mix
between ranks, and the input of Open MPI 5.0's mpirun never ends. The rank sends HELLO (JSON), OUT, ERR,
RESULT and REPORT (bytes the program wrote), WANT (the program can take input) and EXIT (JSON). The launcher
sends INPUT (at most INPUT_BYTES for each WANT; empty: the end), SIGNAL (SIGTERM or SIGKILL for the
program) and, after EXIT, GO: the supervisor may end. After a bad end mpirun ends the other ranks then.
When the connection breaks, the program is ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import IO, NamedTuple, NoReturn

# JSON: the job's token, the launcher's addresses, and whether each rank runs a function that it reads from
# its stdin.
VARIABLE = "_FARANDOLE_RUN"
# Files that the program opens to write: a function's result; lines of JSON that say why the rank fails.
RESULT_VARIABLE, REPORT_VARIABLE = "_FARANDOLE_RESULT", "_FARANDOLE_REPORT"
HEADER = struct.Struct("!BdI")  # kind, seconds since the epoch by the sender's clock, payload's bytes
HELLO, OUT, ERR, EXIT, RESULT, REPORT, WANT, GO, SIGNAL, INPUT = range(10)
CHUNK_BYTES = 65536
INPUT_BYTES = 32768  # fits into a connection's buffers, so that sending it waits for nobody
MAX_PAYLOAD_BYTES = 1 << 20
CONNECT_TIMEOUT_S = 5.0
# Seconds of silence, between probes, and probes without an answer until the other host is gone: 25 s.
# By the names of Open MPI's parameters, as its daemons' connections have the same.
KEEPALIVE = {"time": 5, "intvl": 5, "probes": 4}
KILL_AFTER_S = 5.0  # from SIGTERM to SIGKILL, when the launcher is gone
CANNOT_START = 127
THREADS = "OMP_NUM_THREADS"
# mpirun signals the whole process group of a rank, so the program has had these as well.
_SURVIVED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")


class Message(NamedTuple):
    """One message of either end."""

    kind: int
    payload: bytes
    time_s: float


class Channel:
    """Messages over a connection. Thread safety: one thread receives and closes; any sends."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        # The kernel notices that the other host is gone without a word: by probes of an idle
        # connection, and by the age of what has been sent and not been confirmed.
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            silence_ms = 1000 * (KEEPALIVE["time"] + KEEPALIVE["probes"] * KEEPALIVE["intvl"])
            options = {
                "NODELAY": 1, "USER_TIMEOUT": silence_ms, "KEEPIDLE": KEEPALIVE["time"],
                "KEEPINTVL": KEEPALIVE["intvl"], "KEEPCNT": KEEPALIVE["probes"],
            }  # fmt: skip
            for name, value in options.items():
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"), value)
        self.connection = connection
        self._stream = connection.makefile("rb")
        self._lock = threading.Lock()

    def send(self, kind: int, payload: bytes = b"") -> None:
        """Sends a message; that the other end has gone is noticed by :meth:`receive`."""
        with contextlib.suppress(OSError), self._lock:
            self.connection.sendall(HEADER.pack(kind, time.time(), len(payload)) + payload)

    def receive(self) -> Message | None:
        """Waits for a message. None: the connection has ended, or what came is none."""
        try:
            kind, time_s, length = HEADER.unpack(self._stream.read(HEADER.size))
            payload = self._stream.read(length) if length <= MAX_PAYLOAD_BYTES else b""
        except (OSError, struct.error):
            return None
        return Message(kind, payload, time_s) if len(payload) == length else None

    def close(self) -> None:
        """Ends the connection, also for the thread that receives."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()


def connect(addresses: list[str]) -> Channel:
    """The first of the launcher's addresses ("1.2.3.4:5678") that answers; OSError if none does."""
    reasons = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        try:
            return Channel(socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S))
        except OSError as error:
            reasons.append(f"{address}: {error}")
    raise OSError("; ".join(reasons))


def limit_threads() -> str:
    """Divides the host's cores among its ranks unless the user has set OMP_NUM_THREADS. Says how."""
    ranks = int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or 1)
    if ranks == 1 or os.environ.get(THREADS):
        return ""
    cores = os.sched_getaffinity(0)
    is_bound = cores != os.sched_getaffinity(os.getppid())  # by mpirun: to cores of its own
    threads = len(cores) if is_bound else max(1, len(cores) // ranks)
    os.environ[THREADS] = str(threads)
    return f"{THREADS}={threads} on each of {ranks} ranks; set it to choose another number"


def restore_tmpdir(mpiruns: str | None, own: str | None) -> None:
    """Gives the program the TMPDIR that the launcher had, where it is on the launcher's host."""
    if mpiruns is not None and os.environ.get("TMPDIR") == mpiruns:
        del os.environ["TMPDIR"]
        os.environ.update({} if own is None else {"TMPDIR": own})


class Supervisor:
    """One program and one connection. A thread for each stream; the main one waits for the end."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._child: subprocess.Popen[bytes] | None = None
        self._inputs: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._may_leave = threading.Event()
        self._leads_group = os.getpgrp() == os.getpid()  # mpirun gives each rank a group of its own
        self._has_mpiruns_signal = False
        self._is_stopping = False
        for name in _SURVIVED:  # not SIG_IGN, which the program would inherit
            signal.signal(signal.Signals[name], self._note_signal)

    def _note_signal(self, *_: object) -> None:
        self._has_mpiruns_signal = True

    def run(self, command: list[str], has_input: bool) -> int:
        """Runs the program. Returns its exit code, negative for a signal, as subprocess has it.

        Without ``has_input`` its stdin is empty.
        """
        start_thread(self._obey)
        outputs, environment = {}, dict(os.environ)
        for variable, kind in {RESULT_VARIABLE: RESULT, REPORT_VARIABLE: REPORT}.items():
            pipe, theirs = os.pipe()  # opened by name, so that programs on the way need not keep a descriptor
            outputs[pipe], environment[variable] = kind, f"/proc/{os.getpid()}/fd/{theirs}"
        stdin = subprocess.PIPE if has_input else subprocess.DEVNULL
        try:
            child = subprocess.Popen(
                command, env=environment, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        except OSError as error:
            where = f'"{command[0]}" on {socket.gethostname()}'
            text = f"farandolerun: cannot start {where}: {error.strerror}\n"
            self._channel.send(ERR, text.encode())
            return CANNOT_START
        self._child = child
        if self._is_stopping:
            child.terminate()
        assert child.stdout is not None and child.stderr is not None
        outputs |= {child.stdout.fileno(): OUT, child.stderr.fileno(): ERR}
        if child.stdin is not None:
            start_thread(self._write_input, child.stdin)
        end = os.pidfd_open(child.pid)
        for thread in [start_thread(self._forward, *output, end) for output in outputs.items()]:
            thread.join()
        return child.wait()

    def _forward(self, pipe: int, kind: int, end: int) -> None:
        """Sends what the program writes; what its own children write only until its ``end``."""
        while pipe in select.select([pipe, end], [], [])[0]:
            data = os.read(pipe, CHUNK_BYTES)
            if not data:
                break
            self._channel.send(kind, data)

    def _write_input(self, stdin: IO[bytes]) -> None:
        with contextlib.suppress(OSError), stdin:  # the program may close its stdin
            self._channel.send(WANT)
            while data := self._inputs.get():
                stdin.write(data)
                stdin.flush()
                self._channel.send(WANT)

    def _obey(self) -> None:
        """Does what the launcher says; without it the program is to end."""
        while message := self._channel.receive():
            if message.kind == INPUT:
                self._inputs.put(message.payload)
            elif message.kind == SIGNAL:
                self._end(message.payload[0])
            else:
                self._may_leave.set()
                return
        self._end(signal.SIGTERM)
        time.sleep(KILL_AFTER_S)
        self._end(signal.SIGKILL)

    def _end(self, number: int) -> None:
        self._is_stopping = True
        self._may_leave.set()
        if self._child is not None:
            self._child.send_signal(number)

    def leave(self, code: int) -> NoReturn:
        """Reports the program's end, waits until the launcher has read that, and ends the same way.

        Leaving earlier could lose what it has not read yet: the kernel gives a connection without
        owner up after some seconds. After a bad end it also decides when mpirun may know.
        """
        end = {"code": code, "by_mpirun": self._has_mpiruns_signal}
        self._channel.send(EXIT, json.dumps(end).encode())
        self._may_leave.wait()
        if self._is_stopping and self._leads_group:
            os.kill(0, signal.SIGKILL)  # with all that the program started
        if code < 0:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the program left its own, if any
            if -code != signal.SIGKILL:
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code if code >= 0 else 128 - code)


def start_thread(function: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread


def main(command: list[str]) -> NoReturn:
    """Never returns."""
    job = json.loads(os.environ.pop(VARIABLE, "{}"))
    threads = limit_threads()
    if not job:
        os.execvp(command[0], command)
    restore_tmpdir(*job["tmpdirs"])
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMIX_RANK"])
    try:
        channel = connect(job["addresses"])
    except OSError as error:
        sys.exit(f"farandolerun: {socket.gethostname()} cannot reach the launcher at {error}")
    supervisor = Supervisor(channel)
    hello = {"token": job["token"], "rank": rank, "host": socket.gethostname(), "threads": threads}
    channel.send(HELLO, json.dumps(hello).encode())
    supervisor.leave(supervisor.run(command, has_input=job["runs_function"] or rank == 0))


if __name__ == "__main__":
    main(sys.argv[1:])
