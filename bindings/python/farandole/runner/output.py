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
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, NamedTuple

REPORT_AFTER_S = 0.25  # after a bad end: messages of what happened before it may still arrive
CONSEQUENCES_AFTER_S = 5.0  # the same, while nothing but consequences of another failure is known
MERGE_S = 0.2  # from a rank's error or warning until it is shown, with those of the others that are alike
MAX_ERROR_LINES = 200
MAX_LINE_BYTES = 1 << 20  # of a line that has no end yet; then what there is of it is shown
_RECENT_LINES = 10_000
_ENDS = ("killed", "exited", "out of memory")
_TRACEBACK = b"Traceback (most recent call last):"
_CHAINED = (b" ", b"\n", b"\r\n", _TRACEBACK, b"During handling of the above", b"The above exception was")
_LOGGED = re.compile(rb"\[farandole \d+/\d+\] ")
_BEGINS = re.compile(_LOGGED.pattern + rb"(warning|error): |" + re.escape(_TRACEBACK))


class Line(NamedTuple):
    """A line of a rank, or of mpirun or the way to another host, with its name."""

    rank: int | str
    is_error: bool
    text: bytes  # with its end; without one where a prompt waits for input, and of a line that has become long
    others: tuple[int, ...] = ()  # ranks that wrote the same
    came_s: float | None = None  # time of day; None: now

    @property
    def ranks(self) -> tuple[int | str, ...]:
        return (self.rank, *self.others)

    @property
    def mark(self) -> str:
        """Whose it is: "3", "0-2,4"."""
        numbers = {rank for rank in self.ranks if isinstance(rank, int)}
        firsts = sorted(number for number in numbers if number - 1 not in numbers)
        lasts = sorted(number for number in numbers if number + 1 not in numbers)
        parts = [f"{a}" if a == b else f"{a}-{b}" for a, b in zip(firsts, lasts)]
        return ",".join(parts) if numbers else str(self.rank)


class LineSplitter:
    """Splits one stream into lines: at \\n, \\r\\n and a progress bar's \\r.

    Args:
        longest: Bytes without an end of line that are kept; None: any number.
    """

    def __init__(self, longest: int | None = None) -> None:
        self._longest = longest
        self._rest: list[bytes] = []
        self._size = 0  # of the rest

    def add(self, data: bytes) -> list[bytes]:
        """Returns the lines that are complete now, and what there is of one that has become too long."""
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        lines = (self.take_rest() + data[:end]).splitlines(keepends=True) if end else []
        self._rest.append(data[end:])
        self._size += len(data) - end
        return lines + ([self.take_rest()] if self._longest is not None and self._size >= self._longest else [])

    def take_rest(self) -> bytes:
        """Returns what has no end of line yet, and forgets it."""
        rest, self._rest, self._size = b"".join(self._rest), [], 0
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
        self._open_line: tuple[int | str, bool] | None = None  # whose on the screen has no end yet
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
        mark = f"[{line.mark}] "
        if self._with_timestamp:
            came = datetime.datetime.now() if line.came_s is None else datetime.datetime.fromtimestamp(line.came_s)
            mark = f"{came.isoformat(' ', 'milliseconds')} {mark}"
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

    def _write(self, name: str, data: bytes, key: tuple[int | str, bool] | None = None) -> None:
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


