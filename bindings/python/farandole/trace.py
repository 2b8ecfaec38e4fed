"""``farandole trace``: one Chrome trace of all ranks, on one clock, from what each of them left in a folder.

The clocks of hosts are not trusted. An operation is decided once all its ranks have submitted it, so for each two hosts
each operation bounds how far their clocks are apart: from either side, as either waits for the other.
"""

from __future__ import annotations

import argparse
import bisect
import gzip
import itertools
import json
import math
import os
import pathlib
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from farandole import flight
from farandole._calls_of_ranks import Call, Rank, load, of_recorder, of_timeline
from farandole.flight import UnreadableError, in_words, printable

Event = dict[str, Any]
Limits = dict[str, tuple[int, int]]
#: As torch.profiler writes them.
_DTYPES = {"float16": "Half", "bfloat16": "BFloat16", "float32": "Float", "float64": "Double", "int8": "Char",
           "int16": "Short", "int32": "Int", "int64": "Long", "uint8": "Byte", "bool": "Bool"}  # fmt: skip
_KERNELS = {"allreduce": "AllReduce", "broadcast": "Broadcast", "allgather": "AllGather",
            "reducescatter": "ReduceScatter", "alltoall": "SendRecv"}  # fmt: skip
_OPERATION, _TRANSFER = "farandole", "farandole.transfer"  # categories
_FOREIGN_PIDS = 1_000_000  # processes of other profilers than a rank's own
_MARKS = 0  # the first track; it is of transfers, too
_EPOCH_US = 1e15  # times of day are later, and those since a start earlier


class Clock(NamedTuple):
    """From a time on its host's clock on: what is to be added to it, within the error, for rank 0's clock."""

    since_ns: float
    offset_ns: int
    error_ns: float


class Operation(NamedTuple):
    """One on all its ranks, in the order in which they submitted it."""

    calls: list[Call]
    late_ns: int  # the last rank, after the one before it
    is_sure: bool  # that the last one was the last: all ranks are known, and it is later than the clocks' errors


