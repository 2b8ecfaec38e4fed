"""The rows of the contract of a gradient round, on ranks that are threads."""

import contextlib
import copy
import gc
import io
import pickle
import threading
import time
import weakref

import pytest
import torch

import farandole.torch as fl
from models import Branched, batch, loss_of
from ranks import run_threads


class RaiseOn(torch.autograd.Function):
    """Identity whose backward raises on one rank."""

    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        if ctx.fails:
            raise ValueError("bad batch 17")
        return grad, None


def parameter(*values):
    return torch.nn.Parameter(torch.tensor(values))


def wrapped(*parameters, lr=1.0, **arguments):
    named = [(f"p{i}", p) for i, p in enumerate(parameters)]
    return fl.DistributedOptimizer(torch.optim.SGD(parameters, lr=lr), named, **arguments)


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


@pytest.mark.parametrize("rounds_before", [0, 1, 3])
def test_an_exception_in_one_backward_fails_the_round_on_every_rank(rounds_before):
    def body(rank):
        p, q = parameter(1.0), parameter(1.0)
        optimizer = wrapped(p, q)
        for _ in range(rounds_before):
            optimizer.zero_grad()
            (p * q).sum().backward()
            optimizer.step()
        optimizer.zero_grad()
        # q fires before the function of p's branch raises.
        loss = (RaiseOn.apply(p * 1, rank == 1) * q).sum()
        begin = time.monotonic()
        with pytest.raises((ValueError, fl.AbortedError)) as raised:
            loss.backward()
        assert time.monotonic() - begin < 5
        with pytest.raises(fl.HorovodInternalError, match="step.. after a failed backward"):
            optimizer.step()
        optimizer.zero_grad()
        (p * (1 + rank)).sum().backward()
        assert p.grad.item() == 1.5
        optimizer.step()
        return str(raised.value)

    own, peer = reversed(run_threads(2, body))
    assert own == "bad batch 17"
    assert "rank 1" in peer and "ValueError: bad batch 17" in peer


def test_a_backward_right_after_a_failed_one_works_without_zero_grad():
    def body(rank):
        p, q = parameter(1.0), parameter(1.0)
        optimizer = wrapped(p, q)
        with pytest.raises((ValueError, fl.AbortedError)):
            (RaiseOn.apply(p * 1, rank == 0) * q).sum().backward()
        p.grad = q.grad = None
        (p * rank + q).sum().backward()
        del optimizer
        return p.grad.item(), q.grad.item()

    assert run_threads(2, body) == [(0.5, 1.0)] * 2


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


def test_create_graph_is_refused_and_autograd_grad_is_not():
    def body(rank):
        p = parameter(2.0)
        optimizer = wrapped(p)
        with pytest.raises(RuntimeError, match="create_graph"):
            (p**2).sum().backward(create_graph=True)
        optimizer.zero_grad()
        (slope,) = torch.autograd.grad((p**3).sum(), p, create_graph=True)
        (slope * (1 + rank)).sum().backward()
        return p.grad.item()

    assert run_threads(2, body) == [18.0, 18.0]


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


def test_the_optimizer_stays_the_same_object_of_the_same_class():
    def body(rank):
        model = Branched()
        adam = torch.optim.Adam(model.parameters(), lr=0.1)
        before = torch.optim.lr_scheduler.StepLR(adam, 1)
        optimizer = fl.DistributedOptimizer(adam, model.named_parameters())
        after = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        assert optimizer is adam and type(optimizer) is torch.optim.Adam
        loss_of(model, batch(rank, 0)).backward()
        optimizer.step()
        before.step()
        after.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.1 * 0.5)
        assert set(optimizer.state_dict()) == {"state", "param_groups"}
        for twin in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
            assert type(twin) is torch.optim.Adam
            assert "_farandole" not in twin.__dict__ and "zero_grad" not in twin.__dict__
            twin.zero_grad()
            twin.step()  # alone: it exchanges nothing
        torch.save(optimizer.state_dict(), io.BytesIO())
        torch.save(model.state_dict(), io.BytesIO())
        copy.deepcopy(model)

    run_threads(2, body)


def test_synchronize_and_skip_synchronize_are_there_and_not_needed():
    def body(rank):
        p = parameter(1.0)
        optimizer = wrapped(p)
        (p * rank).sum().backward()
        optimizer.synchronize()
        assert p.grad.item() == 0.5
        with optimizer.skip_synchronize():
            optimizer.step()
        return p.item()

    assert run_threads(2, body) == [0.5, 0.5]


