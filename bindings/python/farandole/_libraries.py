"""What the libraries of arrays are asked in Python; the extension reads arrays by itself.

``_core`` calls :func:`library_of` once per type of arrays and asks the object that it gives:

``is_mutable``: arrays may be changed in place. ``is_lazy``, optional: they have ``is_neg()`` and
    ``is_conj()``, which say that memory does not hold the values.
``canonical(arrays, function, in_place, moves_bytes)``: arrays that can be read as they are, for those of
    a call of which some cannot: strided ones are copied, unsupported ones refused. ``moves_bytes`` is
    true of collectives that move elements of any dtype.
``empty(like, shape)``, ``wrap(memory, like, shape)``: an array for a result; one over the memory of a
    ``_core.ResultMemory``. Not asked where the type has DLPack's C functions.
``result(made, target)``, ``written(target, source)``, ``use_here(made, target)``: optional; what users
    get of a result, what to do after an in-place result, and on a GPU before one is used.
``read(array)``, ``stream(array)``: optional; ``(address, dtype name, shape, is C-contiguous, CUDA device
    or -1, is writable)`` or None, instead of reading the array itself; the current stream of its GPU
    as ``(device, handle)``.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import math
import sys
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from farandole import _core

#: Dtypes that can be reduced, and those that can be moved, too: farandole_dtype of the C ABI.
DTYPES: Final = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64".split()
ALL_DTYPES: Final = (
    *DTYPES, *"uint16 uint32 uint64 complex64 complex128 float8_e4m3fn float8_e5m2".split()
)  # fmt: skip

Array = npt.NDArray[Any]
Shape = tuple[int, ...]

_CUDA_KINDS: Final = (2, 13)  # kDLCUDA, kDLCUDAManaged
_IMMUTABLE: Final = ("jax", "jaxlib", "tensorflow", "mlx")
_LEGACY_DEFAULT: Final = 1  # a stream; farandole_stream knows it as null
_DEVICE_ORDINAL: Final = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL


def library_of(array: Any) -> Any:
    """The object described above for arrays of this type."""
    name = _name_of(array)
    if name == "torch":
        importlib.import_module("farandole.torch")  # registers its own
    if isinstance(array, np.ndarray | np.generic):
        return NUMPY
    has_dlpack = hasattr(array, "__dlpack__")
    lives_anywhere = has_dlpack and name in _IMMUTABLE  # one type for the host and GPUs
    if not lives_anywhere and hasattr(array, "__cuda_array_interface__") and _is_on_gpu(array):
        return CudaArrays()
    if has_dlpack:
        return Dlpack(name not in _IMMUTABLE)
    return NUMPY


class NumPy:
    """Arrays in host memory: NumPy's, and whatever has the buffer protocol."""

    is_mutable = True

    def canonical(
        self, arrays: Sequence[Any], function: str, in_place: bool, moves_bytes: bool
    ) -> list[Any]:
        """See above.

        Raises:
            TypeError: It is no array, or of no usable dtype.
            ValueError: In place: it is read-only, or its elements do not lie in C order.
        """
        return [self._canonical(array, function, in_place, moves_bytes) for array in arrays]

    def _canonical(self, tensor: Any, function: str, in_place: bool, moves_bytes: bool) -> Any:
        array = as_array(tensor)
        check_dtype(array.dtype, moves_bytes)
        if in_place and not (array.flags.c_contiguous and array.flags.writeable):
            raise ValueError(
                f"{function}_ needs writable C-contiguous memory; got shape {array.shape}, strides "
                f"{array.strides}, C-contiguous: {array.flags.c_contiguous}, writable: "
                f"{array.flags.writeable}; {function} returns a new array instead"
            )
        return _readable(np.asarray(array, order="C"))

    def empty(self, like: Any, shape: Shape) -> Any:
        """See above."""
        dtype = like.dtype if isinstance(like, np.ndarray) else as_array(like).dtype
        return np.empty(shape, dtype)

    def wrap(self, memory: _core.ResultMemory, like: Any, shape: Shape) -> Array:
        """See above."""
        dtype = as_array(like).dtype
        return np.ndarray(shape, dtype, memory)  # type: ignore[call-overload, no-any-return]


NUMPY: Final = NumPy()


