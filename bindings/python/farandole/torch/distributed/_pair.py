"""Messages between two ranks of a group, which travel in a job of those two."""

from __future__ import annotations

import collections
import threading
import time
import types
from concurrent import futures
from concurrent.futures import Future
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore

from farandole import _core, basics
from farandole.exceptions import AbortedError, HorovodInternalError, OperationTimeoutError
from farandole.ops import BROADCAST, IN_PLACE
from farandole.torch import _calls
from farandole.torch.distributed._job import LONGEST_S, Job, connect, with_ranks_of_job

#: Messages from one rank to another, with one tag, that may be in flight at a time; one more waits. A byte's values.
_MOST_MESSAGES = 256


class Later:
    """The handle of a message whose ranks have yet to join."""

    def __init__(self, job: Job) -> None:
        self.started: Future[_core.Work] = Future()
        self._job = job

    def poll(self) -> bool:
        return self.started.done() and (self.started.exception() is not None or self.started.result().poll())

    @property
    def is_complete(self) -> bool:
        return self.started.done() and (self.started.exception() is not None or self.started.result().is_complete)

    def order_stream(self) -> None:
        self.started.result().order_stream()

    def wait(self) -> Any:
        while not futures.wait([self.started], 1.0).done:  # the thread that joins may be stuck in torch's store
            self._job.raise_loss()
        return self.started.result().wait()


