"""Which thread the backward passes of one optimizer run on: between two steps only one may call them.

A second thread's pass would add to gradients that the first one's round is sending, and would be a
round more or not, depending on which thread is faster, on each rank anew. So it is refused before
it accumulates anything, whether or not the first thread's pass is still running.

On the CPU a pass runs on the thread that calls ``backward()``. Gradients on a GPU are accumulated
on a thread of autograd's own, which serves all callers; there two passes are told apart by the
number of their graph task, and only while both run.
"""

from __future__ import annotations

import threading

import torch

from farandole.torch import rounds

_current_task = getattr(torch._C, "_current_graph_task_id", lambda: None)  # torch >= 2.0


class Caller:
    """The thread that runs backward passes.

    Thread safety: any thread.

    Args:
        backward: Tells whether a pass is running.
    """

    def __init__(self, backward: rounds.OutermostBackward) -> None:
        self._backward = backward
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None  # its number would be used again after its end
        self._task: int | None = None  # a graph task that was let in
        self._outermost: int | None = None  # that of the pass which a GPU's thread saw last
        self._completing: threading.Thread | None = None

    def enters(self, name: str, is_cuda: bool) -> bool:
        """In a hook of a parameter: whether a gradient is accumulated, on the right thread.

        Args:
            name: The parameter's.
            is_cuda: It is on a GPU.
        Raises:
            RuntimeError: Another thread runs backward passes; the message says what to do.
        """
        task = _current_task()
        if task is not None and task == self._task:
            return True
        if not rounds.is_accumulating():
            return False
        with self._lock:
            if not self._is_allowed(task, is_cuda):
                raise RuntimeError(
                    f'backward() reached parameter "{name}" on a second thread before the '
                    "optimizer's step(): between two steps call backward() on one thread only, or "
                    "give each thread a model and an optimizer of its own"
                )
            self._task = task
        return True

    def _is_allowed(self, task: int | None, is_cuda: bool) -> bool:
        me = threading.current_thread()
        if not rounds.is_foreign_thread():
            if self._completing not in (None, me) or self._thread not in (None, me):
                return False
            self._thread = me
        elif is_cuda and rounds.is_in_outermost():
            if self._backward.is_running and self._outermost not in (None, task):
                return False
            self._outermost = task
        return True

    def check(self) -> None:
        """Before the round is touched outside hooks.

        Raises:
            RuntimeError: Another thread is at it.
        """
        me = threading.current_thread()
        is_beside = self._backward.is_running and self._thread is not me
        if (is_beside and not rounds.is_foreign_thread()) or self._completing not in (None, me):
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

    def pass_ended(self) -> None:
        """The outermost pass ended; the same thread may run another."""
        self._task = self._outermost = None

    def release(self) -> None:
        """The gradients were used, or given up: from now on any thread may call backward()."""
        self.pass_ended()
        self._thread = None
