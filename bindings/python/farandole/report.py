"""``farandole report DIR``: a page for a colleague, from what a job's processes left in ``FARANDOLE_RECORD``."""

from __future__ import annotations

import argparse
import bisect
import contextlib
import dataclasses
import html
import json
import math
import pathlib
import statistics
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from farandole import _record, flight
from farandole.explain import explain
from farandole.flight import Flight, Steps, UnreadableError, in_words, printable
from farandole.ps import CAUSES, Lateness, lateness

_INTERVALS = 100  # at most, of the pictures
_SAMPLES = 300  # of a process, at most, that are kept
_MOST_RANKS = 1 << 16
_MOST, _MOST_S = 1e18, 1e11  # of a value, and of a time
_DIED_EARLY_S = 10  # for so long at most the others began after the last sample of a process that died
_MOST_EVENTS = 50
#: In the order of flight.Steps.
_STEPS = ("steps", "step_seconds", *(f"step_parts_seconds.{part}" for part in (
    "blocked", "input", "no_processor", "garbage_collection", "other_groups")), "link_seconds")  # fmt: skip
_MOST_NAMED = 16  # ranks, one by one
#: Counters, of which kind of event, and what happened to so many operations.
_NOTED = (("operation_errors", "failure", "ended by an error"), ("stalls", "warning", "waited for a rank for long"))
_SHADES = (0.1, 0.2, 0.4)  # of a step that the others wait; the first shade is below, the last above


@dataclasses.dataclass
class Part:
    """A process's part in a generation: samples of its metrics, of which there is at least one."""

    host: str
    pid: int
    generation: int
    rank: int
    size: int
    columns: Mapping[str, int]  # of the samples, by name
    at_s: list[float] = dataclasses.field(default_factory=list)
    samples: list[array[float]] = dataclasses.field(default_factory=list)
    end: str | None = None  # its error, or empty; None: it has left none

    def change(self, name: str, first: int = 0, last: int = -1) -> float:
        """Of a metric, from one sample to another."""
        column = self.columns.get(name)
        return 0 if column is None else self.samples[last][column] - self.samples[first][column]

    def flight(self, begin_s: float = 0, end_s: float = math.inf) -> Flight:
        """The steps between two times: their mean is what it was, their number is rounded."""
        steps, *seconds = (end - begin for begin, end in zip(self.until(begin_s), self.until(end_s)))
        count = round(steps)
        totals = Steps(count, *(round(one / steps * count * 1e9) for one in seconds)) if count else Steps()
        return Flight(self.rank, self.size, self.pid, self.host, [], steps=totals)

    def until(self, at_s: float, names: Sequence[str] = _STEPS) -> list[float]:
        """Of metrics at a time, on a line between two samples: two ranks take theirs at different times."""
        after = bisect.bisect_right(self.at_s, at_s)
        before, share = max(after - 1, 0), 0.0
        if 0 < after < len(self.at_s):
            share = (at_s - self.at_s[before]) / (self.at_s[after] - self.at_s[before])
        last = min(after, len(self.at_s) - 1)
        begin, end = self.samples[before], self.samples[last]
        found = [self.columns.get(name) for name in names]
        return [0 if i is None else begin[i] + share * (end[i] - begin[i]) for i in found]


class Process(NamedTuple):
    """What a file says."""

    head: Mapping[str, Any]
    parts: list[Part]

    @property
    def begin_s(self) -> float:
        return self.parts[0].at_s[0]

    @property
    def end_s(self) -> float:
        return self.parts[-1].at_s[-1]


class Run(NamedTuple):
    """Of a job, all processes that left a file."""

    processes: list[Process]
    generations: dict[int, list[Part]]  # by rank
    begin_s: float
    end_s: float
    explained: str  # by the flight recorders; empty: there are none


