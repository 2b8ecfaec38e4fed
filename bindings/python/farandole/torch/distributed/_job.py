"""The job of a group: the engine of its ranks, which torch numbers otherwise, and the store at which they meet."""

from __future__ import annotations

import contextlib
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore
from torch._compile import _disable_dynamo
from torch.distributed import distributed_c10d
from torch.optim.optimizer import register_optimizer_step_post_hook

from farandole import _core, _horovod, _metrics, _store, basics
from farandole.exceptions import (
    AbortedError,
    GenerationEndedError,
    HorovodInternalError,
    MismatchError,
    OperationTimeoutError,
)
from farandole.torch.distributed._futures import Completer
from farandole.torch.optimizer._steps import steps_of

_of_all_ranks: weakref.WeakSet[Job] = weakref.WeakSet()  # whose steps optimizers end
_is_hooked = False
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
        self._is_numbered_as_job = self.ranks == list(range(size))
        self._has_pass_ended = False  # since an optimizer's last step
        self.has_started = False  # a collective, since the last step of training
        self.timeout_s = min(timeout_s, LONGEST_S)
        self.has_seen_failure = False  # one that ended the group
        self.completer = Completer()
        self.at_end: weakref.WeakSet[Any] = weakref.WeakSet()  # of works that a backward pass ends
        self.store: Any = store if store is not None else HashStore()
        self.abort_hooks: dict[int, Callable[[], None]] = {}  # to be called when the group ends by an error
        self._has_aborted = False
        self.context: Any = _NotJoined(not_joined) if not_joined else self._join(store)

    def _join(self, store: Any) -> basics.Context:
        _metrics.read_targets()
        context = connect(store, self.rank, self.size, self.timeout_s)
        world = distributed_c10d.GroupMember.WORLD
        if self._is_numbered_as_job and (world is None or world.size() == self.size):
            _metrics.follow_group(context)
            _of_all_ranks.add(self)
            _watch_optimizers()
        return context

    def raise_if_lost(self) -> None:
        """Raises the error of a group that has lost a rank. Ranks that have left it do not concern the others here."""
        try:
            self.context.core.raise_if_ended()
        except GenerationEndedError:  # this rank has left it: nobody comes any more
            raise
        except AbortedError:
            pass

    def raise_loss(self) -> None:
        """As :meth:`raise_if_lost`, with ranks of torch's job."""
        try:
            self.raise_if_lost()
        except HorovodInternalError as loss:
            raise self.renumber(loss) from None

    def pass_ended(self, work: Any) -> None:
        """One of ``at_end`` has ended; with the last one, a step of DDP. Its ranks are named as if 0 were the first."""
        self.at_end.discard(work)
        if not self.at_end and self._is_numbered_as_job:
            self._has_pass_ended = True
            self._end_step()

    def optimizer_stepped(self) -> None:
        """Which ends a step where no backward pass does, as with FSDP2; of several optimizers in turn the first one,
        unless collectives of the group came between them. All ranks start the same ones, so they end the same steps.
        """
        has_ended, self._has_pass_ended = self._has_pass_ended, False
        if self.has_started and not has_ended:
            self._end_step()

    def _end_step(self) -> None:
        self.has_started = False
        with contextlib.suppress(HorovodInternalError):  # what is waited for says it, too
            self.context.core.end_step()

    def announce_leaving(self) -> None:
        """To ranks that wait for a first message; in a group of two there are none."""
        if self.size > 2:
            with contextlib.suppress(Exception):  # of a store that has gone with its rank
                self.raise_if_lost()
                self.store.set(_left(self.rank), "")

    def has_left(self, rank: int, store: Any) -> bool:
        """Whether a rank, by its number in the group, has announced that; ``store``: :meth:`own_store`."""
        return bool(store.check([_left(rank)]))

    def own_store(self) -> Any:
        """The group's store, by a connection of its own where the store has one: a wait blocks that for all threads."""
        return self.store.clone() if callable(getattr(self.store, "clone", None)) else self.store

    def set_timeout(self, timeout_s: float) -> None:
        """Of what waits, and of what is started from now on; rank 0's counts."""
        limit_s = min(timeout_s, LONGEST_S)
        self.context.core.set_timeout(limit_s)
        self.timeout_s = limit_s

    def cause_of(self, error: Exception, what: str) -> Exception:
        """Why ``what`` happened at torch's store, which goes with its rank: the group says a little later which one."""
        until_s = time.monotonic() + 1.0
        while not isinstance(error, HorovodInternalError):
            try:
                self.raise_if_lost()
            except HorovodInternalError as loss:
                error = loss
            else:
                if time.monotonic() > until_s:
                    return with_ranks_of_job(HorovodInternalError(f"{what}: {error}"))
                time.sleep(0.02)
        return self.renumber(error)

    def run_abort_hooks(self) -> None:
        """Once, if the group has ended by an error."""
        try:
            self.raise_if_lost()
        except HorovodInternalError:
            is_first, self._has_aborted = not self._has_aborted, True
            for number, hook in list(self.abort_hooks.items()) if is_first else []:
                try:
                    hook()
                except Exception as error:
                    warnings.warn(f"farandole: abort hook {number} failed: {error}", RuntimeWarning, stacklevel=2)

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
        if self.abort_hooks:
            self.run_abort_hooks()
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

    def set_timeout(self, _timeout_s: float) -> None:
        """The next job has it from the group."""

    def __getattr__(self, _name: str) -> Any:
        raise HorovodInternalError(self._why)


def _watch_optimizers() -> None:
    """From now on. Again does nothing."""
    global _is_hooked
    if not _is_hooked:
        # Not traced by torch.compile(optimizer.step). torch.compiler.disable() would import the compiler now.
        register_optimizer_step_post_hook(_disable_dynamo(_optimizer_stepped))
        _is_hooked = True


def _optimizer_stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Of a DistributedOptimizer the round of gradients is the step."""
    for job in list(_of_all_ranks) if steps_of(optimizer) is None else ():
        job.optimizer_stepped()


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
