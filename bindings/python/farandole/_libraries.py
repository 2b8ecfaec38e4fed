"""What the libraries of arrays are asked in Python; the extension reads arrays by itself.

``_core`` calls :func:`library_of` once per type of arrays and asks the object that it gives:

``is_mutable``: arrays may be changed in place. ``is_lazy``, optional: they have ``is_neg()`` and
    ``is_conj()``, which say that memory does not hold the values. ``opaque_dtypes``, optional: a set
    of their dtypes that DLPack must not be asked for, as it says others, or ends the process.
``canonical(arrays, function, in_place, moves_bytes)``: arrays that can be read as they are, for those of
    a call of which some cannot: strided ones are copied, unsupported ones refused. ``moves_bytes`` is
    true of collectives that move elements of any dtype.
``empty(like, shape)``, ``wrap(memory, like, shape)``: an array for a result; one over the memory of a
    ``_core.ResultMemory``. Not asked where the type has DLPack's C functions, nor, unless there is
    ``read``, for host memory: these results are NumPy's.
``result(made, target)``, ``written(target, source)``, ``use_here(made, target)``: optional; what users
    get of a result, what to do after an in-place result, and on a GPU before one is used.
``written_in_place(targets)``: optional; instead of ``written`` where no array was copied.
``read(array)``, ``stream(array)``: optional; ``(address, dtype name, shape, is C-contiguous, CUDA device
    or -1, is writable)`` or None, instead of reading the array itself; the current stream of its GPU
    as ``(device, handle)``.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import sys
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from farandole import _core

#: The dtypes that can be moved (farandole_dtype), and of these what can be reduced, complex ones by Sum and Average.
ALL_DTYPES: Final = _core.dtypes
DTYPES: Final = _core.reduced_dtypes

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
    masked = sys.modules.get("numpy.ma")  # whose import takes longer than a collective
    if masked is not None and isinstance(array, masked.MaskedArray):
        raise TypeError("a numpy.ma.MaskedArray would lose its mask; pass array.filled(...), or its data and its mask")
    has_dlpack = hasattr(array, "__dlpack__")
    lives_anywhere = has_dlpack and name in _IMMUTABLE  # one type for the host and GPUs
    if not lives_anywhere and hasattr(array, "__cuda_array_interface__") and _is_on_gpu(array):
        return CudaArrays()
    if isinstance(array, np.ndarray):
        return Host() if type(array) is np.ndarray else Subclass()
    if name in _LIBRARIES:
        return _LIBRARIES[name]()
    return Foreign(name not in _IMMUTABLE) if has_dlpack and not isinstance(array, np.generic) else Host()


class Host:
    """Arrays in host memory: NumPy's, and whatever has the buffer protocol."""

    is_mutable = True

    def canonical(self, arrays: Sequence[Any], function: str, in_place: bool, moves_bytes: bool) -> list[Any]:
        """See above; TypeError for what is no array or has no usable dtype, ValueError for memory
        that cannot be changed in place."""
        return [self._canonical(array, function, in_place, moves_bytes) for array in arrays]

    def _canonical(self, given: Any, function: str, in_place: bool, moves_bytes: bool) -> Any:
        if in_place:
            _check_is_mutable(given, function)  # of a group, whose first array says the library
        array = _as_array(given, function)
        check_dtype(array.dtype, moves_bytes)
        flags = array.flags
        if in_place and not (flags.c_contiguous and flags.writeable):
            raise ValueError(
                f"{function}_ needs writable C-contiguous memory; got shape {array.shape}, strides "
                f"{array.strides}, C-contiguous: {flags.c_contiguous}, writable: "
                f"{flags.writeable}; {function} returns a new array instead"
            )
        return np.asarray(array, order="C")


class Subclass(Host):
    """Arrays of a subclass of NumPy's, such as ``numpy.matrix``, or one with units."""

    def result(self, made: Array, target: Any) -> Any:
        """Of the subclass, if it makes results so."""
        return target.__array_wrap__(made)


