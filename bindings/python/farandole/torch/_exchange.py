"""The gradient rounds of one wrapped optimizer: who takes part, when, and what comes of it.

A round belongs to the outermost backward pass (see ``rounds``). Gradients are sent from the hooks
once it is known how often each of them fires; the rest, and everything in the first round, at the
round's end, where the pass waits for the result. ``backward()`` returns with reduced gradients.

Thread safety: one thread at a time. Invariant: a round that was begun is ended, so that no other
rank waits for it. Lifetime: hooks hold it weakly, the optimizer strongly.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from farandole import _context, _core, _work
from farandole.exceptions import HorovodInternalError
from farandole.torch._slots import Slot
from farandole.torch.rounds import OutermostBackward


class Exchange:
    """Reduces the gradients of ``named`` in rounds.

    Args:
        rank: The context; every rank of it makes the same exchange.
        prefix: Of the gradients' names; distinct per exchange.
        named: Names and parameters, the same on every rank.
        parameters: The reduction.
    """

    def __init__(
        self,
        rank: _context.Rank,
        prefix: str,
        named: Sequence[tuple[str, torch.Tensor]],
        parameters: _work.Parameters,
    ) -> None:
        self._rank = rank
        self._prefix = prefix
        self._parameters = parameters
        self._slots = [Slot(name, parameter) for name, parameter in named]
        self._gradients: _core.Gradients | None = None
        finish, fail = weakref.WeakMethod(self.finish), weakref.WeakMethod(self.fail)
        self._backward = OutermostBackward(partial(_call, finish), partial(_call, fail))
        self._order: list[int] = []
        self._is_open = False
        self._is_pending = False
        self._error: str | None = None
        self._is_current = False
        self._handles: dict[int, list[torch.utils.hooks.RemovableHandle]] = {}
        self._hook_new_parameters()

    def __del__(self) -> None:
        for handles in self._handles.values():
            for handle in handles:
                handle.remove()

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter's gradients are reduced here."""
        return any(slot.parameter is parameter for slot in self._slots)

    def fired(self, index: int) -> None:
        """A gradient was accumulated; called from its hook.

        Raises:
            RuntimeError: Under ``create_graph=True``; or the gradient was already sent.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward(create_graph=True) cannot be combined with a DistributedOptimizer: the "
                "exchange is not differentiable; use torch.autograd.grad(..., create_graph=True)"
            )
        if self._backward.watch():
            self._begin()
        slot = self._slots[index]
        slot.fired += 1
        slot.reduced = None
        if slot.fired == 1:
            self._order.append(index)
        if slot.fired == slot.learned:
            self._mark(index)
        elif slot.fired > slot.learned > 0:
            times, slot.learned = slot.learned, slot.fired
            raise RuntimeError(
                f'the gradient of "{slot.name}" fired again after it was sent: {times} times in '
                "earlier backward passes, more often now"
            )

    def finish(self) -> None:
        """Ends the round, waits for it and gives every parameter its result.

        Raises:
            HorovodInternalError: The round failed, on every rank; the message says why.
        """
        assert self._gradients is not None
        try:
            for index in self._order + list(range(len(self._slots))):
                if not self._gradients.marked(index):
                    self._mark(index)
            self._gradients.end()
        except BaseException as error:
            self.fail(error)
            raise
        self._is_open, self._is_pending = False, True
        self._wait()
        self._is_current = True
        for index, slot in enumerate(self._slots):
            slot.take_back(not self._gradients.skipped(index))
            slot.learned = max(slot.learned, slot.fired)
        self._hook_new_parameters()

    def fail(self, error: BaseException | None) -> None:
        """Ends the round as failed, here and on every rank, without waiting for the others."""
        if not self._is_open or self._gradients is None:
            return
        self._is_open = False
        text = f"{type(error).__name__}: {error}" if error is not None else "backward() failed"
        self._error = text
        self._is_pending = True
        with contextlib.suppress(HorovodInternalError, ValueError):  # told by the next operation
            self._gradients.end(failed=text)

    def before_step(self) -> None:
        """Takes part in a round if there was none since the last step.

        Raises:
            HorovodInternalError: The last round failed and its gradients are still there.
        """
        if self._error is not None:
            raise HorovodInternalError(
                f"step() after a failed backward ({self._error}); its gradients are incomplete: "
                "call backward() or zero_grad() first"
            )
        if not self._is_current:
            with torch.no_grad():
                self._begin()
                self.finish()

    def after_step(self) -> None:
        """The gradients have been used."""
        self._is_current = False

    def before_zero_grad(self) -> None:
        """Forgets a failed round, whose memory may be written to no longer."""
        self._settle()
        self._error = None

    def _begin(self) -> None:
        self._settle()
        self._error = None
        self._order.clear()
        if self._gradients is None or not all(slot.is_described() for slot in self._slots):
            descriptions = [slot.describe() for slot in self._slots]
            p = self._parameters
            self._gradients = self._rank.context.gradients(
                self._prefix, descriptions,
                op=p.op, prescale=p.prescale, postscale=p.postscale, wire=p.wire,
            )  # fmt: skip
        for slot in self._slots:
            slot.fired = 0
        self._is_open = True

    def _mark(self, index: int) -> None:
        assert self._gradients is not None
        slot = self._slots[index]
        vote = slot.vote()
        source, result = slot.lend()
        self._gradients.mark(index, source, result, vote)
        slot.reduced = None

    def _wait(self) -> None:
        assert self._gradients is not None
        try:
            self._gradients.wait()
        except (HorovodInternalError, ValueError) as error:
            self._is_pending = False
            self._error = str(error)
            self._drop()
            raise
        except BaseException:  # a signal's: the round goes on without being waited for
            self._error = "the wait for the other ranks was interrupted"
            raise
        self._is_pending = False

    def _settle(self) -> None:
        """Waits for the end of a round that nobody waited for; its outcome was told before."""
        if self._is_pending:
            with contextlib.suppress(HorovodInternalError, ValueError):
                self._wait()
            self._drop()

    def _drop(self) -> None:
        for slot in self._slots:
            slot.drop()

    def _hook_new_parameters(self) -> None:
        for index, slot in enumerate(self._slots):
            if index not in self._handles and slot.parameter.requires_grad:
                self._handles[index] = self._hooks(index, slot.parameter)

    def _hooks(
        self, index: int, parameter: torch.Tensor
    ) -> list[torch.utils.hooks.RemovableHandle]:
        hook = partial(_call_hook, weakref.WeakMethod(self.fired), index)
        handles = [parameter.register_post_accumulate_grad_hook(hook)]
        if self._parameters.op != _work.reduction(_work.Average):
            check = partial(_call_hook, weakref.WeakMethod(self._check_sum), index)
            handles.append(parameter.register_hook(check))
        return handles

    def _check_sum(self, index: int) -> None:
        """Runs before a gradient is accumulated: a reduced one must not be summed once more."""
        slot = self._slots[index]
        grad = slot.parameter.grad
        if grad is None or slot.reduced is None or slot.reduced() is not grad:
            return
        if bool(grad.any()):
            raise RuntimeError(
                f'the gradient of "{slot.name}" already holds a reduced value; a second backward '
                "before zero_grad() is possible with op=Average only"
            )


def _call(method: weakref.WeakMethod, *args: Any) -> None:
    bound = method()
    if bound is not None:
        bound(*args)


def _call_hook(method: weakref.WeakMethod, index: int, _tensor: torch.Tensor) -> None:
    _call(method, index)
