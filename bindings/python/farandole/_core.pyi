"""The C ABI as classes; numbers are those of farandole.h. Private: use the package farandole.

An *address* is None (null), an int, or an object with a contiguous buffer; the caller keeps the
memory alive until the work has finished. Codes become the exceptions of farandole.exceptions, and
INVALID_ARGUMENT a ValueError.
"""

from collections.abc import Sequence
from typing import Any

version: str

_Tensors = Sequence[tuple[str | None, int, tuple[int, ...]]]
_Addresses = Sequence[Any]
_Stream = tuple[int, int]  # CUDA device number, cudaStream_t

class Context:
    @staticmethod
    def init() -> Context: ...
    @staticmethod
    def in_process(size: int) -> list[Context]: ...
    @staticmethod
    def forget_all() -> None: ...
    @property
    def is_open(self) -> bool: ...
    @property
    def is_closed(self) -> bool:
        """Whether close() has ended. After an interrupted one a context is neither open nor closed."""
    def close(self) -> None: ...
    def topology(self) -> tuple[int, int, int, int, int, int]: ...
    def counters(self) -> dict[str, int]: ...
    def setting(self, name: str) -> str:
        """The value of FARANDOLE_..., as text; ValueError if there is no such setting."""
    def start_timeline(self, path: str, mark_cycles: bool) -> None: ...
    def stop_timeline(self) -> None: ...
    def join(self) -> int: ...
    def prepare(
        self,
        name: str | None,
        tensors: _Tensors,
        *,
        kind: int,
        op: int = 0,
        prescale: float = 1.0,
        postscale: float = 1.0,
        root: int = -1,
        wire: int = 0,
        set: int = 0,
        device: int = 0,
        splits: Sequence[int] | None = None,
        function: str | None = None,
    ) -> Operation:
        """``splits``: farandole_params.splits; ValueError for another length."""
    def gradients(
        self,
        prefix: str,
        tensors: _Tensors,
        *,
        op: int,
        prescale: float = 1.0,
        postscale: float = 1.0,
        wire: int = 0,
        set: int = 0,
        device: int = 0,
        group_bytes: int = 0,
    ) -> Gradients: ...

class Operation:
    def start(
        self,
        inputs: _Addresses,
        outputs: _Addresses,
        holder: object,
        votes: bytes | None = None,
        failed: str | None = None,
        stream: _Stream | None = None,
    ) -> None:
        """Sets ``holder.work``; the holder keeps the memory alive until that has finished."""
    def start_allocating(
        self, inputs: _Addresses, holder: object, stream: _Stream | None = None
    ) -> None:
        """As ``start``, of an allgather or alltoall whose results the library allocates."""
    def run(self, inputs: _Addresses, outputs: _Addresses, holder: object) -> bool:
        """Starts and waits a little; False when ``holder.work`` is to be waited for."""

class Work:
    def wait(self, timeout_s: float = -1.0, stream: _Stream | None = None) -> bool:
        """False when the time has passed; the work goes on. Interruptible; releases the GIL.

        On a GPU it waits until the work is launched and makes ``stream`` wait for the rest.
        """
    def poll(self) -> bool: ...
    def over(self) -> bool:
        """Whether the memory is touched no more."""
    def error(self) -> str | None:
        """Why it failed; None if it did not, or has not finished."""
    def skipped(self, index: int) -> bool: ...
    def result(self, index: int) -> Result:
        """What ``start_allocating`` made, once it has finished well; the same one each time."""

class Result:
    """One tensor's result in the library's memory, a buffer of bytes; outlives the context.

    On a GPU ``address`` is on the device, and freeing it waits until nothing uses it.
    """

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def rows(self) -> list[int]:
        """How many came from each rank."""
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Gradients:
    def redefine(self, tensors: _Tensors) -> None:
        """Gives the gradients other dtypes and shapes, between two rounds; their groups stay."""
    def mark(
        self, index: int, input: Any, output: Any, vote: int, stream: _Stream | None = None
    ) -> None: ...
    def in_step(
        self,
        step: int,
        passes: int,
        no_sync_passes: int,
        previous_passes: int,
        previous_no_sync_passes: int,
    ) -> None: ...
    def announce_step(self) -> None:
        """Tells the other ranks what ``in_step`` said, once per round; a mismatch is final."""
    def marked(self, index: int) -> bool: ...
    def end(self, failed: str | None = None) -> None: ...
    def wait(self, timeout_s: float = -1.0, stream: _Stream | None = None) -> bool: ...
    def over(self) -> bool:
        """Whether the memory of all rounds waited for is touched no more."""
    def rounds(self) -> tuple[int, int]:
        """How many rounds were waited for, and how many of these touch their memory no more."""
    def skipped(self, index: int) -> bool: ...
    @property
    def groups(self) -> int: ...
