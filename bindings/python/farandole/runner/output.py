"""What ranks write: lines marked with their rank, on the screen and in files; and which failed first."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import io
import os
import pathlib
import re
import signal
from collections import defaultdict
from typing import IO, Any, NamedTuple

REPORT_AFTER_S = 0.25  # after a bad end: messages of what happened before it may still arrive
CONSEQUENCES_AFTER_S = 5.0  # the same, while nothing but consequences of another failure is known
RECENT_S = 2.0  # a traceback of a rank that still runs counts as its failure for this long
MAX_ERROR_LINES = 200

_TRACEBACK = b"Traceback (most recent call last)"
_CHAINED = (b"During handling of the above exception", b"The above exception was the direct cause")
# Errors that say that another rank has left, failed, was lost, or has not called init.
_CONSEQUENCE = re.compile(
    rb"(?:farandole|horovod)\.[\w.]*\b"  # the module of the class, for scripts that import horovod too
    rb"(?:AbortedError\b|PeerLostError\b|OperationTimeoutError: init: |\w+: rank \d+ failed: )"
)


class Line(NamedTuple):
    """A line of a rank, or of mpirun when there is no rank."""

    time_s: float  # when it was written, seconds since the epoch, by the launcher's clock
    rank: int | None
    is_error: bool
    text: bytes  # with its end; without one only where a prompt waits for input


class LineSplitter:
    """Splits one stream into lines of any length: at \\n, \\r\\n and a progress bar's \\r."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []

    def add(self, data: bytes) -> list[bytes]:
        """Returns the lines that are complete now."""
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        lines = (self.take_rest() + data[:end]).splitlines(keepends=True) if end else []
        self._rest.append(data[end:])
        return lines

    def take_rest(self) -> bytes:
        """Returns what has no end of line yet, and forgets it."""
        rest, self._rest = b"".join(self._rest), []
        return rest


class Writer:
    """Writes lines to the screen and to files. A target that fails is reported once and given up.

    Files are ``rank.N/stdout`` and ``rank.N/stderr`` in ``folder``. ``is_closed`` becomes true when the
    reader of ``out`` or ``err`` has gone, as in "| head"; ``is_incomplete`` when anything is lost.
    """

    def __init__(
        self, out: IO[Any] | None, err: IO[Any] | None, folder: str | None = None,
        with_timestamp: bool = False,
    ) -> None:  # fmt: skip
        self._streams: dict[str, IO[Any] | None] = {}
        for name, stream in {"stdout": out, "stderr": err}.items():
            if stream is not None:
                stream.flush()
            self._streams[name] = getattr(stream, "buffer", stream)  # a notebook's has none
        self._folder = folder
        self._with_timestamp = with_timestamp
        self._kept: set[pathlib.Path] = set()  # files of this job
        self._open_line: tuple[int | None, bool] | None = None  # whose on the screen has no end yet
        self.is_closed = False
        self.is_incomplete = False

    def keep(self, rank: int, is_error: bool, data: bytes) -> None:
        """Adds what a rank wrote to its file, as it is."""
        if self._folder is None:
            return
        path = pathlib.Path(self._folder, f"rank.{rank}", "stderr" if is_error else "stdout")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab" if path in self._kept else "wb") as file:
                self._kept.add(path)
                file.write(data)
        except OSError as error:
            self._folder = None
            self.is_incomplete = True
            self.say(f'the files of --output-filename end here: "{path}": {error.strerror}')

    def show(self, line: Line) -> None:
        """Writes a line to the screen, with its rank."""
        key = (line.rank, line.is_error)
        mark = "[mpirun] " if line.rank is None else f"[{line.rank}] "
        if self._with_timestamp:
            time = datetime.datetime.fromtimestamp(line.time_s)
            mark = f"{time.isoformat(' ', 'milliseconds')} {mark}"
        if self._open_line == key:
            mark = ""  # the rest of a prompt's line
        elif line.text == b"\r":
            return
        self._write("stderr" if line.is_error else "stdout", mark.encode() + line.text, key)

    def say(self, message: str) -> None:
        """Writes a message of the launcher's own."""
        self._write("stderr", f"farandolerun: {message}\n".encode())

    def end_open_line(self) -> None:
        """Notes that the user has ended the line of a prompt."""
        self._open_line = None

    def flush(self) -> None:
        """Lets out what was written; called once for many lines, which may be short."""
        for name in self._streams:
            self._write_to(name, None)

    def close(self) -> None:
        """Ends a line that has no end, and lets out what was written."""
        if self._open_line is not None:
            self._write("stdout", b"")
        self.flush()

    def _write(self, name: str, data: bytes, key: tuple[int | None, bool] | None = None) -> None:
        if self._open_line not in (None, key):
            data = b"\n" + data
        self._open_line = None if data.endswith((b"\n", b"\r")) else key
        self._write_to(name, data)

    def _write_to(self, name: str, data: bytes | None) -> None:
        """Writes to a stream, or with None flushes it."""
        stream = self._streams[name]
        if stream is None:
            return
        try:
            if data is None:
                stream.flush()
            else:
                is_text = isinstance(stream, io.TextIOBase)
                stream.write(data.decode(errors="replace") if is_text else data)
        except (OSError, ValueError) as error:
            self._streams[name] = None
            is_closed = isinstance(error, (BrokenPipeError, ValueError))
            self.is_closed |= is_closed
            self.is_incomplete = True
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as sink:
                os.dup2(sink.fileno(), stream.fileno())  # for what Python flushes at exit
            reason = "its reader has gone" if is_closed else getattr(error, "strerror", "")
            self.say(f"{name} cannot be written any more: {reason}")


