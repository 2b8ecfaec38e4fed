"""Several backward passes per step, no_sync() and synchronize(): what is reduced when."""

import warnings

import pytest
import torch

import farandole.torch as fl
from jobs import Job, on_all, on_all_at_backward, on_several
from models import Branched, batch, loss_of, parameter

pytestmark = pytest.mark.filterwarnings("ignore:optimizer.step.. called without")
SIZES = pytest.mark.parametrize("size", [1, 2, 3, 4])


def passes_of(job, rank, count, **arguments):
    """Weights after so many passes of gradient 12 * (1 + rank) and one step; and the batches."""
    p = parameter(0.0)
    optimizer = job.sgd(p, **arguments)
    for _ in range(count):
        (p * 12 * (1 + rank)).sum().backward()
    optimizer.step()
    return p.item()


@on_all
@pytest.mark.parametrize("passes", [1, 2, 3, 5])
def test_the_mean_divides_the_sum_of_the_passes_by_the_ranks_only(job, passes):
    """The divisor is the number of ranks, in a full window as in a partial or a second one."""

    def body(rank):
        return [passes_of(job, rank, n, backward_passes_per_step=passes) for n in range(1, 7)]

    for weights in job.run(body):
        assert weights == [-n * 12 * (1 + job.mean_rank) for n in range(1, 7)]


@on_several
def test_only_the_last_pass_of_a_window_exchanges(job):
    def body(rank):
        p = parameter(1.0)
        optimizer = job.sgd(p, backward_passes_per_step=3)
        for _ in range(3):
            optimizer.zero_grad()
            for passes in range(1, 4):
                before = fl.counters()["batches"]
                (p * (rank + 1)).sum().backward()
                if passes < 3:
                    assert p.grad.item() == passes * (rank + 1)
                    assert fl.counters()["batches"] == before
            job.finish(optimizer)
            assert p.grad.item() == 3 * (1 + job.mean_rank)

    job.run(body)


@on_several
def test_a_parameter_that_fired_only_early_in_the_window_takes_part(job):
    def body(rank):
        p, q = parameter(1.0), parameter(1.0)
        optimizer = job.sgd(p, q, backward_passes_per_step=2)
        for _ in range(3):
            optimizer.zero_grad()
            (p + q * rank).sum().backward()
            (p * 1).sum().backward()
            job.finish(optimizer)
            assert (p.grad.item(), q.grad.item()) == (2.0, job.mean_rank)

    job.run(body)


@on_all
def test_zero_grad_in_mid_window_begins_a_new_one(job):
    def body(rank):
        p = parameter(0.0)
        optimizer = job.sgd(p, backward_passes_per_step=2)
        (p * 100).sum().backward()
        optimizer.zero_grad()
        (p * rank).sum().backward()
        assert p.grad.item() == rank
        (p * rank).sum().backward()
        optimizer.step()
        return p.item()

    assert job.run(body) == [-2 * job.mean_rank] * job.size


