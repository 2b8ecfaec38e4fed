"""Collectives on arrays of any library: NumPy, CuPy, JAX, PyTorch, whatever speaks DLPack or buffers.

Results are of the kind of array that was given; of a plain buffer (``bytearray``, ``array.array``) and
of an array of a library that makes none itself they are NumPy's. Arrays on an NVIDIA GPU are reduced
where they are, as ``farandole.torch`` does it with torch's: in order with their streams, without the
host waiting for the end. ``farandole.torch`` has the same functions with Horovod's arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from farandole import _core, _libraries, basics
from farandole.basics import ProcessSet, global_process_set

# Horovod's numbers, which scripts write and print.
Average: Final = 0
Sum: Final = 1
Adasum: Final = 2
Min: Final = 3
Max: Final = 4
Product: Final = 5

Handle = _core.Work
Arrays = Sequence[Any]

# farandole_kind of the C ABI.
ALLREDUCE, BROADCAST, ALLGATHER, REDUCESCATTER, ALLTOALL, BARRIER = range(6)
# How _core.Context.submit() does it.
GROUP, IN_PLACE, BLOCKS, INTERNAL = 1, 2, 4, 8

_KINDS: Final = ("allreduce", "broadcast", "allgather", "reducescatter", "alltoall", "barrier")
_REDUCTIONS: Final = {Average: 1, Sum: 0, Min: 2, Max: 3, Product: 4, Adasum: 9}

#: Options(kind, op, prescale, postscale, root, wire, set, function), as farandole_params has them.
options: Final = functools.lru_cache(maxsize=4096)(_core.Options)


def allreduce(
    tensor: Any,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Combines ``tensor`` over all ranks.

    Args:
        tensor: Array of any shape, the same on all ranks; in host memory a strided one is copied, on
            a GPU it must be C-contiguous.
        name: The same on all ranks; None: matched by the order of the unnamed calls.
        op: Average (default), Sum, Min, Max or Product. Averages of integers are exact, then
            truncate toward zero; bool knows Min, Max and Product.
        prescale_factor: Multiplies every contribution.
        postscale_factor: Multiplies the result.
        process_set: The ranks that take part, of which this one is.
    Returns:
        A new array with the result, bitwise the same on all ranks of a host.
    Raises:
        MismatchError: Ranks passed different shapes, dtypes, operations or factors.
        TypeError: ``tensor`` has no usable dtype or is no array.
    """
    how = _allreduce(op, prescale_factor, postscale_factor, process_set)
    return basics.current().core.submit(how, tensor, name, BLOCKS)


