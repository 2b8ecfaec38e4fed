"""Arrays in a GPU's memory without torch: NumPy's memory poses as such, on fake GPUs."""

import ctypes
import functools
import subprocess
import sys
import types

import numpy as np
import pytest

import farandole
from fake_gpu import needs_fake_gpu, pose
from farandole import _core, _libraries
from ranks import run_threads


class Array:
    """What speaks ``__cuda_array_interface__``, over NumPy's memory."""

    def __init__(self, values, gpu=None, **said):
        self.values = np.asarray(values)
        self.gpu = gpu
        self.said = said

    @property
    def shape(self):
        return self.values.shape

    @property
    def __cuda_array_interface__(self):
        said = dict(self.values.__array_interface__, version=3, stream=None, **self.said)
        if self.gpu is not None:
            said["stream"] = self.gpu.stream()[1]
        return said

    def __dlpack_device__(self):
        return (2, 0 if self.gpu is None else self.gpu.device)


class Exporter:
    """What speaks DLPack alone."""

    def __init__(self, values, device=0, version=None):
        self.values = values
        self.device = device
        self.version = version
        self.stream = None

    @property
    def shape(self):
        return self.values.shape

    def __dlpack_device__(self):
        return (2, self.device)

    def __dlpack__(self, stream=None, **options):
        self.stream = stream
        if self.version is None and options:
            raise TypeError("an old producer")
        capsule = (
            self.values.__dlpack__(max_version=self.version)
            if self.version
            else (self.values.__dlpack__())
        )
        device = device_in(capsule)
        device[0], device[1] = 2, self.device
        return capsule


def device_in(capsule):
    """The device in a DLPack capsule's struct: its kind and number, to be changed."""
    name, pointer = ctypes.pythonapi.PyCapsule_GetName, ctypes.pythonapi.PyCapsule_GetPointer
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    which = name(capsule)
    version_context_deleter_flags = 32 if which == b"dltensor_versioned" else 0
    data = 8
    address = pointer(capsule, which) + version_context_deleter_flags + data
    return (ctypes.c_int32 * 2).from_address(address)


needs_dlpack_1 = pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) < "2.1.0", reason="this NumPy exports DLPack 0 only"
)


@pytest.fixture
def gpus():
    yield from pose(shared=False)


@pytest.fixture
def library(monkeypatch):
    """The library of Array, as Python finds it: it can make an empty like."""
    module = types.ModuleType("anylib")
    module.empty_like = lambda array, shape=None: Array(
        np.zeros_like(array.values, shape=shape), array.gpu
    )
    monkeypatch.setitem(sys.modules, "anylib", module)
    monkeypatch.setattr(Array, "__module__", "anylib.arrays")


@needs_fake_gpu
def test_arrays_are_reduced_in_place_and_in_order_with_their_stream(gpus):
    def body(rank):
        import torch

        gpu = gpus.mine
        values = torch.zeros(4)
        gpu.write(values, torch.full((4,), rank + 1.0))
        array = Array(values.numpy(), gpu)
        assert farandole.allreduce_(array, op=farandole.Sum, name="sum") is array
        seen = gpu.read(values).tolist()
        handle = farandole.broadcast_async_(Array(values.numpy() * 0 + rank, gpu), 1)
        farandole.synchronize(handle)
        return seen

    assert run_threads(2, body) == [[3.0] * 4] * 2


@needs_fake_gpu
def test_a_new_array_is_made_by_the_library_of_the_given_one(gpus, library):
    def body(rank):
        gpu = gpus.mine
        given = Array(np.full((2, 2), rank + 1.0), gpu)
        result = farandole.allreduce(given, op=farandole.Sum)
        rooted = farandole.broadcast(given, 1)
        part = farandole.reducescatter(given, op=farandole.Sum)
        gpu.synchronize(gpu.stream())
        assert type(result) is type(part) is Array and given.values[0, 0] == rank + 1
        return result.values.tolist(), rooted.values.tolist(), part.values.tolist()

    assert run_threads(2, body) == [([[3, 3], [3, 3]], [[2, 2], [2, 2]], [[3, 3]])] * 2


@needs_fake_gpu
@needs_dlpack_1
def test_an_array_known_by_dlpack_alone_is_ordered_with_the_default_stream(gpus):
    def body(rank):
        gpu = gpus.mine
        exporter = Exporter(np.full(3, rank + 1.0, np.float32), gpu.device, version=(1, 0))
        farandole.allreduce_(exporter, op=farandole.Sum)
        gpu.synchronize((gpu.device, None))
        return exporter.stream, exporter.values.tolist()

    assert run_threads(2, body) == [(1, [3.0] * 3)] * 2


