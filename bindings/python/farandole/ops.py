"""Collectives on arrays of any library: NumPy, CuPy, JAX, PyTorch, whatever speaks DLPack or buffers.

Results are of the kind of array that was given; of a plain buffer (``bytearray``, ``array.array``) and
of an array of a library that makes none itself they are NumPy's. Arrays on an NVIDIA GPU are reduced
where they are, as ``farandole.torch`` does it with torch's: in order with their streams, without the
host waiting for the end. ``farandole.torch`` has the same functions with Horovod's arguments.

A collective is described once, by a function such as ``_allreduce``; :func:`blocking` and
:func:`asynchronous` make the public functions of it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final, ParamSpec, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from farandole import _core, basics
from farandole.basics import ProcessSet, global_process_set

__all__ = [
    "Adasum", "Average", "Handle", "Max", "Min", "Product", "Sum", "allgather", "allgather_async",
    "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "alltoall", "alltoall_async",
    "barrier", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "grouped_allgather",
    "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async",
    "grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async", "interrupted",
    "join", "poll", "reducescatter", "reducescatter_async", "synchronize",
]  # fmt: skip

Average, Sum, Adasum, Min, Max, Product = range(6)  # Horovod's, which scripts write and print

Handle = _core.Work
Arrays = Sequence[Any]
P = ParamSpec("P")
T = TypeVar("T")
#: What to do, on what, under which name, and GROUP where it is a list: as Context.submit() takes it.
Call: TypeAlias = tuple[_core.Options, T, str | None, int]

# farandole_kind of the C ABI.
ALLREDUCE, BROADCAST, ALLGATHER, REDUCESCATTER, ALLTOALL, BARRIER = range(6)
# How _core.Context.submit() does it.
GROUP, IN_PLACE, BLOCKS, INTERNAL = 1, 2, 4, 8

_KINDS: Final = ("allreduce", "broadcast", "allgather", "reducescatter", "alltoall", "barrier")
_REDUCTIONS: Final = {Average: 1, Sum: 0, Min: 2, Max: 3, Product: 4, Adasum: 9}

#: Options(kind, op, prescale, postscale, root, wire, set, function), as farandole_params has them.
options: Final = functools.lru_cache(maxsize=4096)(_core.Options)


def blocking(describe: Callable[P, Call[T]], flags: int = 0) -> Callable[P, T]:
    """The public function of a collective that waits and gives the result."""
    return _public(describe, flags | BLOCKS)


def asynchronous(describe: Callable[P, Call[Any]], flags: int = 0) -> Callable[P, Handle]:
    """The public function of a collective that starts it and gives a handle."""
    return _public(describe, flags)


def _public(describe: Callable[P, Call[Any]], flags: int) -> Callable[P, Any]:
    def call(*args: P.args, **kwargs: P.kwargs) -> Any:
        how, given, name, group = describe(*args, **kwargs)
        return basics.current().core.submit(how, given, name, group | flags)

    return named(call, describe, flags)


def named(call: Callable[P, T], describe: Callable[P, Any], flags: int) -> Callable[P, T]:
    """Gives ``call`` the name, signature and documentation that users see."""
    functools.update_wrapper(call, describe)
    signature = inspect.signature(describe)
    given, result = next(iter(signature.parameters)), signature.return_annotation[len("Call[") : -1]
    base, suffix = describe.__name__.lstrip("_"), "_" if flags & IN_PLACE else ""
    name = base + suffix
    if suffix:
        call.__doc__ = f"As :func:`{base}`, in place. Returns ``{given}``."
    if not flags & BLOCKS:
        call.__doc__ = (
            f"As :func:`{name}`; ``synchronize`` the handle. Leave ``{given}`` alone until then."
        )
        name, result = f"{base}_async{suffix}", "Handle"
    call.__name__ = call.__qualname__ = name
    call.__annotations__ = describe.__annotations__ | {"return": result}
    vars(call)["__signature__"] = signature.replace(return_annotation=result)
    return call


def _allreduce(
    tensor: Any,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Call[Any]:
    """Combines ``tensor`` over all ranks.

    Args:
        tensor: Array of any shape, the same on all ranks. A strided one in host memory is copied; on
            a GPU, and to be changed in place, it must be C-contiguous.
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
    how = reduction_options(ALLREDUCE, op, prescale_factor, postscale_factor, process_set)
    return how, tensor, name, 0


