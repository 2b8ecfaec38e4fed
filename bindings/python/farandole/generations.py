"""An elastic job's generations: how a rank goes on with other ranks."""

from __future__ import annotations

import contextlib

from farandole import _horovod, basics, exceptions, stopping
from farandole.exceptions import HorovodInternalError

__all__ = ["change_is_due", "generation", "members", "reinit"]


def reinit() -> None:
    """Goes on in an elastic job with the ranks that are left and those that have come: its next generation.

    Every rank calls it: after an error that says that ranks are lost or have left, or that the members change; or
    when :func:`change_is_due`. :func:`farandole.rank` and :func:`farandole.size` are new, wrapped optimizers go on by
    themselves, process sets have to be added again. What all ranks have started is completed if they call this within
    2 s of each other. After another exception than ValueError this process has left the job.

    Raises:
        ValueError: The job is not elastic: see :func:`farandole.init`.
        JobHaltedError: Others may go on, or have gone on, without this process.
    """
    if basics._Process.is_forked_child:
        raise HorovodInternalError(basics._FORKED)
    with basics._Process.init_lock:
        ended = basics._Process.default
        if ended is None:
            raise HorovodInternalError(basics._NOT_INITIALIZED)
        basics._Process.announce(None)
        try:
            with basics.shown_briefly():
                core = ended.core.reinit()
        finally:
            if ended.core.is_closed:
                basics._Process.default = None
                ended.close()  # what Python keeps with it
            elif ended.core.is_open:
                basics._Process.announce(ended)
        exceptions.latest.clear()
        basics._Process.default = basics.Context(core, stop=stopping.carried(ended.stop))
        _horovod.report(*basics._Process.default.topology[:2])
        with contextlib.suppress(HorovodInternalError):  # the next operation says it again
            basics._compare_hosts(basics._Process.default)
        basics._Process.announce(basics._Process.default)


def generation() -> int:
    """Which generation of an elastic job this is: 1, then growing numbers, alike on all ranks; else 1."""
    return basics.current(ValueError).core.generation()


def change_is_due() -> bool:
    """Whether processes wait to be let into this elastic job, as :func:`reinit` of all ranks does. Rank 0 is sure to
    know."""
    return basics.current(ValueError).core.change_is_due()


def members() -> str:
    """Where the ranks of this elastic job listen for newcomers, ``"host:port,..."``; "" if it is not elastic."""
    return basics.current(ValueError).core.members()