def allreduce_async(
    tensor: Any,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """As :func:`allreduce`; ``synchronize`` the handle. Leave ``tensor`` alone until then."""
    how = _allreduce(op, prescale_factor, postscale_factor, process_set)
    return basics.current().core.submit(how, tensor, name)


def allreduce_(
    tensor: Any,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """As :func:`allreduce`, in place: writable C-contiguous memory. Returns ``tensor``."""
    how = _allreduce(op, prescale_factor, postscale_factor, process_set)
    return basics.current().core.submit(how, tensor, name, IN_PLACE | BLOCKS)


def allreduce_async_(
    tensor: Any,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """As :func:`allreduce_`; ``synchronize`` the handle, which gives ``tensor``."""
    how = _allreduce(op, prescale_factor, postscale_factor, process_set)
    return basics.current().core.submit(how, tensor, name, IN_PLACE)


def grouped_allreduce(
    tensors: Arrays,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """As :func:`allreduce` of each array, in one operation; as many arrays on every rank, all of a
    rank's on one device."""
    how = _allreduce(op, prescale_factor, postscale_factor, process_set)
    return submit_group(how, tensors, name, BLOCKS)


def grouped_allreduce_async(
    tensors: Arrays,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """As :func:`grouped_allreduce`; ``synchronize`` the handle. Leave the arrays alone till then."""
    how = _allreduce(op, prescale_factor, postscale_factor, process_set)
    return submit_group(how, tensors, name)


def grouped_allreduce_(
    tensors: Arrays,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """As :func:`grouped_allreduce`, in place. Returns the arrays."""
    how = _allreduce(op, prescale_factor, postscale_factor, process_set)
    return submit_group(how, tensors, name, IN_PLACE | BLOCKS)


def grouped_allreduce_async_(
    tensors: Arrays,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """As :func:`grouped_allreduce_`; ``synchronize`` the handle, which gives the arrays."""
    how = _allreduce(op, prescale_factor, postscale_factor, process_set)
    return submit_group(how, tensors, name, IN_PLACE)


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Gives every rank the values of ``root_rank``.

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
    how = broadcast_options(root_rank, process_set)
    return basics.current().core.submit(how, tensor, name, BLOCKS)


def broadcast_async(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """As :func:`broadcast`; ``synchronize`` the handle."""
    how = broadcast_options(root_rank, process_set)
    return basics.current().core.submit(how, tensor, name)


def broadcast_(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """As :func:`broadcast`, in place: writable C-contiguous memory. Returns ``tensor``."""
    how = broadcast_options(root_rank, process_set)
    return basics.current().core.submit(how, tensor, name, IN_PLACE | BLOCKS)


def broadcast_async_(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """As :func:`broadcast_`; ``synchronize`` the handle, which gives ``tensor``."""
    how = broadcast_options(root_rank, process_set)
    return basics.current().core.submit(how, tensor, name, IN_PLACE)


def allgather(
    tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Gives every rank the rows of all ranks, in rank order.

    Args:
        tensor: Array of shape [rows, ...], of any dtype: the number of rows may differ between ranks
            and be 0, the other dimensions and the dtype may not.
        name: As for :func:`allreduce`.
        process_set: As for :func:`allreduce`.
    Returns:
        A new array of shape [sum of all rows, ...].
    Raises:
        MismatchError: Ranks passed different dtypes or dimensions after the first.
        ValueError: A scalar; the name is in flight already.
    """
    how = gather_options(process_set)
    return basics.current().core.submit(how, tensor, name, BLOCKS)


def allgather_async(
    tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """As :func:`allgather`; ``synchronize`` the handle. Leave ``tensor`` alone until then."""
    return basics.current().core.submit(gather_options(process_set), tensor, name)


def grouped_allgather(
    tensors: Arrays, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """As :func:`allgather` of each array, in fewer messages; as many arrays on every rank, all of a
    rank's on one device."""
    return submit_group(gather_options(process_set), tensors, name, BLOCKS)


def grouped_allgather_async(
    tensors: Arrays, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """As :func:`grouped_allgather`; ``synchronize`` the handle."""
    return submit_group(gather_options(process_set), tensors, name)


def reducescatter(
    tensor: Any,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """As :func:`allreduce`, but every rank gets a part of the result's rows only.

    Args:
        tensor: Array of shape [rows, ...], the same on all ranks.
        name: As for :func:`allreduce`.
        op: As for :func:`allreduce`.
        prescale_factor: Multiplies every contribution.
        postscale_factor: Multiplies the result.
        process_set: As for :func:`allreduce`.
    Returns:
        A new array of shape [rows of this rank, ...]: the parts lie in rank order in what an
        allreduce gives, and the first (rows % size) ranks get one row more than the others.
    Raises:
        MismatchError: Ranks passed different shapes, dtypes, operations or factors.
        ValueError: A scalar.
        TypeError: ``tensor`` has no usable dtype or is no array.
    """
    how = reduction_options(REDUCESCATTER, op, prescale_factor, postscale_factor, process_set)
    return basics.current().core.submit(how, tensor, name, BLOCKS)


def reducescatter_async(
    tensor: Any,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """As :func:`reducescatter`; ``synchronize`` the handle. Leave ``tensor`` alone until then."""
    how = reduction_options(REDUCESCATTER, op, prescale_factor, postscale_factor, process_set)
    return basics.current().core.submit(how, tensor, name)


def grouped_reducescatter(
    tensors: Arrays,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """As :func:`reducescatter` of each array, in fewer messages; all of a rank's on one device."""
    how = reduction_options(REDUCESCATTER, op, prescale_factor, postscale_factor, process_set)
    return submit_group(how, tensors, name, BLOCKS)


def grouped_reducescatter_async(
    tensors: Arrays,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """As :func:`grouped_reducescatter`; ``synchronize`` the handle."""
    how = reduction_options(REDUCESCATTER, op, prescale_factor, postscale_factor, process_set)
    return submit_group(how, tensors, name)


def alltoall(
    tensor: Any,
    splits: npt.ArrayLike | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Gives every rank a part of this rank's rows, and this rank a part of everybody's.

    Args:
        tensor: Array of shape [rows, ...], of any dtype: the first rows go to rank 0, the next to
            rank 1, and so on. The dimensions after the first and the dtype are the same on all ranks.
        splits: Integers, how many rows go to each rank; what they leave over goes nowhere. None:
            the same number to each, of which the rows must be a multiple.
        name: As for :func:`allreduce`.
        process_set: As for :func:`allreduce`.
    Returns:
        A new array with the rows that came, in rank order. With ``splits`` also how many came from
        each rank: NumPy int64 [size].
    Raises:
        MismatchError: Ranks passed different dtypes or dimensions after the first.
        ValueError: ``splits`` do not fit; a scalar; the name is in flight already.
        HorovodInternalError: On all ranks, if one has joined.
    """
    finish = None if splits is None else _with_numbers
    return submit_exchange(tensor, splits, name, process_set, finish, BLOCKS)


def alltoall_async(
    tensor: Any,
    splits: npt.ArrayLike | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """As :func:`alltoall`; ``synchronize`` the handle, which always gives both, the rows that came
    and how many from each rank. Leave ``tensor`` alone until then."""
    return submit_exchange(tensor, splits, name, process_set, _with_numbers)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every rank of the process set has called it."""
    how = options(BARRIER, set=basics.uid_of(process_set, "barrier"))
    basics.current().core.submit(how, (), None, GROUP | BLOCKS)


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
    context = basics.current()
    context.joins += 1
    return context.core.join()


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


def interrupted(name: str | None = None) -> Handle:
    """The handle of a blocking call that an exception ended, such as KeyboardInterrupt.

    Its operation goes on, as the other ranks count on it, and its name is in use until it has
    finished; ``synchronize`` waits for that and gives what the call would have returned. To call
    the function again then is another operation, for which all ranks must call it again.

    Args:
        name: Of the call; None: of the last such call, whatever its name.
    Raises:
        ValueError: There is none that was not synchronized.
        HorovodInternalError: Not initialized.
    """
    handle = basics.current().core.find_interrupted(name)
    if handle is None:
        which = "" if name is None else f" with name {name!r}"
        raise ValueError(f"there is no interrupted call{which} that was not synchronized")
    return handle


# For the frontends.


def reduction(op: int | None) -> int:
    """Horovod's number of a reduce operation as the C ABI's; None means Average.

    Raises:
        ValueError: No such operation.
    """
    if op is None:
        op = Average
    number = _REDUCTIONS.get(op)
    if number is not None:
        return number
    raise ValueError(f"op must be Average, Sum, Adasum, Min, Max or Product, not {op!r}")


def reduction_options(
    kind: int,
    op: int | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    wire: int = 0,
) -> _core.Options:
    """Of an allreduce or a reducescatter."""
    uid = 0 if process_set is global_process_set else basics.uid_of(process_set, _KINDS[kind])
    return options(kind, reduction(op), prescale, postscale, -1, wire, uid)


def broadcast_options(
    root_rank: int, process_set: ProcessSet, function: str = ""
) -> _core.Options:
    """ValueError if there is no such rank."""
    size = basics.current().topology.size
    if not 0 <= root_rank < size:
        raise ValueError(f"broadcast: root rank {root_rank} is not in 0..{size - 1}")
    uid = basics.uid_of(process_set, function or "broadcast")
    ranks = process_set.ranks if uid else None
    if ranks is not None and root_rank not in ranks:
        raise ValueError(
            f"broadcast received invalid root rank {root_rank} for provided process set"
        )
    return options(BROADCAST, 0, 1.0, 1.0, int(root_rank), 0, uid, function)


def gather_options(process_set: ProcessSet, function: str = "") -> _core.Options:
    """Of an allgather, of which ``function`` is the user's name."""
    uid = basics.uid_of(process_set, function or "allgather")
    return options(ALLGATHER, 0, 1.0, 1.0, -1, 0, uid, function)


def submit_group(
    how: _core.Options,
    tensors: Arrays,
    name: str | None,
    flags: int = 0,
    finish: Callable[..., Any] | None = None,
) -> Any:
    """One operation on several arrays.

    Raises:
        TypeError: They are no list or tuple.
        ValueError: There is none; they are on several devices.
    """
    if not isinstance(tensors, Sequence):
        raise TypeError(
            f"{how.function}: expected a list of tensors, got a {type(tensors).__name__}"
        )
    if not tensors:
        raise ValueError(f"{how.function}: there must be at least one tensor")
    return basics.current().core.submit(how, tensors, name, flags | GROUP, finish)


def submit_exchange(
    tensor: Any,
    splits: Any,
    name: str | None,
    process_set: ProcessSet,
    finish: Callable[..., Any] | None,
    flags: int = 0,
) -> Any:
    """An alltoall; ``finish`` makes of the array and the numbers of rows what the user gets."""
    uid = basics.uid_of(process_set, "alltoall")
    context = basics.current()
    size = process_set.size() if uid else context.topology.size
    shape = tensor.shape if hasattr(tensor, "shape") else _libraries.as_array(tensor).shape
    sends = rows_to_each(splits, shape[0], size or 1) if len(shape) else None
    how = options(ALLTOALL, 0, 1.0, 1.0, -1, 0, uid)
    return context.core.submit(how, tensor, name, flags, finish, splits=sends)


def rows_to_each(splits: Any, rows: int, size: int) -> tuple[int, ...]:
    """How many of ``rows`` rows an alltoall sends to each of ``size`` ranks.

    Args:
        splits: Integers, one per rank, as a sequence or an array; what they leave over of the rows
            goes nowhere. None: the same number to each rank.
        rows: Of the tensor.
        size: Of the process set.
    Raises:
        ValueError: They do not fit.
    """
    if splits is None:
        if rows % size != 0:
            raise ValueError(
                "alltoall: splits not provided, but first dimension of tensor is not an even "
                f"multiple of the number of workers: {rows} rows for {size} ranks"
            )
        return (rows // size,) * size
    numbers = _as_numbers(splits)
    if numbers.ndim != 1:
        raise ValueError(
            f"alltoall expects a 1D splits tensor, one number per rank; got shape {numbers.shape}"
        )
    if len(numbers) != size:
        raise ValueError(
            "alltoall: Number of entries in splits does not equal number of workers: "
            f"{len(numbers)} for {size} ranks"
        )
    if numbers.dtype.kind not in "iu":
        raise ValueError(f"alltoall expects splits to contain integers, not {numbers.dtype}")
    sends: list[int] = numbers.tolist()
    if min(sends) < 0:
        raise ValueError(f"alltoall: splits must not be negative: {sends}")
    if sum(sends) > rows:
        raise ValueError(
            "alltoall: Sum of splits entries is greater than the first dimension of tensor: "
            f"{sends} for {rows} rows"
        )
    return tuple(sends)


def _as_numbers(splits: Any) -> npt.NDArray[Any]:
    """``splits`` as NumPy sees them.

    Raises:
        ValueError: They are no sequence of numbers and no array.
    """
    try:
        numbers = np.asarray(splits)
    except ValueError:  # of unequal lengths
        numbers = np.asarray(None)
    if numbers.dtype.kind in "OSU":
        raise ValueError(
            "alltoall expects splits as a sequence or an array of integers, one per rank; got "
            f"{splits!r:.80}"
        )
    return numbers


def _with_numbers(rows: Any, numbers: list[int]) -> tuple[Any, npt.NDArray[np.int64]]:
    return rows, np.array(numbers, np.int64)


def _allreduce(
    op: int | None, prescale: float, postscale: float, process_set: ProcessSet
) -> _core.Options:
    return reduction_options(ALLREDUCE, op, prescale, postscale, process_set)


def _checked(handle: object) -> Handle:
    if not isinstance(handle, Handle):
        raise ValueError(f"Handle {handle!r} was not created or has been cleared.")
    return handle
