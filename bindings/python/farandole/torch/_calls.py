"""Calls of collectives without a name of the user's: those of a group of torch.distributed, and of ``ddp_hook``."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

from farandole import _core
from farandole.ops import RAW

#: Calls of one kind that may be in flight at a time; one more waits.
MOST_IN_FLIGHT = 64
#: Kinds that are known at a time.
MOST_KINDS = 1024


class Kind:
    """Calls with the same options that ranks match by their text and by their order.

    Thread safety: any thread.
    """

    __slots__ = ("_count", "_names", "_text", "options")

    def __init__(self, options: _core.Options, text: str, count: Iterator[int]) -> None:
        self.options, self._text, self._count = options, text, count
        self._names: list[str | None] = [None] * MOST_IN_FLIGHT

    def name(self) -> str:
        """Of the next call: the text and a number, which begins again after MOST_IN_FLIGHT calls."""
        number = next(self._count) % MOST_IN_FLIGHT
        name = self._names[number]
        if name is None:
            name = self._names[number] = f"{self._text} {number}"
        return name


class Calls:
    """The kinds of calls of one job. At the first call of one kind too many all are forgotten, and their numbers begin
    again: on all ranks at the same call, as these make their calls in one order.

    Thread safety: any thread.
    """

    def __init__(self) -> None:
        self._kinds: dict[Any, Kind] = {}  # by what a rank makes the text of: ranks may differ in that
        self._counts: dict[str, Iterator[int]] = {}  # by text

    def find(self, key: Any) -> Kind | None:
        return self._kinds.get(key)

    def add(self, key: Any, options: _core.Options, text: str) -> Kind:
        if text not in self._counts and len(self._counts) >= MOST_KINDS:
            self._kinds, self._counts = {}, {}
        if len(self._kinds) >= MOST_KINDS:
            self._kinds = {}  # those in use are made again
        count = self._counts.setdefault(text, itertools.count())
        return self._kinds.setdefault(key, Kind(options, text, count))


def start(
    core: _core.Context, options: _core.Options, name: str, tensors: Any, how: int, splits: Any = None,
    into: Any = None, rows: Sequence[int] = (),
) -> Any:  # fmt: skip
    """Starts an operation once none of its name is in flight."""
    finish = _with_numbers if rows and into is None else None
    if into is None:
        rows = ()
    is_last = False
    while True:
        try:
            return core.submit(options, tensors, name, how | RAW, finish, None, None, splits, into, rows)
        except ValueError:
            if is_last:
                raise
        is_last = not core.is_in_flight(name)  # another mistake, or it has just ended
        while core.is_in_flight(name):
            time.sleep(0.0001)


def _with_numbers(rows: Any, numbers: Any) -> tuple[Any, Any]:
    """Of an allgather or alltoall: what came, and how much of it from each rank; in a group lists of these."""
    return rows, numbers
