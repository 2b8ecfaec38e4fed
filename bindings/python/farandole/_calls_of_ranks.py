"""What each rank did when, for ``farandole trace``: from timelines, or else from the files of flight recorders."""

from __future__ import annotations

import gzip
import json
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from farandole import flight
from farandole.flight import UnreadableError

_NEGOTIATE = "NEGOTIATE_"
_STEP = "NEGOTIATE_STEP"  # ranks compare these on their own; nobody waits for it


class Batch(NamedTuple):
    """What the ranks transferred together. Times are as those of a call."""

    number: int
    began_ns: int
    ended_ns: int
    bytes: int


@dataclass
class Call:
    """An operation of one rank. Times are in ns on the clock of its host; 0: unknown."""

    rank: int
    name: str  # "allreduce.weight"
    kind: str
    set: int
    bytes: int
    dtype: str
    submitted_ns: int  # 0: before its timeline began
    decided_ns: int  # all ranks had submitted it
    ended_ns: int = 0
    number: int = -1  # of the decision; 0: the ranks agreed without one
    batch: Batch | None = None
    is_counted: bool = True  # its rank's timeline has lost none before it
    identity: tuple[Any, ...] | None = None  # alike on all its ranks; None: unknown


@dataclass
class Rank:
    """What is known of a rank."""

    rank: int
    host: str
    pid: int
    wall_ns: int  # time of day minus the clock of the calls
    size: int  # of the job
    job: str = ""  # its name, if it has one
    generation: int = 1  # of an elastic job
    began_ns: int = 0  # its timeline, by that clock
    calls: list[Call] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    marks: list[tuple[int, str]] = field(default_factory=list)  # when, what
    dropped: int = 0  # spans that its timeline could not keep

    def last_ns(self) -> int:
        """The last time that is known of it."""
        ends_ns = [max(call.decided_ns, call.ended_ns) for call in self.calls]
        return max(ends_ns + [one.ended_ns for one in self.batches] + [at_ns for at_ns, _ in self.marks], default=0)


def load(path: pathlib.Path) -> Any:
    """A JSON file, perhaps compressed.

    Raises:
        UnreadableError: It is none.
    """
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
            return json.load(file, parse_constant=lambda _: None)  # NaN and Infinity are no JSON
    except (OSError, EOFError, ValueError, RecursionError) as error:
        raise UnreadableError(f"{path}: cannot be read: {type(error).__name__}: {error}") from error


def _ns(us: float) -> int:
    return round(us * 1000)


def _identify(calls: Sequence[Call]) -> None:
    """A decision has a number. What ranks of a host agreed on has none: those are counted since the last decision.

    Where a timeline has lost some, the count is not that of other ranks.
    """
    last: dict[int, tuple[int, int]] = {}  # of a set: its number, and how many followed
    for call in sorted(calls, key=lambda call: call.decided_ns):
        number, count = last.get(call.set, (0, 0))
        last[call.set] = number, count = (call.number, 0) if call.number else (number, count + 1)
        if call.submitted_ns and (call.number or call.is_counted):
            call.identity = call.set, call.name, number, count


def _join_batches(rank: Rank) -> None:
    """The last batch of an operation ends when it does."""
    batches = {(batch.number, batch.ended_ns): batch for batch in rank.batches}
    for call in rank.calls:
        call.batch = batches.get((call.number, call.ended_ns))


def of_timeline(events: Any, path: pathlib.Path) -> Rank:
    """A rank by its timeline (core/timeline.h).

    Raises:
        UnreadableError: It is not what one should be.
    """
    try:
        about = events[0]["args"]
        start_ns = about["start_ns"]
        wall_ns = about["start_time_since_epoch_in_micros"] * 1000 - start_ns
        rank = Rank(events[0]["pid"], about["host"], about["process"], wall_ns, int(about["size"]), about["job"],
                    about["generation"], start_ns)  # fmt: skip
        tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
        latest: dict[int, Call] = {}
        for event in events:
            if event["ph"] in ("X", "i"):
                _read_span(rank, event, start_ns, tracks, latest)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise UnreadableError(f"{path}: is no timeline of this version: {type(error).__name__}: {error}") from error
    _identify(rank.calls)
    _join_batches(rank)
    return rank


def _read_span(
    rank: Rank, event: dict[str, Any], start_ns: int, tracks: dict[int, str], latest: dict[int, Call]
) -> None:
    name, tid, args = event["name"], event["tid"], event.get("args", {})
    begin_ns = start_ns + _ns(event["ts"])
    end_ns = begin_ns + _ns(event.get("dur", 0))
    if name == "SPANS_DROPPED":
        rank.dropped += args["number"]
    elif event["ph"] == "i":
        if name != "CYCLE_START":
            rank.marks.append((begin_ns, args.get("note", name)))
    elif name == "BATCH":
        rank.batches.append(Batch(args["number"], begin_ns, end_ns, args["bytes"]))
    elif name.startswith(_NEGOTIATE):
        if name == _STEP:
            return
        is_cut = event["ts"] == 0  # it began before its timeline did
        latest[tid] = Call(rank.rank, tracks[tid], name[len(_NEGOTIATE) :].lower(), args.get("set", 0), args["bytes"],
                           args.get("dtype", ""), 0 if is_cut else begin_ns, end_ns, number=args["number"],
                           is_counted=rank.dropped == 0)  # fmt: skip
        rank.calls.append(latest[tid])
    elif tid in latest and latest[tid].decided_ns == begin_ns:
        latest[tid].ended_ns = end_ns


def of_recorder(one: flight.Flight) -> Rank:
    """A rank by the file of its flight recorder, whose times are those of the day."""
    rank = Rank(one.rank, one.host, one.pid, 0, one.size, one.job)
    for event in one.events:
        if event.step == "submitted" and event.kind != flight.STEP and event.decided_s and event.code == "OK":
            identity = (event.set, event.kind, event.name, event.call) if event.call else None
            submitted, decided, ended = (round(at_s * 1e9) for at_s in (event.at_s, event.decided_s, event.ended_s))
            rank.calls.append(Call(one.rank, f"{event.kind}.{event.name}", event.kind, event.set, event.bytes,
                                   event.dtype, submitted, decided, ended, identity=identity))  # fmt: skip
    return rank
