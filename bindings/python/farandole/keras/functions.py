"""Functions on values of any backend of Keras, and on models."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from farandole import basics, ops
from farandole.basics import ProcessSet, global_process_set
from farandole.compression import Compression, wire_of
from farandole.keras.optimizer import DistributedOptimizer

__all__ = ["allgather", "allreduce", "broadcast", "broadcast_variables", "load_model", "reducescatter"]


def allreduce(
    value: Any, name: str | None = None, average: bool | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, op: int | None = None, compression: int = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Any:  # fmt: skip
    """As :func:`farandole.allreduce` of an array, a tensor, a variable or a number; a NumPy array of the latter.
    Outside of compiled code."""
    op, wire = ops.with_average(average, op), wire_of(compression)
    how = ops.reduction_options(ops.ALLREDUCE, op, prescale_factor, postscale_factor, process_set, wire)
    return ops.run(how, _array(value), name)


def allgather(value: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Likewise :func:`farandole.allgather`."""
    return ops.allgather(_array(value), name, process_set)


def broadcast(
    value: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Likewise :func:`farandole.broadcast`."""
    return ops.broadcast(_array(value), root_rank, name, process_set)


def reducescatter(
    value: Any, name: str | None = None, op: int | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Likewise :func:`farandole.reducescatter`."""
    return ops.reducescatter(_array(value), name, op, process_set=process_set)


def _array(value: Any) -> Any:
    value = value.value if isinstance(value, keras.Variable) else value
    if hasattr(value, "detach"):  # of torch: Keras's variables have gradients
        return value.detach()
    is_array = isinstance(value, np.ndarray) or keras.ops.is_tensor(value)
    return value if is_array else np.asarray(value)


def broadcast_variables(
    variables: Sequence[Any], root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> None:
    """Gives every rank's variables the values of ``root_rank``, in one operation. Outside of compiled code.

    Args:
        variables: Keras's, such as ``model.weights``; of the same number, shapes and dtypes on every rank.
        root_rank: Rank whose values win; among all ranks, also with a process set.
        process_set: The ranks that take part, of which this one is.
    Raises:
        MismatchError: Ranks passed different variables; the message lists them.
        TypeError: One is no variable; the message says which.
        ValueError: There is no such rank.
    """
    how = ops.broadcast_options(root_rank, process_set, "broadcast_variables")
    variables = list(variables)
    for i, variable in enumerate(variables):
        if not isinstance(variable, keras.Variable):
            raise TypeError(f"variables[{i}] is of type {type(variable).__name__}; expected a keras.Variable")
    if variables:
        labels = [f"variable {i}" for i in range(len(variables))]  # paths count the models made before
        values = [keras.ops.convert_to_numpy(variable) for variable in variables]
        core, flags = basics.current().core, ops.GROUP | ops.BLOCKS
        made = core.submit(how, values, "variables", flags, labels=labels)
        for variable, value in zip(variables, made, strict=True):
            variable.assign(value)


def load_model(
    filepath: Any, custom_optimizers: Sequence[type] | None = None, custom_objects: Mapping[str, Any] | None = None,
    compression: int = Compression.none, **named: Any,
) -> Any:  # fmt: skip
    """Loads a model, whose optimizer, if it has one, is distributed and keeps its state.

    Args:
        filepath: As ``keras.saving.load_model`` takes it.
        custom_optimizers: Classes of optimizers that Keras does not know.
        custom_objects: As for Keras.
        compression, named: Of :func:`DistributedOptimizer`.
    """
    known = {each.__name__: each for each in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.saving.load_model(filepath, custom_objects=known or None)
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, compression=compression, **named)
        turn_off_xla(model)
    return model


def turn_off_xla(model: Any) -> None:
    """TensorFlow does not compile collectives, but Keras asks for it, unless it is told not to."""
    if keras.backend.backend() == "tensorflow":
        with contextlib.suppress(AttributeError):  # a model that is no Trainer
            model.jit_compile = False
