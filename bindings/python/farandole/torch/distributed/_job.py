"""The job of a group: the engine of its ranks, which torch numbers otherwise, and the store at which they meet."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any

from farandole import _core, _horovod, _store, basics
from farandole.exceptions import (
    AbortedError,
    GenerationEndedError,
    HorovodInternalError,
    MismatchError,
    OperationTimeoutError,
)
from farandole.torch.distributed._futures import Completer

LONGEST_S = 365 * 86400.0  # that the library waits
_SHUTDOWN_S = "FARANDOLE_STALL_SHUTDOWN_S"  # its time limit is a group's time-out


class Job:
    """The ranks of a group.

    Args:
        store: torch's, which the group has for itself.
        rank: This one's number in the group.
        size: How many ranks it has.
        ranks: Their numbers in torch's job; empty: the same.
        timeout_s: How long a tensor waits for a rank; 0: without limit.
        not_joined: Why the ranks do not join; every operation raises it. Empty: they do.

    Thread safety: any thread.
    """

    def __init__(
        self, store: Any, rank: int, size: int, ranks: Sequence[int], timeout_s: float, not_joined: str = ""
    ) -> None:  # fmt: skip
        self.name = ""  # of the group; torch tells it later
        self.rank, self.size = rank, size
        self.ranks = list(ranks) or list(range(size))
        self.timeout_s = min(timeout_s, LONGEST_S)
        self.has_seen_failure = False  # one that ended the group
        self.completer = Completer()
        self.at_end: weakref.WeakSet[Any] = weakref.WeakSet()  # of works that a backward pass ends
        self._store = store
        self.context: Any = _NotJoined(not_joined) if not_joined else connect(store, rank, size, self.timeout_s)

    def raise_if_lost(self) -> None:
        """Raises the error of a group that has lost a rank. Ranks that have left it do not concern the others here."""
        try:
            self.context.core.raise_if_ended()
        except GenerationEndedError:  # this rank has left it: nobody comes any more
            raise
        except AbortedError:
            pass

    def announce_leaving(self) -> None:
        """To ranks that wait for a first message; in a group of two there are none."""
        if self.size > 2:
            with contextlib.suppress(Exception):  # of a store that has gone with its rank
                self.raise_if_lost()
                self._store.set(_left(self.rank), "")

    def has_left(self, rank: int, store: Any) -> bool:
        """Whether a rank, by its number in the group, has announced that; ``store``: :meth:`own_store`."""
        return bool(store.check([_left(rank)]))

    def own_store(self) -> Any:
        """The group's store, by a connection of its own where the store has one: a wait blocks that for all threads."""
        return self._store.clone() if callable(getattr(self._store, "clone", None)) else self._store

    def renumber(self, error: Exception, ranks: list[int] | None = None) -> Exception:
        """An error, once with ranks of torch's job instead of those of the group, or of the job of ``ranks``."""
        ranks = self.ranks if ranks is None else ranks
        if not isinstance(error, HorovodInternalError) or hasattr(error, "is_renumbered"):
            return error
        vars(error).update(is_renumbered=True)
        if ranks != list(range(len(ranks))):
            error.failed_ranks = tuple(ranks[rank] for rank in error.failed_ranks)
            error.args = (f"group {self.name} of ranks {ranks}, numbered from 0: {error}",)
        if not isinstance(error, MismatchError):
            self.has_seen_failure = True
        if isinstance(error, OperationTimeoutError):  # named as the user has set it
            error.args = (str(error).replace(_SHUTDOWN_S, "the timeout of the group"),)
        return error


class _NotJoined:
    """In place of the context, and its core, of a group whose ranks have not joined."""

    def __init__(self, why: str) -> None:
        self.core, self._why = self, why

    def close(self, at_exit: bool = False) -> None:
        """As of a context."""

    def close_within(self, _limit_s: float) -> bool:
        return True

    def close_at_exit(self, _limit_s: float) -> None:
        """As of a core."""

    def __getattr__(self, _name: str) -> Any:
        raise HorovodInternalError(self._why)


def connect(store: Any, rank: int, size: int, timeout_s: float, in_order: bool = True) -> basics.Context:
    """Joins the ranks that have the same store; each group has one of its own."""
    with _horovod.settings():
        found = _store.calls(store) if size > 1 else None
        return basics.Context(_core.Context.init(rank, size, None, None, found, True, timeout_s, in_order))


def with_ranks_of_job(error: HorovodInternalError) -> HorovodInternalError:
    """An error that speaks of ranks by their numbers in torch's job already; see :meth:`Job.renumber`."""
    vars(error).update(is_renumbered=True)
    return error


def _left(rank: int) -> str:
    """The key that tells that a rank, by its number in the group, has left it."""
    return f"has left {rank}"