def exit_code(code: int) -> int:
    """A program's end as a shell reports it; ``code`` as subprocess has it, negative for a signal."""
    return 128 - code if code < 0 else code


@dataclasses.dataclass
class _Rank:
    """What is known of one rank: its end, and its latest traceback with what followed on stderr."""

    code: int | None = None  # as subprocess has it; None: it still runs
    ended_s: float = 0.0
    lost_host: str = ""  # which does not report it any more
    is_consequence: bool = False  # of another rank's failure
    is_continued: bool = False  # the next traceback belongs to the same error
    error: list[tuple[int, Line]] = dataclasses.field(
        default_factory=list
    )  # numbered over all ranks

    def add(self, number: int, line: Line) -> None:
        """Takes a line of stderr."""
        if line.text.startswith(_TRACEBACK):
            self.error = self.error if self.is_continued else []
            self.is_continued = self.is_consequence = False
        elif not self.error:
            return
        self.is_continued |= line.text.startswith(_CHAINED)
        self.is_consequence |= bool(_CONSEQUENCE.match(line.text))
        if len(self.error) < MAX_ERROR_LINES:
            self.error.append((number, line))

    def failed_s(self, latest_s: float) -> float | None:
        """When it failed: at its error's beginning if it ended with 1, or is ending at ``latest_s``."""
        began_s = self.error[0][1].time_s if self.error else None
        is_ending = self.code is None and began_s is not None and latest_s - began_s < RECENT_S
        if is_ending or (self.code == 1 and self.error):
            return began_s
        return self.ended_s if self.code else None

    def describe(self) -> str:
        """How it failed, if it was the first."""
        code = 1 if self.code is None else self.code
        if self.lost_host:
            return f"was lost first: {self.lost_host} does not report it any more"
        if code == 0:
            return "failed first: it ended with exit code 0 while other ranks waited for it"
        if code > 0 or self.error:
            return f"failed first, with exit code {max(code, 1)}"
        name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
        return f"failed first, ended by {name} (exit code {exit_code(code)})"


