"""step(closure): every backward in it is a round, and the loss is that of all ranks."""

import warnings

import pytest
import torch

import farandole.torch as fl
from jobs import on_all, on_several
from models import Branched, batch, loss_of, parameter

LBFGS = {
    "plain": {"lr": 0.5, "max_iter": 8},
    "strong_wolfe": {"lr": 1.0, "max_iter": 8, "line_search_fn": "strong_wolfe"},
}


@on_all
@pytest.mark.parametrize("kind", list(LBFGS))
def test_lbfgs_trains_like_one_process(job, kind):
    """Its decisions to evaluate again depend on the loss, so the ranks must see the same one."""

    def train(model, optimizer, ranks):
        losses = []
        for _ in range(3):

            def closure():
                optimizer.zero_grad()
                loss = sum(loss_of(model, batch(rank, 0)) for rank in ranks) / len(ranks)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
        return losses, [p.detach() for p in model.parameters()]

    alone = Branched()
    expected = train(alone, torch.optim.LBFGS(alone.parameters(), **LBFGS[kind]), range(job.size))

    def body(rank):
        model = Branched()
        lbfgs = torch.optim.LBFGS(model.parameters(), **LBFGS[kind])
        return train(model, job.wrap(lbfgs, model.named_parameters()), [rank])

    for losses, weights in job.run(body):
        assert losses == pytest.approx(expected[0], rel=1e-6)
        for got, want in zip(weights, expected[1], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-8)


@on_all
@pytest.mark.parametrize("way", ["argument", "keyword"])
def test_a_closure_of_any_optimizer_is_a_round(job, way):
    def body(rank):
        p = parameter(0.0)
        optimizer = job.sgd(p)
        for _ in range(3):

            def closure():
                optimizer.zero_grad()
                loss = (p * 0 + rank).sum() + (p * rank).sum() * 2 - (p * rank).sum().detach() * 2
                loss.backward()
                return loss

            loss = optimizer.step(closure) if way == "argument" else optimizer.step(closure=closure)
            assert loss.item() == job.mean_rank
        return p.item()

    assert job.run(body) == [-6 * job.mean_rank] * job.size


@on_all
def test_a_closure_whose_rank_skips_backward_takes_part(job):
    def body(rank):
        p = parameter(0.0)
        optimizer = job.sgd(p)
        for step in range(4):

            def closure(step=step):
                optimizer.zero_grad()
                if rank != step % job.size:
                    (p * 12).sum().backward()

            assert optimizer.step(closure) is None
        return p.item()

    assert job.run(body) == [-4 * 12 * (job.size - 1) / job.size] * job.size


@on_all
def test_a_closure_with_several_passes_per_step_is_reduced_once(job):
    def body(rank):
        p = parameter(0.0)
        optimizer = job.sgd(p, backward_passes_per_step=2)

        def closure():
            optimizer.zero_grad()
            for _ in range(3):
                (p * rank).sum().backward()
            return float(rank)

        assert optimizer.step(closure) == job.mean_rank
        return p.item()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert job.run(body) == [-3 * job.mean_rank] * job.size


@on_several
@pytest.mark.parametrize("before_backward", [True, False])
def test_an_exception_in_one_closure_fails_step_on_every_rank(job, before_backward):
    def body(rank):
        p = parameter(0.0)
        optimizer = job.sgd(p)

        def closure(fails):
            optimizer.zero_grad()
            if fails and before_backward:
                raise OSError("no such file: batch 17")
            loss = (p * 2).sum()
            loss.backward()
            if fails and not before_backward:
                raise OSError("no such file: batch 17")
            return loss

        with pytest.raises((OSError, fl.AbortedError), match="no such file: batch 17"):
            optimizer.step(lambda: closure(rank == 1))
        if job.complete == "step" or before_backward:
            optimizer.zero_grad()
        optimizer.step(lambda: closure(False))
        return p.item()

    assert job.run(body) == [-2.0] * job.size


@on_several
def test_a_loss_on_some_ranks_only_is_refused(job):
    def body(rank):
        p = parameter(0.0)
        optimizer = job.sgd(p)

        def closure():
            optimizer.zero_grad()
            loss = (p * 2).sum()
            loss.backward()
            return loss if rank else None

        with pytest.raises(ValueError, match="a loss on some ranks and None on others"):
            optimizer.step(closure)

    job.run(body)
