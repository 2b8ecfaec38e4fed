"""One job: starts mpirun, listens to the ranks, ends everything, and reports how it ended."""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import io
import json
import os
import queue
import secrets
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence

from farandole.runner import supervisor
from farandole.runner.mpirun import Options
from farandole.runner.output import FirstFailure, Line, LineSplitter, Writer, exit_code
from farandole.runner.supervisor import Channel, Message, start_thread

_TICK_S = 0.05
_GATHER_S = 0.02  # for what other ranks wrote before, and is on its way
_MAX_QUEUED = 256  # messages; then ranks that write faster than we wait
_LOST = -1  # the kind of a message of ours: the connection has ended
KILL_AFTER_S = 5.0  # from SIGTERM to SIGKILL
LINGER_S = 10.0  # for mpirun to end after the last rank
PROMPT_S = 0.2  # an unfinished line of a rank that reads a terminal is shown then
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SIOCGIFADDR = 0x8915
_SHARED_MEMORY = "/dev/shm"
# What Open MPI 4 and 5 put there: the messages of ranks to one another, and memory of windows.
_USERS_OF_SHARED_MEMORY = ("btl_vader", "btl_sm", "osc_sm", "osc_rdma")


class Peer(Channel):
    """The connection to one supervisor, and what is known of its rank."""

    def __init__(self, connection: socket.socket, function: bytes | None = None) -> None:
        super().__init__(connection)
        self.rank = -1
        self.host = self.threads = ""
        self.is_open = True
        self.has_ended = False  # the program
        self.function = io.BytesIO(function or b"")  # what is left of the function that it runs
        self.splitters = {supervisor.OUT: LineSplitter(), supervisor.ERR: LineSplitter()}
        self.reports = LineSplitter()

    def greet(self, token: str) -> bool:
        """Waits for its hello. False: it is a stranger, who does not know the job's token."""
        self.connection.settimeout(supervisor.CONNECT_TIMEOUT_S)
        message = self.receive()
        self.connection.settimeout(None)
        try:
            hello = json.loads(message.payload if message else "")
            if not hmac.compare_digest(str(hello["token"]), token):
                return False
            self.rank, self.host, self.threads = int(hello["rank"]), hello["host"], hello["threads"]
        except (ValueError, KeyError, TypeError):
            return False
        return True


def addresses_for(options: Options, port: int) -> list[str]:
    """Where the supervisors may find the launcher: "1.2.3.4:5678" for each IPv4 interface."""
    if options.is_local:
        return [f"127.0.0.1:{port}"]
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                request = struct.pack("256s", name.encode()[:15])
                found.append(socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24]))
    return [f"{address}:{port}" for address in found if not address.startswith("127.")]


def make_folders(options: Options, stack: contextlib.ExitStack) -> dict[str, str]:
    """Variables for mpirun whose folders ``stack`` removes, with what mpirun and MPI leave in them.

    They remove their files themselves unless they are killed. On other hosts mpirun's daemons do so.
    """
    variables = {}
    with contextlib.suppress(OSError):  # there is no such place, or it is full: as without these
        made = tempfile.TemporaryDirectory(prefix="farandolerun.", ignore_cleanup_errors=True)
        variables["TMPDIR"] = stack.enter_context(made)
        if options.is_local:
            made = tempfile.TemporaryDirectory(prefix="farandolerun.", dir=_SHARED_MEMORY, ignore_cleanup_errors=True)
            folder = stack.enter_context(made)
            names = [f"OMPI_MCA_{user}_backing_directory" for user in _USERS_OF_SHARED_MEMORY]
            variables |= {name: folder for name in names if name not in os.environ}
    return variables


