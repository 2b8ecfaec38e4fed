"""Collectives on arrays that pose as a GPU's, of torch and of others: order with streams, lifetimes, refusals."""

import contextlib
import ctypes
import functools
import gc
import sys
import types
import weakref

import numpy as np
import pytest
import torch

import farandole
import farandole.torch as fl
from fake_gpu import NCCL, FakeGpu, late, needs_fake_gpu, pose, reading
from farandole import _core, _libraries, basics, ops
from farandole.torch import distributed
from farandole.torch.optimizer import _codecs
from operations import CASES, Numpy, Torch, check, named
from ranks import on_threads, run_threads


@pytest.fixture(params=[False, True], ids=["own GPUs", "one GPU"])
def gpus(request):
    yield from pose(shared=request.param)


@pytest.fixture
def own_gpus():
    yield from pose(shared=False)


def late_soon(gpu, tensor):
    """As `late`, after a millisecond: there are many."""
    made = torch.zeros_like(tensor)
    gpu.write(made, tensor, delay_ms=1)
    return made


class TorchOnGpu(Torch):
    """Tensors that a late producer writes, read by the current stream."""

    dtypes = ["float64", "bfloat16"]

    def __init__(self, gpus):
        self.gpus = gpus

    def make(self, values, dtype):
        return late_soon(self.gpus.mine, super().make(values, dtype))

    def numbers(self, array):
        return super().numbers(self.gpus.mine.read(array))


@needs_fake_gpu
def test_every_case_of_what_late_producers_write_is_there_for_the_current_stream(gpus):
    cases = [case for case in CASES if not case.is_strided]  # what torch copies it copies at once
    run_threads(2, lambda rank: check(TorchOnGpu(gpus), rank, 2, cases))


#: Of [rank + 1, rank + 1] on 2 ranks.
STARTS = {
    "allreduce": (lambda x: fl.allreduce_async(x, op=fl.Sum), lambda rank: [3, 3]),
    "alltoall": (fl.alltoall_async, lambda rank: [1, 2]),
    "reducescatter": (lambda x: fl.reducescatter_async(x, op=fl.Sum), lambda rank: [3]),
    "allgather": (fl.allgather_async, lambda rank: [1, 1, 2, 2]),
    "broadcast": (lambda x: fl.broadcast_async(x, 1), lambda rank: [2, 2]),
}


def finished(handle):
    result = fl.synchronize(handle)
    return result[0] if isinstance(result, tuple) else result


@needs_fake_gpu
@pytest.mark.parametrize("kinds", [["allreduce"], ["alltoall", "reducescatter", "allgather"]], ids=str)
@on_threads(2)
def test_synchronize_makes_the_current_stream_wait_and_the_host_go_on(rank, gpus, kinds):
    gpu = gpus.mine
    handles = [STARTS[kind][0](late(gpu, torch.full((2,), rank + 1.0))) for kind in kinds]
    with gpu.using(gpu.new_stream()):
        gpu.hold()
        results = [finished(handle) for handle in handles]  # which live until they are read
        seen = [gpu.begin_reading(result) for result in results]
        gpu.release()
        gpu.synchronize(gpu.stream())
    assert [one.tolist() for one in seen] == [STARTS[kind][1](rank) for kind in kinds]


@needs_fake_gpu
def test_a_work_of_torch_is_completed_by_the_gpu_and_orders_each_stream_that_waits(own_gpus):
    def body(rank):
        gpu = own_gpus.mine
        tensor, core = torch.full((3,), rank + 1.0), basics.current().core
        gpu.hold()  # what comes after it in this stream, so the operation
        handle = core.submit(_core.Options(ops.ALLREDUCE, 0), tensor, "t", ops.IN_PLACE)
        work, seen = distributed.Work(None, [handle], [tensor]), []
        for stream in (gpu.new_stream(), gpu.new_stream()):
            with gpu.using(stream):
                assert work.wait()
                seen.append((stream, gpu.begin_reading(tensor)))
        early = work.is_completed()
        gpu.release()
        for stream, _ in seen:
            gpu.synchronize(stream)
        return early, work.is_completed(), work.is_success(), [values.tolist() for _, values in seen]

    assert run_threads(2, body) == [(False, True, True, [[3, 3, 3]] * 2)] * 2


