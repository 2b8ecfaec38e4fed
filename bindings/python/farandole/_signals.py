"""Signals that ask a rank for something, as to stop: who takes note of them, and what the launcher is told."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from farandole import basics

_living: list[SignalNotes] = []


class SignalNotes:
    """Takes note of signals, which then end the process no more. It is their handler.

    A handler that the program had set is called as well; one that it sets later takes the place of this one. Forked
    children have the handlers from before. ``farandolerun`` is told that SIGTERM makes this rank stop by itself.

    Thread safety: handlers run on the main thread, and can be set there only.

    Args:
        note: Is called with the number of a signal that has come.
    """

    def __init__(self, note: Callable[[int], None]) -> None:
        self._note = note
        self._before: dict[int, Any] = {}

    def add(self, numbers: Iterable[int]) -> bool:
        """Takes note of these from now on. False: this is not the main thread, and nothing was done."""
        if threading.current_thread() is not threading.main_thread():
            return False
        for number in set(numbers) - self._before.keys():
            self._before[number] = signal.getsignal(number)
            signal.signal(number, self)
            if number == signal.SIGTERM:
                basics.tell_launcher(json.dumps({"stops": True}))
        if self not in _living:
            _living.append(self)
        return True

    def close(self) -> None:
        """Sets back the handlers from before where this is the handler still."""
        if self in _living:
            _living.remove(self)
        for number, before in self._before.items():
            if signal.getsignal(number) is self:
                signal.signal(number, signal.SIG_DFL if before is None else before)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._note(number)
        before = self._before[number]
        if callable(before) and before is not signal.default_int_handler:  # that one is Python's
            before(number, frame)


def _forget() -> None:
    """In a forked child, which somebody may want to end by SIGTERM."""
    while _living:
        _living[-1].close()


os.register_at_fork(after_in_child=_forget)
