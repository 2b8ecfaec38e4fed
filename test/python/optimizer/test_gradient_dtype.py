"""Gradients of another dtype than their parameter's are reduced as they are."""

import pytest
import torch

import farandole.torch as fl
from jobs import on_all, on_several

pytestmark = [
    pytest.mark.filterwarnings("ignore:optimizer.step.. called without"),
    pytest.mark.skipif(
        not hasattr(torch.Tensor, "grad_dtype"),
        reason="this torch gives gradients the dtype of their parameter",
    ),
]
FINE = 1.0 + 2.0**-20  # lost in bfloat16


def half(grad_dtype=torch.float32):
    """A bfloat16 weight with gradients of another dtype; None: of any."""
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    p.grad_dtype = grad_dtype
    return p


class FloatGradient(torch.autograd.Function):
    """A float32 copy of bfloat16 weights, whose gradient stays float32."""

    @staticmethod
    def forward(ctx, weights):
        return weights.float()

    @staticmethod
    def backward(ctx, grad):
        return grad


@on_all
@pytest.mark.parametrize("op", [fl.Average, fl.Sum], ids=["Average", "Sum"])
def test_float32_gradients_of_bfloat16_weights_lose_nothing(job, op):
    def body(rank):
        p = half()
        optimizer = job.sgd(p, op=op)
        for _ in range(4):
            optimizer.zero_grad()
            (FloatGradient.apply(p) * (FINE * 2**rank)).sum().backward()
            job.finish(optimizer)
            assert p.grad.dtype == torch.float32
            total = FINE * (2**job.size - 1)
            expected = total if op is fl.Sum else total / job.size
            torch.testing.assert_close(p.grad, torch.full((3,), expected), rtol=1e-7, atol=0)

    job.run(body)


@on_all
def test_a_rank_without_a_gradient_receives_it_in_the_dtype_that_is_set(job):
    def body(rank):
        p = half()
        optimizer = job.sgd(p)
        for step in range(3):
            optimizer.zero_grad()
            if rank == step % job.size:
                p.grad = torch.full((3,), FINE * job.size)
            optimizer.step()
            assert p.grad.dtype == torch.float32 and p.grad.tolist() == pytest.approx([FINE] * 3, rel=1e-7)

    job.run(body)


@on_all
def test_a_gradient_of_any_dtype_keeps_that_of_the_last_round(job):
    """Whose ``grad_dtype`` is None: all ranks have a gradient once, then only one has."""

    def body(rank):
        p = half(None)
        optimizer = job.sgd(p)
        for step in range(4):
            optimizer.zero_grad()
            if step == 0 or rank == step % job.size:
                scale = job.size if step else 1
                (FloatGradient.apply(p) * (FINE * scale)).sum().backward()
            optimizer.step()
            assert p.grad.dtype == torch.float32 and p.grad.tolist() == pytest.approx([FINE] * 3, rel=1e-7)

    # With complete="backward" a rank that skips backward() takes part in step().
    job.run(body)


@on_several
def test_ranks_that_disagree_on_the_dtype_get_an_error_by_name(job):
    def body(rank):
        p = half(torch.float32 if rank == 0 else torch.bfloat16)
        optimizer = job.sgd(p)
        p.grad = torch.ones(3, dtype=p.grad_dtype)
        with pytest.raises(fl.MismatchError, match='"p0".*float32.*bfloat16'):
            optimizer.step()
        optimizer.zero_grad()
        p.grad_dtype = torch.float32
        p.grad = torch.full((3,), FINE)
        optimizer.step()
        assert p.grad.tolist() == pytest.approx([FINE] * 3, rel=1e-7)

    job.run(body)


@on_several
def test_a_dtype_that_changes_in_mid_pass_is_refused_by_name_once(job):
    """q is sent while p's gradient, which nobody can foresee, is still to come."""

    def body(rank):
        p, q, r = half(None), half(None), half(None)
        optimizer = job.sgd(p, q, r)

        def run(is_float):
            optimizer.zero_grad()
            x = FloatGradient.apply(p) if is_float else p.float()
            ((x * q.float()).sum() * r.float()).sum().backward()
            job.finish(optimizer)

        for _ in range(3):
            run(False)
        with pytest.raises((ValueError, fl.AbortedError), match='"p0".*float32.*bfloat16'):
            run(True)
        run(True)
        assert p.grad.dtype == torch.float32 and q.grad.dtype == torch.bfloat16

    job.run(body)


@on_several
def test_float32_sparse_gradients_of_bfloat16_weights_lose_nothing(job):
    def body(rank):
        p = torch.nn.Parameter(torch.ones(4, 2, dtype=torch.bfloat16))
        p.grad_dtype = torch.float32
        optimizer = job.sgd(p)
        for _ in range(2):
            values = torch.full((1, 2), FINE * 2**rank)
            p.grad = torch.sparse_coo_tensor([[2]], values, (4, 2), check_invariants=True)
            optimizer.step()
            mean = FINE * (2**job.size - 1) / job.size
            assert p.grad.dtype == torch.float32
            assert p.grad.to_dense()[2].tolist() == pytest.approx([mean] * 2, rel=1e-7)

    job.run(body)
