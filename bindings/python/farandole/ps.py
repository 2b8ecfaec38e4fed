"""``farandole ps``: the running ranks of a host, and what they do, from the memory of their flight recorders."""

from __future__ import annotations

import argparse
import json
import pathlib
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, get_type_hints

from farandole.explain import waits
from farandole.flight import Flight, Steps, printable, running

# As coordinator/diagnosis/late_ranks.cc has it: late is who is so by this of a step, and the first cause counts that
# explains this share of the lateness.
_LEAST_SHARE, _LEAST_NS = 0.05, 1e6
CAUSES = {"collecting_ns": ("its garbage collection takes", 0.5), "input_ns": ("its input takes", 0.5),
          "other_groups_ns": ("it is in operations of other groups for", 0.5),
          "queued_ns": ("it is without a processor for", 0.75)}  # fmt: skip
_LEAST_STEPS = 20
_LATELY_S = 5
#: As counters() names them.
_TIMES = ("steps", "step_ns", "blocked_ns", "input_ns", "queued_ns", "collecting_ns",
          "other_groups_ns", "link_ns")  # fmt: skip
#: The first that its launcher has set for a rank is alike on all ranks of the job, and on no others.
_JOB_IDS = (
    ("FARANDOLE_ADDRESS",), ("PMIX_NAMESPACE",), ("PMI_JOBID",), ("MASTER_ADDR", "MASTER_PORT"),
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
)  # fmt: skip


class Rank(NamedTuple):
    """What a running rank does; docs/watching.md lists what ``farandole ps --json`` makes of it."""

    rank: int
    size: int
    host: str
    pid: int
    job: str  # see _JOB_IDS; empty: not known
    state: str  # running, stopped, failed or ended
    waits_in: str  # the operation; empty: in none
    waits_s: float  # since then
    last: str  # submission; empty: nothing
    last_s: float  # since then
    bytes_per_s: float  # of operations, lately
    steps: Steps

    @classmethod
    def from_json(cls, said: dict[str, Any]) -> Rank:
        """Raises LookupError, TypeError, ValueError or ArithmeticError: something else was said."""
        given = [kind(said[name]) for name, kind in get_type_hints(cls).items() if kind is not Steps]
        return cls._make([*given, Steps(*(int(said[name]) for name in _TIMES))])

    def __str__(self) -> str:
        """What it does."""
        waits = self.state == "running" and self.waits_in
        return f"waits in {self.waits_in} for {self.waits_s:.1f} s" if waits else self.state


_Known = TypeVar("_Known", Flight, Rank)


def merge(groups: Iterable[Sequence[_Known]]) -> list[list[_Known]]:
    """Puts the ranks of a job together that share no memory, as those of several hosts."""
    jobs: list[list[_Known]] = []
    for group in sorted(groups, key=lambda group: not _ids(group)):
        for job in jobs:
            if _is_of(job, group):
                job.extend(group)
                break
        else:
            jobs.append(list(group))
    return [sorted(job, key=lambda one: one.rank) for job in jobs]


def _ids(ranks: Sequence[_Known]) -> set[str]:
    return {known.job for known in ranks if known.job}


def _is_of(job: Sequence[_Known], group: Sequence[_Known]) -> bool:
    ids = _ids(job) | _ids(group)
    if job[0].size != group[0].size or len(ids) > 1 or not (ids or job[0].host != group[0].host):
        return False
    return {known.rank for known in job}.isdisjoint({known.rank for known in group})


def _job_of(pid: int) -> str:
    try:
        words = pathlib.Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # it has ended
        return ""
    found = dict(word.split("=", 1) for word in words if "=" in word)
    if "FARANDOLE_MEMBERS" in found:  # a newcomer of an elastic job: it was not given rank 0's address
        return ""
    said = (" ".join(filter(None, map(found.get, names))) for names in _JOB_IDS)
    return next(filter(None, said), "")


