"""Collectives on JAX arrays, inside and outside of jit, with gradients and batches.

On arrays with values the functions do what those of :mod:`farandole` do, on any arrays. Traced by jit, grad or vmap
they become calls in the program, which XLA makes on the way. Ranks then match them by name: one that is given, or made
of where the call stands in the program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from farandole import _libraries, basics, ops
from farandole.basics import ProcessSet, global_process_set
from farandole.compression import Compression, wire_of
from farandole.jax import _names
from farandole.jax._library import run_eagerly
from farandole.jax._primitives import Call, bind

__all__ = ["Compression", "allgather", "allreduce", "alltoall", "barrier", "broadcast", "grouped_allreduce",
           "reducescatter"]  # fmt: skip


def allreduce(
    tensor: Any, name: str | None = None, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set, compression: int = Compression.none,
) -> Any:  # fmt: skip
    """Combines ``tensor`` over all ranks. The gradient of a sum is the sum of the gradients, of a mean their mean.

    Args:
        tensor: Array of any shape, the same on all ranks.
        name: The same on all ranks. None: in traced code after where the call stands, else matched by the order of
            the unnamed calls.
        op: Average (default), Sum, Min, Max or Product, of which the first two have gradients.
        prescale_factor, postscale_factor: Multiply every contribution, and the result; numbers.
        process_set: The ranks that take part, of which this one is.
        compression: One of :class:`Compression`.
    Returns:
        An array with the result, on the device of ``tensor``.
    Raises:
        MismatchError: Ranks passed different shapes, dtypes, operations or factors. In jit this and all other errors
            of the operation come as JAX's, unless within :func:`farandole.jax.errors`.
        TypeError: ``tensor`` has no usable dtype or is no array.
    """
    (result,) = _reduce([tensor], name, op, prescale_factor, postscale_factor, process_set, compression)
    return result


def grouped_allreduce(
    tensors: Sequence[Any], name: str | None = None, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set, compression: int = Compression.none,
) -> list[Any]:  # fmt: skip
    """As :func:`allreduce` of each of ``tensors``, in one operation; as many on every rank."""
    return _reduce(tensors, name, op, prescale_factor, postscale_factor, process_set, compression)


def _reduce(
    tensors: Any, name: Any, op: Any, prescale: Any, postscale: Any, process_set: Any, compression: int
) -> list[Any]:
    wire = wire_of(compression, Compression.bf16)
    how = ops.reduction_options(ops.ALLREDUCE, op, prescale, postscale, process_set, wire)
    if not _is_traced(ops.not_empty(tensors, how)):
        results: list[Any] = run_eagerly(ops.run_group, how, tensors, name)
        return results
    return bind(*_described(how, tensors, name))


def allgather(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Gathers the rows of all ranks on every rank, in rank order. The gradient of a rank's rows is the sum of all
    ranks' gradients of them.

    Args:
        tensor: Array of shape [rows, ...], of any dtype. In traced code, whose shapes are fixed, every rank has as
            many rows; else that may differ.
        name, process_set: As for :func:`allreduce`.
    Returns:
        An array of shape [sum of all rows, ...].
    Raises:
        MismatchError: Ranks passed different dtypes or dimensions after the first; or, in traced code, numbers of rows.
        ValueError: A scalar.
    """
    return _run(ops.gather_options(process_set), tensor, name)


def reducescatter(
    tensor: Any, name: str | None = None, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set, compression: int = Compression.none,
) -> Any:  # fmt: skip
    """As :func:`allreduce`, but every rank gets only its split of the result's rows: the first (rows % size) ranks get
    one row more than the others.

    Args:
        tensor: Array of shape [rows, ...], the same on all ranks.
        name, op, prescale_factor, postscale_factor, process_set, compression: As for :func:`allreduce`.
    Returns:
        An array of shape [rows of this rank, ...].
    Raises:
        MismatchError: Ranks passed different shapes, dtypes, operations or factors.
        ValueError: A scalar.
    """
    wire = wire_of(compression, Compression.bf16)
    how = ops.reduction_options(ops.REDUCESCATTER, op, prescale_factor, postscale_factor, process_set, wire)
    return _run(how, tensor, name)