class FirstFailure:
    """Passes lines on to a writer at once, and finds out and reports which rank failed first.

    A rank has failed when its traceback began, if it ended with exit code 1 after one; else when it
    ended. The earliest is the first, but consequences come after all other failures: an error that says
    that another rank has left, failed or was lost, and an end by mpirun's signal. Where there are only
    consequences and a rank has ended with exit code 0, that rank is the cause: it left without the
    others. A rank that calls ``sys.exit(3)`` ends after the errors it causes, because it takes its
    leave from the others first; hence the times above. The error of the first rank is shown once more
    below the message where another rank's stands before it or in its middle.

    Times called ``now_s`` are monotonic and the caller's; ``time_s`` is the ranks' common clock. ``rank``
    is None until one is reported, and ``message`` is what was reported.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._ranks: defaultdict[int, _Rank] = defaultdict(_Rank)
        self._line_count = 0
        self._report_at_s = float("inf")
        self.rank: int | None = None
        self.message = ""

    @property
    def error_text(self) -> str:
        """The traceback of the first rank; empty if it has none."""
        lines = [] if self.rank is None else self._ranks[self.rank].error
        return b"".join(line.text for _, line in lines).decode(errors="replace")

    def line(self, line: Line) -> None:
        """Takes a line and shows it."""
        self._writer.show(line)
        self._line_count += 1
        if line.rank is not None and line.is_error:
            self._ranks[line.rank].add(self._line_count, line)

    def ended(
        self, rank: int, code: int, time_s: float, now_s: float, by_mpirun: bool = False,
        lost_host: str = "",
    ) -> None:  # fmt: skip
        """Takes a rank's end, ``by_mpirun`` if that had sent it a signal.

        ``lost_host`` is the host of a rank whose end nobody reports.
        """
        one = self._ranks[rank]
        one.code, one.ended_s, one.lost_host = code, time_s, lost_host
        one.is_consequence |= by_mpirun and code < 0
        if code != 0:
            wait_s = REPORT_AFTER_S if self._causes() else CONSEQUENCES_AFTER_S
            self._report_at_s = min(self._report_at_s, now_s + wait_s)

    def tick(self, now_s: float) -> None:
        """Lets time pass."""
        if self.rank is None and now_s >= self._report_at_s:
            self._report()

    def finish(self) -> int | None:
        """Reports what is left. Returns the first failing rank's exit code, or None."""
        if self.rank is None and self._report_at_s < float("inf"):
            self._report()
        if self.rank is None:
            return None
        first = self._ranks[self.rank]
        # Its traceback came first, but the end of another rank had it killed while it ended.
        was_killed = (first.code or 0) < 0 and first.error
        return 1 if was_killed else exit_code(first.code or 1)

    def _failures(self) -> dict[int, float]:
        """Rank -> when it failed, with those that are ending."""
        latest_s = max(rank.ended_s for rank in self._ranks.values() if rank.code)
        times = {number: rank.failed_s(latest_s) for number, rank in self._ranks.items()}
        return {number: time_s for number, time_s in times.items() if time_s is not None}

    def _causes(self) -> dict[int, float]:
        """The same without consequences; if nothing remains, who left with 0, and when."""
        times, ranks = self._failures(), self._ranks
        causes = {number: times[number] for number in times if not ranks[number].is_consequence}
        return causes or {number: one.ended_s for number, one in ranks.items() if one.code == 0}

    def _report(self) -> None:
        times = self._causes() or self._failures()
        self.rank = min(times, key=times.__getitem__)
        first = self._ranks[self.rank]
        self.message = f"rank {self.rank} {first.describe()}"
        begins = [one.error[0][0] for one in self._ranks.values() if one.error and one is not first]
        is_mixed = bool(first.error) and any(begin < first.error[-1][0] for begin in begins)
        self._writer.say(self.message + ("; its error once more:" if is_mixed else ""))
        for _, line in first.error if is_mixed else ():
            self._writer.show(line)