class Job:
    """All ranks on one clock, that of the lowest rank's host."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self.ranks = {one.rank: one for one in ranks}
        self.size = ranks[0].size
        self.missing = sorted(set(range(self.size)) - self.ranks.keys())
        groups: dict[Any, list[Call]] = defaultdict(list)
        for one in ranks:
            for call in one.calls:
                if call.identity is not None:
                    groups[call.identity].append(call)
        # Of each operation, by host: when the last rank submitted it, and when the first one went on.
        limits = {identity: self._limits(calls) for identity, calls in groups.items() if len(calls) > 1}
        possible = {identity: hosts for identity, hosts in limits.items()
                    if all(submitted <= decided for submitted, decided in hosts.values())}  # fmt: skip
        self.impossible = len(limits) - len(possible)
        first = self.ranks[min(self.ranks)]
        self.clocks = {host: self._clocks_of(host, first, list(possible.values()))
                       for host in dict.fromkeys(one.host for one in ranks)}  # fmt: skip
        self.operations = {identity: self._ordered(groups[identity]) for identity in possible}
        self.base_wall_ns = first.wall_ns

    def clock(self, rank: int, at_ns: int) -> Clock:
        clocks = self.clocks[self.ranks[rank].host]
        return clocks[max(bisect.bisect_right([one.since_ns for one in clocks], at_ns) - 1, 0)]

    def at(self, rank: int, at_ns: int) -> int:
        """A time on the common clock."""
        return at_ns + self.clock(rank, at_ns).offset_ns

    def waited_ns(self, call: Call) -> int:
        """How long it waited until the last rank had submitted it, too; 0 if that is not known."""
        operation = self.operations.get(call.identity)
        last = operation.calls[-1] if operation else call
        return self.at(last.rank, last.submitted_ns) - self.at(call.rank, call.submitted_ns)

    def _limits(self, calls: Sequence[Call]) -> Limits:
        limits: Limits = {}
        for call in calls:
            submitted, decided = limits.get(self.ranks[call.rank].host, (call.submitted_ns, call.decided_ns))
            limits[self.ranks[call.rank].host] = max(submitted, call.submitted_ns), min(decided, call.decided_ns)
        return limits

    def _clocks_of(self, host: str, first: Rank, operations: Sequence[Limits]) -> list[Clock]:
        """The bounds of all operations, intersected; anew where they contradict, since the clocks have drifted."""
        if host == first.host:
            return [Clock(-math.inf, 0, 0)]
        clocks, low, high, since = [], -math.inf, math.inf, -math.inf
        shared = (one for one in operations if {host, first.host} <= one.keys())
        for theirs, ours in sorted((one[host], one[first.host]) for one in shared):
            lower, upper = ours[0] - theirs[1], ours[1] - theirs[0]
            if max(low, lower) > min(high, upper):
                clocks.append(Clock(since, round((low + high) / 2), (high - low) / 2))
                low, high, since = -math.inf, math.inf, theirs[0]
            low, high = max(low, lower), min(high, upper)
        if math.isinf(low):  # they share no operation: all that is known is the time of day
            wall_ns = next(one.wall_ns for one in self.ranks.values() if one.host == host)
            return [Clock(since, wall_ns - first.wall_ns, math.inf)]
        return [*clocks, Clock(since, round((low + high) / 2), (high - low) / 2)]

    def _ordered(self, calls: Sequence[Call]) -> Operation:
        ordered = sorted(calls, key=lambda call: self.at(call.rank, call.submitted_ns))
        before, last = ordered[-2:]
        late_ns = self.at(last.rank, last.submitted_ns) - self.at(before.rank, before.submitted_ns)
        hosts = {self.ranks[call.rank].host for call in (before, last)}
        errors = [self.clock(call.rank, call.submitted_ns).error_ns for call in (before, last)]
        # Which ranks another set has is not known: perhaps one that is missing.
        is_whole = not self.missing if last.set else len(calls) == self.size
        return Operation(ordered, late_ns, is_whole and late_ns > (sum(errors) if len(hosts) > 1 else 0))


class Other(NamedTuple):
    """A trace of torch.profiler."""

    path: pathlib.Path
    content: Event
    base_ns: int  # time of day of its zero

    def of(self, job: Job) -> list[Rank]:
        """The rank that was traced, if there is one; older torch does not say on which host."""
        pids, host = self.own(), self.content.get("host_name")
        number = self.content.get("distributedInfo", {}).get("rank")
        return [one for one in job.ranks.values()
                if one.pid in pids and (one.rank == number if host is None else one.host == host)]  # fmt: skip

    def own(self) -> set[Any]:
        """The process that was traced; the others are its devices."""
        return {event["pid"] for event in self.content["traceEvents"]
                if event["name"] == "process_labels" and event["args"].get("labels") == "CPU"}  # fmt: skip


def read(folder: pathlib.Path, warn: Callable[[str], object]) -> tuple[list[Rank], list[Other]]:
    """The ranks, by their timelines if there are any and else by their flight recorders; and torch.profiler's traces.

    Args:
        folder: Looked through with all folders in it.
        warn: Gets a line about each file that cannot be read, or is passed over.
    Returns:
        The ranks, ascending; and the other traces.
    Raises:
        UnreadableError: There is nothing of Farandole's.
    """
    timelines: list[tuple[pathlib.Path, Rank]] = []
    others = []
    for path in sorted((*folder.rglob("*.json"), *folder.rglob("*.json.gz"))):
        if path.match("farandole-*-rank*.json"):
            continue
        try:
            content = load(path)
            if isinstance(content, list):
                timelines.append((path, of_timeline(content, path)))
            elif not isinstance(content, dict) or not isinstance(content.get("traceEvents"), list):
                continue
            elif "farandole" in content:
                continue  # something else, or what this command has written
            elif (base_ns := _base_ns(content)) is not None:
                others.append(Other(path, content, base_ns))
            else:
                warn(f"{path}: does not say which time of day its times are (baseTimeNanoseconds); passed over")
        except UnreadableError as error:
            warn(str(error))
    found = _newest(timelines, warn) or [of_recorder(one) for one in flight.read_folder(folder, warn)]
    return sorted(found, key=lambda one: one.rank), others


def _base_ns(content: Event) -> int | None:
    """Before torch 2.4 there is none, and times are those of the day."""
    times = (event.get("ts") for event in content["traceEvents"] if isinstance(event, dict))
    is_of_day = any(isinstance(ts, int | float) and ts > _EPOCH_US for ts in times)
    return content.get("baseTimeNanoseconds", 0 if is_of_day else None)


def _newest(timelines: Sequence[tuple[pathlib.Path, Rank]], warn: Callable[[str], object]) -> list[Rank]:
    """One timeline of each rank of the job and generation that began last."""
    ranks: dict[int, Rank] = {}
    newest: Rank | None = None
    for path, one in sorted(timelines, key=lambda timeline: -timeline[1].wall_ns - timeline[1].began_ns):
        newest = newest or one
        if (one.job, one.generation, one.size) != (newest.job, newest.generation, newest.size):
            warn(f"{path}: of {_whose(one)}; passed over, as {_whose(newest)} began later")
        elif ranks.setdefault(one.rank, one) is not one:
            warn(f"{path}: another timeline of rank {one.rank}; the one that began last counts")
    return list(ranks.values())


def _whose(one: Rank) -> str:
    return f'job "{one.job}", generation {one.generation} of {one.size} ranks'


def _arguments(job: Job, call: Call) -> Event:
    """What is known of a call, by the names that torch.profiler has for it; what a reader may want to know beside."""
    arguments: Event = {"Collective name": call.kind, "Rank": call.rank, "Process Group Name": str(call.set),
                        "Process Group Description": "farandole", "bytes": call.bytes}  # fmt: skip
    if call.dtype:
        count = call.bytes // _size_of(call.dtype)
        arguments |= {"dtype": _DTYPES.get(call.dtype, call.dtype), "In msg nelems": count}
        if call.kind in ("allreduce", "broadcast"):
            arguments["Out msg nelems"] = count
    operation = job.operations.get(call.identity)
    if operation is not None:
        last, members = operation.calls[-1], sorted(one.rank for one in operation.calls)
        arguments |= {
            "Group size": len(members), "Process Group Ranks": str(members), "last rank": last.rank,
            "last rank is sure": operation.is_sure, "later than the others by (us)": operation.late_ns / 1000,
            "waited for the last rank (us)": job.waited_ns(call) / 1000,
        }  # fmt: skip
    return arguments


def _size_of(dtype: str) -> int:
    """In bytes: the digits of its name are bits."""
    digits = "".join(c for c in dtype.partition("_")[0] if c.isdigit())
    return max(int(digits or 8) // 8, 1)


class _Writer:
    """The events of one rank, in microseconds on the common clock."""

    def __init__(self, job: Job, rank: Rank, ids: dict[Any, int]) -> None:
        self._job, self._rank, self._ids = job, rank, ids
        self._ends_ns: dict[str, dict[int, int]] = {}  # of what is on each track, by its name and number
        self.events: list[Event] = []
        self._name("process_name", 0, f"rank {rank.rank} on {rank.host}")
        self._track("transfers", 0, 0)
        self.events.append({"ph": "M", "name": "process_sort_index", "pid": rank.rank, "tid": 0,
                            "args": {"sort_index": rank.rank}})  # fmt: skip

    def _name(self, what: str, tid: int, name: str) -> None:
        self.events.append({"ph": "M", "name": what, "pid": self._rank.rank, "tid": tid, "args": {"name": name}})

    def _track(self, name: str, begin_ns: int, end_ns: int) -> int:
        """One that is free then: operations and transfers overlap, spans of a track must not."""
        ends_ns = self._ends_ns.setdefault(name, {})
        tid = next((tid for tid, before_ns in ends_ns.items() if before_ns <= begin_ns), None)
        if tid is None:
            tid = sum(map(len, self._ends_ns.values()))
            self._name("thread_name", tid, name)
        ends_ns[tid] = end_ns
        return tid

    def _us(self, at_ns: int) -> float:
        return self._job.at(self._rank.rank, at_ns) / 1000

    def _add(self, name: str, ph: str, tid: int, at_ns: int, **more: Any) -> None:
        self.events.append({"name": name, "ph": ph, "pid": self._rank.rank, "tid": tid, "ts": self._us(at_ns)} | more)

    def _span(self, name: str, category: str, tid: int, begin_ns: int, end_ns: int, arguments: Event) -> None:
        self._add(name, "X", tid, begin_ns, cat=category, dur=(end_ns - begin_ns) / 1000, args=arguments)

    def write(self) -> list[Event]:
        tensors = Counter(call.batch for call in self._rank.calls if call.batch)
        kinds = {call.batch: call.kind for call in self._rank.calls if call.batch}
        for batch in sorted(self._rank.batches, key=lambda batch: batch.began_ns):
            arguments = {"bytes": batch.bytes, "tensors": tensors[batch], "kind": kinds.get(batch, "")}
            tid = self._track("transfers", batch.began_ns, batch.ended_ns)
            self._span("BATCH", _TRANSFER, tid, batch.began_ns, batch.ended_ns, arguments)
        for at_ns, text in self._rank.marks:
            self._add(text, "i", _MARKS, at_ns, s="p")
        last_ns = self._rank.last_ns()
        for call in sorted(self._rank.calls, key=lambda call: call.submitted_ns):
            if call.submitted_ns:
                self._write_call(call, call.ended_ns or last_ns)
        return self.events

    def _write_call(self, call: Call, ended_ns: int) -> None:
        tid = self._track("operations", call.submitted_ns, ended_ns)
        arguments = _arguments(self._job, call) | ({} if call.ended_ns else {"end is unknown": True})
        self._span(call.name, _OPERATION, tid, call.submitted_ns, ended_ns, arguments)
        waited = min(call.submitted_ns + self._job.waited_ns(call), call.decided_ns)
        began = call.batch.began_ns if call.batch else call.decided_ns
        phases = {"waiting": waited, "negotiation": call.decided_ns, "fusion": began, "reduction": ended_ns}
        begin_ns = call.submitted_ns
        for phase, end_ns in phases.items():
            if end_ns > begin_ns:
                self._span(phase, f"{_OPERATION}.{phase}", tid, begin_ns, end_ns, {})
                begin_ns = end_ns
        operation = self._job.operations.get(call.identity)
        if operation is None:
            return
        us = {"us": self._job.waited_ns(call) / 1000}
        self._add("waited for the last rank", "C", tid, call.decided_ns, args=us)
        if operation.is_sure:  # an arrow from the last submission to where the others go on
            *others, last = operation.calls
            for other in others if call is last else [call]:
                arrow = {"cat": "last rank", "id": self._ids[call.identity, other.rank]}
                if call is last:
                    self._add("last rank", "s", tid, call.submitted_ns, **arrow)
                else:
                    self._add("last rank", "f", tid, call.decided_ns, bp="e", **arrow)


def _foreign(job: Job, rank: Rank, other: Other, ids: dict[Any, int]) -> Iterator[Event]:
    """A trace of torch.profiler, whose times are those of the day. Its own process becomes the rank's."""
    base_ns, own = other.base_ns - rank.wall_ns, other.own()
    pids: dict[Any, int] = dict.fromkeys(own, rank.rank)
    for event in other.content["traceEvents"]:
        if event["ph"] == "M" and event["pid"] in own and not event["name"].startswith("thread_"):
            continue
        pid = pids.setdefault(event["pid"], _FOREIGN_PIDS * (rank.rank + 1) + len(pids))
        moved = event | {"pid": pid}
        if "ts" in event:
            moved["ts"] = job.at(rank.rank, base_ns + round(event["ts"] * 1000)) / 1000
        if event["name"] == "process_name":
            moved["args"] = {"name": f"rank {rank.rank}: {event['args'].get('name', '')}"}
        if "id" in event:  # of arrows: other traces have the same numbers
            moved["id"] = ids[other.path, event["id"]]
        yield moved


