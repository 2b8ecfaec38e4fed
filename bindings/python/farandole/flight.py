"""What ranks did lately, by their flight recorders, which the library writes (core/flight_recorder.h).

They are read from the files that ranks left in ``FARANDOLE_FLIGHT_RECORDER_DIR``, or from the memory of running ranks,
through /proc.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

# core/flight_recorder.h: a cache line each for a header and for the totals of steps, and events.
_MAGIC = b"fflight2"
_LINE = 64
_EVENTS = 2048
_HEADER = struct.Struct("<8sQIIQq")
_TOTALS = struct.Struct("<8q")
_EVENT = struct.Struct("<QqqqqBBBxIII72s")
_RING = 2 * _LINE + _EVENTS * _EVENT.size
_STEPS = ("none", "submitted", "stalled", "failed")
STEP = "optimizer step"  # ranks compare these on their own; nobody waits for it
_KINDS = ("allreduce", "broadcast", "allgather", "reducescatter", "alltoall", "barrier",
          "add_process_set", "remove_process_set", STEP)  # fmt: skip
_CODES = ("OK", "InvalidArgument", "Mismatch", "Timeout", "Unavailable", "Aborted", "ResourceExhausted",
          "Unimplemented", "Internal")  # fmt: skip
_FINAL = ("Timeout", "Unavailable", "Internal")  # codes of errors that end all work
_MEMORY = "/memfd:farandole (deleted)", "/memfd:flight-farandole (deleted)"
_BEFORE_RINGS = 1 << 18  # bytes, at most
_MOST_BYTES = 1 << 23  # of a file; a name has at most 72, and an error a few KiB
_MOST_RANKS = 1 << 20


class UnreadableError(Exception):
    """A file, or a folder, is not what it should be."""


class Event(NamedTuple):
    """What a rank noted. ``call`` numbers what it submitted to all ranks, from 1; 0: it is something else."""

    step: str
    kind: str
    name: str
    set: int
    call: int
    code: str
    at_s: float  # time of day
    is_finished: bool
    bytes: int = 0
    dtype: str = ""  # of a file
    decided_s: float = 0.0  # of a file: all ranks had submitted it; 0: not yet
    ended_s: float = 0.0  # 0: not yet

    @property
    def operation(self) -> tuple[int, str, str]:
        """Alike on all ranks."""
        return self.set, self.kind, self.name

    def __str__(self) -> str:
        return f'{self.kind} "{self.name}"' + (f" of process set {self.set}" if self.set else "")


class Steps(NamedTuple):
    """All steps of training of a rank, and for how long, in ns, they took; for how long of that its thread was blocked
    in operations of all ranks, waited for input, could have run and had no processor, the garbage collector ran, it was
    blocked in operations of other groups; and for how long the network needed for what was sent to other hosts."""

    steps: int = 0
    ns: int = 0
    blocked_ns: int = 0
    input_ns: int = 0
    queued_ns: int = 0
    collecting_ns: int = 0
    other_groups_ns: int = 0
    link_ns: int = 0


class Flight(NamedTuple):
    """The recorder of one rank."""

    rank: int
    size: int
    pid: int
    host: str
    events: list[Event]  # oldest first
    job: str = ""
    reason: str = ""  # of a file
    written_s: float = 0.0
    error: dict[str, Any] | None = None  # the final one
    steps: Steps = Steps()  # of a running rank

    def calls(self) -> list[Event]:
        """What was submitted of operations that need other ranks."""
        return [event for event in self.events if event.step == "submitted" and event.kind != STEP]

    def pending(self) -> list[Event]:
        """The submissions that had not ended, or ended by the final error only."""
        return [event for event in self.calls() if not event.is_finished or event.code in _FINAL]

    def last(self) -> Event | None:
        """The last submission."""
        return next(reversed(self.calls()), None)


def clock(at_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at_s)) + f".{int(at_s * 1000) % 1000:03}"


def in_words(ranks: Iterable[int]) -> str:
    words = [str(rank) for rank in sorted(ranks)]
    if len(words) == 1:
        return f"rank {words[0]}"
    return "ranks " + ", ".join(words[:-1]) + f" and {words[-1]}"


def printable(text: str) -> str:
    """Without what would control a terminal, or change the order of what is read."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _read(path: pathlib.Path) -> bytes:
    """A file of this user, or of the folder's owner, whom the caller has chosen."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(file, "rb") as opened:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a file")
        if status.st_uid not in (os.geteuid(), path.parent.stat().st_uid):
            raise ValueError(f"it belongs to user {status.st_uid}, who is neither you nor the folder's owner")
        content = opened.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError(f"it is larger than {_MOST_BYTES} bytes")
    return content


def _number(said: dict[str, Any], key: str, below: int = 1 << 64) -> int:
    value = said[key]
    if type(value) is not int or not 0 <= value < below:
        raise ValueError(f"{key} is not a number from 0 to {below - 1}")
    return value


def _text(said: dict[str, Any], key: str) -> str:
    if not isinstance(said[key], str):
        raise ValueError(f"{key} is not a text")
    return str(said[key])


def _event(said: dict[str, Any]) -> Event:
    return Event(
        _text(said, "step"), _text(said, "kind"), _text(said, "name"), _number(said, "set"), _number(said, "call"),
        _text(said, "code"), _number(said, "at_ns", 1 << 63) / 1e9, _number(said, "finished_ns") > 0,
        _number(said, "bytes"), _text(said, "dtype"),
        _number({"decided_ns": 0} | said, "decided_ns", 1 << 63) / 1e9, _number(said, "finished_ns", 1 << 63) / 1e9,
    )  # fmt: skip


def _of_file(path: pathlib.Path) -> Flight:
    try:
        said = json.loads(_read(path))
        size = _number(said, "size", _MOST_RANKS + 1)
        rank, pid, error = _number(said, "rank", size), _number(said, "pid"), said["error"]
        if error is not None:
            error = {"message": _text(error, "message"), "ranks": [one for one in error["ranks"] if type(one) is int]}
        return Flight(
            rank, size, pid, _text(said, "host"), [_event(one) for one in said["events"]],
            _text(said, "job"), _text(said, "reason"), _number(said, "written_ns", 1 << 63) / 1e9, error,
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UnreadableError(f"{path}: cannot be read: {type(error).__name__}: {error}") from error


def read_folder(folder: pathlib.Path, warn: Callable[[str], object] = lambda _: None) -> list[Flight]:
    """The newest file of each rank of the job that wrote last, by rank.

    Args:
        folder: Where the ranks left their files.
        warn: Gets a line about each file that cannot be read.
    Raises:
        UnreadableError: There is none that can be read.
    """
    flights: list[Flight] = []
    for path in sorted(folder.glob("farandole-*-rank*.json")):
        try:
            flights.append(_of_file(path))
        except UnreadableError as error:
            warn(str(error))
    if not flights:
        raise UnreadableError(f"{folder}: no files of flight recorders (farandole-*-rank*.json) that can be read")
    flights.sort(key=lambda flight: flight.written_s)
    newest = flights[-1]
    alike = [flight for flight in flights if (flight.job, flight.size) == (newest.job, newest.size)]
    return sorted({flight.rank: flight for flight in alike}.values())


def _of_ring(ring: bytes) -> Flight | None:
    """The recorder in this memory, if there is one. A half written event is left out."""
    if len(ring) < _RING or not ring.startswith(_MAGIC):
        return None
    _, written, size, rank, pid, wall_ns = _HEADER.unpack_from(ring)
    events = []
    for number in range(max(written - _EVENTS, 0) + 1, written + 1):
        at = 2 * _LINE + (number - 1) % _EVENTS * _EVENT.size
        noted, at_ns, _, finished_ns, size_bytes, _, kind, step, of_set, code, call, name = _EVENT.unpack_from(ring, at)
        if noted == number and kind < len(_KINDS) and step < len(_STEPS) and code < len(_CODES):
            text = name.partition(b"\0")[0].decode(errors="replace")
            at_s, what = (at_ns + wall_ns) / 1e9, (_STEPS[step], _KINDS[kind], text, of_set, call, _CODES[code])
            ended_s = (finished_ns + wall_ns) / 1e9 if finished_ns else 0.0
            events.append(Event(*what, at_s, finished_ns > 0, size_bytes, ended_s=ended_s))
    steps = Steps(*_TOTALS.unpack_from(ring, _LINE))
    return Flight(rank, size, pid, socket.gethostname(), events, steps=steps)


def _of_memory(path: str) -> list[Flight]:
    """The recorders in a file of shared memory: beside one another, not far from its beginning."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            return []
        head = os.pread(file, _BEFORE_RINGS, 0)
        begin = next((at for at in range(0, len(head), _LINE) if head.startswith(_MAGIC, at)), None)
        if begin is None:
            return []
        _, _, size, *_ = _HEADER.unpack_from(os.pread(file, _LINE, begin))
        most = (status.st_size - begin) // _RING
        rings = (_of_ring(os.pread(file, _RING, begin + i * _RING)) for i in range(min(size, most)))
        return [flight for flight in rings if flight]
    finally:
        os.close(file)


def running() -> list[list[Flight]]:
    """The recorders of running ranks of this user, by the memory that ranks share."""
    found: dict[tuple[int, int], list[Flight]] = {}
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            owner, files = process.stat().st_uid, list((process / "fd").iterdir())
        except OSError:  # it has ended meanwhile, or is another user's
            continue
        for path in files:
            with contextlib.suppress(OSError):  # it was closed meanwhile
                if os.readlink(path) in _MEMORY:
                    status = path.stat()
                    identity = status.st_dev, status.st_ino
                    if identity not in found and status.st_uid == owner:
                        found[identity] = _of_memory(str(path))
    return [sorted(flights) for flights in found.values() if flights]
