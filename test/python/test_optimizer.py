"""The wrapped optimizer as an object: it stays what it was."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch

import farandole.torch as fl
from models import Branched, batch, loss_of, parameter, wrapped
from ranks import run_threads


def test_the_optimizer_stays_the_same_object_of_the_same_class():
    def body(rank):
        model = Branched()
        adam = torch.optim.Adam(model.parameters(), lr=0.1)
        before = torch.optim.lr_scheduler.StepLR(adam, 1)
        optimizer = fl.DistributedOptimizer(adam, model.named_parameters())
        after = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        assert optimizer is adam and type(optimizer) is torch.optim.Adam
        loss_of(model, batch(rank, 0)).backward()
        optimizer.step()
        before.step()
        after.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.1 * 0.5)
        assert set(optimizer.state_dict()) == {"state", "param_groups"}
        for twin in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
            assert type(twin) is torch.optim.Adam
            assert "_farandole" not in twin.__dict__ and "zero_grad" not in twin.__dict__
            twin.zero_grad()
            twin.step()  # alone: it exchanges nothing
        torch.save(optimizer.state_dict(), io.BytesIO())
        torch.save(model.state_dict(), io.BytesIO())
        copy.deepcopy(model)

    run_threads(2, body)


def test_a_subclass_whose_step_calls_the_base_runs_one_round():
    class Twice(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    def body(rank):
        p = parameter(1.0)
        optimizer = fl.DistributedOptimizer(Twice([p], lr=1.0), [("p", p)])
        (p * rank).sum().backward()
        optimizer.step()
        return p.item()

    assert run_threads(2, body) == [0.5, 0.5]


def test_unfrozen_parameters_are_exchanged():
    def body(rank):
        p, q = parameter(1.0), parameter(1.0)
        q.requires_grad_(False)
        optimizer = wrapped(p, q)
        for step in range(5):
            q.requires_grad_(step >= 2)
            optimizer.zero_grad()
            (p + q * (1 + rank)).sum().backward()
            assert (q.grad.item() if step >= 2 else q.grad) == (1.5 if step >= 2 else None)
            optimizer.step()

    run_threads(2, body)


def test_a_model_converted_after_wrapping_is_reduced_in_its_new_dtype():
    def body(rank):
        model = torch.nn.Linear(2, 1)
        optimizer = fl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
        for dtype in (torch.float32, torch.float64, torch.float64):
            model.to(dtype)
            optimizer.zero_grad()
            x = torch.full((1, 2), 1 + 1e-9 * (1 + rank), dtype=dtype)
            model(x).sum().backward()
            optimizer.step()
        return model.weight.grad[0, 0].item() - 1

    assert run_threads(2, body) == pytest.approx([1.5e-9] * 2, rel=1e-6)


def test_a_dropped_optimizer_takes_its_hooks_along():
    def body(rank):
        p = parameter(1.0)
        optimizer = wrapped(p)
        (p * rank).sum().backward()
        dropped = weakref.ref(optimizer)
        del optimizer
        assert dropped() is None
        p.grad = None
        (p * (rank + 1)).sum().backward()
        assert p.grad.item() == rank + 1
        optimizer = wrapped(p)
        p.grad = None
        (p * (rank + 1)).sum().backward()
        assert p.grad.item() == 1.5
        del optimizer

    gc.disable()
    try:
        run_threads(2, body)
    finally:
        gc.enable()


def test_wrong_names_are_refused_before_anything_is_sent():
    p, q = parameter(1.0), parameter(1.0)
    optimizer = torch.optim.SGD([p, q], lr=1.0)
    with pytest.raises(ValueError, match="used twice: w"):
        fl.DistributedOptimizer(optimizer, [("w", p), ("w", q)])
    with pytest.raises(ValueError, match="not in it"):
        fl.DistributedOptimizer(optimizer, [("w", p)])
    with pytest.raises(ValueError, match="tuples"):
        fl.DistributedOptimizer(optimizer, [p, q])
    with pytest.raises(ValueError, match="backward_passes_per_step"):
        fl.DistributedOptimizer(optimizer, backward_passes_per_step=0)
    with pytest.raises(ValueError, match="not been initialized"):
        fl.DistributedOptimizer(optimizer)


def test_wrapping_twice_is_refused():
    def body(rank):
        optimizer = wrapped(parameter(1.0))
        with pytest.raises(ValueError, match="wrapped already"):
            fl.DistributedOptimizer(optimizer)

    run_threads(2, body)
