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

import warnings
from collections.abc import Sequence
from typing import Any, overload

import torch

from farandole import _core, basics, ops
from farandole.basics import ProcessSet, global_process_set
from farandole.ops import ALLREDUCE, BLOCKS, IN_PLACE, REDUCESCATTER, Average, Handle, Sum
from farandole.torch import _library
from farandole.torch.compression import Compression, native_wire

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
    """Combines ``tensor`` over all ranks.

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
        A new tensor on the same device, bitwise the same on all ranks of a host. Its gradient is
        reduced in the same way.
    Raises:
        MismatchError: Ranks passed different shapes, dtypes, operations or factors.
        ValueError: ``average`` and ``op`` are both given; the dtype is not supported.
    """
    op = _with_average(average, op, 3)
    if compression is Compression.none and not _needs_gradient(tensor):  # the fast way
        how = ops.reduction_options(ALLREDUCE, op, prescale_factor, postscale_factor, process_set)
        return _submit(how, tensor, name, BLOCKS)
    how = _reduction(ALLREDUCE, op, prescale_factor, postscale_factor, process_set, compression)
    (result,) = _reduced(how, _tensors(tensor), name, compression, _Allreduce)
    return result


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """As :func:`allreduce`; ``synchronize`` the handle. Leave ``tensor`` alone until then."""
    how = _allreduce(average, op, prescale_factor, postscale_factor, process_set)
    return _submit(how, tensor, name)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """As :func:`allreduce`, in place. Returns ``tensor``."""
    how = _allreduce(average, op, prescale_factor, postscale_factor, process_set)
    return _submit(how, tensor, name, IN_PLACE | BLOCKS)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """As :func:`allreduce_`; ``synchronize`` the handle, which gives ``tensor``."""
    how = _allreduce(average, op, prescale_factor, postscale_factor, process_set)
    return _submit(how, tensor, name, IN_PLACE)


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
    how = _reduction(ALLREDUCE, op, prescale_factor, postscale_factor, process_set, compression)
    return _reduced(how, tensors, name, compression, _Allreduce)


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """As :func:`grouped_allreduce`; ``synchronize`` the handle. Leave the tensors alone till then."""
    how = _allreduce(average, op, prescale_factor, postscale_factor, process_set)
    return _submit_group(how, tensors, name)


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """As :func:`grouped_allreduce`, in place. Returns the tensors."""
    how = _allreduce(average, op, prescale_factor, postscale_factor, process_set)
    return _submit_group(how, tensors, name, IN_PLACE | BLOCKS)


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """As :func:`grouped_allreduce_`; ``synchronize`` the handle, which gives the tensors."""
    how = _allreduce(average, op, prescale_factor, postscale_factor, process_set)
    return _submit_group(how, tensors, name, IN_PLACE)


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
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
    how = ops.broadcast_options(root_rank, process_set)
    if _needs_gradient(tensor):
        result: torch.Tensor = _Broadcast.apply(tensor, how, name)
        return result
    return _submit(how, tensor, name, BLOCKS)


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """As :func:`broadcast`; ``synchronize`` the handle."""
    return _submit(ops.broadcast_options(root_rank, process_set), tensor, name)


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """As :func:`broadcast`, in place. Returns ``tensor``."""
    how = ops.broadcast_options(root_rank, process_set)
    return _submit(how, tensor, name, IN_PLACE | BLOCKS)


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """As :func:`broadcast_`; ``synchronize`` the handle, which gives ``tensor``."""
    return _submit(ops.broadcast_options(root_rank, process_set), tensor, name, IN_PLACE)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
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
    return grouped_allgather(_tensors(tensor), name, process_set)[0]


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """As :func:`allgather`; ``synchronize`` the handle. Leave ``tensor`` alone until then."""
    return _submit(ops.gather_options(process_set), tensor, name)


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """As :func:`allgather` of each tensor, in fewer messages; as many tensors on every rank, all of
    a rank's on one device."""
    how = ops.gather_options(process_set)
    if _needs_gradient(*_listed(tensors)):
        return list(_Allgather.apply(how, name, process_set, *tensors))
    results: list[torch.Tensor] = _submit_group(how, tensors, name, BLOCKS)
    return results


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """As :func:`grouped_allgather`; ``synchronize`` the handle."""
    return _submit_group(ops.gather_options(process_set), tensors, name)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """As :func:`allreduce`, but every rank gets a part of the result's rows only.

    Args:
        tensor: Of shape [rows, ...], the same on all ranks.
        name: As for :func:`allreduce`.
        compression: As for :func:`allreduce`.
        op: Average, Sum, Min, Max or Product, as for :func:`allreduce`.
        process_set: As for :func:`allreduce`.
        prescale_factor: Multiplies every contribution.
        postscale_factor: Multiplies the result.
    Returns:
        A new tensor of shape [rows of this rank, ...] on the same device: the parts lie in rank order
        in what an allreduce gives, bit for bit, and the first (rows % size) ranks get one row more
        than the others. The gradient is all ranks' gradients, gathered and multiplied with the
        factors; with Sum also with the number of ranks.
    Raises:
        MismatchError: Ranks passed different shapes, dtypes, operations or factors.
        ValueError: A scalar; the dtype is not supported.
    """
    how = _reduction(REDUCESCATTER, op, prescale_factor, postscale_factor, process_set, compression)
    scatter = _reducescatter(process_set)
    (result,) = _reduced(how, _tensors(tensor), name, compression, scatter)
    return result


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int | None = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """As :func:`reducescatter`; ``synchronize`` the handle. Leave ``tensor`` alone until then."""
    how = _reduction(REDUCESCATTER, op, prescale_factor, postscale_factor, process_set)
    return _submit(how, tensor, name)


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
    how = _reduction(REDUCESCATTER, op, prescale_factor, postscale_factor, process_set, compression)
    return _reduced(how, tensors, name, compression, _reducescatter(process_set))


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: int | None = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """As :func:`grouped_reducescatter`; ``synchronize`` the handle."""
    how = _reduction(REDUCESCATTER, op, prescale_factor, postscale_factor, process_set)
    return _submit_group(how, tensors, name)


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
    if _needs_gradient(tensor):
        rows, numbers = _Alltoall.apply(tensor, splits, name, process_set)
    else:
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
    return _exchange(tensor, splits, name, process_set)


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
        _library.check_dense(item[1])
        by_device.setdefault(item[1].device, []).append(item)
    core = basics.current().core
    for items in by_device.values():
        labels, tensors = zip(*items, strict=True)
        core.submit(how, tensors, name, ops.GROUP | IN_PLACE | BLOCKS, labels=labels)