@on_all
def test_windows_of_unequal_length_are_flushed_by_step(job):
    """As at an epoch's end: the expected weights are those of one process on all batches."""
    lengths = (4, 4, 1, 4, 3)

    def train(model, optimizer, ranks):
        step = 0
        for length in lengths:
            optimizer.zero_grad()
            for _ in range(length):
                step += 1
                losses = [loss_of(model, batch(rank, step)) for rank in ranks]
                (sum(losses) / len(ranks)).backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    alone = Branched()
    sgd = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    expected = train(alone, sgd, range(job.size))

    def body(rank):
        model = Branched()
        sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        optimizer = job.wrap(sgd, model.named_parameters(), backward_passes_per_step=4)
        return train(model, optimizer, [rank])

    for weights in job.run(body):
        for got, want in zip(weights, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


@on_all
def test_set_backward_passes_per_step_changes_the_window(job):
    def body(rank):
        p = parameter(0.0)
        optimizer = job.sgd(p)
        optimizer.set_backward_passes_per_step(2)
        (p * rank).sum().backward()
        assert p.grad.item() == rank
        (p * rank).sum().backward()
        optimizer.step()
        with pytest.raises(ValueError, match="must be > 0, not 0"):
            optimizer.set_backward_passes_per_step(0)
        return p.item()

    assert job.run(body) == [-2 * job.mean_rank] * job.size


@on_all
def test_nothing_is_exchanged_inside_no_sync(job):
    def body(rank):
        p, q = parameter(0.0), parameter(0.0)
        optimizer = job.sgd(p, q)
        for _ in range(3):
            optimizer.zero_grad()
            with optimizer.no_sync():
                batches = fl.counters()["batches"]
                (p * rank + q * rank).sum().backward()
                assert (p.grad.item(), q.grad.item()) == (rank, rank)
                assert fl.counters()["batches"] == batches
            (p * rank).sum().backward()
            job.finish(optimizer)
            assert (p.grad.item(), q.grad.item()) == (2 * job.mean_rank, job.mean_rank)

    job.run(body)


@on_all
def test_step_after_only_no_sync_passes_reduces_them(job):
    def body(rank):
        p = parameter(0.0)
        optimizer = job.sgd(p)
        for _ in range(3):
            optimizer.zero_grad()
            with optimizer.no_sync():
                for _ in range(2):
                    (p * rank).sum().backward()
            optimizer.step()
        return p.item()

    assert job.run(body) == [-6 * job.mean_rank] * job.size


@on_all
def test_a_gradient_reduced_before_no_sync_is_reduced_again_with_what_came(job):
    def body(rank):
        p = parameter(0.0)
        optimizer = job.sgd(p)
        (p * rank).sum().backward()
        job.finish(optimizer)
        with optimizer.no_sync():
            (p * rank).sum().backward()
        optimizer.step()
        return p.item()

    assert job.run(body) == [-2 * job.mean_rank] * job.size


@on_all
def test_synchronize_and_skip_synchronize_are_there_and_not_needed(job):
    def body(rank):
        p = parameter(1.0)
        optimizer = job.sgd(p)
        (p * rank).sum().backward()
        optimizer.synchronize()
        assert p.grad.item() == job.mean_rank
        with optimizer.skip_synchronize():
            optimizer.step()
        return p.item()

    assert job.run(body) == [1 - job.mean_rank] * job.size


@SIZES
def test_step_after_synchronize_warns_once_where_it_would_complete(size):
    job = Job(size, "step")

    def body(rank):
        p = parameter(1.0)
        optimizer = job.sgd(p)
        (p * rank).sum().backward()
        optimizer.synchronize()
        if rank:  # silently, as warnings are caught in the whole process
            with optimizer.skip_synchronize():
                optimizer.step()
            return p.item()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        texts = [str(warning.message) for warning in caught]
        assert len(texts) == (size > 1)
        assert all("called without optimizer.skip_synchronize()" in text for text in texts)
        return p.item()

    assert job.run(body) == [1 - job.mean_rank] * size


@pytest.mark.parametrize("size", [2, 3, 4])
def test_zero_grad_with_gradients_in_flight_is_refused(size):
    job = Job(size, "step")

    def body(rank):
        p = parameter(1.0)
        optimizer = job.sgd(p)
        (p * rank).sum().backward()
        with pytest.raises(AssertionError, match="gradients are in flight"):
            optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        return p.item()

    assert job.run(body) == [1 - job.mean_rank] * size


@on_several
def test_a_second_backward_does_not_write_into_gradients_in_flight(job):
    """autograd adds in place, also into memory that the exchange reads."""

    def body(rank):
        p = parameter(*([1.0] * 100_000))
        optimizer = job.sgd(p)
        for _ in range(8):
            optimizer.zero_grad()
            (p * rank).sum().backward()
            (p * rank).sum().backward()
            job.finish(optimizer)
            assert torch.equal(p.grad, torch.full_like(p.grad, 2 * job.mean_rank))
            optimizer.step()

    job.run(body)


@on_all_at_backward
def test_an_exception_before_the_last_pass_fails_the_window_on_every_rank(job):
    class Boom(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("bad batch 17")

    def body(rank):
        p, q = parameter(1.0), parameter(1.0)
        optimizer = job.sgd(p, q, backward_passes_per_step=2)
        with pytest.raises((ValueError, fl.AbortedError), match="bad batch 17"):
            if rank == 0:
                (Boom.apply(p * 1) * q).sum().backward()
            (p * q).sum().backward()
            (p * q).sum().backward()
        optimizer.zero_grad()
        for _ in range(2):
            (p * rank).sum().backward()
        assert p.grad.item() == 2 * job.mean_rank
        optimizer.step()

    job.run(body)