def _whole(value: Any, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{str(value)[:80]} is not a whole number from 0 to {most}")
    return value


def _head(said: Any) -> dict[str, Any]:
    texts = [said["host"], said["program"], said["launcher"], *said["columns"], *said["versions"].values()]
    texts += [word for row in said["settings"] for word in row]
    if not all(isinstance(text, str) for text in texts) or any(len(row) != 3 for row in said["settings"]):
        raise ValueError("its first line is not of texts")
    _whole(said["pid"], 1 << 32)
    return dict(said)


def _read_process(path: pathlib.Path) -> Process:
    """Raises UnreadableError."""
    try:
        # Without what a process was about to write when it died.
        first, *samples = map(json.loads, flight._read(path).split(b"\n")[:-1])
        head = _head(first)
        columns = {name: number for number, name in enumerate(head["columns"])}
        parts: list[Part] = []
        stride = math.ceil(len(samples) / _SAMPLES)
        for number, line in enumerate(samples):
            if "generation" in line:
                generation, rank, size = (_whole(line[key], _MOST_RANKS) for key in ("generation", "rank", "size"))
                if parts:  # after a shutdown, a further init begins with 1 again
                    generation = max(generation, parts[-1].generation + 1)
                parts.append(Part(head["host"], head["pid"], generation, rank, size, columns))
            if "end" in line:
                parts[-1].end = str(line["end"])
            if number % stride == 0 or line.keys() != {"at_s", "values"} or number == len(samples) - 1:
                parts[-1].at_s.append(float(line["at_s"]))
                values = array("d", line["values"])
                if not (0 <= line["at_s"] <= _MOST_S and all(-_MOST <= value <= _MOST for value in values)):
                    raise ValueError("values are not numbers")
                values.extend([0.0] * (len(head["columns"]) - len(values)))  # there were none yet
                parts[-1].samples.append(values)
        if not parts:
            raise ValueError("it has no sample")
        return Process(head, parts)
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise UnreadableError(f"{path}: cannot be read: {type(error).__name__}: {error}") from error


def read(folder: pathlib.Path, warn: Callable[[str], object] = lambda _: None) -> Run:
    """The run that was recorded last in a folder: all processes whose times overlap, or nearly.

    Args:
        folder: Where the processes left their files.
        warn: Gets a line about each file that cannot be read, and about those of earlier runs.
    Raises:
        UnreadableError: There is none that can be read, or they are of several jobs at a time.
    """
    found = []
    for path in sorted(folder.glob(f"*{_record.SUFFIX}")):
        try:
            found.append(_read_process(path))
        except UnreadableError as error:
            warn(str(error))
    if not found:
        raise UnreadableError(f"{folder}: no records (*{_record.SUFFIX}) that can be read; is it the FARANDOLE_RECORD "
                              "of a run?")  # fmt: skip
    found.sort(key=lambda process: process.end_s, reverse=True)
    begin_s, processes = found[0].begin_s, []
    by_rank: dict[int, dict[int, Part]] = {}  # of each generation
    for process in found:
        others = [(part, other) for part in process.parts for other in by_rank.get(part.generation, {}).values()
                  if other.rank == part.rank or other.size != part.size]  # fmt: skip
        if others and process.end_s >= begin_s:
            were = " and ".join(f"process {one.pid} on {one.host} was rank {one.rank} of {one.size}"
                                for one in others[0])  # fmt: skip
            raise UnreadableError(f"{folder}: records of several jobs at a time: {were}")
        if process.end_s >= begin_s - _DIED_EARLY_S and not others:
            begin_s = min(begin_s, process.begin_s)
            processes.append(process)
            for part in process.parts:
                by_rank.setdefault(part.generation, {})[part.rank] = part
    if len(processes) < len(found):
        warn(f"{folder}: files of earlier runs are left out: {len(found) - len(processes)}")
    generations = {number: [parts[rank] for rank in sorted(parts)] for number, parts in sorted(by_rank.items())}
    processes.sort(key=lambda process: (process.begin_s, process.parts[0].rank))
    flights: list[Flight] = []
    with contextlib.suppress(UnreadableError):  # there are none
        flights = [one for one in flight.read_folder(folder) if one.written_s >= begin_s]
    return Run(processes, generations, begin_s, found[0].end_s, explain(flights) if flights else "")


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.3g} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{int(seconds // 60)} min {int(seconds % 60)} s"


def _named(ranks: Iterable[int]) -> str:
    first = sorted(ranks)
    more = len(first) - _MOST_NAMED
    return f"ranks {', '.join(map(str, first[:_MOST_NAMED]))} and {more:,} more" if more > 0 else in_words(first)


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def _ms(seconds: float) -> str:
    return f"{round(seconds * 1e3, 2):.3g} ms" if seconds < 10 else _duration(seconds)


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.3g} {unit}"


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0


def _cause(flights: Sequence[Flight], late: Lateness) -> str:
    """What takes longer on it than on the others."""

    def longer_ns(fields: Sequence[str]) -> float:
        each = {one.rank: sum(getattr(one.steps, field) for field in fields) / one.steps.steps for one in flights}
        return float(each.pop(late.rank) - statistics.median(each.values()))

    for field, (cause, least) in CAUSES.items():
        if (more_ns := longer_ns([field])) >= least * late.late_ns:
            return f": {cause} {_ms(more_ns / 1e9)} longer than on the others"
    known_ns = longer_ns(("blocked_ns", "collecting_ns", "input_ns", "other_groups_ns"))
    if longer_ns(["ns"]) - known_ns >= late.late_ns / 2:
        return ": its computing takes longer than on the others"
    return ", of which nothing alone explains half"


def _waits(run: Run) -> Iterator[str]:
    """For whom the others waited in all steps of a generation, and where the network was busy for most of them."""
    late, network, is_compared = [], [], False
    for number, parts in run.generations.items():
        when = "in each step" + (f" of generation {number}" if len(run.generations) > 1 else "")
        flights = [part.flight() for part in parts]
        if not (found := lateness(flights)):
            continue
        is_compared = True
        for part, one in zip(parts, found):
            if one.is_late:
                cause = _cause(flights, one)
                late.append(f"Rank {one.rank} (host {part.host}) made the others wait {one} {when}{cause}.")
        sent = [one.steps for one in flights if one.steps.link_ns and one.steps.ns]  # to another host
        least = min(sent, key=lambda one: one.link_ns / one.ns, default=Steps())
        if least.link_ns > least.ns / 2:
            link_ms, step_ms = (ns / least.steps / 1e6 for ns in (least.link_ns, least.ns))
            network.append(f"The network carries data for {link_ms:.3g} ms of {step_ms:.3g} {when}.")
    if not late and max(len(parts) for parts in run.generations.values()) > 1:
        yield ("No rank came late to operations." if is_compared else
               "With fewer than 20 steps, nothing is said of ranks that come late.")  # fmt: skip
    yield from late + network


def _steps(run: Run) -> tuple[float, float]:
    """How many, and their time, of the median rank of each generation."""
    each = [[statistics.median(part.change(name) for part in parts) for parts in run.generations.values()]
            for name in _STEPS[:2]]  # fmt: skip
    return sum(each[0]), sum(each[1])


def _headline(run: Run) -> Iterator[str]:
    sizes = [parts[0].size for parts in run.generations.values()]
    hosts = len({process.head["host"] for process in run.processes})
    least = f"{min(sizes)} to " if min(sizes) < max(sizes) else ""
    steps, seconds = _steps(run)
    took = f"{int(steps):,} steps of {_ms(seconds / steps)} in the mean" if steps else "no steps of training"
    yield (f"{least}{_count(max(sizes), 'rank')} on {_count(hosts, 'host')} ran for "
           f"{_duration(run.end_s - run.begin_s)}: {took}.")  # fmt: skip
    yield from (f"It ended by an error: {text}" for text in [*_errors(list(run.generations.values())[-1])][:1])
    for parts in run.generations.values():
        if missing := {*range(parts[0].size)} - {part.rank for part in parts}:
            yield f"There is no record of {_named(missing)}."
    yield from _waits(run)


def _errors(parts: Sequence[Part]) -> dict[str, list[Part]]:
    """Of a generation: who has left which."""
    errors: dict[str, list[Part]] = {}
    for part in parts:
        if part.end:
            errors.setdefault(part.end, []).append(part)
    return dict(sorted(errors.items(), key=lambda item: -len(item[1])))


class Event(NamedTuple):
    at_s: float  # of several ranks, the first time
    kind: str  # error, generation; failure, warning: so many that a page may leave some out
    text: str


def _of_generation(number: int, parts: Sequence[Part], before: Sequence[Part]) -> str:
    now, then = ({(part.host, part.pid): part for part in some} for some in (parts, before))
    text = f"Generation {number} begins with {_count(parts[0].size, 'rank')}"
    gone, come = then.keys() - now.keys(), now.keys() - then.keys()
    if before:
        text += "".join(f"; without process {pid} of {host}, which was rank {then[host, pid].rank}"
                        for host, pid in sorted(gone))  # fmt: skip
        text += "".join(f"; with process {pid} of {host}, rank {now[host, pid].rank}" for host, pid in sorted(come))
    return text + "."


def _noted(parts: Sequence[Part], period_s: float) -> Iterator[Event]:
    """What ranks of a generation have counted; what several have alike in a period is one event."""
    found: dict[tuple[float, str, str], list[tuple[float, int]]] = {}
    for part in parts:
        for name, kind, what in _NOTED:
            for i in range(1, len(part.at_s)) if part.change(name) else ():
                if count := int(part.change(name, i - 1, i)):
                    key = part.at_s[i] // period_s, kind, f"{_count(count, 'operation')} {what}"
                    found.setdefault(key, []).append((part.at_s[i], part.rank))
    for (_, kind, text), some in found.items():
        yield Event(min(some)[0], kind, f"{_named({rank for _, rank in some}).capitalize()}: {text}.")


def _events(run: Run, period_s: float) -> list[Event]:
    """By their times."""
    events: list[Event] = []
    before: Sequence[Part] = ()
    for number, parts in run.generations.items():
        if len(run.generations) > 1:
            events.append(Event(parts[0].at_s[0], "generation", _of_generation(number, parts, before)))
        for text, some in _errors(parts).items():
            events.append(Event(min(part.at_s[-1] for part in some), "error",
                                f"{_named(part.rank for part in some).capitalize()}: {text}"))  # fmt: skip
        before = parts
        if left := [part for part in parts if part.end is None]:
            who = _named(part.rank for part in left)
            who += f" (process {left[0].pid} of {left[0].host})" * (len(left) == 1)
            events.append(Event(min(part.at_s[-1] for part in left), "warning",
                                f"The last of {who}: killed, or still running."))  # fmt: skip
        events += _noted(parts, period_s)
    return sorted(events)


def _text(text: object) -> str:
    return html.escape(printable(str(text)))


class Axis:
    """Of time, which all pictures share: 0 to ``intervals``."""

    def __init__(self, run: Run) -> None:
        parts = [part for some in run.generations.values() for part in some]
        self.begin_s, self.length_s = run.begin_s, max(run.end_s - run.begin_s, 1e-3)
        longest = max(len(part.at_s) for part in parts)
        self.intervals = max(1, min(_INTERVALS, longest - 1))
        width_s = self.length_s / self.intervals
        self.events = _events(run, width_s)
        self.edges = [self.begin_s + number * width_s for number in range(self.intervals)] + [run.end_s]
        #: Of each generation the steps of each rank in each interval.
        self.flights = [(number, [part.flight(begin_s, end_s) for part in parts])
                        for parts in run.generations.values()
                        for number, (begin_s, end_s) in enumerate(pairwise(self.edges))
                        if any(part.at_s[0] < end_s and begin_s < part.at_s[-1] for part in parts)]  # fmt: skip

    def marks(self, height: float) -> str:
        """Of errors and generations."""
        xs = {(round((one.at_s - self.begin_s) / self.length_s * self.intervals, 2), one.kind)
              for one in self.events if one.kind != "warning"}  # fmt: skip
        return "".join(f'<path class="{kind}" d="M{x} 0V{height}"/>' for x, kind in sorted(xs))

    def clock(self, at_s: float) -> str:
        """With the day if there are several."""
        return time.strftime("%Y-%m-%d " * (self.length_s > 86400) + "%H:%M:%S", time.localtime(at_s))

    def figure(self, caption: str, label: str, left: str, svg: str, height: float, pixels: int) -> str:
        times = "".join(f"<span>{self.clock(self.begin_s + self.length_s * share)}</span>" for share in (0, 0.5, 1))
        return (
            f'<figure><figcaption>{caption}</figcaption><div class="plot"><div class="left">{left}</div>'
            f'<svg role="img" aria-label="{label}" viewBox="0 0 {self.intervals} {height}" preserveAspectRatio="none" '
            f'style="height:{pixels}px">{svg}{self.marks(height)}</svg></div>'
            f'<div class="below">{times}</div></figure>'
        )


def _chart(axis: Axis, title: str, lines: Mapping[str, Sequence[float | None]], unit: Callable[[float], str]) -> str:
    """Each from its label and a value for each interval."""
    most = max((value for values in lines.values() for value in values if value is not None), default=0) * 1.1
    if not most:
        return ""
    keys, paths = [], []
    for number, (label, values) in enumerate(lines.items()):
        points = [(x + 0.5, 100 - value / most * 100) for x, value in enumerate(values) if value is not None]
        if len(points) == 1:  # a line all the same
            points = [(points[0][0] - 0.5, points[0][1]), (points[0][0] + 0.5, points[0][1])]
        paths.append(f'<path class="line{number}" d="M' + "L".join(f"{x:g} {y:.1f}" for x, y in points) + '"/>')
        keys.append(f'<span class="key"><i class="line{number}"></i>{label}</span>')
    left = f"<span>{unit(most)}</span><span>0</span>"
    return axis.figure(f"{title} {''.join(keys)}", title, left, "".join(paths), 100, 160)


def _step_times(axis: Axis) -> str:
    middle: list[float | None] = [None] * axis.intervals
    slowest = [*middle]
    for number, flights in axis.flights:
        if times := [one.steps.ns / one.steps.steps / 1e9 for one in flights if one.steps.steps]:
            middle[number], slowest[number] = statistics.median(times), max(times)
    return _chart(axis, "Time of a step", {"slowest rank": slowest, "median rank": middle}, _ms)


def _bandwidth(run: Run, axis: Axis) -> str:
    edges = [[sum(part.until(at_s, ["batch_bytes"])[0] for part in parts) / len(parts) for at_s in axis.edges]
             for parts in run.generations.values()]  # fmt: skip
    totals = [sum(column) for column in zip(*edges)]
    rates = [(after - before) / axis.length_s * axis.intervals for before, after in pairwise(totals)]
    return _chart(axis, "Data per second", {"mean of the ranks": rates}, lambda one: _bytes(one) + "/s")


def _late_map(run: Run, axis: Axis) -> str:
    """Ranks from top to bottom, time from left to right, and how much of a step the others waited."""
    ranks = max(parts[0].size for parts in run.generations.values())
    cells: dict[tuple[int, int], int] = {}
    for number, flights in axis.flights:
        for one in lateness(flights, 1):
            if one.is_late:
                cells[one.rank, number] = bisect.bisect(_SHADES, one.late_ns / one.step_ns)
    paths = [""] * (len(_SHADES) + 1)
    for (rank, x), shade in sorted(cells.items()):
        if cells.get((rank, x - 1)) != shade:
            end = next(end for end in range(x + 1, axis.intervals + 1) if cells.get((rank, end)) != shade)
            paths[shade] += f"M{x} {rank}h{end - x}v1h{x - end}z"
    svg = "".join(f'<path class="shade{shade}" d="{path}"/>' for shade, path in enumerate(paths) if path)
    names = ("5 to 10 %", "10 to 20 %", "20 to 40 %", "more of a step")
    keys = "".join(f'<span class="key"><i class="shade{shade}"></i>{name}</span>' for shade, name in enumerate(names))
    shown, kind = (range(ranks), ' class="row"') if ranks <= 24 else ((0, ranks - 1), "")
    left = "".join(f"<span{kind}>rank {rank}</span>" for rank in shown)
    pixels = min(max(4 * ranks, 22 * min(ranks, 12)), 560)
    return axis.figure(f"Who made the others wait, and when {keys}", "lateness of ranks", left, svg, ranks, pixels)


def _table(head: Sequence[str], rows: Sequence[Sequence[object]], is_numbers: bool = False) -> str:
    heads = "".join(f"<th>{_text(word)}</th>" for word in head)
    body = "".join("<tr>" + "".join(f"<td>{_text(word)}</td>" for word in row) + "</tr>\n" for row in rows)
    kind = ' class="numbers"' if is_numbers else ""
    return f'<div class="wide"><table{kind}><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def _ranks(run: Run) -> Iterator[str]:
    """A table for each generation; the one with most steps is open."""
    longest = max(run.generations.values(), key=lambda parts: parts[0].change("steps"))
    for number, parts in run.generations.items():
        late = {one.rank: one for one in lateness([part.flight() for part in parts])}
        rows = []
        for part in parts:
            steps = part.change("steps")
            each = [_ms(_ratio(part.change(name), steps)) if steps else "" for name in _STEPS[1:]]
            lag = _ms(late[part.rank].late_ns / 1e9) if part.rank in late else ""
            memory = _bytes(*part.until(math.inf, ["resident_memory_bytes"]))
            rows.append((part.rank, part.host, lag, *each, int(steps), part.pid, memory))
        heads = ("rank", "host", "late", "time of a step", "blocked", "input", "no processor", "garbage collection",
                 "other groups", "network", "steps", "process", "memory")  # fmt: skip
        title = "The ranks" + (f" of generation {number}" if len(run.generations) > 1 else "")
        yield (f"<details{' open' * (parts is longest and len(parts) <= 32)}><summary>{title}</summary>"
               f"{_table(heads, rows, is_numbers=True)}</details>")  # fmt: skip


def _sizes(run: Run) -> str:
    parts = [part for some in run.generations.values() for part in some]
    total = {name: sum(part.change(name) for part in parts) for name in run.processes[0].head["columns"]}
    value: Callable[[str], float] = lambda name: total.get(name, 0)  # noqa: E731
    operations = {name.partition(".")[2]: count for name, count in total.items() if name.startswith("operations.")}
    (threshold,) = run.processes[0].parts[-1].until(math.inf, ["fusion_threshold_bytes"])
    batch = _ratio(value("batch_bytes"), value("batches"))
    counts = sum(operations.values())
    rows = [
        ("operations", ", ".join(f"{int(n):,} {kind}" for kind, n in operations.items() if n) or "none"),
        ("data", f"{_bytes(value('batch_bytes'))} in {int(value('tensors')):,} tensors"),
        ("fusion", f"{_ratio(value('tensors'), value('batches')):.3g} tensors and {_bytes(batch)} in each of "
                   f"{int(value('batches')):,} batches, {_ratio(batch, threshold):.1%} of the fusion buffer"),
        ("on the wire", f"{_ratio(value('wire_bytes'), value('batch_bytes')):.3g} of the data; "
                        f"{_bytes(value('sent_bytes'))} sent"),
        ("time of an operation", f"{_ms(_ratio(value('operation_seconds.negotiation'), counts))} until all ranks have "
         f"submitted it, then {_ms(_ratio(value('operation_seconds.execution'), counts))} until its result is ready"),
    ]  # fmt: skip
    return _table(("of all ranks", ""), rows)


def _happened(run: Run, axis: Axis) -> str:
    first = sorted(axis.events, key=lambda one: one.kind not in ("error", "generation"))[:_MOST_EVENTS]
    rows = [(axis.clock(one.at_s), one.text) for one in sorted(first)]
    if (left := len(axis.events) - len(rows)) > 0:
        rows.append(("", f"{left} more."))
    text = _table(("time", "what happened"), rows) if rows else "<p>No errors.</p>"
    return text + (f"<h3>The flight recorders</h3><pre>{html.escape(run.explained)}</pre>" if run.explained else "")


def _settings(run: Run) -> str:
    values: dict[str, Counter[str]] = {}
    defaults = {}
    for process in run.processes:
        for name, value, default in process.head["settings"]:
            values.setdefault(name, Counter())[value] += 1
            defaults[name] = default
    rows = [(name, " or ".join(found), defaults[name]) for name, found in values.items()]
    changed = [row for row in rows if row[1] != row[2]]
    heads = ("setting", "value", "default")
    text = _table(heads, changed) if changed else "<p>All have their defaults.</p>"
    same = [row[:2] for row in rows if row[1] == row[2]]
    head = run.processes[0].head
    facts = [*head["versions"].items(), ("launcher", head["launcher"]),
             ("hosts", ", ".join(sorted({process.head["host"] for process in run.processes})))]  # fmt: skip
    return (f"{text}<details><summary>{len(same)} settings with their defaults</summary>{_table(heads[:2], same)}"
            f"</details><h3>Versions and hosts</h3>{_table(('what', 'which'), facts)}")  # fmt: skip


_STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --dim: #5c6675; --paper: #fff; --rule: #d9dee5; --plot: #f3f5f8;
  --blue: #1f6fd1; --orange: #c65d00; --red: #c4162a; --s0: #fbd9a5; --s1: #f5a64a; --s2: #dd6420; --s3: #a11212; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --dim: #9aa5b4; --paper: #14181f; --rule: #343c48;
  --plot: #1c222b; --blue: #6aa8f7; --orange: #f0984a; --red: #ff6b6b; --s0: #54401f; --s1: #8f5f1d; --s2: #d97a2b;
  --s3: #ffb57a; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto;
  max-width: 64em; padding: 1em 16px 3em; overflow-wrap: anywhere; }
