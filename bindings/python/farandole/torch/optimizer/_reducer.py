"""The gradient rounds of one wrapped optimizer: when they begin and end, and what comes of it.

A round belongs to the outermost backward pass (see ``_backward_end``); with several passes per step,
to the last one of its window. Gradients are sent from the hooks once it is known how often each of
them is accumulated; the rest, and everything in the first round, at the round's end. With
``complete="backward"`` the pass waits for the result, so that ``backward()`` returns with reduced
gradients; with ``complete="step"`` the round stays open until ``synchronize()`` or ``step()``.

Who takes part, in which step and in which order, is the core's (``farandole_gradients_*``); what is
done for every gradient is in C++ too (``_core.Gradients``), which calls this module for what cannot
be sent as it lies in memory.

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

from farandole import _core, basics
from farandole.basics import Context
from farandole.exceptions import HorovodInternalError, MismatchError
from farandole.torch import _compat, _library
from farandole.torch.optimizer import _codecs
from farandole.torch.optimizer._backward_end import OutermostBackward, at_the_end, current_task, is_compiled
from farandole.torch.optimizer._gradient_memory import GradientMemory
from farandole.torch.optimizer._low_rank import LowRankExchange, codec_for, low_rank_of
from farandole.torch.optimizer._parameters import GradientHooks, Settings, is_live, label
from farandole.torch.optimizer._sparse import SparseExchange

_TORCH = (current_task, torch.is_grad_enabled, _library.count_owners, _library.SOLE_OWNER)

Named = Sequence[tuple[str, torch.Tensor]]


class GradientReducer:
    """Reduces the gradients of some of an optimizer's parameters in rounds.

    Thread safety: one thread at a time, and another is refused; only hooks may run on several, of
    which a pass over several devices has one each. Invariant: a round that was begun is ended, so
    that no other rank waits for it. Lifetime: hooks hold it weakly, the optimizer strongly.

    Args:
        rank: The context; every rank of it makes the same reducer.
        named: Names and parameters, the same on every rank, frozen ones too.
        wrapped: Those of the whole optimizer, which ranks compare.
        settings: How.

    After ``shutdown()`` and ``init()`` it goes on in the new job, whatever ranks that has; see :meth:`follow`.

    Attributes:
        rank, settings: As given; of the job in which it is.
        gradients: The rounds' state.
        number: Of the optimizer there, in the order of wrapping.
        prefix: Of its operations' names; distinct per reducer.
        is_no_sync: Backward passes accumulate only.
    """

    def __init__(self, rank: Context, named: Named, wrapped: Named, settings: Settings) -> None:
        self.rank = rank
        self.settings = settings
        self.is_no_sync = False
        self._wrapped = wrapped
        sizes = [p.numel() * p.element_size() for _, p in named if is_live(p)]
        count = settings.group_count
        self.gradients = rank.core.gradients(
            settings.options, self, list(named), [label(*item) for item in wrapped], _TORCH,
            -(-sum(sizes) // count) if count else 0, settings.overlaps, settings.is_average,
        )  # fmt: skip
        self.gradients.set_passes(settings.passes)
        self._number()
        self._low_rank: dict[int, _core.GradientSlot] = {}  # those that travel as two matrices
        self._memory: list[GradientMemory] = []  # where autograd makes gradients
        self._held = {id(parameter) for _, parameter in named}  # what is held here keeps them alive
        self._default_device = _codecs.default_device_of(())
        self._lock = threading.RLock()
        ended, failed = _weakly(self._pass_ended), _weakly(self.fail)
        self._backward = OutermostBackward(ended, failed, self.gradients)
        self._is_defined = self._is_compared = False
        self._doubts: list[tuple[str, torch.Tensor]] = []
        self._hooks: list[GradientHooks] = []
        self._unhooked: list[GradientHooks] = []
        self._hook(slot.parameter for slot in self.gradients)

    def __del__(self) -> None:
        for hooks in self._hooks:
            hooks.remove()
        try:
            if self.gradients.is_open:
                self.fail(RuntimeError("the optimizer was dropped in the middle of a round"))
        finally:
            self.gradients.detach()

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter's gradients are reduced here."""
        return id(parameter) in self._held

    def follow(self) -> bool:
        """Whether it is in a job, to which it goes when its own is over and this thread is in another.

        Reducers go together, in the order of their wraps, which is that of ranks that wrap their first optimizers
        there. One whose parameters another reducer of that job has stays behind, as does one of a process set that is
        not added there until it is.

        Raises:
            TypeError: Its own process set is not.
        """
        if self.rank.core.is_open:
            return True
        rank = basics.find()
        if rank is None:
            return False
        for reducer in sorted(self.rank.reducers, key=lambda reducer: reducer.number):
            try:
                reducer._go_to(rank)
            except (TypeError, ValueError):
                if reducer is self:
                    raise
        return self.rank is rank

    def _go_to(self, rank: Context) -> None:
        if any(reducer.holds(slot.parameter) for reducer in rank.reducers for slot in self.gradients):
            return
        settings = self.settings.of_now()
        labels = [label(*item) for item in self._wrapped]
        self.gradients.rebind(rank.core, settings.options.set, labels)
        self.rank.reducers.discard(self)
        rank.reducers.add(self)
        self.rank, self.settings = rank, settings
        for slot in self.gradients:
            slot.codec = None  # what it has learned is this rank's alone
        self._is_defined = self._is_compared = False
        self._number()

    def _number(self) -> None:
        self.number = self.gradients.number
        self.prefix = f"gradients.{self.number}."

    def add(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes more parameters in, the same on all ranks."""
        if not self.rank.core.is_open:
            return
        self._settle()
        named = list(named)
        self._held.update(id(parameter) for _, parameter in named)
        known = len(self.gradients)
        self.gradients.add(named, self._define)
        self._low_rank = low_rank_of(self.gradients)
        if self._memory:
            self._share(itertools.islice(self.gradients, known, None))
        self._hook(parameter for _, parameter in named)

    @property
    def rounds(self) -> int:
        """How many rounds succeeded."""
        return self.gradients.succeeded

    @property
    def has_unreduced_gradients(self) -> bool:
        """Whether gradients were accumulated that no completed round has seen."""
        return self.gradients.has_unreduced

    def has_assigned_gradients(self) -> bool:
        """Whether a gradient was assigned after the last round, by which it is not reduced.

        One that was written to in place is taken for what clipping or unscaling made of the result.

        Raises:
            ValueError: It takes the place of a reduced one, which a sum would count once more; on
                the other ranks the round fails.
        """
        slot = self.gradients.find_assigned()
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
        return self.gradients.is_open

    @property
    def is_in_flight(self) -> bool:
        """Whether gradients are accumulated or sent that step() or synchronize() has to complete."""
        return self.gradients.has_window

    def close(self) -> None:
        """After shutdown(): backward() is left alone until :meth:`follow`, and nothing is in flight."""
        self._backward.release()
        self._doubts.clear()
        self._memory.clear()

    # What hooks call, by way of the slots.

    def accumulated(self, index: int) -> None:
        """A gradient was accumulated, the pass's first.

        Raises:
            RuntimeError: Under ``create_graph=True``; or the gradient was already sent.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward(create_graph=True) cannot be combined with a DistributedOptimizer: the "
                "exchange is not differentiable; use torch.autograd.grad(..., create_graph=True)"
            )
        if not self.follow():
            return
        with self._lock:
            self.gradients[index].forget_reduced()
            if is_compiled():
                self._refuse_doubled()  # here, as nothing tells the end of the pass
            else:
                if self._backward.watch():
                    self._begin_pass()
                self.gradients.is_running = True
            self.gradients.accumulated(index)

    def _begin_pass(self) -> None:
        self._settle()
        if self.gradients.count_pass(self.is_no_sync):
            self._begin()

    def before_accumulation(self, index: int) -> None:
        """A gradient must be added neither to one in flight nor, except to a mean, to a reduced.

        A reduced one may have been zeroed. The host does not wait for the device to tell: it looks
        at the end of the pass, once for all gradients.

        Raises:
            RuntimeError: Another thread runs backward passes.
        """
        slot = self.gradients[index]
        if not self.follow() or not self._backward.enters(slot.name, slot.parameter.is_cuda):
            return
        self._complete_earlier_round()
        if self.settings.is_average or not slot.holds_reduced():
            return
        grad = slot.parameter.grad
        self._doubts.append((slot.name, (grad._values() if grad.is_sparse else grad).any()))

    def _complete_earlier_round(self) -> None:
        """Ends a round that an earlier pass left open (complete="step")."""
        if self.gradients.is_open and not self._backward.is_running:
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
        try:
            self._refuse_doubled()
        except RuntimeError as error:
            self.fail(error)
            raise
        if self.gradients.is_open and self.settings.complete == "backward":
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
        self._backward.begin_completing()
        try:
            yield from self._stages()
        finally:
            self._backward.end_completing()

    def _stages(self) -> Iterator[None]:
        if not self.gradients.is_open:
            self._begin()
            if self.settings.is_average:  # The mean of what is equal already is what it is; so even
                self.gradients.forget_reduced()  # what was written behind autograd's back takes part.
        try:
            if not self._is_compared:
                yield  # to start other optimizers' rounds before the wait
                self.gradients.compare()
                self._is_compared = True
            self._refuse_doubled()
        except BaseException as error:
            self._cancel(error)
            raise
        self._end()
        try:
            yield from self._results()
        except BaseException as error:  # GeneratorExit: another optimizer's failure in the same pass
            is_interrupted = self.gradients.is_pending or isinstance(error, GeneratorExit)
            self.gradients.note_failure(None if is_interrupted else str(error))
            if not is_interrupted:
                self.gradients.drop()
                self._memory.clear()  # another rank may still write there: no other tensor gets it
            raise
        self._refresh_hooks()

    def _results(self) -> Generator[None, None, None]:
        yield
        self.gradients.wait()
        self.gradients.receive(_compat.increment_versions, _compat.swaps_parameters())
        if self._low_rank:
            low_rank = [slot for i, slot in self._low_rank.items() if not self.gradients.skipped(i)]
            yield from LowRankExchange(self.rank, self.prefix, low_rank, self.settings).stages()
        if self.gradients.flag:
            sparse = SparseExchange(self.rank, self.prefix, self.gradients, self.settings)
            yield from sparse.stages(self._default_device)
        self.gradients.release_sparse()

    def fail(self, error: BaseException | None) -> None:
        """Ends the window, if one has begun, as failed, here and on every rank; see :meth:`refuse`."""
        if self.is_in_flight:
            self._fail(error)

    def _fail(self, error: BaseException | None) -> None:
        told_later = contextlib.suppress(HorovodInternalError, ValueError)  # by the next operation
        with self._lock, told_later:
            self._settle()
            text = f"{type(error).__name__}: {error}" if error is not None else "backward() failed"
            self.gradients.fail(text)
        self._backward.release()
        self._doubts.clear()

    def _cancel(self, error: BaseException) -> None:
        """Ends a round of which nothing was sent; unless no rank can begin it, it fails on all."""
        if isinstance(error, MismatchError):
            self._backward.release()
        elif isinstance(error, GeneratorExit):
            self.fail(RuntimeError("the wait for the other ranks was interrupted"))
        else:
            self.fail(error)

    def refuse(self, error: BaseException) -> None:
        """Fails a round, also one that has not begun on this rank, without waiting for the others.

        Unless one failed already.
        """
        if self.gradients.failure is None:
            self._fail(error)

    def raise_if_failed(self) -> None:
        """HorovodInternalError when the last round failed and its gradients are still there."""
        failure = self.gradients.failure
        if failure is not None:
            way_out = "call backward() or zero_grad() first"
            if self.gradients.is_interrupted:
                way_out = (
                    "the other ranks have them and go on to their next step; unless they were "
                    "interrupted too, begin anew on all ranks with shutdown() and init()"
                )
            raise HorovodInternalError(
                f"step() after a failed backward ({failure}); its gradients are incomplete: " + way_out
            )

    def before_zero_grad(self) -> None:
        """Forgets a failed round, whose memory may be written to no longer, and an open window.

        Raises:
            AssertionError: Gradients are in flight.
            RuntimeError: Another thread runs a backward pass, or ends a round.
        """
        self._backward.check()
        if self.gradients.is_open and not self._backward.is_running:
            raise AssertionError(
                "optimizer.zero_grad() was called after backward() and before optimizer.step() or "
                'optimizer.synchronize(); with complete="step" gradients are in flight until then'
            )
        self._settle()
        self.gradients.release_completed()
        self.gradients.forget()
        self._doubts.clear()
        self.gradients.forget_reduced()  # zeros may be added to
        self._refresh_hooks()
        if not self._backward.is_running:
            self._backward.release()

    def step_taken(self) -> None:
        """The reduced gradients were used."""
        self.count_step()
        self._backward.release()
        self.gradients.release_completed()

    def count_step(self) -> None:
        """The last round was that of a step, or of one evaluation of its closure, on all ranks."""
        self.gradients.stepped()

    def _begin(self) -> None:
        self._settle()
        self.gradients.release_completed()
        try:
            self._define_changes()
            for slot in self._low_rank.values():
                slot.codec.begin()
            if self.settings.are_shared and not self._memory and self._default_device.like is None:
                self._share(self.gradients)
            self.gradients.open()
        except BaseException as error:
            self._fail(error)
            raise

    def _define_changes(self) -> None:
        """Before anything is sent: what parameters look like now. Ranks that differ get an error."""
        if self._is_defined and self.gradients.are_defined():
            return
        self._is_defined = False
        default = _codecs.default_device_of(slot.parameter for slot in self.gradients)
        self._default_device = default
        descriptions = [self._define(slot) for slot in self.gradients]
        self._low_rank = low_rank_of(self.gradients)
        self.gradients.define(descriptions, default.like)
        self._memory.clear()
        self._is_defined = True

    def _share(self, slots: Iterable[_core.GradientSlot]) -> None:
        """Offers memory to the next gradients of slots; a batch is reduced there if all of it lies in such memory."""
        live = [slot for slot in slots if slot.dtype is not None and is_live(slot.parameter)]
        sizes = [slot.parameter.numel() * slot.dtype.itemsize for slot in live]
        self._memory.append(GradientMemory(self.rank.core, sizes))

    def _define(self, slot: _core.GradientSlot) -> _core.GradientDescription:
        """Dtype and shape on the wire of the next gradients, as the parameter looks now."""
        slot.dtype = slot.last_dtype = slot.gradient_dtype()
        slot.is_channels_last = _codecs.is_channels_last(slot.parameter)
        if slot.dtype not in _library.DTYPE_NUMBERS and not is_live(slot.parameter):
            return _core.GradientDescription(_library.DTYPE_NUMBERS[torch.float32], [0])  # none travels
        device = self._default_device.device
        slot.codec = codec = codec_for(slot, self.settings.compression, self.prefix + slot.name, device)
        if codec is not None:
            return codec.describe()
        shape = _codecs.wire_shape(slot.parameter, slot.is_channels_last)
        if slot.dtype in _library.PAIRS:
            return _core.GradientDescription(_library.number_of(_library.PAIRS[slot.dtype]), [*shape, 2])
        return _core.GradientDescription(_library.number_of(slot.dtype), shape)

    # One gradient that the slots leave to Python.

    def pack(self, slot: _core.GradientSlot, stream: _codecs.Stream | None) -> torch.Tensor | None:
        """What travels of a gradient that cannot be sent where it lies; None: nothing.

        Made in ``stream``, or the current one. The memory stays alive until :meth:`receive`. A sparse
        gradient that is not to be densified is kept in ``slot.sparse``. Without a gradient a codec may
        have something to send all the same.
        """
        if stream is not None and self._default_device.context is not None:
            with self._default_device.context.using(stream):
                return self.pack(slot, None)
        self.check_look(slot)
        if slot.parameter.grad is None:
            left: torch.Tensor | None = slot.codec.pack_absent()
            return left
        memory: torch.Tensor = self.gradients.own_memory(slot)
        if memory.layout is not torch.strided:
            slot.sparse = memory
            if not self.settings.densifies:
                return None
            memory = memory.to_dense()
        if slot.codec is not None:
            packed: torch.Tensor = slot.codec.pack(memory)
            return packed
        order = _codecs.memory_format(memory.dim(), slot.is_channels_last)
        wire = memory.detach().to(self._default_device.device)
        return wire.resolve_conj().resolve_neg().contiguous(memory_format=order)

    def copy_in(self, gradient: torch.Tensor, stream: _codecs.Stream) -> torch.Tensor:
        """A copy of the gradient, made in ``stream``, in which it was accumulated itself."""
        assert self._default_device.context is not None
        with self._default_device.context.using(stream):
            return gradient.detach().clone()

    def check(self, slot: _core.GradientSlot) -> None:
        """That what was sent is still the gradient, as it was then.

        Raises:
            ValueError: As :meth:`check_look`; or the gradient was replaced, or written to.
        """
        self.check_look(slot)
        grad = slot.parameter.grad
        if grad is not None and slot.has_changed():
            what = "replaced" if grad is not slot.sent else "changed in place"
            if what == "changed in place" and grad._base is not None:
                what += ", or another view of the same buffer was,"
            raise ValueError(
                f'the gradient of "{slot.name}" was {what} while it was in flight: call optimizer.synchronize() before'
            )

    def check_look(self, slot: _core.GradientSlot) -> None:
        """That parameter and gradient look as they were defined.

        Raises:
            ValueError: Parameter or gradient has another shape, or the gradient another dtype; the
                message names it.
        """
        grad, shape = slot.parameter.grad, slot.shape
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
        if grad.dtype != slot.dtype:
            slot.last_dtype = grad.dtype
            raise ValueError(
                f'the gradient of "{slot.name}" is {grad.dtype}; expected {slot.dtype}, as '
                "when the round began: call zero_grad() and run the step again"
            )

    def receive(self, slot: _core.GradientSlot, wire: torch.Tensor, sent: torch.Tensor | None) -> None:
        """Gives the parameter what came into ``wire``, in which its gradient ``sent`` travelled."""
        result = self._unpacked(slot, wire)
        if sent is not None and sent.layout is torch.strided and not _library.is_expanded(sent):
            _library.copy_into(sent, result)
        elif sent is slot.parameter.grad:
            slot.parameter.grad = result.to(slot.parameter.device, slot.dtype)

    def receive_new(self, slot: _core.GradientSlot, wire: torch.Tensor) -> None:
        """Gives the parameter the result of the other ranks: it has no gradient, or a sparse one."""
        if slot.dtype in _library.PAIRS and slot.codec is None:
            wire = torch.view_as_complex(wire)
        if slot.is_channels_last and slot.codec is None:
            wire = wire.movedim(-1, 1)
        result = self._unpacked(slot, _library.own_here(wire))
        slot.parameter.grad = result.to(slot.parameter.device, slot.dtype)

    def _unpacked(self, slot: _core.GradientSlot, wire: torch.Tensor) -> torch.Tensor:
        wire = _library.use_here(wire)
        return wire if slot.codec is None else slot.codec.unpack(wire)

    def _end(self) -> None:
        try:
            if not self.gradients.has_marked:  # gradients are there now whose dtype was unknown
                self._define_changes()
            self.gradients.end(self.settings.complete == "step")
        except BaseException as error:
            self.fail(error)
            raise

    def _settle(self) -> None:
        """Waits for the end of a round that nobody waited for; its outcome was told before."""
        if self.gradients.is_pending:
            try:
                self.gradients.wait()
            except (HorovodInternalError, ValueError):
                self._memory.clear()  # as after a failure that was waited for
            self.gradients.drop()

    def _hook(self, parameters: Iterable[torch.Tensor]) -> None:
        for index, parameter in enumerate(parameters, len(self._hooks)):
            before, after = (self.gradients.hook(index, is_after) for is_after in (False, True))
            self._hooks.append(GradientHooks(parameter, before, after))
        self._unhooked = [hooks for hooks in self._hooks if not hooks.is_set]

    def _refresh_hooks(self) -> None:
        """Sets hooks that are missing; looks only where there is none that lasts."""
        if _compat.swaps_parameters():
            missing = self._hooks
        else:  # without calls: there may be thousands of frozen parameters
            missing = [hooks for hooks in self._unhooked if hooks.parameter.requires_grad]
        for hooks in missing:
            hooks.refresh()
        if missing and self._unhooked:
            self._unhooked = [hooks for hooks in self._unhooked if not hooks.is_set]


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Calls a method while its object lives."""
    weak = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        bound = weak()
        return None if bound is None else bound(*arguments)

    return call
