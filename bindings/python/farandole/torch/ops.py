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

Choose a rank's GPU early, ``torch.cuda.set_device(local_rank())``: that of its first collective is
its default device. Tensors on another device meet those of the devices whose numbers are as far from
the other ranks' default devices. This package touches no device that holds no tensor of a call.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch

from farandole import _core, basics, ops
from farandole.basics import ProcessSet, global_process_set
from farandole.ops import (
    ALLGATHER, ALLREDUCE, ALLTOALL, BLOCKS, BROADCAST, GROUP, IN_PLACE, REDUCESCATTER, Average,
    Call, Handle, P, Sum, T, asynchronous, blocking,
)  # fmt: skip
from farandole.torch import _library
from farandole.torch.compression import Compression, native_wire

__all__ = [
    "allgather", "allgather_async", "allreduce", "allreduce_", "allreduce_async", "allreduce_async_",
    "alltoall", "alltoall_async", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_",
    "grouped_allgather", "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_",
    "grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter",
    "grouped_reducescatter_async", "reducescatter", "reducescatter_async",
]  # fmt: skip

Tensors = Sequence[torch.Tensor]
Splits = torch.Tensor | Sequence[int]


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Combines ``tensor`` over all ranks; its gradient is reduced in the same way.

    Args:
        tensor: Any shape, the same on all ranks.
        average: Deprecated: True is ``op=Average``, False ``op=Sum``.
        name: The same on all ranks; None: matched by the order of the unnamed calls.
        compression: How float32 and float64 travel: a choice of ``Compression``, or a class of your
            own with ``compress(tensor) -> (tensor, context)`` and ``decompress(tensor, context)``.
        op: Average (default), Sum, Min, Max or Product. Averages of integers are exact, then
            truncate toward zero; bool knows Min, Max and Product.
        prescale_factor: Multiplies every contribution.
        postscale_factor: Multiplies the result.
        process_set: The ranks that take part, of which this one is.
    Returns:
        A new tensor on the same device, bitwise the same on all ranks of a host.
    Raises:
        MismatchError: Ranks passed different shapes, dtypes, operations or factors.
        ValueError: ``average`` and ``op`` are both given; the dtype is not supported.
    """
    op = _with_average(average, op, 3)
    if compression is Compression.none and not _needs_gradient([tensor]):  # the fast way
        how = ops.reduction_options(ALLREDUCE, op, prescale_factor, postscale_factor, process_set)
        result: torch.Tensor = basics.current().core.submit(how, _dense(tensor), name, BLOCKS)
        return result
    scale = prescale_factor, postscale_factor
    return _reduce(ALLREDUCE, [_dense(tensor)], name, compression, op, scale, process_set)[0]


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """As :func:`allreduce` of each tensor, in one operation; as many tensors on every rank, all of a
    rank's on one device."""
    op = _with_average(average, op, 3)
    scale = prescale_factor, postscale_factor
    return _reduce(ALLREDUCE, tensors, name, compression, op, scale, process_set)


def _allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Call[torch.Tensor]:
    op = op if average is None else _with_average(average, op, 4)
    how = ops.reduction_options(ALLREDUCE, op, prescale_factor, postscale_factor, process_set)
    return how, _dense(tensor), name, 0


def _grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Call[list[torch.Tensor]]:
    op = _with_average(average, op, 4)
    how = ops.reduction_options(ALLREDUCE, op, prescale_factor, postscale_factor, process_set)
    return _group(how, tensors, name)


allreduce_ = blocking(_allreduce, IN_PLACE)
allreduce_async = asynchronous(_allreduce)
allreduce_async_ = asynchronous(_allreduce, IN_PLACE)
grouped_allreduce_ = blocking(_grouped_allreduce, IN_PLACE)
grouped_allreduce_async = asynchronous(_grouped_allreduce)
grouped_allreduce_async_ = asynchronous(_grouped_allreduce, IN_PLACE)


