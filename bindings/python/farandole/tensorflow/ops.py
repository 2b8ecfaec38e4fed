"""Collectives on TensorFlow's tensors, eager and inside ``tf.function``, with gradients.

Eager tensors are read where they are. In a graph each call becomes one ``tf.numpy_function``, which TensorFlow runs in
the order in which the calls were traced and neither removes nor merges; it waits there for the other ranks. Ranks match
calls by name, or without one by their order, so all ranks must trace the same calls in the same order; where they do
not, all of them get an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from farandole import _activity, _core, _libraries, basics, ops
from farandole.basics import ProcessSet, global_process_set
from farandole.compression import Compression, wire_of

try:
    from tensorflow.python.eager.record import could_possibly_record as _may_be_recorded
except ImportError:  # not public: without it every call takes as long as one within a tape

    def _may_be_recorded() -> bool:
        return True


__all__ = [
    "allgather", "allreduce", "alltoall", "barrier", "broadcast", "broadcast_variables", "grouped_allgather",
    "grouped_allreduce", "grouped_reducescatter", "join", "local_rank_op", "local_size_op", "rank_op", "reducescatter",
    "size_op",
]  # fmt: skip

_SUM, _AVERAGE = ops.reduction(ops.Sum), ops.reduction(ops.Average)

Tensors = Sequence[Any]


def allreduce(
    tensor: Any, average: bool | None = None, device_dense: str = "", device_sparse: str = "",
    compression: int = Compression.none, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, name: str | None = None, process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:  # fmt: skip
    """Combines ``tensor`` over all ranks. The gradient of a sum is the sum of the gradients, of a mean their mean.

    Args:
        tensor: A tensor, a variable, what TensorFlow makes a tensor of, or ``tf.IndexedSlices``: these are not summed
            but gathered, so that the same index may come several times; their shapes may differ between ranks.
        average: Deprecated, use ``op``.
        device_dense, device_sparse, ignore_name_scope: Ignored; for compatibility with Horovod.
        compression: One of :class:`Compression`.
        op: Average (default), Sum, Adasum, Min, Max or Product; the first two have gradients and take IndexedSlices.
        prescale_factor, postscale_factor: Multiply every contribution, and the result; numbers.
        name: The same on all ranks; None: matched by the order of the unnamed calls.
        process_set: The ranks that take part, of which this one is.
    Returns:
        A new tensor of the same shape and dtype; IndexedSlices of IndexedSlices.
    Raises:
        MismatchError: Ranks passed different shapes, dtypes, operations or factors. In a graph this and all other
            errors of the operation come as TensorFlow's, with the text.
        TypeError: ``tensor`` has no usable dtype, or is no tensor.
    """
    (result,) = grouped_allreduce(
        [tensor], average, device_dense, device_sparse, compression, op, prescale_factor, postscale_factor,
        process_set, ignore_name_scope, name,
    )  # fmt: skip
    return result


def grouped_allreduce(
    tensors: Tensors, average: bool | None = None, device_dense: str = "", device_sparse: str = "",
    compression: int = Compression.none, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set, ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:  # fmt: skip
    """As :func:`allreduce` of each of ``tensors``, in one operation; as many on every rank."""
    del device_dense, device_sparse, ignore_name_scope
    how = ops.reduction_options(
        ops.ALLREDUCE, ops.with_average(average, op), prescale_factor, postscale_factor, process_set,
        wire_of(compression),
    )  # fmt: skip
    return reduce_all(how, ops.not_empty(tensors, how), name)


def reduce_all(how: _core.Options, tensors: Tensors, name: str | None) -> list[Any]:
    """An allreduce of dense tensors in one operation, and of IndexedSlices by two allgathers more."""
    sparse = [i for i, tensor in enumerate(tensors) if isinstance(tensor, tf.IndexedSlices)]
    dense = [i for i in range(len(tensors)) if i not in sparse]
    results: list[Any] = [None] * len(tensors)
    for numbers, function in ((dense, _reduce), (sparse, _gather_slices)):
        if numbers:
            made = function(how, [tensors[i] for i in numbers], name)
            for i, result in zip(numbers, made, strict=True):
                results[i] = result
    return results


def _reduce(how: _core.Options, tensors: Tensors, name: str | None) -> list[Any]:
    def backward(*gradients: Any) -> Any:
        _check_is_linear(how, name)
        return _reduce(how, gradients, _of_gradient(name))

    return _differentiable(how, tensors, name, lambda _: backward)


def _gather_slices(how: _core.Options, slices: Sequence[tf.IndexedSlices], name: str | None) -> list[Any]:
    """Sums, or means, of IndexedSlices: those of all ranks one after the other."""
    _check_slices(how, slices)
    gather = ops.options(ops.ALLGATHER, 0, 1.0, 1.0, -1, 0, how.set)
    parts = [[each.values for each in slices], [each.indices for each in slices]]
    values, indices = (
        _gather(gather, part, None if name is None else f"{name}.{suffix}")
        for part, suffix in zip(parts, ("values", "indices"), strict=True)
    )
    factor = how.prescale * how.postscale
    count = _number(lambda: basics.current().core.rank_and_size(how.set)[1]) if how.op == _AVERAGE else 1
    return [
        tf.IndexedSlices(value * tf.cast(factor / tf.cast(count, tf.float64), value.dtype), index, each.dense_shape)
        for value, index, each in zip(values, indices, slices, strict=True)
    ]


def _check_slices(how: _core.Options, slices: Sequence[tf.IndexedSlices]) -> None:
    """ValueError if these cannot be combined by gathering them."""
    for each in slices:
        if how.op not in (_SUM, _AVERAGE):
            raise ValueError(
                "allreduce of tf.IndexedSlices needs op=Average or op=Sum; pass tf.convert_to_tensor(...) of them, or "
                "sparse_as_dense=True"
            )
        is_plain = how.op == _SUM and how.prescale * how.postscale == 1
        if not is_plain and not (each.dtype.is_floating or each.dtype.is_complex):
            raise ValueError(
                f"allreduce of tf.IndexedSlices of {each.dtype.name} needs op=Sum and factors of 1, as their sum has "
                "not been taken yet; pass tf.convert_to_tensor(...) of them"
            )


def allgather(
    tensor: Any, name: str | None = None, ignore_name_scope: bool = False, process_set: ProcessSet = global_process_set
) -> Any:
    """Gathers the rows of all ranks on every rank, in rank order. The gradient of a rank's rows is the sum of all
    ranks' gradients of them.

    Args:
        tensor: Of shape [rows, ...] and any dtype but strings; the number of rows may differ between ranks.
        name, ignore_name_scope, process_set: As for :func:`allreduce`.
    Returns:
        A tensor of shape [sum of all rows, ...].
    Raises:
        MismatchError: Ranks passed different dtypes or dimensions after the first.
        ValueError: A scalar.
    """
    (result,) = grouped_allgather([tensor], name, ignore_name_scope, process_set)
    return result


def grouped_allgather(
    tensors: Tensors, name: str | None = None, ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:  # fmt: skip
    """As :func:`allgather` of each of ``tensors``, in one operation; as many on every rank."""
    del ignore_name_scope
    how = ops.gather_options(process_set)
    return _gather(how, ops.not_empty(tensors, how), name)


def _gather(how: _core.Options, tensors: Tensors, name: str | None) -> list[Any]:
    def differentiate(rows: Any) -> Callable[..., Any]:
        def backward(*gradients: Any) -> Any:
            sums = _reduce(ops.options(ops.ALLREDUCE, _SUM, 1.0, 1.0, -1, 0, how.set), gradients, _of_gradient(name))
            rank = _number(lambda: basics.current().core.rank_and_size(how.set)[0])
            starts = tf.cumsum(rows, axis=1, exclusive=True)
            return [one[starts[i, rank] : starts[i, rank] + rows[i, rank]] for i, one in enumerate(sums)]

        return backward

    return _differentiable(how, tensors, name, differentiate)


def reducescatter(
    tensor: Any, device_dense: str = "", compression: int = Compression.none, op: int | None = None,
    name: str | None = None, process_set: ProcessSet = global_process_set, ignore_name_scope: bool = False,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Any:  # fmt: skip
    """As :func:`allreduce`, but every rank gets only its split of the result's rows: the first (rows % size) ranks get
    one row more than the others.

    Args:
        tensor: Of shape [rows, ...], the same on all ranks.
        device_dense, compression, op, name, process_set, ignore_name_scope, prescale_factor, postscale_factor: As for
            :func:`allreduce`.
    Returns:
        A tensor of shape [rows of this rank, ...].
    Raises:
        MismatchError: Ranks passed different shapes, dtypes, operations or factors.
        ValueError: A scalar.
    """
    (result,) = grouped_reducescatter(
        [tensor], device_dense, compression, op, process_set, ignore_name_scope, prescale_factor, postscale_factor, name
    )
    return result


def grouped_reducescatter(
    tensors: Tensors, device_dense: str = "", compression: int = Compression.none, op: int | None = None,
    process_set: ProcessSet = global_process_set, ignore_name_scope: bool = False, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, name: str | None = None,
) -> list[Any]:  # fmt: skip
    """As :func:`reducescatter` of each of ``tensors``, in one operation; as many on every rank."""
    del device_dense, ignore_name_scope
    wire = wire_of(compression)
    how = ops.reduction_options(ops.REDUCESCATTER, op, prescale_factor, postscale_factor, process_set, wire)

    def backward(*gradients: Any) -> Any:
        _check_is_linear(how, name)
        gather = ops.options(ops.ALLGATHER, 0, 1.0, 1.0, -1, 0, how.set)
        count = _number(lambda: basics.current().core.rank_and_size(how.set)[1]) if how.op == _AVERAGE else 1
        factor = how.prescale * how.postscale / tf.cast(count, tf.float64)
        return [one * tf.cast(factor, one.dtype) for one in _gather(gather, gradients, _of_gradient(name))]

    return _differentiable(how, ops.not_empty(tensors, how), name, lambda _: backward)


def broadcast(
    tensor: Any, root_rank: int, name: str | None = None, ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:  # fmt: skip
    """Copies the values of ``root_rank`` to every rank. The gradient is the sum of all ranks' at the root, and zero on
    the others.

    Args:
        tensor: Of the same shape and dtype on all ranks; any dtype but strings. Only the root's values matter.
        root_rank: Among all ranks, also with a process set; the same on all ranks.
        name, ignore_name_scope, process_set: As for :func:`allreduce`.
    Returns:
        A new tensor.
    Raises:
        MismatchError: Ranks passed different shapes, dtypes or roots.
        ValueError: There is no such rank.
    """
    del ignore_name_scope
    how = ops.broadcast_options(root_rank, process_set)

    def backward(gradient: Any) -> Any:
        reduce = ops.options(ops.ALLREDUCE, _SUM, 1.0, 1.0, -1, 0, how.set)
        (one,) = _reduce(reduce, [gradient], _of_gradient(name))
        return one * tf.cast(rank_op() == root_rank, one.dtype)

    (result,) = _differentiable(how, [tensor], name, lambda _: backward)
    return result


def broadcast_variables(
    variables: Tensors, root_rank: int, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> None:
    """Gives every rank's variables the values of ``root_rank``, in one operation.

    Args:
        variables: Of TensorFlow or Keras; of the same number, shapes and dtypes on every rank.
        root_rank, process_set: As for :func:`broadcast`.
        inplace: Ignored; for compatibility with Horovod.
    Raises:
        MismatchError: Ranks passed different variables; the message lists them.
        TypeError: One is no variable; the message says which.
    """
    del inplace
    how = ops.broadcast_options(root_rank, process_set, "broadcast_variables")
    variables = list(variables)
    for i, variable in enumerate(variables):
        if not hasattr(variable, "assign"):
            raise TypeError(f"variables[{i}] is of type {type(variable).__name__}; expected a tf.Variable or Keras's")
    if variables:
        labels = [f"variable {i}" for i in range(len(variables))]
        made, _ = _run(how, [tf.convert_to_tensor(each) for each in variables], "variables", labels=labels)
        for variable, value in zip(variables, made, strict=True):
            variable.assign(value)


def alltoall(
    tensor: Any, splits: Any = None, name: str | None = None, ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:  # fmt: skip
    """Sends a slice of this rank's rows to each rank, and receives a slice from each. The gradients take the way back.

    Args:
        tensor: Of shape [rows, ...]: the first rows go to rank 0, the next to rank 1, and so on.
        splits: Integers, how many rows go to each rank; the remaining rows are not sent. None: as many to each rank.
        name, ignore_name_scope, process_set: As for :func:`allreduce`.
    Returns:
        The received rows, in rank order. With ``splits`` also how many came from each rank, in the dtype of ``splits``
        or int32.
    Raises:
        MismatchError: Ranks passed different dtypes or dimensions after the first.
        ValueError: ``splits`` do not fit; a scalar.
    """
    del ignore_name_scope
    how = ops.exchange_options(process_set)
    result, received = _exchange(how, tensor, splits, name)
    if splits is None:
        return result
    return result, tf.cast(received, splits.dtype if isinstance(splits, tf.Tensor) else tf.int32)


def _exchange(how: _core.Options, tensor: Any, splits: Any, name: str | None) -> tuple[Any, Any]:
    counts: list[Any] = []

    def differentiate(rows: Any) -> Callable[..., Any]:
        counts.append(rows)

        def backward(gradient: Any) -> Any:
            back, _ = _exchange(how, gradient, rows[0], _of_gradient(name))
            left = tf.shape(sent)[0] - tf.shape(back)[0]
            return tf.concat([back, tf.zeros(tf.concat([[left], tf.shape(back)[1:]], 0), back.dtype)], 0)

        return backward

    sent = _tensor(how, tensor)
    (result,) = _differentiable(how, [sent], name, differentiate, splits)
    return result, counts[0][0]


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every rank of the process set has called it. In a graph what is traced after it, and has an effect
    or is a collective, runs after it."""

    def wait() -> int:
        ops.barrier(process_set)
        return 0

    _number(wait)


