"""How long the memory of rounds stays alive that nobody waits for any more.

On a GPU a round was waited for when it is in a stream, and its memory is in use for a little longer.
And after an exception in backward the script may drop model and optimizer and go on, while other
ranks' results are still to be written into their gradients.
"""

from __future__ import annotations

import collections

from farandole import _context, _core, _memory
from farandole.exceptions import HorovodInternalError


class LentRounds:
    """The memory of rounds that were waited for. Thread safety: as the rounds themselves."""

    def __init__(self, rank: _context.Rank) -> None:
        self._rank = rank
        self._memory: collections.deque[tuple[int, object]] = collections.deque()

    def keep(self, gradients: _core.Gradients, memory: object) -> None:
        """Keeps the memory of the round last waited for, until :meth:`let_go` finds it over."""
        waited, _ = gradients.rounds()
        self._memory.append((waited, memory))

    def let_go(self, gradients: _core.Gradients | None) -> None:
        """Lets go of the rounds that are over; all of them were rounds of ``gradients``."""
        if not self._memory or gradients is None:
            return
        _, over = gradients.rounds()
        while self._memory and self._memory[0][0] <= over:
            self._memory.popleft()

    def hand_over(self, gradients: _core.Gradients | None) -> None:
        """Leaves it to the context, where nobody else uses ``gradients`` from now on."""
        memory, self._memory = self._memory, collections.deque()
        if memory and gradients is not None:
            _memory.Lent(self._rank, gradients, memory)


class OrphanedRound:
    """Keeps ``memory`` alive, by way of ``rank.in_flight``, until the ended round is over."""

    def __init__(self, rank: _context.Rank, gradients: _core.Gradients, memory: object) -> None:
        self._rank = rank
        self._gradients = gradients
        self._memory = memory
        self._has_ended = False
        rank.in_flight[self] = None

    def release_if_finished(self) -> bool:
        """Lets the memory go if the round is over; whether it is."""
        try:
            self._has_ended = self._has_ended or self._gradients.wait(0.0)
        except (HorovodInternalError, ValueError):  # ended; its failure was told already
            self._has_ended = True
        is_over = self._has_ended and self._gradients.over()
        if is_over:
            self._rank.in_flight.pop(self, None)
        return is_over
