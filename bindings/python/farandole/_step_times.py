"""What this library cannot see of a step's time: noted, so that a rank that is late can be told why."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from farandole import _core

_Result = TypeVar("_Result")
_here = threading.local()


class _Collections:
    """How long the garbage collector takes, which calls this with the interpreter's lock held."""

    def __init__(self) -> None:
        self._began_ns = 0

    def __call__(self, phase: str, _info: dict[str, Any]) -> None:
        if phase == "start":
            self._began_ns = time.perf_counter_ns()
        elif self._began_ns:  # else it began before this was told
            _core.note_garbage_collection(time.perf_counter_ns() - self._began_ns)
            self._began_ns = 0


def note_collections() -> None:
    """From now on. Again does nothing."""
    if not any(isinstance(one, _Collections) for one in gc.callbacks):
        gc.callbacks.append(_Collections())


def note_input(next_batch: Callable[[Any], _Result]) -> Callable[[Any], _Result]:
    """The method of a loader's iterator that gives the next batch: its time is input's, and of nested ones once."""

    def timed(self: Any) -> _Result:
        if getattr(_here, "is_waiting", False):
            return next_batch(self)
        _here.is_waiting, began_ns = True, time.perf_counter_ns()
        try:
            return next_batch(self)
        finally:
            _here.is_waiting = False
            _core.note_input(time.perf_counter_ns() - began_ns)

    return timed
