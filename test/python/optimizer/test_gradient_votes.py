"""Who takes part in a gradient round with what; the rows of its contract, on threads."""

import pytest
import torch
import torch.utils.checkpoint

import farandole.torch as fl
from farandole.torch.optimizer._parameters import GradientHooks
from jobs import Job, on_all, on_all_at_backward, on_several
from models import parameter

pytestmark = pytest.mark.filterwarnings("ignore:optimizer.step.. called without")


@on_all_at_backward
def test_gradients_are_final_when_backward_returns(job):
    def body(rank):
        p = parameter(1.0, 2.0)
        optimizer = job.sgd(p)
        for step in range(4):
            optimizer.zero_grad()
            (p * (rank + step)).sum().backward()
            assert p.grad.tolist() == [job.mean_rank + step] * 2
            torch.nn.utils.clip_grad_norm_([p], 0.1)
            optimizer.step()
        return p.tolist()

    first, *others = job.run(body)
    assert all(other == first for other in others)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_with_complete_step_gradients_are_final_in_step(size):
    job = Job(size, "step")

    def body(rank):
        p = parameter(1.0)
        optimizer = job.sgd(p)
        for step in range(4):
            optimizer.zero_grad()
            (p * (rank + 2)).sum().backward()
            optimizer.step()
            assert p.grad.item() == job.mean_rank + 2
        return p.item()

    assert job.run(body) == [1 - 4 * (job.mean_rank + 2)] * size


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_rank_may_go_on_to_another_collective_where_complete_is_step(size):
    job = Job(size, "step")

    def body(rank):
        p = parameter(1.0)
        optimizer = job.sgd(p)
        if rank != 0:
            (p * 12).sum().backward()
        total = fl.allreduce(torch.ones(1), op=fl.Sum, name="other").item()
        optimizer.step()
        return total, p.item()

    assert job.run(body) == [(size, 1 - 12 * (size - 1) / size)] * size


@on_all
def test_a_held_gradient_that_did_not_fire_takes_part_with_its_value(job):
    expected = (6.0 + 2.0 * (job.size - 1)) / job.size

    def body(rank):
        p, q = parameter(1.0), parameter(1.0)
        optimizer = job.sgd(p, q)
        for _ in range(3):
            optimizer.zero_grad()
            if rank == 0:
                q.grad = torch.tensor([6.0])  # as an earlier loss would leave it
            (p * 2 + (q * 2 if rank else 0)).sum().backward()
            job.finish(optimizer)
            assert p.grad.item() == 2.0
            assert q.grad.item() == pytest.approx(expected)
            optimizer.step()

    job.run(body)


@on_all
def test_a_parameter_without_gradient_receives_the_mean_over_all_ranks(job):
    def body(rank):
        p, q = parameter(1.0), parameter(1.0, 1.0)
        optimizer = job.sgd(p, q)
        for step in range(4):
            optimizer.zero_grad()
            (p * 2 + (q.sum() * 12 if rank == step % job.size else 0)).sum().backward()
            job.finish(optimizer)
            assert q.grad.tolist() == [12 / job.size] * 2
            optimizer.step()

    job.run(body)


@on_all
def test_absent_everywhere_stays_none(job):
    def body(rank):
        p, q = parameter(1.0), parameter(1.0)
        sgd = torch.optim.SGD([p, q], lr=1.0, weight_decay=0.5)
        optimizer = job.wrap(sgd, [("p", p), ("q", q)])
        for _ in range(3):
            optimizer.zero_grad()
            (p * 1).sum().backward()
            optimizer.step()
            assert q.grad is None
        return q.item()

    assert job.run(body) == [1.0] * job.size


@on_all_at_backward
def test_a_reduced_gradient_that_did_not_fire_again_is_clean(job):
    def body(rank):
        p, q = parameter(1.0), parameter(1.0)
        optimizer = job.sgd(p, q)
        (p + q * rank).sum().backward()
        clean = q.grad
        for _ in range(3):
            batches = fl.counters()["batches"]
            p.grad = None
            (p * 1).sum().backward()
            assert q.grad is clean and clean.item() == job.mean_rank
            batches = fl.counters()["batches"] - batches
        # One rank adds to it: then the others' clean value counts as what it is.
        p.grad = None
        (p + (q * 12 if rank == 0 else 0)).sum().backward()
        optimizer.step()
        return clean.item(), batches

    for value, batches in job.run(body):
        assert value == job.mean_rank + 12 / job.size
        assert batches == (0 if job.size == 1 else 1)


