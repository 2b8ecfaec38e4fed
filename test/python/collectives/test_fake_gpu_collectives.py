"""Collectives on torch tensors that pose as a GPU's: order with streams, lifetimes, refusals."""

import ctypes
import weakref

import pytest
import torch

import farandole.torch as fl
from fake_gpu import NCCL, FakeGpu, late, needs_fake_gpu, pose
from farandole import _core, basics, ops
from farandole.torch import distributed
from ranks import run_threads

pytestmark = needs_fake_gpu


@pytest.fixture(params=[False, True], ids=["own GPUs", "one GPU"])
def gpus(request):
    yield from pose(shared=request.param)


def test_what_a_late_producer_writes_is_in_the_sum(gpus):
    def body(rank):
        gpu = gpus.mine
        tensor = late(gpu, torch.full((5,), rank + 1.0))
        result = fl.allreduce(tensor, op=fl.Sum, name="new")
        in_place = late(gpu, torch.full((5,), rank + 10.0))
        fl.allreduce_(in_place, op=fl.Sum, name="in place")
        rooted = late(gpu, torch.full((5,), rank + 7.0))
        fl.broadcast_(rooted, 1, name="root")
        return [gpu.read(t)[0].item() for t in (tensor, result, in_place, rooted)]

    assert run_threads(2, body) == [[1, 3, 21, 8], [2, 3, 21, 8]]


def test_synchronize_makes_the_current_stream_wait_and_the_host_go_on(gpus):
    def body(rank):
        gpu = gpus.mine
        handle = fl.allreduce_async(late(gpu, torch.full((3,), rank + 1.0)), op=fl.Sum)
        with gpu.using(gpu.new_stream()):
            gpu.hold()
            result = fl.synchronize(handle)
            seen = gpu.begin_reading(result)
            gpu.release()
            gpu.synchronize(gpu.stream())
        return seen.tolist()

    assert run_threads(2, body) == [[3, 3, 3]] * 2


def test_a_work_of_torch_is_completed_by_the_gpu_and_orders_each_stream_that_waits():
    for own_gpus in pose(shared=False):

        def body(rank, own_gpus=own_gpus):
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


def test_a_side_stream_is_right_when_it_is_current_at_the_call(gpus):
    def body(rank):
        gpu = gpus.mine
        with gpu.using(gpu.new_stream()):
            tensor = late(gpu, torch.full((3,), rank + 1.0))
            handle = fl.allreduce_async_(tensor, op=fl.Sum)
        return gpu.read(fl.synchronize(handle)).tolist()

    assert run_threads(2, body) == [[3, 3, 3]] * 2


def test_strided_tensors_and_16_bit_wires(gpus):
    def body(rank):
        gpu = gpus.mine
        strided = torch.arange(6.0).reshape(2, 3).t() * (rank + 1)
        summed = gpu.read(fl.allreduce(strided, op=fl.Sum))
        half = gpu.read(fl.allreduce(strided, op=fl.Sum, compression=fl.Compression.fp16))
        return torch.equal(summed, half) and summed.tolist()

    assert run_threads(2, body) == [[[0.0, 9.0], [3.0, 12.0], [6.0, 15.0]]] * 2


def test_allgather_of_unequal_rows(gpus):
    def body(rank):
        gpu = gpus.mine
        rows = late(gpu, torch.full((rank + 1, 2), float(rank)))
        blocking = gpu.read(fl.allgather(rows, name="blocking"))
        handle = fl.allgather_async(late(gpu, rows + 10), name="handle")
        return blocking[:, 0].tolist(), gpu.read(fl.synchronize(handle))[:, 0].tolist()

    assert run_threads(2, body) == [([0, 1, 1], [10, 11, 11])] * 2


def test_a_capture_is_refused_with_a_sentence(gpus):
    def body(rank):
        gpu = gpus.mine
        tensor = torch.full((2,), rank + 1.0)
        with gpu.capture(), pytest.raises(ValueError, match="captured into a CUDA graph"):
            fl.allreduce(tensor, name="t", op=fl.Sum)
        return gpu.read(fl.allreduce(tensor, name="t", op=fl.Sum)).tolist()

    assert run_threads(2, body) == [[3, 3]] * 2


def test_memory_of_dropped_tensors_stays_until_the_gpu_is_done(gpus, monkeypatch):
    monkeypatch.setenv("FARANDOLE_TEST_CUDA_SLOW_US", "20000")

    def body(rank):
        gpu, own = gpus.mine, basics.current()
        values = late(gpu, torch.full((7,), rank + 1.0))
        handle = fl.allreduce_async(values, op=fl.Sum)
        watched = weakref.ref(values)
        del values
        result = fl.synchronize(handle)
        is_kept = watched() is not None
        assert handle.is_complete or is_kept
        seen = gpu.read(result).tolist()
        own.core.release_completed()
        return seen, own.core.in_flight, watched() is None

    assert run_threads(2, body) == [([3.0] * 7, 0, True)] * 2


def test_tensors_of_a_call_must_be_on_one_device():
    with pytest.raises(ValueError, match=r'a tensor of shape \[2\] is on "meta"; .*tensor.cpu'):
        run_threads(1, lambda _: fl.allreduce(torch.ones(2, device="meta")))
    mixed = [torch.ones(1), torch.ones(1, device="meta")]
    with pytest.raises(ValueError, match="tensors on cpu and on meta; those of one call"):
        run_threads(1, lambda _: fl.grouped_allgather(mixed))


def test_a_tensor_on_another_gpu_than_the_ranks_is_refused_with_the_remedy(gpus):
    def body(rank):
        gpu = gpus.mine
        fl.allreduce(torch.ones(1))
        with gpu.using(FakeGpu(gpu.device + 4).new_stream()):
            with pytest.raises(ValueError, match="this rank works on device .* one process per GPU"):
                fl.allreduce(torch.ones(1), name="elsewhere")
        return gpu.read(fl.allreduce(late(gpu, torch.full((2,), rank + 5.0)), op=fl.Sum)).tolist()

    assert run_threads(2, body) == [[11, 11]] * 2


def nccl_calls(name):
    """How often a function of the fake NCCL was called in this process."""
    library = ctypes.CDLL(str(NCCL))
    library.farandole_fake_nccl.restype = ctypes.POINTER(ctypes.c_void_p)
    times = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_char_p)(library.farandole_fake_nccl()[4])
    return times(name.encode())


def test_two_dtypes_of_one_decision_are_one_group_of_nccl():
    for _gpus in pose(shared=False):

        def body(rank, gpus=_gpus):
            tensors = [torch.full((3,), rank + 1.0, dtype=d) for d in (torch.float32, torch.float64)]
            before = nccl_calls("ncclGroupEnd")
            fl.barrier()
            results = fl.grouped_allreduce(tensors, op=fl.Sum, name="both")
            seen = [gpus.mine.read(result).tolist() for result in results]
            fl.barrier()
            return seen, nccl_calls("ncclGroupEnd") - before

        assert run_threads(2, body) == [([[3.0] * 3] * 2, 2)] * 2
