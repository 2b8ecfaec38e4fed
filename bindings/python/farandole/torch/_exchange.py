"""The gradient rounds of one wrapped optimizer: who takes part, when, and what comes of it.

A round belongs to the outermost backward pass (see ``rounds``); with several passes per step, to the
last one of its window. Gradients are sent from the hooks once it is known how often each of them
fires; the rest, and everything in the first round, at the round's end. With ``complete="backward"``
the pass waits for the result, so that ``backward()`` returns with reduced gradients; with
``complete="step"`` the round stays open until ``synchronize()`` or ``step()``.

On a GPU a gradient is sent behind what its hook's stream holds, and the stream that is current at
the end of the round, which is that of the caller of ``backward()`` or ``step()``, waits for the
results; the host does not.

Thread safety: one thread at a time, and another is refused; only hooks may run on several, of which
a pass over several devices has one each. Invariant: a round that was begun is ended, so that no other
rank waits for it. Lifetime: hooks hold it weakly, the optimizer strongly.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from farandole import _core
from farandole.basics import Context
from farandole.exceptions import HorovodInternalError, MismatchError
from farandole.torch import _compat, _devices, _library, _wrap_check
from farandole.torch._caller import Caller
from farandole.torch._hooks import GradientHooks
from farandole.torch._settings import Settings
from farandole.torch._slots import Slot, Vote
from farandole.torch._sparse import SparseExchange
from farandole.torch._waiting import WaitingParameters, is_live
from farandole.torch.rounds import OutermostBackward, at_the_end, is_compiled

_INTERRUPTED = "the wait for the other ranks was interrupted"

Named = Sequence[tuple[str, torch.Tensor]]


class StepCounter:
    """Counts the optimizer's steps and the backward passes in each, which ranks compare.

    A rank that ran another number of backward passes before step() than its peers would otherwise
    have its gradients reduced with those of their next step, unnoticed. All ranks start anew after a
    round that failed and after a join, which end for all of them alike.

    Each round is announced once: by the step before it, or at its beginning where there was none. So
    a rank that waits for another round of the step its peers have ended learns it, wherever they are.
    """

    def __init__(self, rank: Context) -> None:
        self._rank = rank
        self._joins = rank.joins
        self._rounds = 0
        self.reset()

    def reset(self) -> None:
        """Counts from the first step again."""
        self._step = 1
        self._passes = self._quiet = 0
        self._previous = (0, 0)

    def count_pass(self, is_quiet: bool) -> None:
        """An outermost backward pass began; with ``is_quiet`` it only accumulates."""
        self._passes += 1
        self._quiet += is_quiet

    def count_step(self, rounds: int) -> bool:
        """A step ended; ``rounds`` were completed so far. False where torch tells it once more."""
        if rounds == self._rounds:
            return False
        self._rounds = rounds
        self._step += 1
        self._previous = (self._passes, self._quiet)
        self._passes = self._quiet = 0
        return True

    def tell(self, gradients: _core.Gradients, announces: bool = True) -> None:
        """Says which step the coming round is in; ``announces`` it, which counts once per round."""
        gradients.in_step(*self._current())
        if announces:
            gradients.announce_step()

    def _current(self) -> tuple[int, int, int, int, int]:
        if self._joins != self._rank.joins:
            self._joins = self._rank.joins
            passes, quiet = self._passes, self._quiet
            self.reset()
            self._passes, self._quiet = passes, quiet
        return self._step, self._passes, self._quiet, *self._previous


class Exchange:
    """Reduces the gradients of ``named`` in rounds.

    Args:
        rank: The context; every rank of it makes the same exchange.
        number: In the order of wrapping; part of the gradients' names.
        named: Names and parameters, the same on every rank.
        settings: How.

    Attributes:
        rank, settings: As given.
        prefix: Of the gradients' names; distinct per exchange.
        counter: Of steps and backward passes.
        passes: Backward passes per round; may be changed between rounds.
        rounds: How many were completed.
        is_stale: Gradients were accumulated that no completed round has seen.
        is_quiet: Backward passes accumulate only.
    """

    def __init__(
        self, rank: Context, number: int, named: Named, settings: Settings
    ) -> None:
        self.prefix = f"gradients.{number}."
        self._number = number
        self._wrap_checks = rank.wrap_checks[settings.options.set]
        self.settings = settings
        self.passes = settings.passes
        self.rounds = 0
        self.is_stale = False
        self.is_quiet = False
        self.rank = rank
        self.counter = StepCounter(rank)
        self._slots: list[Slot] = []
        self._hooks: list[GradientHooks] = []
        self._unhooked: list[GradientHooks] = []
        self._held: set[int] = set()  # ids of all parameters; what is held here keeps them alive
        self._gradients: _core.Gradients | None = None
        self._layouts = self._live = torch.zeros(1)
        self._default_device = _devices.default_device_of(())
        self._lock = threading.RLock()
        ended, failed = weakref.WeakMethod(self._pass_ended), weakref.WeakMethod(self.fail)
        self._backward = OutermostBackward(partial(_call, ended), partial(_call, failed))
        self._caller = Caller(self._backward)
        self._order: list[int] = []
        self._ready: int | None = None
        self._passes_seen = 0
        self._is_open = False
        self._is_sending = False
        self._is_described = False
        self._is_pending = False
        self._error: str | None = None
        self._is_checked = False
        self._doubts: list[tuple[str, torch.Tensor]] = []
        self._waiting = WaitingParameters(rank, self.prefix, settings, _hook(self.fired, None))
        self._held.update(id(parameter) for _, parameter in named)
        self._waiting.add([item for item in named if not is_live(item[1])])
        self._hook([item for item in named if is_live(item[1])])

    def __del__(self) -> None:
        self._remove_hooks()
        if self._gradients is not None:
            if self._is_open:
                self.fail(RuntimeError("the optimizer was dropped in the middle of a round"))
            memory = (self._slots, self._layouts, self._live)
            self._gradients.detach(memory, self._is_pending)

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter's gradients are reduced here."""
        return id(parameter) in self._held

    def add(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes more parameters in, from the end of the next round on."""
        named = list(named)
        self._held.update(id(parameter) for _, parameter in named)
        self._waiting.add(named)
        self._waiting.wake()
        self.is_stale = True

    @property
    def is_in_flight(self) -> bool:
        """Whether gradients are accumulated or sent that step() or synchronize() has to complete."""
        return self._is_open or self._passes_seen > 0

    def close(self) -> None:
        """After shutdown(): backward() is left alone from now on, and nothing is in flight."""
        self._remove_hooks()
        self._gradients = None
        self._is_open = self._is_pending = False
        self._passes_seen = 0

    def _remove_hooks(self) -> None:
        self._waiting.remove_hooks()
        for hooks in self._hooks:
            hooks.remove()

    # What hooks call.

    def fired(self, index: int | None) -> None:
        """A gradient was accumulated; None: of a parameter that waits to be taken in.

        Raises:
            RuntimeError: Under ``create_graph=True``; or the gradient was already sent.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward(create_graph=True) cannot be combined with a DistributedOptimizer: the "
                "exchange is not differentiable; use torch.autograd.grad(..., create_graph=True)"
            )
        with self._lock:
            if index is not None:
                self._slots[index].reduced = None
            else:
                self._complete_earlier_round()  # before the pass counts as running
            self.is_stale = True
            if is_compiled():
                self._refuse_doubled()  # here, as nothing tells the end of the pass
                return
            is_first = self._backward.watch()
            if is_first:
                self._settle()
                self.counter.count_pass(self.is_quiet)
            if self.is_quiet:
                return
            if is_first:
                self._passes_seen += 1
                if self._passes_seen >= self.passes:
                    self._begin()
            if self._is_open and index is not None:
                self._fired_in_round(index, self._slots[index])

    def _fired_in_round(self, index: int, slot: Slot) -> None:
        slot.fired += 1
        if self._default_device.context is not None:
            slot.stream = self._stream()
        if slot.fired == 1:
            self._order.append(index)
        if not self.settings.overlaps:
            return
        if self._ready is not None and self._ready != index:
            self._mark(self._ready, self._slots[self._ready].stream)
            self._ready = None
        if slot.fired == slot.learned or self._ready == index:
            # Sent when the next parameter fires: hooks of the user's that come after ours have run.
            self._ready = index
            slot.learned = slot.fired
        elif slot.fired > slot.learned > 0:
            times, slot.learned = slot.learned, slot.fired
            raise RuntimeError(
                f'the gradient of "{slot.name}" fired again after it was sent: {times} times in '
                "earlier backward passes, more often now; where the number varies, as in loops over "
                "a checkpointed layer, pass overlap=False to DistributedOptimizer, which then sends "
                "all gradients at the end of the pass"
            )

    def _before_accumulation(self, index: int) -> None:
        """A gradient must be added neither to one in flight nor, except to a mean, to a reduced.

        A reduced one may have been zeroed. The host does not wait for the device to tell: it looks
        at the end of the pass, once for all gradients.

        Raises:
            RuntimeError: Another thread runs backward passes.
        """
        slot = self._slots[index]
        if not self._caller.enters(slot.name, slot.parameter.is_cuda):
            return
        self._complete_earlier_round()
        if self.settings.is_average:
            return
        grad = slot.parameter.grad
        if grad is None or not slot.holds_reduced():
            return
        self._doubts.append((slot.name, (grad._values() if grad.is_sparse else grad).any()))

    def _complete_earlier_round(self) -> None:
        """Ends a round that an earlier pass left open (complete="step")."""
        if self._is_open and not self._backward.is_running:
            self.complete()

    def _refuse_doubled(self) -> None:
        """RuntimeError when a gradient was added to a reduced one that was not zero."""
        doubts, self._doubts = self._doubts, []
        if not doubts:
            return
        device = doubts[0][1].device
        for (name, _), is_doubled in zip(
            doubts, torch.stack([flag.to(device) for _, flag in doubts]).tolist(), strict=True
        ):
            if is_doubled:
                raise RuntimeError(
                    f'the gradient of "{name}" already holds a reduced value; a second backward '
                    "before zero_grad() is possible with op=Average only"
                )

    def _pass_ended(self) -> None:
        self._caller.pass_ended()
        try:
            self._refuse_doubled()
        except RuntimeError as error:
            self.fail(error)
            raise
        if self._is_open and self.settings.complete == "backward":
            at_the_end(self.stages())

    # The round.

    def complete(self) -> None:
        """Ends the open round, or a new one, and waits for it; raises as :meth:`stages`."""
        for _ in self.stages():
            pass

    def stages(self) -> Iterator[None]:
        """Ends the open round, or a new one, and gives every parameter its result.

        Yields before every wait, when everything that other ranks need has been started. Dropped
        there, the round goes on without being waited for, and the next one settles it.

        Raises:
            HorovodInternalError: The round failed, on every rank; the message says why.
            RuntimeError: Another thread runs a backward pass, or ends a round.
        """
        self._caller.begin_completing()
        try:
            yield from self._stages()
        finally:
            self._caller.end_completing()

    def _stages(self) -> Iterator[None]:
        if not self._is_open:
            self._begin()
            if self.settings.is_average:  # The mean of what is equal already is what it is; so even
                for slot in self._slots:  # what was written behind autograd's back takes part.
                    slot.forget_reduced()
        try:
            if not self._is_checked:
                yield from _wrap_check.stages(self._wrap_checks, self._number)
                self._is_checked = True
            self._refuse_doubled()
        except BaseException as error:
            self._cancel(error)
            raise
        self._end()
        taken: list[tuple[str, torch.Tensor]] = []
        try:
            yield
            self._wait()
            assert self._gradients is not None
            dense = [not s for s in map(self._gradients.skipped, range(len(self._slots)))]
            self._keep_lent()
            self._take_back(dense)
            if not self._skipped(len(self._slots)):
                sparse = SparseExchange(self.rank, self.prefix, self._slots, dense, self.settings)
                yield from sparse.stages(self._default_device)
            if not self._skipped(len(self._slots) + 1):
                taken = yield from self._waiting.take()
        except GeneratorExit:  # another optimizer's failure in the same pass
            self._error = _INTERRUPTED
            raise
        except BaseException as error:
            self._error = _INTERRUPTED if self._is_pending else str(error)
            if not self._is_pending:
                self._drop()
            _wrap_check.explain(error)
            raise
        self.rounds += 1
        self.is_stale = False
        for slot in self._slots:
            slot.sparse = None
            if slot.fired > slot.learned:
                slot.learned = slot.fired
        self._refresh_hooks()
        if taken:  # the same on every rank
            self._hook(taken)
            self._begin()
            yield from self._stages()

    def fail(self, error: BaseException | None) -> None:
        """Ends the window as failed, here and on every rank, without waiting for the others."""
        if not self._is_open and not self._passes_seen:
            return
        told_later = contextlib.suppress(HorovodInternalError, ValueError)  # by the next operation
        with self._lock, told_later:
            if not self._is_open:
                self._open()
            text = f"{type(error).__name__}: {error}" if error is not None else "backward() failed"
            self._error = text
            if self._gradients is None:
                self._describe_changes()
            self._tell_step(announces=True)
            assert self._gradients is not None
            self._is_pending = True
            self._gradients.end(failed=text)
        self._is_open = False
        self._passes_seen = 0
        self._caller.release()
        self._doubts.clear()

    def _cancel(self, error: BaseException) -> None:
        """Ends a round of which nothing was sent; unless no rank can begin it, it fails on all."""
        if isinstance(error, MismatchError):
            self._is_open, self._passes_seen, self._error = False, 0, str(error)
            self.counter.reset()
            self._caller.release()
        else:
            self.fail(RuntimeError(_INTERRUPTED) if isinstance(error, GeneratorExit) else error)

    def refuse(self, error: BaseException) -> None:
        """Fails a round that has not begun on this rank, unless one failed already."""
        if self._error is None:
            self._passes_seen = max(self._passes_seen, 1)
            self.fail(error)

    def raise_if_failed(self) -> None:
        """HorovodInternalError when the last round failed and its gradients are still there."""
        if self._error is not None:
            way_out = "call backward() or zero_grad() first"
            if self._error is _INTERRUPTED:
                way_out = (
                    "the other ranks have them and go on to their next step; unless they were "
                    "interrupted too, begin anew on all ranks with shutdown() and init()"
                )
            raise HorovodInternalError(
                f"step() after a failed backward ({self._error}); its gradients are incomplete: "
                + way_out
            )

    def before_zero_grad(self) -> None:
        """Forgets a failed round, whose memory may be written to no longer, and an open window.

        Raises:
            AssertionError: Gradients are in flight.
            RuntimeError: Another thread runs a backward pass, or ends a round.
        """
        self._caller.check()
        if self._is_open and not self._backward.is_running:
            raise AssertionError(
                "optimizer.zero_grad() was called after backward() and before optimizer.step() or "
                'optimizer.synchronize(); with complete="step" gradients are in flight until then'
            )
        self._settle()
        self.let_go()
        self._error = None
        self._passes_seen = 0
        self._doubts.clear()
        for slot in self._slots:
            slot.reduced = None  # zeros may be added to; no call, there may be thousands
        self._refresh_hooks()
        if not self._backward.is_running:
            self._caller.release()

    def step_taken(self) -> None:
        """The reduced gradients were used."""
        self.count_step()
        self._caller.release()
        self.let_go()

    def count_step(self) -> None:
        """The last round was that of a step, or of one evaluation of its closure, on all ranks."""
        if self.counter.count_step(self.rounds) and self._gradients is not None:
            self.counter.tell(self._gradients)

    def let_go(self) -> None:
        """Lets go of the last round's memory if the GPU is done with it."""
        if self._gradients is not None:
            self._gradients.release_completed()

    def _begin(self) -> None:
        self._open()
        try:
            self._describe_changes()
            # Ranks that wrapped other optimizers than this one part before they announce a step.
            self._tell_step(announces=self._is_checked)
        except BaseException as error:
            self.fail(error)
            raise

    def _open(self) -> None:
        self._settle()
        self.let_go()
        self._error = None
        self._order.clear()
        self._ready = None
        for slot in self._slots:
            slot.fired = 0
        self._is_sending = False
        self._is_open = True

    def _describe_changes(self) -> None:
        """Before anything is sent: what parameters look like now. Ranks that differ get an error."""
        if self._is_described and all(slot.is_described() for slot in self._slots):
            return
        self._is_described = False
        default = _devices.default_device_of(slot.parameter for slot in self._slots)
        descriptions = [slot.describe(default.device) for slot in self._slots]
        dtype = self._slots[0].dtype if self._slots else torch.float32
        self._layouts = torch.zeros(1, dtype=dtype, device=default.device)
        self._live = torch.zeros_like(self._layouts)
        number = _library.number_of(self._layouts.dtype)
        descriptions += [("layouts", number, (1,)), ("live parameters", number, (1,))]
        descriptions.append((_wrap_check.COUNT_NAME, number, (0, len(self._wrap_checks))))
        for hooks in self._hooks:  # some are lost when a parameter's data are replaced
            hooks.refresh()
        if self._gradients is not None and (default.context is None) == (self._default_device.context is None):
            self._gradients.redefine(descriptions)
        else:
            self._define(default, descriptions)
        self._default_device = default
        self._is_described = True

    def _tell_step(self, announces: bool) -> None:
        assert self._gradients is not None
        if not self._is_sending:
            self.counter.tell(self._gradients, announces)

    def _define(self, default: _devices.DefaultDevice, descriptions: list[Any]) -> None:
        self._leave_gradients()
        count = self.settings.group_count
        sizes = [slot.parameter.numel() * slot.parameter.element_size() for slot in self._slots]
        self._gradients = self.rank.core.gradients(
            self.prefix, descriptions, self.settings.options,
            group_bytes=-(-sum(sizes) // count) if count else 0, device=int(default.context is not None),
        )  # fmt: skip

    def _leave_gradients(self) -> None:
        """To the context, until the memory of their rounds is touched no more."""
        if self._gradients is not None:
            self._gradients.detach(None, False)
            self._gradients = None

    def _stream(self) -> _devices.Stream | None:
        """This thread's current stream where gradients travel; None: in host memory."""
        return None if self._default_device.context is None else self._default_device.context.stream()

    def _mark(self, index: int, stream: _devices.Stream | None = None) -> None:
        """Sends a gradient behind what ``stream`` holds; None: the current one."""
        assert self._gradients is not None
        here, context = None, self._default_device.context
        if context is not None:
            here = context.stream()
            if stream is not None and stream != here:
                with context.using(stream):
                    self._mark(index)
                return
        self._is_sending = True
        vote, source, result = self._slots[index].lend()
        self._gradients.mark(index, source, result, vote, here)

    def _end(self) -> None:
        assert self._gradients is not None
        self._ready = None
        try:
            if not self._is_sending:  # gradients are there now whose dtype was unknown at the start
                self._describe_changes()
                self._tell_step(announces=True)
            is_sent = [*map(self._gradients.marked, range(len(self._slots)))]
            is_left = self.settings.complete == "step"  # to the user, since it was sent
            for slot in itertools.compress(self._slots, is_sent):
                if is_left or slot.was_replaced:
                    slot.check()
            for index in (*self._order, *range(len(self._slots))):
                if not is_sent[index]:
                    self._mark(index)
                    is_sent[index] = True
            self._mark_flags()
            self._gradients.end()
        except BaseException as error:
            self.fail(error)
            raise
        self._is_open, self._is_pending = False, True
        self._passes_seen = 0

    def _mark_flags(self) -> None:
        """Tells whether this rank has sparse gradients, and parameters to be taken in.

        By taking part: the values mean nothing.
        """
        assert self._gradients is not None
        present = [slot for slot in self._slots if slot.is_present]
        is_sparse = any(slot.was_sparse or slot.sparse is not None for slot in present)
        index, stream = len(self._slots), self._stream()
        for flag, is_set in ((self._layouts, is_sparse), (self._live, self._waiting.wake())):
            address = _library.address(flag)
            vote = Vote.PRESENT if is_set else Vote.ABSENT
            self._gradients.mark(index, address, address, vote, stream)
            index += 1
        self._gradients.mark(index, None, None, Vote.ABSENT, stream)

    def _skipped(self, index: int) -> bool:
        assert self._gradients is not None
        return self._gradients.skipped(index)

    def _wait(self) -> None:
        assert self._gradients is not None
        try:
            self._gradients.wait(stream=self._stream())
        except (HorovodInternalError, ValueError):
            self._is_pending = False
            self.counter.reset()
            raise
        self._is_pending = False

    def _take_back(self, is_written: list[bool]) -> None:
        """Gives every parameter its result; those that came in place are told to autograd at once."""
        in_place = []
        for slot, is_one in zip(self._slots, is_written, strict=True):
            changed = slot.take_back(is_one)
            if changed is not None:
                in_place.append(changed)
        _compat.increment_versions(in_place)
        for slot in self._slots:
            slot.note_reduced()

    def _settle(self) -> None:
        """Waits for the end of a round that nobody waited for; its outcome was told before."""
        if self._is_pending:
            with contextlib.suppress(HorovodInternalError, ValueError):
                self._wait()
            self._drop()

    def _drop(self) -> None:
        self._keep_lent()
        for slot in self._slots:
            slot.drop()

    def _keep_lent(self) -> None:
        """On a GPU what was lent may be in use after the round was waited for."""
        if self._default_device.context is not None and self._gradients is not None:
            memory = [self._layouts, self._live, *(slot.lent for slot in self._slots)]
            self._gradients.keep(memory)

    def _hook(self, named: Named) -> None:
        """Reduces the gradients of more parameters, which are redefined with the others."""
        s = self.settings
        for name, parameter in named:
            index = len(self._slots)
            self._slots.append(Slot(name, parameter, s.compression, s.densifies))
            self._hooks.append(self._hooks_of(index, parameter))
        self._leave_gradients()
        self._is_described = False
        self._unhooked = [hooks for hooks in self._hooks if not hooks.is_set]

    def _refresh_hooks(self) -> None:
        """Sets hooks that are missing; looks only where there is none that lasts."""
        self._waiting.wake()
        for hooks in self._unhooked:
            hooks.refresh()
        if self._unhooked:
            self._unhooked = [hooks for hooks in self._unhooked if not hooks.is_set]

    def _hooks_of(self, index: int, parameter: torch.Tensor) -> GradientHooks:
        before = _hook(self._before_accumulation, index)
        return GradientHooks(parameter, before, _hook(self.fired, index))


def _hook(method: Callable[..., None], *args: Any) -> Callable[..., None]:
    """Calls a method while its object lives; in as few steps as Python has, once per gradient."""
    owner = weakref.ref(method.__self__)  # type: ignore[attr-defined]
    function = method.__func__  # type: ignore[attr-defined]

    def hook(*_: object) -> None:
        living = owner()
        if living is not None:
            function(living, *args)

    return hook


def _call(method: weakref.WeakMethod, *args: Any) -> None:
    bound = method()
    if bound is not None:
        bound(*args)
