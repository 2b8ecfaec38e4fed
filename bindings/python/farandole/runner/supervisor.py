"""Runs one rank's program for the launcher: carries its output and input, and reports how it ended.

Started by mpirun instead of the program, as ``python -I -S supervisor.py PROGRAM ARGUMENTS...``; a
file of its own that imports no package, so that a rank starts 30 ms later and not 200. Without
:data:`VARIABLE` in the environment (somebody typed what ``--dry-run`` printed) it becomes the program.

Everything goes over one connection to the launcher, because mpirun forwards output in blocks of 4 KiB
that mix between ranks, and because the input of Open MPI 5.0's mpirun never ends. A message is
:data:`HEADER` and a payload. The rank sends HELLO (JSON), OUT, ERR and RESULT (bytes the program
wrote), WANT (the program can take input) and EXIT (JSON); the launcher sends SIGNAL (numbers of
signals for the program), INPUT (at most INPUT_BYTES for each WANT; empty: the end) and after EXIT GO,
when the supervisor may end. After a bad end that is a little later: mpirun ends the other ranks then,
which until then had time to report their own ends. When the connection breaks, the program is ended.
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from typing import Any, NamedTuple, NoReturn

# JSON: the job's token, the launcher's addresses, and whether each rank runs a function that it reads
# from its stdin and whose result it writes to the descriptor RESULT_VARIABLE.
VARIABLE = "_FARANDOLE_RUN"
RESULT_VARIABLE = "_FARANDOLE_RESULT"
HEADER = struct.Struct("!BdI")  # kind, seconds since the epoch by the sender's clock, bytes of payload
HELLO, OUT, ERR, EXIT, RESULT, WANT, GO, SIGNAL, INPUT = range(9)
CHUNK_BYTES = 65536
INPUT_BYTES = 32768  # fits into a connection's buffers, so that sending it waits for nobody
MAX_PAYLOAD_BYTES = 1 << 20
CONNECT_TIMEOUT_S = 5.0
KILL_AFTER_S = 5.0  # from SIGTERM to SIGKILL, when the launcher is gone
CANNOT_START = 127
THREADS = "OMP_NUM_THREADS"

# mpirun signals the whole process group of a rank, so the program has had these as well.
_SURVIVED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")


class Message(NamedTuple):
    """One message of either end."""

    kind: int
    time_s: float
    payload: bytes


class Channel:
    """Messages over a connection. Thread safety: single-threaded."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._data = bytearray()
        connection.settimeout(None)
        # The kernel notices within 25 s that the other host is gone without a word.
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in [(socket.TCP_NODELAY, 1), (socket.TCP_KEEPIDLE, 5),
                                  (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)]:  # fmt: skip
                connection.setsockopt(socket.IPPROTO_TCP, option, value)

    def fileno(self) -> int:
        """For selectors."""
        return self._connection.fileno()

    def send(self, kind: int, payload: bytes = b"") -> None:
        """Sends a message; that the other end has gone is noticed by :meth:`receive`."""
        try:
            self._connection.sendall(HEADER.pack(kind, time.time(), len(payload)) + payload)
        except OSError:
            pass

    def receive(self) -> list[Message] | None:
        """Waits for bytes. Returns the messages they complete; None when the connection has ended.

        Raises:
            ValueError: These are no messages.
        """
        try:
            data = self._connection.recv(1 << 18)
        except OSError:
            return None
        self._data += data
        messages = []
        while len(self._data) >= HEADER.size:
            kind, time_s, length = HEADER.unpack_from(self._data)
            if length > MAX_PAYLOAD_BYTES:
                raise ValueError("the message is too long")
            end = HEADER.size + length
            if len(self._data) < end:
                break
            messages.append(Message(kind, time_s, bytes(self._data[HEADER.size : end])))
            del self._data[:end]
        return messages if data or messages else None

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()


