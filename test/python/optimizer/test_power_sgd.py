"""PowerSGD: what its two matrices give, what travels, and that nothing is lost over many steps."""

import types

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import farandole.torch as fl
from farandole.torch.optimizer._low_rank import LowRank
from jobs import on_several

ROWS, COLUMNS = 40, 30


def gradient(rank: int, shape: tuple[int, ...] = (ROWS, COLUMNS)) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank))


def low_rank_gradient(rank: int) -> torch.Tensor:
    """Of rank two, in a space of columns that all ranks share: the mean has rank two as well."""
    return gradient(rank, (ROWS, 2)) @ gradient(99, (2, COLUMNS))


def step(job, optimizer, parameter, grad) -> torch.Tensor:
    optimizer.zero_grad()
    (parameter * grad).sum().backward()
    job.finish(optimizer)
    return parameter.grad.clone()


@on_several
@pytest.mark.parametrize("changes", [False, True])
def test_what_is_left_out_comes_later(job, changes):
    """The mean of many steps nears the mean gradient; without the residual the error would stay.

    Another parameter may change meanwhile: it is redefined, for which all ranks meet.
    """

    def body(rank):
        p, other = torch.nn.Parameter(torch.zeros(ROWS, COLUMNS)), torch.nn.Parameter(torch.zeros(3))
        optimizer = job.sgd(p, other, compression=fl.PowerSGD(rank=2))
        taken = []
        for i in range(60):
            if changes:
                other.data, other.grad = torch.zeros(3 + i), None
            taken.append(step(job, optimizer, p, gradient(rank)))
        return taken[0], sum(taken) / len(taken)

    mean = sum(map(gradient, range(job.size))) / job.size
    for first, many in job.run(body):
        assert (first - mean).norm() > 0.5 * mean.norm()
        assert (many - mean).norm() < 0.25 * mean.norm()


@on_several
def test_nan_is_seen_and_forgotten(job):
    def body(rank):
        p = torch.nn.Parameter(torch.zeros(ROWS, COLUMNS))
        optimizer = job.sgd(p, compression=fl.PowerSGD(rank=2))
        step(job, optimizer, p, low_rank_gradient(rank))
        grad = low_rank_gradient(rank)
        grad[3, 4] = float("nan") if rank == 0 else 0.0
        bad = step(job, optimizer, p, grad)
        return bad.isnan().any().item(), step(job, optimizer, p, low_rank_gradient(rank))

    mean = sum(map(low_rank_gradient, range(job.size))) / job.size
    for was_seen, after in job.run(body):
        assert was_seen
        torch.testing.assert_close(after, mean, rtol=1e-4, atol=1e-4)


@on_several
def test_fewer_bytes_travel(job):
    def body(rank):
        p = torch.nn.Parameter(torch.zeros(400, 300))
        optimizer = job.sgd(p, compression=fl.PowerSGD(rank=2))
        before = fl.counters()["batch_bytes"]
        step(job, optimizer, p, gradient(rank, (400, 300)))
        return fl.counters()["batch_bytes"] - before

    for travelled in job.run(body):
        assert 4 * 2 * 700 <= travelled < 4 * 400 * 300 / 10


@on_several
def test_autocast_and_default_dtypes_change_nothing(job):
    contributions = [low_rank_gradient(rank) for rank in range(job.size)]

    def body(rank):
        p = torch.nn.Parameter(torch.zeros(ROWS, COLUMNS, dtype=torch.float32))
        optimizer = job.sgd(p, compression=fl.PowerSGD(rank=2))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return step(job, optimizer, p, contributions[rank])

    torch.set_default_dtype(torch.float64)
    try:
        results = job.run(body)
    finally:
        torch.set_default_dtype(torch.float32)
    for result in results:
        torch.testing.assert_close(result, sum(contributions) / job.size, rtol=1e-4, atol=1e-4)


def test_what_a_failed_round_sent_is_no_part_of_the_next():
    slot = types.SimpleNamespace(parameter=torch.zeros(ROWS, COLUMNS), dtype=torch.float32)
    codec = LowRank(slot, 2, "p", torch.device("cpu"))
    codec.unpack(codec.pack(gradient(0)))
    assert codec.second().any()
    codec.begin()
    assert not codec.second().any()


@pytest.mark.parametrize("rank", [0, -1, 1.5])
def test_a_rank_that_is_none_is_refused(rank):
    with pytest.raises(ValueError, match="PowerSGD: rank must be"):
        fl.PowerSGD(rank)


@on_several
def test_it_is_refused_where_it_means_nothing(job):
    def body(rank):
        p = torch.nn.Parameter(torch.zeros(ROWS, COLUMNS))
        with pytest.raises(ValueError, match="with op=Average, and nothing else"):
            job.sgd(p, compression=fl.PowerSGD(), op=fl.Sum)
        with pytest.raises(ValueError, match="with op=Average, and nothing else"):
            fl.allreduce(p.detach(), name="x", compression=fl.PowerSGD())

    job.run(body)


def test_the_host_does_not_wait_for_the_device_to_tell_what_is_finite():
    class NoWait(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            assert function is not torch.ops.aten._local_scalar_dense.default, "the host reads a value"
            return function(*args, **(kwargs or {}))

    slot = types.SimpleNamespace(parameter=torch.zeros(ROWS, COLUMNS), dtype=torch.float32)
    codec = LowRank(slot, 2, "p", torch.device("cpu"))
    with NoWait():
        codec.unpack(codec.pack(gradient(0)))
        result = codec.finish(codec.second())
    torch.testing.assert_close(result + codec._left, gradient(0))
