"""Gradients of TensorFlow's tapes, and of Keras's optimizers, combined over all ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from farandole import _core, ops
from farandole.basics import ProcessSet, global_process_set
from farandole.compression import Compression, wire_of
from farandole.tensorflow.ops import reduce_all


def reduce_gradients(
    how: _core.Options, gradients: Sequence[Any], name: str | None, sparse_as_dense: bool = False
) -> list[Any]:
    """Combines gradients, of which some may be None or IndexedSlices, in one operation for all dense ones."""
    found = [i for i, each in enumerate(gradients) if each is not None]
    sent = [gradients[i] for i in found]
    if sparse_as_dense:
        sent = [tf.convert_to_tensor(each) for each in sent]
    results: list[Any] = list(gradients)
    if sent:
        for i, made in zip(found, reduce_all(how, sent, name), strict=True):
            results[i] = made
    return results


class _DistributedTape:
    """The part of a tape's class that combines gradients. Its state is that of the tape it was made of."""

    __slots__ = ()

    _farandole_options: _core.Options
    _farandole_sparse_as_dense: bool

    def gradient(self, target: Any, sources: Any, *arguments: Any, **named: Any) -> Any:
        """As ``tf.GradientTape.gradient``, combined over all ranks."""
        gradients = super().gradient(target, sources, *arguments, **named)  # type: ignore[misc]
        leaves = tf.nest.flatten(gradients)
        name = f"gradients of {len(leaves)} sources"  # the same in every step
        made = reduce_gradients(self._farandole_options, leaves, name, self._farandole_sparse_as_dense)
        return tf.nest.pack_sequence_as(gradients, made)


@functools.cache
def _distributed(kind: Any) -> Any:
    slots = ("_farandole_options", "_farandole_sparse_as_dense")
    return type(kind.__name__, (_DistributedTape, kind), {"__doc__": kind.__doc__, "__slots__": slots})


def DistributedGradientTape(
    gradtape: tf.GradientTape, device_dense: str = "", device_sparse: str = "", compression: int = Compression.none,
    sparse_as_dense: bool = False, op: int | None = None, gradient_predivide_factor: float = 1.0, num_groups: int = 0,
    groups: Any = None, process_set: ProcessSet = global_process_set, scale_local_gradients: bool = True,
) -> Any:  # fmt: skip
    """A tape like ``gradtape``, with what it has recorded, whose ``gradient()`` combines gradients over all ranks.

    Args:
        gradtape: Before, while or after it records.
        device_dense, device_sparse, num_groups, groups, scale_local_gradients: Ignored; for compatibility with
            Horovod. All dense gradients are reduced in one operation.
        compression: One of :class:`Compression`.
        sparse_as_dense: Makes IndexedSlices, such as gradients of embeddings, dense before, instead of gathering them.
        op: Average (default), Sum or Adasum.
        gradient_predivide_factor: Of a mean: divides gradients before the sum by it, and after it by size() / it.
        process_set: The ranks that train together.
    Raises:
        TypeError: ``gradtape`` is no tape.
        ValueError: Another op or compression.
    """
    del device_dense, device_sparse, num_groups, groups, scale_local_gradients
    if not isinstance(gradtape, tf.GradientTape):
        raise TypeError(f"DistributedGradientTape: gradtape must be a tf.GradientTape, not a {type(gradtape).__name__}")
    if isinstance(gradtape, _DistributedTape):
        raise ValueError("DistributedGradientTape: gradtape is distributed already")
    given: Any = type(gradtape)
    kind = _distributed(given)
    tape = kind.__new__(kind)
    tape.__dict__ = gradtape.__dict__  # that of one recording: what ends it ends it for both
    tape._farandole_sparse_as_dense = sparse_as_dense
    tape._farandole_options = ops.gradient_options(
        op, gradient_predivide_factor, process_set, wire_of(compression), "DistributedGradientTape"
    )
    return tape
