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
        cause: What failed on the first of them, without names in front; None: unknown.
        tensor: The name of the operation that failed, or in a group of the tensor; None: not one.
    """

    failed_ranks: tuple[int, ...] = ()
    cause: str | None = None
    tensor: str | None = None

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