def _state(flight: Flight) -> str:
    """Of the rank's process."""
    try:
        letter = pathlib.Path(f"/proc/{flight.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        letter = "Z"
    if letter in "ZX":
        return "ended"
    if letter in "Tt":
        return "stopped"
    return "failed" if any(event.step == "failed" for event in flight.events) else "running"


def _look_at(flight: Flight, now_s: float) -> Rank:
    def ago_s(at_s: float) -> float:
        return max(now_s - at_s, 0)

    calls, pending = flight.calls(), flight.pending()
    ended = [event for event in calls if event.is_finished and ago_s(event.ended_s) < _LATELY_S]
    oldest_s = ago_s(calls[0].at_s) if calls else 0  # which may be younger
    return Rank(
        flight.rank, flight.size, flight.host, flight.pid, flight.job, _state(flight),
        str(pending[0]) if pending else "", ago_s(pending[0].at_s) if pending else 0,
        str(calls[-1]) if calls else "", ago_s(calls[-1].at_s) if calls else 0,
        sum(event.bytes for event in ended) / max(min(oldest_s, _LATELY_S), 1), flight.steps,
    )  # fmt: skip


def look() -> list[tuple[list[Rank], Iterator[str]]]:
    """The ranks of each job that run on this host and, if these are all, who waits for whom, once it is asked for."""
    named = ([flight._replace(job=_job_of(flight.pid)) for flight in flights] for flights in running())
    now_s = time.time()
    return [
        (
            [_look_at(flight, now_s) for flight in flights],
            waits(flights) if len(flights) == flights[0].size else iter(()),
        )
        for flights in merge(named)
    ]


class _Stepped(Protocol):
    """A Flight or a Rank."""

    @property
    def rank(self) -> int: ...
    @property
    def steps(self) -> Steps: ...


class Lateness(NamedTuple):
    """For how long a rank made the others wait, in the mean of its steps."""

    rank: int
    late_ns: float  # 0: others come later
    step_ns: float  # all of a step
    steps: int

    @property
    def is_late(self) -> bool:
        return self.late_ns > max(_LEAST_SHARE * self.step_ns, _LEAST_NS)

    def __str__(self) -> str:
        return f"{self.late_ns / 1e6:.3g} ms of {self.step_ns / 1e6:.3g}"


def lateness(
    flights: Sequence[_Stepped], least_steps: int = _LEAST_STEPS, apart: float = 1.1
) -> list[Lateness]:  # fmt: skip
    """Compares the totals of steps of all ranks of a job: who comes last is blocked for the least time.

    Args:
        flights: One of each rank. Instead of all their steps, ``steps`` may hold those of a while.
        least_steps: With fewer on some rank nothing is said.
        apart: How many times as many steps one rank may have as another: they are read one after another. One that has
            joined has fewer.
    Returns:
        In the order of ``flights``; nothing if these cannot be compared.
    """
    counts = [flight.steps.steps for flight in flights]
    if not counts or min(counts) < max(least_steps, 1) or max(counts) > max(apart * min(counts), min(counts) + 1):
        return []
    blocked = [flight.steps.blocked_ns / flight.steps.steps for flight in flights]
    ordered, middle = sorted(blocked), (len(blocked) - 1) // 2  # of the others, which are one fewer
    found = []
    for flight, own in zip(flights, blocked):
        others = own if len(blocked) == 1 else ordered[middle + (own <= ordered[middle])]
        step_ns = flight.steps.ns / flight.steps.steps
        found.append(Lateness(flight.rank, max(others - own, 0), step_ns, flight.steps.steps))
    return found


def _late(ranks: Sequence[_Stepped]) -> Iterator[str]:
    """Who has made the others wait, over all steps."""
    for one in lateness(ranks):
        if one.is_late:
            yield f"Rank {one.rank} has made the others wait {one} in each of {one.steps} steps."


def _in_words(ranks: Sequence[Rank], waiting: Iterable[str]) -> Iterator[str]:
    """A job's lines."""
    rows = [("rank", "pid", "last submitted", "state")]
    for one in ranks:
        last = f"{one.last}, {one.last_s:.1f} s ago" if one.last else "nothing"
        rows.append((str(one.rank), str(one.pid), printable(last), printable(str(one))))
    widths = [max(map(len, column)) for column in zip(*rows)]
    yield f"{len(ranks)} of {ranks[0].size} ranks of a job, on {ranks[0].host}:"
    for row in rows:
        yield "  " + "  ".join(word.ljust(width) for word, width in zip(row, widths)).rstrip()
    yield from (f"  {printable(line)}" for line in waiting)
    if len(ranks) == ranks[0].size:
        yield from (f"  {line}" for line in _late(ranks))


def list_jobs() -> Iterator[str]:
    """The lines of ``farandole ps``."""
    for ranks, waiting in look():
        yield from _in_words(ranks, waiting)


def _in_json(ranks: Sequence[Rank], waiting: Iterable[str]) -> dict[str, Any]:
    late = {one.rank: one for one in lateness(ranks)} if len(ranks) == ranks[0].size else {}
    said = []
    for one in ranks:
        steps = dict(zip(_TIMES, one.steps))
        mean_ms = steps["step_ns"] / steps["steps"] / 1e6 if steps["steps"] else None
        late_ms = late[one.rank].late_ns / 1e6 if late else None
        said.append({**one._asdict(), **steps, "mean_step_ms": mean_ms, "late_ms": late_ms})
    return {"size": ranks[0].size, "waits": [*waiting], "ranks": said}


def main(argv: Sequence[str]) -> int:
    """``farandole ps``. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="farandole ps", description="Lists the running ranks of this user and host, and what they do."
    )
    parser.add_argument("--json", action="store_true", help="as JSON, whose keys docs/watching.md lists")
    if parser.parse_args(argv).json:
        print(json.dumps({"host": socket.gethostname(), "jobs": [_in_json(*job) for job in look()]}))
    else:
        print("\n".join(list_jobs()) or "no ranks of this user run on this host")
    return 0
