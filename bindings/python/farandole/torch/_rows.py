"""Allgather, reducescatter and alltoall of torch tensors: those that cut the first dimension.

Of tensors, GPUs and gradients holds what :mod:`farandole.torch._collectives` says. The numbers of
rows that ranks tell each other first stay on the host: also with tensors on a GPU it waits for
these, and for nothing on the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, overload

import torch

from farandole import _alltoall, _gather, _work
from farandole._place import Place
from farandole._rows import check_rows, own_part
from farandole._two_steps import Piece
from farandole._work import Call, Description, Handle, Parameters
from farandole.torch import _devices, _tensors
from farandole.torch._groups import Tensors, describe, out_of_place, run_compressed, use_here
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
    pieces = pieces_of([tensor], "allgather", process_set)
    return _gather.start(pieces, name, lambda g: _devices.use_here(g.tensors[0]))


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: object = None
) -> list[torch.Tensor]:
    """As :func:`allgather` of each tensor, in fewer messages; as many tensors on every rank, all of
    a rank's on one device."""
    pieces = pieces_of(tensors, "allgather", process_set)
    return _gather.run(pieces, name, lambda gathered: use_here(gathered.tensors))


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: object = None
) -> Handle:
    """As :func:`grouped_allgather`; ``synchronize`` the handle."""
    pieces = pieces_of(tensors, "allgather", process_set)
    return _gather.start(pieces, name, lambda gathered: use_here(gathered.tensors))


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
    piece, sends = _exchange(tensor, splits, process_set)
    finish = _output if splits is None else partial(_both, _device_of(splits))
    return _alltoall.run(piece, sends, name, finish)


def alltoall_async(
    tensor: torch.Tensor,
    splits: Splits | None = None,
    name: str | None = None,
    process_set: object = None,
) -> Handle:
    """As :func:`alltoall`; ``synchronize`` the handle, which always gives both, the rows that came
    and how many from each rank. Leave ``tensor`` alone until then."""
    piece, sends = _exchange(tensor, splits, process_set)
    return _alltoall.start(piece, sends, name, partial(_both, _device_of(splits)))


def _reducescatter(op: int | None, prescale: float, postscale: float) -> Parameters:
    return Parameters(_work.REDUCESCATTER, _work.reduction(op), prescale, postscale)


def _scatter(
    parameters: Parameters, tensors: Tensors, name: str | None, process_set: object
) -> Call:
    return out_of_place(parameters, tensors, name, process_set, _empty_part)


def _empty_part(source: torch.Tensor) -> torch.Tensor:
    return source.new_empty(own_part(source.shape))


def _exchange(
    tensor: torch.Tensor, splits: Splits | None, process_set: object
) -> tuple[Piece, list[int]]:
    (piece,) = pieces_of([tensor], "alltoall", process_set)
    numbers = splits.detach().cpu().numpy() if isinstance(splits, torch.Tensor) else splits
    return piece, _alltoall.rows_to_each(numbers, piece.shape[0])


def _output(received: _alltoall.Received) -> torch.Tensor:
    return _devices.use_here(received.tensor)


def _both(device: torch.device, received: _alltoall.Received) -> tuple[torch.Tensor, torch.Tensor]:
    fits = max(received.splits) < 2**31
    splits = torch.tensor(received.splits, dtype=torch.int32 if fits else torch.int64)
    return _devices.use_here(received.tensor), splits.to(device)


def _device_of(splits: Any) -> torch.device:
    return splits.device if isinstance(splits, torch.Tensor) else torch.device("cpu")


def pieces_of(tensors: Tensors, function: str, process_set: object) -> list[Piece]:
    """Tensors as ``function`` sends them."""
    descriptions, place = describe(tensors, function, process_set)
    return [_piece(t, d, place, function) for t, d in zip(tensors, descriptions, strict=True)]


def _piece(
    tensor: torch.Tensor, description: Description, place: Place | None, function: str
) -> Piece:
    _, dtype, shape = description
    source = _tensors.canonical(tensor)

    def allocate(shape: tuple[int, ...]) -> tuple[torch.Tensor, int | None]:
        result = source.new_empty(shape)
        return result, _tensors.address(result)

    checked = check_rows(shape, function)
    return Piece(dtype, checked, _tensors.address(source), allocate, source, place)
