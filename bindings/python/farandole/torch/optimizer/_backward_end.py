"""The end of the outermost backward pass, exactly once, or its failure; and the thread it runs on.

Autograd tells nobody that a backward pass is over. What it offers is a list of final callbacks on the
*graph task* (one run of the engine), and reentrant checkpointing or a custom Function may run tasks
inside tasks. The mechanism rests on ownership: the first hook of a pass queues a *token* whose only
owner is the task.

* Called with no autograd node running: the outermost pass ends.
* Called while a node is running: an inner task ends; nothing to do yet. When that task is freed, the
  token's finaliser queues a fresh token on the enclosing task.
* Freed uncalled and no enclosing task: the pass failed.
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

# Every run of the engine that Python starts has one on the stack of the thread that starts it.
_ENTRANCES = (torch.autograd.backward.__code__, torch.autograd.grad.__code__)

_current_node = torch._C._current_autograd_node  # that runs on the calling thread; None: none

#: The number of the graph task that runs on the calling thread.
current_task = torch._C._current_graph_task_id


class OutermostBackward:
    """Of one optimizer's backward passes: how the outermost ones ended, and the thread that runs them.

    Between two steps only one thread may call backward(). A second one's pass would add to gradients
    that the first one's round is sending, and would be a round more or not, depending on which thread is
    faster, on each rank anew. So it is refused before it accumulates anything, whether or not the first
    thread's pass is still running. On the CPU a pass runs on the thread that calls ``backward()``.
    Gradients on a GPU are accumulated on a thread of autograd's own, which serves all callers; there two
    passes are told apart by the number of their graph task, and only while both run.

    Thread safety: any thread, except that one pass at a time may be watched.

    Args:
        on_end: Called inside the engine at the end of the outermost pass; what it raises leaves
            ``backward()``.
        on_failure: Called once when a watched pass raises instead, with the exception, or with None
            where it cannot be had (a pass run by one of torch's device threads). Must not raise.
        gradients: Its ``is_running`` becomes False when a pass has ended or failed; its ``task`` is the
            graph task that was let in, or None.
    """

    def __init__(self, on_end: Callable[[], None], on_failure: FailureReport, gradients: Any) -> None:
        self._on_end = on_end
        self._on_failure = on_failure
        self._gradients = gradients
        self._token: weakref.ref[_Token] | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None  # its number would be used again after its end
        self._outermost: int | None = None  # the task of the pass which a GPU's thread saw last
        self._completing: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        """Whether a watched pass has neither ended nor failed."""
        return self._token is not None

    def watch(self) -> bool:
        """Watches the running pass; called by a gradient hook. True for the first call in a pass.

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
        self._forget_token()
        self._gradients.task = self._outermost = None  # the same thread may run another
        self._on_end()

    def _freed_uncalled(self) -> None:
        self._token = None
        try:
            self._queue_token()
        except RuntimeError:
            self._forget_token()
            _when_raised(self._on_failure)

    def _forget_token(self) -> None:
        self._token = None
        self._gradients.is_running = False

    def enters(self, name: str, is_cuda: bool) -> bool:
        """In a hook of parameter ``name``: whether a gradient is accumulated, on the right thread.

        Raises:
            RuntimeError: Another thread runs backward passes; the message says what to do.
        """
        task = current_task()
        if task == self._gradients.task:
            return True
        if not is_accumulating():
            return False
        with self._lock:
            if not self._is_allowed(task, is_cuda):
                raise RuntimeError(
                    f'backward() reached parameter "{name}" on a second thread before the '
                    "optimizer's step(): between two steps call backward() on one thread only, or "
                    "give each thread a model and an optimizer of its own"
                )
            self._gradients.task = task
        return True

    def _is_allowed(self, task: int, is_cuda: bool) -> bool:
        me = threading.current_thread()
        if not is_foreign_thread():
            if self._completing not in (None, me) or self._thread not in (None, me):
                return False
            self._thread = me
        elif is_cuda and is_in_outermost():
            if self.is_running and self._outermost not in (None, task):
                return False
            self._outermost = task
        return True

    def check(self) -> None:
        """RuntimeError when another thread is at the round, which is touched outside hooks."""
        me = threading.current_thread()
        is_beside = self.is_running and self._thread not in (None, me)
        if (is_beside and not is_foreign_thread()) or self._completing not in (None, me):
            raise RuntimeError(
                "the optimizer was used on a second thread while its gradients were being "
                "reduced: call backward(), step(), synchronize() and zero_grad() on one thread"
            )

    def begin_completing(self) -> None:
        """The calling thread ends the round, until :meth:`end_completing`; raises as :meth:`check`."""
        with self._lock:
            self.check()
            self._completing = threading.current_thread()

    def end_completing(self) -> None:
        """The round has ended."""
        self._completing = None

    def release(self) -> None:
        """The gradients were used, or given up: from now on any thread may call backward()."""
        self._gradients.task = self._outermost = self._thread = None


class _Token:
    """Owned by one graph task, as the class above says. A pass in flight keeps its owner alive."""

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
    return _current_node() is None


def is_in_outermost() -> bool:
    """In a hook on a thread of autograd's own: whether its pass runs inside no other, from a hook.

    The outermost pass was started on the caller's thread.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in _ENTRANCES:
        frame = frame.f_back
    return frame is None


def is_foreign_thread() -> bool:
    """Whether the calling thread is one of autograd's own."""
    return isinstance(threading.current_thread(), threading._DummyThread)


def is_accumulating() -> bool:
    """In a tensor's hook: whether a gradient is accumulated, and not given to torch.autograd.grad().

    In compiled autograd nobody tells; then True.
    """
    node = _current_node()
    if node is None:
        return True
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # so torch answers for what torch.autograd.grad() was asked for
        return False


def is_compiled() -> bool:
    """In a gradient hook: whether compiled autograd runs it, which has no nodes and no passes.

    Warns once that gradients are not final when its backward() returns.
    """
    global _has_warned
    if _current_node() is not None:
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


def _when_raised(report: FailureReport) -> None:
    """Calls ``report`` with the exception that the C++ code below the caller is about to raise.

    The finaliser of a token runs while C++ unwinds its stack: the error is on its way but not yet
    visible to Python. It becomes visible in the frame that called into C++, as that frame's
    'exception' trace event, so a trace function is set there for this one event. A debugger's or a
    coverage tool's own trace function is put back at once.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals is globals():
        frame = frame.f_back
    if frame is None:
        report(None)
        return
    previous, previous_local = sys.gettrace(), frame.f_trace

    # Refers to neither the frame nor itself: such a cycle would keep the graph alive.
    def on_event(frame: FrameType, event: str, detail: Any) -> Any:
        if event not in ("exception", "return"):
            return frame.f_trace
        sys.settrace(previous)
        frame.f_trace = previous_local
        report(detail[1] if event == "exception" else None)
        return previous_local

    frame.f_trace = on_event
    sys.settrace(lambda *_: None)
