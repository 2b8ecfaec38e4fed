"""Arrays of libraries that Farandole does not know, by each of the ways in which arrays are read."""

import ctypes
import gc
import sys
import time
import types

import numpy as np
import pytest

import farandole as fl
from fake_gpu import needs_fake_gpu, pose
from farandole import _core
from operations import CASES, Numpy, check
from ranks import on_threads, run_threads


class Frozen:
    """An immutable array that speaks DLPack and the array API standard, in host memory."""

    def __init__(self, values):
        self._values = np.array(values)
        self._values.flags.writeable = False
        self.shape, self.dtype = self._values.shape, self._values.dtype

    def __array_namespace__(self):
        return types.SimpleNamespace(asarray=Frozen)

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **options):
        return np.array(self._values).__dlpack__()  # a copy: older NumPy exports what is writable

    def tolist(self):
        return self._values.tolist()


class OfFrozen(Numpy):
    forms = ("blocking", "async", "grouped")

    def make(self, values, dtype):
        return Frozen(np.array(values).astype(dtype))


@on_threads(2)
def test_immutable_arrays_give_new_ones_of_their_kind(rank):
    check(OfFrozen(), rank, 2, [case for case in CASES if not case.is_strided], ["float64"])
    for change in (fl.allreduce_, lambda array: fl.broadcast_(array, 0)):
        with pytest.raises(TypeError, match="may be changed in place"):
            change(Frozen([1.0]))


class Plain(Frozen):
    """Follows no standard but DLPack, and calls its dtypes as it likes."""

    def __init__(self, values, dtype):
        super().__init__(values)
        self.dtype = dtype

    __array_namespace__ = property()


@pytest.mark.parametrize("dtype", [np.float64, "f64", None], ids=["class", "text", "none"])
@on_threads(2)
def test_results_are_numpys_where_a_library_makes_none(rank, dtype):
    result = fl.allreduce(Plain([rank + 1.0], dtype), op=fl.Sum)
    assert type(result) is np.ndarray
    assert result.tolist() == [3]


# A library with DLPack's C functions, in Python. What it has in memory is NumPy's.


class Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("number", ctypes.c_int32)]


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device", Device), ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


class Managed(ctypes.Structure):
    pass


Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(Managed))
Managed._fields_ = [
    ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p),
    ("deleter", Deleter), ("flags", ctypes.c_uint64), ("tensor", Tensor),
]  # fmt: skip
# On a GPU a thread of ours calls it, which does not hold the GIL.
Allocate = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(Tensor), ctypes.POINTER(ctypes.POINTER(Managed)),
    ctypes.c_void_p, ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p),
)  # fmt: skip
FromPython = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)
ToPython = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.POINTER(Managed), ctypes.POINTER(ctypes.c_void_p))
View = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(Tensor))
Stream = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p)
)


class Api(ctypes.Structure):
    pass


Api._fields_ = [
    ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("previous", ctypes.POINTER(Api)),
    ("allocate", Allocate), ("from_python", FromPython), ("to_python", ToPython), ("view", View),
    ("stream", Stream),
]  # fmt: skip