def events_of(job: Job, others: Sequence[Other], warn: Callable[[str], object]) -> dict[int, list[Event]]:
    """All events of each rank, with those of torch.profiler's traces of the same process."""
    ids: dict[Any, int] = defaultdict(itertools.count(1).__next__)  # of arrows: Perfetto wants numbers
    events = {rank: _Writer(job, one, ids).write() for rank, one in job.ranks.items()}
    for other in others:
        try:
            ranks = other.of(job)
            for one in ranks:
                events[one.rank] += list(_foreign(job, one, other, ids))  # all of it, or nothing
            if not ranks:
                warn(f"{other.path}: is of no process that left a timeline; passed over")
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            warn(f"{other.path}: is no trace of torch.profiler: {type(error).__name__}: {error}")
    return events


def _about(job: Job) -> Event:
    clocks = [{"host": host, "since_ns": one.since_ns if math.isfinite(one.since_ns) else None,
               "offset_ns": one.offset_ns, "error_ns": one.error_ns if math.isfinite(one.error_ns) else None}
              for host, clocks in job.clocks.items() for one in clocks]  # fmt: skip
    return {"ranks": list(job.ranks), "missing": job.missing, "clocks": clocks, "impossible": job.impossible}


def _for_torch(event: Event, has_kernels: bool) -> list[Event]:
    """As torch.profiler writes a job with NCCL, which tools for its traces look for."""
    if event.get("cat") == _OPERATION:
        return [event | {"cat": "cpu_op", "name": "record_param_comms"}]
    if event.get("cat") == _TRANSFER and not has_kernels and event["args"]["kind"] in _KERNELS:
        name = f"ncclDevKernel_{_KERNELS[event['args']['kind']]}_farandole"
        return [event, event | {"cat": "kernel", "name": name, "args": event["args"] | {"stream": 0, "device": 0}}]
    return [event]


