"""Gradients that are written without a backward pass: every rank takes part with what it wrote."""

import pytest
import torch

import farandole.torch as fl
from jobs import on_all, on_several
from models import parameter

pytestmark = pytest.mark.filterwarnings("ignore:optimizer.step.. called without")


def by_autograd(optimizer, p, slope):
    """torch.autograd.grad, copied into the gradient."""
    (grad,) = torch.autograd.grad((p * slope).sum(), p)
    if p.grad is None:
        p.grad = grad
    else:
        p.grad.copy_(grad)


def by_function_transform(optimizer, p, slope):
    """torch.func.grad."""
    grad = torch.func.grad(lambda x: (x * slope).sum())(p.detach())
    if p.grad is None:
        p.grad = torch.zeros_like(p)
    with torch.no_grad():
        p.grad.zero_().add_(grad)


def by_evolution(optimizer, p, slope):
    """One buffer, given to the parameter once."""
    if p.grad is None:
        p.grad = torch.zeros_like(p)
    p.grad[:] = slope


def by_adding(optimizer, p, slope):
    """Zeroed in place, then added to."""
    if p.grad is None:
        p.grad = torch.zeros_like(p)
    optimizer.zero_grad(set_to_none=False)
    p.grad.add_(slope)


def by_a_view(optimizer, p, slope):
    """A part of one flat buffer, written through the buffer."""
    if p.grad is None:
        p.grad = torch.zeros(4)[1:3]
    p.grad._base.fill_(slope)


def behind_autograd(optimizer, p, slope):
    """Through .data, of which the tensor's version says nothing."""
    if p.grad is None:
        p.grad = torch.zeros_like(p)
    p.grad.data.fill_(slope)


WRITERS = [by_autograd, by_function_transform, by_evolution, by_adding, by_a_view]


@on_all
@pytest.mark.parametrize("op", [fl.Average, fl.Sum], ids=["Average", "Sum"])
@pytest.mark.parametrize("write", WRITERS)
def test_gradients_written_in_place_are_reduced_in_every_step(job, op, write):
    def body(rank):
        p = parameter(0.0, 0.0)
        optimizer = job.sgd(p, op=op)
        for step in range(4):
            write(optimizer, p, float(rank + step))
            optimizer.step()
            mean = job.mean_rank + step
            assert p.grad.tolist() == [mean * (job.size if op is fl.Sum else 1)] * 2
        return p.tolist()

    first, *others = job.run(body)
    assert all(other == first for other in others)


@on_all
def test_a_mean_is_taken_of_gradients_written_through_data(job):
    def body(rank):
        p = parameter(0.0, 0.0)
        optimizer = job.sgd(p)
        for step in range(4):
            behind_autograd(optimizer, p, float(rank + step))
            optimizer.step()
            assert p.grad.tolist() == [job.mean_rank + step] * 2

    job.run(body)


@on_several
@pytest.mark.parametrize("op", [fl.Average, fl.Sum], ids=["Average", "Sum"])
def test_a_written_gradient_takes_part_beside_those_of_a_backward(job, op):
    """The round is begun by another parameter's backward."""

    def body(rank):
        p, q = parameter(0.0), parameter(0.0)
        optimizer = job.sgd(p, q, op=op)
        q.grad = torch.zeros(1)
        for step in range(4):
            p.grad = None
            q.grad.fill_(rank + step)
            (p * rank).sum().backward()
            optimizer.step()
            scale = job.size if op is fl.Sum else 1
            assert p.grad.item() == job.mean_rank * scale
            assert q.grad.item() == (job.mean_rank + step) * scale

    job.run(body)


@on_several
def test_only_some_ranks_write_in_place(job):
    def body(rank):
        p = parameter(0.0)
        optimizer = job.sgd(p)
        p.grad = torch.full((1,), 12.0 * rank)
        optimizer.step()
        if rank == 0:
            p.grad.fill_(0.0)
        optimizer.step()
        return p.grad.item()

    mean = 12 * job.mean_rank
    assert job.run(body) == [mean * (job.size - 1) / job.size] * job.size


@on_all
def test_with_sum_a_backward_may_add_to_what_was_written_after_zero_grad(job):
    def body(rank):
        p = parameter(0.0)
        optimizer = job.sgd(p, op=fl.Sum)
        for _ in range(3):
            optimizer.zero_grad(set_to_none=False)
            if p.grad is not None:
                p.grad.add_(rank)
            else:
                p.grad = torch.full((1,), float(rank))
            (p * 1).sum().backward()
            optimizer.step()
            assert p.grad.item() == job.size * (1 + job.mean_rank)

    job.run(body)


@on_all
def test_a_gradient_made_in_inference_mode_is_reduced_in_every_step(job):
    """Such a tensor has no version."""

    def body(rank):
        p = parameter(0.0)
        optimizer = job.sgd(p)
        with torch.inference_mode():
            p.grad = torch.zeros(1)
        for step in range(3):
            with torch.inference_mode():
                p.grad.fill_(rank + step)
            optimizer.step()
            assert p.grad.item() == job.mean_rank + step

    job.run(body)


@on_all
def test_a_lazily_negated_gradient_on_one_rank_is_reduced_with_its_sign(job):
    def body(rank):
        p = parameter(0.0, 0.0)
        optimizer = job.sgd(p)
        for step in range(3):
            grad = torch.tensor([1.0, 2.0]) * (rank + step)
            p.grad = torch._neg_view(-grad) if rank == 0 else grad
            optimizer.step()
            assert p.grad.tolist() == [job.mean_rank + step, 2 * (job.mean_rank + step)]

    job.run(body)


@on_several
def test_an_expanded_gradient_on_one_rank_gets_the_mean(job):
    def body(rank):
        p = parameter(0.0, 0.0)
        optimizer = job.sgd(p)
        for step in range(3):
            grad = torch.tensor([float(rank + step)])
            p.grad = grad.expand(2) if rank == 0 else grad.repeat(2)
            optimizer.step()
            assert p.grad.tolist() == [job.mean_rank + step] * 2
        return p.tolist()

    job.run(body)


def through_views(p, q, factor):
    """A loss for which autograd gives both gradients the same memory."""
    return ((p.view(-1) + q.view(-1)) * factor).sum()


@on_several
@pytest.mark.parametrize("op", [fl.Average, fl.Sum])
@pytest.mark.parametrize("arguments", [{}, {"overlap": False}, {"groups": 2}], ids=str)
def test_gradients_that_share_memory_are_reduced_once_each(job, op, arguments):
    def body(rank):
        p, q = (torch.nn.Parameter(torch.zeros(200_000)) for _ in range(2))
        optimizer = job.sgd(p, q, op=op, **arguments)
        for step in range(6):
            optimizer.zero_grad()
            through_views(p, q, 1.0 + rank + step).backward()
            job.finish(optimizer)
            expected = (1.0 + job.mean_rank + step) * (job.size if op == fl.Sum else 1)
            assert p.grad.eq(expected).all() and q.grad.eq(expected).all()
            p.grad.zero_()
            assert q.grad.eq(expected).all()
            optimizer.step()

    job.run(body)
