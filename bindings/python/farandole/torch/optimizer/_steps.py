"""What a wrapped optimizer does around ``step()`` and in the methods it gains.

The optimizer's class stays as it is. A callable in the instance's ``__dict__`` takes the place of
``step()``, as torch's own schedulers do it. (torch's hooks around ``step()`` come twice where a subclass
calls ``super().step()``, and in 2.1 not at all once anything was compiled.) Methods are instance
attributes, which pickling and copying do not see, and hold the optimizer weakly.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch

from farandole import basics, ops
from farandole.basics import Context
from farandole.exceptions import HorovodInternalError
from farandole.torch.optimizer._hashes import GradientHashes
from farandole.torch.optimizer._reducer import GradientReducer

Optimizer = torch.optim.Optimizer

MARK = "_farandole"  # of what was changed here: an optimizer, a scaler's method
_METHODS = (
    "synchronize", "skip_synchronize", "no_sync", "set_backward_passes_per_step", "zero_grad",
    "add_param_group",
)  # fmt: skip
_adapting = threading.Lock()  # several threads may be ranks


class Steps:
    """Makes ``step()`` of one optimizer use reduced gradients.

    Args:
        optimizer: Held weakly.
        rank: The context.
        own: The reducer of its parameters; None with one rank.
        shared: Those of optimizers wrapped earlier that reduce some of its parameters.
        reduces_loss: Whether what a closure returns is reduced.
    Attributes:
        hashes: Of the gradients of steps; None: they are not hashed.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        rank: Context,
        own: GradientReducer | None,
        shared: list[GradientReducer],
        reduces_loss: bool = False,
    ) -> None:
        self.reduces_loss = reduces_loss
        self.hashes: GradientHashes | None = None
        self._optimizer = weakref.ref(optimizer)
        self._rank = rank
        self._own = own
        self._reducers = [*shared, own] if own is not None else []
        self._was_alone = own is None and rank.topology.size == 1
        self._seen = [reducer.rounds for reducer in self._reducers]
        self._adopted: list[list[torch.Tensor]] = []  # by group: what _adopt() saw last
        self._was_synchronized = False
        self._skips = False
        self._replaced: dict[str, Callable[..., Any]] = {}  # the instance's own methods

    def before_step(self, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
        """Completes what is open; gives the closure to use, whose gradients are reduced too.

        Raises:
            HorovodInternalError: The last round failed and its gradients are still there.
        """
        if isinstance(closure, SharedClosure):
            return closure
        if not self._reducers:
            self._follow()
            return closure
        if closure is not None:
            if any(reducer.is_open for reducer in self._reducers):
                self.complete()
            return SharedClosure(closure, self)
        if self._was_synchronized and not self._skips and self.own.settings.complete == "step":
            self._was_synchronized = False
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after "
                "optimizer.synchronize(); the gradients are reduced once all the same",
                stacklevel=4,
            )
        self.complete()
        return None

    def after_plain_step(self) -> None:
        """The optimizer's own ``step()`` has returned."""
        if self.hashes is not None and self.hashes.are_due:
            self.hashes.take()
        self.after_step()

    def after_step(self) -> None:
        """The gradients have been used."""
        self._was_synchronized = False
        self.forget()
        for reducer in self._reducers:
            reducer.step_taken()

    def step_failed(self, error: BaseException) -> None:
        """``step()`` raised: gradients were reduced before it, so other ranks need not know."""

    def complete(self) -> None:
        """Takes part in a round of every reducer that had none since the last step."""
        if not self._follow():
            return
        self._adopt()
        for reducer in self._reducers:
            reducer.raise_if_failed()
        with torch.no_grad():
            lacking = [reducer.stages() for reducer in self._lacking()]
            while lacking:  # all in step: no reducer waits before all have sent
                lacking = [stages for stages in lacking if next(stages, self) is None]

    def _follow(self) -> bool:
        """Whether there are gradients to reduce: in the job that this thread is in.

        Raises:
            HorovodInternalError: That is another one, in which it cannot go on; or there is none.
        """
        if all(reducer.follow() for reducer in self._reducers):
            now = basics.find() if self._was_alone and self.is_over else None
            if now is None or now.topology.size == 1:
                return bool(self._reducers)
        raise HorovodInternalError(
            "this optimizer was wrapped before shutdown() and reduces no gradients any more, as there is no job, "
            "another wrapped optimizer has its parameters, or it was wrapped in a job of one rank: after init() wrap "
            "it again with DistributedOptimizer, or make it a plain optimizer with farandole.torch.unwrap(optimizer)"
        )

    def count(self) -> None:
        """A step, or one evaluation of its closure, has reduced its gradients."""
        for reducer in self._reducers:
            reducer.count_step()

    def forget(self) -> None:
        """Rounds up to now no longer count."""
        self._seen = [reducer.rounds for reducer in self._reducers]

    def refuse(self, error: BaseException) -> bool:
        """Fails the rounds that :meth:`complete` would take part in. False when there are none."""
        lacking = self._lacking()
        for reducer in lacking:
            reducer.refuse(error)
        return bool(lacking)

    @property
    def is_over(self) -> bool:
        """Whether shutdown() was called since the wrap, and it has not gone on in another job."""
        return not (self._rank if self._own is None else self._own.rank).core.is_open

    def refuse_in_flight(self) -> None:
        """ValueError while gradients wait to be reduced."""
        if self._own is not None and self._own.is_in_flight:
            raise ValueError(
                "unwrap() was called after backward(), with gradients on their way: call step(), "
                "synchronize() or, between the passes of a step, zero_grad() first"
            )

    @property
    def own(self) -> GradientReducer:
        """The reducer of this optimizer; there is none with one rank."""
        assert self._own is not None
        return self._own

    def _lacking(self) -> list[GradientReducer]:
        pairs = zip(self._reducers, self._seen, strict=True)
        lacking = [r for r, rounds in pairs if r.has_unreduced_gradients or r.rounds == rounds]
        if self._was_synchronized:  # gradients are the user's from then on
            return lacking
        return lacking + [r for r in self._reducers if r not in lacking and r.has_assigned_gradients()]

    def _adopt(self) -> None:
        """Takes in parameters that came after the wrap; between two jobs that waits for the next one."""
        optimizer = self._optimizer()
        if optimizer is None or self._own is None or not self._own.follow():
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
                if not any(reducer.holds(parameter) for reducer in self._reducers):
                    self._own.add([(f"noname.{g}.{i}", parameter)])

    def install(self, optimizer: Optimizer) -> None:
        """Puts the methods, and one in place of ``step()``, into the instance."""
        attributes = optimizer.__dict__
        self._replaced = {name: attributes[name] for name in _METHODS if name in attributes}
        attributes.update({name: getattr(self, name) for name in _METHODS})
        attributes["step"] = ReplacedStep(optimizer, self)
        attributes[MARK] = self

    def uninstall(self, optimizer: Optimizer) -> None:
        """Undoes :meth:`install`; what somebody else put over it stays and calls what was there."""
        attributes = optimizer.__dict__
        for name in _METHODS:
            if getattr(attributes.get(name), "__self__", None) is self:
                del attributes[name]
                if name in self._replaced:
                    attributes[name] = self._replaced[name]
        step = attributes.get("step")
        if isinstance(step, ReplacedStep):
            step.remove()
        self.end()
        del attributes[MARK]

    def end(self) -> None:
        """Releases the reducers; one that no other optimizer shares goes with its hooks."""
        self._own, self._reducers, self._seen, self.hashes = None, [], [], None
        self._was_alone = False

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
        before, own.is_no_sync = own.is_no_sync, True
        try:
            yield
        finally:
            own.is_no_sync = before

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Backward passes whose gradients are summed here before they are reduced, from now on."""
        if passes <= 0:
            raise ValueError(f"backward_passes_per_step must be > 0, not {passes}")
        if self._own is not None:
            self._own.gradients.set_passes(passes)

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
        if name in self._replaced:
            self._replaced[name](*args, **kwargs)
        elif optimizer is not None:
            getattr(type(optimizer), name)(optimizer, *args, **kwargs)


class ReplacedStep:
    """Takes the place of ``optimizer.step``.

    Schedulers made later read ``__self__`` and ``__func__`` as of a bound method, and look for the
    mark of a scheduler made before, which comes with the function's attributes; GradScaler reads the
    function's signature.
    """

    def __init__(self, optimizer: Optimizer, steps: Steps) -> None:
        own = optimizer.__dict__.get("step")
        plain = type(optimizer).step if own is None else own
        functools.update_wrapper(self, plain)  # first: it copies attributes, too
        self._optimizer = weakref.ref(optimizer)
        self._steps = steps
        self._plain = plain
        self._is_bound = own is not None
        # torch.compile(optimizer.step) is for the step alone: what waits for ranks is not traced.
        self._before = torch.compiler.disable(_replace_closure)
        self._after = torch.compiler.disable(steps.after_plain_step)

    @property
    def __self__(self) -> Optimizer | None:
        return self._optimizer()

    @property
    def __func__(self) -> Callable[..., Any]:
        return lambda _optimizer, *args, **kwargs: self(*args, **kwargs)

    def remove(self) -> None:
        """Puts back what was there before."""
        optimizer = self._optimizer()
        if optimizer is not None:
            del optimizer.__dict__["step"]
            if self._is_bound:
                optimizer.__dict__["step"] = self._plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._before(self._steps, args, kwargs)
        try:
            result = self._plain(*(() if self._is_bound else (self.__self__,)), *args, **kwargs)
        except BaseException as error:
            self._steps.step_failed(error)
            raise
        self._after()
        return result


class SharedClosure:
    """Calls ``closure``; then the rounds of ``steps`` are complete, and so is the loss.

    Optimizers such as LBFGS decide by the loss whether to evaluate again. With every rank's own loss
    they would evaluate unequally often and wait for each other in vain; so the loss is reduced as the
    gradients are. An exception before the rounds are complete fails on every rank at once.
    """

    def __init__(self, closure: Callable[[], Any], steps: Steps) -> None:
        self._closure = closure
        self._steps = steps

    def __call__(self) -> Any:
        """The loss; with ``steps.reduces_loss`` reduced over the ranks if it is a number.

        Raises:
            ValueError: Some ranks returned a number and others did not.
            HorovodInternalError: Another rank's closure raised; the message says what.
        """
        self._steps.forget()
        try:
            loss = self._closure()
            self._steps.complete()
            self._steps.count()  # before the loss, in which ranks that went on would wait
            number = _number(loss) if self._steps.reduces_loss else None
        except BaseException as error:
            self._fail(error)
            raise
        return self._reduced(loss, number) if self._steps.reduces_loss else loss

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, HorovodInternalError) or self._steps.refuse(error):
            return
        if not self._steps.reduces_loss:  # the others wait for nothing
            return
        self._steps.count()  # as the others did
        text = f"{type(error).__name__}: {error}"
        with contextlib.suppress(HorovodInternalError, ValueError):
            self._reduce(torch.zeros(2, dtype=torch.float64), text)

    def _reduced(self, loss: Any, number: float | None) -> Any:
        wire = torch.tensor([number or 0.0, float(number is not None)], dtype=torch.float64)
        settings = self._steps.own.settings
        self._reduce(wire)
        if 0 < wire[1].item() < settings.size:
            raise ValueError("the closure returned a loss on some ranks and None on others")
        if number is None:
            return loss
        total = float(wire[0]) * settings.scale
        return torch.full_like(loss, total) if isinstance(loss, torch.Tensor) else total

    def _reduce(self, wire: torch.Tensor, failed: str | None = None) -> None:
        own = self._steps.own
        how, flags = own.settings.plain(ops.ALLREDUCE), ops.IN_PLACE | ops.BLOCKS
        own.rank.core.submit(how, wire, own.prefix + "loss", flags, failed=failed)


def evaluates_once(optimizer: Optimizer) -> bool:
    """Whether ``step()`` is one of torch's own that evaluates its closure exactly once.

    Unknown ones may do otherwise; of torch's own only LBFGS does.
    """
    owner = next(c for c in type(optimizer).__mro__ if "step" in vars(c))
    return owner.__module__.startswith("torch.optim.") and owner is not torch.optim.LBFGS


def steps_of(optimizer: object) -> Steps | None:
    """What wrapping gave to the optimizer; None: it is not wrapped."""
    steps: Steps | None = getattr(optimizer, "__dict__", {}).get(MARK)
    return steps


def adapt_scalers() -> None:
    """Makes torch's GradScaler act on reduced gradients, in the whole process, once.

    A scaler looks for infinities in the gradients it is about to unscale, and then leaves ``step()``
    out. Were these a rank's own, as they are with ``complete="step"`` until the round is complete,
    some ranks would leave out a step in which the others wait for them. So ``unscale_()`` and
    ``step()`` of a scaler complete the round of a wrapped optimizer first; and a step that was left
    out counts as one, since it is left out on all ranks.
    """
    # torch < 2.3 has a scaler for CUDA alone; later that one inherits from the other.
    kind = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler
    with _adapting:
        if not hasattr(kind.step, MARK):
            for name in ("unscale_", "step"):
                setattr(kind, name, _completing(getattr(kind, name), ends_step=name == "step"))


def _completing(plain: Callable[..., Any], ends_step: bool) -> Callable[..., Any]:
    @functools.wraps(plain)
    def method(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        steps = steps_of(optimizer) if scaler.is_enabled() else None
        if steps is None:
            return plain(scaler, optimizer, *args, **kwargs)
        steps.complete()
        result = plain(scaler, optimizer, *args, **kwargs)
        if ends_step:
            steps.after_step()
        return result

    setattr(method, MARK, True)
    return method


def _replace_closure(
    steps: Steps, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Calls ``before_step`` with the closure among the arguments and puts its answer there."""
    if steps.hashes is not None:
        steps.hashes.verify()
    closure = steps.before_step(args[0] if args else kwargs.get("closure"))
    if steps.hashes is not None:
        steps.hashes.are_due = True
        if closure is None:  # before the step, which reads gradients that are then in the cache
            steps.hashes.take()
    if args:
        return (closure, *args[1:]), kwargs
    return args, (kwargs | {"closure": closure} if "closure" in kwargs else kwargs)


def _number(loss: Any) -> float | None:
    """The loss as a number; None if it is anything else: None, a dictionary, several values."""
    if isinstance(loss, torch.Tensor):
        return float(loss.detach()) if loss.numel() == 1 else None
    return float(loss) if hasattr(type(loss), "__float__") else None
