"""Allgather, reducescatter and alltoall of torch tensors: those that cut the first dimension.

Of tensors, GPUs and gradients holds what :mod:`farandole.torch._collectives` says. Results of an
allgather or alltoall lie in memory of the library, which lives as long as their tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, overload

import torch

from farandole import _core, _work
from farandole._rows import check_rows, own_part, rows_to_each
from farandole._work import Call, Handle, Parameters
from farandole.torch import _tensors
from farandole.torch._groups import Tensors, describe, out_of_place, run_compressed
from farandole.torch.compression import Compression

Splits = torch.Tensor | Sequence[int]


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: object = None
) -> torch.Tensor:
    """Gives every rank the rows of all ranks, in rank order.

    Args:
        tensor: Of shape [rows, ...]: the number of rows may differ between ranks and be 0, the
            other dimensions and the dtype may not.
        name: As for :func:`allreduce`.
        process_set: Only the global one for now.
    Returns:
        A new, detached tensor of shape [sum of all rows, ...] on the same device.
    Raises:
        MismatchError: Ranks passed different dtypes or dimensions after the first.
        ValueError: A scalar; the dtype is not supported; the name is in flight already.
    """
    return grouped_allgather([tensor], name, process_set)[0]


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: object = None
) -> Handle:
    """As :func:`allgather`; ``synchronize`` the handle. Leave ``tensor`` alone until then."""
    call = gather([tensor], name, process_set)
    return _work.start(call._replace(finish=lambda result: call.finish(result)[0]))


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: object = None
) -> list[torch.Tensor]:
    """As :func:`allgather` of each tensor, in fewer messages; as many tensors on every rank, all of
    a rank's on one device."""
    results: list[torch.Tensor] = _work.run(gather(tensors, name, process_set))
    return results


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: object = None
) -> Handle:
    """As :func:`grouped_allgather`; ``synchronize`` the handle."""
    return _work.start(gather(tensors, name, process_set))


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = _work.Average,
    process_set: object = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """As :func:`allreduce`, but every rank gets a part of the result's rows only.

    Args:
        tensor: Of shape [rows, ...], the same on all ranks.
        name: As for :func:`allreduce`.
        compression: As for :func:`allreduce`.
        op: Average, Sum, Min, Max or Product, as for :func:`allreduce`.
        process_set: Only the global one for now.
        prescale_factor: Multiplies every contribution.
        postscale_factor: Multiplies the result.
    Returns:
        A new, detached tensor of shape [rows of this rank, ...] on the same device: the parts lie
        in rank order in what an allreduce gives, bit for bit, and the first (rows % size) ranks
        get one row more than the others.
    Raises:
        MismatchError: Ranks passed different shapes, dtypes, operations or factors.
        ValueError: A scalar; the dtype is not supported.
    """
    (result,) = grouped_reducescatter(
        [tensor], name, compression, op, process_set, prescale_factor, postscale_factor
    )
    return result


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int | None = _work.Average,
    process_set: object = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """As :func:`reducescatter`; ``synchronize`` the handle. Leave ``tensor`` alone until then."""
    parameters = _reducescatter(op, prescale_factor, postscale_factor)
    call = _scatter(parameters, [tensor], name, process_set)
    return _work.start(call._replace(finish=lambda: call.finish()[0]))


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = _work.Average,
    process_set: object = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """As :func:`reducescatter` of each tensor, in fewer messages; all of a rank's on one device."""
    parameters = _reducescatter(op, prescale_factor, postscale_factor)
    make = partial(_scatter, name=name, process_set=process_set)
    return run_compressed(parameters, tensors, compression, make)


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: int | None = _work.Average,
    process_set: object = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """As :func:`grouped_reducescatter`; ``synchronize`` the handle."""
    parameters = _reducescatter(op, prescale_factor, postscale_factor)
    return _work.start(_scatter(parameters, tensors, name, process_set))


@overload
def alltoall(
    tensor: torch.Tensor, splits: None = None, name: str | None = None, process_set: object = None
) -> torch.Tensor: ...


@overload
def alltoall(
    tensor: torch.Tensor, splits: Splits, name: str | None = None, process_set: object = None
) -> tuple[torch.Tensor, torch.Tensor]: ...


