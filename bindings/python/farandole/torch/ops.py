"""Collectives on torch tensors, with Horovod's names, arguments and gradients.

Tensors are in host memory or on one NVIDIA GPU and have any strides; what is not contiguous is
copied. The blocking functions that return a new tensor are differentiable, with Horovod's gradients,
which are collectives themselves: every rank runs backward through them. Asynchronous and in-place ones
take tensors by value, and no gradient flows through them.

On a GPU a collective behaves like a kernel of torch's. It comes after what the current stream of the
calling thread holds, so that a tensor made on a side stream is right if that stream is current at
the call; the result is there for what is put into the current stream after the call, or after
``synchronize``. The host waits until the collective is in a stream, never for its end. Inputs and
results may be dropped at any time: their memory stays until the GPU is done with it, and needs no
``record_stream``. During ``torch.cuda.graph`` capture a collective is refused.

A rank has one GPU, that of its first collective: choose it early, by
``torch.cuda.set_device(local_rank())``. A tensor on another device is refused. This package touches
no device that holds no tensor of a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch

from farandole import _core, basics, ops
from farandole.basics import ProcessSet, global_process_set
from farandole.ops import BLOCKS, GROUP, IN_PLACE, Average, Handle, run_allreduce_, start_allreduce, start_allreduce_
from farandole.torch import _autograd, _library, _operators
from farandole.torch.compression import Compression, native_wire

__all__ = [
    "allgather", "allgather_async", "allreduce", "allreduce_", "allreduce_async",
    "allreduce_async_", "alltoall", "alltoall_async", "broadcast", "broadcast_", "broadcast_async",
    "broadcast_async_", "grouped_allgather", "grouped_allgather_async", "grouped_allreduce",
    "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_",
    "grouped_reducescatter", "grouped_reducescatter_async", "reducescatter", "reducescatter_async",
]  # fmt: skip

Tensors = Sequence[torch.Tensor]
Splits = torch.Tensor | Sequence[int]


def allreduce(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, compression: Any = Compression.none,
    op: int | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:  # fmt: skip
    """Combines ``tensor`` over all ranks; its gradient is reduced in the same way.

    Args:
        tensor: Any shape, the same on all ranks.
        average: Deprecated: True is ``op=Average``, False ``op=Sum``.
        name: The same on all ranks; None: matched by the order of the unnamed calls.
        compression: How float32 and float64 travel: a choice of ``Compression``, or a class of your
            own with ``compress(tensor) -> (tensor, context)`` and ``decompress(tensor, context)``.
        op: Average (default), Sum, Min, Max or Product. Averages of integers are exact, then
            truncate toward zero; bool knows Min, Max and Product, complex numbers Average and Sum.
        prescale_factor: Multiplies every contribution.
        postscale_factor: Multiplies the result.
        process_set: The ranks that take part, of which this one is.
    Returns:
        A new tensor on the same device, bitwise the same on all ranks.
    Raises:
        MismatchError: Ranks passed different shapes, dtypes, operations or factors.
        ValueError: ``average`` and ``op`` are both given; the dtype is not supported.
    """
    op, (wire, own) = ops.with_average(average, op), _wire(compression)
    if _operators.is_traced():
        return _reduce_traced(
            "allreduce", [tensor], name, op, prescale_factor, postscale_factor, process_set, wire, own
        )[0]
    how = ops.reduction_options(ops.ALLREDUCE, op, prescale_factor, postscale_factor, process_set, wire)
    return _run_one(how, tensor, name, own)


def allreduce_async(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Handle:  # fmt: skip
    """As :func:`allreduce`; ``synchronize`` the handle. Leave ``tensor`` alone until then."""
    if average is not None:
        op = ops.with_average(average, op)
    if not isinstance(tensor, torch.Tensor):
        _library.check_dense(tensor)
    return start_allreduce(tensor, name, op, prescale_factor, postscale_factor, process_set)


def allreduce_(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> torch.Tensor:  # fmt: skip
    """As :func:`allreduce`, in place. Returns ``tensor``."""
    if average is not None:
        op = ops.with_average(average, op)
    if not isinstance(tensor, torch.Tensor):
        _library.check_dense(tensor)
    result: torch.Tensor = run_allreduce_(tensor, name, op, prescale_factor, postscale_factor, process_set)
    return result


def allreduce_async_(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Handle:  # fmt: skip
    """As :func:`allreduce_`; ``synchronize`` the handle. Leave ``tensor`` alone until then."""
    if average is not None:
        op = ops.with_average(average, op)
    if not isinstance(tensor, torch.Tensor):
        _library.check_dense(tensor)
    return start_allreduce_(tensor, name, op, prescale_factor, postscale_factor, process_set)


def grouped_allreduce(
    tensors: Tensors, average: bool | None = None, name: str | None = None, compression: Any = Compression.none,
    op: int | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:  # fmt: skip
    """As :func:`allreduce` of each of ``tensors``, in one operation; as many on every rank, all of a rank's
    on one device."""
    op, (wire, own) = ops.with_average(average, op), _wire(compression)
    if _operators.is_traced():
        return _reduce_traced("allreduce", tensors, name, op, prescale_factor, postscale_factor, process_set, wire, own)
    how = ops.reduction_options(ops.ALLREDUCE, op, prescale_factor, postscale_factor, process_set, wire)
    return _run_all(how, tensors, name, own)


def grouped_allreduce_async(
    tensors: Tensors, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Handle:  # fmt: skip
    """As :func:`grouped_allreduce`; ``synchronize`` the handle. Leave ``tensors`` alone until then."""
    op = ops.with_average(average, op)
    return ops.grouped_allreduce_async(_dense_all(tensors), name, op, prescale_factor, postscale_factor, process_set)


def grouped_allreduce_(
    tensors: Tensors, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:  # fmt: skip
    """As :func:`grouped_allreduce`, in place. Returns ``tensors``."""
    op = ops.with_average(average, op)
    ops.grouped_allreduce_(_dense_all(tensors), name, op, prescale_factor, postscale_factor, process_set)
    return list(tensors)


def grouped_allreduce_async_(
    tensors: Tensors, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Handle:  # fmt: skip
    """As :func:`grouped_allreduce_`; ``synchronize`` the handle. Leave ``tensors`` alone until then."""
    op = ops.with_average(average, op)
    return ops.grouped_allreduce_async_(_dense_all(tensors), name, op, prescale_factor, postscale_factor, process_set)


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """As :func:`farandole.broadcast` of a tensor, whose result is on the same device. The root's
    gradient is the mean of all ranks', the others' is zero."""
    if _operators.is_traced():
        return _operators.call("broadcast", [tensor], name, process_set, root=root_rank)[0][0]
    return _run_one(ops.broadcast_options(root_rank, process_set), tensor, name)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """As :func:`broadcast`; ``synchronize`` the handle. Leave ``tensor`` alone until then."""
    return ops.broadcast_async(_dense(tensor), root_rank, name, process_set)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """As :func:`broadcast`, in place. Returns ``tensor``."""
    ops.broadcast_(_dense(tensor), root_rank, name, process_set)
    return tensor


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """As :func:`broadcast_`; ``synchronize`` the handle. Leave ``tensor`` alone until then."""
    return ops.broadcast_async_(_dense(tensor), root_rank, name, process_set)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set, *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """As :func:`farandole.allgather` of a tensor, whose result is on the same device. The gradient
    is this rank's rows of the mean of all ranks' gradients; through ``out`` there is none."""
    if _operators.is_traced() and out is None:
        return _operators.call("allgather", [tensor], name, process_set)[0][0]
    return _run_one(ops.gather_options(process_set), tensor, name, out=out)


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set, *,
    out: torch.Tensor | None = None,
) -> Handle:  # fmt: skip
    """As :func:`allgather`; ``synchronize`` the handle. Leave ``tensor`` and ``out`` alone until then."""
    return ops.allgather_async(_dense(tensor), name, process_set, out=out)


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """As :func:`allgather` of each of ``tensors``, in one operation; as many on every rank, all of a rank's
    on one device."""
    if _operators.is_traced():
        return _operators.call("allgather", tensors, name, process_set)[0]
    return _run_all(ops.gather_options(process_set), tensors, name)


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """As :func:`grouped_allgather`; ``synchronize`` the handle. Leave ``tensors`` alone until then."""
    return ops.grouped_allgather_async(_dense_all(tensors), name, process_set)


def reducescatter(
    tensor: torch.Tensor, name: str | None = None, compression: Any = Compression.none, op: int | None = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0, *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """As :func:`allreduce`, with the same arguments, but each rank gets a split of the rows.

    Args:
        tensor: Of shape [rows, ...], the same on all ranks.
        out: None, or a tensor for the result, which is then returned: contiguous, of the result's dtype
            and shape, on the same device, apart from ``tensor``. No gradient flows through it, and no
            ``compression`` of your own. Each rank decides for itself.
    Returns:
        A new tensor of shape [rows of this rank, ...] on the same device, or ``out``: the parts lie in rank order
        in what an allreduce gives, bit for bit, and the first (rows % size) ranks get one row more
        than the others. The gradient is all ranks' gradients, gathered and multiplied with the
        factors; with Sum also with the number of ranks.
    Raises:
        MismatchError: Ranks passed different shapes, dtypes, operations or factors.
        ValueError: A scalar; the dtype is not supported; ``out`` cannot be used.
    """
    wire, own = _wire(compression)
    if _operators.is_traced() and out is None:
        return _reduce_traced(
            "reducescatter", [tensor], name, op, prescale_factor, postscale_factor, process_set, wire, own
        )[0]
    how = ops.reduction_options(ops.REDUCESCATTER, op, prescale_factor, postscale_factor, process_set, wire)
    return _run_one(how, tensor, name, own, out)


def reducescatter_async(
    tensor: torch.Tensor, name: str | None = None, op: int | None = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0, *,
    out: torch.Tensor | None = None,
) -> Handle:  # fmt: skip
    """As :func:`reducescatter`; ``synchronize`` the handle. Leave ``tensor`` and ``out`` alone until then."""
    return ops.reducescatter_async(_dense(tensor), name, op, prescale_factor, postscale_factor, process_set, out=out)


def grouped_reducescatter(
    tensors: Tensors, name: str | None = None, compression: Any = Compression.none, op: int | None = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> list[torch.Tensor]:  # fmt: skip
    """As :func:`reducescatter` of each of ``tensors``, in one operation; as many on every rank, all of a rank's
    on one device."""
    wire, own = _wire(compression)
    if _operators.is_traced():
        return _reduce_traced(
            "reducescatter", tensors, name, op, prescale_factor, postscale_factor, process_set, wire, own
        )
    how = ops.reduction_options(ops.REDUCESCATTER, op, prescale_factor, postscale_factor, process_set, wire)
    return _run_all(how, tensors, name, own)


def grouped_reducescatter_async(
    tensors: Tensors, name: str | None = None, op: int | None = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Handle:  # fmt: skip
    """As :func:`grouped_reducescatter`; ``synchronize`` the handle. Leave ``tensors`` alone until then."""
    return ops.grouped_reducescatter_async(
        _dense_all(tensors), name, op, prescale_factor, postscale_factor, process_set
    )


@overload
def alltoall(
    tensor: torch.Tensor, splits: None = None, name: str | None = None, process_set: ProcessSet = global_process_set,
    *, out: torch.Tensor | None = None,
) -> torch.Tensor: ...  # fmt: skip
@overload
def alltoall(
    tensor: torch.Tensor, splits: Splits, name: str | None = None, process_set: ProcessSet = global_process_set,
    *, out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
def alltoall(
    tensor: torch.Tensor, splits: Splits | None = None, name: str | None = None,
    process_set: ProcessSet = global_process_set, *, out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """As :func:`farandole.alltoall` of a tensor, whose result is on the same device.

    ``splits`` may be a tensor, also on a GPU, for which the host then waits; how many rows came from
    each rank is on its device: int32 [size], or int64 if one of the numbers needs it. The gradient
    goes back the same way, but not through ``out``.
    """
    if _operators.is_traced() and out is None:
        given = splits if splits is None or isinstance(splits, torch.Tensor) else torch.tensor(splits)
        (rows,), received = _operators.call("alltoall", [tensor], name, process_set, given)
        return rows if given is None else (rows, received[0].to(given.device, torch.int32))
    rows, numbers = _exchange(tensor, splits, name, process_set, BLOCKS, out)
    return rows if splits is None else (rows, numbers)


def alltoall_async(
    tensor: torch.Tensor, splits: Splits | None = None, name: str | None = None,
    process_set: ProcessSet = global_process_set, *, out: torch.Tensor | None = None,
) -> Handle:  # fmt: skip
    """As :func:`alltoall`; ``synchronize`` the handle, which always gives both, the rows that came
    and how many from each rank. Leave ``tensor`` and ``out`` alone until then."""
    handle: Handle = _exchange(tensor, splits, name, process_set, 0, out)
    return handle


def broadcast_named(named: Sequence[tuple[str, torch.Tensor]], how: _core.Options, name: str) -> None:
    """Broadcasts tensors in place: those of each device in one operation.

    All have one name, so that ranks whose tensors are on different kinds of devices get an error and
    do not wait for one another.

    Args:
        named: The same names, shapes, dtypes and kinds of devices on every rank.
        how: Of the broadcast.
        name: Of the operation.
    """
    by_device: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    for item in named:
        by_device.setdefault(_dense(item[1]).device, []).append(item)
    core = basics.current().core
    for items in by_device.values():
        labels, tensors = zip(*items, strict=True)
        core.submit(how, tensors, name, GROUP | IN_PLACE | BLOCKS, labels=labels)


# Calls.


def _exchange(
    tensor: torch.Tensor, splits: Splits | None, name: str | None, process_set: ProcessSet, flags: int,
    out: torch.Tensor | None,
) -> Any:  # fmt: skip
    """An alltoall: the rows that came, and how many from each rank."""
    device = splits.device if isinstance(splits, torch.Tensor) else torch.device("cpu")
    numbers = splits.detach().cpu().numpy() if isinstance(splits, torch.Tensor) else splits

    def finish(rows: torch.Tensor, received: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.int32 if max(received) < 2**31 else torch.int64
        return rows, torch.tensor(received, dtype=dtype).to(device)

    how, given = ops.exchange_options(process_set), _dense(tensor)
    if flags & BLOCKS and out is not None:
        _check_no_gradient(given, out)
    elif flags & BLOCKS and _autograd.needs_gradient([given]):
        received: list[list[int]] = []
        return finish(_autograd.run(how, [given], name, None, numbers, received)[0], received[0])
    return basics.current().core.submit(how, given, name, flags, finish, splits=numbers, out=out)


def _reduce_traced(
    kind: str, tensors: Tensors, name: str | None, op: int | None, prescale: float, postscale: float,
    process_set: ProcessSet, wire: int, compression: Any,
) -> list[torch.Tensor]:  # fmt: skip
    """An allreduce or reducescatter of compiled code."""
    contexts: Any = None
    if compression is not None:
        tensors, contexts = zip(*map(compression.compress, tensors), strict=True)
    made, _ = _operators.call(
        kind, tensors, name, process_set, op=ops.reduction(op), prescale=prescale, postscale=postscale, wire=wire
    )
    return made if compression is None else list(map(compression.decompress, made, contexts))


def _wire(compression: Any) -> tuple[int, Any]:
    """farandole_wire of the C ABI, and a class that the core does not know or None."""
    if compression is Compression.none:  # the fast way
        return 0, None
    wire = native_wire(compression)
    return (0, compression) if wire is None else (wire, None)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """TypeError unless it is a tensor; what cannot travel is refused later."""
    if not isinstance(tensor, torch.Tensor):
        _library.check_dense(tensor)
    return tensor


def _dense_all(tensors: Tensors) -> Tensors:
    """Likewise of the first of several."""
    if isinstance(tensors, Sequence) and tensors:
        _dense(tensors[0])
    return tensors


def _check_no_gradient(tensor: torch.Tensor, out: torch.Tensor) -> None:
    """As torch's own functions with ``out=`` do it."""
    if _autograd.needs_gradient([tensor, out]):
        raise RuntimeError("no gradient flows through out=; leave it away, or call this under torch.no_grad()")


def _run_one(
    how: _core.Options, tensor: torch.Tensor, name: str | None, compression: Any = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Waits for a collective and gives its result, with gradients; ``compression`` is a class that the core does
    not know."""
    if out is not None:
        if compression is not None:
            raise ValueError("out= takes no compression of your own, only a choice of Compression")
        _check_no_gradient(_dense(tensor), out)
    elif compression is not None or (_dense(tensor).requires_grad and torch.is_grad_enabled()):
        return _run_all(how, [tensor], name, compression)[0]
    result: torch.Tensor = ops.run(how, tensor, name, out=out)
    return result


def _run_all(how: _core.Options, tensors: Tensors, name: str | None, compression: Any = None) -> list[torch.Tensor]:
    """Likewise of several tensors, in one operation."""
    _dense(ops.not_empty(tensors, how)[0])
    if compression is None:
        return _autograd.run(how, tensors, name)
    sent, contexts = zip(*map(compression.compress, tensors), strict=True)
    return _autograd.run(how, sent, name, lambda made: list(map(compression.decompress, made, contexts)))
