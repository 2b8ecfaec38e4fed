"""Arrays in host memory: what NumPy knows, and whatever speaks the buffer protocol or DLPack."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from farandole import _work

Array = npt.NDArray[Any]


def bytes_of(array: Array) -> Array | None:
    """The array as the buffer protocol knows it (it knows no bfloat16); None when empty."""
    if array.size == 0:
        return None
    return array if array.dtype.kind in "biuf" else array.reshape(-1).view(np.uint8)


def dtype_number(array: Array) -> int:
    """The C ABI's number of the array's dtype; TypeError if there is none."""
    number = _work.DTYPES.get(array.dtype.name)
    if number is None or not array.dtype.isnative:
        raise TypeError(f"dtype {array.dtype!r} is not supported; use one of {list(_work.DTYPES)}")
    return number


def as_array(tensor: Any) -> Array:
    """``tensor`` as an array over the same memory; TypeError if it is none."""
    if isinstance(tensor, np.ndarray):
        return tensor
    try:
        return np.asarray(memoryview(tensor))
    except TypeError:
        pass
    if hasattr(tensor, "__dlpack__"):
        return np.from_dlpack(tensor)
    raise TypeError(
        f"{type(tensor).__name__} has neither the buffer protocol nor DLPack; "
        "pass numpy.asarray(...) of it"
    )


def as_writable_array(tensor: Any, function: str) -> Array:
    """As :func:`as_array`, for ``function`` to change in place.

    Raises:
        TypeError: Nobody knows whether it may be changed.
        ValueError: It is read-only, or its elements do not lie in C order.
    """
    array = as_array(tensor)
    if not isinstance(tensor, np.ndarray) and _is_foreign(tensor):
        raise TypeError(
            f"{function}_ cannot know that {type(tensor).__name__} may be changed in place; "
            f"use {function}"
        )
    if not array.flags.writeable and hasattr(tensor, "numpy"):  # NumPy < 2.1: DLPack is read-only
        array = tensor.numpy()
    if not array.flags.c_contiguous or not array.flags.writeable:
        raise ValueError(
            f"{function}_ needs writable C-contiguous memory; got shape {array.shape}, strides "
            f"{array.strides}, C-contiguous: {array.flags.c_contiguous}, writable: "
            f"{array.flags.writeable}; {function} returns a new array instead"
        )
    return array


def _is_foreign(tensor: Any) -> bool:
    """Reached through DLPack only and not known to be mutable: a framework may cache its values."""
    try:
        memoryview(tensor)
        return False
    except TypeError:
        return type(tensor).__module__.partition(".")[0] not in ("torch", "cupy")
