"""How tensors are cut into rows: along their first dimension."""

from __future__ import annotations

from collections.abc import Sequence

from farandole import _context


def check_rows(shape: Sequence[int], function: str) -> tuple[int, ...]:
    """``shape`` as a tuple; ValueError for a scalar, which has no rows."""
    if not len(shape):
        raise ValueError(
            f"{function} does not support scalar inputs: a scalar has no rows; reshape it to [1]"
        )
    return tuple(shape)


def own_part(shape: Sequence[int]) -> tuple[int, ...]:
    """What of a tensor of this shape a reducescatter leaves to this rank: the first
    (rows % size) ranks have one row more than the others. ValueError for a scalar."""
    rows, *row = check_rows(shape, "reducescatter")
    topology = _context.current().topology
    few, left_over = divmod(rows, topology.size)
    return (few + (topology.rank < left_over), *row)