class Pair:
    """The job in which this rank and another one of its group send messages to one another.

    A message is a broadcast in it, named by sender and tag and by how many such came before; so one that
    is received with another size or dtype is an error on both ranks. Joining waits for the other rank, so
    a thread does it, which then starts what has come meanwhile, in order.

    Thread safety: any thread. Lifetime: its group closes it.
    """

    def __init__(self, job: Job, peer: int) -> None:
        self._job, self._peer, self._members = job, peer, sorted((job.rank, peer))
        self.ranks = [job.ranks[rank] for rank in self._members]
        self._kinds = {is_sent: self._kind(is_sent) for is_sent in (False, True)}
        self._numbers: dict[int, bytearray] = {}  # of the next messages; a byte for each tag, by 256 tags
        self._numbers_lock = threading.Lock()
        self._lock = threading.Lock()  # of what follows
        self._waiting: collections.deque[tuple[Later, _core.Options, str, torch.Tensor, Any]] = collections.deque()
        self._context: basics.Context | None = None
        self._is_ready = False  # nothing waits any more
        self._error: Exception | None = None
        self._is_closing = False
        self._thread: threading.Thread | None = None
        if job.size == 2:
            self._context, self._is_ready = job.context, True
        else:
            self._thread = threading.Thread(target=self._join, name="farandole-pair", daemon=True)
            self._thread.start()

    def start(self, tensor: torch.Tensor, is_sent: bool, tag: int) -> Any:
        """Starts a message, of which it gives the handle. ``tensor``: contiguous, of one dimension."""
        options, text = self._kinds[is_sent]
        name = f"{text}, tag {tag}, message {self._number(is_sent, tag)}"
        if not self._is_ready:
            with self._lock:
                if self._error is not None:
                    raise self._error
                if not self._is_ready:
                    later = Later(self._job)
                    stream = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None
                    self._waiting.append((later, options, name, tensor, stream))
                    return later
        assert self._context is not None
        return _calls.start(self._context.core, options, name, tensor, IN_PLACE)

    def set_timeout(self, timeout_s: float) -> None:
        """As of the group."""
        with self._lock:
            if self._context is not None:
                self._context.core.set_timeout(timeout_s)

    def close(self, at_exit: bool = False) -> None:
        """Leaves the job once the other rank does."""
        self._is_closing = True
        if self._thread not in (None, threading.current_thread()):  # of an abort hook
            self._thread.join(5.0)  # it may be stuck in torch's store
        if self._context is not None and self._context is not self._job.context:
            self._context.close(at_exit)

    def abort(self) -> None:
        """Leaves the job at once."""
        if (core := self.give_up()) is not None:
            core.close_at_exit(0.0)

    def give_up(self) -> _core.Context | None:
        """Joins no more; its core if it has one that is not the group's, and is to be closed."""
        with self._lock:
            self._is_closing = True
        if self._context is None or self._context is self._job.context:
            return None
        return self._context.core

    def __lt__(self, other: Pair) -> bool:
        """The order in which all ranks close them, so that they cannot wait for one another in a circle."""
        return self._members < other._members

    def _kind(self, is_sent: bool) -> tuple[_core.Options, str]:
        root = self._members.index(self._job.rank if is_sent else self._peer)
        text = f"group {self._job.name}: rank {self.ranks[root]} to rank {self.ranks[1 - root]}"
        return _core.Options(BROADCAST, root=root, function="send"), text

    def _number(self, is_sent: bool, tag: int) -> int:
        """Of the next message, modulo _MOST_MESSAGES."""
        page, at = 2 * (tag >> 8) + is_sent, tag & 255
        with self._numbers_lock:
            numbers = self._numbers.get(page) or self._numbers.setdefault(page, bytearray(256))
            number = numbers[at]
            numbers[at] = (number + 1) % _MOST_MESSAGES
        return number

    def _join(self) -> None:
        try:
            context = self._rendezvous()
        except Exception as error:
            cause = self._job.cause_of(error, f"ranks {self.ranks} cannot meet at torch's store")
            with self._lock:  # not for the user's abort hooks, which may leave the group
                self._error = cause
                for later, *_ in self._waiting:
                    later.started.set_exception(self._error)
                self._waiting.clear()
            return
        with self._lock:
            self._context = context
            if self._is_closing:
                context.core.close_at_exit(0.0)
            else:
                context.core.set_timeout(self._job.timeout_s)  # which may have been set meanwhile
        while not self._is_ready:
            with self._lock:
                self._is_ready = not self._waiting
                waiting = None if self._is_ready else self._waiting.popleft()
            if waiting is not None:
                self._start_later(context, *waiting)

    @staticmethod
    def _start_later(
        context: basics.Context, later: Later, options: _core.Options, name: str, tensor: torch.Tensor, stream: Any
    ) -> None:  # fmt: skip
        """Without the lock, which whoever aborts the group needs: it may wait until others are received."""
        try:
            with torch.cuda.stream(stream):
                later.started.set_result(_calls.start(context.core, options, name, tensor, IN_PLACE))
        except Exception as error:
            later.started.set_exception(error)

    def _rendezvous(self) -> basics.Context:
        """Joins the other rank when it comes, however late."""
        number = self._members.index(self._job.rank)
        shared = self._job.own_store()
        store = PrefixStore(f"pair {self._members}", shared)

        def is_there(keys: list[str]) -> bool:
            self._check_peer(shared)
            return bool(store.check(keys))

        store.set(f"has come {number}", "")
        pause_s, until_s = 0.0005, time.monotonic() + (self._job.timeout_s or LONGEST_S)
        while not is_there([f"has come {1 - number}"]):
            if time.monotonic() > until_s:
                peer = f"rank {self._job.ranks[self._peer]}"
                error = OperationTimeoutError(f"{peer} started no message within {self._job.timeout_s:g} s")
                raise with_ranks_of_job(error)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
        calls = types.SimpleNamespace(set=store.set, get=store.get, wait=store.wait, check=is_there)
        try:
            return connect(calls, number, 2, self._job.timeout_s, in_order=False)
        except HorovodInternalError as error:
            raise self._job.renumber(error, self.ranks) from None

    def _check_peer(self, store: Any) -> None:
        """Raises an error if the other rank will not come any more."""
        if self._is_closing:
            raise with_ranks_of_job(AbortedError(f"group {self._job.name} has been left by this rank"))
        self._job.raise_if_lost()
        if self._job.has_left(self._peer, store):
            rank = self._job.ranks[self._peer]
            raise with_ranks_of_job(AbortedError(f"group {self._job.name} has been left by rank {rank}"))
