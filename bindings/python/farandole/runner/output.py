"""What ranks write: lines marked with their rank, on the screen and in files; and which rank failed first."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import pathlib
import re
import signal
from collections.abc import Callable
from typing import BinaryIO, NamedTuple, TextIO, cast

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
        if end == 0:
            self._rest.append(data)
            return []
        lines = b"".join([*self._rest, data[:end]]).splitlines(keepends=True)
        self._rest = [data[end:]] if data[end:] else []
        return lines

    def take_rest(self) -> bytes:
        """Returns what has no end of line yet, and forgets it."""
        rest, self._rest = b"".join(self._rest), []
        return rest


class _TextStream:
    """A text stream without bytes of its own, such as a notebook's, as one of bytes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.flush = stream.flush
        self.fileno = stream.fileno

    def write(self, data: bytes) -> int:
        self._stream.write(data.decode(errors="replace"))
        return len(data)


def binary(stream: TextIO | None) -> BinaryIO:
    """Where bytes for one of sys's streams go; nowhere if it is closed."""
    if stream is None:
        return open(os.devnull, "wb")
    stream.flush()
    return cast(BinaryIO, getattr(stream, "buffer", None) or _TextStream(stream))


class Writer:
    """Writes lines to the screen and to files. A target that fails is reported once and given up.

    Args:
        out, err: The launcher's own streams.
        folder: Also write ``rank.N/stdout`` and ``rank.N/stderr`` there; None: do not.
        with_timestamp: Put the time before each line on the screen.

    Attributes:
        is_closed: The reader of ``out`` or ``err`` has gone, as in "| head".
        is_incomplete: Something could not be written.
    """

    def __init__(self, out: BinaryIO, err: BinaryIO, folder: str | None = None, with_timestamp: bool = False) -> None:
        self._streams: dict[str, BinaryIO | None] = {"stdout": out, "stderr": err}
        self._folder = folder
        self._with_timestamp = with_timestamp
        self._files: dict[tuple[int, bool], BinaryIO] = {}
        self._stack = contextlib.ExitStack()
        self._open_line: tuple[int | None, bool] | None = None  # whose line on the screen has no end yet
        self.is_closed = False
        self.is_incomplete = False

    def keep(self, rank: int, is_error: bool, data: bytes) -> None:
        """Adds what a rank wrote to its file, as it is."""
        if self._folder is None:
            return
        path = pathlib.Path(self._folder, f"rank.{rank}", "stderr" if is_error else "stdout")
        file = self._files.get((rank, is_error))
        try:
            if file is None:
                path.parent.mkdir(parents=True, exist_ok=True)
                file = self._stack.enter_context(path.open("wb", buffering=0))
                self._files[rank, is_error] = file
            while data:  # unbuffered: a write may take a part
                data = data[file.write(data) or 0 :]
        except OSError as error:
            self._folder = None
            self.is_incomplete = True
            self.say(f'the files of --output-filename end here: "{path}": {error.strerror}')

    def show(self, line: Line) -> None:
        """Writes a line to the screen, with its rank."""
        key = (line.rank, line.is_error)
        if line.text == b"\r" and self._open_line != key:
            return
        mark = b"[mpirun] " if line.rank is None else b"[%d] " % line.rank
        if self._with_timestamp:
            time = datetime.datetime.fromtimestamp(line.time_s)
            mark = f"{time.isoformat(' ', 'milliseconds')} ".encode() + mark
        text = line.text if self._open_line == key else mark + line.text
        self._write("stderr" if line.is_error else "stdout", text, key)

    def say(self, message: str) -> None:
        """Writes a message of the launcher's own."""
        self._write("stderr", f"farandolerun: {message}\n".encode())

    def end_open_line(self) -> None:
        """Notes that the user has ended the line of a prompt."""
        self._open_line = None

    def flush(self) -> None:
        """Lets out what was written; called once for many lines, which may be short."""
        for name in self._streams:
            self._guard(name, lambda stream: stream.flush())

    def close(self) -> None:
        """Lets out what was written and closes the files."""
        if self._open_line is not None:
            self._write("stdout", b"")  # ends the line
        self.flush()
        self._stack.close()

    def _write(self, name: str, data: bytes, key: tuple[int | None, bool] | None = None) -> None:
        if self._open_line not in (None, key):
            data = b"\n" + data
        self._open_line = None if data.endswith((b"\n", b"\r")) else key
        self._guard(name, lambda stream: stream.write(data))

    def _guard(self, name: str, call: Callable[[BinaryIO], object]) -> None:
        stream = self._streams[name]
        if stream is None:
            return
        try:
            call(stream)
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
    """A program's end as a shell reports it. Args: code: As subprocess has it, negative for a signal."""
    return 128 - code if code < 0 else code


@dataclasses.dataclass
class _Error:
    """The latest traceback of a rank and what followed it on stderr; lines are numbered over all ranks."""

    began_s: float
    first_number: int
    last_number: int = 0
    lines: list[Line] = dataclasses.field(default_factory=list)
    is_consequence: bool = False
    is_continued: bool = False  # the next traceback belongs to it

    def add(self, line: Line, number: int) -> None:
        if line.text.startswith(_TRACEBACK):
            self.is_continued = self.is_consequence = False
        self.is_continued |= line.text.startswith(_CHAINED)
        self.is_consequence |= bool(_CONSEQUENCE.match(line.text))
        if len(self.lines) < MAX_ERROR_LINES:
            self.lines.append(line)
            self.last_number = number