def _differentiable(describe: Callable[P, Call[T]]) -> Callable[P, T]:
    """As ``blocking``, with gradients."""

    def call(*args: P.args, **kwargs: P.kwargs) -> Any:
        how, given, name, group = describe(*args, **kwargs)
        tensors: Any = given if group else [given]
        if not _needs_gradient(tensors):
            return basics.current().core.submit(how, given, name, group | BLOCKS)
        results = _run(how, tensors, name)
        return results if group else results[0]

    return ops.named(call, describe, BLOCKS)


def _broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Call[torch.Tensor]:
    """Gives every rank the values of ``root_rank``.

    Args:
        tensor: Same shape and dtype on all ranks, of any dtype; only the root's values matter.
        root_rank: Among all ranks, also with a process set; the same on all ranks.
        name: As for :func:`allreduce`.
        process_set: As for :func:`allreduce`; the root is in it.
    Returns:
        A new tensor on the same device. The root's gradient is the mean of all ranks', the others'
        is zero.
    Raises:
        MismatchError: Ranks passed different shapes, dtypes or roots.
        ValueError: There is no such rank.
    """
    return ops.broadcast_options(root_rank, process_set), _dense(tensor), name, 0


broadcast = _differentiable(_broadcast)
broadcast_ = blocking(_broadcast, IN_PLACE)
broadcast_async = asynchronous(_broadcast)
broadcast_async_ = asynchronous(_broadcast, IN_PLACE)


def _allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Call[torch.Tensor]:
    """Gives every rank the rows of all ranks, in rank order.

    Args:
        tensor: Of shape [rows, ...], of any dtype: the number of rows may differ between ranks and be
            0, the other dimensions and the dtype may not.
        name: As for :func:`allreduce`.
        process_set: As for :func:`allreduce`.
    Returns:
        A new tensor of shape [sum of all rows, ...] on the same device. The gradient is this rank's
        rows of the mean of all ranks' gradients.
    Raises:
        MismatchError: Ranks passed different dtypes or dimensions after the first.
        ValueError: A scalar; the name is in flight already.
    """
    return ops.gather_options(process_set), _dense(tensor), name, 0


def _grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Call[list[torch.Tensor]]:
    """As :func:`allgather` of each tensor, in fewer messages; as many tensors on every rank, all of
    a rank's on one device."""
    return _group(ops.gather_options(process_set), tensors, name)


allgather = _differentiable(_allgather)
allgather_async = asynchronous(_allgather)
grouped_allgather = _differentiable(_grouped_allgather)
grouped_allgather_async = asynchronous(_grouped_allgather)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """As :func:`allreduce`, with the same arguments, but every rank gets a part of the rows only.

    Args:
        tensor: Of shape [rows, ...], the same on all ranks.
    Returns:
        A new tensor of shape [rows of this rank, ...] on the same device: the parts lie in rank order
        in what an allreduce gives, bit for bit, and the first (rows % size) ranks get one row more
        than the others. The gradient is all ranks' gradients, gathered and multiplied with the
        factors; with Sum also with the number of ranks.
    Raises:
        MismatchError: Ranks passed different shapes, dtypes, operations or factors.
        ValueError: A scalar; the dtype is not supported.
    """
    scale = prescale_factor, postscale_factor
    return _reduce(REDUCESCATTER, [_dense(tensor)], name, compression, op, scale, process_set)[0]


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """As :func:`reducescatter` of each tensor, in fewer messages; all of a rank's on one device."""
    scale = prescale_factor, postscale_factor
    return _reduce(REDUCESCATTER, tensors, name, compression, op, scale, process_set)


def _reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int | None = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Call[torch.Tensor]:
    how = ops.reduction_options(REDUCESCATTER, op, prescale_factor, postscale_factor, process_set)
    return how, _dense(tensor), name, 0


