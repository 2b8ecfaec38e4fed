"""Compression.fp16 and bf16 in the optimizer: what travels, what it costs, and what it does not."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import farandole.torch as fl
from jobs import on_all, on_several

WIRES = {"fp16": torch.float16, "bf16": torch.bfloat16}
on_wires = pytest.mark.parametrize("wire", WIRES)


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


def backward_of(gradients: torch.Tensor, parameter: torch.Tensor) -> None:
    """Gives the parameter this gradient, through autograd."""
    (parameter * gradients).sum().backward()


@on_all
@on_wires
def test_gradients_are_rounded_once_and_divided_after_the_sum(job, wire):
    expected = gradient(0) if job.size == 1 else averaged(job.size, WIRES[wire])

    def body(rank):
        p = torch.nn.Parameter(torch.zeros(3001))
        optimizer = job.sgd(p, compression=getattr(fl.Compression, wire))
        backward_of(gradient(rank), p)
        job.finish(optimizer)
        return p.grad.clone()

    for got in job.run(body):
        assert torch.equal(got, expected)


@on_several
def test_equal_small_gradients_are_lost_only_where_float16_loses_them(job):
    grad = gradient(0)

    def body(rank):
        p = torch.nn.Parameter(torch.zeros(3001))
        optimizer = job.sgd(p, compression=fl.Compression.fp16)
        backward_of(grad, p)
        job.finish(optimizer)
        return int((p.grad == 0).sum())

    must = int((grad.half() == 0).sum())
    divided_first = int(((grad / job.size).half() == 0).sum())
    assert 0 < must < divided_first
    assert job.run(body) == [must] * job.size


class Calls(TorchDispatchMode):
    """Notes the names of the operators that torch runs on this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@on_several
@on_wires
def test_no_tensor_is_made_for_the_cast(job, wire):
    def calls_of(rank, compression):
        p = torch.nn.Parameter(torch.zeros(3001))
        optimizer = job.sgd(p, compression=compression)
        loss = (p * gradient(rank)).sum()
        with Calls() as calls:
            loss.backward()
            optimizer.step()
        return calls.names

    def body(rank):
        return calls_of(rank, fl.Compression.none), calls_of(rank, getattr(fl.Compression, wire))

    for plain, cast in job.run(body):
        assert "aten.mul.Tensor" in plain  # the mode sees backward
        assert cast == plain


@on_several
def test_two_optimizers_may_choose_differently(job):
    def body(rank):
        exact, rounded = (torch.nn.Parameter(torch.zeros(3001)) for _ in range(2))
        first = job.wrap(torch.optim.SGD([exact], lr=1.0), [("exact", exact)])
        second = job.wrap(
            torch.optim.SGD([rounded], lr=1.0), [("rounded", rounded)],
            compression=fl.Compression.bf16,
        )  # fmt: skip
        ((exact + rounded) * gradient(rank)).sum().backward()
        job.finish(first)
        job.finish(second)
        return exact.grad.clone(), rounded.grad.clone()

    total = torch.zeros(3001)
    for rank in range(job.size):
        total += gradient(rank)
    for exact, rounded in job.run(body):
        assert torch.equal(exact, total / job.size)
        assert torch.equal(rounded, averaged(job.size, torch.bfloat16))