def join(device: int = -1) -> Any:
    """As :func:`farandole.join`: a number, in a graph an int64 tensor."""
    return ops.join(device) if tf.executing_eagerly() else _number(ops.join)


def rank_op(name: str | None = None) -> Any:
    """This rank, as an int64 tensor that a graph reads when it runs."""
    del name
    return _number(basics.rank)


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Likewise the number of ranks; ValueError for a process set."""
    del name
    if process_set_id != 0:
        raise ValueError(f"size_op: process_set_id must be 0, not {process_set_id!r}; use process_set.size()")
    return _number(basics.size)


def local_rank_op(name: str | None = None) -> Any:
    """Likewise this rank's number on its host."""
    del name
    return _number(basics.local_rank)


def local_size_op(name: str | None = None) -> Any:
    """Likewise the number of ranks on its host."""
    del name
    return _number(basics.local_size)


def _number(function: Callable[[], int]) -> Any:
    """What it gives when the program runs, as an int64 tensor."""
    if tf.executing_eagerly():
        return tf.constant(function(), tf.int64)
    made = tf.numpy_function(lambda: np.int64(function()), [], tf.int64)
    made.set_shape([])
    return made


def _of_gradient(name: str | None) -> str | None:
    return None if name is None else f"{name}.gradient"


def _check_is_linear(how: _core.Options, name: str | None) -> None:
    if how.op not in (_SUM, _AVERAGE):
        raise NotImplementedError(
            f"{how.function} {name or 'without a name'}: only op=Sum and op=Average have gradients; use "
            "tf.stop_gradient"
        )


