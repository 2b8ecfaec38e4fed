"""Who takes part in a gradient round with what; the rows of its contract, on threads."""

import pytest
import torch

import farandole.torch as fl
from models import parameter, wrapped
from ranks import run_threads


def test_gradients_are_final_when_backward_returns():
    def body(rank):
        p = parameter(1.0, 2.0)
        optimizer = wrapped(p)
        for step in range(4):
            optimizer.zero_grad()
            (p * (rank + step)).sum().backward()
            assert p.grad.tolist() == [0.5 + step] * 2
            torch.nn.utils.clip_grad_norm_([p], 0.1)
            optimizer.step()
        return p.tolist()

    first, second = run_threads(2, body)
    assert first == second


def test_a_held_gradient_that_did_not_fire_takes_part_with_its_value():
    def body(rank):
        p, q = parameter(1.0), parameter(1.0)
        optimizer = wrapped(p, q)
        for _ in range(3):
            optimizer.zero_grad()
            if rank == 0:
                q.grad = torch.tensor([6.0])  # as an earlier loss would leave it
            (p * 2 + (q * 2 if rank == 1 else 0)).sum().backward()
            assert (p.grad.item(), q.grad.item()) == (2.0, 4.0)
            optimizer.step()

    run_threads(2, body)


def test_a_parameter_without_gradient_receives_the_mean_over_all_ranks():
    def body(rank):
        p, q = parameter(1.0), parameter(1.0, 1.0)
        optimizer = wrapped(p, q)
        for step in range(4):
            optimizer.zero_grad()
            (p * 2 + (q.sum() * 6 if rank == step % 3 else 0)).sum().backward()
            assert q.grad.tolist() == [2.0, 2.0]
            optimizer.step()

    run_threads(3, body)


def test_absent_everywhere_stays_none():
    def body(rank):
        p, q = parameter(1.0), parameter(1.0)
        optimizer = fl.DistributedOptimizer(
            torch.optim.SGD([p, q], lr=1.0, weight_decay=0.5), [("p", p), ("q", q)]
        )
        for _ in range(3):
            optimizer.zero_grad()
            (p * 1).sum().backward()
            assert q.grad is None
            optimizer.step()
        return q.item()

    assert run_threads(2, body) == [1.0, 1.0]


def test_a_reduced_gradient_that_did_not_fire_again_is_clean():
    def body(rank):
        p, q = parameter(1.0), parameter(1.0)
        optimizer = wrapped(p, q)
        (p + q * rank).sum().backward()
        clean = q.grad
        for _ in range(3):
            batches = fl.counters()["batches"]
            p.grad = None
            (p * 1).sum().backward()
            assert q.grad is clean and clean.item() == 0.5
            batches = fl.counters()["batches"] - batches
        # One rank adds to it: then the others' clean value counts as what it is.
        p.grad = None
        (p + (q * 4 if rank == 0 else 0)).sum().backward()
        optimizer.step()
        return clean.item(), batches

    for value, batches in run_threads(2, body):
        assert value == 2.5
        assert batches == 1


def test_zeroed_gradients_that_do_not_fire_stay_zero():
    def body(rank):
        p, q = parameter(1.0), parameter(1.0)
        optimizer = wrapped(p, q)
        (p + q * rank).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        (p * 1).sum().backward()
        optimizer.step()
        return q.item(), q.grad.item()

    assert run_threads(2, body) == [(0.5, 0.0)] * 2


def test_a_second_backward_accumulates_on_the_mean_as_in_plain_torch():
    def body(rank):
        p = parameter(1.0)
        optimizer = wrapped(p)
        for _ in range(3):
            (p * (1 + rank)).sum().backward()
        del optimizer
        return p.grad.item()

    assert run_threads(2, body) == [4.5, 4.5]


def test_with_sum_a_second_backward_on_a_reduced_gradient_is_refused():
    def body(rank):
        p = parameter(1.0)
        optimizer = wrapped(p, op=fl.Sum)
        (p * 1).sum().backward()
        assert p.grad.item() == 2.0
        with pytest.raises(RuntimeError, match='"p0" already holds a reduced value'):
            (p * 1).sum().backward()
        optimizer.zero_grad(set_to_none=False)
        (p * 1).sum().backward()
        assert p.grad.item() == 2.0

    run_threads(2, body)


def test_a_rank_that_skips_backward_takes_part_in_step():
    def body(rank):
        p = parameter(4.0)
        optimizer = wrapped(p)
        for step in range(4):
            optimizer.zero_grad()
            if rank != step % 2:
                (p * 2).sum().backward()
            optimizer.step()
        return p.item()

    assert run_threads(2, body) == [0.0, 0.0]


def test_a_gradient_taken_away_by_a_users_hook_is_absent():
    def body(rank):
        p, q = parameter(1.0), parameter(1.0)

        def take_away(tensor):
            if rank == 0:
                tensor.grad = None

        q.register_post_accumulate_grad_hook(take_away)
        optimizer = wrapped(p, q)
        for _ in range(3):
            optimizer.zero_grad()
            (p + q * 4).sum().backward()
            assert q.grad.item() == 2.0
            optimizer.step()

    run_threads(2, body)


def test_a_tied_weight_is_sent_at_its_learned_number_of_firings():
    def body(rank):
        p = parameter(1.0)

        def run(x):
            return torch.utils.checkpoint.checkpoint(lambda y: y * p, x, use_reentrant=True)

        optimizer = wrapped(p)
        x = torch.ones(1, requires_grad=True)
        for _ in range(4):
            optimizer.zero_grad()
            (run(run(x)) * (1 + rank)).sum().backward()
            assert p.grad.item() == 3.0
        with pytest.raises((RuntimeError, fl.AbortedError), match='"p0" fired again after'):
            (run(run(run(x))) * (1 + rank)).sum().backward()
        optimizer.zero_grad()
        (run(run(run(x))) * (1 + rank)).sum().backward()
        assert p.grad.item() == 4.5

    run_threads(2, body)


def test_channels_last_and_transposed_parameters_keep_their_layout():
    def body(rank):
        conv = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        with torch.no_grad():
            conv.weight.fill_(1.0)
        other = torch.nn.Parameter(torch.ones(2, 3).t())
        optimizer = wrapped(conv.weight, other)
        scale = torch.arange(48.0).reshape(4, 3, 2, 2)
        for is_used in (True, rank == 1, True):
            optimizer.zero_grad()
            loss = (other * torch.arange(6.0).reshape(3, 2)).sum() * (1 + rank)
            if is_used:
                loss = loss + (conv.weight * scale).sum() * (1 + rank)
            loss.backward()
            torch.testing.assert_close(other.grad, 1.5 * torch.arange(6.0).reshape(3, 2))
            assert conv.weight.grad.shape == scale.shape
            assert conv.weight.grad.is_contiguous(memory_format=torch.channels_last)
            optimizer.step()
        return conv.weight.grad.clone()

    first, second = run_threads(2, body)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, 1.5 * torch.arange(48.0).reshape(4, 3, 2, 2))
