"""Gradients that are accumulated a varying number of times per pass: overlap=False."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import farandole.torch as fl
from jobs import on_all, on_several
from models import parameter, wrapped
from ranks import run_threads

pytestmark = pytest.mark.filterwarnings("ignore:optimizer.step.. called without")


def loop(p, times, x=None):
    """A loop over one checkpointed layer; at p = 1 its slope is the number of times."""
    x = torch.ones(1, requires_grad=True) if x is None else x
    for _ in range(times):
        x = checkpoint(lambda y: y * p, x, use_reentrant=True)
    return x


@on_all
@pytest.mark.parametrize("op", [fl.Average, fl.Sum], ids=["Average", "Sum"])
@pytest.mark.parametrize("is_equal", [True, False], ids=["equal loops", "unequal loops"])
def test_without_overlap_loops_may_vary_in_length(job, op, is_equal):
    def body(rank):
        p, q = parameter(1.0), parameter(1.0)
        optimizer = job.sgd(p, q, lr=0.0, op=op, overlap=False)
        for times in (2, 5, 1, 0, 7, 3):
            optimizer.zero_grad()
            mine = times + (0 if is_equal else rank)
            (loop(p, mine) * q).sum().backward()
            optimizer.step()
            mean = times if is_equal else times + job.mean_rank
            scale = job.size if op is fl.Sum else 1
            assert q.grad.item() == scale
            assert (0 if p.grad is None else p.grad.item()) == mean * scale

    job.run(body)


@on_several
def test_without_overlap_nothing_is_sent_before_the_end(job):
    def body(rank):
        p, q = parameter(1.0), parameter(1.0)
        optimizer = job.sgd(p, q, overlap=False)
        exchange = optimizer.synchronize.__self__.own
        for _ in range(3):
            optimizer.zero_grad()
            sent = []
            x = q * 1
            x.register_hook(lambda _, sent=sent: sent.append(exchange.gradients.has_marked))
            (x + loop(p, 2)).sum().backward()
            job.finish(optimizer)
            assert sent == [False]

    job.run(body)


@on_several
def test_the_error_of_one_firing_more_says_the_way_out(job):
    def body(rank):
        p, q = parameter(1.0), parameter(1.0)
        optimizer = job.sgd(p, q, lr=0.0)

        def run(times):
            optimizer.zero_grad()
            loop(p, times).sum().backward()
            job.finish(optimizer)

        run(2)
        with pytest.raises(
            (RuntimeError, fl.AbortedError), match=r'"p0" was accumulated again.*overlap=False'
        ):
            # Between p's second gradient, with which it is sent, and its third one comes q's.
            loop(p, 2, loop(q, 1, loop(p, 1))).sum().backward()
            job.finish(optimizer)
        run(2)
        assert p.grad.item() == 2

    job.run(body)


def test_optimizers_that_share_a_parameter_agree_on_overlap():
    def body(rank):
        p = parameter(1.0)
        _first = wrapped(p)
        with pytest.raises(ValueError, match="another overlap"):
            wrapped(p, overlap=False)

    run_threads(2, body)