class Foreign(Host):
    """Arrays of another library, in host memory or on a GPU; results are of that library.

    DLPack names no stream: on a GPU they are ordered with the legacy default stream.
    """

    def __init__(self, is_mutable: bool = True) -> None:
        self.is_mutable = is_mutable

    def _canonical(self, given: Any, function: str, in_place: bool, moves_bytes: bool) -> Any:
        self.refuse(given, function)
        if in_place:
            return self._in_place(given, function, moves_bytes)
        if _is_on_gpu(given):
            _check_order(given, function)
            return given
        made = self.contiguous(given, moves_bytes)
        return super()._canonical(given, function, False, moves_bytes) if made is None else made

    def _in_place(self, given: Any, function: str, moves_bytes: bool) -> Any:
        _check_is_mutable(given, function)
        described = _core.describe(given)
        if described is None or not described[5]:
            raise TypeError(
                f"{function}_ cannot know that {type(given).__name__} may be changed in place; use {function}"
            )
        check_name(described[1], moves_bytes)
        _check_order(given, function)
        return given

    def refuse(self, given: Any, function: str) -> None:
        """Raises what is wrong with an array that cannot be read as it is, if the library says it badly."""

    def contiguous(self, given: Any, moves_bytes: bool) -> Any:
        """A contiguous array of the library with the same values; None: NumPy makes a copy."""
        del given, moves_bytes

    def empty(self, like: Any, shape: Shape) -> Any:
        """See above; TypeError where the library makes none."""
        make = getattr(sys.modules.get(_name_of(like)), "empty_like", None)
        if make is None:
            raise TypeError(
                f"there is no way to make a {type(like).__name__} for the result; copy it to the host, "
                "or use allreduce_, or use broadcast_, which change the array in place"
            )
        return make(like) if shape == tuple(like.shape) else make(like, shape=shape)

    def wrap(self, memory: _core.ResultMemory, like: Any, shape: Shape) -> Any:
        """See above, as the array API standard makes an array of DLPack's."""
        del shape
        make = getattr(sys.modules.get(_name_of(like)), "from_dlpack", None)
        if make is None:
            raise TypeError(
                f"there is no way to make a {type(like).__name__} of the result; on a GPU use "
                "farandole.torch, or copy it to the host"
            )
        return make(memory)

    def result(self, made: Any, target: Any) -> Any:
        """An array of the target's library and dtype; NumPy's if the library follows no standard.

        Raises:
            TypeError: The library makes another dtype of it.
        """
        if not isinstance(made, np.ndarray):
            return made
        result = self.of_numpy(made, target)
        is_made = result is not made and hasattr(target, "dtype")
        if is_made and _dtype_name(result) != _dtype_name(target):
            raise TypeError(
                f"the result has dtype {_dtype_name(target)}, of which {type(result).__name__} makes "
                f"{_dtype_name(result)}; pass a NumPy array of the same values"
            )
        return result

    def of_numpy(self, made: Array, target: Any) -> Any:
        """As the array API standard makes an array."""
        if not hasattr(target, "__array_namespace__"):
            return made
        return target.__array_namespace__().asarray(made)


