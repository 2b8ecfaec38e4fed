"""On which device and in which form one optimizer's gradients travel.

As they are, in their own dtype and in the parameter's memory order where that order is one of two, rows
first or channels last, so that a dense gradient travels without a copy. Ranks that disagree are told
apart by the shape they announce; where both orders announce the same shape, rows first is used and
channels-last gradients are copied. Or as a user's ``compress`` makes them; what it makes of zeros tells
every rank what will travel.

Both put the elements on one device, whatever the parameter's. For tensors in host memory torch.cuda is
never called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from farandole import _core
from farandole.torch import _library

Stream = tuple[int, int]  #: CUDA device as this process numbers them, cudaStream_t

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class CudaContext:
    """One CUDA device as torch uses it."""

    __slots__ = ("_device",)

    def __init__(self, device: int) -> None:
        self._device = device

    @contextlib.contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        """Makes ``stream`` the current one for the length of a ``with`` block."""
        device, handle = stream
        # The device first: coming back from another one, torch.cuda.stream() would set device 0 on a
        # thread that never chose one, which makes a context there.
        with torch.cuda.device(device):
            if handle == 0:  # of which ExternalStream would make one of torch's pool
                torch_stream = torch.cuda.default_stream(device)
            else:
                torch_stream = torch.cuda.ExternalStream(handle, device=device)
            with torch.cuda.stream(torch_stream):
                yield


def context_of(tensor: torch.Tensor) -> CudaContext | None:
    """The tensor's GPU; None for host memory; ValueError, which names the device, for any other."""
    _library.check_device(tensor)
    return None if tensor.device.type == "cpu" else CudaContext(tensor.device.index)


class DefaultDevice(NamedTuple):
    """Where the gradients of one optimizer travel; those of parameters elsewhere are copied there."""

    device: torch.device
    context: CudaContext | None  #: None: host memory.
    like: torch.Tensor | None  #: A parameter there; None: host memory.


def default_device_of(parameters: Iterable[torch.Tensor]) -> DefaultDevice:
    """The first GPU that holds a parameter; without one host memory."""
    for parameter in parameters:
        context = context_of(parameter)
        if context is not None:
            return DefaultDevice(parameter.device, context, parameter)
    return DefaultDevice(torch.device("cpu"), None, None)


def is_channels_last(parameter: torch.Tensor) -> bool:
    """Whether the parameter's gradients travel in that memory order, and not rows first."""
    order = _CHANNELS_LAST.get(parameter.dim())
    if order is None or parameter.is_contiguous():
        return False
    is_told_apart = wire_shape(parameter, True) != list(parameter.shape)
    return is_told_apart and parameter.is_contiguous(memory_format=order)


def wire_shape(parameter: torch.Tensor, channels_last: bool) -> list[int]:
    """The shape to announce."""
    shape = list(parameter.shape)
    return [shape[0], *shape[2:], shape[1]] if channels_last else shape


def memory_format(dim: int, channels_last: bool) -> torch.memory_format:
    """torch's name of the order in which gradients of so many dimensions travel."""
    return _CHANNELS_LAST[dim] if channels_last else torch.contiguous_format


class Compressed:
    """Gradients of one parameter, which travel as a user's class compresses them.

    Args:
        slot: The parameter, and the gradients' dtype.
        compression: An object with ``compress`` and ``decompress``.
        device: Where gradients travel.
    """

    __slots__ = ("_name", "_compression", "_device", "_like", "_context", "_shape")

    def __init__(self, slot: _core.GradientSlot, compression: Any, device: torch.device) -> None:
        self._name = slot.name
        self._shape = slot.parameter.shape
        self._compression = compression
        self._device = device
        zeros = torch.zeros_like(slot.parameter, dtype=slot.dtype, requires_grad=False)
        wire, self._context = compression.compress(zeros)
        self._like = _library.canonical(wire).to(device)

    def describe(self) -> _core.GradientDescription:
        """Dtype and shape of what ``compress`` makes."""
        return _core.GradientDescription(_library.number_of(self._like.dtype), list(self._like.shape))

    def pack(self, grad: torch.Tensor) -> torch.Tensor:
        """The compressed gradient.

        Raises:
            ValueError: It differs in shape or dtype from what ``compress`` made of zeros.
        """
        compressed, self._context = self._compression.compress(grad.detach())
        wire = _library.canonical(compressed).to(self._device)
        if wire.shape != self._like.shape or wire.dtype != self._like.dtype:
            raise ValueError(
                f'compress() made {wire.dtype} {list(wire.shape)} of the gradient of "{self._name}"'
                f"; expected {self._like.dtype} {list(self._like.shape)}, as it made of zeros"
            )
        # What was compressed must survive: it may be the gradient itself.
        return wire.clone() if _library.shares_memory(grad, wire) else wire

    def pack_absent(self) -> None:
        """Nothing travels where this rank has no gradient."""

    def unpack(self, wire: torch.Tensor) -> torch.Tensor:
        """The decompressed result."""
        result: torch.Tensor = self._compression.decompress(wire, self._context)
        if result.shape != self._shape:
            raise ValueError(f'decompress() made {list(result.shape)} for "{self._name}"; expected {list(self._shape)}')
        return result
