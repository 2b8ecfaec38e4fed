"""The C ABI as classes; numbers are those of farandole.h. Private: use the package farandole.

Codes become the exceptions of farandole.exceptions, and INVALID_ARGUMENT a ValueError.
"""

from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Final

from farandole._store import StoreCalls

version: str
dtypes: tuple[str, ...]  # NumPy's names of farandole_dtype
reducible_dtypes: tuple[str, ...]  # of these, what every reduction takes
reduced_dtypes: tuple[str, ...]  # and what Sum and Average take besides: complex numbers, as pairs

_Tensors = Sequence[tuple[str | None, int, tuple[int, ...]]]
_Stream = tuple[int, int]  # CUDA device number, cudaStream_t

def note_input(ns: int) -> None:
    """The thread that trains has waited so long for input; see farandole_note_time of the C ABI."""

def note_garbage_collection(ns: int) -> None:
    """The garbage collector has run for so long; see farandole_note_time of the C ABI."""

def count_waiting_threads() -> None:
    """See farandole_count_waiting_threads of the C ABI."""

def exit_with(code: int) -> None:
    """The process ends with this code, whatever the interpreter says."""

def use_library(type: type, library: object | None) -> None:
    """What to ask about arrays of ``type`` and its subclasses; see farandole/_libraries.py."""

def describe(array: object) -> tuple[int, str, tuple[int, ...], bool, int, bool] | None:
    """Address, dtype, shape, is C-contiguous, CUDA device or -1, is writable; None: cannot be read."""

def digests(arrays: list[Any]) -> list[int]:
    """Of each array's memory a signed number of 64 bits, which changes with any one bit. ValueError: one does not lie
    in host memory, in C order."""

def allreduce(
    how: int, of_thread: ContextVar[Any], process: object, current: Callable[[], Any], global_set: object,
    options: Callable[[Any, Any, Any, Any], Options],
) -> Callable[[Any, Any, Any, Any, Any, Any], Any]:  # fmt: skip
    """A function of (tensor, name, op, prescale_factor, postscale_factor, process_set) that gives what
    ``Context.submit`` does. No Python is called for an allreduce over all ranks, without factors, in a context.

    Args:
        how: As for ``Context.submit``.
        of_thread, process: The context is what the variable holds, or else ``process.default``.
        current: Gives the context, or raises, where these hold none that is open.
        global_set: The process set of all ranks.
        options: Gives those of the last four arguments; kept for plain ones.
    """

class Options:
    """What all ranks must agree on besides the tensors: farandole_params."""

    def __init__(
        self,
        kind: int,
        op: int = 0,
        prescale: float = 1.0,
        postscale: float = 1.0,
        root: int = -1,
        wire: int = 0,
        set: int = 0,
        function: str = "",
    ) -> None: ...
    def of_set(self, set: int) -> Options: ...  # the same, of another process set
    function: Final[str]  # what the user called; without another the name of the kind
    kind: Final[int]
    op: Final[int]
    prescale: Final[float]
    postscale: Final[float]
    root: Final[int]
    wire: Final[int]
    set: Final[int]

