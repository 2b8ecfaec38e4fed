"""Arrays in a GPU's memory, of whatever library: ``__cuda_array_interface__`` or DLPack.

No library is imported. An array says itself in which stream it is made, and is asked again when the
result is waited for: with CuPy that is CuPy's current stream. One that names no stream, and one that
is known through DLPack alone, are ordered with CUDA's legacy default stream.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from typing import Any, Final, NamedTuple

import numpy as np

from farandole import _dlpack, _work
from farandole._place import Place, Stream

_LEGACY_DEFAULT: Final = 1  # in both interfaces; farandole_stream knows it as null
_DEVICE_ORDINAL: Final = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_IMMUTABLE: Final = ("jax", "jaxlib", "tensorflow")


class GpuArray(NamedTuple):
    """What is needed to reduce it.

    Attributes:
        address: Of the first element; None if there are none.
        dtype: The C ABI's number.
        shape: Of the array, whose elements lie in C order without gaps.
        place: Its GPU.
        is_mutable: False also where nobody knows.
        memory: Keeps it alive.
    """

    address: int | None
    dtype: int
    shape: tuple[int, ...]
    place: Place
    is_mutable: bool
    memory: object


def is_on_gpu(tensor: Any) -> bool:
    """Whether ``tensor`` is an array in the memory of an NVIDIA GPU."""
    if isinstance(tensor, np.ndarray):
        return False
    if hasattr(tensor, "__dlpack_device__"):
        return int(tensor.__dlpack_device__()[0]) in _dlpack.CUDA_KINDS
    return hasattr(tensor, "__cuda_array_interface__")


def read(tensor: Any, function: str) -> GpuArray:
    """Where the array is and what it holds.

    Raises:
        TypeError: Its dtype is not supported.
        ValueError: Its elements do not lie in C order without gaps; or its GPU cannot be told.
    """
    if _library_of(tensor) == "torch":
        array = _read_torch(tensor)
    elif hasattr(tensor, "__cuda_array_interface__"):
        array = _read_interface(tensor)
    else:
        array = _read_dlpack(tensor)
    if array is None:
        raise ValueError(
            f"{function}: the array of shape {list(tensor.shape)} does not lie in C order without "
            "gaps; pass a contiguous one"
        )
    return array


def read_mutable(tensor: Any, function: str) -> GpuArray:
    """As :func:`read`; TypeError unless the array may be changed in place."""
    array = read(tensor, function)
    if not array.is_mutable or _library_of(tensor) in _IMMUTABLE:
        raise TypeError(
            f"{function}_ cannot know that {type(tensor).__name__} may be changed in place; "
            f"use {function}"
        )
    return array


def empty(tensor: Any, function: str, shape: tuple[int, ...]) -> Any:
    """A new array like ``tensor``, of that shape, for a result.

    Raises:
        TypeError: The library of ``tensor`` makes none.
    """
    make = getattr(sys.modules.get(_library_of(tensor)), "empty_like", None)
    if make is None:
        in_place = f"use {function}_, which changes the array in place, or "
        raise TypeError(
            f"{function} cannot make a {type(tensor).__name__} for the result; "
            f"{'' if function == 'reducescatter' else in_place}copy it to the host"
        )
    if shape == tuple(tensor.shape):
        return make(tensor)
    return tensor.new_empty(shape) if hasattr(tensor, "new_empty") else make(tensor, shape=shape)


class _ArrayPlace:
    """The GPU of an array that names its stream, or of one that does not."""

    def __init__(self, device: int, tensor: Any = None) -> None:
        self._device = device
        self._tensor = tensor

    def stream(self) -> Stream:
        """The array's own, as it says now; else the legacy default stream."""
        said = getattr(self._tensor, "__cuda_array_interface__", {})
        handle = said.get("stream") or _LEGACY_DEFAULT
        return self._device, 0 if handle == _LEGACY_DEFAULT else int(handle)

    def using(self, stream: Stream) -> contextlib.AbstractContextManager[object]:
        """Not possible without knowing the library."""
        raise NotImplementedError


def _library_of(tensor: Any) -> str:
    return type(tensor).__module__.partition(".")[0]


def _read_torch(tensor: Any) -> GpuArray | None:
    from farandole.torch import _devices, _tensors  # torch was imported by whoever made the tensor

    if not tensor.is_contiguous():
        return None
    _, dtype, shape = _tensors.describe(tensor)
    place = _devices.place_of(tensor)
    assert place is not None
    return GpuArray(_tensors.address(tensor), dtype, shape, place, True, tensor)


def _read_interface(tensor: Any) -> GpuArray | None:
    said = tensor.__cuda_array_interface__
    dtype, shape = np.dtype(said["typestr"]), tuple(said["shape"])
    if said.get("mask") is not None:
        raise TypeError(f"{type(tensor).__name__} with a mask is not supported")
    strides = said.get("strides")
    if strides is not None and not _dlpack.is_c_order(shape, [s / dtype.itemsize for s in strides]):
        return None
    address, is_read_only = said["data"]
    place = _ArrayPlace(_device_of(tensor, address), tensor)
    number = _number(dtype.name if dtype.isnative else str(dtype))
    return GpuArray(address or None, number, shape, place, not is_read_only, tensor)


def _read_dlpack(tensor: Any) -> GpuArray | None:
    view = _dlpack.view(tensor, _LEGACY_DEFAULT)
    if not view.is_c_order:
        return None
    is_mutable = view.is_writable or _library_of(tensor) == "cupy"
    return GpuArray(
        view.address, _number(view.dtype), view.shape, _ArrayPlace(view.device), is_mutable,
        (tensor, view.owner),
    )  # fmt: skip


def _number(dtype: str) -> int:
    number = _work.DTYPES.get(dtype)
    if number is None:
        raise TypeError(f"dtype {dtype!r} is not supported; use one of {list(_work.DTYPES)}")
    return number


def _device_of(tensor: Any, address: int) -> int:
    """The number of the GPU. The interface does not tell it: DLPack does, or CUDA's driver."""
    if hasattr(tensor, "__dlpack_device__"):
        return int(tensor.__dlpack_device__()[1])
    device = ctypes.c_int(-1)
    try:
        ask = ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute
        code = ask(ctypes.byref(device), _DEVICE_ORDINAL, ctypes.c_uint64(address))
    except (OSError, AttributeError) as error:
        raise ValueError(f"the GPU of {type(tensor).__name__} cannot be told: {error}") from error
    if code != 0:
        raise ValueError(
            f"the GPU of {type(tensor).__name__} cannot be told: cuPointerGetAttribute for address "
            f"{address:#x} gave CUDA error {code}"
        )
    return device.value
