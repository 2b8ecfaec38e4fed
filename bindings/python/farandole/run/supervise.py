"""Runs one rank's program for the launcher: carries its output, and says how it ended.

Started by mpirun in the place of the program, as ``python -I -S supervise.py PROGRAM ARGUMENTS...``;
a file of its own that imports no package, so that a rank starts 30 ms later and not 200. Without
:data:`VARIABLE` in the environment (somebody typed what ``--dry-run`` printed) it becomes the
program.

Everything goes over one connection to the launcher, because what mpirun forwards is cut into pieces
of 4 KiB that mix between ranks. A message is :data:`HEADER` and a payload: HELLO (JSON), OUT and ERR
(bytes the program wrote), EXIT (JSON). Its time is this host's clock. The launcher sends single
bytes: the numbers of signals for the program, and after EXIT the byte GO, when the supervisor may
end. After a bad end that is a little later: mpirun ends the other ranks then, which until then had
time to tell their own ends. When the connection breaks, the program is ended.
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
from typing import IO, Any, NoReturn

# JSON: the job's token, the launcher's addresses, and as stdin where rank 0 reads: null for nowhere,
# "mpirun" for what mpirun gives it, [path, offset] for a file.
VARIABLE = "_FARANDOLE_RUN"
HEADER = struct.Struct("!BdI")  # kind, seconds since the epoch, bytes of payload
HELLO, OUT, ERR, EXIT = range(4)
GO = b"\0"
CHUNK_BYTES = 65536
CONNECT_TIMEOUT_S = 5.0
KILL_AFTER_S = 5.0  # from SIGTERM to SIGKILL, when the launcher is gone
CANNOT_START = 127

# mpirun signals the whole process group of a rank, so the program has had these as well.
_SURVIVED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


def connect(addresses: list[str]) -> socket.socket:
    """The first of the launcher's addresses ("1.2.3.4:5678") that answers.

    Raises:
        OSError: None does; with all their reasons.
    """
    reasons = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        try:
            connection = socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S)
        except OSError as error:
            reasons.append(f"{address}: {error}")
            continue
        connection.settimeout(None)
        watch(connection)
        return connection
    raise OSError("; ".join(reasons))


def watch(connection: socket.socket) -> None:
    """Makes the kernel notice within 25 s that the other host is gone without a word."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


def rank_of(environment: dict[str, str]) -> int:
    """This rank's number as mpirun says it."""
    return int(environment.get("OMPI_COMM_WORLD_RANK") or environment["PMIX_RANK"])


def open_stdin(source: Any, rank: int) -> int | None:
    """What the program reads: a descriptor, or None for the supervisor's own stdin.

    mpirun's way is taken only where there is no other: that of Open MPI 5.0 never ends.
    """
    if rank != 0 or source is None:
        return subprocess.DEVNULL
    if source == "mpirun":
        return None
    path, offset = source
    try:
        descriptor = os.open(path, os.O_RDONLY)
        if offset:
            os.lseek(descriptor, offset, os.SEEK_SET)
    except OSError:
        return subprocess.DEVNULL  # a socket, say
    return descriptor