class Anywhere(Exporter):
    """Of a library whose arrays are of one type, in the host and on a GPU."""

    def __dlpack_device__(self):
        return (1, 0) if self.device is None else (2, self.device)

    def __dlpack__(self, stream=None, **options):
        if self.device is None:
            return self.values.__dlpack__()
        return super().__dlpack__(stream, **options)

    @property
    def dtype(self):
        return self.values.dtype


@needs_fake_gpu
@needs_dlpack_1
def test_a_type_may_have_arrays_in_the_host_and_on_gpus(gpus):
    def body(rank):
        gpu = gpus.mine
        in_host = Anywhere(np.full(2, rank + 1.0), None)
        on_gpu = Anywhere(np.full(2, rank + 1.0), gpu.device, version=(1, 0))
        assert fl_sum(in_host).tolist() == [3, 3]
        with pytest.raises(TypeError, match="no way to make a Anywhere for the result"):
            fl_sum(on_gpu)
        farandole.allreduce_(on_gpu, op=farandole.Sum)
        gpu.synchronize((gpu.device, None))
        assert fl_sum(in_host).tolist() == [3, 3]
        return on_gpu.values.tolist()

    assert run_threads(2, body) == [[3, 3]] * 2


def fl_sum(array):
    return farandole.allreduce(array, op=farandole.Sum)


def test_dlpack_of_both_versions_is_read():
    values = np.arange(6, dtype=np.int32).reshape(2, 3)
    seen = _core.describe(Exporter(values, 3))
    assert seen == (values.ctypes.data, "int32", (2, 3), True, 3, False)
    assert not _core.describe(Exporter(values.T))[3]
    assert _core.describe(Exporter(np.empty((0, 3))))[2] == (0, 3)


@needs_dlpack_1
def test_dlpack_tells_what_may_be_written_to():
    values = np.ones(2)
    assert _core.describe(Exporter(values, version=(1, 0)))[5]
    values.flags.writeable = False
    assert not _core.describe(Exporter(values, version=(1, 0)))[5]


def test_the_capsule_keeps_the_memory_and_gives_it_back():
    values = np.ones(1000)
    before = sys.getrefcount(values)
    exporter = Exporter(values)
    assert _core.describe(exporter)[2] == (1000,)
    del exporter
    assert sys.getrefcount(values) == before


def refused(call, *arguments):
    def body(_rank):
        return call(*arguments)

    with pytest.raises((TypeError, ValueError)) as caught:
        run_threads(1, body)
    return str(caught.value)


def test_refusals_say_what_to_do_instead():
    strided = Array(np.ones((3, 2)).T)
    assert "does not lie in C order" in refused(farandole.allreduce_, strided)
    assert "may be changed in place" in refused(
        farandole.allreduce_, Array(np.ones(2), data=(64, True))
    )
    assert "use allreduce_" in refused(farandole.allreduce, Array(np.ones(2)))
    assert "use broadcast_" in refused(farandole.broadcast, Array(np.ones(2)), 0)
    largest = functools.partial(farandole.allreduce_, op=farandole.Max)
    assert "complex128" in refused(largest, Array(np.ones(2, complex)))
    assert ">f4" in refused(farandole.allreduce_, Array(np.ones(2, ">f4")))
    assert "on a GPU use farandole.torch" in refused(farandole.allgather, Array(np.ones(2)))
    assert "on a GPU use farandole.torch" in refused(farandole.alltoall, Array(np.ones(2)))
    assert "result; copy it to the host" in refused(farandole.reducescatter, Array(np.ones(2)))
    old = Exporter(np.ones(2))
    assert "may be changed in place" in refused(farandole.allreduce_, old)


def test_immutable_libraries_are_not_written_to(monkeypatch):
    monkeypatch.setattr(Array, "__module__", "jaxlib.xla_extension")
    assert "may be changed in place" in refused(farandole.allreduce_, Array(np.ones(2)))


def test_the_device_is_asked_of_the_driver_where_the_array_does_not_tell(monkeypatch):
    monkeypatch.delattr(Array, "__dlpack_device__")

    class Driver:
        @staticmethod
        def cuPointerGetAttribute(result, attribute, address):
            assert (attribute, address.value) == (9, array.values.ctypes.data)
            result._obj.value = 5
            return 0

    array = Array(np.ones(2))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver)
    assert _libraries.CudaArrays().stream(array) == (5, 0)
    monkeypatch.setattr(Driver, "cuPointerGetAttribute", lambda *_: 201)
    with pytest.raises(ValueError, match="cannot be told: .* gave CUDA error 201"):
        _libraries.CudaArrays().stream(array)


def test_no_framework_is_imported():
    code = "import sys, farandole; assert 'torch' not in sys.modules and 'cupy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
