"""Collectives on arrays of any library: NumPy, CuPy, JAX, PyTorch, whatever speaks DLPack or buffers.

Results are of the kind of array that was given; of a plain buffer (``bytearray``, ``array.array``) and
of an array of a library that makes none itself they are NumPy's. Arrays on an NVIDIA GPU are reduced
where they are, as ``farandole.torch`` does it with torch's: in order with their streams, without the
host waiting for the end. ``farandole.torch`` has the same functions with Horovod's arguments.

Each function writes the call's options and hands them to the extension: :func:`run` waits for the
result, :func:`start` gives a handle, :func:`run_group` and :func:`start_group` do so with several arrays.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

from farandole import _core, basics
from farandole.basics import ProcessSet, global_process_set

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = [
    "Adasum", "Average", "Handle", "Max", "Min", "Product", "Sum", "allgather", "allgather_async",
    "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "alltoall", "alltoall_async",
    "barrier", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_",
    "grouped_allgather", "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_",
    "grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter",
    "grouped_reducescatter_async", "interrupted", "join", "poll", "reducescatter",
    "reducescatter_async", "synchronize",
]  # fmt: skip

Average, Sum, Adasum, Min, Max, Product = range(6)  # Horovod's, which scripts write and print

Handle = _core.Work
Arrays = Sequence[Any]

# farandole_kind of the C ABI.
ALLREDUCE, BROADCAST, ALLGATHER, REDUCESCATTER, ALLTOALL, BARRIER = range(6)
#: Those that add elements up, which not all dtypes allow; those of arrays' rows, which scalars do not have.
REDUCING, BY_ROWS = (ALLREDUCE, REDUCESCATTER), (ALLGATHER, REDUCESCATTER, ALLTOALL)
# How _core.Context.submit() does it.
GROUP, IN_PLACE, BLOCKS, INTERNAL, RAW = 1, 2, 4, 8, 16

#: The names of those kinds.
KINDS: Final = ("allreduce", "broadcast", "allgather", "reducescatter", "alltoall", "barrier")
_REDUCTIONS: Final = {None: 1, Average: 1, Sum: 0, Min: 2, Max: 3, Product: 4, Adasum: 9}

#: Options(kind, op, prescale, postscale, root, wire, set, function), as farandole_params has them.
options: Final = functools.lru_cache(maxsize=4096)(_core.Options)


def allreduce(
    tensor: Any, name: str | None = None, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Any:  # fmt: skip
    """Combines ``tensor`` over all ranks.

    Args:
        tensor: Array of any shape, the same on all ranks. A strided array in host memory is copied; on a GPU,
            and for in-place calls, it must be C-contiguous.
        name: The same on all ranks; None: matched by the order of the unnamed calls.
        op: Average (default), Sum, Min, Max or Product. Averages of integers are exact, then
            truncate toward zero; bool knows Min, Max and Product.
        prescale_factor: Multiplies every contribution.
        postscale_factor: Multiplies the result.
        process_set: The ranks that take part, of which this one is.
    Returns:
        A new array with the result, bitwise the same on all ranks.
    Raises:
        MismatchError: Ranks passed different shapes, dtypes, operations or factors.
        TypeError: ``tensor`` has no usable dtype or is no array.
    """
    return run_allreduce(tensor, name, op, prescale_factor, postscale_factor, process_set)


def allreduce_async(
    tensor: Any, name: str | None = None, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Handle:  # fmt: skip
    """As :func:`allreduce`; ``synchronize`` the handle. Leave ``tensor`` alone until then."""
    return start_allreduce(tensor, name, op, prescale_factor, postscale_factor, process_set)


def allreduce_(
    tensor: Any, name: str | None = None, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Any:  # fmt: skip
    """As :func:`allreduce`, in place. Returns ``tensor``."""
    return run_allreduce_(tensor, name, op, prescale_factor, postscale_factor, process_set)


def allreduce_async_(
    tensor: Any, name: str | None = None, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Handle:  # fmt: skip
    """As :func:`allreduce_`; ``synchronize`` the handle. Leave ``tensor`` alone until then."""
    return start_allreduce_(tensor, name, op, prescale_factor, postscale_factor, process_set)


def grouped_allreduce(
    tensors: Arrays, name: str | None = None, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> list[Any]:  # fmt: skip
    """As :func:`allreduce` of each of ``tensors``, in one operation; as many on every rank, all of a rank's
    on one device."""
    return run_group(reduction_options(ALLREDUCE, op, prescale_factor, postscale_factor, process_set), tensors, name)


def grouped_allreduce_async(
    tensors: Arrays, name: str | None = None, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Handle:  # fmt: skip
    """As :func:`grouped_allreduce`; ``synchronize`` the handle. Leave ``tensors`` alone until then."""
    return start_group(reduction_options(ALLREDUCE, op, prescale_factor, postscale_factor, process_set), tensors, name)


def grouped_allreduce_(
    tensors: Arrays, name: str | None = None, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> list[Any]:  # fmt: skip
    """As :func:`grouped_allreduce`, in place. Returns ``tensors``."""
    how = reduction_options(ALLREDUCE, op, prescale_factor, postscale_factor, process_set)
    return run_group(how, tensors, name, IN_PLACE)


def grouped_allreduce_async_(
    tensors: Arrays, name: str | None = None, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Handle:  # fmt: skip
    """As :func:`grouped_allreduce_`; ``synchronize`` the handle. Leave ``tensors`` alone until then."""
    how = reduction_options(ALLREDUCE, op, prescale_factor, postscale_factor, process_set)
    return start_group(how, tensors, name, IN_PLACE)


def broadcast(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Copies the values of ``root_rank`` to every rank.

    Args:
        tensor: Array of the same shape and dtype on all ranks, of any dtype; only the root's values
            matter.
        root_rank: Among all ranks, also with a process set; the same on all ranks.
        name: As for :func:`allreduce`.
        process_set: As for :func:`allreduce`; the root is in it.
    Returns:
        A new array.
    Raises:
        MismatchError: Ranks passed different shapes, dtypes or roots.
        ValueError: There is no such rank.
    """
    return run(broadcast_options(root_rank, process_set), tensor, name)