def _grouped_allreduce(
    tensors: Arrays,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Call[list[Any]]:
    """As :func:`allreduce` of each array, in one operation; as many arrays on every rank, all of a
    rank's on one device."""
    how = reduction_options(ALLREDUCE, op, prescale_factor, postscale_factor, process_set)
    return group(how, tensors, name)


allreduce = blocking(_allreduce)
allreduce_ = blocking(_allreduce, IN_PLACE)
allreduce_async = asynchronous(_allreduce)
allreduce_async_ = asynchronous(_allreduce, IN_PLACE)
grouped_allreduce = blocking(_grouped_allreduce)
grouped_allreduce_ = blocking(_grouped_allreduce, IN_PLACE)
grouped_allreduce_async = asynchronous(_grouped_allreduce)
grouped_allreduce_async_ = asynchronous(_grouped_allreduce, IN_PLACE)


def _broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Call[Any]:
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
    return broadcast_options(root_rank, process_set), tensor, name, 0


broadcast = blocking(_broadcast)
broadcast_ = blocking(_broadcast, IN_PLACE)
broadcast_async = asynchronous(_broadcast)
broadcast_async_ = asynchronous(_broadcast, IN_PLACE)


def _allgather(
    tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Call[Any]:
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
    return gather_options(process_set), tensor, name, 0


def _grouped_allgather(
    tensors: Arrays, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Call[list[Any]]:
    """As :func:`allgather` of each array, in fewer messages; as many arrays on every rank, all of a
    rank's on one device."""
    return group(gather_options(process_set), tensors, name)


allgather = blocking(_allgather)
allgather_async = asynchronous(_allgather)
grouped_allgather = blocking(_grouped_allgather)
grouped_allgather_async = asynchronous(_grouped_allgather)


def _reducescatter(
    tensor: Any,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Call[Any]:
    """As :func:`allreduce`, but every rank gets a part of the result's rows only.

    Args:
        tensor: Array of shape [rows, ...], the same on all ranks.
        name: As for :func:`allreduce`, like what follows.
        op: Average (default), Sum, Min, Max or Product.
        prescale_factor: Multiplies every contribution.
        postscale_factor: Multiplies the result.
        process_set: The ranks that take part.
    Returns:
        A new array of shape [rows of this rank, ...]: the parts lie in rank order in what an
        allreduce gives, and the first (rows % size) ranks get one row more than the others.
    Raises:
        MismatchError: Ranks passed different shapes, dtypes, operations or factors.
        ValueError: A scalar.
        TypeError: ``tensor`` has no usable dtype or is no array.
    """
    how = reduction_options(REDUCESCATTER, op, prescale_factor, postscale_factor, process_set)
    return how, tensor, name, 0


def _grouped_reducescatter(
    tensors: Arrays,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Call[list[Any]]:
    """As :func:`reducescatter` of each array, in fewer messages; all of a rank's on one device."""
    how = reduction_options(REDUCESCATTER, op, prescale_factor, postscale_factor, process_set)
    return group(how, tensors, name)


reducescatter = blocking(_reducescatter)
reducescatter_async = asynchronous(_reducescatter)
grouped_reducescatter = blocking(_grouped_reducescatter)
grouped_reducescatter_async = asynchronous(_grouped_reducescatter)


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
    handle: Handle = submit_exchange(tensor, splits, name, process_set, _with_numbers)
    return handle


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


def _checked(handle: object) -> Handle:
    if not isinstance(handle, Handle):
        raise ValueError(f"Handle {handle!r} was not created or has been cleared.")
    return handle


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
    """Horovod's number of a reduce operation as the C ABI's; None: Average. ValueError: no such one."""
    number = _REDUCTIONS.get(Average if op is None else op)
    if number is None:
        raise ValueError(f"op must be Average, Sum, Adasum, Min, Max or Product, not {op!r}")
    return number


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
    """Of a broadcast, of which ``function`` is the user's name; ValueError if there is no such rank."""
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
    """Of an allgather, likewise."""
    uid = basics.uid_of(process_set, function or "allgather")
    return options(ALLGATHER, 0, 1.0, 1.0, -1, 0, uid, function)


def group(how: _core.Options, tensors: Sequence[T], name: str | None) -> Call[list[T]]:
    """One operation on several arrays.

    Raises:
        TypeError: They are no list or tuple.
        ValueError: There is none.
    """
    if not isinstance(tensors, Sequence):
        raise TypeError(
            f"{how.function}: expected a list of tensors, got a {type(tensors).__name__}"
        )
    if not tensors:
        raise ValueError(f"{how.function}: there must be at least one tensor")
    return how, list(tensors), name, GROUP


def submit_group(
    how: _core.Options,
    tensors: Arrays,
    name: str | None,
    flags: int = 0,
    finish: Callable[..., Any] | None = None,
) -> Any:
    """Submits what :func:`group` gives."""
    how, given, name, is_group = group(how, tensors, name)
    return basics.current().core.submit(how, given, name, is_group | flags, finish)


def submit_exchange(
    tensor: Any,
    splits: Any,
    name: str | None,
    process_set: ProcessSet,
    finish: Callable[..., Any] | None,
    flags: int = 0,
) -> Any:
    """An alltoall; ``finish`` makes of the array and the numbers of rows what the user gets."""
    how, to_each = exchange_options(splits, process_set)
    return basics.current().core.submit(how, tensor, name, flags, finish, splits=to_each)


def exchange_options(
    splits: Any, process_set: ProcessSet
) -> tuple[_core.Options, list[int] | None]:
    """Of an alltoall, and how many rows go to each rank; None: as many to each.

    Raises:
        ValueError: ``splits`` are not None and no integers in one dimension.
    """
    how = options(ALLTOALL, 0, 1.0, 1.0, -1, 0, basics.uid_of(process_set, "alltoall"))
    if splits is None:
        return how, None
    try:
        numbers = np.asarray(splits)
    except ValueError:  # of unequal lengths
        numbers = np.asarray(None)
    if numbers.dtype.kind in "OSU":
        raise ValueError(
            "alltoall expects splits as a sequence or an array of integers, one per rank; got "
            f"{splits!r:.80}"
        )
    if numbers.ndim != 1:
        raise ValueError(
            f"alltoall expects a 1D splits tensor, one number per rank; got shape {numbers.shape}"
        )
    if numbers.dtype.kind not in "iu" and len(numbers):
        raise ValueError(f"alltoall expects splits to contain integers, not {numbers.dtype}")
    return how, numbers.tolist()


def _with_numbers(rows: Any, numbers: list[int]) -> tuple[Any, npt.NDArray[np.int64]]:
    return rows, np.array(numbers, np.int64)