class Context:
    @staticmethod
    def init(
        rank: int | None = None,
        size: int | None = None,
        local_rank: int | None = None,
        address: str | None = None,
        store: StoreCalls | None = None,
        apart: bool = False,
        timeout_s: float = 0.0,
        in_order: bool = False,
        slots: int = 0,
        elastic: bool = False,
        members: str | None = None,
    ) -> Context: ...
    def reinit(self) -> Context:
        """The next generation of an elastic job; this context ends as by close()."""
    def generation(self) -> int: ...
    def change_is_due(self) -> bool: ...
    def members(self, rank: int = -1) -> str: ...
    @staticmethod
    def in_process(size: int) -> list[Context]: ...
    @staticmethod
    def forget_all() -> None: ...
    @property
    def is_open(self) -> bool: ...
    @property
    def is_closed(self) -> bool:
        """Whether close() has ended. After an interrupted one a context is neither open nor closed."""
    @property
    def address(self) -> int:
        """Of its farandole_context."""
    def close(self) -> None: ...
    def close_within(self, limit_s: float) -> bool:
        """As close() for limit_s; False: other ranks are still in the job, so call it again or close_at_exit()."""
    def close_at_exit(self, limit_s: float, reason: int = 2, cause: str = "") -> None:
        """As close() for limit_s; then the library goes on when the process exits."""
    def end_step(self) -> None:
        """See farandole_end_step of the C ABI."""

    def raise_if_ended(self) -> None:
        """Raises the error with which the job has ended, as every new operation would."""
    def topology(self) -> tuple[int, int, int, int, int, int]: ...
    def slot_range(self) -> tuple[int, int]: ...
    def counters(self) -> dict[str, int]: ...
    def setting(self, name: str) -> str:
        """The value of FARANDOLE_..., as text; ValueError if there is no such setting."""
    def settings(self) -> list[tuple[str, str, str]]:
        """All: name, value, default."""
    def start_timeline(self, path: str, mark_cycles: bool) -> None: ...
    def stop_timeline(self) -> None: ...
    def set_timeout(self, timeout_s: float) -> None: ...
    def join(self) -> int: ...
    def add_set(self, ranks: Sequence[int]) -> int:
        """A new process set's uid; collective."""
    def remove_set(self, uid: int) -> None: ...
    def rank_and_size(self, uid: int) -> tuple[int, int]:
        """This rank's number in a process set, and how many ranks that has."""
    def submit(
        self,
        options: Options,
        tensors: Any,
        name: str | None,
        how: int = 0,
        finish: Callable[..., Any] | None = None,
        labels: Sequence[str] | None = None,
        failed: str | None = None,
        splits: Any = None,
        out: Any = None,
        rows: Sequence[int] = (),
    ) -> Any:
        """Starts a collective; gives its Work, or its result.

        Args:
            tensors: An array, or of a group a list of them, decided and finished together.
            name: The same on all ranks, or None: matched by the order of unnamed calls of this kind.
            how: A sum. 1: a group; 2: in place; 4: waits and gives the result; 8: no user called it,
                so that its failure needs no warning at the end; 16: on memory: ranks match by the number of
                elements, whatever the shapes (but for rows), and autograd is not told of the write.
            finish: Called with the results (and, of an allgather or alltoall, how many rows came from
                each rank); gives what the user gets. Called again where it was interrupted.
            labels: The tensors' names for messages; None: they are numbered.
            failed: None, or this rank's error text: the operation is then refused on every rank.
            splits: Of an alltoall: per tensor and rank, how many rows go to it.
            out: None, or an array, of a group a list of them, where the results go: contiguous and of the
                results' dtype, shape and device. The results are these objects.
            rows: With ``out``, of an allgather or alltoall: per tensor and rank, how many rows must come
                from it; none: as many as ``out`` has in all. MismatchError on this rank if others come.
        """
    def allocate(self, bytes: int) -> ResultMemory:
        """Zeroes in memory where an allreduce in place needs no copies, if all ranks have theirs in such.

        Raises:
            HorovodInternalError: There is no memory.
        """
    def release_completed(self) -> None:
        """Releases the memory of what is complete, as every submit() does."""
    @property
    def in_flight(self) -> int:
        """How many works and detached gradients hold memory for the engine."""
    def take_unseen_failures(self) -> list[str]: ...
    def find_interrupted(self, name: str | None) -> Work | None: ...
    def is_in_flight(self, name: str) -> bool:
        """Whether an operation of that name is in flight."""
    def gradients(
        self,
        options: Options,
        owner: object,
        named: Sequence[tuple[str, Any]],
        labels: list[str],
        torch: tuple[Callable[[], int], Callable[[], bool], Callable[[int], int] | None, int],
        group_bytes: int,
        overlaps: bool,
        is_average: bool,
    ) -> Gradients: ...

class Work:
    """One operation in flight: pass it to ``poll`` and ``synchronize``.

    It holds the operation's memory, and the context holds it, until that is touched no more: also
    when the handle itself is dropped, and on a GPU after it was waited for.

    Thread safety: any thread. Of several that wait the first to come gets the result.
    """

    def when_done(self, call: Callable[[], object]) -> None:
        """Calls ``call()`` once when :meth:`wait` would return at once: now, or on a thread of the library.

        What it raises is reported as unraisable. Once the interpreter ends nothing is called any more.

        Raises:
            HorovodInternalError: There is no thread to be had.
        """

    def wait(self) -> Any:
        """Waits and gives the result; after that the handle is spent.

        KeyboardInterrupt leaves the operation in flight and the handle usable.
        """
    def poll(self) -> bool:
        """Whether ``wait`` would return at once."""
    def order_stream(self) -> None:
        """After :meth:`wait`: the current stream waits for the work, too; nothing where it is complete."""
    @property
    def is_complete(self) -> bool:
        """Whether the memory is touched no more."""

