"""What becomes of a round whose optimizer has gone: its memory stays until it has ended.

After an exception in backward the script may drop model and optimizer and go on, while other ranks'
results are still to be written into their gradients.
"""

from __future__ import annotations

from farandole import _context, _core
from farandole.exceptions import HorovodInternalError


class OrphanedRound:
    """Keeps ``memory`` alive, by way of ``rank.in_flight``, until the ended round is over."""

    def __init__(self, rank: _context.Rank, gradients: _core.Gradients, memory: object) -> None:
        self._rank = rank
        self._gradients = gradients
        self._memory = memory
        rank.in_flight[self] = None

    def release_if_finished(self) -> bool:
        """Lets the memory go if the round is over; whether it is."""
        try:
            is_finished = self._gradients.wait(0.0)
        except (HorovodInternalError, ValueError):  # over; its failure was told already
            is_finished = True
        if is_finished:
            self._rank.in_flight.pop(self, None)
        return is_finished
