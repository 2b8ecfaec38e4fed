"""step(closure): every backward in it is a round; the loss is all ranks' where step() acts on it."""

import functools
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


SGD = functools.partial(torch.optim.SGD, lr=1.0)


def steps(job, closure, make=SGD, count=3, by_keyword=False, **arguments):
    """By rank: the weight, what the last step(closure) gave, and how many batches it took.

    Args:
        closure: Called with the optimizer, its weight, the rank and the step; after zero_grad().
    """

    def body(rank):
        p = parameter(0.0)
        optimizer = job.wrap(make([p]), [("p", p)], **arguments)
        for step in range(count):

            def call(step=step):
                optimizer.zero_grad()
                return closure(optimizer, p, rank, step)

            before = fl.counters()["batches"]
            loss = optimizer.step(closure=call) if by_keyword else optimizer.step(call)
        return p.item(), loss, fl.counters()["batches"] - before

    return job.run(body)


def sent(loss_of_rank):
    """A closure with the gradient 1 + rank and this loss."""

    def closure(optimizer, p, rank, step):
        (p * (1 + rank)).sum().backward()
        return loss_of_rank(rank)

    return closure


@on_all
@pytest.mark.parametrize("by_keyword", [False, True])
def test_a_closure_of_any_optimizer_is_a_round_and_sends_nothing_for_its_loss(job, by_keyword):
    told = steps(job, sent(lambda rank: torch.tensor(float(rank))), by_keyword=by_keyword)
    assert told == [(-3 * (1 + job.mean_rank), rank, int(job.size > 1)) for rank in range(job.size)]


@on_all
def test_a_closure_whose_rank_skips_backward_takes_part(job):
    def closure(optimizer, p, rank, step):
        if rank != step % job.size:
            (p * 12).sum().backward()

    told = steps(job, closure, count=4)
    assert [one[:2] for one in told] == [(-4 * 12 * (job.size - 1) / job.size, None)] * job.size


@on_all
def test_a_closure_with_several_passes_per_step_is_reduced_once(job):
    def closure(optimizer, p, rank, step):
        for _ in range(3):
            (p * rank).sum().backward()
        return float(rank)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        told = steps(job, closure, count=1, backward_passes_per_step=2)
    assert [one[:2] for one in told] == [(-3 * job.mean_rank, float(rank)) for rank in range(job.size)]


@on_several
@pytest.mark.parametrize("before_backward", [True, False])
def test_an_exception_in_one_closure_fails_step_on_every_rank(job, before_backward):
    def body(rank):
        optimizer = job.sgd(p := parameter(0.0), reduce_loss=True)

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
    with pytest.raises(ValueError, match="a loss on some ranks and None on others"):
        steps(job, sent(lambda rank: torch.tensor(1.0) if rank else None), reduce_loss=True)


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


KINDS = {"SGD": SGD, "AdamW": torch.optim.AdamW,
         "inherited": functools.partial(OwnSGD, lr=1.0), "stepping": functools.partial(SteppingSGD, lr=1.0),
         "twice": Twice}  # fmt: skip


@on_several
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduce_loss", [None, False, True])
def test_the_loss_is_reduced_where_step_may_evaluate_again_or_reduce_loss_says_so(job, kind, reduce_loss):
    """From the first evaluation."""
    is_reduced = kind in ("stepping", "twice") if reduce_loss is None else reduce_loss
    arguments = {} if reduce_loss is None else {"reduce_loss": reduce_loss}
    for rank, (_, loss, _) in enumerate(steps(job, sent(float), KINDS[kind], count=2, **arguments)):
        expected = job.mean_rank if is_reduced else float(rank)
        assert loss == ((expected, expected) if kind == "twice" else expected)


@on_several
@pytest.mark.parametrize("kind", ["SGD", "stepping"])
def test_a_loss_of_any_type_comes_back_as_it_is(job, kind):
    for loss in ({"loss": 1.5, "hits": 3}, (1.0, "x"), [torch.ones(2)], None, "text", object()):
        assert all(one[1] is loss for one in steps(job, sent(lambda rank, loss=loss: loss), KINDS[kind], count=2))