def _differentiable(
    how: _core.Options, tensors: Tensors, name: str | None, differentiate: Callable[[Any], Callable[..., Any]],
    splits: Any = None,
) -> list[Any]:  # fmt: skip
    """The results of a collective. ``differentiate`` gets the numbers of rows, int64 [tensors, ranks] or None, and
    gives the function that makes gradients of the tensors of those of the results."""

    def run(*given: Any) -> Any:
        results, rows = _run(how, given, name, splits)
        return tuple(results), differentiate(rows)

    sent = [_tensor(how, tensor) for tensor in tensors]
    if tf.executing_eagerly() and not _may_be_recorded():  # a third of the time
        results, rows = _run(how, sent, name, splits)
        differentiate(rows)
        return results
    return list(tf.custom_gradient(run)(*sent))


def _tensor(how: _core.Options, given: Any) -> Any:
    """A tensor that can be sent.

    Raises:
        TypeError: It has no usable dtype, or its values are not dense.
        ValueError: A scalar where rows are needed.
    """
    if isinstance(given, tf.SparseTensor | tf.RaggedTensor) or (
        isinstance(given, tf.IndexedSlices) and how.kind != ops.ALLREDUCE
    ):
        raise TypeError(f"{how.function}: expected a dense tensor, got a {type(given).__name__}; send its parts")
    tensor = tf.convert_to_tensor(given)
    try:
        _libraries.check_name(tensor.dtype.name, how.kind not in ops.REDUCING)
    except TypeError as error:
        raise TypeError(f"{how.function}: {error}") from None
    if how.kind in ops.BY_ROWS and tensor.shape.rank == 0:
        raise ValueError(f"{how.function}: a scalar has no rows; pass a tensor of one dimension or more")
    return tensor


