"""Gradients that pose as a GPU's: the contract's rows once more, and what only streams can break.

The rows of the 16-bit wires are left out: there NCCL rounds otherwise than planes in host memory.
"""

import gc
import pathlib
import random
import time
import weakref
from dataclasses import replace

import pytest
import torch

import farandole.torch as fl
import test_contract
from contract import SEED, of_all, run
from fake_gpu import needs_fake_gpu, pose, read_by_the_host, reading
from farandole import basics
from farandole.torch import _compat
from farandole.torch import _library as torch_library
from jobs import Job
from models import parameter
from ranks import count_events, run_threads
from test_state import go_on_like_the_root

pytestmark = [
    needs_fake_gpu,
    pytest.mark.filterwarnings("ignore:optimizer.step.. called without"),
]


@pytest.fixture(params=[False, True], ids=["own GPUs", "one GPU"])
def gpus(request):
    yield from pose(shared=request.param)


@pytest.fixture
def _on_gpus():
    for gpus in pose(shared=False):
        yield from read_by_the_host(gpus)


draw = random.Random(SEED)


@of_all([replace(each, sizes=(2,), completes=(draw.choice(each.completes),)) for each in test_contract.PROGRAMS
         if "fl.Compression" not in each.arguments and "Aside" not in each.text + each.first])  # fmt: skip
@pytest.mark.once
def test_the_contract(program, job, _on_gpus):
    run(program, job)


@pytest.mark.once
@pytest.mark.parametrize("case", ["Adam", "SparseAdam", "LBFGS"])
def test_all_ranks_go_on_bitwise_like_the_root(case, _on_gpus):
    go_on_like_the_root(case, (2, 3, 1))


class Late(torch.autograd.Function):
    """The identity, whose gradient the GPU writes into ``parameter.grad`` after a while."""

    @staticmethod
    def forward(ctx, parameter, gpu, gradient):
        ctx.parameter, ctx.gpu, ctx.gradient = parameter, gpu, gradient
        return parameter.clone()

    @staticmethod
    def backward(ctx, grad):
        values = torch.full((1,), ctx.gradient)
        ctx.gpu.write(ctx.parameter.grad, values, holds=False)  # a gradient has one owner
        return torch.zeros(grad.shape), None, None


def late(parameter, gpu, gradient):
    """A loss with this late gradient."""
    parameter.grad = torch.zeros(1)
    return Late.apply(parameter, gpu, gradient).sum()


def test_a_gradient_that_is_written_late_is_in_the_mean(gpus):
    def body(rank):
        gpu = gpus.mine
        first, second = parameter(1.0), parameter(1.0)
        optimizer = Job(2).sgd(first, second)
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            (late(first, gpu, 1.0 + rank) + late(second, gpu, 10.0 * (step + 1))).backward()
            seen.append([gpu.read(p.grad).item() for p in (first, second)])
            optimizer.zero_grad()
        return seen

    assert run_threads(2, body) == [[[1.5, 10], [1.5, 20], [1.5, 30]]] * 2


class OnStream(torch.autograd.Function):
    """The identity; from its backward on ``stream`` is current."""

    @staticmethod
    def forward(ctx, tensor, gpu, stream):
        ctx.gpu, ctx.stream = gpu, stream
        return tensor.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.gpu._current.stream = ctx.stream
        return grad, None, None


def test_a_gradient_is_sent_behind_its_own_stream(gpus):
    """The hook that sends a gradient is the next one's, in which another stream may be current.

    The first round sends everything at its end, where autograd itself would have put the caller's
    stream behind the others; the fake does not.
    """

    def body(rank):
        gpu = gpus.mine
        caller, side = gpu.stream(), gpu.new_stream()
        p, q = parameter(1.0), parameter(1.0)
        optimizer = Job(2).sgd(p, q)
        for _ in range(3):
            optimizer.zero_grad()
            made_here = OnStream.apply((q * 1.0).sum(), gpu, caller)
            made_aside = OnStream.apply(late(p, gpu, 1.0 + rank), gpu, side)
            # Autograd runs what was made last first: p's part, then q's.
            (made_here + made_aside).backward()
            assert gpu.stream() == caller
            gpu.synchronize(side)
            seen = gpu.read(p.grad).item(), gpu.read(q.grad).item()
        return seen

    assert run_threads(2, body) == [(1.5, 1.0)] * 2


def calls_into_the_package(function):
    """How many functions of farandole.torch are called on this thread, those that read tensors aside.

    On a GPU torch's C functions read them and name the current stream; here the fake does.
    """
    readers = {torch_library.__file__, _compat.__file__}
    package = pathlib.Path(torch_library.__file__).parent

    def is_one(frame, event):
        file = frame.f_code.co_filename
        return event == "call" and file not in readers and pathlib.Path(file).is_relative_to(package)

    return count_events(function, is_one)


def test_no_python_runs_for_each_gradient_of_a_pass(gpus):
    def calls_of_a_step(parameters):
        def body(rank):
            weights = [parameter(1.0) for _ in range(parameters)]
            optimizer = Job(2).sgd(*weights)
            for _ in range(3):
                loss = torch.stack(weights).sum()
                calls = calls_into_the_package(loss.backward)
                optimizer.step()
                gpus.mine.synchronize(gpus.mine.stream())
                optimizer.zero_grad(set_to_none=False)
            return calls

        return run_threads(2, body)[0]

    few, many = calls_of_a_step(10), calls_of_a_step(210)
    assert few > 0
    assert many - few < 20, "none for each of the 200"