def _grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    op: int | None = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Call[list[torch.Tensor]]:
    how = ops.reduction_options(REDUCESCATTER, op, prescale_factor, postscale_factor, process_set)
    return _group(how, tensors, name)


reducescatter_async = asynchronous(_reducescatter)
grouped_reducescatter_async = asynchronous(_grouped_reducescatter)


@overload
def alltoall(
    tensor: torch.Tensor,
    splits: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor: ...
@overload
def alltoall(
    tensor: torch.Tensor,
    splits: Splits,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, torch.Tensor]: ...
def alltoall(
    tensor: torch.Tensor,
    splits: Splits | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Gives every rank a part of this rank's rows, and this rank a part of everybody's.

    Args:
        tensor: Of shape [rows, ...], of any dtype: the first rows go to rank 0, the next to rank 1,
            and so on. The dimensions after the first and the dtype are the same on all ranks.
        splits: Integers, as a tensor or a sequence: how many rows go to each rank; what they leave
            over goes nowhere. None: the same number to each, of which the rows must be a multiple.
            The host reads them: it waits for those on a GPU.
        name: As for :func:`allreduce`.
        process_set: As for :func:`allreduce`.
    Returns:
        A new tensor on the same device with the rows that came, in rank order. With ``splits`` also
        how many came from each rank, on the device of ``splits``: int32 [size], or int64 if one of
        the numbers needs it. The gradient goes back the same way.
    Raises:
        MismatchError: Ranks passed different dtypes or dimensions after the first.
        ValueError: ``splits`` do not fit; a scalar; the name is in flight already.
        HorovodInternalError: On all ranks, if one has joined.
    """
    rows, numbers = _exchange(tensor, splits, name, process_set, BLOCKS)
    return rows if splits is None else (rows, numbers)


def alltoall_async(
    tensor: torch.Tensor,
    splits: Splits | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """As :func:`alltoall`; ``synchronize`` the handle, which always gives both, the rows that came
    and how many from each rank. Leave ``tensor`` alone until then."""
    handle: Handle = _exchange(tensor, splits, name, process_set, 0)
    return handle


def broadcast_named(
    named: Sequence[tuple[str, torch.Tensor]], how: _core.Options, name: str
) -> None:
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
    tensor: torch.Tensor,
    splits: Splits | None,
    name: str | None,
    process_set: ProcessSet,
    flags: int,
) -> Any:
    """An alltoall: the rows that came, and how many from each rank."""
    device = splits.device if isinstance(splits, torch.Tensor) else torch.device("cpu")
    numbers = splits.detach().cpu().numpy() if isinstance(splits, torch.Tensor) else splits

    def finish(rows: torch.Tensor, received: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.int32 if max(received) < 2**31 else torch.int64
        return rows, torch.tensor(received, dtype=dtype).to(device)

    how, to_each = ops.exchange_options(numbers, process_set)
    if flags & BLOCKS and _needs_gradient([_dense(tensor)]):
        received: list[list[int]] = []
        return finish(_run(how, [tensor], name, to_each, received)[0], received[0])
    return basics.current().core.submit(how, tensor, name, flags, finish, splits=to_each)


def _with_average(average: bool | None, op: int | None, level: int) -> int | None:
    """``op``, or Horovod's old way to say it."""
    if average is None:
        return op
    if op is not None:
        raise ValueError("The op parameter supersedes average; give only one of them.")
    warnings.warn("average= is deprecated; use op=", DeprecationWarning, stacklevel=level)
    return Average if average else Sum


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """TypeError unless it is a tensor; what cannot travel is refused later."""
    if not isinstance(tensor, torch.Tensor):
        _library.check_dense(tensor)
    return tensor


def _group(how: _core.Options, tensors: Tensors, name: str | None) -> Call[list[torch.Tensor]]:
    for tensor in tensors if isinstance(tensors, Sequence) else ():
        _library.check_dense(tensor)
    return ops.group(how, tensors, name)


def _reduce(
    kind: int,
    tensors: Tensors,
    name: str | None,
    compression: Any,
    op: int | None,
    scale: tuple[float, float],
    process_set: ProcessSet,
) -> list[torch.Tensor]:
    """Reduces what ``compression`` makes of the tensors, where the core does not compress."""
    wire = native_wire(compression)
    how = ops.reduction_options(kind, op, *scale, process_set, wire or 0)
    _, given, _, _ = _group(how, tensors, name)
    if wire is not None:
        return _run(how, given, name)
    sent, contexts = zip(*map(compression.compress, given), strict=True)

    def decompressed(results: Tensors) -> list[torch.Tensor]:
        return list(map(compression.decompress, results, contexts))

    if _needs_gradient(sent):
        return decompressed(_run(how, sent, name))
    results: list[torch.Tensor] = ops.submit_group(how, sent, name, BLOCKS, decompressed)
    return results


# Gradients, as Horovod has them: of floating-point tensors, and differentiable themselves.


def _needs_gradient(tensors: Tensors) -> bool:
    return torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in tensors)


def _run(
    how: _core.Options,
    tensors: Tensors,
    name: str | None,
    splits: list[int] | None = None,
    received: list[list[int]] | None = None,
) -> list[torch.Tensor]:
    """Runs a collective on a group, with gradients; ``received`` gets how many rows came of each
    tensor from each rank."""
    if _needs_gradient(tensors):
        return list(_Collective.apply(how, name, splits, received, *tensors))
    flags = GROUP | BLOCKS
    results: list[torch.Tensor] = basics.current().core.submit(
        how, tensors, name, flags, splits=splits
    )
    return results


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, how: _core.Options, name: str | None, splits: Any, received: Any, *tensors: Any
    ) -> Any:
        ctx.how, ctx.shape = how, tensors[0].shape
        ctx.name = None if name is None else f"{name}.gradient"

        def finish(results: list[torch.Tensor], rows: Sequence[list[int]] = ()) -> Any:
            ctx.rows = rows
            if received is not None:
                received[:] = rows
            return tuple(results)

        return basics.current().core.submit(how, tensors, name, GROUP | BLOCKS, finish, splits=splits)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        is_sent = [g is not None and g.dtype.is_floating_point for g in gradients]
        sent = list(itertools.compress(gradients, is_sent))
        done = iter(_gradients(ctx, sent, list(itertools.compress(ctx.rows, is_sent))))
        return None, None, None, None, *(next(done) if is_one else None for is_one in is_sent)