@on_all
def test_zeroed_gradients_that_do_not_fire_stay_zero(job):
    def body(rank):
        p, q = parameter(1.0), parameter(1.0)
        optimizer = job.sgd(p, q)
        (p + q * rank).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        (p * 1).sum().backward()
        optimizer.step()
        return q.item(), q.grad.item()

    assert job.run(body) == [(1 - job.mean_rank, 0.0)] * job.size


@on_all
def test_a_rank_that_skips_backward_takes_part_in_step(job):
    def body(rank):
        p = parameter(4.0)
        optimizer = job.sgd(p)
        for step in range(4):
            optimizer.zero_grad()
            if rank != step % job.size:
                (p * 12).sum().backward()
            optimizer.step()
        return p.item()

    assert job.run(body) == [4 - 4 * 12 * (job.size - 1) / job.size] * job.size


@on_all
@pytest.mark.parametrize("is_late", [False, True], ids=["early hook", "late hook"])
def test_a_gradient_taken_away_by_a_users_hook_is_absent(job, is_late):
    """Wherever the user's hook stands: before the optimizer's, or after it."""

    def body(rank):
        p, q = parameter(1.0), parameter(1.0)

        def take_away(*_):
            if rank == 0:
                q.grad = None

        hooks = None if is_late else GradientHooks(q, None, take_away)
        optimizer = job.sgd(p, q)
        hooks = hooks or GradientHooks(q, None, take_away)
        for _ in range(3):
            optimizer.zero_grad()
            (p + q * 12).sum().backward()
            job.finish(optimizer)
            assert q.grad is None if job.size == 1 else q.grad.item() == 12 - 12 / job.size
            optimizer.step()
        hooks.remove()

    job.run(body)


@on_several
def test_autograd_grad_after_a_reduced_backward_exchanges_nothing(job):
    def body(rank):
        p = parameter(1.0)
        optimizer = job.sgd(p, op=fl.Sum)
        (p * (1 + rank)).sum().backward()
        if rank == 0:  # the others must not be needed for it
            (slope,) = torch.autograd.grad((p**2).sum(), p)
            assert slope.item() == 2.0
        fl.allreduce(torch.ones(1), name="apart")
        job.finish(optimizer)
        torch.autograd.grad((p**2).sum(), p)
        assert p.grad.item() == sum(range(1, job.size + 1))

    job.run(body)


@on_several
def test_a_tied_weight_is_sent_at_its_learned_number_of_firings(job):
    mean = 1 + job.mean_rank

    def body(rank):
        p, q = parameter(1.0), parameter(1.0)

        def run(x, weight=p):
            return torch.utils.checkpoint.checkpoint(lambda y: y * weight, x, use_reentrant=True)

        optimizer = job.sgd(p, q)
        x = torch.ones(1, requires_grad=True)
        for _ in range(4):
            optimizer.zero_grad()
            (run(run(run(x, q))) * (1 + rank)).sum().backward()
            job.finish(optimizer)
            assert p.grad.item() == 2 * mean
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            p.fill_(1.0)
            q.fill_(1.0)
        with pytest.raises((RuntimeError, fl.AbortedError), match='"p0" was accumulated again after'):
            (run(run(run(run(x), q))) * (1 + rank)).sum().backward()
            job.finish(optimizer)
        optimizer.zero_grad()
        (run(run(run(run(x), q))) * (1 + rank)).sum().backward()
        job.finish(optimizer)
        assert p.grad.item() == 3 * mean

    job.run(body)


@on_all
def test_channels_last_and_transposed_parameters_keep_their_layout(job):
    def body(rank):
        conv = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        with torch.no_grad():
            conv.weight.fill_(1.0)
        other = torch.nn.Parameter(torch.ones(2, 3).t())
        optimizer = job.sgd(conv.weight, other)
        scale = torch.arange(48.0).reshape(4, 3, 2, 2)
        for is_used in (True, rank == 0, True):
            optimizer.zero_grad()
            loss = (other * torch.arange(6.0).reshape(3, 2)).sum() * (1 + rank)
            if is_used:
                loss = loss + (conv.weight * scale).sum() * (1 + rank)
            loss.backward()
            optimizer.step()
            expected = (1 + job.mean_rank) * torch.arange(6.0).reshape(3, 2)
            torch.testing.assert_close(other.grad, expected)
            assert conv.weight.grad.shape == scale.shape
            assert conv.weight.grad.is_contiguous(memory_format=torch.channels_last)
        return conv.weight.grad.clone()

    first, *others = job.run(body)
    assert all(torch.equal(first, other) for other in others)
    torch.testing.assert_close(first, (1 + job.mean_rank) * torch.arange(48.0).reshape(4, 3, 2, 2))