class ResultMemory:
    """Memory of the library, such as one tensor's result, as a buffer of bytes and for DLPack.

    It outlives the context. On a GPU ``address`` is on the device, and freeing it waits until nothing
    uses it.
    """

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __dlpack__(self, **options: object) -> object: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

class GradientDescription:
    """Number of the dtype, and shape, of what travels of one gradient."""

    def __init__(self, dtype: int, shape: list[int]) -> None: ...

class GradientSlot:
    """One parameter of an optimizer and its gradient in the open round; see gradients.h."""

    @property
    def name(self) -> str: ...
    @property
    def parameter(self) -> Any: ...
    @property
    def shape(self) -> tuple[int, ...]:
        """Of the parameter when its gradients were defined."""
    is_present: bool
    was_sparse: bool
    is_channels_last: bool
    codec: Any
    dtype: Any
    last_dtype: Any
    sent: Any
    sparse: Any
    def gradient_dtype(self) -> Any: ...
    def holds_reduced(self) -> bool: ...
    def was_reduced(self) -> bool: ...
    def note_reduced(self) -> None: ...
    def has_changed(self) -> bool: ...
    def forget_reduced(self) -> None: ...

class Gradients:
    """The rounds of one optimizer, its slots and autograd's hooks on its parameters; see gradients.h."""

    is_running: bool
    task: int | None
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> GradientSlot: ...
    def __iter__(self) -> Iterator[GradientSlot]: ...
    def hook(self, index: int, is_after: bool) -> Callable[..., None]: ...
    def define(self, descriptions: list[GradientDescription], like: object) -> None: ...
    def add(
        self, named: Sequence[tuple[str, Any]], describe: Callable[[GradientSlot], GradientDescription]
    ) -> None: ...
    def are_defined(self) -> bool: ...
    def rebind(self, context: Context, set: int, labels: list[str]) -> None:
        """Goes on in another context after the end of its own."""
    def count_pass(self, is_no_sync: bool) -> bool:
        """Whether it is the last pass of its window."""
    def set_passes(self, passes: int) -> None: ...
    def open(self) -> None: ...
    def accumulated(self, index: int) -> None: ...
    def own_memory(self, slot: GradientSlot) -> Any: ...
    def compare(self) -> None: ...
    def end(self, is_left_to_user: bool) -> None: ...
    def fail(self, why: str) -> None: ...
    def note_failure(self, why: str | None) -> None:
        """The results of a round are not used; None: the wait for them was interrupted."""
    def forget(self) -> None:
        """The gradients are given up: no failure and no window counts."""
    def wait(self) -> None:
        """Interruptible; releases the GIL."""
    def receive(self, increment_versions: Callable[[list[Any]], None], keeps_reduced: bool) -> None: ...
    def release_sparse(self) -> None: ...
    def drop(self) -> None: ...
    def stepped(self) -> None: ...
    def skipped(self, index: int) -> bool: ...
    def find_assigned(self) -> GradientSlot | None: ...
    def forget_reduced(self) -> None: ...
    def release_completed(self) -> None:
        """Releases the memory of rounds that are complete."""
    def detach(self) -> None:
        """Leaves what rounds still use to the context."""
    @property
    def is_open(self) -> bool: ...
    @property
    def is_pending(self) -> bool: ...
    @property
    def is_interrupted(self) -> bool: ...
    @property
    def has_window(self) -> bool:
        """Whether a round is open, or passes of its window were counted."""
    @property
    def failure(self) -> str | None:
        """Why the gradients are not reduced; None: nothing failed."""
    @property
    def is_complete(self) -> bool:
        """Whether the memory of all rounds waited for is touched no more."""
    @property
    def kept(self) -> int:
        """How many rounds' memory is kept."""
    @property
    def has_marked(self) -> bool: ...
    @property
    def has_unreduced(self) -> bool: ...
    @property
    def flag(self) -> bool: ...
    @property
    def groups(self) -> int: ...
    @property
    def number(self) -> int: ...
    @property
    def succeeded(self) -> int: ...