def _gradients(ctx: Any, gradients: Tensors, rows: Sequence[list[int]]) -> list[torch.Tensor]:
    """Those of the tensors, of those of the results."""
    how: _core.Options = ctx.how

    def again(kind: int, tensors: Tensors, op: int = 0, splits: Any = None) -> list[torch.Tensor]:
        options = ops.options(kind, op, 1.0, 1.0, -1, 0, how.set)
        return _run(options, tensors, ctx.name, splits)

    place, size = basics.current().core.place_in(how.set)
    if how.kind == ALLREDUCE:
        return _run(how, gradients, ctx.name)
    if how.kind == REDUCESCATTER:
        factor = how.prescale * how.postscale * (size if how.op == ops.reduction(Sum) else 1)
        return again(ALLGATHER, [gradient * factor for gradient in gradients])
    if how.kind == ALLTOALL:
        (back,) = again(ALLTOALL, gradients, splits=rows[0])
        unclaimed = back.new_zeros(ctx.shape[0] - len(back), *back.shape[1:])
        return [torch.cat([back, unclaimed])]
    means = again(ALLREDUCE, gradients, ops.reduction(Average))
    if how.kind == ALLGATHER:
        return [m.narrow(0, sum(r[:place]), r[place]) for m, r in zip(means, rows, strict=True)]
    is_root = basics.topology().rank == how.root
    return means if is_root else [torch.zeros_like(mean) for mean in means]
