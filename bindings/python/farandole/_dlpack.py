"""Reading a DLPack capsule of a GPU's array (github.com/dmlc/dlpack, versions 0 and 1).

The capsule is never consumed: it stays alive as long as the memory is used, and gives the memory back
when it goes, as its producer arranged.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

CUDA_KINDS: Final = (2, 13)  # kDLCUDA, kDLCUDAManaged

_KINDS: Final = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 6: "bool"}
_READ_ONLY, _IS_COPIED = 1, 2


class _Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("number", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("dimensions", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [
        ("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
    ]  # fmt: skip


class _VersionedManaged(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", _Tensor),
    ]  # fmt: skip


class View(NamedTuple):
    """An array's memory.

    Attributes:
        address: Of the first element; None if there is none.
        dtype: As NumPy calls it.
        shape: Of the array.
        is_c_order: Its elements lie in C order without gaps.
        device: The GPU's number.
        is_writable: The producer says that it may be changed; older ones do not tell.
        owner: Keeps the memory alive.
    """

    address: int | None
    dtype: str
    shape: tuple[int, ...]
    is_c_order: bool
    device: int
    is_writable: bool
    owner: object


def view(producer: Any, stream: int) -> View:
    """What ``producer`` exports, ready for what ``stream`` does from now on.

    Args:
        producer: Has ``__dlpack__``, on a GPU.
        stream: As the protocol numbers them: 1 is the legacy default stream.
    Raises:
        BufferError: It is exported in a form that is not known, or not from a GPU.
    """
    try:
        capsule = producer.__dlpack__(stream=stream, max_version=(1, 0))
    except TypeError:  # producers before version 1
        capsule = producer.__dlpack__(stream=stream)
    name = _name_of(capsule)
    flags = 0
    if name == b"dltensor_versioned":
        versioned = _VersionedManaged.from_address(_pointer_of(capsule, name))
        if versioned.major != 1:
            raise BufferError(f"DLPack version {versioned.major} is not known")
        tensor, flags = versioned.tensor, int(versioned.flags)
    elif name == b"dltensor":
        tensor = _Managed.from_address(_pointer_of(capsule, name)).tensor
    else:
        raise BufferError(f"{name!r} is no capsule of a DLPack tensor")
    if tensor.device.kind not in CUDA_KINDS or tensor.dtype.lanes != 1:
        raise BufferError(f"DLPack device kind {tensor.device.kind}, {tensor.dtype.lanes} lanes")
    shape = tuple(tensor.shape[: tensor.dimensions])
    strides = tensor.strides[: tensor.dimensions] if tensor.strides else None
    return View(
        address=(tensor.data or 0) + tensor.byte_offset if 0 not in shape else None,
        dtype=_name_of_dtype(tensor.dtype),
        shape=shape,
        is_c_order=strides is None or is_c_order(shape, strides),
        device=tensor.device.number,
        is_writable=name == b"dltensor_versioned" and not flags & (_READ_ONLY | _IS_COPIED),
        owner=capsule,
    )


def is_c_order(shape: Sequence[int], strides: Sequence[float]) -> bool:
    """Whether elements with these strides, in elements, lie in C order without gaps."""
    if 0 in shape:
        return True
    expected = 1
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


def _name_of_dtype(dtype: _DataType) -> str:
    kind = _KINDS.get(dtype.kind, f"kind {dtype.kind} of ")
    return kind if kind == "bool" else f"{kind}{dtype.bits}"


def _name_of(capsule: object) -> bytes | None:
    ask = ctypes.pythonapi.PyCapsule_GetName
    ask.restype, ask.argtypes = ctypes.c_char_p, [ctypes.py_object]
    name: bytes | None = ask(capsule)
    return name


def _pointer_of(capsule: object, name: bytes) -> int:
    ask = ctypes.pythonapi.PyCapsule_GetPointer
    ask.restype, ask.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return int(ask(capsule, name))