def split(job: Job, events: dict[int, list[Event]], folder: pathlib.Path) -> None:
    """A file for each rank, ``rank0.json`` and so on, as torch.profiler would write it.

    HolisticTraceAnalysis and others look at kernels: where a rank has none of a GPU, its transfers count as such.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for rank, some in events.items():
        has_kernels = any(event.get("cat") == "kernel" for event in some)
        content = {
            "schemaVersion": 1,
            "distributedInfo": {"backend": "farandole", "rank": rank, "world_size": job.size},
            "baseTimeNanoseconds": job.base_wall_ns, "farandole": _about(job),
            "traceEvents": [one for event in some for one in _for_torch(event, has_kernels)],
        }  # fmt: skip
        _save(folder / f"rank{rank}.json", content)


def _save(path: pathlib.Path, content: Event) -> None:
    """The file as a whole, or none: a number such as 1e999 in another profiler's trace is no JSON."""
    is_device = path.exists() and not path.is_file()  # such as /dev/stdout
    part = path if is_device else path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with gzip.open(part, "wt") if path.suffix == ".gz" else open(part, "w") as file:
            json.dump(content, file, allow_nan=False)
        if not is_device:
            part.replace(path)
    except ValueError as error:
        raise UnreadableError(f"{path}: cannot be written: {error}") from error
    finally:
        if not is_device:
            part.unlink(missing_ok=True)


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.3f} ms"


