"""The end of the outermost backward pass, exactly once, and its failure with the error's text.

Autograd tells nobody that a backward pass is over. What it offers is a list of final callbacks on
the *graph task* (one run of the engine), and reentrant checkpointing or a custom Function may run
tasks inside tasks. The mechanism here rests on ownership: the first hook of a pass queues a
*token* whose only owner is the task.

* Called with no autograd node running: the outermost pass ends.
* Called while a node is running: an inner task ends; nothing to do yet. When that task is freed,
  the token's finaliser queues a fresh token on the enclosing task.
* Freed uncalled and no enclosing task: the pass failed.

No communication happens in this module. Thread safety: one backward pass at a time per object.
Lifetime: a pass in flight keeps its ``OutermostBackward`` alive.
"""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch.autograd import Variable

FailureReport = Callable[[BaseException | None], None]

_has_warned = False  # of compiled autograd

# Before torch 2.0 nobody tells which node runs; but every run of the engine that Python starts has
# one of these functions on the stack of the thread that starts it.
_current_node = getattr(torch._C, "_current_autograd_node", None)
_will_execute = getattr(torch._C, "_will_engine_execute_node", None)
_ENTRANCES = (torch.autograd.backward.__code__, torch.autograd.grad.__code__)


class OutermostBackward:
    """Reports how each outermost backward pass ended.

    Args:
        on_end: Called inside the engine at the end of the outermost pass; what it raises leaves
            ``backward()``.
        on_failure: Called once when a watched pass raises instead, with the exception, or with None
            where it cannot be had (a pass run by one of torch's device threads). Must not raise.
    """

    def __init__(self, on_end: Callable[[], None], on_failure: FailureReport) -> None:
        self._on_end = on_end
        self._on_failure = on_failure
        self._token: weakref.ref[_Token] | None = None

    @property
    def is_running(self) -> bool:
        """Whether a watched pass has neither ended nor failed."""
        return self._token is not None

    def watch(self) -> bool:
        """Makes sure that the running pass is watched; call it from every gradient hook.

        Returns:
            True for the first call of an outermost pass.
        Raises:
            RuntimeError: No backward pass is running on this thread.
        """
        if self._token is not None:
            return False
        self._queue_token()
        return True

    def _queue_token(self) -> None:
        token = _Token(self)
        try:
            Variable._execution_engine.queue_callback(token)
        except RuntimeError:
            token.spent = True  # otherwise its finaliser would queue another, without end
            raise
        self._token = weakref.ref(token)

    def _ended(self) -> None:
        self._token = None
        self._on_end()

    def _freed_uncalled(self) -> None:
        self._token = None
        try:
            self._queue_token()
        except RuntimeError:
            when_raised(self._on_failure)


class _Token:
    """What a graph task owns; see the module's text."""

    __slots__ = ("_owner", "spent", "__weakref__")

    def __init__(self, owner: OutermostBackward) -> None:
        self._owner = owner
        self.spent = False

    def __call__(self) -> None:
        if is_outermost():
            self.spent = True
            self._owner._ended()

    def __del__(self) -> None:
        if not self.spent:
            self.spent = True
            self._owner._freed_uncalled()


def is_outermost() -> bool:
    """In a final callback: whether the pass that ended runs inside no other."""
    if _current_node is not None:
        return _current_node() is None
    return is_in_outermost()


def is_in_outermost() -> bool:
    """In a hook or a final callback: whether the pass that called it runs inside no other."""
    frame: FrameType | None = sys._getframe(1)
    entrances = 0
    while frame is not None:
        entrances += frame.f_code in _ENTRANCES
        frame = frame.f_back
    # On a device's thread, which is not Python's, the outermost run has none on the stack.
    return entrances <= (0 if is_foreign_thread() else 1)


def is_foreign_thread() -> bool:
    """Whether the calling thread is one of autograd's own."""
    return isinstance(threading.current_thread(), threading._DummyThread)


def is_accumulating() -> bool:
    """In a tensor's hook: whether a gradient is accumulated, and not given to torch.autograd.grad().

    Before torch 2.1, and in compiled autograd, nobody tells; then True.
    """
    node = None if _current_node is None else _current_node()
    if _will_execute is None or node is None:
        return True
    try:
        return bool(_will_execute(node))
    except RuntimeError:  # so torch answers for what torch.autograd.grad() was asked for
        return False


def is_compiled() -> bool:
    """In a gradient hook: whether compiled autograd runs it, which has no nodes and no passes.

    Warns once that gradients are not final when its backward() returns.
    """
    global _has_warned
    if _current_node is None or _current_node() is not None:
        return False
    if not _has_warned:
        _has_warned = True
        warnings.warn(
            "compiled autograd tells no end of a backward pass: gradients are reduced in step() or "
            "synchronize(), not in backward()",
            stacklevel=3,
        )
    return True


def at_the_end(stages: Iterator[None]) -> None:
    """In a final callback: runs one stage and puts the next behind what others start in this pass.

    So no optimizer waits before all have sent, in whatever order ranks come to them.
    """
    for _ in stages:
        Variable._execution_engine.queue_callback(partial(at_the_end, stages))
        return


def when_raised(report: FailureReport) -> None:
    """Calls ``report`` with the exception that the C++ code below the caller is about to raise.

    The finaliser of a token runs while C++ unwinds its stack: the error is on its way but not yet
    visible to Python. It becomes visible in the frame that called into C++, as that frame's
    'exception' trace event, so a trace function is set there for this one event. A debugger's or a
    coverage tool's own trace function is put back at once.
    """
    frame = _calling_frame()
    if frame is None:
        report(None)
        return
    previous, previous_local = sys.gettrace(), frame.f_trace

    def on_event(_frame: FrameType, event: str, detail: Any) -> Any:
        if event not in ("exception", "return"):
            return on_event
        sys.settrace(previous)
        frame.f_trace = previous_local
        report(detail[1] if event == "exception" else None)
        return previous_local

    frame.f_trace = on_event
    sys.settrace(lambda *_: None)


def _calling_frame() -> FrameType | None:
    """The innermost frame outside this module: the one that called ``run_backward``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals is globals():
        frame = frame.f_back
    return frame
