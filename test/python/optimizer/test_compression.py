"""Compression in the optimizer and in allreduce(): what travels, what it costs, and what it does not."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import farandole.torch as fl
from contract import FirstColumn
from jobs import on_all, on_several
from models import Halved, parameter
from ranks import run_threads


class Renamed(fl.Compression.bf16):
    """A class of the library by another name."""


WIRES = {"fp16": (fl.Compression.fp16, torch.float16), "bf16": (fl.Compression.bf16, torch.bfloat16),
         "of bf16": (Renamed, torch.bfloat16)}  # fmt: skip


def gradient(rank: int, count: int = 3001) -> torch.Tensor:
    """Magnitudes from 1e-8 to 1e-4, evenly by their logarithm, of both signs."""
    generator = torch.Generator().manual_seed(rank)
    magnitude = 10.0 ** (torch.rand(count, generator=generator, dtype=torch.float64) * 4 - 8)
    return (magnitude * (torch.randint(2, (count,), generator=generator) * 2 - 1)).float()


def averaged(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Each contribution rounded, the sum in float and by rank, divided, and rounded once."""
    total = torch.zeros_like(gradient(0))
    for rank in range(size):
        total += gradient(rank).to(dtype).float()
    return (total / size).to(dtype).float()


def reduced(job, grad, compression):
    """What ``grad``, of a wrapped optimizer's parameter, becomes, and the operators that torch ran for it."""
    p = torch.nn.Parameter(torch.zeros(3001))
    optimizer = job.sgd(p, compression=compression)
    loss = (p * grad).sum()
    with Calls() as calls:
        loss.backward()
        job.finish(optimizer)
    return p.grad.clone(), calls.names


class Calls(TorchDispatchMode):
    """Notes the names of the operators that torch runs on this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@on_all
@pytest.mark.parametrize("wire", WIRES)
def test_gradients_are_rounded_once_divided_after_the_sum_and_cast_without_a_tensor(job, wire):
    compression, dtype = WIRES[wire]
    expected = gradient(0) if job.size == 1 else averaged(job.size, dtype)
    _, plain = job.run(lambda rank: reduced(job, gradient(rank), fl.Compression.none))[0]
    assert "aten.mul.Tensor" in plain  # the mode sees backward
    for got, calls in job.run(lambda rank: reduced(job, gradient(rank), compression)):
        assert torch.equal(got, expected) and calls == plain


@on_several
def test_equal_small_gradients_are_lost_only_where_float16_loses_them(job):
    grad = gradient(0)
    must, divided_first = (int((grad.div(by).half() == 0).sum()) for by in (1, job.size))
    assert 0 < must < divided_first
    results = job.run(lambda rank: reduced(job, grad, fl.Compression.fp16)[0])
    assert [int((got == 0).sum()) for got in results] == [must] * job.size


@on_several
def test_two_optimizers_may_choose_differently(job):
    def body(rank):
        exact, rounded = (torch.nn.Parameter(torch.zeros(3001)) for _ in range(2))
        optimizers = job.sgd(exact), job.sgd(rounded, compression=fl.Compression.bf16)
        ((exact + rounded) * gradient(rank)).sum().backward()
        for optimizer in optimizers:
            job.finish(optimizer)
        return exact.grad.clone(), rounded.grad.clone()

    total = sum(map(gradient, range(job.size)), torch.zeros(3001))
    for exact, rounded in job.run(body):
        assert torch.equal(exact, total / job.size) and torch.equal(rounded, averaged(job.size, torch.bfloat16))


class Unchanged(fl.Compression.none):
    """Overrides one method, so it must be called."""

    calls = 0

    @staticmethod
    def decompress(tensor, ctx):
        Unchanged.calls += 1
        return tensor


def test_a_subclass_that_overrides_one_method_is_called():
    def body(rank):
        optimizer = fl.DistributedOptimizer(torch.optim.SGD([p := parameter(1.0)], lr=1.0), compression=Unchanged)
        (p * rank).sum().backward()
        optimizer.step()
        return p.grad.item()

    Unchanged.calls = 0
    assert run_threads(2, body) == [0.5, 0.5] and Unchanged.calls >= 2


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("compression", [Halved, FirstColumn(), Unchanged])
def test_allreduce_takes_a_class_of_the_users_own(size, compression):
    def body(rank):
        with pytest.raises(ValueError, match=r"compression must have compress\(tensor\)"):
            fl.allreduce(torch.ones(1), compression="fp16")
        return fl.allreduce(torch.full((2, 3), float(rank)), name="x", op=fl.Sum, compression=compression)

    expected = torch.full((2, 3), size * (size - 1) / 2)
    if isinstance(compression, FirstColumn):
        expected[:, 1:] = 0
    assert all(torch.equal(result, expected) for result in run_threads(size, body))
