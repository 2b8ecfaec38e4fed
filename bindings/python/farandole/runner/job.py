"""One job: starts supervisors, listens to the ranks, ends everything, and reports how it ended.

:class:`Job` does not know how supervisors are started: ``hosts.py`` and ``mpirun.py`` have its two kinds, and
``elastic.py`` that of the former whose ranks come and go.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import ipaddress
import json
import math
import os
import queue
import re
import secrets
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import IO, Any

from farandole.runner import supervisor
from farandole.runner.acceptor import Acceptor
from farandole.runner.options import Options, UsageError
from farandole.runner.output import MAX_LINE_BYTES, FirstFailure, Line, LineSplitter, Merger, Writer, list_ranks
from farandole.runner.supervisor import Channel, Message, start_thread

_TICK_S = 0.05
_GATHER_S = 0.02  # for what other ranks wrote before, and is on its way
_MAX_QUEUED = 256  # messages; then ranks that write faster than we wait
_LOST = -1  # the kind of a message of ours: the channel has ended
_URGENT = (supervisor.HELLO, supervisor.READY, _LOST)  # a start, or the end, waits for them
KILL_AFTER_S = 5.0
LINGER_S = 10.0  # for what started the ranks to end after the last one
PROMPT_S = 0.2  # an unfinished line of a rank that reads a terminal is shown then
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PYTHON = re.compile(r"(.*/)?(python[\d.]*|[^/]+\.py)")
_NOT_JOINED = (
    "no rank has joined the job: each program ran by itself. A program joins by farandole.init(); torch.distributed, "
    "Lightning and Accelerate need a job without --elastic"
)
_SIOCGIFADDR = 0x8915
_IPV6_ADDRESSES = "/proc/net/if_inet6"
_GLOBAL, _UNUSABLE = "00", 0x48  # there: a scope, and the flags "tentative" and "duplicate"
# What a rank knows of the failure that ends it, all of it optional: attributes of HorovodInternalError, and what
# basics.describe_failure() adds. Others are left out.
_FACTS: dict[str, type | tuple[type, ...]] = {
    "failed_ranks": list, "cause": str, "kind": str, "host": str, "pid": int, "last": str, "last_age_s": (int, float),
    "is_shared": bool, "is_of_init": bool,
}  # fmt: skip


class Malformed(ValueError):
    """A message that cannot be read; says why."""


def read_json(payload: bytes, **kinds: type) -> dict[str, Any]:
    """The JSON object of a message, which has values of these kinds by these names. Raises Malformed."""
    try:
        said = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"it is not JSON: {error}") from None
    if not isinstance(said, dict):
        raise Malformed("it is no JSON object")
    for name, kind in kinds.items():
        if not isinstance(said.get(name), kind):
            raise Malformed(f'it has no {kind.__name__} "{name}"')
    return said


def read_report(text: bytes) -> dict[str, Any]:
    """The arguments of :meth:`FirstFailure.reported` in a rank's report. Raises Malformed."""
    said = read_json(text, text=str, is_consequence=bool)
    facts = said.get("facts") or {}
    if not isinstance(facts, dict):
        raise Malformed("its facts are no JSON object")
    facts = {name: value for name, value in facts.items() if name in _FACTS and value is not None}
    ranks = facts.get("failed_ranks", [])
    wrong = [name for name, value in facts.items() if not isinstance(value, _FACTS[name])]
    if wrong or not all(type(rank) is int for rank in ranks):
        raise Malformed(f'its "{(wrong or ["failed_ranks"])[0]}" is of another kind')
    return {"text": said["text"], "is_consequence": said["is_consequence"], "facts": facts}


class Peer:
    """What is known of one rank, and the channel to its supervisor."""

    def __init__(self, rank: int, channel: Channel, host: str, function: bytes | None) -> None:
        self.rank, self.channel, self.host = rank, channel, host
        self.is_open = True
        self.has_ended = False  # the program
        self.function = io.BytesIO(function or b"")  # what is left of the function that it runs
        self.splitters = {kind: LineSplitter(MAX_LINE_BYTES) for kind in (supervisor.OUT, supervisor.ERR)}
        self.reports = LineSplitter(supervisor.MAX_PAYLOAD_BYTES)