def _clock_lines(job: Job) -> Iterator[str]:
    for host, clocks in job.clocks.items():
        some = in_words(rank for rank, one in job.ranks.items() if one.host == host)
        if len(job.clocks) == 1 or clocks[0].error_ns == 0:
            yield f"host {host}: {some}; all times are on its clock"
        elif math.isinf(clocks[0].error_ns):
            yield (f"host {host}: {some}; no operation is shared with the first host, so the times of day are taken "
                   "for equal, whatever that is worth")  # fmt: skip
        else:
            moved = f"; its clock drifts: {len(clocks)} offsets, of which this is the first" if clocks[1:] else ""
            yield (f"host {host}: {some}; {clocks[0].offset_ns / 1e9:+.6f} s are added to its clock, right to "
                   f"within {clocks[0].error_ns / 1000:.1f} us{moved}")  # fmt: skip
    if job.impossible:
        yield (f"{job.impossible} operations were decided before all ranks of a host had submitted them: its clock was "
               "set meanwhile, or two hosts have one name. They are left out; do not trust the others")  # fmt: skip


def summary(job: Job) -> str:
    """Ranks, span, clocks, and who was last how often and for how long the others waited."""
    calls = [(rank, call) for rank, one in job.ranks.items() for call in one.calls]
    times = [job.at(rank, at_ns) for rank, call in calls for at_ns in (call.submitted_ns, call.ended_ns) if at_ns]
    span = f"{(max(times) - min(times)) / 1e9:.3f} s" if times else "no time"
    lines = [f"{in_words(job.ranks)}: {len(calls)} operations in {span}, {len(job.operations)} of them matched",
             *_clock_lines(job)]  # fmt: skip
    if job.missing:
        lines.append(f"{in_words(job.missing)} of {job.size} left no file here: of operations of all ranks nobody is "
                     "surely the last")  # fmt: skip
    for rank, one in job.ranks.items():
        led = [operation for operation in job.operations.values()
               if operation.is_sure and operation.calls[-1].rank == rank]  # fmt: skip
        waited = sum(job.waited_ns(call) for operation in led for call in operation.calls)
        own = sum(job.waited_ns(call) for call in one.calls)
        lines.append(f"rank {rank}: last in {len(led)} of {len(job.operations)}, for which the others waited "
                     f"{_ms(waited)} together; waited {_ms(own)} itself")  # fmt: skip
        if one.dropped:
            lines.append(f"rank {rank}: {one.dropped} spans are missing: more than its timeline could keep")
    unsure = sum(not operation.is_sure for operation in job.operations.values())
    if unsure:
        lines.append(f"{unsure} operations: the last two ranks are closer than the error of their clocks, or not all "
                     "their ranks are known")  # fmt: skip
    return "\n".join(map(printable, lines))