def _run(
    how: _core.Options, tensors: Tensors, name: str | None, splits: Any = None, labels: Sequence[str] | None = None
) -> tuple[list[Any], Any]:
    """The results, and of an allgather and an alltoall how many rows came: int64 [tensors, ranks]."""
    counts_rows = how.kind in (ops.ALLGATHER, ops.ALLTOALL)

    def finish(results: Sequence[Any], rows: Sequence[Sequence[int]] = ()) -> list[Any]:
        return [*results, np.array(rows, np.int64)] if counts_rows else list(results)

    def submit(*values: Any) -> list[Any]:
        sent = values[: len(tensors)]
        parts = None if splits is None else np.asarray(values[-1]).tolist()
        flags, core = ops.GROUP | ops.BLOCKS, basics.current().core
        made: list[Any] = core.submit(how, sent, name, flags, finish, labels=labels, splits=parts)
        return made

    given = [*tensors] if splits is None else [*tensors, splits]
    made = submit(*given) if tf.executing_eagerly() else _in_graph(how, submit, given, tensors, counts_rows)
    return (made[:-1], tf.convert_to_tensor(made[-1])) if counts_rows else (made, None)


def _in_graph(
    how: _core.Options, submit: Callable[..., list[Any]], given: Tensors, tensors: Tensors, counts_rows: bool
) -> list[Any]:
    """Calls ``submit`` on NumPy arrays, which share memory with the tensors, when the graph runs."""
    dtypes = [tensor.dtype for tensor in tensors] + [tf.int64] * counts_rows
    made: list[Any] = list(tf.numpy_function(submit, given, dtypes))
    for result, tensor in zip(made, tensors, strict=False):
        rows = [None] if how.kind in ops.BY_ROWS else []
        is_known = tensor.shape.rank is not None
        result.set_shape(tf.TensorShape(rows).concatenate(tensor.shape[len(rows) :]) if is_known else tensor.shape)
    if counts_rows:
        made[-1].set_shape([len(tensors), None])
    return made


_activity.count_only_waiting()
for _name in [*__all__, "reduce_all"]:  # AutoGraph would rewrite these functions, to no use
    globals()[_name] = tf.autograph.experimental.do_not_convert(globals()[_name])
