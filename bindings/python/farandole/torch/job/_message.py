"""What the ranks tell each other with each step: one sum of float64, in which small integers are exact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

_HALF = 32
_LOW = (1 << _HALF) - 1
_PART_BITS, _PARTS = 16, 4  # of a digest of 64 bits
_NAMES_BITS = 20


class Notes(NamedTuple):
    """What a rank tells besides sums, or what all ranks together told.

    Attributes:
        is_late: A gradient came after its bucket was sent: the step runs again.
        stops, leaves, changes: Somebody wants to stop all ranks, to leave, to join.
        durable: Rank 0's last step in a checkpoint, else -1; other ranks give -1.
        names: Of the metrics, a hash. Summed: 1 if all ranks have the same, else 0.
        digest: Of the last step's results. Summed: 1 if all ranks have the same, else 0.
    """

    is_late: int
    stops: int
    leaves: int
    changes: int
    durable: int
    names: int
    digest: int


_NUMBERS = 5
_LENGTH = _NUMBERS + 2 + 2 * _PARTS


def encode(notes: Notes, present: Sequence[int], integers: Sequence[int], sums: torch.Tensor) -> torch.Tensor:
    """The vector to sum over the ranks.

    Args:
        present: 0 or 1 for each parameter.
        integers: What slot 0 made of them; 0 on the ranks that do not have it. Up to 64 bits, signed.
        sums: To be summed as they are.
    """
    numbers: list[float] = [*notes[:_NUMBERS]]
    numbers[_NUMBERS - 1] += 1
    numbers += _squared(notes.names & (1 << _NAMES_BITS) - 1)
    for part in range(_PARTS):
        numbers += _squared(notes.digest >> part * _PART_BITS & (1 << _PART_BITS) - 1)
    numbers += present
    for integer in integers:
        numbers += (integer >> _HALF, integer & _LOW)
    return torch.cat([torch.tensor(numbers, dtype=torch.float64), sums])


def decode(
    total: torch.Tensor, size: int, parameters: int, integers: int
) -> tuple[Notes, list[int], list[int], torch.Tensor]:
    """The notes, how many ranks have each gradient, the integers, and the sums, of ``size`` ranks."""
    count = _LENGTH + parameters + 2 * integers
    numbers = [int(number) for number in total[:count].tolist()]
    durable = numbers[_NUMBERS - 1] - 1
    is_same = [_is_same(numbers[at], numbers[at + 1], size) for at in range(_NUMBERS, _LENGTH, 2)]
    late, stops, leaves, changes = numbers[: _NUMBERS - 1]
    notes = Notes(late, stops, leaves, changes, durable, is_same[0], all(is_same[1:]))
    halves = numbers[_LENGTH + parameters :]
    whole = [(high << _HALF) + low for high, low in zip(halves[::2], halves[1::2], strict=True)]
    return notes, numbers[_LENGTH : _LENGTH + parameters], whole, total[count:]


def _squared(number: int) -> tuple[int, int]:
    """A number, of whose sums :func:`_is_same` tells whether all ranks have the same."""
    return number, number * number


def _is_same(total: int, of_squares: int, size: int) -> bool:
    """By the inequality of Cauchy and Schwarz, in which equality holds for equal numbers alone."""
    return size * of_squares == total * total