class Supervisor:
    """One program and one connection. Thread safety: single-threaded."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._selector = selectors.DefaultSelector()
        self._launcher_left_at_s: float | None = None
        self._leads_group = os.getpgrp() == os.getpid()  # mpirun gives each rank a group of its own
        self.is_stopping = False

    def send(self, kind: int, payload: bytes) -> None:
        """Sends a message; a launcher that has gone is noticed where its bytes are read."""
        try:
            self._connection.sendall(HEADER.pack(kind, time.time(), len(payload)) + payload)
        except OSError:
            pass

    def say(self, sentence: str) -> None:
        """Adds a line to the rank's stderr."""
        self.send(ERR, f"farandolerun: {sentence}\n".encode())

    def tell_end(self, code: int) -> None:
        """Tells the program's end and waits until the launcher has read that, or is gone.

        Leaving earlier could lose what it has not read yet: the kernel gives a connection without
        owner up after some seconds. After a bad end it also decides when mpirun may know.
        """
        self.send(EXIT, json.dumps({"code": code}).encode())
        try:
            while not self.is_stopping and GO not in (self._connection.recv(64) or GO):
                pass
        except OSError:
            pass  # the launcher is gone

    def run(self, command: list[str], stdin: int | None) -> int:
        """Runs the program to its end.

        Args:
            stdin: As subprocess takes it.
        Returns:
            Its exit code, negative for a signal, as subprocess has it.
        """
        try:
            child = subprocess.Popen(
                command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        except OSError as error:
            self.say(f'cannot start "{command[0]}" on {socket.gethostname()}: {error.strerror}')
            return CANNOT_START
        assert child.stdout is not None and child.stderr is not None
        ended = os.pidfd_open(child.pid)
        for stream, kind in ((child.stdout, OUT), (child.stderr, ERR)):
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, selectors.EVENT_READ, kind)
        self._selector.register(ended, selectors.EVENT_READ, EXIT)
        self._selector.register(self._connection, selectors.EVENT_READ, HELLO)
        while not self._step(child):
            pass
        for stream, kind in ((child.stdout, OUT), (child.stderr, ERR)):
            while self._forward(stream, kind) > 0:  # its own children may go on writing for ever
                pass
        return child.wait()

    def _step(self, child: subprocess.Popen[bytes]) -> bool:
        """Waits for one event and handles it. Returns whether the program has ended."""
        is_over = False
        for key, _ in self._selector.select(0.2 if self._launcher_left_at_s else None):
            if key.data in (OUT, ERR):
                if self._forward(key.fileobj, key.data) == 0:  # type: ignore[arg-type]
                    self._selector.unregister(key.fileobj)
            elif key.data == EXIT:
                is_over = True
            else:
                self._obey(child)
        left = self._launcher_left_at_s
        if left is not None and time.monotonic() - left > KILL_AFTER_S:
            self._signal(child, signal.SIGKILL)
        return is_over

    def _signal(self, child: subprocess.Popen[bytes], number: int) -> None:
        """Signals the program; what it started and left behind is ended in :meth:`leave`."""
        self.is_stopping |= number in (signal.SIGTERM, signal.SIGKILL)
        child.send_signal(number)

    def _forward(self, stream: IO[bytes], kind: int) -> int:
        """Sends on what can be read. Returns its bytes; 0 at the end, -1 for nothing now."""
        try:
            data = os.read(stream.fileno(), CHUNK_BYTES)
        except BlockingIOError:
            return -1
        if data:
            self.send(kind, data)
        return len(data)

    def _obey(self, child: subprocess.Popen[bytes]) -> None:
        try:
            signals = self._connection.recv(64)
        except OSError:
            signals = b""
        for number in signals:
            self._signal(child, number)
        if not signals:
            self._selector.unregister(self._connection)
            self._launcher_left_at_s = time.monotonic()
            self._signal(child, signal.SIGTERM)

    def leave(self, code: int) -> NoReturn:
        """Ends as the program did, so that mpirun reports the same; stopped, with all it started."""
        if self.is_stopping and self._leads_group:
            os.kill(0, signal.SIGKILL)
        end_as(code)


def end_as(code: int) -> NoReturn:
    """Ends this process with a code as subprocess has it."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the program left its own, if any
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        code = 128 - code
    os._exit(code)


def main(command: list[str]) -> NoReturn:
    """Never returns."""
    said = os.environ.pop(VARIABLE, "")
    if not said:
        os.execvp(command[0], command)
    for number in _SURVIVED:
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which the program would inherit
    job = json.loads(said)
    rank = rank_of(dict(os.environ))
    try:
        supervisor = Supervisor(connect(job["addresses"]))
    except OSError as error:
        sys.exit(f"farandolerun: {socket.gethostname()} cannot reach the launcher at {error}")
    hello = {"token": job["token"], "rank": rank, "host": socket.gethostname()}
    supervisor.send(HELLO, json.dumps(hello).encode())
    code = supervisor.run(command, open_stdin(job["stdin"], rank))
    supervisor.tell_end(code)
    supervisor.leave(code)


if __name__ == "__main__":
    main(sys.argv[1:])
