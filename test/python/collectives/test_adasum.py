"""Adasum of arrays and tensors against NumPy, and the optimizer that combines steps by it."""

import numpy as np
import pytest
import torch

import farandole as fl
import farandole.torch as flt
from ranks import on_threads, run_threads


def adasum(vectors):
    """In double, along a binary tree in rank order."""
    vectors = [np.asarray(v, np.float64) for v in vectors]
    while len(vectors) > 1:
        pairs = [combine(*vectors[i : i + 2]) for i in range(0, len(vectors) - 1, 2)]
        vectors = pairs + vectors[len(vectors) & ~1 :]
    return vectors[0]


def combine(a, b):
    dot, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
    left = 1 - dot / (2 * aa) if aa else 1
    right = 1 - dot / (2 * bb) if bb else 1
    return left * a + right * b


def vector(rank, count=37):
    return np.random.default_rng(100 + rank).normal(size=count)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_arrays_are_summed_adaptively(size, dtype):
    inputs = [vector(rank).astype(dtype) for rank in range(size)]
    results = run_threads(size, lambda rank: fl.allreduce(inputs[rank], op=fl.Adasum, name="x"))
    wanted = adasum(inputs)
    tolerance = {"float16": 2e-3, "float32": 1e-6, "float64": 1e-14}[dtype]
    for result in results:
        assert result.dtype == dtype
        np.testing.assert_allclose(result, wanted, rtol=tolerance, atol=tolerance)
        assert result.tobytes() == results[0].tobytes()


def test_tensors_of_a_group_have_products_of_their_own_and_may_be_bfloat16_or_on_a_wire_of_16_bits():
    tensors = [[torch.tensor(vector(10 * i + rank, 5 + i)) for i in range(3)] for rank in range(3)]

    def body(rank):
        value = tensors[rank][0].float()
        half = flt.allreduce(value.bfloat16(), op=flt.Adasum).float()
        wire = flt.allreduce(value, op=flt.Adasum, compression=flt.Compression.fp16)
        return [*flt.grouped_allreduce(tensors[rank], op=flt.Adasum), half, wire]

    for results in run_threads(3, body):
        for result, i, tolerance in zip(results, (0, 1, 2, 0, 0), (1e-13, 1e-13, 1e-13, 2e-2, 2e-3), strict=True):
            wanted = adasum([tensors[rank][i].numpy() for rank in range(3)])
            np.testing.assert_allclose(result.numpy(), wanted, rtol=tolerance, atol=tolerance)


def make_model():
    """The same on every call; threads share torch's random numbers."""
    model = torch.nn.Linear(4, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.tensor(vector(50, parameter.numel())).view_as(parameter))
    return model


def train(rank, size, optimizer_of, steps=3):
    """Trains on inputs that differ between ranks; the parameters afterwards."""
    model = make_model()
    optimizer = optimizer_of(model.parameters())
    if size > 1:
        optimizer = flt.DistributedOptimizer(optimizer, model.named_parameters(), op=flt.Adasum)
    inputs = torch.tensor(vector(rank, 20), dtype=torch.float32).view(5, 4)
    for _ in range(steps):
        optimizer.zero_grad()
        model(inputs).square().sum().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


@pytest.mark.parametrize("size", [2, 3])
def test_the_optimizer_combines_the_changes_of_all_ranks(size):
    results = run_threads(size, lambda rank: train(rank, size, sgd, steps=1))
    starts = [p.detach() for p in make_model().parameters()]
    alone = [train(rank, 1, sgd, steps=1) for rank in range(size)]
    for i, start in enumerate(starts):
        changes = [(alone[rank][i] - start).numpy().ravel() for rank in range(size)]
        wanted = start.numpy() + adasum(changes).reshape(start.shape)
        for result in results:
            np.testing.assert_allclose(result[i].numpy(), wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("optimizer_of", [sgd, torch.optim.Adam])
def test_replicas_stay_equal_and_equal_data_trains_as_one_rank(optimizer_of):
    def body(rank):
        return train(rank, 2, optimizer_of), train(0, 2, optimizer_of)

    (first, same), (second, _) = run_threads(2, body)
    assert all(map(torch.equal, first, second))
    for one, alone in zip(same, train(0, 1, optimizer_of), strict=True):
        torch.testing.assert_close(one, alone, rtol=1e-4, atol=1e-6)


class Twice(torch.optim.SGD):
    """Steps by its parent's step, changes more, and fails when told to."""

    fails = False

    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p += p.grad
        if self.fails:
            raise RuntimeError("step failed")


@pytest.mark.parametrize("failing_ranks", [(0, 1), (1,)])
@on_threads(2)
def test_a_step_that_calls_its_parents_or_fails_is_combined_once(rank, failing_ranks):
    """A step that fails on one rank fails on all, and the next one works."""
    p = torch.nn.Parameter(torch.zeros(2))
    optimizer = flt.DistributedOptimizer(Twice([p], lr=3.0), op=flt.Adasum)
    p.grad = torch.tensor([1.0, 0.0]) if rank == 0 else torch.tensor([0.0, 1.0])
    optimizer.fails = rank in failing_ranks
    with pytest.raises(RuntimeError, match="step failed"):
        optimizer.step()
    with torch.no_grad():
        p.zero_()
    optimizer.fails = False
    optimizer.step()
    assert p.tolist() == [-2.0, -2.0]


@pytest.mark.skipif(not hasattr(torch.amp, "GradScaler"), reason="torch has none for the CPU")
def test_a_scaler_may_leave_out_the_step_of_one_rank():
    def body(rank):
        p = torch.nn.Parameter(torch.zeros(2))
        optimizer = flt.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), op=flt.Adasum)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        for step in range(2):
            optimizer.zero_grad()
            factor = float("inf") if (rank, step) == (1, 0) else 1.0
            scaler.scale((p * torch.tensor([factor, 1.0])).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        return p.tolist()

    first, second = run_threads(2, body)
    assert first == second == [-2.0, -2.0]


def test_a_scheduler_around_an_unwrapped_optimizer_exchanges_nothing():
    def body(rank):
        p = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([p], lr=1.0)
        flt.DistributedOptimizer(optimizer, op=flt.Adasum)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        flt.unwrap(optimizer)
        if rank == 0:
            p.grad = torch.ones(1)
            optimizer.step()
            scheduler.step()
        return p.item()

    assert run_threads(2, body) == [-1.0, 0.0]


def test_a_rank_without_gradients_takes_part():
    def body(rank):
        p, q = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
        optimizer = flt.DistributedOptimizer(torch.optim.SGD([p, q], lr=1.0), op=flt.Adasum)
        if rank == 0:
            (p * torch.tensor([1.0, 2.0])).sum().backward()
        optimizer.synchronize()
        optimizer.step()
        with pytest.raises(AssertionError, match="Adasum"):
            with optimizer.skip_synchronize():
                pass
        plain = flt.unwrap(optimizer)
        plain.step()
        return p.tolist(), q.tolist()

    assert run_threads(2, body) == [([-2.0, -4.0], [0, 0]), ([-1.0, -2.0], [0, 0])]