def broadcast_async(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """As :func:`broadcast`; ``synchronize`` the handle. Leave ``tensor`` alone until then."""
    return start(broadcast_options(root_rank, process_set), tensor, name)


def broadcast_(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """As :func:`broadcast`, in place. Returns ``tensor``."""
    return run(broadcast_options(root_rank, process_set), tensor, name, IN_PLACE)


def broadcast_async_(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """As :func:`broadcast_`; ``synchronize`` the handle. Leave ``tensor`` alone until then."""
    return start(broadcast_options(root_rank, process_set), tensor, name, IN_PLACE)


def allgather(
    tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set, *, out: Any = None
) -> Any:
    """Gathers the rows of all ranks on every rank, in rank order.

    Args:
        tensor: Array of shape [rows, ...], of any dtype: the number of rows may differ between ranks
            and be 0, the other dimensions and the dtype may not.
        name, process_set: As for :func:`allreduce`.
        out: An array for the result, or None. It is contiguous, has the tensor's dtype and device, and does
            not overlap the tensor. Ranks may differ in it.
    Returns:
        A new array of shape [sum of all rows, ...], or ``out``.
    Raises:
        MismatchError: Ranks passed different dtypes or dimensions after the first. On this rank alone: the
            received rows do not fit ``out``, which was not written.
        ValueError: A scalar; the name is in flight already; ``out`` cannot be used.
    """
    return run(gather_options(process_set), tensor, name, out=out)


def allgather_async(
    tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set, *, out: Any = None
) -> Handle:
    """As :func:`allgather`; ``synchronize`` the handle. Leave ``tensor`` and ``out`` alone until then."""
    return start(gather_options(process_set), tensor, name, out=out)


def grouped_allgather(
    tensors: Arrays, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """As :func:`allgather` of each of ``tensors``, in one operation; as many on every rank, all of a rank's
    on one device."""
    return run_group(gather_options(process_set), tensors, name)


def grouped_allgather_async(
    tensors: Arrays, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """As :func:`grouped_allgather`; ``synchronize`` the handle. Leave ``tensors`` alone until then."""
    return start_group(gather_options(process_set), tensors, name)


def reducescatter(
    tensor: Any, name: str | None = None, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set, *, out: Any = None,
) -> Any:  # fmt: skip
    """As :func:`allreduce`, but every rank gets only its split of the result's rows.

    Args:
        tensor: Array of shape [rows, ...], the same on all ranks.
        name, op, prescale_factor, postscale_factor, process_set: As for :func:`allreduce`.
        out: As for :func:`allgather`, of the result's shape.
    Returns:
        A new array of shape [rows of this rank, ...], or ``out``: the parts lie in rank order in what an
        allreduce gives, and the first (rows % size) ranks get one row more than the others.
    Raises:
        MismatchError: Ranks passed different shapes, dtypes, operations or factors.
        ValueError: A scalar; ``out`` cannot be used.
        TypeError: ``tensor`` has no usable dtype or is no array.
    """
    how = reduction_options(REDUCESCATTER, op, prescale_factor, postscale_factor, process_set)
    return run(how, tensor, name, out=out)


def reducescatter_async(
    tensor: Any, name: str | None = None, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set, *, out: Any = None,
) -> Handle:  # fmt: skip
    """As :func:`reducescatter`; ``synchronize`` the handle. Leave ``tensor`` and ``out`` alone until then."""
    how = reduction_options(REDUCESCATTER, op, prescale_factor, postscale_factor, process_set)
    return start(how, tensor, name, out=out)


def grouped_reducescatter(
    tensors: Arrays, name: str | None = None, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> list[Any]:  # fmt: skip
    """As :func:`reducescatter` of each of ``tensors``, in one operation; as many on every rank, all of a rank's
    on one device."""
    how = reduction_options(REDUCESCATTER, op, prescale_factor, postscale_factor, process_set)
    return run_group(how, tensors, name)


def grouped_reducescatter_async(
    tensors: Arrays, name: str | None = None, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Handle:  # fmt: skip
    """As :func:`grouped_reducescatter`; ``synchronize`` the handle. Leave ``tensors`` alone until then."""
    how = reduction_options(REDUCESCATTER, op, prescale_factor, postscale_factor, process_set)
    return start_group(how, tensors, name)


def alltoall(
    tensor: Any, splits: Any = None, name: str | None = None,
    process_set: ProcessSet = global_process_set, *, out: Any = None,
) -> Any:  # fmt: skip
    """Sends a slice of this rank's rows to each rank, and receives a slice from each.

    Args:
        tensor: Array of shape [rows, ...], of any dtype: the first rows go to rank 0, the next to
            rank 1, and so on. The dimensions after the first and the dtype are the same on all ranks.
        splits: Integers, how many rows go to each rank; remaining rows are not sent. None: the same number to
            each rank; the number of rows must be a multiple of the number of ranks.
        name, process_set: As for :func:`allreduce`.
        out: As for :func:`allgather`.
    Returns:
        A new array with the received rows, in rank order, or ``out``. With ``splits`` also how many came from
        each rank: NumPy int64 [size].
    Raises:
        MismatchError: As for :func:`allgather`.
        ValueError: ``splits`` do not fit; a scalar; the name is in flight already; ``out`` cannot be used.
        HorovodInternalError: On all ranks, if one has joined.
    """
    how, finish = exchange_options(process_set), None if splits is None else _with_numbers
    return basics.current().core.submit(how, tensor, name, BLOCKS, finish, splits=splits, out=out)


def alltoall_async(
    tensor: Any, splits: Any = None, name: str | None = None,
    process_set: ProcessSet = global_process_set, *, out: Any = None,
) -> Handle:  # fmt: skip
    """As :func:`alltoall`; ``synchronize`` the handle, which always returns both, the received rows and how
    many came from each rank. Leave ``tensor`` and ``out`` alone until then."""
    how, core = exchange_options(process_set), basics.current().core
    handle: Handle = core.submit(how, tensor, name, 0, _with_numbers, splits=splits, out=out)
    return handle


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every rank of the process set has called it."""
    how = options(BARRIER, set=basics.uid_of(process_set, "barrier"))
    basics.current().core.submit(how, (), None, GROUP | BLOCKS)


def join(device: int = -1) -> int:
    """Announces that this rank has no more data. It takes part in the other ranks' collectives without a
    contribution, and returns when every rank has joined.

    It contributes no rows to an allgather. While a rank has joined, others cannot run an alltoall. Operations
    that this rank started before are complete when ``join`` returns.

    Args:
        device: Ignored; for compatibility with Horovod.
    Returns:
        The rank that joined last.
    """
    del device
    context = basics.current()
    return context.core.join()


def poll(handle: Handle) -> bool:
    """Whether the operation has succeeded or failed, so that ``synchronize`` would not block.

    On a GPU: whether it has been launched in a stream, so that other streams can wait for it.

    Raises:
        ValueError: Not a handle, or one that was synchronized before.
    """
    if not isinstance(handle, Handle):
        _refuse(handle)
    return handle.poll()


def synchronize(handle: Handle) -> Any:
    """Waits for an asynchronous operation.

    On a GPU it waits only until the operation is launched in a stream, and makes the calling thread's current
    stream wait for the result. Work that is enqueued in that stream afterwards sees the result.

    Returns:
        The result: for an in-place operation the object that was passed in.
    Raises:
        HorovodInternalError: The operation failed; its subclass says how.
        ValueError: Not a handle, or one that was synchronized before.
    """
    if not isinstance(handle, Handle):
        _refuse(handle)
    return handle.wait()


def _refuse(handle: object) -> NoReturn:
    raise ValueError(f"Handle {handle!r} was not created or has been cleared.")


def interrupted(name: str | None = None) -> Handle:
    """Returns the handle of a blocking call that an exception, such as KeyboardInterrupt, interrupted.

    The operation continues, because the other ranks need it, and its name is in use until it has finished.
    ``synchronize`` waits for it and returns what the call would have returned. Calling the function again is
    another operation, which all ranks must call.

    Args:
        name: The name of the call; None: the last interrupted call.
    Raises:
        ValueError: There is no such call, or it was synchronized already.
        HorovodInternalError: Not initialized.
    """
    handle = basics.current().core.find_interrupted(name)
    if handle is None:
        which = "" if name is None else f" with name {name!r}"
        raise ValueError(f"there is no interrupted call{which} that was not synchronized")
    return handle


# For the frontends.


def run(how: _core.Options, array: Any, name: str | None, flags: int = 0, out: Any = None) -> Any:
    """Waits for a collective on one array and gives its result."""
    return basics.current().core.submit(how, array, name, flags | BLOCKS, out=out)


def start(how: _core.Options, array: Any, name: str | None, flags: int = 0, out: Any = None) -> Handle:
    """Starts a collective on one array."""
    handle: Handle = basics.current().core.submit(how, array, name, flags, out=out)
    return handle


def run_group(how: _core.Options, arrays: Arrays, name: str | None, flags: int = 0) -> list[Any]:
    """As :func:`run` on several arrays, in one operation."""
    results: list[Any] = run(how, not_empty(arrays, how), name, flags | GROUP)
    return results


def start_group(how: _core.Options, arrays: Arrays, name: str | None, flags: int = 0) -> Handle:
    """Likewise :func:`start`."""
    return start(how, not_empty(arrays, how), name, flags | GROUP)


def not_empty(arrays: Arrays, how: _core.Options) -> Arrays:
    """The arrays of a group; TypeError unless they are a list, ValueError if it is empty."""
    if not isinstance(arrays, Sequence):
        raise TypeError(f"{KINDS[how.kind]}: expected a list of tensors, got a {type(arrays).__name__}")
    if not arrays:
        raise ValueError(f"{KINDS[how.kind]}: there must be at least one tensor")
    return arrays


def with_average(average: bool | None, op: int | None) -> int | None:
    """``op``, or Horovod's old way to say it."""
    if average is None:
        return op
    if not isinstance(average, bool):
        raise TypeError(f"average must be True, False or None, got {average!r}; pass a name as name=")
    if op is not None:
        raise ValueError("The op parameter supersedes average; give only one of them.")
    warnings.warn("average= is deprecated; use op=", DeprecationWarning, stacklevel=3)
    return Average if average else Sum


def reduction(op: int | None) -> int:
    """Horovod's number of a reduce operation as the C ABI's; ValueError if there is none."""
    number = _REDUCTIONS.get(op)
    if number is None:
        raise ValueError(f"op must be Average, Sum, Adasum, Min, Max or Product, not {op!r}")
    return number


def reduction_options(
    kind: int, op: int | None, prescale: float, postscale: float, process_set: ProcessSet, wire: int = 0
) -> _core.Options:
    """Of an allreduce or a reducescatter."""
    if type(prescale) is not float or type(postscale) is not float:
        prescale, postscale = _factor(prescale), _factor(postscale)
    uid = basics.uid_of(process_set, KINDS[kind])
    return options(kind, reduction(op), prescale, postscale, -1, wire, uid)


def gradient_options(
    op: int | None, gradient_predivide_factor: float, process_set: ProcessSet, wire: int, function: str
) -> _core.Options:
    """Of an allreduce of gradients, for frontends whose function is called so; ValueError if it cannot do that."""
    if op not in (None, Average, Sum, Adasum):
        raise ValueError(f"{function}: op must be Average, Sum or Adasum, not {op!r}")
    if gradient_predivide_factor != 1.0 and op not in (None, Average):
        raise ValueError(
            f"{function}: gradient_predivide_factor={gradient_predivide_factor!r} needs op=Average, not {op!r}"
        )
    if not gradient_predivide_factor > 0:
        raise ValueError(f"{function}: gradient_predivide_factor must be above 0, not {gradient_predivide_factor!r}")
    before, after = 1.0 / gradient_predivide_factor, float(gradient_predivide_factor)
    return reduction_options(ALLREDUCE, op, before, after, process_set, wire)


def _allreduce_with(flags: int) -> Callable[[Any, Any, Any, Any, Any, Any], Any]:
    """An allreduce of (tensor, name, op, prescale_factor, postscale_factor, process_set); see ``_core.allreduce``."""
    options_of = functools.partial(reduction_options, ALLREDUCE)
    return _core.allreduce(flags, basics._of_thread, basics._Process, basics.current, global_process_set, options_of)


run_allreduce, run_allreduce_ = _allreduce_with(BLOCKS), _allreduce_with(IN_PLACE | BLOCKS)
start_allreduce: Callable[..., Handle] = _allreduce_with(0)
start_allreduce_: Callable[..., Handle] = _allreduce_with(IN_PLACE)


def _factor(given: Any) -> float:
    """Its value now: a tensor's may change, which the options that are kept would not see."""
    if isinstance(given, str):
        raise TypeError(f"prescale_factor and postscale_factor must be numbers, got {given!r}")
    return float(given)


def broadcast_options(root_rank: int, process_set: ProcessSet, function: str = "") -> _core.Options:
    """Of a broadcast that users call ``function``; ValueError if there is no such rank."""
    size = basics.current().topology.size
    if not 0 <= root_rank < size:
        raise ValueError(f"broadcast: root rank {root_rank} is not in 0..{size - 1}")
    uid = basics.uid_of(process_set, function or "broadcast")
    ranks = process_set.ranks if uid else None
    if ranks is not None and root_rank not in ranks:
        raise ValueError(f"broadcast received invalid root rank {root_rank} for provided process set")
    return options(BROADCAST, 0, 1.0, 1.0, int(root_rank), 0, uid, function)


def gather_options(process_set: ProcessSet, function: str = "") -> _core.Options:
    """Of an allgather, likewise."""
    uid = basics.uid_of(process_set, function or "allgather")
    return options(ALLGATHER, 0, 1.0, 1.0, -1, 0, uid, function)


def exchange_options(process_set: ProcessSet) -> _core.Options:
    """Of an alltoall."""
    return options(ALLTOALL, 0, 1.0, 1.0, -1, 0, basics.uid_of(process_set, "alltoall"))


def _with_numbers(rows: Any, numbers: list[int]) -> tuple[Any, npt.NDArray[np.int64]]:
    import numpy as np  # not above: farandolerun starts without it, and so 0.1 s earlier

    return rows, np.array(numbers, np.int64)
