"""Gradients that are assigned after ``backward()``, or written to while they travel."""

import pytest
import torch

import farandole.torch as fl
from jobs import Job, on_several
from models import parameter

pytestmark = pytest.mark.filterwarnings("ignore:optimizer.step.. called without")

OPS = pytest.mark.parametrize("op", [fl.Average, fl.Sum], ids=["Average", "Sum"])


@on_several
@OPS
def test_a_gradient_assigned_where_the_pass_made_none_is_reduced_in_step(job, op):
    def body(rank):
        p, q = parameter(0.0), parameter(0.0)
        optimizer = job.sgd(p, q, op=op)
        for step in range(4):
            optimizer.zero_grad(set_to_none=True)
            (p * (rank + step)).sum().backward()
            q.grad = torch.full((1,), 2.0 * (rank + step))
            optimizer.step()
            scale = job.size if op is fl.Sum else 1
            assert p.grad.item() == (job.mean_rank + step) * scale
            assert q.grad.item() == 2 * (job.mean_rank + step) * scale
        return p.item(), q.item()

    first, *others = job.run(body)
    assert all(other == first for other in others)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_gradient_that_takes_the_place_of_a_mean_is_averaged(size):
    job = Job(size)

    def body(rank):
        p, q = parameter(0.0), parameter(0.0)
        optimizer = job.sgd(p, q)
        for step in range(4):
            optimizer.zero_grad()
            (p * rank + q * 3).sum().backward()
            (extra,) = torch.autograd.grad((p * (10 * rank)).sum(), p)
            p.grad = p.grad + extra
            optimizer.step()
            assert (p.grad.item(), q.grad.item()) == (11 * job.mean_rank, 3)

    job.run(body)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_gradient_that_takes_the_place_of_a_sum_is_refused_by_name(size):
    job = Job(size)

    def body(rank):
        p = parameter(0.0)
        optimizer = job.sgd(p, op=fl.Sum)
        for _ in range(3):
            optimizer.zero_grad()
            (p * rank).sum().backward()
            p.grad = p.grad + 1
            with pytest.raises(ValueError, match='the gradient of "p0" was reduced in backward'):
                optimizer.step()
        optimizer.zero_grad()
        (p * rank).sum().backward()
        optimizer.synchronize()
        p.grad = p.grad + 1
        with optimizer.skip_synchronize():
            optimizer.step()
        assert p.item() == -(job.size * job.mean_rank + 1)

    job.run(body)


@pytest.mark.parametrize("size", [2, 3, 4])
@OPS
def test_a_gradient_that_only_one_rank_assigns_fails_on_all(size, op):
    job = Job(size)

    def body(rank):
        p, q = parameter(0.0), parameter(0.0)
        optimizer = job.sgd(p, q, op=op)
        for step in range(3):
            optimizer.zero_grad()
            (p * rank).sum().backward()
            if rank == 0 and step == 1:
                q.grad = torch.ones(1)
            optimizer.step()
        return p.item()

    with pytest.raises(fl.HorovodInternalError, match="step"):
        job.run(body)


@on_several
def test_what_is_written_in_place_after_the_round_stays(job):
    """As clipping does it: the same on all ranks."""

    def body(rank):
        p, q = parameter(0.0), parameter(0.0)
        optimizer = job.sgd(p, q, op=fl.Sum)
        for _ in range(3):
            optimizer.zero_grad()
            (p * rank + q).sum().backward()
            job.finish(optimizer)
            torch.nn.utils.clip_grad_value_([p, q], 0.5)
            with optimizer.skip_synchronize():
                optimizer.step()
            assert (p.grad.item(), q.grad.item()) == (0.5, 0.5)

    job.run(body)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("compression", [None, fl.Compression.bf16], ids=["plain", "bf16"])
@pytest.mark.parametrize("place", ["own", "flat"])
def test_a_write_into_a_gradient_in_flight_is_refused_by_name(size, compression, place):
    """Clipping in the hook of a layer that comes two accumulations later. Views of one buffer have one version, which
    autograd raises for each."""
    job = Job(size)

    def body(rank):
        layers = [torch.nn.Parameter(torch.ones(64)) for _ in range(4)]
        optimizer = job.sgd(*layers, groups=1000, compression=compression or fl.Compression.none)
        writes = False
        flat = torch.zeros(4, 64)
        for layer, view in zip(layers, flat if place == "flat" else (), strict=False):
            layer.grad = view

        def clip(gradient):
            if writes:
                layers[3].grad.clamp_(-0.1, 0.1)

        layers[1].register_hook(clip)
        for step in range(6):
            optimizer.zero_grad(set_to_none=place == "own")
            writes = step == 4
            x = torch.ones(64) * (rank + 1)
            for layer in layers:
                x = x * layer
            if not writes:
                x.sum().backward()
                assert place == "own" or layers[3].grad._base is flat
                optimizer.step()
                continue
            with pytest.raises((ValueError, fl.HorovodInternalError)) as caught:
                x.sum().backward()
            assert 'the gradient of "p3" was changed in place' in str(caught.value)
            assert "while it was in flight" in str(caught.value)
        return layers[0].sum().item()

    results = job.run(body)
    assert results == [results[0]] * size


@pytest.mark.parametrize("size", [2, 3, 4])
def test_clipping_before_synchronize_is_refused_by_name(size):
    job = Job(size, "step")

    def body(rank):
        layers = [torch.nn.Parameter(torch.ones(64)) for _ in range(4)]
        optimizer = job.sgd(*layers, groups=1000)
        for step in range(4):
            optimizer.zero_grad()
            (sum(layers) * (rank + 1)).sum().backward()
            if step < 3:
                optimizer.step()
                continue
            torch.nn.utils.clip_grad_norm_(layers, 0.1 * (rank + 1))
            with pytest.raises((ValueError, fl.HorovodInternalError), match="in flight"):
                optimizer.step()

    job.run(body)


@pytest.mark.parametrize("size", [2, 3])
def test_zero_grad_of_the_model_between_backward_and_step_is_refused(size):
    job = Job(size, "step")

    def body(rank):
        model = torch.nn.Linear(4, 4)
        optimizer = job.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), groups=1000)
        for step in range(4):
            model(torch.ones(2, 4)).sum().backward()
            if step < 3:
                optimizer.step()
                optimizer.zero_grad()
        model.zero_grad(set_to_none=False)
        with pytest.raises((ValueError, fl.HorovodInternalError), match="in flight"):
            optimizer.step()

    job.run(body)
