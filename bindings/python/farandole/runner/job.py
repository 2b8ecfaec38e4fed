"""One job: starts mpirun, listens to the ranks, ends everything, and reports how it ended."""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import json
import os
import secrets
import selectors
import signal
import socket
import struct
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence

from farandole.runner import supervisor
from farandole.runner.mpirun import Host, Options
from farandole.runner.output import FirstFailure, Line, LineSplitter, Writer, exit_code
from farandole.runner.supervisor import Channel, Message

_TICK_S = 0.05
KILL_AFTER_S = 5.0  # from SIGTERM to SIGKILL
LINGER_S = 10.0  # for mpirun to end the others after one rank's bad end, and itself after the last
PROMPT_S = 0.2  # an unfinished line of a rank that reads a terminal is shown then
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SIOCGIFADDR = 0x8915
# Order of events that come at once: what mpirun says of a rank's end comes after that end.
_OWN, _RANK, _MPIRUN = range(3)


class Peer(Channel):
    """The connection to one supervisor.

    Attributes:
        rank: None until it has said hello. Whoever does not say the job's token never gets one.
        has_ended: Its program's end is known.
        given_bytes: Of the function it runs, how much it has got.
    """

    def __init__(self, connection: socket.socket, token: str) -> None:
        super().__init__(connection)
        self._token = token
        self._clock_lead_s = 0.0  # of this machine's clock over the other's
        self.rank: int | None = None
        self.host = self.threads = ""
        self.has_ended = False
        self.given_bytes = 0

    def read(self) -> list[Message] | None:
        """What has come, with the launcher's times; None when the connection is over."""
        try:
            messages = self.receive()
            if messages and self.rank is None:
                self._greet(messages.pop(0))
        except (ValueError, KeyError, TypeError):
            return None  # no supervisor of ours
        return messages and [one._replace(time_s=one.time_s + self._clock_lead_s) for one in messages]

    def _greet(self, message: Message) -> None:
        hello = json.loads(message.payload)
        if message.kind != supervisor.HELLO or not hmac.compare_digest(str(hello["token"]), self._token):
            raise ValueError("a stranger")
        self.rank, self.host, self.threads = int(hello["rank"]), str(hello["host"]), str(hello["threads"])
        self._clock_lead_s = time.time() - message.time_s


