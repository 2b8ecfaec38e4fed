"""The default context: the one place of the package that holds state for the whole process.

Everything else asks :func:`current` for the context it works on. Threads that act as ranks of their
own (tests, tools) put theirs in place with :func:`using`.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import contextvars
import ctypes
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

from farandole import _core
from farandole.exceptions import HorovodInternalError

_NOT_INITIALIZED = "Farandole has not been initialized; use farandole.init()."
_FORKED = (
    "Farandole was initialized before this process was forked and cannot be used in the child: "
    "call it in the parent process only."
)
_RANK_PROCESS = "FARANDOLE_RANK_PROCESS"  # set by the C library when this process has joined


class Topology(NamedTuple):
    """Where a rank stands; see the functions of the same names."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


class Rank:
    """A context and what Python keeps with it.

    Attributes:
        context: The engine.
        topology: Where this rank stands.
        operations: (kind, function, name) -> (description, prepared operation).
        in_flight: Started operations whose memory must stay alive, oldest first.
        unseen_failures: Work that failed and that nobody has waited for -> why.
        interrupted: (function, name) and handle of the last blocking calls that an exception ended.
        exchanges: The gradient exchanges of wrapped optimizers that still live.
        exchange_count: How many there ever were; the order gives their gradients' names.
        wrap_checks: By that order: whether all ranks wrapped the same optimizer.
        joins: How often this rank joined.
    """

    def __init__(self, context: _core.Context) -> None:
        self.context = context
        self.topology = Topology(*context.topology())
        self.operations: dict[tuple[int, str | None, str], tuple[object, _core.Operation]] = {}
        self.in_flight: dict[Any, None] = {}
        self.lent: dict[Any, None] = {}
        self.unseen_failures: dict[Any, str] = {}
        self.interrupted: collections.deque[tuple[tuple[str, str | None], Any]]
        self.interrupted = collections.deque(maxlen=16)
        self.exchanges: weakref.WeakSet[Any] = weakref.WeakSet()
        self.exchange_count = 0
        self.wrap_checks: list[Any] = []
        self.joins = 0

    def close(self) -> None:
        """Leaves the job. Work in flight ends with an error first, so its memory may go then.

        Failures before that which nobody has seen are told in one warning. Where a signal's handler
        raises meanwhile (Ctrl-C), the next call goes on.
        """
        for held in list(self.in_flight):
            held.release_if_finished()
        try:
            self.context.close()
        finally:
            if self.context.is_closed:
                for exchange in list(self.exchanges):
                    exchange.close()
                self.operations.clear()
                self.in_flight.clear()
                self.lent.clear()
                self.interrupted.clear()
                self._warn_of_unseen_failures()

    def _warn_of_unseen_failures(self) -> None:
        failures = list(self.unseen_failures.values())
        self.unseen_failures.clear()
        if not failures:
            return
        what = "an asynchronous operation failed and was never synchronized:"
        if len(failures) > 1:
            what = (
                f"{len(failures)} asynchronous operations failed and were never synchronized; "
                "the first:"
            )
        text = f"rank {self.topology.rank}: {what} {failures[0]}"
        # No line of the caller is to blame, and at exit there is none.
        warnings.warn_explicit(text, RuntimeWarning, "farandole", 0)


class _Process:
    default: Rank | None = None
    init_lock = threading.Lock()
    is_forked_child = False


_thread_rank: contextvars.ContextVar[Rank | None] = contextvars.ContextVar(
    "farandole_rank", default=None
)


def init() -> None:
    """Joins the job this process was started in: ``mpirun``, or alone when there is no launcher.

    Collective: every rank calls it. Calling it again does nothing. Settings come from the
    ``FARANDOLE_*`` and ``HOROVOD_*`` environment variables. At exit :func:`shutdown` is called.
    Ctrl-C ends it with KeyboardInterrupt; then call it again to go on, or exit.

    Raises:
        ValueError: A setting is junk; the message names the variable and its range.
        OperationTimeoutError: Some rank has not come within FARANDOLE_INIT_TIMEOUT_S (60); this
            process cannot join the job any more and should exit.
        HorovodInternalError: The job cannot be joined; the message says why. So it is in a process
            that a rank has started: it inherits the rank's place in the job.
    """
    if is_initialized():
        return
    if _Process.is_forked_child:
        raise HorovodInternalError(_FORKED)
    with _Process.init_lock:
        if is_initialized():
            return
        shutdown()  # the rest of one that was interrupted
        _Process.default = Rank(_core.Context.init())
        _mark_copies_of_the_environment()