@needs_fake_gpu
@on_threads(2)
def test_a_side_stream_is_right_when_it_is_current_at_the_call(rank, gpus):
    gpu = gpus.mine
    with gpu.using(gpu.new_stream()):
        handle = fl.allreduce_async_(late(gpu, torch.full((3,), rank + 1.0)), op=fl.Sum)
    assert gpu.read(fl.synchronize(handle)).tolist() == [3, 3, 3]


@needs_fake_gpu
def test_strided_tensors_on_16_bit_wires(gpus):
    def body(rank):
        strided = torch.arange(6.0).reshape(2, 3).t() * (rank + 1)
        return gpus.mine.read(fl.allreduce(strided, op=fl.Sum, compression=fl.Compression.fp16)).tolist()

    assert run_threads(2, body) == [[[0.0, 9.0], [3.0, 12.0], [6.0, 15.0]]] * 2


@needs_fake_gpu
@on_threads(2)
def test_a_capture_is_refused_with_a_sentence(rank, gpus):
    gpu = gpus.mine
    tensor = torch.full((2,), rank + 1.0)
    with gpu.capture(), pytest.raises(ValueError, match="captured into a CUDA graph"):
        fl.allreduce(tensor, name="t", op=fl.Sum)
    assert gpu.read(fl.allreduce(tensor, name="t", op=fl.Sum)).tolist() == [3, 3]


@needs_fake_gpu
def test_memory_of_dropped_tensors_stays_until_the_gpu_is_done_and_not_longer(gpus, monkeypatch):
    monkeypatch.setenv("FARANDOLE_TEST_CUDA_SLOW_US", "20000")

    def body(rank):
        gpu, own = gpus.mine, basics.current()
        results, dropped = [], []
        for start, _ in STARTS.values():
            values = late(gpu, torch.full((2,), rank + 1.0))
            handle, watched = start(values), weakref.ref(values)
            del values
            results.append(finished(handle))
            is_kept = watched() is not None
            assert handle.is_complete or is_kept
            dropped.append(watched)
        del handle
        assert [gpu.read(one).tolist() for one in results] == [wanted(rank) for _, wanted in STARTS.values()]
        gc.collect()
        own.core.release_completed()
        return own.core.in_flight, [one() for one in dropped[:1]]  # others may be results' bases

    assert run_threads(2, body) == [(0, [None])] * 2


@needs_fake_gpu
def test_results_outlive_the_context_and_a_dropped_one_waits_for_the_gpu(gpus, monkeypatch):
    monkeypatch.setenv("FARANDOLE_TEST_CUDA_SLOW_US", "20000")

    def body(rank):
        gpu = gpus.mine
        fl.allgather(late(gpu, torch.full((2,), rank)))
        return gpu, fl.allgather(late(gpu, torch.full((rank + 1,), rank)))

    for gpu, result in run_threads(2, body):
        assert gpu.read(result).tolist() == [0, 1, 1]


@needs_fake_gpu
def test_devices_that_do_not_fit_are_refused_by_name(gpus):
    def body(rank):
        gpu = gpus.mine
        fl.allreduce(torch.ones(1))
        with gpu.using(FakeGpu(gpu.device + 4).new_stream()):
            with pytest.raises(ValueError, match="this rank works on device .* one process per GPU"):
                fl.allreduce(torch.ones(1), name="elsewhere")
        if rank == 0:
            with pytest.raises(fl.MismatchError, match=r"shape \[4\]; rows \[1,2\] came"):
                fl.allgather(torch.ones(1), "late", out=torch.zeros(4))
        else:
            fl.allgather(torch.ones(2), "late")
        return gpu.read(fl.allreduce(late(gpu, torch.full((2,), rank + 5.0)), op=fl.Sum)).tolist()

    def on_the_cpu_and_a_gpu(rank):
        for call in (fl.allgather, fl.alltoall, fl.reducescatter):
            with pytest.raises(fl.MismatchError, match=f'^{call.__name__} "x": rank 0 sent a tensor on cpu'):
                call(torch.ones(2), name="x")
        return farandole.allreduce(torch.ones(1).numpy()).item()

    assert run_threads(2, body) == [[11, 11]] * 2
    with reading(lambda _: gpus.mine if basics.current().topology.rank else None):
        assert run_threads(2, on_the_cpu_and_a_gpu) == [1, 1]


