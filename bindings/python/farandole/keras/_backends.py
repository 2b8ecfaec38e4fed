"""How the gradients that Keras gives an optimizer are combined: with each of its backends as that computes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import keras

from farandole import _activity, _core, ops
from farandole.basics import ProcessSet

if keras.backend.backend() != "torch":
    _activity.count_only_waiting()


class Reducer:
    """Combines the gradients of one optimizer, under one name."""

    def __init__(self, how: _core.Options, name: str) -> None:
        self._options, self._name = how, name

    def __call__(self, gradients: list[Any]) -> list[Any]:
        """The same list with the results; None, of a variable without a gradient, stays so on all ranks."""
        found = [i for i, each in enumerate(gradients) if each is not None]
        results = list(gradients)
        if found:
            for i, made in zip(found, self.reduce([gradients[i] for i in found]), strict=True):
                results[i] = made
        return results

    def reduce(self, gradients: list[Any]) -> list[Any]:
        """Of gradients that are there."""
        raise NotImplementedError


class Torch(Reducer):
    """On tensors of PyTorch, also on GPUs."""

    def reduce(self, gradients: list[Any]) -> list[Any]:
        """See above."""
        return ops.run_group(self._options, gradients, self._name)


class TensorFlow(Reducer):
    """On eager tensors, inside ``tf.function``, and on IndexedSlices."""

    sparse_as_dense = False

    def reduce(self, gradients: list[Any]) -> list[Any]:
        """See above; ValueError in a step that XLA compiles."""
        import tensorflow as tf

        from farandole.tensorflow.gradients import reduce_gradients

        if not tf.executing_eagerly():
            for model in callers(keras.Model):
                if model.jit_compile:
                    raise ValueError(
                        "DistributedOptimizer: jit_compile of the model is True, and TensorFlow compiles no "
                        "collectives; pass jit_compile=False to compile(), or one of farandole.keras.callbacks to fit()"
                    )
        return reduce_gradients(self._options, gradients, self._name, self.sparse_as_dense)


class Jax(Reducer):
    """On arrays, and inside ``jax.jit``."""

    process_set: ProcessSet
    op: int | None
    factors: tuple[float, float]

    def reduce(self, gradients: list[Any]) -> list[Any]:
        """See above."""
        jax = importlib.import_module("farandole.jax")
        made: list[Any] = jax.grouped_allreduce(
            gradients, self._name, self.op, *self.factors, self.process_set, self._options.wire
        )
        return made


def make_reducer(
    op: int | None, predivide: float, process_set: ProcessSet, wire: int, name: str, sparse_as_dense: bool
) -> Reducer:
    """For the backend that Keras has; ValueError if there is none for it, or for an argument."""
    how = ops.gradient_options(op, predivide, process_set, wire, "DistributedOptimizer")
    backend = keras.backend.backend()
    if backend == "torch":
        return Torch(how, name)
    if backend == "tensorflow":
        reducer = TensorFlow(how, name)
        reducer.sparse_as_dense = sparse_as_dense
        return reducer
    if backend == "jax":
        made = Jax(how, name)
        made.op, made.factors, made.process_set = op, (how.prescale, how.postscale), process_set
        return made
    raise ValueError(f"DistributedOptimizer: Keras's backend is {backend!r}; expected torch, jax or tensorflow")


def callers(kind: type) -> Iterator[Any]:
    """The objects of a class whose methods are running, the innermost first. For calls that are made once."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        owner = frame.f_locals.get("self")
        if isinstance(owner, kind):
            yield owner
