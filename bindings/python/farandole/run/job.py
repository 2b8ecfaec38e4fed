"""One job: starts mpirun, listens to the ranks, ends everything, and says how it ended."""

from __future__ import annotations

import json
import os
import secrets
import selectors
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Sequence

from farandole.run import supervise
from farandole.run.arguments import Options
from farandole.run.lines import Line, Pieces, Writer
from farandole.run.peers import Message, Peer, addresses_for
from farandole.run.verdict import Verdict, exit_code

_TICK_S = 0.05
_GO = supervise.GO[0]
KILL_AFTER_S = 5.0  # from SIGTERM to SIGKILL
LINGER_S = 10.0  # for mpirun to end the others after one rank's bad end, and itself after the last
_STREAMS = {supervise.OUT: False, supervise.ERR: True}


class Job:
    """Runs once. Thread safety: single-threaded, on the main thread, whose signals it takes.

    Args:
        command: mpirun's command line; the ranks are started through supervise.py.
        environment: For mpirun.
        options: What was asked for.
        writer: Where lines go.
    """

    def __init__(
        self, command: Sequence[str], environment: dict[str, str], options: Options, writer: Writer
    ) -> None:
        self._options = options
        self._writer = writer
        self._verdict = Verdict(writer.show, writer.say)
        self._pieces: dict[tuple[int | None, bool], Pieces] = {}
        self._peers: dict[int, Peer] = {}
        self._stopped_by: int | None = None  # a signal, or 0: by ourselves
        self._kill_at_s: float | None = None
        self._had_events = False
        self._gone_s: float | None = None  # when mpirun had ended and no more came
        self._has_late_ranks = False
        self._linger_until_s: float | None = None
        self._selector = selectors.DefaultSelector()
        self._token = secrets.token_hex(16)
        self._listener = self._listen()
        port = self._listener.getsockname()[1]
        job = {
            "token": self._token,
            "addresses": addresses_for(options, port),
            "stdin": _stdin_source() if options.is_local else "mpirun",
        }
        environment = environment | {supervise.VARIABLE: json.dumps(job)}
        self._wakeup = self._take_signals()
        self._start_by_s = time.monotonic() + options.start_timeout_s
        # A session of its own: Ctrl-C comes to us alone. It cannot read a terminal there.
        self._mpirun = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL if options.is_local or _is_terminal() else None, start_new_session=True,
        )  # fmt: skip
        self._watch_mpirun()

    def run(self) -> int:
        """Until everything has ended.

        Returns:
            The exit code: 128 + n when signal n ended the job, else that of the rank that failed
            first, else mpirun's.
        """
        while not self._is_over():
            # Ranks before mpirun: what it says of a rank's end comes after that end.
            events = sorted(self._selector.select(_TICK_S), key=lambda event: event[0].data[0])
            self._had_events = bool(events)
            for key, _ in events:
                getattr(self, key.data[1])(key.fileobj)
            self._check_times(time.monotonic())
            self._writer.flush()
            if self._writer.is_broken and self._stopped_by is None:
                self._stop(signal.SIGPIPE)  # nobody reads on, as in "| head"
        self._close()
        return self._result()

    # Set-up

    def _listen(self) -> socket.socket:
        listener = socket.create_server(
            ("127.0.0.1" if self._options.is_local else "", 0), backlog=self._options.np
        )
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, (0, "_accept"))
        return listener

    def _take_signals(self) -> socket.socket:
        mine, theirs = socket.socketpair()
        for end in (mine, theirs):
            end.setblocking(False)
        signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        self._selector.register(mine, selectors.EVENT_READ, (0, "_on_signal"))
        self._theirs = theirs
        return mine

    def _watch_mpirun(self) -> None:
        for stream in (self._mpirun.stdout, self._mpirun.stderr):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, selectors.EVENT_READ, (2, "_read_mpirun"))

    # Events

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return  # it has gone again
        supervise.watch(connection)
        self._selector.register(
            Peer(connection, self._token), selectors.EVENT_READ, (1, "_read_peer")
        )

    def _on_signal(self, mine: socket.socket) -> None:
        for number in mine.recv(64):
            if number not in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                continue
            if self._stopped_by is None:
                self._writer.say(f"{signal.Signals(number).name}: ending all ranks")
                self._stop(number)
            else:  # asked again
                self._kill_at_s = time.monotonic()

    def _read_mpirun(self, stream: object) -> None:
        data = os.read(stream.fileno(), 1 << 16)  # type: ignore[attr-defined]
        if not data:
            self._selector.unregister(stream)  # type: ignore[arg-type]
        # Once the ranks have told how they failed, or were asked to end, what mpirun says is noise.
        is_noise = self._verdict.is_told or self._stopped_by is not None
        if not is_noise or self._options.verbose:
            self._add_lines(None, True, data, time.time())

    def _read_peer(self, peer: Peer) -> None:
        messages = peer.read()
        if peer.rank is not None:
            self._peers.setdefault(peer.rank, peer)
        for message in messages or ():
            self._take(peer, message)
        if messages is None:
            self._selector.unregister(peer)
            peer.close()
            if peer.rank is not None and not peer.has_ended:
                self._lose(peer)

    def _lose(self, peer: Peer) -> None:
        """A connection ended without EXIT: the host failed, or somebody killed the supervisor."""
        assert peer.rank is not None
        self._linger()
        if self._stopped_by is None:
            self._verdict.lost(peer.rank, peer.host, time.time(), time.monotonic())

    def _take(self, peer: Peer, message: Message) -> None:
        assert peer.rank is not None
        if message.kind in _STREAMS:
            is_error = _STREAMS[message.kind]
            self._writer.keep(peer.rank, is_error, message.payload)
            self._add_lines(peer.rank, is_error, message.payload, message.time_s)
        elif message.kind == supervise.EXIT:
            for is_error in (False, True):
                self._add_lines(peer.rank, is_error, b"", message.time_s)
            self._take_end(peer, int(json.loads(message.payload)["code"]), message.time_s)

    def _take_end(self, peer: Peer, code: int, time_s: float) -> None:
        assert peer.rank is not None
        peer.has_ended = True
        if self._stopped_by is None:
            self._verdict.ended(peer.rank, code, time_s, time.monotonic())
        if code == 0 or self._stopped_by is not None or self._verdict.is_told:
            peer.signal(_GO)
        ended = sum(other.has_ended for other in self._peers.values())
        if code != 0 or ended == self._options.np:
            self._linger()

    def _add_lines(self, rank: int | None, is_error: bool, data: bytes, time_s: float) -> None:
        """Passes on what is complete; without data, what is left."""
        pieces = self._pieces.setdefault((rank, is_error), Pieces())
        for text in pieces.add(data) if data else pieces.end():
            self._verdict.line(Line(time_s, rank, is_error, text), time.monotonic())

    # Ending

    def _linger(self) -> None:
        if self._linger_until_s is None:
            self._linger_until_s = time.monotonic() + LINGER_S

    def _signal_all(self, number: int) -> None:
        for peer in self._peers.values():
            if not peer.has_ended:
                peer.signal(number)
        if self._mpirun.poll() is not None:
            return
        if number == signal.SIGKILL:
            os.killpg(self._mpirun.pid, number)  # with its remote shells
        else:
            self._mpirun.send_signal(number)

    def _stop(self, why: int) -> None:
        self._stopped_by = why
        self._kill_at_s = time.monotonic() + KILL_AFTER_S
        self._signal_all(signal.SIGTERM)

    def _check_times(self, now_s: float) -> None:
        if self._stopped_by is None:
            self._check_start(now_s)
        lingers = self._linger_until_s is not None and now_s >= self._linger_until_s
        if lingers and self._stopped_by is None:
            self._stop(0)
        if self._kill_at_s is not None and now_s >= self._kill_at_s:
            self._kill_at_s = now_s + KILL_AFTER_S
            self._signal_all(signal.SIGKILL)
        was_told = self._verdict.is_told
        self._verdict.tick(now_s)
        if self._verdict.is_told and not was_told:
            for peer in self._peers.values():
                if peer.has_ended:
                    peer.signal(_GO)

    def _check_start(self, now_s: float) -> None:
        missing = [rank for rank in range(self._options.np) if rank not in self._peers]
        if not missing or now_s < self._start_by_s:
            return
        ranks = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        limit = f"{self._options.start_timeout_s:g} s (--start-timeout)"
        self._writer.say(
            f"{len(missing)} of {self._options.np} ranks did not start within {limit}: {ranks}"
        )
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
        patience_s = 2 * KILL_AFTER_S if 1 in kinds else 0.5  # a child of mpirun may hold its pipes
        return kinds == {0} or now_s >= self._gone_s + patience_s

    def _close(self) -> None:
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, Peer):
                key.fileobj.close()
        for rank, is_error in list(self._pieces):
            self._add_lines(rank, is_error, b"", time.time())
        self._listener.close()

    def _result(self) -> int:
        code_of_rank = self._verdict.finish()
        if self._stopped_by:
            return 128 + self._stopped_by
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


def _is_terminal() -> bool:
    """Whether stdin is one; ranks do not read it, because they are no part of its session."""
    try:
        return os.isatty(0)
    except OSError:
        return False


def _stdin_source() -> list[object] | None:
    """Our own stdin as a file that rank 0 can open on this machine."""
    try:
        if os.isatty(0):
            return None
        is_file = stat.S_ISREG(os.fstat(0).st_mode)
        return [f"/proc/{os.getpid()}/fd/0", os.lseek(0, 0, os.SEEK_CUR) if is_file else 0]
    except OSError:
        return None  # it is closed


def run(command: Sequence[str], environment: dict[str, str], options: Options) -> int:
    """Runs a job on the launcher's own stdout and stderr. Returns its exit code."""
    out, err = sys.stdout.buffer, sys.stderr.buffer
    writer = Writer(out, err, options.output_filename, options.with_timestamp)
    try:
        return Job(command, environment, options, writer).run()
    finally:
        writer.close()