def nccl_calls(name):
    """How often a function of the fake NCCL was called in this process."""
    library = ctypes.CDLL(str(NCCL))
    library.farandole_fake_nccl.restype = ctypes.POINTER(ctypes.c_void_p)
    times = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_char_p)(library.farandole_fake_nccl()[4])
    return times(name.encode())


@needs_fake_gpu
@on_threads(2)
def test_two_dtypes_of_one_decision_are_one_group_of_nccl(rank, own_gpus):
    tensors = [torch.full((3,), rank + 1.0, dtype=d) for d in (torch.float32, torch.float64)]
    before = nccl_calls("ncclGroupEnd")
    fl.barrier()
    results = fl.grouped_allreduce(tensors, op=fl.Sum, name="both")
    seen = [own_gpus.mine.read(result).tolist() for result in results]
    fl.barrier()
    assert (seen, nccl_calls("ncclGroupEnd") - before) == ([[3.0] * 3] * 2, 2)


def test_torchs_stream_0_is_the_default_one_and_never_one_of_its_pool(monkeypatch):
    made = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext(made.append(stream)))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: ("default", device))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: (handle, device))
    for stream in ((1, 0), (1, 7)):
        with _codecs.CudaContext(1).using(stream):
            pass
    assert made == [("default", 1), (7, 1)]


# Arrays without torch: NumPy's memory poses as a GPU's.


class Array:
    """What speaks ``__cuda_array_interface__``, over NumPy's memory."""

    def __init__(self, values, gpu=None, **said):
        self.values, self.gpu, self.said = np.asarray(values), gpu, said

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
    """What speaks DLPack alone, on a GPU or, where there is no device, in the host."""

    def __init__(self, values, device=0, version=None):
        self.values, self.device, self.version, self.stream = values, device, version, None

    @property
    def shape(self):
        return self.values.shape

    def __dlpack_device__(self):
        return (1, 0) if self.device is None else (2, self.device)

    def __dlpack__(self, stream=None, **options):
        self.stream = stream
        if self.device is None:
            return self.values.__dlpack__()
        if self.version is None and options:
            raise TypeError("an old producer")
        capsule = self.values.__dlpack__(**({"max_version": self.version} if self.version else {}))
        device = device_in(capsule)
        device[0], device[1] = 2, self.device
        return capsule


class Anywhere(Exporter):
    """Of a library that says its dtypes."""

    @property
    def dtype(self):
        return self.values.dtype


def device_in(capsule):
    """The device in a DLPack capsule's struct: its kind and number, to be changed."""
    name, pointer = ctypes.pythonapi.PyCapsule_GetName, ctypes.pythonapi.PyCapsule_GetPointer
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    which = name(capsule)
    version_context_deleter_flags, data = 32 if which == b"dltensor_versioned" else 0, 8
    return (ctypes.c_int32 * 2).from_address(pointer(capsule, which) + version_context_deleter_flags + data)


needs_dlpack_1 = pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) < "2.1.0", reason="this NumPy exports DLPack 0 only"
)


class CudaArrays(Numpy):
    """Of a library that can make an empty array like another."""

    forms = ("blocking", "async", "in place")

    def __init__(self, gpus):
        self.gpus = gpus

    def make(self, values, dtype):
        made = late_soon(self.gpus.mine, torch.from_numpy(np.array(values, dtype)))
        return Array(made.numpy(), self.gpus.mine)

    def numbers(self, array):
        return self.gpus.mine.read(torch.from_numpy(array.values)).tolist()

    def kind_of(self, array):
        return type(array), array.values.dtype