def main(argv: Sequence[str]) -> int:
    """``farandole trace``. Returns the exit code: 1 if there is nothing to merge, or it cannot be read."""
    parser = argparse.ArgumentParser(
        prog="farandole trace",
        description="Merges what all ranks left in a folder into one trace for ui.perfetto.dev: the timelines "
        "(FARANDOLE_TIMELINE with {rank}) or, without any, the files of flight recorders, and torch.profiler's traces.",
    )
    parser.add_argument("folder", type=pathlib.Path, help="with the files of all ranks")
    parser.add_argument("-o", "--output", type=pathlib.Path, default=pathlib.Path("farandole-trace.json"),
                        help="the trace, compressed if it ends in .gz (default: farandole-trace.json)")  # fmt: skip
    parser.add_argument("--split", metavar="OUT", type=pathlib.Path,
                        help="also write a file for each rank into OUT, for HolisticTraceAnalysis")  # fmt: skip

    def warn(text: object) -> None:
        print(f"farandole trace: {printable(str(text))}", file=sys.stderr)

    arguments = parser.parse_args(argv)
    try:
        ranks, others = read(arguments.folder, warn)
        job = Job(ranks)
        events = events_of(job, others, warn)
        print(summary(job))
        merged = [event for some in events.values() for event in some]
        _save(arguments.output, {"displayTimeUnit": "ms", "baseTimeNanoseconds": job.base_wall_ns,
                                 "farandole": _about(job), "traceEvents": merged})  # fmt: skip
        if arguments.split:
            split(job, events, arguments.split)
    except (UnreadableError, OSError) as error:
        warn(error)
        return 1
    print(f"written: {arguments.output}")
    return 0