def find_addresses(names: str = "") -> list[str]:
    """This host's addresses but loopback and link-local ones, IPv4 first.

    ``names``: of these interfaces ("eth0,eth1") or in these networks ("10.0.0.0/8") alone.
    """
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                request = struct.pack("256s", name.encode()[:15])
                found.append((name, socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])))
    with contextlib.suppress(OSError), open(_IPV6_ADDRESSES) as file:  # a kernel without IPv6 has no such file
        for digits, _, _, scope, flags, name in map(str.split, file):
            if scope == _GLOBAL and not int(flags, 16) & _UNUSABLE:
                found.append((name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))))
    wanted = [name for name in names.split(",") if name]
    return [
        address for interface, address in found
        if not address.startswith("127.") and (not wanted or any(_is_of(interface, address, one) for one in wanted))
    ]  # fmt: skip


def _is_of(interface: str, address: str, wanted: str) -> bool:
    """Whether an address is of an interface of that name, or in that network."""
    with contextlib.suppress(ValueError):
        return interface == wanted or ipaddress.ip_address(address) in ipaddress.ip_network(wanted, strict=False)
    return False


class Job:
    """Runs once. A thread for each channel puts messages into one queue, which one loop handles.

    Args:
        function: Each rank reads it from stdin; None: rank 0 reads the launcher's stdin.

    Attributes:
        code: 128 + n when signal n ended the job, else that of the rank that failed first, else that of
            what started the ranks; 1 instead of 0 if something could not be written.
        results: Rank -> what its function returned.
        stopped_by: The signal that ended the job, if one did.
        asks_to_stop: It has ranks that stop by themselves at such a signal, which have time until the next one.
    """

    def __init__(self, options: Options, writer: Writer, function: bytes | None = None) -> None:
        self.options, self.writer, self.function = options, writer, function
        self.code = 0
        self.failure = FirstFailure(writer)
        self._merger = Merger(lambda line: self.failure.line(line))
        self.results: dict[int, bytearray] = {}
        self.stopped_by: int | None = None
        self.token = secrets.token_hex(16)
        self.peers: dict[int, Peer] = {}  # by rank
        self.starters: dict[str, subprocess.Popen[bytes]] = {}  # name -> what starts ranks
        self.is_stopping = False
        self.asks_to_stop = self._stops_by_itself = False  # the latter: a rank, when it gets SIGTERM
        self._has_said_threads = False
        self._has_joined = False  # any rank, or it is not known
        self._queue: queue.Queue[tuple[Channel | str, Message]] = queue.Queue(_MAX_QUEUED)
        self._threads: list[threading.Thread] = []
        self._readers: list[threading.Thread] = []  # of what starters say
        self._signals: list[int] = []  # that came and are not handled yet
        self._acceptor: Acceptor | None = None
        self._channels: list[Channel] = []
        self._unreadable: set[str] = set()  # hosts of which something was dropped
        self._is_over = False
        self._shows_prompts = os.isatty(0) and function is None
        self._heard_s = 0.0  # when rank 0 wrote last, monotonic
        self._active_s = 0.0  # when something came last, or a starter was seen to run
        self._kill_at_s = float("inf")
        self._start_by_s = time.monotonic() + options.start_timeout_s

    # What its two kinds do

    def start(self, stack: contextlib.ExitStack) -> None:
        """Starts supervisors; ``stack`` ends with the job."""
        raise NotImplementedError

    def greeted(self, channel: Channel, hello: dict[str, Any]) -> None:
        """Takes the first message of a supervisor. Raises Malformed."""
        raise NotImplementedError

    def has_all_supervisors(self) -> bool:
        """Whether no more of them will come."""
        raise NotImplementedError

    def ready(self, channel: Channel, said: dict[str, Any]) -> None:
        """Takes the message of a host's supervisor that starts its ranks."""
        raise NotImplementedError

    def signal_ranks(self, number: int) -> None:
        """Sends SIGTERM or SIGKILL to all ranks."""
        raise NotImplementedError

    def rank_ended(self, peer: Peer, is_bad: bool) -> None:
        """Takes the end of a rank's program."""

    def host_leaves(self, channel: Channel) -> None:
        """Takes the notice of a supervisor that its host will go."""

    def find_unstarted(self) -> str:
        """Why ranks will not start any more; empty if they may."""
        return ""

    def describe_end(self, has_all: bool) -> tuple[int, str]:
        """The exit code of what started the ranks, if none failed, and a message if it is a bad one."""
        raise NotImplementedError

    # What an elastic job does in another way

    kill_after_s = KILL_AFTER_S  # from SIGTERM to SIGKILL

    @property
    def is_waiting(self) -> bool:
        """Whether, even if nothing runs, something is still to be started."""
        return False

    def take_end(self, peer: Peer, end: dict[str, Any], now_s: float) -> None:
        """Takes the end of a rank's program, from its supervisor."""
        if not self.is_stopping:
            self.failure.ended(peer.rank, end["code"], now_s, end["by_mpirun"])
        if sum(other.has_ended for other in self.peers.values()) == self.options.np:
            self.finish(now_s)
        self.rank_ended(peer, end["code"] != 0)

    def take_loss(self, peer: Peer, now_s: float) -> None:
        """Takes it that nobody reports of a rank any more: its host or its supervisor failed."""
        self.failure.ended(peer.rank, 1, now_s, lost_host=peer.host)

    def take_error(self, peer: Peer, report: dict[str, Any], now_s: float) -> None:
        """Takes the arguments of :meth:`FirstFailure.reported`."""
        self.failure.reported(peer.rank, **report, now_s=now_s)

    def take_member(self, peer: Peer, address: str) -> None:
        """Takes it that a rank listens for members of its job at an address. Raises Malformed."""

    def check(self, now_s: float) -> None:
        """Is called again and again until the job is to stop."""
        if self.failure.rank is not None:
            self.stop()
        elif len(self.peers) < self.options.np:
            self._check_start(now_s)

    # For them

    def finish(self, now_s: float) -> None:
        """Notes that all ranks have ended: what has started them is to end, too."""
        self._merger.flush()
        self.failure.finish()
        self._kill_at_s = now_s + LINGER_S

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Signals all ranks."""
        self.is_stopping = True
        self._kill_at_s = time.monotonic() + self.kill_after_s
        self.signal_ranks(number)

    def open_listener(self, only_this_host: bool) -> dict[str, Any]:
        """Lets supervisors connect. Returns what they need for it, see :func:`supervisor.join_launcher`."""
        try:
            listener = supervisor.open_listener("127.0.0.1" if only_this_host else "")
        except OSError as error:
            raise UsageError(str(error)) from error
        hosts = ([] if only_this_host else find_addresses()) or ["127.0.0.1"]
        port = listener.getsockname()[1]
        self._acceptor = Acceptor(listener, self.token, self._take_connection)
        return {
            "token": self.token, "machine": supervisor.machine(),
            "addresses": [supervisor.join_address(host, port) for host in hosts],
        }  # fmt: skip

    def run_starter(
        self, name: str, command: Sequence[str], environment: dict[str, str], stdin: int, stdout: int,
    ) -> None:  # fmt: skip
        """Starts a process that starts ranks; what it says is shown as ``name``'s."""
        # A session of its own: Ctrl-C comes to us alone.
        started = subprocess.Popen(
            command, start_new_session=True, env=environment, stdin=stdin, stdout=stdout,
            stderr=subprocess.STDOUT if stdout == subprocess.PIPE else subprocess.PIPE,
        )  # fmt: skip
        self.starters[name] = started
        self._readers.append(start_thread(self._read_starter, name, started.stdout or started.stderr))

    def listen(self, channel: Channel) -> threading.Thread:
        """Takes messages of a supervisor from now on, until the thread ends."""
        return self._listen_to(channel, None)

    @property
    def has_messages(self) -> bool:
        """Whether there are some that were not taken yet."""
        return not self._queue.empty()

    def say_threads(self, text: str) -> None:
        """Says once, for the first host of several ranks, how many threads they use."""
        if text and not self._has_said_threads:
            self.writer.say(text)
            self._has_said_threads = True

    def add_ranks(self, ranks: Sequence[int], channel: Channel, host: str, threads: str) -> None:
        """Notes that ranks have started; ``threads`` says how many threads they use."""
        self.say_threads(threads)
        self.peers |= {rank: Peer(rank, channel, host, self.function) for rank in ranks}

    # The job

    def run(self) -> None:
        """Until everything has ended."""
        with contextlib.ExitStack() as stack:
            if threading.current_thread() is threading.main_thread():
                self._take_signals(stack)
            self.start(stack)
            while not self._is_over:
                for source, message in self._wait_for_messages():
                    self._take(source, message)
                self._check_times(time.monotonic())
                self.writer.flush()
            for peer in self.peers.values():
                self._finish_lines(peer)
            self._merger.flush()
            if self._acceptor is not None:
                self._acceptor.close()
            for channel in self._channels:
                channel.close()
            for thread in self._threads:
                thread.join(KILL_AFTER_S)
        self.writer.flush()
        self.code = self._result()

    def _take_signals(self, stack: contextlib.ExitStack) -> None:
        """Notes signals until the job is over, but for those ignored by nohup or a shell."""
        numbers = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        # A Python program that calls run() may have a use of its own for these.
        numbers += [number for number in supervisor.PASSED_ON if signal.getsignal(number) is signal.SIG_DFL]
        for number in numbers:
            before = signal.signal(number, lambda number, _: self._signals.append(number))
            stack.callback(signal.signal, number, before)
        # A terminal that another job of the shell reads: an error instead of stopping us.
        stack.callback(signal.signal, signal.SIGTTIN, signal.signal(signal.SIGTTIN, signal.SIG_IGN))

    # Threads

    def _take_connection(self, connection: socket.socket) -> None:
        self._listen_to(Channel.over(connection), supervisor.CONNECT_TIMEOUT_S)

    def _listen_to(self, channel: Channel, hello_timeout_s: float | None) -> threading.Thread:
        self._channels.append(channel)
        self._threads.append(start_thread(self._listen, channel, hello_timeout_s))
        return self._threads[-1]

    def _listen(self, channel: Channel, hello_timeout_s: float | None) -> None:
        hello = channel.receive(hello_timeout_s)
        if hello is not None and hello.kind == supervisor.HELLO:
            self._queue.put((channel, hello))
            while message := channel.receive():
                peer = self.peers.get(message.rank)
                if message.kind == supervisor.WANT and peer is not None:
                    start_thread(self._give_input, peer)  # as stdin may be silent
                else:
                    self._queue.put((channel, message))
            self._queue.put((channel, Message(_LOST, b"", math.inf)))
        channel.close()

    def _read_starter(self, name: str, stream: IO[bytes]) -> None:
        with stream:
            for text in stream:
                line = text.rstrip(b"\n") + b"\n"
                self._queue.put((name, Message(supervisor.ERR, line, time.time())))

    def _give_input(self, peer: Peer) -> None:
        """Answers WANT: with the next bytes of the function, or of our stdin once there are some."""
        if self.function is not None:
            data = peer.function.read(supervisor.INPUT_BYTES)
        else:
            try:
                data = os.read(0, supervisor.INPUT_BYTES)
            except OSError:
                data = b""  # it is closed, or a terminal that has gone or is another job's
            if self._shows_prompts and data.endswith(b"\n"):  # the terminal shows it
                self.writer.end_open_line()
        peer.channel.send(supervisor.INPUT, data, peer.rank)

    # The loop

    def _wait_for_messages(self) -> list[tuple[Channel | str, Message]]:
        """Messages in the order in which ranks wrote them; threads bring them in any."""
        is_busy = not self._queue.empty()
        try:
            found = [self._queue.get(timeout=_TICK_S)]
        except queue.Empty:
            return []
        time.sleep(0.0 if is_busy or found[0][1].kind in _URGENT else _GATHER_S)
        found += [self._queue.get() for _ in range(self._queue.qsize())]
        self._active_s = time.monotonic()
        return in_order(found)

    def _take(self, source: Channel | str, message: Message) -> None:
        kind, payload, _, rank = message
        if isinstance(source, str):
            # Once it is reported how the ranks failed, or they are to end, what starters say is noise.
            is_noise = self.is_stopping or self.failure.rank is not None
            if not is_noise or self.options.verbose:
                self.failure.line(Line(source, True, payload))
            return
        try:
            if kind == supervisor.HELLO:
                self._greet(source, payload)
            elif kind == supervisor.READY:
                self.ready(source, read_json(payload, address=str, threads=str, master_port=int))
            elif kind == supervisor.LEAVE:
                self.host_leaves(source)
            elif kind == _LOST:
                self.lose(source)
            elif rank in self.peers:
                self._take_of_rank(self.peers[rank], kind, payload)
        except Malformed as error:
            self._drop(source.host, error)

    def _drop(self, host: str, error: Malformed) -> None:
        """Says once for a host that what came from it cannot be read."""
        if host not in self._unreadable:
            self.writer.say(f"a message from host {host} cannot be read and is dropped: {error}")
        self._unreadable.add(host)

    def _greet(self, channel: Channel, payload: bytes) -> None:
        """Takes a supervisor in. One that cannot be read is left to end, with its ranks."""
        try:
            hello = read_json(payload, host=str)
            channel.host = hello["host"]
            if hello.get("version") != supervisor.PROTOCOL:
                raise Malformed("it is of another version of Farandole")
            self.greeted(channel, hello)
        except Malformed:
            channel.close()
            raise
        if self._acceptor is not None and self.has_all_supervisors():
            self._acceptor.close()

    def _take_of_rank(self, peer: Peer, kind: int, payload: bytes) -> None:
        if kind == supervisor.REPORT:
            for text in peer.reports.add(payload):
                self._take_report(peer, text)
        elif kind in peer.splitters:
            is_error = kind == supervisor.ERR
            self.writer.keep(peer.rank, is_error, payload)
            if peer.rank == 0:
                self._heard_s = self._active_s
            for text in peer.splitters[kind].add(payload):
                self._merger.add(Line(peer.rank, is_error, text), self._active_s)
        elif kind == supervisor.WANT:  # it was not known yet when this came
            start_thread(self._give_input, peer)
        elif kind == supervisor.RESULT:
            self.results.setdefault(peer.rank, bytearray()).extend(payload)
        elif kind == supervisor.EXIT:
            self._finish_lines(peer)
            end = read_json(payload, code=int, by_mpirun=bool, has_joined=bool)
            peer.has_ended = True
            self._has_joined |= end["has_joined"]
            self.take_end(peer, end, self._active_s)

    def _take_report(self, peer: Peer, text: bytes) -> None:
        try:
            said = read_json(text)
            if isinstance(address := said.get("member"), str):
                return self.take_member(peer, address)
            if said.get("stops") is True:
                self._stops_by_itself = True
                return
            report = read_report(text)
        except Malformed as error:
            return self._drop(peer.host, error)
        ranks = report["facts"].get("failed_ranks", [])  # of this job; a program can have others within itself
        report["facts"]["failed_ranks"] = [rank for rank in ranks if rank in range(self.options.np)]
        self.take_error(peer, report, self._active_s)

    def lose(self, channel: Channel) -> None:
        """Takes the end of a channel: of ranks that still ran, their host or their supervisor failed."""
        for peer in self.peers.values():
            if peer.channel is channel:
                peer.is_open = False
                if not peer.has_ended and not self.is_stopping:
                    self.take_loss(peer, self._active_s)
        if not any(peer.is_open for peer in self.peers.values()):  # the end, most often
            for starter in self.starters.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    starter.wait(_TICK_S)

    def _finish_lines(self, peer: Peer, end: bytes = b"\n") -> None:
        """Passes on what has no end of line yet."""
        for kind, splitter in peer.splitters.items():
            if rest := splitter.take_rest():
                self._merger.add(Line(peer.rank, kind == supervisor.ERR, rest + end), self._active_s)

    # Ending

    def _on_signal(self, number: int) -> None:
        if number in supervisor.PASSED_ON:
            for channel in {peer.channel for peer in self.peers.values()}:
                channel.send(supervisor.SIGNAL, bytes([number]))
            return
        if self.is_stopping:  # asked again
            self._kill_at_s = 0.0
            return
        self.stopped_by = number
        self.asks_to_stop = self._stops_by_itself and number != signal.SIGPIPE
        if number != signal.SIGPIPE:
            how = "asking all ranks to stop, which another signal ends" if self.asks_to_stop else "ending all ranks"
            self.writer.say(f"{signal.Signals(number).name}: {how}")
        self.stop()
        if self.asks_to_stop:
            self._kill_at_s = math.inf

    def _check_times(self, now_s: float) -> None:
        while self._signals:
            self._on_signal(self._signals.pop(0))
        self._merger.tick(now_s)
        if self.failure.is_due(now_s):
            self._merger.flush()  # above the report, which looks at what was shown
        self.failure.tick(now_s)
        if not self.is_stopping:
            if self.writer.is_closed:
                self._on_signal(signal.SIGPIPE)  # nobody reads on, as in "| head"
            else:
                self.check(now_s)
        if now_s >= self._kill_at_s:
            self.stop(signal.SIGKILL)
        if self._shows_prompts and 0 in self.peers and now_s - self._heard_s > PROMPT_S:
            self._finish_lines(self.peers[0], b"")
        if self.is_waiting or any(starter.poll() is None for starter in self.starters.values()):
            self._active_s = now_s
            return
        # What ranks that outlive their starter have to say, or a child of it that holds its output.
        self._kill_at_s = min(self._kill_at_s, now_s + KILL_AFTER_S)
        has_ranks = any(peer.is_open for peer in self.peers.values())
        patience_s = 2 * KILL_AFTER_S if has_ranks else 0.5 * any(thread.is_alive() for thread in self._readers)
        self._is_over = now_s >= self._active_s + patience_s and self._queue.empty()

    def _check_start(self, now_s: float) -> None:
        """Ends the job if ranks will not start, or have not in time."""
        why = self.find_unstarted()
        if not why and now_s >= self._start_by_s:
            count = self.options.np
            missing = [rank for rank in range(count) if rank not in self.peers]
            limit = f"{self.options.start_timeout_s:g} s (--start-timeout)"
            why = f"{len(missing)} of {count} ranks did not start within {limit}: {list_ranks(missing)}"
            if self._acceptor is not None and self._acceptor.refused:
                why += f"; connections refused: {self._acceptor.refused}"
        if why:
            self.writer.say(why)
            self.code = 1
            self.stop()

    def _result(self) -> int:
        code_of_rank = self.failure.finish()
        if self.stopped_by is not None:
            return 128 + self.stopped_by
        if code_of_rank is not None or self.code != 0:
            return code_of_rank or self.code
        code, message = self.describe_end(len(self.peers) == self.options.np)
        if message:
            self.writer.say(message)
        elif code == 0 and not self._has_joined and self.should_join():
            self.writer.say(_NOT_JOINED)
        return code or int(self.writer.is_incomplete)

    def should_join(self) -> bool:
        """Whether several ranks ran a Python program, which is likely to be for one job, and had but one way to it.

        Others may have met by the variables of torchrun.
        """
        runs_python = any(map(_PYTHON.fullmatch, self.options.command)) and self.options.is_elastic
        return self.options.np > 1 and len(self.peers) == self.options.np and runs_python


def in_order(found: Sequence[tuple[Channel | str, Message]]) -> list[tuple[Channel | str, Message]]:
    """Messages by their times, but those of one sender as they came, whatever has become of its clock meanwhile."""
    latest_s: dict[Channel | str, float] = {}
    times_s = []
    for source, message in found:
        latest_s[source] = max(message.time_s, latest_s.get(source, -math.inf))
        times_s.append(latest_s[source])
    return [found[place] for place in sorted(range(len(found)), key=times_s.__getitem__)]