def broadcast(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Copies the values of ``root_rank`` to every rank. The gradient is the sum of all ranks' at the root, and zero
    on the others.

    Args:
        tensor: Array of the same shape and dtype on all ranks, of any dtype; only the root's values matter.
        root_rank: Among all ranks, also with a process set; the same on all ranks.
        name, process_set: As for :func:`allreduce`.
    Returns:
        An array.
    Raises:
        MismatchError: Ranks passed different shapes, dtypes or roots.
        ValueError: There is no such rank.
    """
    return _run(ops.broadcast_options(root_rank, process_set), tensor, name)


def alltoall(
    tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Sends a slice of this rank's rows to each rank, and receives a slice from each.

    Args:
        tensor: Array of shape [rows, ...], of any dtype: the first rows go to rank 0, the next to rank 1, and so on.
        splits: As for :func:`farandole.alltoall`; in traced code None: as many rows to each rank.
        name, process_set: As for :func:`allreduce`.
    Returns:
        The received rows, in rank order. With ``splits`` also how many came from each rank.
    Raises:
        ValueError: ``splits`` do not fit; a scalar; rows that are no multiple of the number of ranks.
    """
    if splits is None:
        return _run(ops.exchange_options(process_set), tensor, name)
    if _is_traced([tensor]):
        raise ValueError(
            "alltoall: in traced code, whose shapes are fixed, splits must be None; call it outside of jit, or pad"
        )
    return run_eagerly(ops.alltoall, tensor, splits, name, process_set)


def barrier(values: Any = None, process_set: ProcessSet = global_process_set) -> Any:
    """Returns ``values`` when every rank of the process set has called it.

    Args:
        values: A pytree of arrays. In traced code the barrier comes after what they are computed of and before what
            is computed of the result; without a use of the result it is left out.
        process_set: As for :func:`allreduce`.
    Raises:
        ValueError: No values in traced code.
    """
    if not _is_traced(jax.tree.leaves(values)):
        run_eagerly(ops.barrier, process_set)
        return values
    if not jax.tree.leaves(values):
        raise ValueError("barrier: in traced code pass values, and go on with what it returns: x = barrier(x)")
    uid = basics.uid_of(process_set, "barrier")
    rank, size = basics.current().core.rank_and_size(uid)
    call = Call(ops.BARRIER, _names.of_call_site("barrier"), set=uid, rank=rank, size=size)
    (passed,) = bind([jnp.asarray(leaf) for leaf in jax.tree.leaves(values)], call)
    return jax.lax.optimization_barrier((values, passed))[0]


def _is_traced(tensors: Sequence[Any]) -> bool:
    """Whether one is a tracer, or what is computed here becomes a part of a program, whatever it is computed of."""
    if any(isinstance(tensor, jax.core.Tracer) for tensor in tensors):
        return True
    return _names.is_tracing() and isinstance(jnp.zeros(()), jax.core.Tracer)


def _run(how: Any, tensor: Any, name: str | None) -> Any:
    """A collective on one array."""
    if not _is_traced([tensor]):
        return run_eagerly(ops.run, how, tensor, name)
    (result,) = bind(*_described(how, [tensor], name))
    return result


def _described(how: Any, tensors: Sequence[Any], name: str | None) -> tuple[list[Any], Call]:
    """What the primitive takes.

    Raises:
        TypeError: An array has no usable dtype.
        ValueError: A scalar where rows are needed, or rows that cannot be shared out.
    """
    arrays = [jnp.asarray(tensor) for tensor in tensors]
    moves_bytes = how.kind not in ops.REDUCING
    rank, size = basics.current().core.rank_and_size(how.set)
    for array in arrays:
        _libraries.check_name(str(array.dtype), moves_bytes)
        _check_rows(how, array.shape, size)
    call = Call(
        how.kind, _names.of_call_site(how.function) if name is None else name, how.op, how.prescale, how.postscale,
        how.root, how.wire, how.set, rank, size,
    )  # fmt: skip
    return arrays, call


def _check_rows(how: Any, shape: Sequence[int], size: int) -> None:
    if how.kind in ops.BY_ROWS and not shape:
        raise ValueError(f"{how.function}: a scalar has no rows; pass an array of one dimension or more")
    if how.kind == ops.ALLTOALL and shape[0] % size != 0:
        raise ValueError(
            f"alltoall: {shape[0]} rows of an array of shape {list(shape)} cannot be split evenly among {size} ranks"
        )
