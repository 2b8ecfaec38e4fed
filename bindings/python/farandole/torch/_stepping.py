"""What a wrapped optimizer does around ``step()`` and in the methods it gains.

The optimizer's class stays as it is. torch >= 2.0 has hooks around ``step()``; before, a callable in
the instance's ``__dict__`` takes its place, as torch's own schedulers do it. Methods are instance
attributes, which pickling and copying do not see, and hold the optimizer weakly.
"""

from __future__ import annotations

import contextlib
import operator
import warnings
import weakref
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from farandole.basics import Context
from farandole.exceptions import HorovodInternalError
from farandole.torch._closure import SharedClosure
from farandole.torch._exchange import Exchange

Optimizer = torch.optim.Optimizer


class Steps:
    """Makes ``step()`` of one optimizer use reduced gradients.

    Args:
        optimizer: Held weakly.
        rank: The context.
        own: The exchange of its parameters; None with one rank.
        shared: Those of optimizers wrapped earlier that reduce some of its parameters.
        reduces_loss: Whether what a closure returns is reduced.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        rank: Context,
        own: Exchange | None,
        shared: list[Exchange],
        reduces_loss: bool = False,
    ) -> None:
        self.reduces_loss = reduces_loss
        self._handles: list[RemovableHandle] = []
        self._optimizer = weakref.ref(optimizer)
        self._rank = rank
        self._own = own
        self._exchanges = [*shared, own] if own is not None else []
        self._seen = [exchange.rounds for exchange in self._exchanges]
        self._adopted: list[list[torch.Tensor]] = []  # by group: what _adopt() saw last
        self._was_synchronized = False
        self._skips = False

    def before_step(self, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
        """Completes what is open; gives the closure to use, whose gradients are reduced too.

        Raises:
            HorovodInternalError: The last round failed and its gradients are still there.
        """
        if not self._exchanges or isinstance(closure, SharedClosure):
            return closure
        if closure is not None:
            return SharedClosure(closure, self)
        if self._was_synchronized and not self._skips and self._completes_in_step():
            self._was_synchronized = False
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after "
                "optimizer.synchronize(); the gradients are reduced once all the same",
                stacklevel=5,
            )
        self.complete()
        return None

    def after_step(self) -> None:
        """The gradients have been used."""
        self._was_synchronized = False
        self.forget()
        for exchange in self._exchanges:
            exchange.step_taken()

    def step_failed(self, error: BaseException) -> None:
        """``step()`` raised: gradients were reduced before it, so other ranks need not know."""

    def complete(self) -> None:
        """Takes part in a round of every exchange that had none since the last step."""
        if self.is_over and self._own is not None:
            raise HorovodInternalError(
                "this optimizer was wrapped before shutdown() and reduces no gradients any more: "
                "after init() wrap it again with DistributedOptimizer, or make it a plain optimizer "
                "with farandole.torch.unwrap(optimizer)"
            )
        self._adopt()
        for exchange in self._exchanges:
            exchange.raise_if_failed()
        with torch.no_grad():
            lacking = [e.stages() for i, e in enumerate(self._exchanges) if self._lacks(i)]
            while lacking:  # all in step: no exchange waits before all have sent
                lacking = [stages for stages in lacking if next(stages, self) is None]

    def count(self) -> None:
        """A step, or one evaluation of its closure, has reduced its gradients."""
        for exchange in self._exchanges:
            exchange.count_step()

    def forget(self) -> None:
        """Rounds up to now no longer count."""
        self._seen = [exchange.rounds for exchange in self._exchanges]

    def refuse(self, error: BaseException) -> bool:
        """Fails the rounds that :meth:`complete` would take part in. False when there are none."""
        lacking = [e for i, e in enumerate(self._exchanges) if self._lacks(i)]
        for exchange in lacking:
            exchange.refuse(error)
        return bool(lacking)

    @property
    def is_over(self) -> bool:
        """Whether shutdown() was called since the wrap."""
        return not self._rank.core.is_open

    def refuse_in_flight(self) -> None:
        """ValueError while gradients wait to be reduced."""
        if self._own is not None and self._own.is_in_flight:
            raise ValueError(
                "unwrap() was called after backward(), with gradients on their way: call step(), "
                "synchronize() or, between the passes of a step, zero_grad() first"
            )

    @property
    def own(self) -> Exchange:
        """The exchange of this optimizer; there is none with one rank."""
        assert self._own is not None
        return self._own

    def _lacks(self, index: int) -> bool:
        exchange = self._exchanges[index]
        return exchange.is_stale or exchange.rounds == self._seen[index]

    def _completes_in_step(self) -> bool:
        return self.own.settings.complete == "step"

    def _adopt(self) -> None:
        """Takes in parameters that came after the wrap."""
        optimizer = self._optimizer()
        if optimizer is None or self._own is None:
            return
        params = [group["params"] for group in optimizer.param_groups]
        # One look at each, in C: which they are, as tensors compare by their values.
        if list(map(len, params)) == list(map(len, self._adopted)) and all(
            map(operator.is_, chain(*params), chain(*self._adopted))
        ):
            return
        self._adopted = [list(group) for group in params]
        for g, group in enumerate(params):
            for i, parameter in enumerate(group):
                if not any(exchange.holds(parameter) for exchange in self._exchanges):
                    self._own.add([(f"noname.{g}.{i}", parameter)])

    def add_hooks(self, optimizer: Optimizer) -> None:
        """Makes torch call the two around ``step()``, until :meth:`end`."""
        before = optimizer.register_step_pre_hook(_StepHook(self))
        after = optimizer.register_step_post_hook(lambda *_: self.after_step())
        self._handles = [before, after]

    def end(self) -> None:
        """Lets go of the exchanges; one that no other optimizer shares goes with its hooks."""
        for handle in self._handles:
            handle.remove()
        self._own, self._exchanges, self._seen = None, [], []

    # The methods an optimizer gains.

    def synchronize(self) -> None:
        """Completes the round, so that gradients are final; with complete="backward" they are."""
        self.complete()
        self._was_synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """For step() after synchronize(), as Horovod wants it; never needed."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate; the next one outside, or step(), reduces all."""
        if self._own is None:
            yield
            return
        own = self._own  # unwrap() may come before the end
        was_quiet, own.is_quiet = own.is_quiet, True
        try:
            yield
        finally:
            own.is_quiet = was_quiet

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Backward passes whose gradients are summed here before they are reduced, from now on."""
        if passes <= 0:
            raise ValueError(f"backward_passes_per_step must be > 0, not {passes}")
        if self._own is not None:
            self._own.passes = passes

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """The optimizer's own, which also ends an open window and forgets a failed round."""
        if self._own is not None:
            self._own.before_zero_grad()
            self.forget()  # what is written from now on, without a backward pass too, is new
        self._plain("zero_grad", *args, **kwargs)

    def add_param_group(self, *args: Any, **kwargs: Any) -> None:
        """The optimizer's own; the new parameters are reduced from now on."""
        self._plain("add_param_group", *args, **kwargs)
        self._adopt()

    def _plain(self, name: str, *args: Any, **kwargs: Any) -> None:
        optimizer = self._optimizer()
        if optimizer is not None:
            getattr(type(optimizer), name)(optimizer, *args, **kwargs)


