"""Allgather and alltoall of NumPy arrays and of whatever speaks the buffer protocol or DLPack.

In host memory alone: ``farandole.torch`` has them for a GPU's tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from farandole import _arrays, _core, _cuda_arrays, _work
from farandole._arrays import Array
from farandole._rows import check_rows, rows_to_each
from farandole._work import Call, Handle, Parameters


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
    return _work.run(_gather(tensor, name))


def allgather_async(tensor: Any, name: str | None = None) -> Handle:
    """As :func:`allgather`; ``synchronize`` the handle. Leave ``tensor`` alone until then."""
    return _work.start(_gather(tensor, name))


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
    return _work.run(_exchange(tensor, splits, name, gives_splits=splits is not None))


def alltoall_async(
    tensor: Any, splits: npt.ArrayLike | None = None, name: str | None = None
) -> Handle:
    """As :func:`alltoall`; ``synchronize`` the handle, which always gives both, the rows that came
    and how many from each rank. Leave ``tensor`` alone until then."""
    return _work.start(_exchange(tensor, splits, name, gives_splits=True))


def _gather(tensor: Any, name: str | None) -> Call:
    source = _source(tensor, "allgather")
    return _call(Parameters(_work.ALLGATHER), source, name, lambda result: _rows(result, source))


def _exchange(tensor: Any, splits: Any, name: str | None, gives_splits: bool) -> Call:
    source = _source(tensor, "alltoall")
    parameters = Parameters(_work.ALLTOALL, splits=rows_to_each(splits, source.shape[0]))

    def finish(result: _core.Result) -> Array | tuple[Array, Array]:
        rows = _rows(result, source)
        return (rows, np.array(result.rows, np.int64)) if gives_splits else rows

    return _call(parameters, source, name, finish)


def _source(tensor: Any, function: str) -> Array:
    if _cuda_arrays.is_on_gpu(tensor):
        raise TypeError(f"{function} takes arrays in host memory; on a GPU use farandole.torch")
    array = np.asarray(_arrays.as_array(tensor))
    check_rows(array.shape, function)
    return np.ascontiguousarray(array)


def _call(
    parameters: Parameters, source: Array, name: str | None, finish: Callable[..., Any]
) -> Call:
    description = (None, _arrays.dtype_number(source), source.shape)
    return Call(
        parameters, name, (description,), (_arrays.bytes_of(source),), None, source, finish
    )


def _rows(result: _core.Result, like: Array) -> Array:
    """What came, over the result's memory."""
    return np.ndarray((sum(result.rows), *like.shape[1:]), like.dtype, result)