class Jax(Foreign):
    """JAX's arrays: results lie on the same device, and are weakly typed where the array is."""

    def __init__(self) -> None:
        super().__init__(is_mutable=False)

    def refuse(self, given: Any, function: str) -> None:
        """See above; TypeError for what has no values, ValueError for what is on several devices, or deleted."""
        if not hasattr(given, "is_deleted"):
            return
        if isinstance(given, sys.modules["jax"].core.Tracer):
            raise TypeError(
                f"{function}: an array that JAX traces has no values; call it outside of jit, grad and vmap, or by "
                "jax.experimental.io_callback"
            )
        if given.is_deleted():
            raise ValueError(
                f"{function}: the array of shape {list(given.shape)} was deleted, or donated to a function"
            )
        count = len(given.sharding.device_set)
        if count > 1:
            raise ValueError(
                f"{function}: the array of shape {list(given.shape)} lies on {count} devices; pass what is on one, as "
                "array.addressable_data(0) gives it"
            )

    def of_numpy(self, made: Array, target: Any) -> Any:
        """On the target's device, also 64-bit dtypes, which JAX otherwise narrows."""
        jax = sys.modules["jax"]
        with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
            if not target.weak_type:
                return jax.device_put(made, target.sharding)
            like = jax.numpy.zeros_like(target, shape=made.shape)  # weakly typed; what is set into it keeps that
            return jax.device_put(like.at[...].set(made), target.sharding)

    def contiguous(self, given: Any, moves_bytes: bool) -> Any:
        """See above."""
        if hasattr(given, "is_deleted"):
            check_name(_dtype_name(given), moves_bytes)


class Mlx(Foreign):
    """MLX's arrays."""

    def __init__(self) -> None:
        super().__init__(is_mutable=False)

    def contiguous(self, given: Any, moves_bytes: bool) -> Any:
        """See above."""
        check_name(_dtype_name(given), moves_bytes)
        return sys.modules["mlx.core"].contiguous(given)

    def of_numpy(self, made: Array, target: Any) -> Any:
        """With the dtype from the start, as float64 otherwise becomes float32."""
        return sys.modules["mlx.core"].array(made, dtype=target.dtype)


class Paddle(Foreign):
    """Paddle's tensors."""

    def contiguous(self, given: Any, moves_bytes: bool) -> Any:
        """See above."""
        check_name(_dtype_name(given), moves_bytes)
        return given.detach().contiguous()


class TensorFlow(Foreign):
    """TensorFlow's tensors, and variables, whose results are tensors."""

    def __init__(self) -> None:
        super().__init__(is_mutable=False)
        tf = sys.modules["tensorflow"]
        named = [getattr(module, name) for module in (tf, tf.dtypes.experimental) for name in dir(module)]
        dtypes = {each for each in named if isinstance(each, tf.DType)}
        # Its DLPack refuses float8, and may end the process for what cannot be moved.
        self.opaque_dtypes = {each for each in dtypes if each.name not in ALL_DTYPES or each.name.startswith("float8")}

    def contiguous(self, given: Any, moves_bytes: bool) -> Any:
        """See above; TypeError for what is no dense tensor of values."""
        tf = sys.modules["tensorflow"]
        if not isinstance(given, tf.Tensor | tf.Variable) or not tf.executing_eagerly():
            raise TypeError(
                f"a {type(given).__name__} has no dense values here; pass an eager tensor, inside a tf.function by "
                "tf.py_function"
            )
        check_name(_dtype_name(given), moves_bytes)
        tensor = tf.convert_to_tensor(given)
        return tensor.numpy() if tensor.dtype in self.opaque_dtypes else tensor

    def of_numpy(self, made: Array, target: Any) -> Any:
        """A tensor on the target's device."""
        tf = sys.modules["tensorflow"]
        with tf.device(target.device):
            return tf.convert_to_tensor(made)


#: By the first name of the types' modules.
_LIBRARIES: Final[dict[str, type[Foreign]]] = {
    "jax": Jax, "jaxlib": Jax, "mlx": Mlx, "paddle": Paddle, "tensorflow": TensorFlow,
}  # fmt: skip