def _mark_copies_of_the_environment() -> None:
    """``os.environ`` does not see what C sets; programs that a rank starts get copies of it."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    mark = getenv(_RANK_PROCESS.encode())
    if mark is not None:
        os.environ[_RANK_PROCESS] = os.fsdecode(mark)


def shutdown() -> None:
    """Leaves the job once every rank does. Without :func:`init` it does nothing.

    Ctrl-C ends it with KeyboardInterrupt: no collective can be called any more; call it again to
    wait on, within the same time limit, or exit.

    Raises:
        OperationTimeoutError: Some rank has not left within FARANDOLE_SHUTDOWN_TIMEOUT_S (30), or a
            thread of this rank is stuck inside a library and was left behind.
        HorovodInternalError: What ended the job before.
    """
    rank = _Process.default
    if rank is None:
        return
    try:
        rank.close()
    finally:
        if rank.context.is_closed:  # else Ctrl-C came first
            _Process.default = None


def find() -> Rank | None:
    """The context of this thread, else the default one, if it is open."""
    rank = _thread_rank.get() or _Process.default
    return rank if rank is not None and rank.context.is_open else None


def current() -> Rank:
    """As :func:`find`, for collectives.

    Raises:
        HorovodInternalError: There is none.
    """
    rank = find()
    if rank is None:
        raise HorovodInternalError(_why_none())
    return rank


def _why_none() -> str:
    return _FORKED if _Process.is_forked_child else _NOT_INITIALIZED


def topology() -> Topology:
    """Where this rank stands.

    Raises:
        ValueError: Not initialized, or initialized by the parent of this forked process.
    """
    rank = find()
    if rank is None:
        raise ValueError(_why_none())
    return rank.topology


@contextlib.contextmanager
def using(rank: Rank) -> Iterator[Rank]:
    """Makes ``rank`` the context of the calling thread for the length of a ``with`` block."""
    token = _thread_rank.set(rank)
    try:
        yield rank
    finally:
        _thread_rank.reset(token)


def is_initialized() -> bool:
    """Whether collectives can be called."""
    return find() is not None


def rank() -> int:
    """This process's number, 0 <= rank() < size(). ValueError when not initialized, as below."""
    return topology().rank


def size() -> int:
    """The number of ranks of the job."""
    return topology().size


def local_rank() -> int:
    """This rank's number among the ranks of its host."""
    return topology().local_rank


def local_size() -> int:
    """The number of ranks on this host."""
    return topology().local_size


def cross_rank() -> int:
    """This rank's number among the ranks with the same :func:`local_rank`, one per host."""
    return topology().cross_rank


def cross_size() -> int:
    """The number of hosts that have a rank with this :func:`local_rank`."""
    return topology().cross_size


def counters() -> dict[str, int]:
    """What the engine has done so far: messages, batches, wake-ups, bytes, by name."""
    return current().context.counters()


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Writes from now on what happens when, for chrome://tracing or ui.perfetto.dev.

    Args:
        file_path: A new file. ``{rank}`` in it becomes the rank, and every rank that calls this writes
            its own; without it rank 0 alone writes.
        mark_cycles: Whether to mark the moments at which rank 0 decides what runs.
    Raises:
        ValueError: Another file is being written.
        HorovodInternalError: The file cannot be opened.
    """
    current().context.start_timeline(os.fspath(file_path), mark_cycles)


def stop_timeline() -> None:
    """Writes the rest of the timeline and closes its file. Without one it does nothing."""
    current().context.stop_timeline()


def _become_inert() -> None:
    """In a forked child: no engine thread lives here, so nothing is used and nothing finalised."""
    _core.Context.forget_all()
    _Process.is_forked_child = _Process.is_forked_child or _Process.default is not None
    _Process.default = None
    _Process.init_lock = threading.Lock()


os.register_at_fork(after_in_child=_become_inert)
def _leave_at_exit() -> None:
    try:
        shutdown()
    except HorovodInternalError as error:
        if str(error).startswith("shutdown:"):
            print(f"farandole: {error}; ranks still at work may be ended now", file=sys.stderr)
        elif not hasattr(sys, "last_value"):  # no traceback has said it
            print(f"farandole: {error}", file=sys.stderr)


atexit.register(_leave_at_exit)
