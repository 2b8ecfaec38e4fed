"""Collectives on NumPy arrays and on whatever speaks the buffer protocol or DLPack.

Arrays on an NVIDIA GPU (CuPy's and others with ``__cuda_array_interface__`` or DLPack) are reduced
and broadcast where they are, as ``farandole.torch`` does it with torch's: in order with their
streams, without the host waiting for the end. Results are of the array's own kind.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from farandole import _arrays, _cuda_arrays, _work
from farandole._arrays import Array
from farandole._rows import own_part
from farandole._work import Call, Handle, Parameters


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


def reducescatter(
    tensor: Any,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Array:
    """As :func:`allreduce`, but every rank gets a part of the result's rows only.

    Args:
        tensor: Array of shape [rows, ...], the same on all ranks.
        name: As for :func:`allreduce`.
        op: As for :func:`allreduce`.
        prescale_factor: Multiplies every contribution.
        postscale_factor: Multiplies the result.
    Returns:
        A new array of shape [rows of this rank, ...]: the parts lie in rank order in what an
        allreduce gives, and the first (rows % size) ranks get one row more than the others.
    Raises:
        MismatchError: Ranks passed different shapes, dtypes, operations or factors.
        ValueError: A scalar.
        TypeError: ``tensor`` has no usable dtype or is no array.
    """
    return _work.run(_reducescatter(tensor, name, op, prescale_factor, postscale_factor))


def reducescatter_async(
    tensor: Any,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """As :func:`reducescatter`; ``synchronize`` the handle. Leave ``tensor`` alone until then."""
    return _work.start(_reducescatter(tensor, name, op, prescale_factor, postscale_factor))


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


def _reducescatter(
    tensor: Any, name: str | None, op: int | None, prescale: float, postscale: float
) -> Call:
    parameters = Parameters(_work.REDUCESCATTER, _work.reduction(op), prescale, postscale)
    return _new(parameters, tensor, name)


def _reduction(op: int | None, prescale: float, postscale: float) -> Parameters:
    return Parameters(_work.ALLREDUCE, _work.reduction(op), prescale, postscale)


def _root(root_rank: int) -> Parameters:
    return Parameters(_work.BROADCAST, root=_work.check_root(root_rank))


def _new(parameters: Parameters, tensor: Any, name: str | None) -> Call:
    if _cuda_arrays.is_on_gpu(tensor):
        function = _work.KINDS[parameters.kind]
        given = _cuda_arrays.read(tensor, function)
        received = _cuda_arrays.empty(tensor, function, _result_shape(parameters, given.shape))
        landing = _cuda_arrays.read(received, function)
        return _gpu_call(parameters, given, landing, received, name)
    source = np.asarray(_arrays.as_array(tensor), order="C")
    result = np.empty(_result_shape(parameters, source.shape), source.dtype)
    return _call(parameters, source, result, result, name)


def _result_shape(parameters: Parameters, shape: tuple[int, ...]) -> tuple[int, ...]:
    return own_part(shape) if parameters.kind == _work.REDUCESCATTER else shape


def _in_place(parameters: Parameters, tensor: Any, name: str | None, function: str) -> Call:
    if _cuda_arrays.is_on_gpu(tensor):
        on_gpu = _cuda_arrays.read_mutable(tensor, function)
        return _gpu_call(parameters, on_gpu, on_gpu, tensor, name)
    array = _arrays.as_writable_array(tensor, function)
    return _call(parameters, array, array, tensor, name)


def _call(
    parameters: Parameters, source: Array, result: Array, answer: Any, name: str | None
) -> Call:
    description = (None, _arrays.dtype_number(source), source.shape)
    inputs, outputs = (_arrays.bytes_of(source),), (_arrays.bytes_of(result),)
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