class CudaArrays(Foreign):
    """Arrays on an NVIDIA GPU with ``__cuda_array_interface__``: CuPy's, Numba's.

    An array says in which stream it is made, and is asked again when the result is waited for:
    CuPy's current stream, say. One that names none is ordered with CUDA's legacy default stream.
    """

    def read(self, array: Any) -> tuple[int, str, Shape, bool, int, bool]:
        """See above."""
        said = array.__cuda_array_interface__
        dtype, shape, strides = np.dtype(said["typestr"]), tuple(said["shape"]), said.get("strides")
        if said.get("mask") is not None:
            raise TypeError(f"{type(array).__name__} with a mask is not supported")
        check_dtype(dtype, moves_bytes=True)
        view = np.lib.stride_tricks.as_strided(np.empty(0, dtype), shape, strides)
        address, is_read_only = said["data"]
        is_contiguous, device = view.flags.c_contiguous, _device_of(array, address)
        is_writable = not is_read_only and _name_of(array) not in _IMMUTABLE
        return address if view.size else 0, dtype.name, shape, is_contiguous, device, is_writable

    def _canonical(self, given: Any, function: str, in_place: bool, moves_bytes: bool) -> Any:
        _, dtype, *_ = self.read(given)  # raises what the extension did not tell
        check_dtype(np.dtype(dtype), moves_bytes)
        return super()._canonical(given, function, in_place, moves_bytes)

    def stream(self, array: Any) -> tuple[int, int]:
        """The array's own, as it says now; else the legacy default stream."""
        said = array.__cuda_array_interface__
        handle = said.get("stream") or _LEGACY_DEFAULT
        device = _device_of(array, said["data"][0])
        return device, 0 if handle == _LEGACY_DEFAULT else int(handle)


def _as_array(given: Any, function: str) -> Array:
    """An array over the same memory; TypeError if it is none."""
    if isinstance(given, np.ndarray | np.generic):
        return np.asarray(given)
    with contextlib.suppress(TypeError, BufferError, ValueError):
        return np.asarray(memoryview(given))
    kind = type(given).__name__
    if not hasattr(given, "__dlpack__"):
        raise TypeError(
            f"{function}: {kind} has neither the buffer protocol nor DLPack; pass an array of its values"
            + (", as its method numpy() gives" if hasattr(given, "numpy") else "")
        )
    try:
        return np.from_dlpack(given)
    except Exception as error:
        what = f"{kind} of dtype {getattr(given, 'dtype', 'unknown')}"
        raise TypeError(f"{function}: {what} cannot be read: {error}; use one of {list(ALL_DTYPES)}") from error


def _check_order(given: Any, function: str) -> None:
    """ValueError for an array with gaps, or in another order."""
    described = _core.describe(given)
    if described is not None and not described[3]:
        raise ValueError(
            f"{function}: the array of shape {list(described[2])} does not lie in C order "
            "without gaps; pass a contiguous one"
        )


def _check_is_mutable(given: Any, function: str) -> None:
    """TypeError for arrays that never change; what some of them export, MLX's, can be written to nevertheless."""
    if _name_of(given) in _IMMUTABLE:
        raise TypeError(
            f"{function}_: no {type(given).__name__} of {_name_of(given)} may be changed in place; use {function}, "
            "which returns a new one"
        )


def check_dtype(dtype: np.dtype[Any], moves_bytes: bool) -> None:
    """TypeError for a dtype that cannot be reduced, or, with ``moves_bytes``, not be moved."""
    check_name(dtype.name if dtype.isnative else repr(dtype), moves_bytes)


def check_name(name: str, moves_bytes: bool) -> None:
    """Likewise by its name."""
    known = ALL_DTYPES if moves_bytes else DTYPES
    if name not in known:
        raise TypeError(f"dtype {name} is not supported; use one of {list(known)}")


def _dtype_name(array: Any) -> str:
    """NumPy's name of the dtype of an array of any library."""
    text = str(array.dtype)
    if not text.startswith("<"):
        return text.rpartition(".")[2]
    return str(getattr(array.dtype, "name", None) or getattr(array.dtype, "__name__", text))  # the latter of a class


def _name_of(array: Any) -> str:
    return type(array).__module__.partition(".")[0]


def _is_on_gpu(array: Any) -> bool:
    if hasattr(array, "__dlpack_device__"):
        return int(array.__dlpack_device__()[0]) in _CUDA_KINDS
    return hasattr(array, "__cuda_array_interface__")


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