@needs_fake_gpu
def test_cuda_arrays_are_ordered_with_their_stream_and_new_ones_are_made_by_their_library(own_gpus, monkeypatch):
    module = types.ModuleType("anylib")
    module.empty_like = lambda array, shape=None: Array(np.zeros_like(array.values, shape=shape), array.gpu)
    monkeypatch.setitem(sys.modules, "anylib", module)
    monkeypatch.setattr(Array, "__module__", "anylib.arrays")
    cases = [case for case in named(CASES, "allreduce", "broadcast", "reducescatter") if not case.is_strided]
    run_threads(2, lambda rank: check(CudaArrays(own_gpus), rank, 2, cases, ["float64", "int32"]))


@needs_fake_gpu
@needs_dlpack_1
def test_dlpack_alone_is_ordered_with_the_default_stream_and_a_type_may_be_anywhere(own_gpus):
    total = functools.partial(farandole.allreduce, op=farandole.Sum)

    def body(rank):
        gpu = own_gpus.mine
        exporter = Exporter(np.full(3, rank + 1.0, np.float32), gpu.device, version=(1, 0))
        in_host, on_gpu = (Anywhere(np.full(2, rank + 1.0), device, version=(1, 0)) for device in (None, gpu.device))
        farandole.allreduce_(exporter, op=farandole.Sum)
        assert total(in_host).tolist() == [3, 3]
        with pytest.raises(TypeError, match="no way to make a Anywhere for the result"):
            total(on_gpu)
        farandole.allreduce_(on_gpu, op=farandole.Sum)
        gpu.synchronize((gpu.device, None))
        assert total(in_host).tolist() == on_gpu.values.tolist() == [3, 3]
        return exporter.stream, exporter.values.tolist()

    assert run_threads(2, body) == [(1, [3.0] * 3)] * 2


def test_dlpack_of_both_versions_is_read_its_capsule_keeps_the_memory_and_gives_it_back():
    values = np.arange(6, dtype=np.int32).reshape(2, 3)
    assert _core.describe(Exporter(values, 3)) == (values.ctypes.data, "int32", (2, 3), True, 3, False)
    assert not _core.describe(Exporter(values.T))[3]
    assert _core.describe(Exporter(np.empty((0, 3))))[2] == (0, 3)
    before = sys.getrefcount(values)
    assert _core.describe(Exporter(values))[2] == (2, 3)
    assert sys.getrefcount(values) == before


@needs_dlpack_1
def test_dlpack_tells_what_may_be_written_to():
    values = np.ones(2)
    assert _core.describe(Exporter(values, version=(1, 0)))[5]
    values.flags.writeable = False
    assert not _core.describe(Exporter(values, version=(1, 0)))[5]


#: What -> (a call of farandole, its arguments, in the text of its error).
REFUSALS = {
    "strides": ("allreduce_", lambda: [Array(np.ones((3, 2)).T)], "does not lie in C order"),
    "read-only memory": ("allreduce_", lambda: [Array(np.ones(2), data=(64, True))], "may be changed in place"),
    "a new array": ("allreduce", lambda: [Array(np.ones(2))], "use allreduce_"),
    "a new root's array": ("broadcast", lambda: [Array(np.ones(2)), 0], "use broadcast_"),
    "a complex maximum": ("allreduce_", lambda: [Array(np.ones(2, complex)), None, farandole.Max], "complex128"),
    "another byte order": ("allreduce_", lambda: [Array(np.ones(2, ">f4"))], ">f4"),
    "gathered rows": ("allgather", lambda: [Array(np.ones(2))], "on a GPU use farandole.torch"),
    "exchanged rows": ("alltoall", lambda: [Array(np.ones(2))], "on a GPU use farandole.torch"),
    "scattered rows": ("reducescatter", lambda: [Array(np.ones(2))], "result; copy it to the host"),
    "an old DLPack": ("allreduce_", lambda: [Exporter(np.ones(2))], "may be changed in place"),
}


@pytest.mark.parametrize("what", [*REFUSALS, "an immutable library"])
def test_refusals_say_what_to_do_instead(what, monkeypatch):
    if what not in REFUSALS:
        monkeypatch.setattr(Array, "__module__", "jaxlib.xla_extension")
    call, arguments, text = REFUSALS.get(what, ("allreduce_", lambda: [Array(np.ones(2))], "may be changed in place"))
    with pytest.raises((TypeError, ValueError), match=text):
        run_threads(1, lambda _: getattr(farandole, call)(*arguments()))


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