def alltoall(
    tensor: torch.Tensor,
    splits: Splits | None = None,
    name: str | None = None,
    process_set: object = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Gives every rank a part of this rank's rows, and this rank a part of everybody's.

    Args:
        tensor: Of shape [rows, ...]: the first rows go to rank 0, the next to rank 1, and so on.
            The dimensions after the first and the dtype are the same on all ranks.
        splits: Integers, as a tensor or a sequence: how many rows go to each rank; what they leave
            over goes nowhere. None: the same number to each, of which the rows must be a multiple.
            The host reads them: it waits for those on a GPU.
        name: As for :func:`allreduce`.
        process_set: Only the global one for now.
    Returns:
        A new, detached tensor on the same device with the rows that came, in rank order. With
        ``splits`` also how many came from each rank, on the device of ``splits``: int32 [size], or
        int64 if one of the numbers needs it.
    Raises:
        MismatchError: Ranks passed different dtypes or dimensions after the first.
        ValueError: ``splits`` do not fit; a scalar; the dtype is not supported; the name is in
            flight already.
        HorovodInternalError: On all ranks, if one has joined.
    """
    return _work.run(_exchange(tensor, splits, name, process_set, splits is not None))


def alltoall_async(
    tensor: torch.Tensor,
    splits: Splits | None = None,
    name: str | None = None,
    process_set: object = None,
) -> Handle:
    """As :func:`alltoall`; ``synchronize`` the handle, which always gives both, the rows that came
    and how many from each rank. Leave ``tensor`` alone until then."""
    return _work.start(_exchange(tensor, splits, name, process_set, True))


def _reducescatter(op: int | None, prescale: float, postscale: float) -> Parameters:
    return Parameters(_work.REDUCESCATTER, _work.reduction(op), prescale, postscale)


def _scatter(
    parameters: Parameters, tensors: Tensors, name: str | None, process_set: object
) -> Call:
    return out_of_place(parameters, tensors, name, process_set, _empty_part)


def _empty_part(source: torch.Tensor) -> torch.Tensor:
    return source.new_empty(own_part(source.shape))


def gather(
    tensors: Tensors, name: str | None, process_set: object, function: str | None = None
) -> Call:
    """An allgather of all tensors in one operation, of which ``function`` is the user's name."""
    return _call(Parameters(_work.ALLGATHER, function=function), tensors, name, process_set)


def _exchange(
    tensor: torch.Tensor,
    splits: Splits | None,
    name: str | None,
    process_set: object,
    gives_splits: bool,
) -> Call:
    call = _call(Parameters(_work.ALLTOALL), [tensor], name, process_set)
    device = splits.device if isinstance(splits, torch.Tensor) else torch.device("cpu")
    numbers = splits.detach().cpu().numpy() if isinstance(splits, torch.Tensor) else splits
    parameters = call.parameters._replace(splits=rows_to_each(numbers, tensor.shape[0]))

    def finish(result: _core.Result) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        (rows,) = call.finish(result)
        return (rows, _numbers(result.rows, device)) if gives_splits else rows

    return call._replace(parameters=parameters, finish=finish)


def _numbers(rows: list[int], device: torch.device) -> torch.Tensor:
    fits = max(rows) < 2**31
    return torch.tensor(rows, dtype=torch.int32 if fits else torch.int64).to(device)


def _call(
    parameters: Parameters, tensors: Tensors, name: str | None, process_set: object
) -> Call:
    """One operation on all tensors, with results in the library's memory; gives their list."""
    function = parameters.function or _work.KINDS[parameters.kind]
    descriptions, place = describe(tensors, function, process_set)
    for tensor in tensors:
        check_rows(tensor.shape, function)
    sources = [_tensors.canonical(tensor) for tensor in tensors]

    def finish(*results: _core.Result) -> list[torch.Tensor]:
        return [_tensors.over(r, like=s) for r, s in zip(results, sources, strict=True)]

    addresses = [_tensors.address(source) for source in sources]
    return Call(parameters, name, descriptions, addresses, None, sources, finish, place=place)
