"""Collectives on torch tensors, with Horovod's names and arguments.

Tensors are in host memory or on one NVIDIA GPU and have any strides; what is not contiguous is
copied. Inputs that require a gradient are taken by value: the result is a plain tensor, and no
gradient flows through a collective.

On a GPU a collective behaves like a kernel of torch's. It comes after what the current stream of the
calling thread holds, so that a tensor made on a side stream is right if that stream is current at
the call; the result is there for what is put into the current stream after the call, or after
``synchronize``. The host waits until the collective is in a stream, never for its end. Inputs and
results may be dropped at any time: their memory stays until the GPU is done with it, and needs no
``record_stream``. During ``torch.cuda.graph`` capture a collective is refused.

Choose a rank's GPU early, ``torch.cuda.set_device(local_rank())``: that of its first collective is
its home. Tensors on another device meet those of the devices whose numbers are as far from the other
ranks' homes. This package touches no device that holds no tensor of a call.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from farandole import _work
from farandole._work import Call, Description, Handle, Parameters
from farandole.torch import _devices, _tensors
from farandole.torch.compression import Compression, native_wire


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: object = None,
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
        process_set: Only the global one for now.
    Returns:
        A new tensor on the same device, bitwise the same on all ranks of a host. It is detached:
        gradients do not flow through.
    Raises:
        MismatchError: Ranks passed different shapes, dtypes, operations or factors.
        ValueError: ``average`` and ``op`` are both given; the dtype is not supported.
    """
    wire = native_wire(compression)
    parameters = reduction(average, op, wire or 0, prescale_factor, postscale_factor)
    if wire is not None:
        return _work.run(_new(parameters, tensor, name, process_set))
    compressed, context = compression.compress(tensor.detach())
    call = _new(parameters, compressed, name, process_set)
    return _work.run(call._replace(finish=lambda: compression.decompress(call.finish(), context)))


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: object = None,
) -> Handle:
    """As :func:`allreduce`; ``synchronize`` the handle. Leave ``tensor`` alone until then."""
    parameters = reduction(average, op, 0, prescale_factor, postscale_factor)
    return _work.start(_new(parameters, tensor, name, process_set))


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: object = None,
) -> torch.Tensor:
    """As :func:`allreduce`, in place. Returns ``tensor``."""
    parameters = reduction(average, op, 0, prescale_factor, postscale_factor)
    return _work.run(_in_place(parameters, tensor, name, process_set))


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: object = None,
) -> Handle:
    """As :func:`allreduce_`; ``synchronize`` the handle, which gives ``tensor``."""
    parameters = reduction(average, op, 0, prescale_factor, postscale_factor)
    return _work.start(_in_place(parameters, tensor, name, process_set))


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: object = None
) -> torch.Tensor:
    """Gives every rank the values of ``root_rank``.

    Args:
        tensor: Same shape and dtype on all ranks; only the root's values matter.
        root_rank: 0 <= root_rank < size(), the same on all ranks.
        name: As for :func:`allreduce`.
        process_set: Only the global one for now.
    Returns:
        A new, detached tensor on the same device.
    Raises:
        MismatchError: Ranks passed different shapes, dtypes or roots.
        ValueError: There is no such rank; the dtype is not supported.
    """
    return _work.run(_new(_root(root_rank), tensor, name, process_set))


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: object = None
) -> Handle:
    """As :func:`broadcast`; ``synchronize`` the handle."""
    return _work.start(_new(_root(root_rank), tensor, name, process_set))


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: object = None
) -> torch.Tensor:
    """As :func:`broadcast`, in place. Returns ``tensor``."""
    return _work.run(_in_place(_root(root_rank), tensor, name, process_set))


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: object = None
) -> Handle:
    """As :func:`broadcast_`; ``synchronize`` the handle, which gives ``tensor``."""
    return _work.start(_in_place(_root(root_rank), tensor, name, process_set))


def broadcast_named(
    named: Sequence[tuple[str, torch.Tensor]], parameters: Parameters, name: str
) -> None:
    """Broadcasts tensors in place: those of each device in one operation.

    All have one name, so that ranks whose tensors are in different places are told, and do not
    wait for one another.

    Args:
        named: The same names, shapes, dtypes and kinds of place on every rank.
        parameters: Of the broadcast.
        name: Of the operation.
    """
    parts: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    for item in named:
        parts.setdefault(item[1].device, []).append(item)
    for part in parts.values():
        _broadcast_part(part, parameters, name)


def _broadcast_part(
    named: Sequence[tuple[str, torch.Tensor]], parameters: Parameters, name: str
) -> None:
    descriptions = tuple(_tensors.describe(tensor, label) for label, tensor in named)
    place = _devices.common_place((tensor for _, tensor in named), name)
    wires = [_tensors.canonical(tensor) for _, tensor in named]
    addresses = [_tensors.address(wire) for wire in wires]

    def finish() -> None:
        for (_, tensor), wire in zip(named, wires, strict=True):
            _tensors.copy_into(tensor, wire)

    memory = (named, wires)
    _work.run(
        Call(parameters, name, descriptions, addresses, addresses, memory, finish, place=place)
    )


def reduction(
    average: bool | None,
    op: int | None,
    wire: int,
    prescale: float,
    postscale: float,
) -> Parameters:
    """Of an allreduce; ``average`` is Horovod's old way to say ``op``."""
    if average is not None:
        if op is not None:
            raise ValueError("The op parameter supersedes average; give only one of them.")
        warnings.warn("average= is deprecated; use op=", DeprecationWarning, stacklevel=3)
        op = _work.Average if average else _work.Sum
    return Parameters(_work.ALLREDUCE, _work.reduction(op), prescale, postscale, wire=wire)


def _root(root_rank: int) -> Parameters:
    return Parameters(_work.BROADCAST, root=_work.check_root(root_rank))


def _new(
    parameters: Parameters, tensor: torch.Tensor, name: str | None, process_set: object
) -> Call:
    _work.default_process_set(process_set)
    description = _tensors.describe(tensor)
    source = _tensors.canonical(tensor)
    result = torch.empty_like(source, memory_format=torch.contiguous_format)
    finish = partial(_devices.use_here, result)
    return _call(parameters, name, description, source, result, finish)


def _in_place(
    parameters: Parameters, tensor: torch.Tensor, name: str | None, process_set: object
) -> Call:
    _work.default_process_set(process_set)
    description = _tensors.describe(tensor)
    wire = _tensors.canonical(tensor)

    def finish() -> torch.Tensor:
        _tensors.copy_into(tensor, wire)
        return tensor

    return _call(parameters, name, description, wire, wire, finish)


def _call(
    parameters: Parameters,
    name: str | None,
    description: Description,
    source: torch.Tensor,
    result: torch.Tensor,
    finish: Callable[[], torch.Tensor],
) -> Call:
    inputs, outputs = (_tensors.address(source),), (_tensors.address(result),)
    place = _devices.place_of(source)
    return Call(
        parameters, name, (description,), inputs, outputs, (source, result), finish, place=place
    )