class Library:
    """Arrays of float64, in host memory or on fake GPUs."""

    def __init__(self, gpu_of=None, has_memory=True, major=1):
        class Array:
            def __init__(array, values):
                array.values = np.asarray(values, np.float64, order="C")
                array.shape = (ctypes.c_int64 * array.values.ndim)(*array.values.shape)
                array.strides = (ctypes.c_int64 * array.values.ndim)(
                    *(stride // 8 for stride in array.values.strides)
                )

        def device():
            return Device(1, 0) if gpu_of is None else Device(2, gpu_of().device)

        def fill(tensor, array, device):
            tensor.data, tensor.device = array.values.ctypes.data, device
            tensor.ndim, tensor.code, tensor.bits, tensor.lanes = array.values.ndim, 2, 64, 1
            tensor.shape, tensor.strides, tensor.byte_offset = array.shape, array.strides, 0

        def view(array, tensor):
            self.calls.append("view")
            fill(tensor[0], array, device())
            return 0

        def allocate(prototype, out, error_context, set_error):
            self.calls.append("allocate")
            if not has_memory:
                set_error(error_context, b"MemoryError", b"there is none left")
                return -1
            shape = prototype[0].shape[: prototype[0].ndim]
            managed = Managed(major=1, minor=3)
            array = Array(np.zeros(shape))
            fill(managed.tensor, array, prototype[0].device)
            address = ctypes.addressof(managed)
            self.made[address] = (managed, array)
            out[0] = ctypes.pointer(managed)
            return 0

        def to_python(managed, out):
            self.calls.append("to_python")
            _, array = self.made.pop(ctypes.addressof(managed[0]), (None, None))
            if array is None:  # the library's own memory: copied, and given back
                tensor = managed[0].tensor
                shape = tensor.shape[: tensor.ndim]
                size = 8 * int(np.prod(shape))
                array = Array(np.frombuffer(ctypes.string_at(tensor.data, size)).reshape(shape))
                managed[0].deleter(managed)
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(array))
            out[0] = id(array)
            return 0

        def stream(kind, number, out):
            self.calls.append("stream")
            assert (kind, number) == (2, gpu_of().device)
            out[0] = gpu_of().stream()[1]
            return 0

        self.calls = []
        self.made = {}
        self.functions = (
            Allocate(allocate), FromPython(0), ToPython(to_python), View(view), Stream(stream)
        )  # fmt: skip
        self.api = Api(1, 3, None, *self.functions)
        self.newest = Api(major, 0, ctypes.pointer(self.api))
        new = ctypes.pythonapi.PyCapsule_New
        new.restype = ctypes.py_object
        new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        newest = self.api if major == 1 else self.newest
        self.capsule = new(ctypes.addressof(newest), b"dlpack_exchange_api", None)
        self.Array = Array
        Array.__dlpack_c_exchange_api__ = self.capsule
        Array.__module__ = "somelib"
        Array.__dlpack__ = None  # speaks DLPack, but not in Python


class OfC(Numpy):
    forms = ("blocking", "async", "in place", "grouped")

    def __init__(self, library):
        self.library = library

    def make(self, values, dtype):
        return self.library.Array(np.array(values).astype(dtype))

    def numbers(self, array):
        return array.values.tolist()

    def kind_of(self, array):
        return type(array)


@pytest.mark.parametrize("major", [1, 2])
def test_dlpacks_c_functions_are_all_that_is_called(major):
    """Also where the newest table is of another version and an older one is behind it."""
    library = Library(major=major)
    run_threads(2, lambda rank: check(OfC(library), rank, 2, [case for case in CASES if not case.is_strided],
       ["float64"]))
    assert set(library.calls) == {"view", "allocate", "to_python"} and not library.made


def test_a_table_of_an_unknown_version_alone_is_not_used():
    library = Library(major=2)
    library.newest.previous = None

    def body(_rank):
        with pytest.raises(TypeError):
            fl.allreduce(library.Array([1.0]))

    run_threads(1, body)
    assert library.calls == []


def test_a_library_without_memory_says_so_and_the_next_call_works():
    library = Library(has_memory=False)

    def body(_rank):
        with pytest.raises(fl.HorovodInternalError, match="MemoryError: there is none left"):
            fl.allreduce(library.Array([1.0]), name="x")
        mine = library.Array([1.0])
        return fl.allreduce_(mine, name="x", op=fl.Sum).values.tolist()

    assert run_threads(2, body) == [[2.0]] * 2