h1 { font-size: 1.5em; margin: .6em 0 .2em; } h2 { font-size: 1.15em; margin: 2em 0 .5em; } h3 { font-size: 1em; }
.lead { font-size: 1.1em; margin: .3em 0; } .dim, figcaption, .below, .left { color: var(--dim); }
figure { margin: 1em 0; } figcaption { margin-bottom: .3em; } .key { white-space: nowrap; margin-left: 1em; }
.key i { display: inline-block; width: .8em; height: .8em; margin-right: .35em; vertical-align: -.05em; }
.plot { display: flex; gap: 8px; } .left { display: flex; flex-direction: column; justify-content: space-between;
  width: 4.6em; flex: none; text-align: right; font-size: .8em; line-height: 1; }
.row { flex: 1; display: flex; align-items: center; justify-content: flex-end; }
svg { flex: 1; min-width: 0; background: var(--plot); border-radius: 3px; }
svg path { vector-effect: non-scaling-stroke; }
.below { display: flex; justify-content: space-between; font-size: .8em; margin-left: calc(4.6em + 8px); }
path.line0, path.line1 { fill: none; stroke-width: 1.5; } path.line0 { stroke: var(--orange); }
path.line1 { stroke: var(--blue); } i.line0 { background: var(--orange); } i.line1 { background: var(--blue); }
path.error, path.failure { stroke: var(--red); stroke-width: 2; }
path.generation { stroke: var(--dim); stroke-dasharray: 4 3; }
.shade0 { fill: var(--s0); background: var(--s0); } .shade1 { fill: var(--s1); background: var(--s1); }
.shade2 { fill: var(--s2); background: var(--s2); } .shade3 { fill: var(--s3); background: var(--s3); }
.wide { overflow-x: auto; } td:first-child { overflow-wrap: normal; }
table { border-collapse: collapse; font-size: .9em; }
th, td { text-align: left; vertical-align: top; padding: .25em .9em .25em 0; border-bottom: 1px solid var(--rule); }
th { color: var(--dim); font-weight: 500; } .numbers td, .numbers th { text-align: right; white-space: nowrap; }
.numbers :nth-child(2) { text-align: left; }
pre { white-space: pre-wrap; font-size: .85em; background: var(--plot); padding: .8em; border-radius: 3px; }
summary { cursor: pointer; margin: .8em 0 .3em; } * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
@media print { figure, tr { break-inside: avoid; } body { max-width: none; } }
"""


def page(run: Run, headline: Sequence[str]) -> str:
    """The page: one file, which needs no other, and no script."""
    axis = Axis(run)
    title = _text(run.processes[0].head["program"] or "a Python program")
    date = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(run.begin_s))
    lead = "".join(f'<p class="lead">{_text(line)}</p>\n' for line in headline)
    marked = "Red lines are errors, dashed ones new generations." if axis.marks(1) else ""
    sections = {
        "Steps": _step_times(axis) + (_late_map(run, axis) if _steps(run)[0] else "") + f"<p>{marked}</p>",
        "Ranks": "".join(_ranks(run)),
        "Sizes and fusion": _bandwidth(run, axis) + _sizes(run),
        "Errors" + " and generations" * (len(run.generations) > 1): _happened(run, axis),
        "Settings": _settings(run),
    }
    body = "".join(f"<h2>{name}</h2>\n{text}\n" for name, text in sections.items())
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head>\n<body><h1>{title}</h1>"
        f'<p class="dim">{_text(date)}</p>\n{lead}{body}</body></html>\n'
    )


def main(argv: Sequence[str]) -> int:
    """``farandole report``. Returns the exit code: 1 if there is nothing to show, or it cannot be read or written."""
    parser = argparse.ArgumentParser(
        prog="farandole report", description="Writes a page of HTML about the run that was recorded in a folder."
    )
    parser.add_argument("folder", type=pathlib.Path, help="FARANDOLE_RECORD of the job, of all its hosts")
    parser.add_argument("-o", "--output", metavar="FILE", type=pathlib.Path, default=pathlib.Path("report.html"),
                        help="the page; default report.html")  # fmt: skip

    def warn(text: object) -> None:
        print(f"farandole report: {printable(str(text))}", file=sys.stderr)

    arguments = parser.parse_args(argv)
    try:
        run = read(arguments.folder, warn)
        headline = [*_headline(run)]
        arguments.output.write_text(page(run, headline), encoding="utf-8")
    except (UnreadableError, OSError) as error:
        warn(error)
        return 1
    for line in headline:
        print(printable(line))
    print(f"The page is {arguments.output}")
    return 0
