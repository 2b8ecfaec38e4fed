"""Backward passes on several threads of one rank: one at a time is right, a second is refused."""

import threading
import types

import pytest
import torch

from farandole.torch.optimizer import _backward_end
from farandole.torch.optimizer._backward_end import OutermostBackward
from jobs import on_several
from models import parameter
from ranks import run_forked

pytestmark = pytest.mark.filterwarnings("ignore:optimizer.step.. called without")


class Meeting(torch.autograd.Function):
    """Identity whose backward calls a function."""

    @staticmethod
    def forward(ctx, x, call):
        ctx.call = call
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        ctx.call()
        return grad, None


class Other(threading.Thread):
    """A thread of one rank whose error can be asked for."""

    def __init__(self, body):
        super().__init__(daemon=True)
        self._body = body
        self.error = None
        self.start()

    def run(self):
        try:
            self._body()
        except BaseException as error:
            self.error = error

    def outcome(self):
        self.join(30)
        assert not self.is_alive()
        return self.error


def refused(error):
    return isinstance(error, RuntimeError) and "one thread" in str(error)


@on_several
@pytest.mark.parametrize("ranks", [{0}, {0, 1, 2, 3}], ids=["one rank", "all ranks"])
@pytest.mark.parametrize("rounds_before", [0, 2])
def test_a_backward_on_a_second_thread_is_refused_while_the_first_runs(job, ranks, rounds_before):
    def body(rank):
        p, q = parameter(1.0), parameter(1.0)
        optimizer = job.sgd(p, q, lr=0.0)
        errors = []

        def second():
            (p * 100 + q * 100).sum().backward()

        def meet():
            if rank in ranks:
                errors.append(Other(second).outcome())

        def run(call):
            optimizer.zero_grad()
            (Meeting.apply(p * 1, call) * q * (1 + rank)).sum().backward()  # q fires first
            optimizer.step()
            assert (p.grad.item(), q.grad.item()) == (1 + job.mean_rank,) * 2

        for _ in range(rounds_before):
            run(lambda: None)
        run(meet)
        assert all(refused(error) for error in errors) and len(errors) == (rank in ranks)
        run(lambda: None)

    job.run(body)


@on_several
def test_of_two_threads_one_is_refused_whichever_is_faster(job):
    """So every rank runs equally many rounds."""

    def body(rank):
        p, q = parameter(1.0, 1.0), parameter(1.0)
        optimizer = job.sgd(p, q, lr=0.0)
        for _ in range(20):
            both = [Other(lambda: (p * q).sum().backward()) for _ in range(2)]
            errors = [thread.outcome() for thread in both]
            assert sorted(refused(error) for error in errors) == [False, True]
            assert None in errors
            optimizer.step()
            assert p.grad.tolist() == [1.0, 1.0] and q.grad.item() == 2
            optimizer.zero_grad()
        (p * q * rank).sum().backward()
        optimizer.step()
        assert q.grad.item() == 2 * job.mean_rank

    job.run(body)


@on_several
def test_every_step_may_have_a_thread_of_its_own(job):
    def body(rank):
        p = parameter(1.0)
        optimizer = job.sgd(p, lr=0.0)
        for _ in range(3):
            optimizer.zero_grad()
            assert Other(lambda: (p * rank).sum().backward()).outcome() is None
            optimizer.step()
            assert p.grad.item() == job.mean_rank

    job.run(body)


@on_several
def test_autograd_grad_may_run_on_other_threads(job):
    def body(rank):
        p = parameter(2.0)
        optimizer = job.sgd(p, lr=0.0)
        slopes = []

        def derive():
            slopes.append(torch.autograd.grad((p**2).sum(), p)[0].item())

        for _ in range(2):
            optimizer.zero_grad()
            assert Other(derive).outcome() is None
            call = lambda: slopes.append(Other(derive).outcome())  # noqa: E731
            (Meeting.apply(p * 1, call) * rank).sum().backward()
            assert Other(derive).outcome() is None
            optimizer.step()
            assert p.grad.item() == job.mean_rank
        assert slopes == [4.0, 4.0, None, 4.0] * 2

    job.run(body)


def test_passes_on_the_thread_of_a_gpu_are_told_apart_by_their_graph_task(monkeypatch):
    """Which serves all callers; here the calling threads pose as it."""
    monkeypatch.setattr(_backward_end, "is_foreign_thread", lambda: True)
    monkeypatch.setattr(_backward_end, "is_in_outermost", lambda: True)

    class Running(OutermostBackward):
        is_running = True

    gradients = types.SimpleNamespace(task=None)
    backward = Running(lambda: None, lambda _: None, gradients)
    p, q, r = parameter(1.0), parameter(1.0), parameter(1.0)
    for t in (p, q, r):
        t.register_hook(lambda _: backward.enters("p", is_cuda=True) and None)
    errors = []

    def meet():
        errors.append(Other(lambda: r.sum().backward()).outcome())

    def run():
        (Meeting.apply(p * 1, meet) * q).sum().backward()  # q comes first

    run()
    assert refused(errors[0]) and r.grad is None and p.grad.item() == 1
    gradients.task = None
    Running.is_running = False
    run()
    assert errors[1] is None and r.grad.item() == 1


@on_several
@pytest.mark.parametrize("what", ["step", "synchronize", "zero_grad"])
def test_what_would_end_a_running_pass_is_refused_on_another_thread(job, what):
    def body(rank):
        p, q = parameter(1.0), parameter(1.0)
        optimizer = job.sgd(p, q, lr=0.0)
        errors = []

        def meet():
            errors.append(Other(getattr(optimizer, what)).outcome())

        (Meeting.apply(p * 1, meet) * q).sum().backward()
        assert len(errors) == 1 and refused(errors[0])
        optimizer.step()
        optimizer.zero_grad()
        (p * q * rank).sum().backward()
        optimizer.step()
        assert p.grad.item() == job.mean_rank

    job.run(body)


@pytest.mark.once
def test_two_threads_of_a_process_neither_crash_nor_hang():
    told = run_forked(
        2,
        """
        import threading
        import torch
        import farandole.torch as fl

        fl.init()
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        fl.broadcast_parameters(model.state_dict())
        sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = fl.DistributedOptimizer(sgd, model.named_parameters())
        refusals = 0

        def run():
            global refusals
            try:
                model(torch.ones(4, 64)).square().mean().backward()
            except RuntimeError as error:
                assert "one thread" in str(error), error
                refusals += 1

        for step in range(10):
            threads = [threading.Thread(target=run) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            optimizer.step()
            optimizer.zero_grad()
        run()
        optimizer.step()
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        same = torch.equal(weights, fl.broadcast(weights, 0))
        tell((refusals, same))
        """,
    )
    assert told == ["(10, True)"] * 2