def connect(addresses: list[str]) -> Channel:
    """The first of the launcher's addresses ("1.2.3.4:5678") that answers.

    Raises:
        OSError: None does; with all their reasons.
    """
    reasons = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        try:
            return Channel(socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S))
        except OSError as error:
            reasons.append(f"{address}: {error}")
    raise OSError("; ".join(reasons))


def limit_threads() -> str:
    """Divides the host's cores among its ranks by OMP_NUM_THREADS, unless the user has set it. Says how."""
    ranks = int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or 1)
    if ranks == 1 or os.environ.get(THREADS):
        return ""
    cores = os.sched_getaffinity(0)
    is_bound = cores != os.sched_getaffinity(os.getppid())  # by mpirun: to cores of its own
    threads = len(cores) if is_bound else max(1, len(cores) // ranks)
    os.environ[THREADS] = str(threads)
    return f"{THREADS}={threads} on each of {ranks} ranks; set it to choose another number"


class Supervisor:
    """One program and one connection. Thread safety: single-threaded."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._selector = selectors.DefaultSelector()
        self._launcher_left_at_s: float | None = None
        self._leads_group = os.getpgrp() == os.getpid()  # mpirun gives each rank a group of its own
        self._has_mpiruns_signal = False
        self._input = b""  # not yet taken by the program
        self._stdin = -1  # the program's, our end
        self.is_stopping = False
        for name in _SURVIVED:  # not SIG_IGN, which the program would inherit
            signal.signal(signal.Signals[name], self._note_signal)

    def _note_signal(self, *_: Any) -> None:
        self._has_mpiruns_signal = True

    def run(self, command: list[str], has_input: bool, has_result: bool) -> int:
        """Runs the program to its end.

        Args:
            has_input: Its stdin is what the launcher sends; else nothing.
            has_result: It gets a descriptor for its result.
        Returns:
            Its exit code, negative for a signal, as subprocess has it.
        """
        result, theirs = os.pipe() if has_result else (-1, -1)
        environment = os.environ | ({RESULT_VARIABLE: str(theirs)} if has_result else {})
        stdin = subprocess.PIPE if has_input else subprocess.DEVNULL
        try:
            child = subprocess.Popen(command, env=environment, stdin=stdin, stdout=subprocess.PIPE,
                                     stderr=subprocess.PIPE, pass_fds=[theirs] if has_result else [])  # fmt: skip
        except OSError as error:
            text = f'farandolerun: cannot start "{command[0]}" on {socket.gethostname()}: {error.strerror}\n'
            self._channel.send(ERR, text.encode())
            return CANNOT_START
        assert child.stdout is not None and child.stderr is not None
        outputs = {child.stdout.fileno(): OUT, child.stderr.fileno(): ERR}
        if has_result:
            os.close(theirs)
            outputs[result] = RESULT
        for descriptor, kind in outputs.items():
            os.set_blocking(descriptor, False)
            self._selector.register(descriptor, selectors.EVENT_READ, kind)
        if child.stdin is not None:
            self._stdin = os.dup(child.stdin.fileno())
            child.stdin.close()
            os.set_blocking(self._stdin, False)
            self._channel.send(WANT)
        self._selector.register(os.pidfd_open(child.pid), selectors.EVENT_READ, EXIT)
        self._selector.register(self._channel, selectors.EVENT_READ, HELLO)
        while not self._step(child):
            pass
        for descriptor, kind in outputs.items():
            while self._forward(descriptor, kind) > 0:  # its own children may go on writing for ever
                pass
        return child.wait()

    def _step(self, child: subprocess.Popen[bytes]) -> bool:
        """Waits for events and handles them. Returns whether the program has ended."""
        is_over = False
        for key, _ in self._selector.select(0.2 if self._launcher_left_at_s else None):
            if key.data in (OUT, ERR, RESULT):
                if self._forward(key.fd, key.data) == 0:
                    self._selector.unregister(key.fd)
            elif key.data == INPUT:
                self._write_input()
            elif key.data == EXIT:
                is_over = True
            else:
                self._obey(child)
        left = self._launcher_left_at_s
        if left is not None and time.monotonic() - left > KILL_AFTER_S:
            self._signal(child, signal.SIGKILL)
        return is_over

    def _forward(self, descriptor: int, kind: int) -> int:
        """Sends on what can be read. Returns its bytes; 0 at the end, -1 for nothing now."""
        try:
            data = os.read(descriptor, CHUNK_BYTES)
        except BlockingIOError:
            return -1
        if data:
            self._channel.send(kind, data)
        return len(data)

    def _obey(self, child: subprocess.Popen[bytes]) -> None:
        messages = self._channel.receive()
        for message in messages or ():
            if message.kind == SIGNAL:
                self._signal(child, message.payload[0])
            elif message.kind == INPUT and self._stdin >= 0:
                self._take_input(message.payload)
        if messages is None:
            self._selector.unregister(self._channel)
            self._launcher_left_at_s = time.monotonic()
            self._signal(child, signal.SIGTERM)

    def _signal(self, child: subprocess.Popen[bytes], number: int) -> None:
        """Signals the program; what it started and left behind is ended in :meth:`leave`."""
        self.is_stopping |= number in (signal.SIGTERM, signal.SIGKILL)
        child.send_signal(number)

    def _take_input(self, data: bytes) -> None:
        self._input = data
        if data:
            self._selector.register(self._stdin, selectors.EVENT_WRITE, INPUT)
        else:
            os.close(self._stdin)
            self._stdin = -1

    def _write_input(self) -> None:
        try:
            self._input = self._input[os.write(self._stdin, self._input) :]
        except BlockingIOError:
            return
        except OSError:  # the program has closed its stdin
            self._selector.unregister(self._stdin)
            self._take_input(b"")
            return
        if not self._input:
            self._selector.unregister(self._stdin)
            self._channel.send(WANT)

    def report_end(self, code: int) -> None:
        """Reports the program's end and waits until the launcher has read that, or is gone.

        Leaving earlier could lose what it has not read yet: the kernel gives a connection without
        owner up after some seconds. After a bad end it also decides when mpirun may know.
        """
        end = {"code": code, "by_mpirun": self._has_mpiruns_signal}
        self._channel.send(EXIT, json.dumps(end).encode())
        while not self.is_stopping:
            messages = self._channel.receive()
            if messages is None or any(message.kind == GO for message in messages):
                break
            stops = (bytes([signal.SIGTERM]), bytes([signal.SIGKILL]))
            self.is_stopping |= any(m.kind == SIGNAL and m.payload in stops for m in messages)

    def leave(self, code: int) -> NoReturn:
        """Ends as the program did, so that mpirun reports the same; stopped, with all it started."""
        if self.is_stopping and self._leads_group:
            os.kill(0, signal.SIGKILL)
        if code < 0:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the program left its own, if any
            if -code != signal.SIGKILL:
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code if code >= 0 else 128 - code)


def main(command: list[str]) -> NoReturn:
    """Never returns."""
    job = json.loads(os.environ.pop(VARIABLE, "{}"))
    threads = limit_threads()
    if not job:
        os.execvp(command[0], command)
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMIX_RANK"])
    try:
        channel = connect(job["addresses"])
    except OSError as error:
        sys.exit(f"farandolerun: {socket.gethostname()} cannot reach the launcher at {error}")
    supervisor = Supervisor(channel)
    hello = {"token": job["token"], "rank": rank, "host": socket.gethostname(), "threads": threads}
    channel.send(HELLO, json.dumps(hello).encode())
    runs_function = bool(job["runs_function"])
    code = supervisor.run(command, has_input=runs_function or rank == 0, has_result=runs_function)
    supervisor.report_end(code)
    supervisor.leave(code)


if __name__ == "__main__":
    main(sys.argv[1:])
