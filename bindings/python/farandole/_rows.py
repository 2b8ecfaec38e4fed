"""How tensors are cut into rows: along their first dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

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


def rows_to_each(splits: Any, rows: int) -> tuple[int, ...]:
    """How many rows go to each rank.

    Args:
        splits: Integers, one per rank, as a sequence or an array; what they leave over of the rows
            goes nowhere. None: the same number to each rank.
        rows: Of the tensor.
    Raises:
        ValueError: They do not fit.
    """
    size = _context.current().topology.size
    if splits is None:
        if rows % size != 0:
            raise ValueError(
                "alltoall: splits not provided, but first dimension of tensor is not an even "
                f"multiple of the number of workers: {rows} rows for {size} ranks"
            )
        return (rows // size,) * size
    numbers = _as_array(splits)
    if numbers.ndim != 1:
        raise ValueError(
            f"alltoall expects a 1D splits tensor, one number per rank; got shape {numbers.shape}"
        )
    if len(numbers) != size:
        raise ValueError(
            "alltoall: Number of entries in splits does not equal number of workers: "
            f"{len(numbers)} for {size} ranks"
        )
    if numbers.dtype.kind not in "iu":
        raise ValueError(f"alltoall expects splits to contain integers, not {numbers.dtype}")
    sends: list[int] = numbers.tolist()
    if min(sends) < 0:
        raise ValueError(f"alltoall: splits must not be negative: {sends}")
    if sum(sends) > rows:
        raise ValueError(
            "alltoall: Sum of splits entries is greater than the first dimension of tensor: "
            f"{sends} for {rows} rows"
        )
    return tuple(sends)


def _as_array(splits: Any) -> npt.NDArray[Any]:
    """``splits`` as NumPy sees them.

    Raises:
        ValueError: They are no sequence of numbers and no array.
    """
    try:
        numbers = np.asarray(splits)
    except ValueError:  # of unequal lengths
        numbers = np.asarray(None)
    if numbers.dtype.kind in "OSU":
        raise ValueError(
            "alltoall expects splits as a sequence or an array of integers, one per rank; got "
            f"{splits!r:.80}"
        )
    return numbers
