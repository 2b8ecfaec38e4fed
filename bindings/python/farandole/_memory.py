"""How long the memory of operations in flight stays alive."""

from __future__ import annotations

from typing import Any, Protocol

from farandole import _context


class _Touching(Protocol):
    def over(self) -> bool: ...


class Lent:
    """Memory that a GPU may still read or write though nobody waits for it any more.

    It stays alive, by way of ``rank.lent``, until that is over. How much there can be is
    bounded: the engine launches a batch when all but the last one or two have ended.
    """

    __slots__ = ("_rank", "_user", "_memory")

    def __init__(self, rank: _context.Rank, user: _Touching, memory: object) -> None:
        self._rank = rank
        self._user = user
        self._memory = memory
        if not user.over():
            rank.lent[self] = None

    def release_if_finished(self) -> bool:
        """Lets the memory go if it is touched no more; whether it is."""
        is_over = self._user.over()
        if is_over:
            self._rank.lent.pop(self, None)
        return is_over


def release_finished(rank: _context.Rank) -> None:
    """Lets go of the oldest memory in flight that is touched no more."""
    for held in (rank.in_flight, rank.lent):
        while (oldest := _first(held)) is not None and oldest.release_if_finished():
            pass


def _first(held: dict[Any, None]) -> Any:
    """The first key, or None. Other threads may add and remove some meanwhile."""
    while True:
        try:
            return next(iter(held), None)
        except RuntimeError:  # changed after iter() looked at it
            continue
