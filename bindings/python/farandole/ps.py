"""``farandole ps``: the running ranks of a host, and what they do, from the memory of their flight recorders."""

from __future__ import annotations

import argparse
import pathlib
import time
from collections.abc import Iterator, Sequence

from farandole.explain import waits
from farandole.flight import Flight, printable, running

_LEAST_SHARE, _LEAST_NS = 0.05, 1e6  # of a step, as coordinator/diagnosis/late_ranks.cc has it
_LEAST_STEPS = 20


def _state(flight: Flight, now_s: float) -> str:
    """What the rank's process does, or what it waits in."""
    try:
        letter = pathlib.Path(f"/proc/{flight.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        letter = "Z"
    if letter in "ZX":
        return "ended"
    if letter in "Tt":
        return "stopped"
    if any(event.step == "failed" for event in flight.events):
        return "failed"
    if waiting := flight.pending():
        return f"waits in {waiting[0]} for {max(now_s - waiting[0].at_s, 0):.1f} s"
    return "running"


def _late(flights: Sequence[Flight]) -> Iterator[str]:
    """Who has made the others wait, over all steps: who comes last is blocked for the least time. The counts of ranks
    that are read one after another, or that have joined, differ."""
    counts = [flight.steps.steps for flight in flights]
    if min(counts) < _LEAST_STEPS or max(counts) > 1.1 * min(counts):
        return
    blocked = [flight.steps.blocked_ns / flight.steps.steps for flight in flights]
    for number, flight in enumerate(flights):
        others = sorted(blocked[:number] + blocked[number + 1 :])
        late_ns, step_ns = others[len(others) // 2] - blocked[number] if others else 0, flight.steps.ns / counts[number]
        if late_ns > max(_LEAST_SHARE * step_ns, _LEAST_NS):
            each = f"{late_ns / 1e6:.3g} ms of {step_ns / 1e6:.3g}"
            yield f"Rank {flight.rank} has made the others wait {each} in each of {counts[number]} steps."


def list_jobs() -> Iterator[str]:
    """The lines of ``farandole ps``."""
    now_s = time.time()
    for flights in running():
        rows = [("rank", "pid", "last submitted", "state")]
        for flight in flights:
            last = flight.last()
            what = f"{last}, {max(now_s - last.at_s, 0):.1f} s ago" if last else "nothing"
            rows.append((str(flight.rank), str(flight.pid), printable(what), printable(_state(flight, now_s))))
        widths = [max(map(len, column)) for column in zip(*rows)]
        yield f"{len(flights)} of {flights[0].size} ranks of a job, on {flights[0].host}:"
        for row in rows:
            yield "  " + "  ".join(word.ljust(width) for word, width in zip(row, widths)).rstrip()
        if len(flights) == flights[0].size:
            yield from (f"  {printable(line)}" for line in (*waits(flights), *_late(flights)))


def main(argv: Sequence[str]) -> int:
    """``farandole ps``. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="farandole ps", description="Lists the running ranks of this user and host, and what they do."
    )
    parser.parse_args(argv)
    print("\n".join(list_jobs()) or "no ranks of this user run on this host")
    return 0
