"""The end of the outermost backward pass, without any communication, where the contract's programs do not see it."""

import contextlib
import gc
import sys
import types
import weakref

import pytest
import torch

from farandole.torch.optimizer._backward_end import OutermostBackward
from farandole.torch.optimizer._parameters import GradientHooks


class Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("boom")


class WrongShape(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return torch.ones(5)


class Inner(torch.autograd.Function):
    """Runs another backward inside its own; ``caught`` says whether its error stays inside."""

    @staticmethod
    def forward(ctx, x, run, caught):
        ctx.run, ctx.caught = run, caught
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            try:
                ctx.run()
            except ValueError:
                if not ctx.caught:
                    raise
        return grad, None, None


class Watched:
    """Two parameters whose hooks watch the pass, and what was seen."""

    def __init__(self):
        self.seen = []
        self.p = torch.nn.Parameter(torch.ones(3))
        self.q = torch.nn.Parameter(torch.ones(3))
        gradients = types.SimpleNamespace(task=None, is_running=False)
        self.watch = OutermostBackward(lambda: self.seen.append("end"), self.failed, gradients)
        self.hooks = [GradientHooks(p, None, self.hook) for p in (self.p, self.q)]

    def hook(self, *_):
        if self.watch.watch():
            self.seen.append("begin")

    def failed(self, error):
        self.seen.append(error)

    def product(self):
        return (self.p * self.q).sum()

    def raising(self):
        """Fires q, then raises."""
        return (Raising.apply(self.p) * self.q).sum()


@pytest.fixture
def watched():
    return Watched()


@pytest.mark.parametrize("function, text", [(Raising, "boom"), (WrongShape, "invalid gradient")])
def test_a_failure_is_reported_with_its_exception(watched, function, text):
    with pytest.raises((ValueError, RuntimeError)) as raised:
        (function.apply(watched.p) * watched.q).sum().backward()
    assert watched.seen == ["begin", raised.value]
    assert text in str(raised.value)


def test_an_inner_failure_that_is_caught_is_no_failure(watched):
    inner = Inner.apply(watched.p, lambda: watched.raising().backward(), True)
    inner.sum().backward()
    assert watched.seen == ["begin", "end"]


def test_an_inner_failure_that_is_not_caught_is_reported_once(watched):
    inner = Inner.apply(watched.p, lambda: watched.raising().backward(), False)
    with pytest.raises(ValueError) as raised:
        (inner * watched.q).sum().backward()
    assert watched.seen == ["begin", raised.value]


def test_an_error_at_the_end_leaves_backward(watched):
    watched.watch._on_end = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        watched.product().backward()
    assert watched.seen == ["begin"]


def test_a_failed_pass_leaves_no_cycle_that_keeps_its_graph(watched):
    gc.collect()
    gc.disable()
    try:
        loss = watched.raising()
        graph = weakref.ref(loss)
        with contextlib.suppress(ValueError):
            loss.backward()
        watched.seen.clear()  # the exception, whose traceback has the loss
        del loss
        assert graph() is None
    finally:
        gc.enable()


def test_another_trace_function_survives_a_failure(watched):
    def trace(*_):
        return None

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        with pytest.raises(ValueError):
            watched.raising().backward()
        assert sys.gettrace() is trace
    finally:
        sys.settrace(previous)


def test_watching_outside_a_backward_is_refused(watched):
    with pytest.raises(RuntimeError):
        watched.watch.watch()
