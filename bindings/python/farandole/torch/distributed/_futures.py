"""Futures of collectives: the threads that end them, and those whose value C++ takes for a list of tensors."""

from __future__ import annotations

import functools
import queue
import threading
import warnings
from typing import Any

import torch


class Completer:
    """Threads that end works' futures: as many as there are at a time, since one may need what follows another."""

    NAME = "farandole-futures"  # errors.cc counts them

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = 0  # of these, without works that are in the queue for them
        self._lock = threading.Lock()

    def add(self, work: Any) -> None:
        """Ends the future of ``work``."""
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                self._threads.append(threading.Thread(target=self._run, name=self.NAME, daemon=True))
                self._threads[-1].start()
        self._queue.put(work)

    def stop(self, timeout_s: float = 0) -> None:
        with self._lock:
            threads, self._threads, self._idle = self._threads, [], 0
        for _ in threads:
            self._queue.put(None)
        for thread in threads:
            if thread is not threading.current_thread():  # what follows a future may end the group
                thread.join(timeout_s)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work.fl_end()
            del work  # its tensors need not live until the next one comes
            with self._lock:
                self._idle += 1


def _after(ended: torch.jit.Future[int], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """TorchScript, as is what follows."""
    torch.jit.wait(ended)
    return tensors


def _follow(ended: torch.jit.Future[int], tensors: list[torch.Tensor]) -> torch.jit.Future[list[torch.Tensor]]:
    return torch.jit.fork(_after, ended, tensors)  # type: ignore[no-any-return]


@functools.cache
def _compiled_follow() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates it, and has nothing else that makes such a future
        return torch.jit.script(_follow)


def of_tensor_list(ended: Any, tensors: list[torch.Tensor]) -> Any:
    """A future of the tensors, after another one, whose value C++ takes for a list of tensors.

    A torch.futures.Future has an object of Python's. DDP's C++ takes that too, but for its hook that sends 16 bits.
    This takes 80 us, so other dtypes do without.
    """
    try:
        return _compiled_follow()(ended, tensors)
    except RuntimeError:  # a torch without TorchScript
        return ended
