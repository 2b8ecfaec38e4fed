"""Starting operations and waiting for them: shared by the NumPy and the torch face."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from farandole import _context, _core, _interrupted
from farandole._memory import Lent, release_finished
from farandole._place import Place
from farandole.exceptions import HorovodInternalError

# Horovod's numbers, which scripts write and print.
Average: Final = 0
Sum: Final = 1
Adasum: Final = 2
Min: Final = 3
Max: Final = 4
Product: Final = 5

#: Of the C ABI, by number.
KINDS: Final = ("allreduce", "broadcast", "allgather", "reducescatter", "alltoall", "barrier")
ALLREDUCE, BROADCAST, ALLGATHER, REDUCESCATTER, ALLTOALL, BARRIER = range(6)

_CPU: Final = 0
_CUDA: Final = 1

_REDUCTIONS: Final = {Average: 1, Sum: 0, Min: 2, Max: 3, Product: 4}

#: Dtype name -> farandole_dtype of the C ABI.
DTYPES: Final = {
    name: number
    for number, name in enumerate(
        "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64".split()
    )
}

Description = tuple[str | None, int, tuple[int, ...]]


class Parameters(NamedTuple):
    """What all ranks must agree on besides the tensors; the numbers are the C ABI's.

    ``splits`` of an alltoall, rows for each rank, may differ between ranks. ``function`` is what
    the user called where this is a part of it.
    """

    kind: int
    op: int = 0
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    wire: int = 0
    splits: tuple[int, ...] | None = None
    function: str | None = None


def reduction(op: int | None) -> int:
    """Horovod's operation number as the C ABI's; None means Average.

    Raises:
        NotImplementedError: Adasum.
        ValueError: No such operation.
    """
    if op is None:
        op = Average
    if op == Adasum:
        raise NotImplementedError("Adasum is not available")
    if op not in _REDUCTIONS:
        raise ValueError(f"op must be Average, Sum, Min, Max or Product, not {op!r}")
    return _REDUCTIONS[op]


def check_root(root_rank: int) -> int:
    """``root_rank`` if there is such a rank, else ValueError."""
    size = _context.current().topology.size
    if not 0 <= root_rank < size:
        raise ValueError(f"broadcast: root rank {root_rank} is not in 0..{size - 1}")
    return int(root_rank)


def default_process_set(process_set: object) -> None:
    """NotImplementedError for anything but the set of all ranks."""
    if process_set is not None and getattr(process_set, "process_set_id", None) != 0:
        raise NotImplementedError("process sets other than the global one are not available")


class Handle:
    """One operation in flight: pass it to ``poll`` and ``synchronize``.

    The operation's memory stays alive until it is touched no more, also when the handle itself is
    dropped. On a GPU that may be after the handle was waited for.

    Thread safety: any thread. Of several that wait the first to come gets the result.
    """

    __slots__ = ("_rank", "work", "_memory", "_finish", "_takes", "_place", "_label", "_waiting")

    def __init__(
        self, rank: _context.Rank, call: Call, label: _interrupted.Label | None = None
    ) -> None:
        self._rank = rank
        self.work: _core.Work | None = None  # set by Operation.start and others, at once with it
        self._memory = call.memory
        self._finish: Callable[..., Any] | None = call.finish
        self._takes = len(call.tensors) if call.outputs is None else 0  # results of the library
        self._place = call.place
        self._label = label  # None: its failure is no news
        self._waiting = threading.Lock()
        rank.in_flight[self] = None

    def poll(self) -> bool:
        """Whether ``synchronize`` would return at once."""
        return self._live_work().poll()

    def wait(self) -> Any:
        """Waits and gives the result; after that the handle is spent.

        KeyboardInterrupt leaves the operation in flight and the handle usable.
        """
        with self._waiting:
            work = self._live_work()
            try:
                work.wait(stream=None if self._place is None else self._place.stream())
                assert self._finish is not None
                result = self._finish(*map(work.result, range(self._takes)))
            except Exception:
                if work.poll():
                    self._spend(work)
                raise
            self._spend(work)
            return result

    def release_if_finished(self) -> bool:
        """No longer keeps the memory alive by itself once it is touched no more.

        A failure that nobody has seen is noted: this may be the last time anybody looks.
        """
        if not self._waiting.acquire(blocking=False):
            return False  # somebody waits, and lets go afterwards
        try:
            work = self.work
            if work is None or not work.over():  # None: another thread is about to start it
                return False
            error = None if self._label is None else work.error()
            if error is not None:
                self._rank.unseen_failures[work] = self._labelled(error)
            self._rank.in_flight.pop(self, None)
            return True
        finally:
            self._waiting.release()

    def _labelled(self, error: str) -> str:
        function, name = self._label or ("operation", None)
        return error if name is None or f'"{name}"' in error else f'{function} "{name}": {error}'

    def _spend(self, work: _core.Work) -> None:
        """After the outcome has been seen."""
        self._rank.unseen_failures.pop(work, None)
        if self._place is not None:
            Lent(self._rank, work, self._memory)
        self.clear()

    def _live_work(self) -> _core.Work:
        work = self.work
        if work is None:
            raise ValueError(f"Handle {self!r} was not created or has been cleared.")
        return work

    def clear(self) -> None:
        """Spends the handle and lets go of the memory."""
        self.work = self._finish = self._memory = None
        self._rank.in_flight.pop(self, None)


def poll(handle: Handle) -> bool:
    """Whether the operation has finished, well or not, so that ``synchronize`` would not block.

    On a GPU: whether it is in a stream, so that other streams can wait for it.

    Raises:
        ValueError: Not a handle, or one that was synchronized before.
    """
    return _checked(handle).poll()


def synchronize(handle: Handle) -> Any:
    """Waits for an asynchronous operation.

    On a GPU it waits until the operation is in a stream, and makes the calling thread's current
    stream wait for the rest: what is put into that stream from now on sees the result. The host
    goes on.

    Returns:
        The result: for an in-place operation the object that was passed in.
    Raises:
        HorovodInternalError: The operation failed; MismatchError and the others tell how.
        ValueError: Not a handle, or one that was synchronized before.
    """
    return _checked(handle).wait()


def _checked(handle: object) -> Handle:
    if not isinstance(handle, Handle):
        raise ValueError(f"Handle {handle!r} was not created or has been cleared.")
    return handle


class Call(NamedTuple):
    """One collective, ready to be started.

    Attributes:
        parameters: What to do.
        name: The same on all ranks, or None: matched by the order of unnamed calls of this kind.
        tensors: Name, dtype and shape of each tensor; several are decided and finished together.
        inputs: Address (int, None for null) or contiguous buffer per tensor.
        outputs: Likewise; may be the same. None, of an allgather or alltoall: memory of the library.
        memory: Kept alive until the operation has finished.
        finish: Called after success, with a ``_core.Result`` per tensor where ``outputs`` is None;
            makes the result.
        failed: None, or this rank's error text: the operation is then refused on every rank.
        place: The GPU that all the memory is on; None: host memory. What its current stream holds
            comes before the operation reads and writes.
    """

    parameters: Parameters
    name: str | None
    tensors: tuple[Description, ...]
    inputs: Sequence[Any]
    outputs: Sequence[Any] | None
    memory: object
    finish: Callable[..., Any]
    failed: str | None = None
    place: Place | None = None

    @property
    def label(self) -> _interrupted.Label:
        """Function and name."""
        return self.parameters.function or KINDS[self.parameters.kind], self.name


def start(call: Call, is_internal: bool = False) -> Handle:
    """Starts a collective on the current context; never blocks (an unnamed one may, behind 256).

    Args:
        call: What to start.
        is_internal: The user did not call it: its failure needs no warning at the end.
    Raises:
        ValueError: The description is wrong, or the name is in flight already.
        HorovodInternalError: Not initialized, or a final error of the context.
    """
    rank = _context.current()
    try:
        return _start(rank, call, is_internal)
    except ValueError as error:
        _interrupted.tell_way_on(rank, call.label, error)
        raise


def _start(rank: _context.Rank, call: Call, is_internal: bool) -> Handle:
    operation = _prepared(rank, call)
    release_finished(rank)
    stream = None if call.place is None else call.place.stream()
    handle = Handle(rank, call, call.label if call.failed is None and not is_internal else None)
    try:
        if call.outputs is None and call.failed is None:
            operation.start_allocating(call.inputs, handle, stream=stream)
        else:
            outputs = [None] * len(call.tensors) if call.outputs is None else call.outputs
            operation.start(call.inputs, outputs, handle, failed=call.failed, stream=stream)
    finally:
        if handle.work is None:
            handle.clear()
    return handle


def run(call: Call) -> Any:
    """Starts a collective, waits for it and gives its result; raises what these two raise."""
    if call.failed is not None or call.place is not None or call.outputs is None:
        return run_by_handle(call)
    rank = _context.current()
    try:
        return _run(rank, call)
    except ValueError as error:
        _interrupted.tell_way_on(rank, call.label, error)
        raise


def run_by_handle(call: Call) -> Any:
    """As :func:`run`; an interrupted ``finish`` is called again when the handle is synchronized."""
    handle = start(call)
    try:
        return handle.wait()
    finally:
        _interrupted.keep(_context.current(), call.label, handle)


def _run(rank: _context.Rank, call: Call) -> Any:
    assert call.outputs is not None
    operation = _prepared(rank, call)
    release_finished(rank)
    handle = Handle(rank, call, call.label)
    try:
        is_finished = operation.run(call.inputs, call.outputs, handle)
        return call.finish() if is_finished else handle.wait()
    finally:  # an exception of a signal handler leaves what is in flight with its memory
        if handle.work is None:
            handle.clear()
        _interrupted.keep(rank, call.label, handle)


def _prepared(rank: _context.Rank, call: Call) -> _core.Operation:
    parameters, name, tensors = call.parameters, call.name, call.tensors
    device = _CPU if call.place is None else _CUDA
    _check_name(name)
    if name is None:
        return rank.context.prepare(None, tensors, **parameters._asdict(), device=device)
    key = (parameters.kind, parameters.function, name)
    description = (parameters, tensors, device)
    known = rank.operations.get(key)
    if known is not None and known[0] == description:
        return known[1]
    operation = rank.context.prepare(name, tensors, **parameters._asdict(), device=device)
    rank.operations[key] = (description, operation)
    return operation


def _check_name(name: object) -> None:
    if name is None or (isinstance(name, str) and name.isprintable()):
        return
    if not isinstance(name, str):
        raise TypeError(f"name must be a str or None, not {name!r}")
    if "\0" in name or any("\ud800" <= character <= "\udfff" for character in name):
        raise ValueError(f"name {name!r} must not hold NUL or lone surrogates")


def barrier(process_set: object = None) -> None:
    """Returns when every rank has called it."""
    default_process_set(process_set)
    run(Call(Parameters(BARRIER), None, (), (), (), None, lambda: None))


def join(device: int = -1) -> int:
    """Says that this rank has no more data: it takes part in the others' collectives without a
    contribution until every rank has joined.

    It has no rows to give to an allgather, and while it has joined the others cannot run an
    alltoall. What was started before is complete.

    Args:
        device: Ignored; for compatibility with Horovod.
    Returns:
        The rank that joined last.
    """
    del device
    rank = _context.current()
    rank.joins += 1
    return rank.context.join()