def test_gradients_dropped_after_backward_stay_until_the_gpu_is_done(gpus, monkeypatch):
    monkeypatch.setenv("FARANDOLE_TEST_CUDA_SLOW_US", "1000")

    def body(rank):
        gpu = gpus.mine
        p = parameter(1.0)
        optimizer = Job(2).sgd(p)
        (reducer,) = basics.current().reducers
        for step in range(4):
            optimizer.zero_grad(set_to_none=True)
            late(p, gpu, rank + 1.0 + step).backward()
            gradient = weakref.ref(p.grad)
            p.grad = None
            is_there = gradient() is not None
            assert is_there or reducer.gradients.is_complete
            gpu.synchronize(gpu.stream())
            optimizer.zero_grad()
            assert gradient() is None
        return is_there

    run_threads(2, body)


def test_memory_of_rounds_does_not_add_up_where_nobody_waits_for_the_gpu(gpus, monkeypatch):
    monkeypatch.setenv("FARANDOLE_TEST_CUDA_SLOW_US", "2000")

    def body(rank):
        gpu = gpus.mine
        p, q = parameter(1.0), parameter(2.0)
        optimizer = Job(2).sgd(p, q)
        (reducer,) = basics.current().reducers
        most = 0
        for _ in range(20):
            optimizer.zero_grad(set_to_none=True)
            (p * q).sum().backward()
            optimizer.step()
            most = max(most, reducer.gradients.kept)
            time.sleep(0.02)  # in which the GPU keeps up
        gpu.synchronize(gpu.stream())
        return most

    assert max(run_threads(2, body)) < 10


def test_shutdown_waits_for_what_the_gpu_still_has_to_do(gpus, monkeypatch):
    monkeypatch.setenv("FARANDOLE_TEST_CUDA_SLOW_US", "20000")
    results = {}

    def body(rank):
        results[rank] = torch.full((7,), rank + 1.0)
        fl.allreduce_(results[rank], op=fl.Sum)
        results[rank, "gpu"] = gpus.mine

    run_threads(2, body)
    for rank in range(2):
        gpu = results[rank, "gpu"]
        gpu.synchronize(gpu.stream())
        assert results[rank].tolist() == [3.0] * 7


def test_an_optimizer_dropped_after_backward_leaves_its_gradients_to_the_context(gpus, monkeypatch):
    monkeypatch.setenv("FARANDOLE_TEST_CUDA_SLOW_US", "20000")

    def body(rank):
        gpu, own = gpus.mine, basics.current()
        p = parameter(1.0)
        optimizer = Job(2).sgd(p)
        late(p, gpu, rank + 1.0).backward()
        (reducer,) = own.reducers
        gradients, gradient = reducer.gradients, weakref.ref(p.grad)
        del optimizer, reducer, p
        gc.collect()
        assert gradient() is not None or gradients.is_complete
        gpu.synchronize(gpu.stream())
        own.core.release_completed()
        assert gradient() is None

    run_threads(2, body)


def test_a_capture_of_backward_is_refused_and_the_next_one_works(gpus):
    def body(rank):
        gpu = gpus.mine
        p = parameter(1.0)
        optimizer = Job(2).sgd(p)
        with gpu.capture(), pytest.raises(ValueError, match="captured into a CUDA graph"):
            (p * 1.0).sum().backward()
        optimizer.zero_grad()
        (p * (1.0 + rank)).sum().backward()
        return gpu.read(p.grad).item()

    assert run_threads(2, body) == [1.5, 1.5]


def test_a_model_partly_in_host_memory_is_broadcast_and_trained(gpus):
    def body(rank):
        gpu = gpus.mine
        here = parameter(float(rank))
        there = torch.nn.Parameter(torch.tensor([10.0 + rank], dtype=torch.float64))
        for params in ({"here": here}, {"there": there}):  # (torch puts both on one device)
            fl.broadcast_parameters(params, 1)
        gpu.synchronize(gpu.stream())
        values = here.item(), there.item()
        optimizer = Job(2).sgd(here, there)
        for _ in range(3):
            optimizer.zero_grad()
            (here * (rank + 1.0) + there * (rank + 3.0)).sum().backward()
            gpu.synchronize(gpu.stream())  # before the host itself writes zeros
        return values, gpu.read(here.grad).item(), gpu.read(there.grad).item()

    with reading(lambda tensor: gpus.mine if tensor.dtype is torch.float64 else None):
        assert run_threads(2, body) == [((1.0, 11.0), 1.5, 3.5)] * 2


def test_ranks_with_tensors_in_different_places_are_told(gpus):
    def body(_rank):
        with pytest.raises(fl.MismatchError, match='"parameters".*device'):
            fl.broadcast_parameters({"weight": torch.ones(2)})
        optimizer = Job(2).sgd(p := parameter(1.0))
        with pytest.raises(fl.MismatchError, match='cpu.*cuda.*device'):
            p.sum().backward()
        return optimizer is not None

    with reading(lambda _: gpus.mine if basics.current().topology.rank == 1 else None):
        run_threads(2, body)
