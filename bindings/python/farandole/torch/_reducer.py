"""The gradient rounds of one wrapped optimizer: who takes part, when, and what comes of it.

A round belongs to the outermost backward pass (see ``_backward_end``); with several passes per step,
to the last one of its window. Gradients are sent from the hooks once it is known how often each of
them is accumulated; the rest, and everything in the first round, at the round's end. With
``complete="backward"`` the pass waits for the result, so that ``backward()`` returns with reduced
gradients; with ``complete="step"`` the round stays open until ``synchronize()`` or ``step()``.

What is done for every gradient is in C++ (``_core.GradientSlots``), which calls this module for what
is not a dense gradient in host memory.

On a GPU a gradient is sent behind what its hook's stream holds, and the stream that is current at
the end of the round, which is that of the caller of ``backward()`` or ``step()``, waits for the
results; the host does not.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import torch

from farandole import _core
from farandole.basics import Context
from farandole.exceptions import HorovodInternalError, MismatchError
from farandole.torch import _codecs, _compat, _library, _parameters
from farandole.torch._backward_end import (
    Caller,
    OutermostBackward,
    at_the_end,
    current_task,
    is_compiled,
)
from farandole.torch._parameters import GradientHooks, Settings, WaitingParameters, is_live
from farandole.torch._sparse import SparseExchange

_PRESENT, _ABSENT = 0, 1  # farandole_vote of the C ABI
_FLAGS = ("layouts", "live parameters", _parameters.COUNT_NAME)  # sent after the gradients
_ALIGN = 64  # bytes, of a cache line
_INTERRUPTED = "the wait for the other ranks was interrupted"

Named = Sequence[tuple[str, torch.Tensor]]


class StepCounter:
    """Counts the optimizer's steps and the backward passes in each, which ranks compare.

    A rank that ran another number of backward passes before step() than its peers would otherwise
    have its gradients reduced with those of their next step, unnoticed. All ranks start anew after a
    round that failed and after a join, which end for all of them alike. Each round is announced once:
    by the step before it, or at its beginning where there was none. So a rank that waits for another
    round of the step its peers have ended learns it, wherever they are.
    """

    def __init__(self, rank: Context) -> None:
        self._rank = rank
        self._joins = rank.joins
        self._rounds = 0
        self.reset()

    def reset(self) -> None:
        """Counts from the first step again."""
        self._step = 1
        self._passes = self._no_sync_passes = 0
        self._previous = (0, 0)

    def count_pass(self, is_no_sync: bool) -> None:
        """An outermost backward pass began; with ``is_no_sync`` it only accumulates."""
        self._passes += 1
        self._no_sync_passes += is_no_sync

    def count_step(self, rounds: int) -> bool:
        """A step ended; ``rounds`` were completed so far. False where torch tells it once more."""
        if rounds == self._rounds:
            return False
        self._rounds = rounds
        self._step += 1
        self._previous = (self._passes, self._no_sync_passes)
        self._passes = self._no_sync_passes = 0
        return True

    def report(self, gradients: _core.Gradients, announces: bool = True) -> None:
        """Says which step the coming round is in; ``announces`` it, which counts once per round."""
        if self._joins != self._rank.joins:
            self._joins = self._rank.joins
            passes = self._passes, self._no_sync_passes
            self.reset()
            self._passes, self._no_sync_passes = passes
        gradients.in_step(self._step, self._passes, self._no_sync_passes, *self._previous)
        if announces:
            gradients.announce_step()


class GradientReducer:
    """Reduces the gradients of ``named`` in rounds.

    Thread safety: one thread at a time, and another is refused; only hooks may run on several, of
    which a pass over several devices has one each. Invariant: a round that was begun is ended, so
    that no other rank waits for it. Lifetime: hooks hold it weakly, the optimizer strongly.

    Args:
        rank: The context; every rank of it makes the same reducer.
        number: In the order of wrapping; part of the gradients' names.
        named: Names and parameters, the same on every rank.
        settings: How.

    Attributes:
        rank, settings: As given.
        prefix: Of the gradients' names; distinct per reducer.
        counter: Of steps and backward passes.
        passes: Backward passes per round; may be changed between rounds.
        rounds: How many were completed.
        is_no_sync: Backward passes accumulate only.
    """

    def __init__(self, rank: Context, number: int, named: Named, settings: Settings) -> None:
        self.prefix = f"gradients.{number}."
        self._number = number
        self._wrap_checks = rank.wrap_checks[settings.options.set]
        self.settings = settings
        self.passes = settings.passes
        self.rounds = 0
        self.is_no_sync = False
        self.rank = rank
        self.counter = StepCounter(rank)
        self._slots = _core.GradientSlots(
            self, current_task, torch.is_grad_enabled, _library.count_owners,
            _library.SOLE_OWNER, settings.overlaps, settings.is_average,
        )  # fmt: skip
        self._hooks: list[GradientHooks] = []
        self._unhooked: list[GradientHooks] = []
        self._flats: dict[str, torch.Tensor] = {}  # the memory of views, by their slots' names
        self._held = {id(parameter) for _, parameter in named}  # what is held here keeps them alive
        self._layouts = self._live = torch.zeros(1)
        self._default_device = _codecs.default_device_of(())
        self._lock = threading.RLock()
        ended, failed = _weakly(self._pass_ended), _weakly(self.fail)
        self._backward = OutermostBackward(ended, failed, self._slots)
        self._caller = Caller(self._backward, self._slots)
        self._passes_seen = 0
        self._is_defined = False
        self._is_pending = False
        self._is_checked = False
        self._error: str | None = None
        self._doubts: list[tuple[str, torch.Tensor]] = []
        accumulated = _weakly(self.accumulated, None)
        self._waiting = WaitingParameters(rank, self.prefix, settings, accumulated)
        self._waiting.add([item for item in named if not is_live(item[1])])
        self._hook([item for item in named if is_live(item[1])])

    def __del__(self) -> None:
        self._remove_hooks()
        if self._slots.gradients is not None:
            if self._slots.is_open:
                self.fail(RuntimeError("the optimizer was dropped in the middle of a round"))
            self._slots.gradients.detach(self._memory(), self._is_pending)

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter's gradients are reduced here."""
        return id(parameter) in self._held

    def add(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes more parameters in, from the end of the next round on."""
        named = list(named)
        self._held.update(id(parameter) for _, parameter in named)
        self._waiting.add(named)
        self._waiting.wake()
        self._slots.has_unreduced = True

    @property
    def has_unreduced_gradients(self) -> bool:
        """Whether gradients were accumulated that no completed round has seen."""
        return self._slots.has_unreduced

    def has_assigned_gradients(self) -> bool:
        """Whether a gradient was assigned after the last round, by which it is not reduced.

        One that was written to in place is taken for what clipping or unscaling made of the result.

        Raises:
            ValueError: It takes the place of a reduced one, which a sum would count once more; on
                the other ranks the round fails.
        """
        slot = self._slots.find_assigned()
        if slot is None or self.settings.is_average or not slot.was_reduced():
            return slot is not None
        error = ValueError(
            f'the gradient of "{slot.name}" was reduced in backward() and replaced by another tensor '
            "before step(); a sum cannot be reduced once more: change it in place, or call "
            "optimizer.synchronize() after backward(), from when on gradients are used as they are"
        )
        self.refuse(error)
        raise error

    @property
    def is_open(self) -> bool:
        """Whether a round is, which step() or synchronize() has to complete."""
        return self._slots.is_open

    @property
    def is_in_flight(self) -> bool:
        """Whether gradients are accumulated or sent that step() or synchronize() has to complete."""
        return self._slots.is_open or self._passes_seen > 0

    def close(self) -> None:
        """After shutdown(): backward() is left alone from now on, and nothing is in flight."""
        self._remove_hooks()
        self._slots.gradients = None
        self._slots.is_open = self._is_pending = False
        self._passes_seen = 0

    def _remove_hooks(self) -> None:
        self._waiting.remove_hooks()
        for hooks in self._hooks:
            hooks.remove()

    # What hooks call, by way of the slots.

    def accumulated(self, index: int | None, *_: object) -> None:
        """A gradient was accumulated, the pass's first; None: of a parameter that waits.

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
                self._slots[index].forget_reduced()
            else:
                self._complete_earlier_round()  # before the pass counts as running
            self._slots.has_unreduced = True
            if is_compiled():
                self._refuse_doubled()  # here, as nothing tells the end of the pass
                return
            if self._backward.watch():
                self._begin_pass()
            self._slots.is_running = True
            if index is not None:
                self._slots.accumulated(index)

    def _begin_pass(self) -> None:
        self._settle()
        self.counter.count_pass(self.is_no_sync)
        if not self.is_no_sync:
            self._passes_seen += 1
            if self._passes_seen >= self.passes:
                self._begin()

    def before_accumulation(self, index: int) -> None:
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
        if self.settings.is_average or not slot.holds_reduced():
            return
        grad = slot.parameter.grad
        self._doubts.append((slot.name, (grad._values() if grad.is_sparse else grad).any()))

    def _complete_earlier_round(self) -> None:
        """Ends a round that an earlier pass left open (complete="step")."""
        if self._slots.is_open and not self._backward.is_running:
            self.complete()

    def _refuse_doubled(self) -> None:
        """RuntimeError when a gradient was added to a reduced one that was not zero."""
        doubts, self._doubts = self._doubts, []
        if not doubts:
            return
        device = doubts[0][1].device
        flags = torch.stack([flag.to(device) for _, flag in doubts]).tolist()
        for (name, _), is_doubled in zip(doubts, flags, strict=True):
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
        if self._slots.is_open and self.settings.complete == "backward":
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
        if not self._slots.is_open:
            self._begin()
            if self.settings.is_average:  # The mean of what is equal already is what it is; so even
                self._slots.forget_reduced()  # what was written behind autograd's back takes part.
        try:
            if not self._is_checked:
                yield  # to start other optimizers' rounds before the wait
                for check in self._wrap_checks[: self._number + 1]:
                    check.wait()
                self._is_checked = True
            self._refuse_doubled()
        except BaseException as error:
            self._cancel(error)
            raise
        self._end()
        try:
            taken = yield from self._results()
        except GeneratorExit:  # another optimizer's failure in the same pass
            self._error = _INTERRUPTED
            raise
        except BaseException as error:
            self._error = _INTERRUPTED if self._is_pending else str(error)
            if not self._is_pending:
                self._drop()
            _parameters.explain(error)
            raise
        self.rounds += 1
        self._slots.has_unreduced = False
        self._refresh_hooks()
        if taken:  # the same on every rank
            self._hook(taken)
            self._begin()
            yield from self._stages()

    def _results(self) -> Generator[None, None, Named]:
        """Waits for the round, and gives the parameters that all ranks take in from now on."""
        yield
        self._wait()
        self._keep_memory()
        skipped = self._slots.receive(_compat.increment_versions, _compat.swaps_parameters())
        is_sparse, is_live_somewhere = (not self._was_skipped(i) for i in (0, 1))
        if is_sparse:
            dense = [not is_skipped for is_skipped in skipped]
            slots = list(self._slots)
            sparse = SparseExchange(self.rank, self.prefix, slots, dense, self.settings)
            yield from sparse.stages(self._default_device)
        self._slots.release_sparse()
        return (yield from self._waiting.take()) if is_live_somewhere else []

    def fail(self, error: BaseException | None) -> None:
        """Ends the window as failed, here and on every rank, without waiting for the others."""
        if not self._slots.is_open and not self._passes_seen:
            return
        told_later = contextlib.suppress(HorovodInternalError, ValueError)  # by the next operation
        with self._lock, told_later:
            if not self._slots.is_open:
                self._open()
            text = f"{type(error).__name__}: {error}" if error is not None else "backward() failed"
            self._error = text
            if self._slots.gradients is None:
                self._make_gradients(self._placeholders())
            self._report_step(announces=True)
            self._is_pending = True
            self._gradients.end(failed=text)
        self._slots.is_open = False
        self._passes_seen = 0
        self._caller.release()
        self._doubts.clear()

    def _cancel(self, error: BaseException) -> None:
        """Ends a round of which nothing was sent; unless no rank can begin it, it fails on all."""
        if isinstance(error, MismatchError):
            self._slots.is_open, self._passes_seen, self._error = False, 0, str(error)
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
        if self._slots.is_open and not self._backward.is_running:
            raise AssertionError(
                "optimizer.zero_grad() was called after backward() and before optimizer.step() or "
                'optimizer.synchronize(); with complete="step" gradients are in flight until then'
            )
        self._settle()
        self.release_completed()
        self._error = None
        self._passes_seen = 0
        self._doubts.clear()
        self._slots.forget_reduced()  # zeros may be added to
        self._refresh_hooks()
        if not self._backward.is_running:
            self._caller.release()

    def step_taken(self) -> None:
        """The reduced gradients were used."""
        self.count_step()
        self._caller.release()
        self.release_completed()

    def count_step(self) -> None:
        """The last round was that of a step, or of one evaluation of its closure, on all ranks."""
        if self.counter.count_step(self.rounds) and self._slots.gradients is not None:
            self.counter.report(self._gradients)

    def release_completed(self) -> None:
        """Releases the last round's memory if the GPU is done with it."""
        if self._slots.gradients is not None:
            self._gradients.release_completed()

    @property
    def _gradients(self) -> _core.Gradients:
        gradients = self._slots.gradients
        if gradients is None:
            raise HorovodInternalError("shutdown() was called in the middle of a round")
        return gradients

    def _begin(self) -> None:
        self._open()
        try:
            self._define_changes()
            # Ranks that wrapped other optimizers than this one part before they announce a step.
            self._report_step(announces=self._is_checked)
        except BaseException as error:
            self.fail(error)
            raise

    def _open(self) -> None:
        self._settle()
        self.release_completed()
        self._error = None
        self._slots.open()

    def _define_changes(self) -> None:
        """Before anything is sent: what parameters look like now. Ranks that differ get an error."""
        if self._is_defined and self._slots.are_defined():
            return
        self._is_defined = False
        default = _codecs.default_device_of(slot.parameter for slot in self._slots)
        descriptions = [self._define(slot, default.device) for slot in self._slots]
        dtype = self._slots[0].dtype if descriptions else torch.float32
        if dtype not in _library.DTYPE_NUMBERS:  # compress= makes another one of it
            dtype = torch.float32
        self._layouts = torch.zeros(1, dtype=dtype, device=default.device)
        self._live = torch.zeros_like(self._layouts)
        number = _library.number_of(self._layouts.dtype)
        shapes = (1,), (1,), (0, len(self._wrap_checks))
        descriptions += [(name, number, shape) for name, shape in zip(_FLAGS, shapes, strict=True)]
        before, self._default_device = self._default_device, default
        if self._slots.gradients is not None and (before.context is None) == (default.context is None):
            self._gradients.redefine(descriptions)
        else:
            self._make_gradients(descriptions)
        self._slots.current_stream = None if default.context is None else default.context.stream
        if self.settings.are_views and default.context is None:
            self._make_views()
        self._is_defined = True

    def _make_views(self) -> None:
        """Gives slots whose gradients were defined anew views of one new buffer, and the flags too.

        A batch is reduced without copies if all of it lies in such memory.
        """
        slots = [slot for slot in self._slots if slot.is_direct and self._lacks_view(slot)]
        sizes = [slot.parameter.numel() * slot.parameter.element_size() for slot in slots]
        begins = list(itertools.accumulate((-(-n // _ALIGN) * _ALIGN for n in sizes), initial=128))
        memory = self.rank.core.allocate(begins[-1])
        dtype = self._layouts.dtype
        self._layouts, self._live = (
            torch.frombuffer(memory, dtype=dtype, count=1, offset=n) for n in (0, _ALIGN)
        )
        for slot, begin in zip(slots, begins, strict=False):
            parameter = slot.parameter
            flat = torch.frombuffer(
                memory, dtype=parameter.dtype, count=parameter.numel(), offset=begin
            )
            self._flats[slot.name] = flat
            # Not flat.view(): views in autograd's sense cannot be detached in place.
            slot.view = torch.empty(0, dtype=flat.dtype).set_(
                flat.untyped_storage(), 0, parameter.shape, parameter.stride()
            )

    def _lacks_view(self, slot: _core.GradientSlot) -> bool:
        """Whether the gradients of a direct slot can have a view, and have none as they are defined.

        ``Module.to()`` gives gradients other memory, and so the view, which is one.
        """
        view, parameter = slot.view, slot.parameter
        if parameter.numel() == 0 or not parameter.is_contiguous():
            return False
        return (
            view is None
            or (view.dtype, view.shape) != (parameter.dtype, parameter.shape)
            or view.data_ptr() != self._flats[slot.name].data_ptr()
        )

    def _define(
        self, slot: _core.GradientSlot, device: torch.device
    ) -> tuple[str, int, tuple[int, ...]]:
        """Name, dtype and shape on the wire, which the next gradients will have on ``device``."""
        dtype = slot.last_dtype = _codecs.gradient_dtype(slot.parameter, slot.last_dtype)
        compression = self.settings.compression
        codec: _codecs.Codec = (
            _codecs.Direct(slot.parameter, dtype, device)
            if compression is None
            else _codecs.Compressed(slot.name, slot.parameter, dtype, compression, device)
        )
        self._slots.define(slot, codec, codec.is_plain)
        return slot.name, *codec.describe()

    def _placeholders(self) -> list[Any]:
        """For a round that fails before its gradients could be defined: ranks meet by the names."""
        names = [*(slot.name for slot in self._slots), *_FLAGS]
        return [(name, _library.number_of(torch.float32), ()) for name in names]

    def _make_gradients(self, descriptions: list[Any]) -> None:
        self._leave_gradients()
        count = self.settings.group_count
        sizes = [s.parameter.numel() * s.parameter.element_size() for s in self._slots]
        self._slots.gradients = self.rank.core.gradients(
            self.prefix, descriptions, self.settings.options,
            group_bytes=-(-sum(sizes) // count) if count else 0,
            device=int(self._default_device.context is not None),
        )  # fmt: skip

    def _report_step(self, announces: bool) -> None:
        if not self._slots.has_sent:
            self.counter.report(self._gradients, announces)

    def _leave_gradients(self) -> None:
        """To the context, until the memory of their rounds is touched no more."""
        if self._slots.gradients is not None:
            self._gradients.detach(None, False)
            self._slots.gradients = None

    def _stream(self) -> _codecs.Stream | None:
        """This thread's current stream where gradients travel; None: in host memory."""
        return None if self._default_device.context is None else self._default_device.context.stream()

    # One gradient that the slots leave to Python.

    def send(self, index: int, stream: _codecs.Stream | None = None) -> None:
        """Sends a gradient behind what ``stream`` holds; None: the current one.

        The memory stays alive until :meth:`receive`. A sparse gradient that is not to be densified is
        absent here and kept in ``slot.sparse``.
        """
        here, context = self._stream(), self._default_device.context
        if context is not None and stream is not None and stream != here:
            with context.using(stream):
                self.send(index)
            return
        slot = self._slots[index]
        self.check_look(slot)
        vote, slot.sparse = slot.vote(), None
        memory = self._slots.own_memory(slot)
        grad = slot.parameter.grad
        slot.note_sent()
        slot.is_present = vote == _PRESENT
        if grad is not None and grad.layout is not torch.strided:
            slot.sparse = grad
            grad = memory = grad.to_dense() if self.settings.densifies else None
            vote = vote if self.settings.densifies else _ABSENT
        slot.forget_reduced()
        # Unless it is a view, a receive buffer is for this round only: it is as large as the parameter.
        if grad is None:
            slot.buffer = slot.view if slot.view is not None else slot.codec.receive_buffer()
        else:
            slot.buffer = slot.codec.pack(memory)
        address = _library.address(slot.buffer)
        self._gradients.mark(index, None if grad is None else address, address, vote, here)

    def check(self, slot: _core.GradientSlot) -> None:
        """That what was sent is still the gradient, as it was then.

        Raises:
            ValueError: As :meth:`check_look`; or the gradient was replaced, or written to.
        """
        self.check_look(slot)
        grad = slot.parameter.grad
        if grad is not None and slot.has_changed():
            is_replaced = grad is not slot.sent
            raise ValueError(
                f'the gradient of "{slot.name}" was {"replaced" if is_replaced else "changed in place"}'
                " while it was in flight: call optimizer.synchronize() before"
            )

    def check_look(self, slot: _core.GradientSlot) -> None:
        """That parameter and gradient look as they were defined.

        Raises:
            ValueError: Parameter or gradient has another shape, or the gradient another dtype; the
                message names it.
        """
        grad, shape = slot.parameter.grad, slot.codec.shape
        if slot.parameter.shape != shape:
            raise ValueError(
                f'parameter "{slot.name}" was changed within a round, from {list(shape)} to '
                f"{list(slot.parameter.shape)}: call optimizer.synchronize() before"
            )
        if grad is None:
            return
        if grad.shape != shape:
            raise ValueError(
                f'the gradient of "{slot.name}" has shape {list(grad.shape)}, the parameter '
                f"{list(shape)}: set .grad to None, or give it the parameter's shape too"
            )
        if grad.dtype != slot.codec.dtype:
            slot.last_dtype = grad.dtype
            raise ValueError(
                f'the gradient of "{slot.name}" is {grad.dtype}; expected {slot.codec.dtype}, as '
                "when the round began: call zero_grad() and run the step again"
            )

    def receive(self, slot: _core.GradientSlot) -> torch.Tensor | None:
        """Gives the parameter its result. Gives the gradient if it was changed in place."""
        sent, buffer = slot.sent, slot.buffer
        slot.sent = slot.buffer = None
        if buffer is sent:
            _library.use_here(buffer)
            return None if buffer.is_inference() else buffer
        result = slot.codec.unpack(_library.use_here(buffer))
        if sent is not None and sent.layout is torch.strided and not _library.is_expanded(sent):
            _library.copy_into(sent, result)
        elif sent is slot.parameter.grad:
            slot.parameter.grad = result.to(slot.parameter.device, slot.codec.dtype)
        return None

    def _end(self) -> None:
        try:
            if not self._slots.has_sent:  # gradients are there now whose dtype was unknown at first
                self._define_changes()
                self._report_step(announces=True)
            self._slots.send_rest(self.settings.complete == "step")
            self._mark_flags()
            self._gradients.end()
        except BaseException as error:
            self.fail(error)
            raise
        self._slots.is_open, self._is_pending = False, True
        self._passes_seen = 0

    def _mark_flags(self) -> None:
        """Tells whether this rank has sparse gradients, and parameters to be taken in.

        By taking part: the values mean nothing.
        """
        index, stream = len(self._slots), self._stream()
        is_sparse = self._slots.has_sparse()
        for flag, is_set in ((self._layouts, is_sparse), (self._live, self._waiting.wake())):
            address = _library.address(flag)
            vote = _PRESENT if is_set else _ABSENT
            self._gradients.mark(index, address, address, vote, stream)
            index += 1
        self._gradients.mark(index, None, None, _ABSENT, stream)

    def _was_skipped(self, flag: int) -> bool:
        return self._gradients.skipped(len(self._slots) + flag)

    def _wait(self) -> None:
        try:
            self._gradients.wait(stream=self._stream())
        except (HorovodInternalError, ValueError):
            self._is_pending = False
            self.counter.reset()
            raise
        self._is_pending = False

    def _settle(self) -> None:
        """Waits for the end of a round that nobody waited for; its outcome was told before."""
        if self._is_pending:
            with contextlib.suppress(HorovodInternalError, ValueError):
                self._wait()
            self._drop()

    def _drop(self) -> None:
        self._keep_memory()
        self._slots.drop()

    def _keep_memory(self) -> None:
        """On a GPU what was sent may be in use after the round was waited for."""
        if self._default_device.context is not None and self._slots.gradients is not None:
            self._gradients.keep(self._memory())

    def _memory(self) -> list[torch.Tensor]:
        return [self._layouts, self._live, *self._slots.memory()]

    def _hook(self, named: Named) -> None:
        """Reduces the gradients of more parameters, which are defined with the others."""
        for name, parameter in named:
            index = len(self._slots)
            self._slots.add(name, parameter)
            before, after = (self._slots.hook(index, is_after) for is_after in (False, True))
            self._hooks.append(GradientHooks(parameter, before, after))
        self._leave_gradients()
        self._is_defined = False
        self._unhooked = [hooks for hooks in self._hooks if not hooks.is_set]

    def _refresh_hooks(self) -> None:
        """Sets hooks that are missing; looks only where there is none that lasts."""
        self._waiting.wake()
        for hooks in self._hooks if _compat.swaps_parameters() else self._unhooked:
            hooks.refresh()
        if self._unhooked:
            self._unhooked = [hooks for hooks in self._unhooked if not hooks.is_set]


def _weakly(method: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    """Calls a method while its object lives."""
    weak = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        bound = weak()
        return None if bound is None else bound(*first, *arguments)

    return call