@needs_fake_gpu
def test_on_a_gpu_the_current_stream_is_asked_at_the_start_and_at_the_wait():
    for gpus in pose(shared=False):
        library = Library(lambda gpus=gpus: gpus.mine)

        def body(rank, gpus=gpus, library=library):
            gpu = gpus.mine
            import torch

            mine = library.Array(np.zeros(3))
            late = torch.from_numpy(mine.values)
            gpu.write(late, torch.full((3,), rank + 1.0, dtype=torch.float64))
            handle = fl.allreduce_async(mine, op=fl.Sum)
            with gpu.using(gpu.new_stream()):
                gpu.hold()
                result = fl.synchronize(handle)
                seen = gpu.begin_reading(torch.from_numpy(result.values))
                gpu.release()
                gpu.synchronize(gpu.stream())
            return seen.tolist()

        assert run_threads(2, body) == [[3.0] * 3] * 2
        assert library.calls.count("stream") == 4


@needs_fake_gpu
def test_rows_on_a_gpu_lie_in_the_librarys_memory_and_the_host_never_waits_for_the_device():
    import torch

    for gpus in pose(shared=False):
        library = Library(lambda gpus=gpus: gpus.mine)

        def body(rank, gpus=gpus, library=library):
            gpu = gpus.mine
            waits, blocks = gpu.count("host_waits"), gpu.count("live_blocks")
            for _ in range(3):
                gathered = fl.allgather(library.Array(np.full((rank + 1, 2), rank)))
                exchanged, _ = fl.alltoall(library.Array([10.0 * rank, 1.0, 2.0]), [1, 2])
                seen = [gpu.read(torch.from_numpy(one.values)) for one in (gathered, exchanged)]
                del gathered, exchanged
            gc.collect()
            assert gpu.count("host_waits") == waits
            assert gpu.count("live_blocks") <= blocks + 3, "two fusion buffers and the plane's flag"
            return seen[0][:, 0].tolist(), seen[1].tolist()

        assert run_threads(2, body) == [([0, 1, 1], [0, 10]), ([0, 1, 1], [1, 2, 1, 2])]
        assert not library.made


@needs_fake_gpu
def test_rows_on_a_gpu_are_written_when_the_memory_is_free_in_the_default_stream():
    import torch

    if torch.version.cuda:  # two copies of NCCL are refused, and without one the host waits
        pytest.skip("this torch brings NCCL")

    for gpus in pose(shared=False):
        library = Library(lambda gpus=gpus: gpus.mine)

        def body(rank, gpus=gpus, library=library):
            gpu = gpus.mine
            default = gpu.device, None
            fl.allgather(library.Array([0.0]))  # streams and communicator are there
            with gpu.using(default):
                gpu.hold()
            result = fl.allgather(library.Array([rank + 1.0]))
            seen = gpu.begin_reading(torch.from_numpy(result.values))
            time.sleep(0.05)
            is_idle = gpu.is_idle()
            with gpu.using(default):
                gpu.release()
            gpu.synchronize(gpu.stream())
            return is_idle, seen.tolist()

        assert run_threads(2, body) == [(False, [1.0, 2.0])] * 2


def test_a_type_keeps_what_it_was_read_by_until_another_library_is_used():
    class Odd:
        def __init__(self, values):
            self.values = values

    class Reader:
        is_mutable = True

        def read(self, odd):
            array = odd.values
            return array.ctypes.data, array.dtype.name, array.shape, True, -1, True

    assert _core.describe(Odd(np.ones(2))) is None
    _core.use_library(Odd, Reader())
    try:
        assert _core.describe(Odd(np.ones(2)))[1:4] == ("float64", (2,), True)
    finally:
        _core.use_library(Odd, None)
    assert _core.describe(Odd(np.ones(2))) is None


def test_no_library_is_imported_to_read_an_array():
    before = set(sys.modules)
    assert run_threads(1, lambda _: fl.allreduce(Frozen([1.0])).tolist()) == [[1.0]]
    assert not {"jax", "cupy"} & (set(sys.modules) - before)
