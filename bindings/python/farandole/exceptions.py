"""What can go wrong. A call that is wrong by itself raises ValueError and concerns nobody else.

``farandole._core`` raises these classes; the names of the first one are Horovod's.
"""

from typing import Any

__all__ = ["AbortedError", "HorovodInternalError", "MismatchError", "OperationTimeoutError", "PeerLostError"]


#: The class and the attributes of the last error that was made, for the launcher; not the error, whose traceback
#: would keep memory.
latest: list[Any] = []


class HorovodInternalError(RuntimeError):
    """A collective did not complete. Base of the more precise errors below.

    An error called final ends the work of all ranks: every later operation raises the same until the
    next ``init()``. On the other ranks it reads "rank 3 failed: ...", with the cause.

    Attributes:
        failed_ranks: The ranks that failed, ascending; empty where none did, as in a mismatch, or
            where nobody knows which.
        cause: What failed on the first of them, without names in front; None: unknown, as below,
            where all attributes are of that rank.
        tensor: The name of the operation that failed, or in a group of the tensor; None: not one.
        kind: "killed", "exited", "out of memory", "stopped", "frozen", "link down", "diverged",
            "blocked in python", "blocked in c", or "error": its engine, or a library, reported one.
        signal: The number of the signal that killed it.
        exit_code: Of a process that exited before it left the job.
        host: Its host.
        pid: Its process.
        last: Its last operation, such as ``allreduce "loss"``.
        last_age_s: Seconds from that to the failure.
    """

    failed_ranks: tuple[int, ...] = ()
    cause: str | None = None
    tensor: str | None = None
    kind: str | None = None
    signal: int | None = None
    exit_code: int | None = None
    host: str | None = None
    pid: int | None = None
    last: str | None = None
    last_age_s: float | None = None

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        latest[:] = type(self), vars(self)


class MismatchError(HorovodInternalError):
    """Ranks disagree about one operation, which was refused on all of them; the next one works."""


class PeerLostError(HorovodInternalError):
    """A peer is gone. Final."""


class AbortedError(HorovodInternalError):
    """The process set ended, a rank's backward pass failed, or Farandole was shut down."""


class OperationTimeoutError(HorovodInternalError):
    """A started operation made no progress within its deadline. Final."""
