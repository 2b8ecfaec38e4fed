"""Collectives on NumPy arrays and on whatever speaks the buffer protocol or DLPack.

Arrays on an NVIDIA GPU (CuPy's and others with ``__cuda_array_interface__`` or DLPack) are reduced
and broadcast where they are, as ``farandole.torch`` does it with torch's: in order with their
streams, without the host waiting for the end. Results are of the array's own kind.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from farandole import _cuda_arrays, _gather, _work
from farandole._work import Call, Handle, Parameters

Array = npt.NDArray[Any]


def allreduce(
    tensor: Any,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Array:
    """Combines ``tensor`` over all ranks.

    Args:
        tensor: Array of any shape, the same on all ranks; a strided one is copied. Other objects
            are read through the buffer protocol or DLPack. On a GPU it must be C-contiguous.
        name: The same on all ranks; None: matched by the order of the unnamed calls.
        op: Average (default), Sum, Min, Max or Product. Averages of integers are exact, then
            truncate toward zero; bool knows Min, Max and Product.
        prescale_factor: Multiplies every contribution.
        postscale_factor: Multiplies the result.
    Returns:
        A new array with the result, bitwise the same on all ranks of a host; on a GPU of the same
        library as the given one.
    Raises:
        MismatchError: Ranks passed different shapes, dtypes, operations or factors.
        TypeError: ``tensor`` has no usable dtype or is no array.
    """
    return _work.run(_allreduce(tensor, name, op, prescale_factor, postscale_factor))


def allreduce_async(
    tensor: Any,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """As :func:`allreduce`; ``synchronize`` the handle. Leave ``tensor`` alone until then."""
    return _work.start(_allreduce(tensor, name, op, prescale_factor, postscale_factor))


def allreduce_(
    tensor: Any,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """As :func:`allreduce`, in place: writable C-contiguous memory. Returns ``tensor``."""
    return _work.run(_allreduce_(tensor, name, op, prescale_factor, postscale_factor))


def allreduce_async_(
    tensor: Any,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """As :func:`allreduce_`; ``synchronize`` the handle, which gives ``tensor``."""
    return _work.start(_allreduce_(tensor, name, op, prescale_factor, postscale_factor))


def broadcast(tensor: Any, root_rank: int, name: str | None = None) -> Array:
    """Gives every rank the values of ``root_rank``.

    Args:
        tensor: Array of the same shape and dtype on all ranks; only the root's values matter.
        root_rank: 0 <= root_rank < size(), the same on all ranks.
        name: As for :func:`allreduce`.
    Returns:
        A new array.
    Raises:
        MismatchError: Ranks passed different shapes, dtypes or roots.
        ValueError: There is no such rank.
    """
    return _work.run(_broadcast(tensor, root_rank, name))


def broadcast_async(tensor: Any, root_rank: int, name: str | None = None) -> Handle:
    """As :func:`broadcast`; ``synchronize`` the handle."""
    return _work.start(_broadcast(tensor, root_rank, name))


def broadcast_(tensor: Any, root_rank: int, name: str | None = None) -> Any:
    """As :func:`broadcast`, in place: writable C-contiguous memory. Returns ``tensor``."""
    return _work.run(_broadcast_(tensor, root_rank, name))


def broadcast_async_(tensor: Any, root_rank: int, name: str | None = None) -> Handle:
    """As :func:`broadcast_`; ``synchronize`` the handle, which gives ``tensor``."""
    return _work.start(_broadcast_(tensor, root_rank, name))


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
    return _gather.run([_piece(tensor)], name).tensors[0]


def allgather_async(tensor: Any, name: str | None = None) -> Handle:
    """As :func:`allgather`; ``synchronize`` the handle. Leave ``tensor`` alone until then."""
    return _gather.start([_piece(tensor)], name, lambda gathered: gathered.tensors[0])


def _piece(tensor: Any) -> _gather.Piece:
    if _cuda_arrays.is_on_gpu(tensor):
        raise TypeError("allgather takes arrays in host memory; on a GPU farandole.torch gathers")
    array = np.asarray(_as_array(tensor))
    shape = _gather.check_rows(array.shape)
    source = np.ascontiguousarray(array)

    def allocate(shape: tuple[int, ...]) -> tuple[Array, int]:
        result = np.empty(shape, source.dtype)
        return result, result.ctypes.data

    address = source.ctypes.data if source.size else None
    return _gather.Piece(_dtype_number(source), shape, address, source.itemsize, allocate, source)


def _allreduce(
    tensor: Any, name: str | None, op: int | None, prescale: float, postscale: float
) -> Call:
    return _new(_reduction(op, prescale, postscale), tensor, name)


def _allreduce_(
    tensor: Any, name: str | None, op: int | None, prescale: float, postscale: float
) -> Call:
    return _in_place(_reduction(op, prescale, postscale), tensor, name, "allreduce")


def _broadcast(tensor: Any, root_rank: int, name: str | None) -> Call:
    return _new(_root(root_rank), tensor, name)


def _broadcast_(tensor: Any, root_rank: int, name: str | None) -> Call:
    return _in_place(_root(root_rank), tensor, name, "broadcast")


def _reduction(op: int | None, prescale: float, postscale: float) -> Parameters:
    return Parameters(_work.ALLREDUCE, _work.reduction(op), prescale, postscale)


def _root(root_rank: int) -> Parameters:
    return Parameters(_work.BROADCAST, root=_work.check_root(root_rank))


def _new(parameters: Parameters, tensor: Any, name: str | None) -> Call:
    if _cuda_arrays.is_on_gpu(tensor):
        function = "broadcast" if parameters.kind == _work.BROADCAST else "allreduce"
        received = _cuda_arrays.empty_like(tensor, function)
        given, landing = (_cuda_arrays.read(t, function) for t in (tensor, received))
        return _gpu_call(parameters, given, landing, received, name)
    source = np.asarray(_as_array(tensor), order="C")
    result = np.empty_like(source, order="C", subok=False)
    return _call(parameters, source, result, result, name)


def _in_place(parameters: Parameters, tensor: Any, name: str | None, function: str) -> Call:
    if _cuda_arrays.is_on_gpu(tensor):
        on_gpu = _cuda_arrays.read_mutable(tensor, function)
        return _gpu_call(parameters, on_gpu, on_gpu, tensor, name)
    array = _as_writable_array(tensor, function)
    return _call(parameters, array, array, tensor, name)


def _call(
    parameters: Parameters, source: Array, result: Array, answer: Any, name: str | None
) -> Call:
    description = (None, _dtype_number(source), source.shape)
    inputs, outputs = (_bytes_of(source),), (_bytes_of(result),)
    memory = (source, result)
    return Call(parameters, name, (description,), inputs, outputs, memory, lambda: answer)


def _gpu_call(
    parameters: Parameters,
    source: _cuda_arrays.GpuArray,
    result: _cuda_arrays.GpuArray,
    answer: Any,
    name: str | None,
) -> Call:
    description = (None, source.dtype, source.shape)
    inputs, outputs = (source.address,), (result.address,)
    memory = (source.memory, result.memory)
    return Call(
        parameters, name, (description,), inputs, outputs, memory, lambda: answer,
        place=source.place,
    )  # fmt: skip


def _bytes_of(array: Array) -> Array | None:
    """The array as the buffer protocol knows it (it knows no bfloat16); None when empty."""
    if array.size == 0:
        return None
    return array if array.dtype.kind in "biuf" else array.reshape(-1).view(np.uint8)


def _dtype_number(array: Array) -> int:
    number = _work.DTYPES.get(array.dtype.name)
    if number is None or not array.dtype.isnative:
        raise TypeError(f"dtype {array.dtype!r} is not supported; use one of {list(_work.DTYPES)}")
    return number


def _as_array(tensor: Any) -> Array:
    """``tensor`` as an array over the same memory."""
    if isinstance(tensor, np.ndarray):
        return tensor
    try:
        return np.asarray(memoryview(tensor))
    except TypeError:
        pass
    if hasattr(tensor, "__dlpack__"):
        return np.from_dlpack(tensor)
    raise TypeError(
        f"{type(tensor).__name__} has neither the buffer protocol nor DLPack; "
        "pass numpy.asarray(...) of it"
    )


def _as_writable_array(tensor: Any, function: str) -> Array:
    array = _as_array(tensor)
    if not isinstance(tensor, np.ndarray) and _is_foreign(tensor):
        raise TypeError(
            f"{function}_ cannot know that {type(tensor).__name__} may be changed in place; "
            f"use {function}"
        )
    if not array.flags.writeable and hasattr(tensor, "numpy"):  # NumPy < 2.1: DLPack is read-only
        array = tensor.numpy()
    if not array.flags.c_contiguous or not array.flags.writeable:
        raise ValueError(
            f"{function}_ needs writable C-contiguous memory; got shape {array.shape}, strides "
            f"{array.strides}, C-contiguous: {array.flags.c_contiguous}, writable: "
            f"{array.flags.writeable}; {function} returns a new array instead"
        )
    return array


def _is_foreign(tensor: Any) -> bool:
    """Reached through DLPack only and not known to be mutable: a framework may cache its values."""
    try:
        memoryview(tensor)
        return False
    except TypeError:
        return type(tensor).__module__.partition(".")[0] not in ("torch", "cupy")
