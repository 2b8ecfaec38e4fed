"""The devices and streams of gradients, as torch says.

For tensors in host memory torch.cuda is never called. For those on a GPU streams are read on the
calling thread at the moment of the call: gradient hooks run on a thread of autograd's, whose current
stream is that of the gradient. No other GPU than the tensors' is touched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

import torch

from farandole.torch import _library

Stream = tuple[int, int]  #: CUDA device as this process numbers them, cudaStream_t


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
            with torch.cuda.stream(_stream_object(device, handle)):
                yield


def _stream_object(device: int, handle: int) -> torch.cuda.Stream:
    """torch's object for a stream; for 0 ExternalStream would take one of torch's pool."""
    if handle == 0:
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(handle, device=device)


def context_of(tensor: torch.Tensor) -> DeviceContext | None:
    """The tensor's GPU; None for host memory.

    Raises:
        ValueError: It is anywhere else; the message names the device.
    """
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