def test_a_subclass_whose_step_calls_the_base_runs_one_round():
    class Twice(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    def body(rank):
        p = parameter(1.0)
        optimizer = fl.DistributedOptimizer(Twice([p], lr=1.0), [("p", p)])
        (p * rank).sum().backward()
        optimizer.step()
        return p.item()

    assert run_threads(2, body) == [0.5, 0.5]


def test_unfrozen_parameters_are_exchanged():
    def body(rank):
        p, q = parameter(1.0), parameter(1.0)
        q.requires_grad_(False)
        optimizer = wrapped(p, q)
        for step in range(5):
            q.requires_grad_(step >= 2)
            optimizer.zero_grad()
            (p + q * (1 + rank)).sum().backward()
            assert (q.grad.item() if step >= 2 else q.grad) == (1.5 if step >= 2 else None)
            optimizer.step()

    run_threads(2, body)


def test_a_model_converted_after_wrapping_is_reduced_in_its_new_dtype():
    def body(rank):
        model = torch.nn.Linear(2, 1)
        optimizer = fl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
        for dtype in (torch.float32, torch.float64, torch.float64):
            model.to(dtype)
            optimizer.zero_grad()
            x = torch.full((1, 2), 1 + 1e-9 * (1 + rank), dtype=dtype)
            model(x).sum().backward()
            optimizer.step()
        return model.weight.grad[0, 0].item() - 1

    assert run_threads(2, body) == pytest.approx([1.5e-9] * 2, rel=1e-6)


def test_a_dropped_optimizer_takes_its_hooks_along():
    def body(rank):
        p = parameter(1.0)
        optimizer = wrapped(p)
        (p * rank).sum().backward()
        dropped = weakref.ref(optimizer)
        del optimizer
        assert dropped() is None
        p.grad = None
        (p * (rank + 1)).sum().backward()
        assert p.grad.item() == rank + 1
        optimizer = wrapped(p)
        p.grad = None
        (p * (rank + 1)).sum().backward()
        assert p.grad.item() == 1.5
        del optimizer

    gc.disable()
    try:
        run_threads(2, body)
    finally:
        gc.enable()


def test_wrong_names_are_refused_before_anything_is_sent():
    p, q = parameter(1.0), parameter(1.0)
    optimizer = torch.optim.SGD([p, q], lr=1.0)
    with pytest.raises(ValueError, match="used twice: w"):
        fl.DistributedOptimizer(optimizer, [("w", p), ("w", q)])
    with pytest.raises(ValueError, match="not in it"):
        fl.DistributedOptimizer(optimizer, [("w", p)])
    with pytest.raises(ValueError, match="tuples"):
        fl.DistributedOptimizer(optimizer, [p, q])
    with pytest.raises(ValueError, match="backward_passes_per_step"):
        fl.DistributedOptimizer(optimizer, backward_passes_per_step=0)
    with pytest.raises(ValueError, match="not been initialized"):
        fl.DistributedOptimizer(optimizer)


def test_wrapping_twice_is_refused():
    def body(rank):
        p = parameter(1.0)
        optimizer = wrapped(p)
        with pytest.raises(ValueError, match="wrapped already"):
            fl.DistributedOptimizer(optimizer)
        with pytest.raises(ValueError, match="belongs to another wrapped optimizer"):
            fl.DistributedOptimizer(torch.optim.SGD([p], lr=1.0))

    run_threads(2, body)


def test_sparse_gradients_are_refused_by_name_on_every_rank():
    def body(rank):
        table = torch.nn.Embedding(4, 2, sparse=rank == 1)
        optimizer = fl.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=1.0), table.named_parameters()
        )
        with pytest.raises((TypeError, fl.AbortedError), match='"weight" is torch.sparse_coo'):
            table(torch.tensor([1])).sum().backward()
        del optimizer

    run_threads(2, body)


def test_different_models_are_a_mismatch_on_every_rank():
    def body(rank):
        layer = torch.nn.Linear(2 + rank, 1, bias=False)
        optimizer = fl.DistributedOptimizer(
            torch.optim.SGD(layer.parameters(), lr=1.0), layer.named_parameters()
        )
        with pytest.raises(fl.MismatchError, match="weight") as raised:
            layer(torch.ones(1, 2 + rank)).sum().backward()
        del optimizer
        return str(raised.value)

    first, second = run_threads(2, body)
    assert first == second and "[1,2]" in first and "[1,3]" in first


def test_interrupting_the_wait_leaves_a_round_that_the_next_backward_settles():
    """A signal's exception leaves backward(); the peers get their result."""
    interrupted = threading.Event()

    class Interrupted(BaseException):
        pass

    class InterruptOnce:
        """A Gradients whose first wait is cut off as a signal would do."""

        def __init__(self, real):
            self.real, self.done = real, False

        def __getattr__(self, name):
            return getattr(self.real, name)

        def wait(self, *arguments):
            if not self.done:
                self.done = True
                interrupted.set()
                raise Interrupted
            return self.real.wait(*arguments)

    def body(rank):
        p = parameter(1.0)
        optimizer = wrapped(p)
        (p * rank).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        exchange = optimizer.__dict__["synchronize"].__closure__[0].cell_contents
        if rank == 0:
            exchange._gradients = InterruptOnce(exchange._gradients)
        else:
            interrupted.wait(10)
        expected = pytest.raises(Interrupted) if rank == 0 else contextlib.nullcontext()
        with expected:
            (p * (1 + rank)).sum().backward()
        optimizer.zero_grad()
        (p * (3 + rank)).sum().backward()
        return p.grad.item()

    assert run_threads(2, body) == [3.5, 3.5]