_METHODS = (
    "synchronize", "skip_synchronize", "no_sync", "set_backward_passes_per_step", "zero_grad",
    "add_param_group",
)  # fmt: skip


def install(optimizer: Optimizer, steps: Steps) -> None:
    """Puts the methods into the instance and makes ``step()`` call ``steps``."""
    optimizer.__dict__.update({name: getattr(steps, name) for name in _METHODS})
    if hasattr(optimizer, "register_step_pre_hook"):
        steps.add_hooks(optimizer)
    else:
        optimizer.__dict__["step"] = StepInPlace(optimizer, steps)


def uninstall(optimizer: Optimizer, steps: Steps) -> None:
    """Undoes :func:`install`; what somebody else put over it stays and calls what was there before."""
    for name in _METHODS:
        if getattr(optimizer.__dict__.get(name), "__self__", None) is steps:
            del optimizer.__dict__[name]
    step = optimizer.__dict__.get("step")
    if isinstance(step, StepInPlace):
        step.remove()
    steps.end()


class _StepHook:
    """A step pre-hook; runs twice where a subclass calls super().step()."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def __call__(
        self, _optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        rest, new = _replace_closure(self._steps, args[1:], kwargs)
        return (args[:1] + rest, new)


class StepInPlace:
    """Takes the place of ``optimizer.step`` where torch has no hooks around it, and for Adasum.

    Schedulers made later read ``__self__`` and ``__func__`` as of a bound method, and look for the
    mark of a scheduler made before.
    """

    def __init__(self, optimizer: Optimizer, steps: Steps) -> None:
        plain = optimizer.__dict__.get("step")
        self._optimizer = weakref.ref(optimizer)
        self._steps = steps
        self._plain = plain if plain is not None else type(optimizer).step
        self._is_bound = plain is not None
        for mark in ("_with_counter", "_wrapped_by_lr_sched"):  # a newer torch's is the second
            if getattr(plain, mark, False):
                setattr(self, mark, True)

    @property
    def __self__(self) -> Optimizer | None:
        return self._optimizer()

    def remove(self) -> None:
        """Puts back what was there before."""
        optimizer = self._optimizer()
        if optimizer is not None:
            del optimizer.__dict__["step"]
            if self._is_bound:
                optimizer.__dict__["step"] = self._plain

    @property
    def __func__(self) -> Callable[..., Any]:
        def step(_optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        return step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _replace_closure(self._steps, args, kwargs)
        try:
            result = self._plain(*(() if self._is_bound else (self.__self__,)), *args, **kwargs)
        except BaseException as error:
            self._steps.step_failed(error)
            raise
        self._steps.after_step()
        return result


def _replace_closure(
    steps: Steps, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Calls ``before_step`` with the closure among the arguments and puts its answer there."""
    if args:
        return (steps.before_step(args[0]), *args[1:]), kwargs
    closure = steps.before_step(kwargs.get("closure"))
    return args, (kwargs | {"closure": closure} if "closure" in kwargs else kwargs)
