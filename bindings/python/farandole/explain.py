"""``farandole explain``: who failed and who waits for whom, from the files of a job's flight recorders."""

from __future__ import annotations

import argparse
import pathlib
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from farandole import _flight_folder, _torch_trace
from farandole.flight import Event, Flight, UnreadableError, clock, in_words, printable, read_folder

_MOST_LINES = 20


def _error(flights: Sequence[Flight]) -> Iterator[str]:
    failed = [flight for flight in flights if flight.error]
    if not failed:
        reasons = Counter(flight.reason for flight in flights)
        yield f"No rank has ended by an error; the files were written for: {', '.join(reasons)}."
        return
    # The cause, where some ranks know no more than that another one failed.
    told = Counter((len(flight.error["ranks"]) > 0, flight.error["message"]) for flight in failed if flight.error)
    (_, message), _ = max(told.items(), key=lambda item: (item[0][0], item[1]))
    error = next(flight.error for flight in failed if flight.error and flight.error["message"] == message)
    yield f"The job ended by this error: {message}"
    of_rank = {flight.rank: flight for flight in flights}
    for rank in error["ranks"]:
        flight = of_rank.get(rank)
        last = flight and flight.last()
        if flight and last:
            call = f" (call {last.call})" if last.call else ""
            state = "had not ended" if last in flight.pending() else "had ended"
            yield (f"The last that rank {rank} (pid {flight.pid} on host {flight.host}) submitted was {last}{call}, "
                   f"at {clock(last.at_s)}; it {state}.")  # fmt: skip


def waits(flights: Sequence[Flight]) -> Iterator[str]:
    """Who waits for whom, for what, since when. Who has no file, or an older one, may well have submitted it."""
    everybody = set(range(flights[0].size))
    waiting: dict[tuple[int, str, str], dict[int, Event]] = {}
    for flight in flights:
        for event in flight.pending():
            waiting.setdefault(event.operation, {})[flight.rank] = event
    for (number, *_), events in sorted(waiting.items(), key=lambda item: min(e.at_s for e in item[1].values())):
        members = everybody
        if number:
            members = {flight.rank for flight in flights if any(event.set == number for event in flight.events)}
        first = min(events.values(), key=lambda event: event.at_s)
        known = {flight.rank for flight in flights if not flight.written_s or flight.written_s > first.at_s}
        missing, unknown = (members & known) - events.keys(), members - known - events.keys()
        has = "has" if len(events) == 1 else "have"
        which = f"for {in_words(missing)} " if missing else ""
        if not missing and not unknown:
            which = "for its end, though all have submitted it, "
        call = f" (call {first.call})" if first.call else ""
        unsure = f"; no file says whether {in_words(unknown)} submitted it" if unknown else ""
        yield f"{in_words(events).capitalize()} {has} waited {which}in {first}{call} since {clock(first.at_s)}{unsure}."


def _parting(flights: Sequence[Flight]) -> Iterator[str]:
    """Where two ranks submit what the other one never does: the first such call."""
    calls = {flight.rank: [event for event in flight.events if event.step == "submitted" and event.call]
             for flight in flights}  # fmt: skip
    calls = {rank: events for rank, events in calls.items() if events}
    if len(calls) < 2:
        return
    begin = max(events[0].call for events in calls.values())
    known = {rank: [event for event in events if event.call >= begin] for rank, events in calls.items()}
    first, *others = known
    for other in others:
        mine, theirs = _unmatched(known[first], known[other]), _unmatched(known[other], known[first])
        if mine and theirs:
            call = min(mine.call, theirs.call)
            yield (f"The order of operations first differs at call {call}: rank {first} submitted {mine} and rank "
                   f"{other} {theirs}, and neither the other's.")  # fmt: skip
            return


def _unmatched(calls: Sequence[Event], others: Sequence[Event]) -> Event | None:
    left = Counter(event.operation for event in others)
    for event in calls:
        left[event.operation] -= 1
        if left[event.operation] < 0:
            return event
    return None


def explain(flights: Sequence[Flight]) -> str:
    """Who failed and why, who waits for whom, where the ranks part, and whose file is missing."""
    waiting = list(waits(flights))
    lines = [*_error(flights), *waiting[:_MOST_LINES]]
    if len(waiting) > _MOST_LINES:
        lines.append(f"{len(waiting) - _MOST_LINES} more operations wait.")
    if waiting:
        lines += _parting(flights)
    elif all(flight.error is None for flight in flights):
        lines.append("No rank waits for another one.")
    if missing := set(range(flights[0].size)) - {flight.rank for flight in flights}:
        lines.append(f"There is no file of {in_words(missing)}.")
    return "\n".join(map(printable, lines))


def main(argv: Sequence[str]) -> int:
    """``farandole explain``. Returns the exit code: 1 if there is nothing to explain, or it cannot be read."""
    parser = argparse.ArgumentParser(
        prog="farandole explain",
        description="Says from the files in a folder who failed, who waits for whom, and where the ranks part.",
    )
    parser.add_argument(
        "folder", type=pathlib.Path, nargs="?",
        help="with the files of the job's ranks, of all its hosts; default: of the last job that left any on this host",
    )  # fmt: skip
    parser.add_argument(
        "--torch", metavar="OUT", type=pathlib.Path,
        help="also write files into OUT for python -m torch.distributed.flight_recorder.fr_trace OUT",
    )  # fmt: skip

    def warn(text: object) -> None:
        print(f"farandole explain: {printable(str(text))}", file=sys.stderr)

    arguments = parser.parse_args(argv)
    try:
        folder = arguments.folder or _flight_folder.newest()
        if folder is None:
            raise UnreadableError(f"no job has left files in {_flight_folder.folder_of_jobs()}; give the folder")
        flights = read_folder(folder, warn)
        if arguments.folder is None:
            written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(flights[0].written_s))
            print(f"The last job that left files, at {written}, in {printable(str(folder))}:")
        print(explain(flights))
        if arguments.torch:
            _torch_trace.write(flights, arguments.torch)
    except (UnreadableError, OSError) as error:
        warn(error)
        return 1
    return 0
