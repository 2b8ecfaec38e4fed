"""What can go wrong. A call that is wrong by itself raises ValueError and concerns nobody else.

``farandole._core`` raises these classes; the names of the first one are Horovod's.
"""

from typing import Any

__all__ = [
    "AbortedError", "GenerationEndedError", "HorovodInternalError", "JobHaltedError", "MismatchError",
    "OperationTimeoutError", "PeerLostError",
]  # fmt: skip


#: The class and the attributes of the last error that was made, for the launcher; not the error, whose traceback
#: would keep memory.
latest: list[Any] = []


class HorovodInternalError(RuntimeError):
    """A collective did not complete. The base of the errors below.

    A final error ends the work of all ranks: every later operation raises the same error until the next
    ``init()``. On the other ranks its message is "rank 3 failed: ..." with the cause.

    Attributes:
        failed_ranks: The ranks that failed, ascending; empty if none failed, as in a mismatch, or if it is
            unknown.
        cause: What failed on the first of these ranks; None: unknown. The attributes below also describe that
            rank.
        tensor: The name of the failed operation, or of the tensor if it was a group; None: no operation
        failed.
        kind: "killed", "exited", "out of memory", "stopped", "frozen", "link down", "diverged",
            "blocked in python", "blocked in c", or "error": its engine or a library reported an error.
        signal: The number of the signal that killed the rank.
        exit_code: The exit code of a rank that exited before it left the job.
        host: The rank's host.
        pid: The rank's process id.
        last: The rank's last operation, such as ``allreduce "loss"``.
        last_age_s: Seconds from the submission of that operation to the failure.
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
    """Ranks disagree about one operation. All of them raise this error; the next operation works."""


class PeerLostError(HorovodInternalError):
    """A peer is gone. Final."""


class AbortedError(HorovodInternalError):
    """The process set ended, a rank's backward pass failed, or Farandole was shut down."""


class GenerationEndedError(AbortedError):
    """What was made before :func:`farandole.shutdown` was used after another :func:`farandole.init`. The new generation
    of the job goes on; make it again there."""


class JobHaltedError(HorovodInternalError):
    """This process must not go on in its elastic job: others may go on, or have gone on, without it. Where nobody
    catches it the process ends with exit code 75."""


class OperationTimeoutError(HorovodInternalError):
    """A started operation made no progress within its deadline. Final."""
