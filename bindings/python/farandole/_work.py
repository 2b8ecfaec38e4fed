"""Starting operations and waiting for them: shared by the NumPy and the torch face."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

from farandole import _context, _core

# Horovod's numbers, which scripts write and print.
Average: Final = 0
Sum: Final = 1
Adasum: Final = 2
Min: Final = 3
Max: Final = 4
Product: Final = 5

ALLREDUCE: Final = 0
BROADCAST: Final = 1
BARRIER: Final = 5

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
    """What all ranks must agree on besides the tensors; the numbers are the C ABI's."""

    kind: int
    op: int = 0
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    wire: int = 0


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


class _Pending(Protocol):
    """What a handle stands for: the engine's work, or several works with something between."""

    def poll(self) -> bool: ...

    def wait(self) -> object: ...


class Handle:
    """One operation in flight: pass it to ``poll`` and ``synchronize``.

    It keeps the operation's memory alive until the operation has finished, also when the handle
    itself is dropped.
    """

    __slots__ = ("_rank", "work", "_memory", "_finish")

    def __init__(
        self,
        rank: _context.Rank,
        memory: object,
        finish: Callable[[], Any],
        work: _Pending | None = None,
    ) -> None:
        self._rank = rank
        self.work = work  # set by Operation.start and run, at once with the start
        self._memory = memory
        self._finish: Callable[[], Any] | None = finish
        rank.in_flight[self] = None

    def poll(self) -> bool:
        """Whether ``synchronize`` would return at once."""
        return self._live_work().poll()

    def wait(self) -> Any:
        """Waits and gives the result; after that the handle is spent.

        KeyboardInterrupt leaves the operation in flight and the handle usable.
        """
        work = self._live_work()
        try:
            work.wait()
            assert self._finish is not None
            return self._finish()
        finally:
            if work.poll():
                self.clear()

    def release_if_finished(self) -> bool:
        """No longer keeps the memory alive by itself once the operation has finished."""
        is_finished = self.work is None or self.work.poll()
        if is_finished:
            self._rank.in_flight.pop(self, None)
        return is_finished

    def _live_work(self) -> _Pending:
        if self.work is None:
            raise ValueError(f"Handle {self!r} was not created or has been cleared.")
        return self.work

    def clear(self) -> None:
        """Spends the handle and lets go of the memory."""
        self.work = self._finish = self._memory = None
        self._rank.in_flight.pop(self, None)


def poll(handle: Handle) -> bool:
    """Whether the operation has finished, well or not, so that ``synchronize`` would not block.

    Raises:
        ValueError: Not a handle, or one that was synchronized before.
    """
    return _checked(handle).poll()


def synchronize(handle: Handle) -> Any:
    """Waits for an asynchronous operation.

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
        outputs: Likewise; may be the same.
        memory: Kept alive until the operation has finished.
        finish: Called after success; makes the result.
        failed: None, or this rank's error text: the operation is then refused on every rank.
    """

    parameters: Parameters
    name: str | None
    tensors: tuple[Description, ...]
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    memory: object
    finish: Callable[[], Any]
    failed: str | None = None


def start(call: Call) -> Handle:
    """Starts a collective on the current context; never blocks (an unnamed one may, behind 256).

    Raises:
        ValueError: The description is wrong, or the name is in flight already.
        HorovodInternalError: Not initialized, or a final error of the context.
    """
    rank = _context.current()
    operation = _prepared(rank, call)
    _release_finished(rank)
    handle = Handle(rank, call.memory, call.finish)
    try:
        operation.start(call.inputs, call.outputs, handle, failed=call.failed)
    finally:
        if handle.work is None:
            handle.clear()
    return handle


def run(call: Call) -> Any:
    """Starts a collective, waits for it and gives its result; raises what these two raise."""
    if call.failed is not None:
        return start(call).wait()
    rank = _context.current()
    operation = _prepared(rank, call)
    _release_finished(rank)
    handle = Handle(rank, call.memory, call.finish)
    try:
        is_finished = operation.run(call.inputs, call.outputs, handle)
    finally:  # an exception of a signal handler leaves what is in flight with its memory
        if handle.work is None:
            handle.clear()
    return call.finish() if is_finished else handle.wait()


def _release_finished(rank: _context.Rank) -> None:
    """Lets go of the oldest handles that were dropped without being waited for."""
    while rank.in_flight:
        if not next(iter(rank.in_flight)).release_if_finished():
            return


def _prepared(rank: _context.Rank, call: Call) -> _core.Operation:
    parameters, name, tensors = call.parameters, call.name, call.tensors
    _check_name(name)
    if name is None:
        return rank.context.prepare(None, tensors, **parameters._asdict())
    key = (parameters.kind, name)
    description = (parameters, tensors)
    known = rank.operations.get(key)
    if known is not None and known[0] == description:
        return known[1]
    operation = rank.context.prepare(name, tensors, **parameters._asdict())
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

    Args:
        device: Ignored; for compatibility with Horovod.
    Returns:
        The rank that joined last.
    """
    del device
    return _context.current().context.join()