class _Extended:
    """An array of a dtype that extends NumPy, of which the buffer protocol knows nothing: bfloat16."""

    def __init__(self, array: Array) -> None:
        self.array = array


class _ExtendedLibrary:
    is_mutable = True

    def read(self, extended: _Extended) -> tuple[int, str, Shape, bool, int, bool]:
        array = extended.array
        return array.ctypes.data, array.dtype.name, array.shape, True, -1, array.flags.writeable

    def empty(self, like: _Extended, shape: Shape) -> _Extended:
        return _Extended(np.empty(shape, like.array.dtype))

    def result(self, made: Any, _target: object) -> Any:
        return made.array


_core.use_library(_Extended, _ExtendedLibrary())


class _OnGpu:
    """Results are made by the library of the arrays."""

    is_mutable = True

    def empty(self, like: Any, shape: Shape) -> Any:
        """Made by the library of ``like``.

        Raises:
            TypeError: It makes none.
        """
        make = getattr(sys.modules.get(_name_of(like)), "empty_like", None)
        if make is None:
            raise TypeError(
                f"there is no way to make a {type(like).__name__} for the result; copy it to the host, "
                "or use allreduce_, or use broadcast_, which change the array in place"
            )
        return make(like) if shape == tuple(like.shape) else make(like, shape=shape)

    def wrap(self, memory: _core.ResultMemory, like: Any, shape: Shape) -> Any:
        """As the array API standard makes an array of DLPack's.

        Raises:
            TypeError: The library makes none.
        """
        del shape
        make = getattr(sys.modules.get(_name_of(like)), "from_dlpack", None)
        if make is None:
            raise TypeError(
                f"there is no way to make a {type(like).__name__} of the result; on a GPU use "
                "farandole.torch, or copy it to the host"
            )
        return make(memory)


_ON_GPU: Final = _OnGpu()


class CudaArrays(_OnGpu):
    """Arrays on an NVIDIA GPU with ``__cuda_array_interface__``: CuPy's, Numba's.

    An array says itself in which stream it is made, and is asked again when the result is waited for:
    with CuPy that is CuPy's current stream. One that names none is ordered with CUDA's legacy default
    stream.
    """

    def read(self, array: Any) -> tuple[int, str, Shape, bool, int, bool]:
        """See above."""
        said = array.__cuda_array_interface__
        dtype, shape = np.dtype(said["typestr"]), tuple(said["shape"])
        address, is_read_only = said["data"]
        strides = said.get("strides")
        is_contiguous = strides is None or _is_c_order(shape, strides, dtype.itemsize)
        name = dtype.name if dtype.isnative and said.get("mask") is None else "none"
        is_writable = not is_read_only and _name_of(array) not in _IMMUTABLE
        device = _device_of(array, address)
        return address if math.prod(shape) else 0, name, shape, is_contiguous, device, is_writable

    def stream(self, array: Any) -> tuple[int, int]:
        """The array's own, as it says now; else the legacy default stream."""
        said = array.__cuda_array_interface__
        handle = said.get("stream") or _LEGACY_DEFAULT
        device = _device_of(array, said["data"][0])
        return device, 0 if handle == _LEGACY_DEFAULT else int(handle)

    def canonical(
        self, arrays: Sequence[Any], function: str, in_place: bool, moves_bytes: bool
    ) -> list[Any]:
        """Refuses: on a GPU nothing is copied."""
        for array in arrays:
            said = array.__cuda_array_interface__
            if said.get("mask") is not None:
                raise TypeError(f"{type(array).__name__} with a mask is not supported")
            check_dtype(np.dtype(said["typestr"]), moves_bytes)
            _, _, shape, is_contiguous, _, _ = self.read(array)
            if not is_contiguous:
                raise _not_in_c_order(shape, function)
        raise _cannot_change(arrays[0], function) if in_place else _not_together(arrays, function)