class FirstFailure:
    """Passes lines on to a writer at once, and finds out and reports which rank failed first.

    A rank has failed when its traceback began, if it ended with exit code 1 after one; else when it
    ended. The earliest is the first, except that consequences come after all other failures: an error
    that says that another rank has left, failed or was lost, and an end by mpirun's signal. Where there
    are only consequences and a rank has ended with exit code 0, that rank is the cause: it left without
    the others. A rank that calls ``sys.exit(3)`` ends after the errors it causes, because it takes its
    leave from the others first; hence the times above. The error of the first rank is shown once more,
    below the message, where another rank's stands before it or in its middle.

    Times called ``now_s`` are monotonic and the caller's; ``time_s`` is the ranks' common clock.
    Thread safety: single-threaded.

    Attributes:
        rank: The rank that failed first; None until that is reported.
        message: What was reported.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._errors: dict[int, _Error] = {}
        self._codes: dict[int, int] = {}  # of bad ends
        self._ended_s: dict[int, float] = {}  # of all ends
        self._ended_by_mpirun: set[int] = set()
        self._lost: dict[int, str] = {}  # rank -> host
        self._error_lines = 0
        self._report_at_s: float | None = None
        self.rank: int | None = None
        self.message = ""

    @property
    def error_text(self) -> str:
        """The traceback of the first rank; empty if it has none."""
        error = self._errors.get(-1 if self.rank is None else self.rank)
        return b"".join(line.text for line in error.lines).decode(errors="replace") if error else ""

    def line(self, line: Line) -> None:
        """Takes a line and shows it."""
        self._writer.show(line)
        if line.rank is None or not line.is_error:
            return
        self._error_lines += 1
        error = self._errors.get(line.rank)
        if line.text.startswith(_TRACEBACK) and not (error and error.is_continued):
            error = self._errors[line.rank] = _Error(line.time_s, self._error_lines)
        if error is not None:
            error.add(line, self._error_lines)

    def ended(self, rank: int, code: int, time_s: float, now_s: float, by_mpirun: bool = False) -> None:
        """Takes a rank's end. Args: code: As subprocess has it. by_mpirun: mpirun had sent it a signal."""
        self._ended_s[rank] = time_s
        if code == 0:
            return
        self._codes[rank] = code
        if by_mpirun and code < 0:
            self._ended_by_mpirun.add(rank)
        wait_s = REPORT_AFTER_S if self._has_cause(now_s) else CONSEQUENCES_AFTER_S
        self._report_at_s = min(self._report_at_s or float("inf"), now_s + wait_s)

    def lost(self, rank: int, host: str, time_s: float, now_s: float) -> None:
        """Takes the loss of a rank whose end nobody reports; it counts as exit code 1."""
        self._lost[rank] = host
        self.ended(rank, 1, time_s, now_s)

    def tick(self, now_s: float) -> None:
        """Lets time pass."""
        if self.rank is None and self._report_at_s is not None and now_s >= self._report_at_s:
            self._report()

    def finish(self) -> int | None:
        """Reports what is left. Returns the first failing rank's exit code, or None."""
        if self._codes and self.rank is None:
            self._report()
        if self.rank is None:
            return None
        code = self._codes.get(self.rank, 1)
        # Its traceback came first, but the end of another rank had it killed while it ended.
        was_killed = code < 0 and self.rank in self._errors
        return 1 if was_killed else exit_code(code)

    def _is_consequence(self, rank: int) -> bool:
        error = self._errors.get(rank)
        return rank in self._ended_by_mpirun or (error is not None and error.is_consequence)

    def _has_cause(self, now_s: float) -> bool:
        has_left = any(rank not in self._codes for rank in self._ended_s)
        return has_left or not all(map(self._is_consequence, self._times()))

    def _times(self) -> dict[int, float]:
        """Rank -> when it failed, with those that are ending."""
        times = {rank: self._ended_s[rank] for rank in self._codes}
        latest_s = max(times.values())
        for rank, error in self._errors.items():
            is_leaving = rank not in self._ended_s and latest_s - error.began_s < RECENT_S
            if is_leaving or self._codes.get(rank) == 1:
                times[rank] = error.began_s
        return times

    def _report(self) -> None:
        times = self._times()
        causes = [rank for rank in times if not self._is_consequence(rank)]
        left = [rank for rank in self._ended_s if rank not in self._codes]
        if causes or not left:
            self.rank = min(causes or times, key=times.__getitem__)
        else:
            self.rank = min(left, key=self._ended_s.__getitem__)
        self.message = self._describe(self.rank)
        error = self._errors.get(self.rank)
        is_mixed = error is not None and any(
            other.first_number < error.last_number for other in self._errors.values() if other is not error
        )
        self._writer.say(self.message + ("; its error once more:" if is_mixed else ""))
        if error is not None and is_mixed:
            for line in error.lines:
                self._writer.show(line)

    def _describe(self, rank: int) -> str:
        if rank in self._lost:
            return f"rank {rank} was lost first: {self._lost[rank]} does not report it any more"
        if rank in self._ended_s and rank not in self._codes:
            return f"rank {rank} failed first: it ended with exit code 0 while other ranks waited for it"
        code = self._codes.get(rank, 1)
        if code >= 0 or rank in self._errors:
            return f"rank {rank} failed first, with exit code {max(code, 1)}"
        name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
        return f"rank {rank} failed first, ended by {name} (exit code {exit_code(code)})"
