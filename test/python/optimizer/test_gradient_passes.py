"""What counts as a backward pass: nested, repeated, partial and refused ones."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import farandole.torch as fl
from jobs import on_all, on_several
from models import parameter

pytestmark = pytest.mark.filterwarnings("ignore:optimizer.step.. called without")


class Nested(torch.autograd.Function):
    """Identity whose backward runs another backward."""

    @staticmethod
    def forward(ctx, x, inner):
        ctx.inner = inner
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            ctx.inner().backward()
        return grad, None


@on_several
def test_nested_passes_are_one_round(job):
    def body(rank):
        p, q, r = parameter(1.0), parameter(1.0), parameter(1.0)

        def backward_in_hook(grad):
            with torch.enable_grad():
                (r * rank).sum().backward()
            return grad

        optimizer = job.sgd(p, q, r)
        for _ in range(3):
            optimizer.zero_grad()
            rounds = optimizer.synchronize.__self__.own.rounds
            x = checkpoint(lambda y: y * p, torch.ones(1, requires_grad=True), use_reentrant=True)
            x = Nested.apply(x, lambda: (q * rank).sum())
            x.register_hook(backward_in_hook)
            (x * rank).sum().backward()
            job.finish(optimizer)
            assert [t.grad.item() for t in (p, q, r)] == [job.mean_rank] * 3
            assert optimizer.synchronize.__self__.own.rounds == rounds + 1

    job.run(body)


@on_all
def test_a_second_backward_accumulates_on_the_mean_as_in_plain_torch(job):
    def body(rank):
        p = parameter(1.0)
        optimizer = job.sgd(p)
        for _ in range(3):
            (p * (1 + rank)).sum().backward()
        job.finish(optimizer)
        return p.grad.item()

    assert job.run(body) == [3 * (1 + job.mean_rank)] * job.size


@on_all
def test_a_graph_may_be_retained_for_a_second_backward(job):
    def body(rank):
        p = parameter(2.0)
        optimizer = job.sgd(p)
        loss = (p * p * rank).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        job.finish(optimizer)
        return p.grad.item()

    assert job.run(body) == [8 * job.mean_rank] * job.size


@on_several
def test_with_sum_a_second_backward_on_a_reduced_gradient_is_refused(job):
    def body(rank):
        p = parameter(1.0)
        optimizer = job.sgd(p, op=fl.Sum)
        (p * 1).sum().backward()
        job.finish(optimizer)
        assert p.grad.item() == job.size
        torch.nn.utils.clip_grad_norm_([p], 0.5)  # must not hide it
        with pytest.raises(RuntimeError, match='"p0" already holds a reduced value'):
            (p * 1).sum().backward()
        optimizer.zero_grad(set_to_none=False)
        (p * 1).sum().backward()
        optimizer.step()
        assert p.grad.item() == job.size

    job.run(body)


@on_several
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_create_graph_is_refused_and_autograd_grad_is_not(job):
    def body(rank):
        p = parameter(2.0)
        optimizer = job.sgd(p)
        with pytest.raises(RuntimeError, match="create_graph"):
            (p**2).sum().backward(create_graph=True)
        optimizer.zero_grad()
        (slope,) = torch.autograd.grad((p**3).sum(), p, create_graph=True)
        ((slope - 1) ** 2 * (1 + rank)).sum().backward()  # a gradient penalty, as of WGAN-GP
        job.finish(optimizer)
        return p.grad.item()

    # d/dp (3 p^2 - 1)^2 = 2 (3 p^2 - 1) 6 p
    assert job.run(body) == [264 * (1 + job.mean_rank)] * job.size


@on_all
def test_autograd_grad_and_functional_derivatives_exchange_nothing(job):
    def body(rank):
        p = parameter(2.0)
        optimizer = job.sgd(p)
        if rank == 0:  # alone: an exchange would wait for the others
            (slope,) = torch.autograd.grad((p**2).sum(), p)
            assert slope.item() == 4
            assert torch.autograd.functional.jacobian(lambda x: x**2, p.detach()).item() == 4
            assert torch.func.grad(lambda x: (x**2).sum())(p.detach()).item() == 4
        assert p.grad is None
        (p * rank).sum().backward()
        optimizer.step()
        return p.item()

    assert job.run(body) == [2 - job.mean_rank] * job.size


@on_all
def test_backward_to_some_inputs_reduces_those(job):
    def body(rank):
        p, q = parameter(1.0), parameter(1.0)
        optimizer = job.sgd(p, q)
        for _ in range(3):
            optimizer.zero_grad()
            (p * rank + q * rank).sum().backward(inputs=[p])
            job.finish(optimizer)
            assert p.grad.item() == job.mean_rank and q.grad is None
            optimizer.step()

    job.run(body)


@on_all
def test_autocast_changes_nothing(job):
    def body(rank):
        layer = torch.nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            layer.weight.fill_(1.0)
        optimizer = job.sgd(layer.weight)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = layer(torch.full((1, 2), float(rank))).sum()
            loss.backward()
            job.finish(optimizer)
            assert layer.weight.grad.tolist() == [[job.mean_rank] * 2]
            assert layer.weight.grad.dtype == torch.float32

    job.run(body)


@on_all
def test_a_gradient_of_another_dtype_or_layout_is_right(job):
    def body(rank):
        p = torch.nn.Parameter(torch.ones(2, 3))
        optimizer = job.sgd(p)
        p.grad = None
        given = torch.arange(6.0).reshape(3, 2).t() * rank  # transposed
        p.grad = given
        optimizer.step()
        expected = torch.arange(6.0).reshape(3, 2).t() * job.mean_rank
        torch.testing.assert_close(p.grad, expected)
        assert p.grad is given or job.size == 1
        torch.testing.assert_close(p.detach(), 1 - expected)

    job.run(body)


@on_several
def test_ranks_whose_first_pass_fires_in_different_orders_agree(job):
    def body(rank):
        ps = [parameter(1.0) for _ in range(6)]
        optimizer = job.sgd(*ps)
        for step in range(4):
            optimizer.zero_grad()
            turned = ps[(rank + step) % 6 :] + ps[: (rank + step) % 6]
            sum((p * rank).sum() for p in turned).backward()
            job.finish(optimizer)
            assert [p.grad.item() for p in ps] == [job.mean_rank] * 6

    job.run(body)
