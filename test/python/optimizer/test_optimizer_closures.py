"""step(closure): every backward in it is a round; the loss is all ranks' where step() acts on it."""

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
            assert loss.item() == rank  # this rank's own: SGD looks at none
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

        assert optimizer.step(closure) == float(rank)
        return p.item()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert job.run(body) == [-3 * job.mean_rank] * job.size


@on_several
@pytest.mark.parametrize("before_backward", [True, False])
def test_an_exception_in_one_closure_fails_step_on_every_rank(job, before_backward):
    def body(rank):
        p = parameter(0.0)
        optimizer = job.sgd(p, reduce_loss=True)

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
        optimizer = job.sgd(p, reduce_loss=True)

        def closure():
            optimizer.zero_grad()
            loss = (p * 2).sum()
            loss.backward()
            return loss if rank else None

        with pytest.raises(ValueError, match="a loss on some ranks and None on others"):
            optimizer.step(closure)

    job.run(body)


class Twice(torch.optim.Optimizer):
    """An optimizer of a user's own, which evaluates the closure twice."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure):
        return closure(), closure()


class OwnSGD(torch.optim.SGD):
    """Inherits its step()."""


class SteppingSGD(torch.optim.SGD):
    """Nobody knows what its step() does with the closure."""

    def step(self, closure=None):
        return super().step(closure)


def losses_of(job, make, loss_of_rank, **arguments):
    """What step(closure) gave on every rank, and the operations rank 0 sent for it besides a round."""

    def body(rank):
        p = parameter(0.0)
        optimizer = job.wrap(make([p]), [("p", p)], **arguments)

        def closure():
            optimizer.zero_grad()
            (p * 1).sum().backward()
            return loss_of_rank(rank)

        optimizer.step(closure)
        return optimizer.step(closure)

    return job.run(body)


ONE_EVALUATION = {
    "SGD": lambda p: torch.optim.SGD(p, lr=1.0),
    "AdamW": lambda p: torch.optim.AdamW(p),
    "inherited": lambda p: OwnSGD(p, lr=1.0),
}


@on_several
@pytest.mark.parametrize("kind", list(ONE_EVALUATION))
def test_the_loss_stays_the_ranks_own_where_step_evaluates_once(job, kind):
    losses = losses_of(job, ONE_EVALUATION[kind], lambda rank: torch.tensor(float(rank)))
    assert [loss.item() for loss in losses] == list(range(job.size))


@on_several
def test_the_loss_is_reduced_from_the_first_evaluation_where_step_may_evaluate_again(job):
    assert losses_of(job, Twice, float) == [(job.mean_rank, job.mean_rank)] * job.size
    stepping = losses_of(job, lambda p: SteppingSGD(p, lr=1.0), float)
    assert stepping == [job.mean_rank] * job.size


@on_several
def test_reduce_loss_decides_where_it_is_given(job):
    own = losses_of(job, Twice, float, reduce_loss=False)
    assert own == [(float(rank), float(rank)) for rank in range(job.size)]
    assert losses_of(job, ONE_EVALUATION["SGD"], float, reduce_loss=True) == [
        job.mean_rank
    ] * job.size


@on_several
@pytest.mark.parametrize(
    "make", [ONE_EVALUATION["SGD"], lambda p: SteppingSGD(p, lr=1.0)], ids=["known", "own"]
)
def test_a_loss_of_any_type_comes_back_as_it_is(job, make):
    for loss in ({"loss": 1.5, "hits": 3}, (1.0, "x"), [torch.ones(2)], None, "text", object()):
        assert all(got is loss for got in losses_of(job, make, lambda rank, loss=loss: loss))


@on_several
def test_a_closure_of_sgd_sends_nothing_for_the_loss(job):
    def body(rank):
        p = parameter(0.0)
        optimizer = job.sgd(p)

        def closure():
            (p * 1).sum().backward()
            return (p * 1).sum()

        for _ in range(3):
            optimizer.zero_grad()
            before = fl.counters()["batches"]
            optimizer.step(closure)
            batches = fl.counters()["batches"] - before
        return batches

    assert job.run(body) == [1] * job.size
