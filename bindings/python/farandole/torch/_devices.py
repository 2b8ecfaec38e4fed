"""Where a torch tensor is: the one place of the package that asks torch about devices and streams.

For tensors in host memory torch.cuda is never called. For those on a GPU streams are read on the
calling thread at the moment of the call: gradient hooks run on a thread of autograd's, whose current
stream is that of the gradient. No other GPU than the tensors' is touched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from farandole import _core
from farandole._place import Place, Stream


class CudaPlace:
    """A CUDA device; see :class:`farandole._place.Place`."""

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


def place_of(tensor: torch.Tensor) -> Place | None:
    """The tensor's GPU; None for host memory.

    Raises:
        ValueError: It is anywhere else; the message names the device.
    """
    device = tensor.device
    if device.type == "cpu":
        return None
    if device.type != "cuda" or torch.version.hip is not None:
        kind = "an AMD GPU" if device.type == "cuda" else f'"{device}"'
        raise ValueError(
            f"a tensor of shape {list(tensor.shape)} is on {kind}; Farandole reduces tensors on the "
            "CPU and on NVIDIA GPUs: pass tensor.cpu()"
        )
    return CudaPlace(device.index)


def common_place(tensors: Iterable[torch.Tensor], function: str) -> Place | None:
    """The place of tensors that travel together.

    Raises:
        ValueError: They are in different places; the message names two.
    """
    tensors = list(tensors)
    for tensor in tensors[1:]:
        if tensor.device != tensors[0].device:
            raise ValueError(
                f"{function}: tensors on {tensors[0].device} and on {tensor.device}; those of one "
                "call must be on one device"
            )
    return place_of(tensors[0])


class Home(NamedTuple):
    """Where the gradients of one optimizer travel; those of parameters elsewhere are copied there."""

    device: torch.device
    place: Place | None


def home_of(parameters: Iterable[torch.Tensor]) -> Home:
    """The first GPU among the parameters' places; without one host memory."""
    for parameter in parameters:
        place = place_of(parameter)
        if place is not None:
            return Home(parameter.device, place)
    return Home(torch.device("cpu"), None)


class Exported:
    """A result in a GPU's memory as bytes that torch can make a tensor of, which keeps it alive."""

    def __init__(self, result: _core.Result) -> None:
        self._result = result
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (result.nbytes,),
            "typestr": "|u1",
            "data": (result.address, False),
        }


def use_here(tensor: torch.Tensor) -> torch.Tensor:
    """Tells torch's allocator that the current stream uses the tensor, and gives it back.

    Needed for memory that was allocated while another stream may have been current.
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor
