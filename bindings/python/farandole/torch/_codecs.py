"""How one parameter's gradients become elements on the wire and come back, and on which device.

*Direct*: as they are, in their own dtype and in the parameter's memory order where that order is one
of two, rows first or channels last, so that a dense gradient travels without a copy. Ranks that
disagree are told apart by the shape they announce; where both orders announce the same shape, rows
first is used and channels-last gradients are copied.

*Compressed*: as a user's ``compress`` makes them; what it makes of zeros tells every rank what will
travel.

Both put the elements on one device, whatever the parameter's. For tensors in host memory torch.cuda is
never called. For those on a GPU streams are read on the calling thread, in the call:
gradient hooks run on a thread of autograd's, whose current stream is that of the gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch

from farandole import _core
from farandole.torch import _library

Stream = tuple[int, int]  #: CUDA device as this process numbers them, cudaStream_t

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class DeviceContext(Protocol):
    """A CUDA device as one framework uses it. Host memory has none: there it is None."""

    def stream(self) -> Stream:
        """The calling thread's current stream there."""
        ...

    def using(self, stream: Stream) -> contextlib.AbstractContextManager[object]:
        """Makes ``stream`` the calling thread's current one for the length of a ``with`` block."""
        ...


class CudaContext:
    """torch's own."""

    __slots__ = ("_device",)

    def __init__(self, device: int) -> None:
        self._device = device

    def stream(self) -> Stream:
        """The calling thread's current stream there."""
        return self._device, torch.cuda.current_stream(self._device).cuda_stream

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


def context_of(tensor: torch.Tensor) -> DeviceContext | None:
    """The tensor's GPU; None for host memory; ValueError, which names the device, for any other."""
    _library.check_device(tensor)
    return None if tensor.device.type == "cpu" else CudaContext(tensor.device.index)


class DefaultDevice(NamedTuple):
    """Where the gradients of one optimizer travel; those of parameters elsewhere are copied there."""

    device: torch.device
    context: DeviceContext | None


def default_device_of(parameters: Iterable[torch.Tensor]) -> DefaultDevice:
    """The first GPU that holds a parameter; without one host memory."""
    for parameter in parameters:
        context = context_of(parameter)
        if context is not None:
            return DefaultDevice(parameter.device, context)
    return DefaultDevice(torch.device("cpu"), None)


def gradient_dtype(parameter: torch.Tensor, last: torch.dtype | None) -> torch.dtype:
    """The dtype of the parameter's gradient, or of the next one where it has none.

    torch >= 2.10 lets a parameter's ``grad_dtype`` differ from its dtype, or be None for any dtype;
    then the next gradient is expected to be as the ``last`` one seen.
    """
    if parameter.grad is not None:
        return parameter.grad.dtype
    return getattr(parameter, "grad_dtype", parameter.dtype) or last or parameter.dtype


def _wire_order(tensor: torch.Tensor) -> tuple[torch.memory_format, tuple[int, ...]]:
    """The memory format in which a parameter's gradients travel, and the shape to announce."""
    shape = tuple(tensor.shape)
    channels_last = _CHANNELS_LAST.get(tensor.dim())
    if channels_last is None or tensor.is_contiguous():
        return torch.contiguous_format, shape
    moved = (shape[0], *shape[2:], shape[1])
    if moved == shape or not tensor.is_contiguous(memory_format=channels_last):
        return torch.contiguous_format, shape
    return channels_last, moved


class _Codec:
    """For gradients of ``dtype`` and ``shape``, of a parameter that looks as it does now."""

    __slots__ = ("_parameter", "_look", "_device", "dtype", "shape")

    def __init__(
        self, parameter: torch.Tensor, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._parameter = parameter
        self._look = self._look_now()
        self._device = device
        self.dtype = dtype
        self.shape = parameter.shape

    def fits(self, slot: _core.GradientSlot) -> bool:
        """Whether parameter and dtype of gradients are still what they were."""
        return (
            self._look_now() == self._look
            and gradient_dtype(self._parameter, slot.last_dtype) == self.dtype
        )

    def _look_now(self) -> tuple[torch.dtype, torch.device, torch.Size, tuple[int, ...]]:
        parameter = self._parameter
        return parameter.dtype, parameter.device, parameter.shape, parameter.stride()


class Direct(_Codec):
    """Gradients travel in their own dtype and their parameter's memory order, on ``device``."""

    __slots__ = ("_format", "_shape")

    def __init__(
        self, parameter: torch.Tensor, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(parameter, dtype, device)
        self._format, self._shape = _wire_order(parameter)

    @property
    def is_plain(self) -> bool:
        """Whether a gradient in host memory in C order travels as it is."""
        return self._device.type == "cpu" and self._format is torch.contiguous_format

    def describe(self) -> tuple[int, tuple[int, ...]]:
        """Dtype's number and shape on the wire."""
        return _library.number_of(self.dtype), self._shape

    def pack(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient, of ``dtype`` and ``shape``, in wire form: itself if it is like that already."""
        is_here = grad.device == self._device and not grad.is_neg()  # whose memory holds -grad
        if is_here and grad.is_contiguous(memory_format=self._format):
            return grad
        return grad.detach().to(self._device).resolve_neg().contiguous(memory_format=self._format)

    def receive_buffer(self) -> torch.Tensor:
        """Memory for the result where this rank has no gradient; not initialised."""
        return torch.empty(
            self.shape, dtype=self.dtype, device=self._device, memory_format=self._format
        )

    def unpack(self, wire: torch.Tensor) -> torch.Tensor:
        """The gradient that came."""
        return wire


class Compressed(_Codec):
    """Gradients travel as a user's class compresses them."""

    __slots__ = ("_name", "_compression", "_like", "_context")

    def __init__(
        self,
        name: str,
        parameter: torch.Tensor,
        dtype: torch.dtype,
        compression: Any,
        device: torch.device,
    ) -> None:
        super().__init__(parameter, dtype, device)
        self._name = name
        self._compression = compression
        zeros = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        wire, self._context = compression.compress(zeros)
        self._like = _library.canonical(wire).to(device)

    is_plain = False

    def describe(self) -> tuple[int, tuple[int, ...]]:
        """Dtype's number and shape of what ``compress`` makes."""
        return _library.number_of(self._like.dtype), tuple(self._like.shape)

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

    def receive_buffer(self) -> torch.Tensor:
        """Memory for the result where this rank has no gradient; not initialised."""
        return torch.empty_like(self._like)

    def unpack(self, wire: torch.Tensor) -> torch.Tensor:
        """The decompressed result."""
        result: torch.Tensor = self._compression.decompress(wire, self._context)
        if result.shape != self.shape:
            raise ValueError(
                f'decompress() made {list(result.shape)} for "{self._name}"; '
                f"expected {list(self.shape)}"
            )
        return result


Codec = Direct | Compressed