# Calls.


def _submit(how: _core.Options, tensor: torch.Tensor, name: str | None, flags: int = 0) -> Any:
    if not isinstance(tensor, torch.Tensor):
        _library.check_dense(tensor)
    return basics.current().core.submit(how, tensor, name, flags)


def _submit_group(how: _core.Options, tensors: Tensors, name: str | None, flags: int = 0) -> Any:
    return ops.submit_group(how, _listed(tensors), name, flags)


def _exchange(
    tensor: torch.Tensor,
    splits: Splits | None,
    name: str | None,
    process_set: ProcessSet,
    flags: int = 0,
) -> Any:
    """An alltoall: the rows that came, and how many from each rank."""
    _library.check_dense(tensor)
    device = splits.device if isinstance(splits, torch.Tensor) else torch.device("cpu")
    numbers = splits.detach().cpu().numpy() if isinstance(splits, torch.Tensor) else splits

    def finish(rows: torch.Tensor, received: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.int32 if max(received) < 2**31 else torch.int64
        return rows, torch.tensor(received, dtype=dtype).to(device)

    return ops.submit_exchange(tensor, numbers, name, process_set, finish, flags)


def _with_average(average: bool | None, op: int | None, level: int) -> int | None:
    """``op``, or Horovod's old way to say it."""
    if average is None:
        return op
    if op is not None:
        raise ValueError("The op parameter supersedes average; give only one of them.")
    warnings.warn("average= is deprecated; use op=", DeprecationWarning, stacklevel=level)
    return Average if average else Sum


def _allreduce(
    average: bool | None, op: int | None, prescale: float, postscale: float, process_set: ProcessSet
) -> _core.Options:
    if average is not None:
        op = _with_average(average, op, 4)
    return ops.reduction_options(ALLREDUCE, op, prescale, postscale, process_set)


def _reduction(
    kind: int,
    op: int | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    compression: Any = Compression.none,
) -> _core.Options:
    wire = native_wire(compression)
    return ops.reduction_options(kind, op, prescale, postscale, process_set, wire or 0)


def _reduced(
    how: _core.Options, tensors: Tensors, name: str | None, compression: Any, function: Any
) -> list[torch.Tensor]:
    """Runs the reduction, with gradients by ``function``, on what ``compression`` makes of the
    tensors where the core does not compress."""
    needs_gradient = _needs_gradient(*_listed(tensors))
    if native_wire(compression) is not None:
        if needs_gradient:
            return list(function.apply(how, name, *tensors))
        results: list[torch.Tensor] = _submit_group(how, tensors, name, BLOCKS)
        return results
    compressed = [compression.compress(t if needs_gradient else t.detach()) for t in tensors]

    def decompressed(results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        pairs = zip(results, compressed, strict=True)
        return [compression.decompress(result, context) for result, (_, context) in pairs]

    sent = [tensor for tensor, _ in compressed]
    if needs_gradient:
        return decompressed(function.apply(how, name, *sent))
    results = ops.submit_group(how, sent, name, BLOCKS, decompressed)
    return results


def _tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    _library.check_dense(tensor)
    return [tensor]


def _listed(tensors: Any) -> Tensors:
    """TypeError unless it is a list or tuple of dense tensors; that it is empty is seen later."""
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Sequence):
        raise TypeError(f"expected a list of tensors, got a {type(tensors).__name__}")
    for tensor in tensors:
        _library.check_dense(tensor)
    return tensors


# Gradients. Those of named operations are named, too.


def _needs_gradient(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in tensors)


def _of_gradient(name: str | None) -> str | None:
    return None if name is None else f"{name}.gradient"


def _again(
    how: _core.Options, gradients: Tensors, name: str | None, function: Any
) -> list[torch.Tensor | None]:
    """Runs another reduction on gradients of floating-point tensors; None for the others."""
    floating = [g for g in gradients if g is not None and g.dtype.is_floating_point]
    done = iter(_reduced(how, floating, _of_gradient(name), Compression.none, function))
    return [next(done) if g is not None and g.dtype.is_floating_point else None for g in gradients]


class _Allreduce(torch.autograd.Function):
    """The gradient is reduced in the same way."""

    @staticmethod
    def forward(ctx: Any, how: _core.Options, name: str | None, *tensors: torch.Tensor) -> Any:
        ctx.how, ctx.name = how, name
        return tuple(_submit_group(how, tensors, name, BLOCKS))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, None, *_again(ctx.how, gradients, ctx.name, _Allreduce)


class _Broadcast(torch.autograd.Function):
    """The root gets the mean of the gradients, the others zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, how: _core.Options, name: str | None) -> Any:
        ctx.how, ctx.name = how, name
        return _submit(how, tensor, name, BLOCKS)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        average = ops.options(ALLREDUCE, ops.reduction(Average), 1.0, 1.0, -1, 0, ctx.how.set)
        (mean,) = _again(average, [gradient], ctx.name, _Allreduce)
        is_root = basics.topology().rank == ctx.how.root
        return mean if is_root else torch.zeros_like(gradient), None, None


class _Allgather(torch.autograd.Function):
    """This rank's rows of the mean of the gradients."""

    @staticmethod
    def forward(
        ctx: Any, how: _core.Options, name: str | None, process_set: ProcessSet, *tensors: Any
    ) -> Any:
        ctx.how, ctx.name = how, name

        def finish(results: list[torch.Tensor], rows: list[list[int]]) -> Any:
            own = process_set.rank() if how.set else basics.topology().rank
            ctx.own = [(sum(numbers[:own]), numbers[own or 0]) for numbers in rows]
            return tuple(results)

        return ops.submit_group(how, tensors, name, BLOCKS, finish)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        average = ops.options(ALLREDUCE, ops.reduction(Average), 1.0, 1.0, -1, 0, ctx.how.set)
        means = _again(average, gradients, ctx.name, _Allreduce)
        own = zip(means, ctx.own, strict=True)
        return None, None, None, *(m if m is None else m.narrow(0, *rows) for m, rows in own)


class _Alltoall(torch.autograd.Function):
    """The gradient's rows go back where the tensor's came from."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Any, name: Any, process_set: Any) -> Any:
        rows, received = _exchange(tensor, splits, name, process_set, BLOCKS)
        ctx.received, ctx.name, ctx.process_set = received, name, process_set
        ctx.row_count = len(tensor)
        ctx.mark_non_differentiable(received)
        return rows, received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _received: Any) -> Any:
        back, _ = alltoall(gradient, ctx.received, _of_gradient(ctx.name), ctx.process_set)
        unclaimed = back.new_zeros(ctx.row_count - len(back), *back.shape[1:])
        return torch.cat([back, unclaimed]), None, None, None


class _Reducescatter(torch.autograd.Function):
    """All ranks' gradients, gathered, times the factors, and of a sum times the number of ranks."""

    @staticmethod
    def forward(
        ctx: Any, how: _core.Options, name: str | None, process_set: ProcessSet, *tensors: Any
    ) -> Any:
        ctx.how, ctx.name, ctx.process_set = how, name, process_set
        return tuple(_submit_group(how, tensors, name, BLOCKS))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        is_floating = [g is not None and g.dtype.is_floating_point for g in gradients]
        factor = ctx.how.prescale * ctx.how.postscale
        if ctx.how.op == ops.reduction(Sum):
            factor *= ctx.process_set.size() or 1
        sent = [g * factor for g, is_sent in zip(gradients, is_floating, strict=True) if is_sent]
        done = iter(grouped_allgather(sent, _of_gradient(ctx.name), ctx.process_set))
        return None, None, None, *(next(done) if is_sent else None for is_sent in is_floating)


class _WithProcessSet:
    """An autograd function that is told the process set, as one that is not."""

    def __init__(self, function: Any, process_set: ProcessSet) -> None:
        self._function = function
        self._process_set = process_set

    def apply(self, how: _core.Options, name: str | None, *tensors: torch.Tensor) -> Any:
        return self._function.apply(how, name, self._process_set, *tensors)


def _reducescatter(process_set: ProcessSet) -> _WithProcessSet:
    return _WithProcessSet(_Reducescatter, process_set)
