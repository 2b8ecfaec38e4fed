"""Backward passes on several threads of one rank, beside the contract's: one at a time is right."""

import types

import pytest

from contract import Aside, calling
from farandole.torch.optimizer import _backward_end
from farandole.torch.optimizer._backward_end import OutermostBackward
from models import parameter
from ranks import run_forked


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
        errors.append(Aside(lambda: r.sum().backward()).outcome())

    def run():
        (calling(p * 1, meet) * q).sum().backward()  # q comes first

    run()
    assert "one thread" in errors[0] and r.grad is None and p.grad.item() == 1
    gradients.task = None
    Running.is_running = False
    run()
    assert errors[1] == "" and r.grad.item() == 1


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