class Job:
    """Runs once. A thread for each connection puts messages into one queue, which one loop handles.

    Args:
        command, environment: Of mpirun, which starts the ranks through supervisor.py.
        function: Each rank reads it from stdin; None: rank 0 reads the launcher's stdin.

    Attributes:
        code: 128 + n when signal n ended the job, else that of the rank that failed first, else
            mpirun's; 1 instead of 0 if something could not be written.
        results: Rank -> what its function returned.
        stopped_by: The signal that ended the job, if one did.
    """

    def __init__(
        self, command: Sequence[str], environment: dict[str, str], options: Options, writer: Writer,
        function: bytes | None = None,
    ) -> None:  # fmt: skip
        self._command, self._environment = command, environment
        self._options, self._writer, self._function = options, writer, function
        self.code = 0
        self.failure = FirstFailure(writer)
        self.results: dict[int, bytearray] = {}
        self.stopped_by: int | None = None
        self._queue: queue.Queue[tuple[Peer | None, Message]] = queue.Queue(_MAX_QUEUED)
        self._threads: list[threading.Thread] = []
        self._peers: dict[int, Peer] = {}  # by rank
        self._token = secrets.token_hex(16)
        self._signals: list[int] = []  # that came and are not handled yet
        self._is_stopping = self._is_over = False
        self._shows_prompts = os.isatty(0) and function is None
        self._heard_s = 0.0  # when rank 0 wrote last, monotonic
        self._active_s = 0.0  # when something came last, or mpirun was seen to run
        self._kill_at_s = float("inf")
        self._start_by_s = time.monotonic() + options.start_timeout_s

    def run(self) -> None:
        """Until everything has ended."""
        with contextlib.ExitStack() as stack:
            if threading.current_thread() is threading.main_thread():
                self._take_signals(stack)
            self._start(make_folders(self._options, stack))
            while not self._is_over:
                for peer, message in self._wait_for_messages():
                    self._take(peer, message)
                self._check_times(time.monotonic())
                self._writer.flush()
            for rank in self._peers.values():
                self._finish_lines(rank)
                rank.close()
            for thread in self._threads:
                thread.join(KILL_AFTER_S)
        self._writer.flush()
        self.code = self._result()

    def _start(self, folders: dict[str, str]) -> None:
        here = "127.0.0.1" if self._options.is_local else ""
        listener = socket.create_server((here, 0), backlog=self._options.np)
        listener.settimeout(_TICK_S)
        job = {
            "token": self._token,
            "addresses": addresses_for(self._options, listener.getsockname()[1]),
            "runs_function": self._function is not None,
            # mpirun's, and that of the ranks.
            "tmpdirs": [folders.get("TMPDIR"), self._environment.get("TMPDIR")],
        }
        self._threads.append(start_thread(self._accept, listener))
        # A session of its own: Ctrl-C comes to us alone.
        self._mpirun = subprocess.Popen(
            self._command, start_new_session=True,
            env=self._environment | folders | {supervisor.VARIABLE: json.dumps(job)},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._mpirun_reader = start_thread(self._read_mpirun)

    def _take_signals(self, stack: contextlib.ExitStack) -> None:
        """Notes signals until the job is over, but for those ignored by nohup or a shell."""
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                before = signal.signal(number, lambda number, _: self._signals.append(number))
                stack.callback(signal.signal, number, before)
        # A terminal that another job of the shell reads: an error instead of stopping us.
        stack.callback(signal.signal, signal.SIGTTIN, signal.signal(signal.SIGTTIN, signal.SIG_IGN))

    # Threads

    def _accept(self, listener: socket.socket) -> None:
        with listener:
            while not self._is_over:
                with contextlib.suppress(OSError):  # nobody came, or has gone again
                    peer = Peer(listener.accept()[0], self._function)
                    self._threads.append(start_thread(self._listen, peer))

    def _listen(self, peer: Peer) -> None:
        if peer.greet(self._token):
            self._queue.put((peer, Message(supervisor.HELLO, b"", time.time())))
            while message := peer.receive():
                if message.kind == supervisor.WANT:
                    start_thread(self._give_input, peer)  # as stdin may be silent
                else:
                    self._queue.put((peer, message))
            self._queue.put((peer, Message(_LOST, b"", time.time())))
        peer.close()

    def _read_mpirun(self) -> None:
        assert self._mpirun.stdout is not None
        with self._mpirun.stdout as stream:
            for text in stream:
                line = text.rstrip(b"\n") + b"\n"
                self._queue.put((None, Message(supervisor.ERR, line, time.time())))

    def _give_input(self, peer: Peer) -> None:
        """Answers WANT: with the next bytes of the function, or of our stdin once there are some."""
        if self._function is not None:
            data = peer.function.read(supervisor.INPUT_BYTES)
        else:
            try:
                data = os.read(0, supervisor.INPUT_BYTES)
            except OSError:
                data = b""  # it is closed, or a terminal that has gone or is another job's
            if data.endswith(b"\n"):
                self._writer.end_open_line()
        peer.send(supervisor.INPUT, data)

    # The loop

    def _wait_for_messages(self) -> list[tuple[Peer | None, Message]]:
        """Messages in the order in which ranks wrote them; threads bring them in any."""
        is_busy = not self._queue.empty()
        try:
            found = [self._queue.get(timeout=_TICK_S)]
        except queue.Empty:
            return []
        time.sleep(0.0 if is_busy else _GATHER_S)
        found += [self._queue.get() for _ in range(self._queue.qsize())]
        self._active_s = time.monotonic()
        return sorted(found, key=lambda item: item[1].time_s)

    def _take(self, peer: Peer | None, message: Message) -> None:
        kind, payload, _ = message
        if peer is None:
            # Once it is reported how the ranks failed, or they are to end, what mpirun says is noise.
            is_noise = self._is_stopping or self.failure.rank is not None
            if not is_noise or self._options.verbose:
                self.failure.line(Line(None, True, payload))
        elif kind == supervisor.REPORT:
            for report in map(json.loads, peer.reports.add(payload)):
                self.failure.reported(peer.rank, **report, now_s=self._active_s)
        elif kind in peer.splitters:
            is_error = kind == supervisor.ERR
            self._writer.keep(peer.rank, is_error, payload)
            if peer.rank == 0:
                self._heard_s = self._active_s
            for text in peer.splitters[kind].add(payload):
                self.failure.line(Line(peer.rank, is_error, text))
        elif kind == supervisor.RESULT:
            self.results.setdefault(peer.rank, bytearray()).extend(payload)
        elif kind == supervisor.HELLO:
            if not self._peers and peer.threads:
                self._writer.say(peer.threads)
            self._peers[peer.rank] = peer
        elif kind == supervisor.EXIT:
            self._finish_lines(peer)
            self._take_end(peer, json.loads(payload))
        elif kind == _LOST:
            peer.is_open = False
            if not peer.has_ended and not self._is_stopping:  # its host or its supervisor failed
                self.failure.ended(peer.rank, 1, self._active_s, lost_host=peer.host)

    def _finish_lines(self, peer: Peer, end: bytes = b"\n") -> None:
        """Passes on what has no end of line yet."""
        for kind, splitter in peer.splitters.items():
            if rest := splitter.take_rest():
                self.failure.line(Line(peer.rank, kind == supervisor.ERR, rest + end))

    def _take_end(self, peer: Peer, end: dict[str, int]) -> None:
        peer.has_ended = True
        if not self._is_stopping:
            self.failure.ended(peer.rank, end["code"], self._active_s, bool(end["by_mpirun"]))
        ended = [other for other in self._peers.values() if other.has_ended]
        if len(ended) == self._options.np:
            self.failure.finish()
            self._kill_at_s = self._active_s + LINGER_S
            for other in ended:
                other.send(supervisor.GO)
        elif end["code"] == 0 or self._is_stopping:  # else mpirun is to know when it is reported
            peer.send(supervisor.GO)

    # Ending

    def _stop(self, number: int = signal.SIGTERM) -> None:
        """Signals all ranks, and lets mpirun know of the ends that waited for a report."""
        self._is_stopping = True
        self._kill_at_s = time.monotonic() + KILL_AFTER_S
        for peer in self._peers.values():
            peer.send(supervisor.GO if peer.has_ended else supervisor.SIGNAL, bytes([number]))
        if self._mpirun.poll() is None and number == signal.SIGKILL:
            os.killpg(self._mpirun.pid, number)  # with its remote shells
        else:
            self._mpirun.send_signal(number)

    def _on_signal(self, number: int) -> None:
        if self._is_stopping:  # asked again
            self._kill_at_s = 0.0
            return
        self.stopped_by = number
        if number != signal.SIGPIPE:
            self._writer.say(f"{signal.Signals(number).name}: ending all ranks")
        self._stop()

    def _check_times(self, now_s: float) -> None:
        while self._signals:
            self._on_signal(self._signals.pop(0))
        self.failure.tick(now_s)
        if not self._is_stopping:
            if self._writer.is_closed:
                self._on_signal(signal.SIGPIPE)  # nobody reads on, as in "| head"
            elif self.failure.rank is not None:
                self._stop()
            elif now_s >= self._start_by_s and len(self._peers) < self._options.np:
                self._name_late_ranks()
        if now_s >= self._kill_at_s:
            self._stop(signal.SIGKILL)
        if self._shows_prompts and 0 in self._peers and now_s - self._heard_s > PROMPT_S:
            self._finish_lines(self._peers[0], b"")
        if self._mpirun.poll() is None:
            self._active_s = now_s
            return
        # What ranks that outlive mpirun have to say, or a child of mpirun that holds its output.
        self._kill_at_s = min(self._kill_at_s, now_s + KILL_AFTER_S)
        has_ranks = any(peer.is_open for peer in self._peers.values())
        patience_s = 2 * KILL_AFTER_S if has_ranks else 0.5 * self._mpirun_reader.is_alive()
        self._is_over = now_s >= self._active_s + patience_s and self._queue.empty()

    def _name_late_ranks(self) -> None:
        count = self._options.np
        missing = [str(rank) for rank in range(count) if rank not in self._peers]
        ranks = ", ".join(missing[:8]) + ", ..." * (len(missing) > 8)
        limit = f"{self._options.start_timeout_s:g} s (--start-timeout)"
        self._writer.say(f"{len(missing)} of {count} ranks did not start within {limit}: {ranks}")
        self.code = 1
        self._stop()

    def _result(self) -> int:
        code_of_rank = self.failure.finish()
        if self.stopped_by is not None:
            return 128 + self.stopped_by
        if code_of_rank is not None or self.code != 0:
            return code_of_rank or self.code
        code = exit_code(self._mpirun.returncode)
        how = f"mpirun ended with exit code {code}"
        if len(self._peers) < self._options.np:
            started = f"{len(self._peers)} of {self._options.np} ranks had started"
            self._writer.say(f"{how} after {started}")
            return code or 1
        if code != 0:
            self._writer.say(f"{how} though every rank ended well")
        return code or int(self._writer.is_incomplete)