def _own_addresses(hosts: Sequence[Host]) -> Iterator[str]:
    """The IPv4 addresses of this machine: those that other hosts see it by, and of all its interfaces."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for host in hosts:
            with contextlib.suppress(OSError):  # its name is known to ssh alone
                probe.connect((host.name, 9))  # sends nothing
                yield str(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                yield socket.inet_ntoa(answer[20:24])


def addresses_for(options: Options, port: int) -> list[str]:
    """Where the supervisors may find the launcher ("1.2.3.4:5678"), likeliest first."""
    if options.is_local:
        return [f"127.0.0.1:{port}"]
    found = dict.fromkeys(_own_addresses(options.hosts))
    return [f"{address}:{port}" for address in found if not address.startswith("127.")]


def _is_in_background() -> bool:
    """Whether stdin is a terminal that another job of the shell reads: reading it would stop us."""
    try:
        return os.tcgetpgrp(0) != os.getpgrp()
    except OSError:
        return False


class Job:
    """Runs once. Thread safety: single-threaded; on the main thread it takes the process's signals.

    Args:
        command: mpirun's command line; the ranks are started through supervisor.py.
        environment: For mpirun.
        options: What was asked for.
        writer: Where lines go.
        function: Each rank reads it from its stdin and has a descriptor for its result; None: rank 0
            reads the launcher's stdin.

    Attributes:
        failure: Which rank failed first.
        results: Rank -> what it wrote to that descriptor.
        stopped_by: The signal that ended the job; 0: the launcher itself; None: neither.
    """

    def __init__(
        self, command: Sequence[str], environment: dict[str, str], options: Options, writer: Writer,
        function: bytes | None = None,
    ) -> None:  # fmt: skip
        if not os.path.exists("/proc/self/fd/0"):
            os.open(os.devnull, os.O_RDONLY)  # becomes 0, which no socket of ours should be
        self._options, self._writer, self._function = options, writer, function
        self.failure = FirstFailure(writer)
        self.results: dict[int, bytearray] = {}
        self.stopped_by: int | None = None
        self._splitters: defaultdict[tuple[int | None, bool], LineSplitter] = defaultdict(LineSplitter)
        self._peers: dict[int, Peer] = {}
        self._reader: Peer | None = None  # rank 0, when it wants input
        self._stdin_is_watched = False
        self._prompts = os.isatty(0) and function is None
        self._heard_s = 0.0  # when rank 0 wrote last, monotonic
        self._kill_at_s: float | None = None
        self._had_events = False
        self._gone_s: float | None = None  # when mpirun had ended and no more came
        self._has_late_ranks = False
        self._linger_until_s: float | None = None
        self._close_stack = contextlib.ExitStack()
        self._selector = self._close_stack.enter_context(selectors.DefaultSelector())
        self._token = secrets.token_hex(16)
        listener = socket.create_server(("127.0.0.1" if options.is_local else "", 0), backlog=options.np)
        listener.setblocking(False)
        self._close_stack.enter_context(listener)
        self._selector.register(listener, selectors.EVENT_READ, (_OWN, "_accept"))
        addresses = addresses_for(options, listener.getsockname()[1])
        job = {"token": self._token, "addresses": addresses, "runs_function": function is not None}
        if threading.current_thread() is threading.main_thread():
            self._take_signals()
        self._start_by_s = time.monotonic() + options.start_timeout_s
        # A session of its own: Ctrl-C comes to us alone.
        self._mpirun = subprocess.Popen(
            command, env=environment | {supervisor.VARIABLE: json.dumps(job)}, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        for stream in (self._mpirun.stdout, self._mpirun.stderr):
            assert stream is not None
            self._close_stack.enter_context(stream)
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, selectors.EVENT_READ, (_MPIRUN, "_read_mpirun"))

    def run(self) -> int:
        """Until everything has ended.

        Returns:
            The exit code: 128 + n when signal n ended the job, else that of the rank that failed
            first, else mpirun's; 1 instead of 0 if something could not be written.
        """
        with self._close_stack:
            while not self._is_over():
                events = sorted(self._selector.select(_TICK_S), key=lambda event: event[0].data[0])
                self._had_events = bool(events)
                for key, _ in events:
                    getattr(self, key.data[1])(key.fileobj)
                self._check_times(time.monotonic())
                self._writer.flush()
                if self._writer.is_closed and self.stopped_by is None:
                    self._stop(signal.SIGPIPE)  # nobody reads on, as in "| head"
            for key in list(self._selector.get_map().values()):
                if isinstance(key.fileobj, Peer):
                    key.fileobj.close()
            for rank, is_error in list(self._splitters):
                self._finish_line(rank, is_error)
            code = self._result()
        self._writer.flush()
        return code or int(self._writer.is_incomplete)

    def _take_signals(self) -> None:
        """Makes signals events, until the job is over."""
        mine, theirs = socket.socketpair()
        for end in (mine, theirs):
            end.setblocking(False)
            self._close_stack.enter_context(end)
        self._selector.register(mine, selectors.EVENT_READ, (_OWN, "_on_signal"))
        before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        self._close_stack.callback(signal.set_wakeup_fd, before)
        for number in _SIGNALS:
            if signal.getsignal(number) is signal.SIG_IGN:  # by nohup, or a shell that put us in the background
                continue
            self._close_stack.callback(signal.signal, number, signal.signal(number, lambda *_: None))

    # Events

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it has gone again
            peer = Peer(listener.accept()[0], self._token)
            self._selector.register(peer, selectors.EVENT_READ, (_RANK, "_read_peer"))

    def _on_signal(self, mine: socket.socket) -> None:
        for number in mine.recv(64):
            if number not in _SIGNALS:
                continue
            if self.stopped_by is None:
                self._writer.say(f"{signal.Signals(number).name}: ending all ranks")
                self._stop(number)
            else:  # asked again
                self._kill_at_s = time.monotonic()

    def _read_mpirun(self, stream: object) -> None:
        data = os.read(stream.fileno(), 1 << 16)  # type: ignore[attr-defined]
        if not data:
            self._selector.unregister(stream)  # type: ignore[arg-type]
        # Once it is reported how the ranks failed, or they were asked to end, what mpirun says is noise.
        is_noise = self.failure.rank is not None or self.stopped_by is not None
        if not is_noise or self._options.verbose:
            self._add_lines(None, True, data, time.time())

    def _read_peer(self, peer: Peer) -> None:
        messages = peer.read()
        if peer.rank is not None and peer.rank not in self._peers:
            if not self._peers and peer.threads:
                self._writer.say(peer.threads)
            self._peers[peer.rank] = peer
        for message in messages or ():
            self._take(peer, message)
        if messages is None:
            self._selector.unregister(peer)
            peer.close()
            if peer.rank is not None and not peer.has_ended:  # its host failed, or its supervisor was killed
                self._linger()
                if self.stopped_by is None:
                    self.failure.lost(peer.rank, peer.host, time.time(), time.monotonic())

    def _take(self, peer: Peer, message: Message) -> None:
        rank = peer.rank
        assert rank is not None
        if message.kind in (supervisor.OUT, supervisor.ERR):
            is_error = message.kind == supervisor.ERR
            self._writer.keep(rank, is_error, message.payload)
            self._add_lines(rank, is_error, message.payload, message.time_s)
        elif message.kind == supervisor.RESULT:
            self.results.setdefault(rank, bytearray()).extend(message.payload)
        elif message.kind == supervisor.WANT:
            self._give_input(peer)
        elif message.kind == supervisor.EXIT:
            for is_error in (False, True):
                self._finish_line(rank, is_error)
            self._take_end(peer, json.loads(message.payload), message.time_s)

    def _take_end(self, peer: Peer, end: dict[str, int], time_s: float) -> None:
        assert peer.rank is not None
        peer.has_ended = True
        if self._reader is peer:
            self._reader = None
        code = end["code"]
        if self.stopped_by is None:
            self.failure.ended(peer.rank, code, time_s, time.monotonic(), bool(end["by_mpirun"]))
        all_ended = sum(other.has_ended for other in self._peers.values()) == self._options.np
        if all_ended:
            self.failure.finish()
            self._release()
        if code == 0 or self.stopped_by is not None or self.failure.rank is not None:
            peer.send(supervisor.GO)
        if code != 0 or all_ended:
            self._linger()

    def _add_lines(self, rank: int | None, is_error: bool, data: bytes, time_s: float) -> None:
        if rank == 0:
            self._heard_s = time.monotonic()
        for text in self._splitters[rank, is_error].add(data):
            self.failure.line(Line(time_s, rank, is_error, text))

    def _finish_line(self, rank: int | None, is_error: bool, end: bytes = b"\n") -> None:
        """Passes on what has no end of line yet."""
        rest = self._splitters[rank, is_error].take_rest()
        if rest:
            self.failure.line(Line(time.time(), rank, is_error, rest + end))

    # Input

    def _give_input(self, peer: Peer) -> None:
        """Answers WANT: with the next bytes of the function, or of our stdin when there are some."""
        if self._function is None:
            self._reader = peer
            self._watch_stdin()
            return
        begin = peer.given_bytes
        data = self._function[begin : begin + supervisor.INPUT_BYTES]
        peer.given_bytes += len(data)
        peer.send(supervisor.INPUT, data)

    def _watch_stdin(self) -> None:
        if self._reader is None or self._stdin_is_watched or _is_in_background():
            return
        try:
            self._selector.register(0, selectors.EVENT_READ, (_OWN, "_read_stdin"))
            self._stdin_is_watched = True
        except PermissionError:  # a regular file, which can always be read
            self._read_stdin(0)

    def _read_stdin(self, stdin: int) -> None:
        if self._stdin_is_watched:
            self._selector.unregister(stdin)
            self._stdin_is_watched = False
        if self._reader is None or _is_in_background():
            return
        try:
            data = os.read(stdin, supervisor.INPUT_BYTES)
        except OSError:
            data = b""  # the terminal has gone
        if data.endswith(b"\n"):
            self._writer.end_open_line()
        self._reader.send(supervisor.INPUT, data)
        self._reader = None

    def _show_prompt(self, now_s: float) -> None:
        """Shows an unfinished line of rank 0 that waits for what the user types."""
        if self._reader is None or now_s - self._heard_s < PROMPT_S:
            return
        for is_error in (False, True):
            self._finish_line(0, is_error, b"")

    # Ending

    def _linger(self) -> None:
        if self._linger_until_s is None:
            self._linger_until_s = time.monotonic() + LINGER_S

    def _signal_all(self, number: int) -> None:
        for peer in self._peers.values():
            if not peer.has_ended:
                peer.send(supervisor.SIGNAL, bytes([number]))
        if self._mpirun.poll() is not None:
            return
        if number == signal.SIGKILL:
            os.killpg(self._mpirun.pid, number)  # with its remote shells
        else:
            self._mpirun.send_signal(number)

    def _stop(self, why: int) -> None:
        self.stopped_by = why
        self._kill_at_s = time.monotonic() + KILL_AFTER_S
        self._signal_all(signal.SIGTERM)

    def _release(self) -> None:
        """Lets mpirun know of the ends that have waited for the report."""
        for peer in self._peers.values():
            if peer.has_ended:
                peer.send(supervisor.GO)

    def _check_times(self, now_s: float) -> None:
        if self.stopped_by is None:
            self._check_start(now_s)
        lingers = self._linger_until_s is not None and now_s >= self._linger_until_s
        if lingers and self.stopped_by is None:
            self._stop(0)
        if self._kill_at_s is not None and now_s >= self._kill_at_s:
            self._kill_at_s = now_s + KILL_AFTER_S
            self._signal_all(signal.SIGKILL)
        was_reported = self.failure.rank is not None
        self.failure.tick(now_s)
        if self.failure.rank is not None and not was_reported:
            self._release()
        self._watch_stdin()
        if self._prompts:
            self._show_prompt(now_s)

    def _check_start(self, now_s: float) -> None:
        count, limit_s = self._options.np, self._options.start_timeout_s
        if len(self._peers) == count or now_s < self._start_by_s:
            return
        missing = [str(rank) for rank in range(count) if rank not in self._peers]
        ranks = ", ".join([*missing[:8], *(["..."] if len(missing) > 8 else [])])
        limit = f"{limit_s:g} s (--start-timeout)"
        self._writer.say(f"{len(missing)} of {count} ranks did not start within {limit}: {ranks}")
        self._has_late_ranks = True
        self._stop(0)

    def _is_over(self) -> bool:
        """Whether mpirun has ended and nothing more will come, or that was waited for long enough."""
        if self._mpirun.poll() is None:
            return False
        now_s = time.monotonic()
        if self._gone_s is None:
            self._kill_at_s = self._kill_at_s or now_s + KILL_AFTER_S  # ranks that outlive mpirun
        if self._gone_s is None or self._had_events:  # what was written may take long to print
            self._gone_s = now_s
        kinds = {key.data[0] for key in self._selector.get_map().values()}
        patience_s = 2 * KILL_AFTER_S if _RANK in kinds else 0.5  # a child of mpirun may hold its pipes
        return kinds == {_OWN} or now_s >= self._gone_s + patience_s

    def _result(self) -> int:
        code_of_rank = self.failure.finish()
        if self.stopped_by:
            return 128 + self.stopped_by
        if code_of_rank is not None:
            return code_of_rank
        if self._has_late_ranks:
            return 1
        code = exit_code(self._mpirun.returncode)
        if len(self._peers) < self._options.np:
            count = f"{len(self._peers)} of {self._options.np} ranks"
            self._writer.say(f"mpirun ended with exit code {code} after {count} had started")
            return code or 1
        if code != 0:
            self._writer.say(f"mpirun ended with exit code {code} though every rank ended well")
        return code