class Merger:
    """Shows lines of ranks, those of tracebacks and of Farandole's log that several ranks write alike once.

    From the first one on, a rank's lines wait for MERGE_S, so that those of others may come. Its own stay in order.
    """

    def __init__(self, show: Callable[[Line], object]) -> None:
        self._show = show
        self._waiting: dict[int, list[Line]] = {}  # by rank
        self._show_at_s = float("inf")

    def add(self, line: Line, now_s: float) -> None:
        """Takes a line; of the launcher's clock."""
        begins = line.is_error and _BEGINS.match(line.text) is not None
        if isinstance(line.rank, int) and (begins or line.rank in self._waiting):
            self._waiting.setdefault(line.rank, []).append(line._replace(came_s=time.time()))
            self._show_at_s = min(self._show_at_s, now_s + MERGE_S)
        else:
            self._show(line)

    def tick(self, now_s: float) -> None:
        """Lets time pass."""
        if now_s >= self._show_at_s:
            self.flush()

    def flush(self) -> None:
        """Shows all that waits."""
        left = {
            rank: deque((_text_of(block), block) for block in _split_blocks(lines))
            for rank, lines in sorted(self._waiting.items())
        }
        self._waiting, self._show_at_s = {}, float("inf")
        heads: defaultdict[bytes, set[int]] = defaultdict(set)  # ranks by the text of the first block of each
        for rank, blocks in left.items():
            heads[blocks[0][0]].add(rank)
        for rank, own in left.items():
            while own:
                text, block = own[0]
                alike = sorted(heads.pop(text)) if text else [rank]  # no lower ones, whose blocks are all shown
                self._show_block(block, alike)
                for one in alike:
                    left[one].popleft()
                    if left[one]:
                        heads[left[one][0][0]].add(one)

    def _show_block(self, block: Sequence[Line], ranks: Sequence[int]) -> None:
        for line in block:
            text = _LOGGED.sub(b"[farandole] ", line.text, 1) if len(ranks) > 1 else line.text
            self._show(Line(ranks[0], line.is_error, text, tuple(ranks[1:]), line.came_s))


def _split_blocks(lines: Sequence[Line]) -> list[list[Line]]:
    """A traceback with those that it is chained to is one block, and any other line."""
    blocks: list[list[Line]] = []
    awaits_error = is_inside = False  # of a traceback: before the line that names the exception, or its end
    for line in lines:
        goes_on = is_inside and line.is_error and (awaits_error or line.text.startswith(_CHAINED))
        begins = line.is_error and line.text.startswith(_TRACEBACK)
        if goes_on:
            blocks[-1].append(line)
        else:
            blocks.append([line])
        awaits_error = begins or (goes_on and awaits_error and line.text.startswith(b" "))
        is_inside = begins or goes_on
    return blocks


def _text_of(block: Sequence[Line]) -> bytes:
    """What ranks may write alike, whoever wrote it: a traceback or a line of Farandole's log; of others empty."""
    if not block[0].is_error or not block[0].text.startswith((_TRACEBACK, b"[farandole ")):
        return b""
    return b"".join(_LOGGED.sub(b"", line.text, 1) for line in block)


def list_ranks(ranks: Sequence[int]) -> str:
    """Their numbers, the first eight of many."""
    return ", ".join(map(str, ranks[:8])) + ", ..." * (len(ranks) > 8)


def exit_code(code: int) -> int:
    """A program's end as a shell reports it; ``code`` as subprocess has it, negative for a signal."""
    return 128 - code if code < 0 else code


def signal_name(number: int) -> str:
    return signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"


@dataclasses.dataclass
class _Rank:
    """What is known of one rank: its end, and the error that ends it."""

    code: int | None = None  # as subprocess has it; None: it still runs
    failed_s: float | None = None  # when it reported an error, else when it ended with a code
    lost_host: str = ""  # which does not report it any more
    is_consequence: bool = False  # of another rank's failure
    error: list[bytes] = dataclasses.field(default_factory=list)  # lines
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # the attributes of the error

    @property
    def has_shared_error(self) -> bool:
        """Whether its error is one that all ranks raise, as they disagree and none has failed by itself."""
        return bool(self.error) and bool(self.facts.get("is_shared"))

    @property
    def why_unmet(self) -> str:
        """The message of its error if that says that ranks did not meet in init(), whose time was up."""
        return self.last_line.partition(": ")[2] if self.facts.get("is_of_init") else ""

    @property
    def last_line(self) -> str:
        """Of its error."""
        return self.error[-1].decode(errors="replace").rstrip() if self.error else ""

    @property
    def has_failed(self) -> bool:
        """Whether it ended badly, or is about to by an error."""
        return bool(self.error) if self.code is None else self.code != 0

    def describe(self) -> str:
        """How it failed, if it was the first."""
        code = 1 if self.code is None else self.code
        if self.lost_host:
            return f"was lost first: {self.lost_host} does not report it any more"
        if code == 0:
            return "failed first: it ended with exit code 0 while other ranks waited for it"
        if code > 0 or self.error:
            return f"failed first, with exit code {max(code, 1)}"
        return f"failed first, ended by {signal_name(-code)} (exit code {exit_code(code)})"