class Dlpack(NumPy):
    """Arrays of another library, in host memory or on a GPU; results are of that library.

    DLPack names no stream: on a GPU they are ordered with the legacy default stream.
    """

    def __init__(self, is_mutable: bool) -> None:
        self.is_mutable = is_mutable

    def _canonical(self, tensor: Any, function: str, in_place: bool, moves_bytes: bool) -> Any:
        if in_place:
            raise _cannot_change(tensor, function)
        if _is_on_gpu(tensor):
            raise _not_in_c_order(tuple(tensor.shape), function)
        return super()._canonical(tensor, function, in_place, moves_bytes)

    def empty(self, like: Any, shape: Shape) -> Any:
        """See above."""
        if _is_on_gpu(like):
            return _ON_GPU.empty(like, shape)
        return _readable(np.empty(shape, _dtype_of(like)))

    def wrap(self, memory: _core.ResultMemory, like: Any, shape: Shape) -> Any:
        """See above."""
        if _is_on_gpu(like):
            return _ON_GPU.wrap(memory, like, shape)
        made = np.ndarray(shape, _dtype_of(like), memory)  # type: ignore[call-overload]
        return self.result(made, like)

    def result(self, made: Any, target: Any) -> Any:
        """An array of the target's library, as the array API standard makes one; else NumPy's."""
        if not isinstance(made, np.ndarray) or not hasattr(target, "__array_namespace__"):
            return made
        return target.__array_namespace__().asarray(made)


def _readable(array: Array) -> Any:
    """The array as the extension can read it."""
    return array if array.dtype.kind in "biufc" else _Extended(array)


def _dtype_of(array: Any) -> np.dtype[Any]:
    """As NumPy knows it; another library may call it ``lib.float32``."""
    dtype = array.dtype
    return dtype if isinstance(dtype, np.dtype) else np.dtype(str(dtype).rpartition(".")[2])


def as_array(tensor: Any) -> Array:
    """``tensor`` as an array over the same memory; TypeError if it is none."""
    if isinstance(tensor, np.ndarray | np.generic):
        return np.asarray(tensor)
    with contextlib.suppress(TypeError):
        return np.asarray(memoryview(tensor))
    if hasattr(tensor, "__dlpack__"):
        return np.from_dlpack(tensor)
    raise TypeError(
        f"{type(tensor).__name__} has neither the buffer protocol nor DLPack; "
        "pass numpy.asarray(...) of it"
    )


def check_dtype(dtype: np.dtype[Any], moves_bytes: bool) -> None:
    """TypeError for a dtype that cannot be reduced, or, with ``moves_bytes``, not be moved."""
    known = ALL_DTYPES if moves_bytes else DTYPES
    if dtype.name not in known or not dtype.isnative:
        raise TypeError(f"dtype {dtype!r} is not supported; use one of {list(known)}")


def _name_of(array: Any) -> str:
    return type(array).__module__.partition(".")[0]


def _is_on_gpu(array: Any) -> bool:
    if hasattr(array, "__dlpack_device__"):
        return int(array.__dlpack_device__()[0]) in _CUDA_KINDS
    return hasattr(array, "__cuda_array_interface__")


def _is_c_order(shape: Shape, strides: Sequence[int], size_bytes: int) -> bool:
    expected = size_bytes
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != expected and 0 not in shape:
            return False
        expected *= length
    return True


def _device_of(array: Any, address: int) -> int:
    """The number of the GPU. The interface does not tell it: DLPack does, or CUDA's driver."""
    if hasattr(array, "__dlpack_device__"):
        return int(array.__dlpack_device__()[1])
    device = ctypes.c_int(-1)
    try:
        ask = ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute
        code = ask(ctypes.byref(device), _DEVICE_ORDINAL, ctypes.c_uint64(address))
    except (OSError, AttributeError) as error:
        raise ValueError(f"the GPU of {type(array).__name__} cannot be told: {error}") from error
    if code != 0:
        raise ValueError(
            f"the GPU of {type(array).__name__} cannot be told: cuPointerGetAttribute for address "
            f"{address:#x} gave CUDA error {code}"
        )
    return device.value


def _cannot_change(array: Any, function: str) -> TypeError:
    return TypeError(
        f"{function}_ cannot know that {type(array).__name__} may be changed in place; "
        f"use {function}"
    )


def _not_in_c_order(shape: Shape, function: str) -> ValueError:
    return ValueError(
        f"{function}: the array of shape {list(shape)} does not lie in C order without gaps; pass a "
        "contiguous one"
    )


def _not_together(arrays: Sequence[Any], function: str) -> ValueError:
    return ValueError(
        f"{function}: the {len(arrays)} arrays cannot travel together; those of one call must be on "
        "one device"
    )
