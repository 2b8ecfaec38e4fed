"""Stopping after the same step on all ranks, when a signal to any of them asks for it."""

from __future__ import annotations

import dataclasses
import signal
import warnings
from collections.abc import Sequence

from farandole import basics, ops
from farandole._signals import SignalNotes
from farandole.exceptions import HorovodInternalError

__all__ = ["stop_requested"]

_NAME = "farandole.stop"
_WHEN = (signal.SIGTERM,)


class _Signals:
    """Of this process."""

    have_come = False
    were_warned_of = False
    seen: Sequence[int] = ()  # in the last call


@dataclasses.dataclass
class _Stop:
    """What a rank knows in a generation."""

    is_asked: bool = False  # by the generation before
    is_told: bool = False
    vote: ops.Handle | None = None


def _note(_number: int) -> None:
    _Signals.have_come = True


_notes = SignalNotes(_note)


def stop_requested(wanted: bool = False, signals: Sequence[int] = _WHEN) -> bool:
    """Whether all ranks are to stop now: some rank got a signal, as from Slurm's ``--signal`` or before a spot machine
    goes. Every rank calls it once per step, and all get True in the same call::

        for batch in loader:
            train(batch)
            if farandole.stop_requested():
                break

    A call gives the answer to what the call before it asked, so it waits for no rank that has taken the step before:
    True comes at most two steps after the signal. It stays True; no call after the first True waits for other ranks.
    With one rank it comes in the same step. After :func:`farandole.reinit` ranks ask each other anew, and a True from
    before comes again in the second call. A rank whose loop ends while others go on is waited for, unless it calls
    :func:`farandole.join` or leaves the job, as in any collective.

    Args:
        wanted: This rank wants to stop, for a reason of its own such as a time limit.
        signals: From the first call that names a signal on, it no longer ends the process, until that ends. A handler
            that the program had set for it is called as well; one that is set later takes the place of ours. In
            forked processes the signal does what it did before. Handlers can be set on the main thread only: in
            another one the call asks the other ranks all the same, and a warning says that it sets none.
    Raises:
        HorovodInternalError: As of a collective: a rank is lost, has left, or there is no job.
    """
    if signals is not _Signals.seen:
        _take(signals)
    context = basics.current()
    if context.stop is None:
        context.stop = _Stop()
    stop: _Stop = context.stop
    if stop.vote is not None:
        _conclude(stop, stop.vote)
    is_asked = wanted or _Signals.have_come or stop.is_asked
    if context.topology.size == 1:
        stop.is_told = stop.is_told or is_asked
    elif not stop.is_told:
        how = ops.reduction_options(ops.ALLREDUCE, ops.Max, 1.0, 1.0, basics.global_process_set)
        stop.vote = ops.start(how, bytearray([is_asked]), _NAME, ops.IN_PLACE | ops.INTERNAL)
    return stop.is_told


def carried(stop: _Stop | None) -> _Stop | None:
    """What a rank knows at the beginning of the next generation."""
    return stop and _Stop(stop.is_asked or stop.is_told)


def _conclude(stop: _Stop, vote: ops.Handle) -> None:
    try:
        (told,) = vote.wait()
    except HorovodInternalError:
        stop.vote = None
        raise
    stop.vote, stop.is_told = None, bool(told)


def _take(signals: Sequence[int]) -> None:
    if _notes.add(signals):
        _Signals.seen = signals
    elif signals and not _Signals.were_warned_of:
        _Signals.were_warned_of = True
        text = "stop_requested() takes no note of signals: its first call is to be on the main thread, and this is not"
        warnings.warn(text, RuntimeWarning, stacklevel=3)