class FirstFailure:
    """Passes lines on to a writer at once, and finds out and reports which rank failed first.

    A rank that others report as killed, stopped, unreachable or the like is the first where no rank has failed
    by itself. A rank has failed when it reported the error that ends it, else when it ended with a code. The earliest
    is the first, but consequences come after all other failures: an error that the engine raised because
    another rank has left, failed or was lost, and an end by mpirun's signal. Where there are only
    consequences and a rank has ended with exit code 0, that rank is the cause: it left without the others. A
    rank that calls ``sys.exit(3)`` ends after the errors it causes, because it takes its leave from the others
    first. The error of the first rank is shown once more if other ranks' errors stand before it or within it.

    What the first error that arrives knows of the failure is said at once, above the tracebacks that follow: who
    has failed, and how. The report, which waits for the ends of ranks and so for exit codes, comes below them.
    Where ranks disagree or did not meet, none is the first. The clock is the caller's.

    Attributes:
        rank: The first rank that failed, once it is reported.
        message: What was said of it.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._ranks: defaultdict[int, _Rank] = defaultdict(_Rank)
        self._recent: deque[tuple[int | str, ...]] = deque(maxlen=_RECENT_LINES)  # whose lines of stderr were shown
        self._told: dict[int, Mapping[str, Any]] = {}  # what errors of others say of a rank, in their order
        self._report_at_s = float("inf")
        self._has_said = False  # at once, what the first error knows
        self.rank: int | None = None
        self.message = ""

    @property
    def error_text(self) -> str:
        """The error of the first rank; empty if it reported none."""
        return b"".join([] if self.rank is None else self._ranks[self.rank].error).decode(errors="replace")

    def line(self, line: Line) -> None:
        """Takes a line and shows it."""
        self._writer.show(line)
        if isinstance(line.rank, int) and line.is_error:
            self._recent.append(line.ranks)

    def reported(
        self, rank: int, text: str, is_consequence: bool, now_s: float, facts: Mapping[str, Any] | None = None
    ) -> None:
        """Takes the error that ends a rank, as that reports it; ``text`` is empty if it was not uncaught.

        What the program caught counts once it ends the rank. ``facts`` are the attributes of HorovodInternalError,
        "is_shared": whether all ranks raise the error, and "is_of_init": whether it says that they did not meet.
        """
        one = self._ranks[rank]
        one.failed_s, one.is_consequence, one.facts = now_s, is_consequence, facts or {}
        one.error = text.encode(errors="replace").splitlines(keepends=True)[-MAX_ERROR_LINES:]
        if text:
            self._tell(rank)

    def _tell(self, rank: int) -> None:
        """Takes what the error that ends a rank says of others."""
        one = self._ranks[rank]
        failed = one.facts.get("failed_ranks") or [rank]
        if failed[0] != rank:
            self._told.setdefault(int(failed[0]), one.facts)
        if one.has_shared_error:
            self._say_at_once(one.last_line)
        elif one.facts.get("kind") == "diverged":  # no rank by itself
            self._say_at_once(str(one.facts.get("cause")))
        elif failed[0] != rank or (one.error and not one.is_consequence):
            cause = str(one.facts.get("cause") or one.last_line)
            is_whole = cause.startswith(f"rank {failed[0]} ")
            self._say_at_once(cause if is_whole else f"rank {failed[0]} has failed: {cause}")

    def _say_at_once(self, text: str) -> None:
        if not self._has_said and self.rank is None:
            self._writer.say(text)
        self._has_said = True

    def ended(self, rank: int, code: int, now_s: float, by_mpirun: bool = False, lost_host: str = "") -> None:
        """Takes a rank's end, ``by_mpirun`` if that had sent it a signal.

        ``lost_host`` is the host of a rank whose end nobody reports.
        """
        one = self._ranks[rank]
        one.code, one.lost_host = code, lost_host
        if one.failed_s is None:
            one.failed_s = now_s
            one.is_consequence = by_mpirun and code < 0
        if code != 0:
            self._tell(rank)
            # Of a rank that has ended, the end will come, with its exit code.
            stands_still = any(facts.get("kind") not in _ENDS for facts in self._told.values())
            wait_s = REPORT_AFTER_S if self._causes() or stands_still else CONSEQUENCES_AFTER_S
            self._report_at_s = min(self._report_at_s, now_s + wait_s)

    def is_due(self, now_s: float) -> bool:
        """Whether :meth:`tick` will report."""
        return self.rank is None and now_s >= self._report_at_s

    def tick(self, now_s: float) -> None:
        """Lets time pass."""
        if self.is_due(now_s):
            self._report()

    def finish(self) -> int | None:
        """Reports what is left. Returns the first failing rank's exit code, or None."""
        if self.rank is None and self._report_at_s < float("inf"):
            self._report()
        if self.rank is None:
            return None
        first = self._ranks[self.rank]
        # Its error came first, or it stood still, and the end of another rank had it killed.
        was_killed = (first.code or 0) < 0 and (first.error or first.is_consequence)
        return 1 if was_killed else exit_code(first.code or 1)

    def _causes(self) -> list[int]:
        """The ranks that failed by themselves; if there is none, those that left with 0."""
        causes = [number for number, one in self._ranks.items() if one.has_failed and not one.is_consequence]
        return causes or [number for number, one in self._ranks.items() if one.code == 0]

    def _report(self) -> None:
        numbers = self._causes()
        if not numbers and self._told:
            numbers = [next(iter(self._told))]
        numbers = numbers or [number for number, one in self._ranks.items() if one.has_failed]
        # Of ranks that did not meet, one that says why it reached nobody knows more than those that waited for it.
        numbers = [n for n in numbers if self._ranks[n].why_unmet.startswith(f"rank {n} ")] or numbers
        self.rank = min(numbers, key=lambda number: self._ranks[number].failed_s or 0.0)
        first = self._ranks[self.rank]
        shared = self._describe_shared(first)
        self.message = f"no rank failed first: {shared}" if shared else f"rank {self.rank} {self._describe(self.rank)}"
        is_mixed = bool(first.error) and not first.why_unmet and self._has_others_lines(self.rank, bool(shared))
        again = f"; as rank {self.rank} wrote it:" if shared else "; its error once more:"
        self._writer.say(self.message + (again if is_mixed else ""))
        for text in first.error if is_mixed else ():
            self._writer.show(Line(self.rank, True, text))

    def _describe_shared(self, first: _Rank) -> str:
        """What happened between ranks, where none of them failed by itself; else empty."""
        code = exit_code(first.code or 1)
        if first.why_unmet:
            return f"{first.why_unmet}; exit code {code}"
        sharing = sorted(number for number, one in self._ranks.items() if one.has_shared_error)
        if not first.has_shared_error or len(sharing) == 1:
            return ""
        return f"ranks {list_ranks(sharing)} ended by the same error, with exit code {code}"

    def _describe(self, rank: int) -> str:
        """How the rank failed first, and what the errors of others know of it."""
        one, facts = self._ranks[rank], self._told.get(rank, {})
        pid, host, last = facts.get("pid"), facts.get("host"), facts.get("last")
        place = f"pid {pid} on host {host}" if pid else f"host {host}" if host else ""
        text = one.describe()
        if facts.get("kind") == "out of memory":
            text += ", as there was no memory left"
        if facts and one.code != 0 and (one.is_consequence or not one.has_failed):
            # "rank 1 (pid 1234 on host a) is stopped ...": its process is named below.
            cause = str(facts.get("cause"))
            own = cause.partition(f"({place}) ")[2].partition("; its last operation")[0]
            text = f"failed first: it {own}" if own else f"failed first: {cause}"
        known = [place, f"its last operation: {last}, {facts.get('last_age_s', 0):.1f} s before" if last else ""]
        return "; ".join(filter(None, [text, *known]))

    def _has_others_lines(self, rank: int, within: bool) -> bool:
        """Whether errors of others stand before a rank's error, or ``within`` it."""
        own = self._lines_of(rank)
        places = [
            place for number, one in self._ranks.items() if one.error for place in self._lines_of(number)
            if place < own[-1] and rank not in self._recent[place]
        ]  # fmt: skip
        return any(place > own[0] for place in places) if within else bool(places)

    def _lines_of(self, rank: int) -> list[int]:
        """Where the last lines of a rank's stderr stand, as many as its error has."""
        places = [place for place, owners in enumerate(self._recent) if rank in owners]
        return places[-len(self._ranks[rank].error) :] or [len(self._recent)]
