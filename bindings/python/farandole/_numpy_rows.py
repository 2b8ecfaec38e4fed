"""Allgather and alltoall of NumPy arrays and of whatever speaks the buffer protocol or DLPack.

In host memory alone: ``farandole.torch`` has them for a GPU's tensors.
"""

from __future__ import annotations

from typing import Any, overload

import numpy as np
import numpy.typing as npt

from farandole import _alltoall, _arrays, _cuda_arrays, _gather
from farandole._arrays import Array
from farandole._rows import check_rows
from farandole._two_steps import Piece
from farandole._work import Handle


def allgather(tensor: Any, name: str | None = None) -> Array:
    """Gives every rank the rows of all ranks, in rank order.

    Args:
        tensor: Array of shape [rows, ...]: the number of rows may differ between ranks and be 0,
            the other dimensions and the dtype may not.
        name: The same on all ranks; None: matched by the order of the unnamed calls.
    Returns:
        A new array of shape [sum of all rows, ...].
    Raises:
        MismatchError: Ranks passed different dtypes or dimensions after the first.
        ValueError: A scalar; the name is in flight already.
    """
    pieces = [_piece(tensor, "allgather")]
    return _gather.run(pieces, name, lambda gathered: gathered.tensors[0])


def allgather_async(tensor: Any, name: str | None = None) -> Handle:
    """As :func:`allgather`; ``synchronize`` the handle. Leave ``tensor`` alone until then."""
    pieces = [_piece(tensor, "allgather")]
    return _gather.start(pieces, name, lambda gathered: gathered.tensors[0])


@overload
def alltoall(tensor: Any, splits: None = None, name: str | None = None) -> Array: ...


@overload
def alltoall(
    tensor: Any, splits: npt.ArrayLike, name: str | None = None
) -> tuple[Array, Array]: ...


def alltoall(
    tensor: Any, splits: npt.ArrayLike | None = None, name: str | None = None
) -> Array | tuple[Array, Array]:
    """Gives every rank a part of this rank's rows, and this rank a part of everybody's.

    Args:
        tensor: Array of shape [rows, ...]: the first rows go to rank 0, the next to rank 1, and so
            on. The dimensions after the first and the dtype are the same on all ranks.
        splits: Integers, how many rows go to each rank; what they leave over goes nowhere. None:
            the same number to each, of which the rows must be a multiple.
        name: The same on all ranks; None: matched by the order of the unnamed calls.
    Returns:
        A new array with the rows that came, in rank order. With ``splits`` also how many came from
        each rank: int64 [size].
    Raises:
        MismatchError: Ranks passed different dtypes or dimensions after the first.
        ValueError: ``splits`` do not fit; a scalar; the name is in flight already.
        HorovodInternalError: On all ranks, if one has joined.
    """
    piece, sends = _exchange(tensor, splits)
    finish = _output if splits is None else _both
    return _alltoall.run(piece, sends, name, finish)


def alltoall_async(
    tensor: Any, splits: npt.ArrayLike | None = None, name: str | None = None
) -> Handle:
    """As :func:`alltoall`; ``synchronize`` the handle, which always gives both, the rows that came
    and how many from each rank. Leave ``tensor`` alone until then."""
    piece, sends = _exchange(tensor, splits)
    return _alltoall.start(piece, sends, name, _both)


def _exchange(tensor: Any, splits: Any) -> tuple[Piece, list[int]]:
    piece = _piece(tensor, "alltoall")
    return piece, _alltoall.rows_to_each(splits, piece.shape[0])


def _output(received: _alltoall.Received) -> Array:
    return received.tensor


def _both(received: _alltoall.Received) -> tuple[Array, Array]:
    return received.tensor, np.array(received.splits, np.int64)


def _piece(tensor: Any, function: str) -> Piece:
    if _cuda_arrays.is_on_gpu(tensor):
        raise TypeError(f"{function} takes arrays in host memory; on a GPU use farandole.torch")
    array = np.asarray(_arrays.as_array(tensor))
    shape = check_rows(array.shape, function)
    source = np.ascontiguousarray(array)

    def allocate(shape: tuple[int, ...]) -> tuple[Array, int | None]:
        result = np.empty(shape, source.dtype)
        return result, _address(result)

    number = _arrays.dtype_number(source)
    return Piece(number, shape, _address(source), allocate, source)


def _address(array: Array) -> int | None:
    return array.ctypes.data if array.size else None
