"""Collectives that cut tensors, of tensors that pose as a GPU's: order with streams, lifetimes."""

import gc

import pytest
import torch

import farandole
import farandole.torch as fl
from fake_gpu import late, needs_fake_gpu, pose, reading
from farandole import basics
from ranks import run_threads

pytestmark = needs_fake_gpu


@pytest.fixture(params=[False, True], ids=["own GPUs", "one GPU"])
def gpus(request):
    yield from pose(shared=request.param)


def test_reducescatter_of_what_a_late_producer_writes(gpus):
    def body(rank):
        gpu = gpus.mine
        part = fl.reducescatter(late(gpu, torch.arange(5.0) * (rank + 1)), op=fl.Sum)
        tensors = [late(gpu, torch.full((4,), rank + 1.0)), late(gpu, torch.full((2, 3), rank))]
        handle = fl.grouped_reducescatter_async(tensors, op=fl.Sum)
        floats, whole = fl.synchronize(handle)
        return [gpu.read(t).tolist() for t in (part, floats, whole)]

    assert run_threads(2, body) == [
        [[0, 3, 6], [3, 3], [[1, 1, 1]]],
        [[9, 12], [3, 3], [[1, 1, 1]]],
    ]


def test_allgather_of_a_group_with_unequal_rows_some_of_none(gpus):
    def body(rank):
        gpu = gpus.mine
        rows = [late(gpu, torch.full((rank + 1, 2), float(rank))), torch.zeros(0, 3)]
        rows.append(late(gpu, torch.full((2 * rank,), rank)))
        for gather in (
            fl.grouped_allgather,
            lambda *arguments: fl.synchronize(fl.grouped_allgather_async(*arguments)),
        ):
            first, second, third = gather(rows, "group")
            assert second.shape == (0, 3) and gpu.read(third).tolist() == [1, 1]
            assert gpu.read(first)[:, 0].tolist() == [0, 1, 1]

    run_threads(2, body)


def test_alltoall_of_what_a_late_producer_writes(gpus):
    def body(rank):
        gpu = gpus.mine
        rows = late(gpu, torch.arange(5.0) + 10 * rank)
        output, splits = fl.alltoall(rows, [1 + rank, 2])
        handle = fl.alltoall_async(late(gpu, torch.full((2,), rank)))
        exchanged, _ = fl.synchronize(handle)
        assert splits.tolist() == [[1, 2], [2, 2]][rank]
        return gpu.read(output).tolist(), gpu.read(exchanged).tolist()

    assert run_threads(2, body) == [([0, 10, 11], [0, 1]), ([1, 2, 12, 13], [0, 1])]


def test_synchronize_makes_the_current_stream_wait_and_the_host_go_on(gpus):
    def body(rank):
        gpu = gpus.mine
        rows = torch.full((2,), rank + 1.0)
        handles = [
            fl.alltoall_async(late(gpu, rows)),
            fl.reducescatter_async(late(gpu, rows), op=fl.Sum),
            fl.allgather_async(late(gpu, rows)),
        ]
        with gpu.using(gpu.new_stream()):
            gpu.hold()
            exchanged, part, gathered = (fl.synchronize(handle) for handle in handles)
            seen = [gpu.begin_reading(result) for result in (exchanged[0], part, gathered)]
            gpu.release()
            gpu.synchronize(gpu.stream())
        return [tensor.tolist() for tensor in seen]

    assert run_threads(2, body) == [[[1, 2], [3], [1, 1, 2, 2]]] * 2


def test_memory_of_dropped_tensors_stays_until_the_gpu_is_done_and_not_longer(gpus, monkeypatch):
    monkeypatch.setenv("FARANDOLE_TEST_CUDA_SLOW_US", "20000")

    def body(rank):
        gpu, own = gpus.mine, basics.current()
        results = []
        for call in (
            lambda rows: fl.alltoall(rows),
            lambda rows: fl.reducescatter(rows, op=fl.Sum),
            lambda rows: fl.synchronize(fl.allgather_async(rows)),
        ):
            rows = late(gpu, torch.full((2,), rank + 1.0))
            results.append(call(rows))
            del rows
        seen = [gpu.read(result).tolist() for result in results]
        gc.collect()
        own.core.release_completed()
        return seen, own.core.in_flight

    assert run_threads(2, body) == [([[1, 2], [3], [1, 1, 2, 2]], 0)] * 2


def test_a_tensor_on_the_cpu_and_one_on_a_gpu_are_refused_by_name(gpus):
    def body(rank):
        for call in (fl.allgather, fl.alltoall, fl.reducescatter):
            with pytest.raises(fl.MismatchError) as raised:
                call(torch.ones(2), name="x")
            text = str(raised.value)
            assert text.startswith(f'{call.__name__} "x": rank 0 sent a tensor on cpu'), text
        return farandole.allreduce(torch.ones(1).numpy()).item()

    with reading(lambda _: gpus.mine if basics.current().topology.rank else None):
        assert run_threads(2, body) == [1, 1]


def test_results_outlive_the_context_and_a_dropped_one_waits_for_the_gpu(gpus, monkeypatch):
    monkeypatch.setenv("FARANDOLE_TEST_CUDA_SLOW_US", "20000")

    def body(rank):
        gpu = gpus.mine
        fl.allgather(late(gpu, torch.full((2,), rank)))
        return gpu, fl.allgather(late(gpu, torch.full((rank + 1,), rank)))

    for gpu, result in run_threads(2, body):
        assert gpu.read(result).tolist() == [0, 1, 1]
