"""Several torch tensors in one operation: decided together, finished together.

Of tensors, GPUs and gradients holds what :mod:`farandole.torch._collectives` says; all tensors of a
call are on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from farandole import _work
from farandole._place import Place
from farandole._work import Call, Description, Handle, Parameters
from farandole.torch import _devices, _tensors
from farandole.torch._collectives import reduction
from farandole.torch.compression import Compression, native_wire

Tensors = Sequence[torch.Tensor]


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: object = None,
) -> list[torch.Tensor]:
    """As :func:`allreduce` of each tensor, in one operation; as many tensors on every rank."""
    parameters = reduction(average, op, 0, prescale_factor, postscale_factor)
    make = partial(_new, name=name, process_set=process_set)
    return run_compressed(parameters, tensors, compression, make)


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: object = None,
) -> Handle:
    """As :func:`grouped_allreduce`; ``synchronize`` the handle. Leave the tensors alone till then."""
    parameters = reduction(average, op, 0, prescale_factor, postscale_factor)
    return _work.start(_new(parameters, tensors, name, process_set))


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: object = None,
) -> list[torch.Tensor]:
    """As :func:`grouped_allreduce`, in place. Returns the tensors."""
    parameters = reduction(average, op, 0, prescale_factor, postscale_factor)
    return _work.run(_in_place(parameters, tensors, name, process_set))


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: object = None,
) -> Handle:
    """As :func:`grouped_allreduce_`; ``synchronize`` the handle, which gives the tensors."""
    parameters = reduction(average, op, 0, prescale_factor, postscale_factor)
    return _work.start(_in_place(parameters, tensors, name, process_set))


def describe(
    tensors: Tensors, function: str, process_set: object
) -> tuple[tuple[Description, ...], Place | None]:
    """What the tensors are, numbered if there are several, and where.

    Raises:
        TypeError: They are no list or tuple.
        ValueError: There is none; they are on several devices; a dtype is not supported.
    """
    _work.default_process_set(process_set)
    if not isinstance(tensors, Sequence):
        raise TypeError(
            f"{function}: expected a list of tensors, got a {type(tensors).__name__}"
        )
    if not tensors:
        raise ValueError(f"{function}: there must be at least one tensor")
    is_group = len(tensors) > 1
    descriptions = tuple(
        _tensors.describe(tensor, str(i) if is_group else None) for i, tensor in enumerate(tensors)
    )
    return descriptions, _devices.common_place(tensors, function)


def out_of_place(
    parameters: Parameters,
    tensors: Tensors,
    name: str | None,
    process_set: object,
    empty: Callable[[torch.Tensor], torch.Tensor],
) -> Call:
    """One operation on all tensors; ``empty`` makes each one's result. Gives their list."""
    function = _work.KINDS[parameters.kind]
    descriptions, place = describe(tensors, function, process_set)
    sources = [_tensors.canonical(tensor) for tensor in tensors]
    results = [empty(source) for source in sources]
    return Call(
        parameters, name, descriptions,
        [_tensors.address(source) for source in sources],
        [_tensors.address(result) for result in results],
        (sources, results), partial(use_here, results), place=place,
    )  # fmt: skip


def run_compressed(
    parameters: Parameters, tensors: Tensors, compression: Any, make: Callable[..., Call]
) -> list[torch.Tensor]:
    """Runs ``make(parameters, tensors)``, on compressed tensors where the core does not compress.

    Raises:
        ValueError: ``compression`` is none.
    """
    wire = native_wire(compression)
    if wire is not None:
        results: list[torch.Tensor] = _work.run(make(parameters._replace(wire=wire), tensors))
        return results
    compressed = [compression.compress(tensor.detach()) for tensor in tensors]
    call = make(parameters, [tensor for tensor, _ in compressed])

    def decompressed() -> list[torch.Tensor]:
        return [
            compression.decompress(result, context)
            for result, (_, context) in zip(call.finish(), compressed, strict=True)
        ]

    results = _work.run(call._replace(finish=decompressed))
    return results


def use_here(tensors: Tensors) -> list[torch.Tensor]:
    """As :func:`farandole.torch._devices.use_here`, for each."""
    return [_devices.use_here(tensor) for tensor in tensors]


def _new(parameters: Parameters, tensors: Tensors, name: str | None, process_set: object) -> Call:
    return out_of_place(
        parameters, tensors, name, process_set, lambda source: source.new_empty(source.shape)
    )


def _in_place(
    parameters: Parameters, tensors: Tensors, name: str | None, process_set: object
) -> Call:
    descriptions, place = describe(tensors, "allreduce", process_set)
    wires = [_tensors.canonical(tensor) for tensor in tensors]
    addresses = [_tensors.address(wire) for wire in wires]

    def finish() -> list[torch.Tensor]:
        for tensor, wire in zip(tensors, wires, strict=True):
            _tensors.copy_into(tensor, wire)
        return list(tensors)

    memory = (tensors, wires)
    return Call(parameters, name, descriptions, addresses, addresses, memory, finish, place=place)
