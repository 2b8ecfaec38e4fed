"""Optimizers of Keras that combine gradients over all ranks before they use them."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import keras

from farandole.basics import ProcessSet, global_process_set
from farandole.compression import Compression, wire_of
from farandole.keras._backends import Reducer, callers, make_reducer

_numbers = itertools.count()


class Distributed:
    """The part of an optimizer's class that combines gradients: for ``isinstance``."""

    _farandole_reduce: Reducer
    _farandole_how: dict[str, Any]

    def __reduce__(self) -> Any:
        """Copies and pickles are distributed, too, under a number of their own if this one has no name."""
        made: Any = super().__reduce__()
        return _load, (self.__class__, *made[1], self._farandole_how)

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """As the optimizer's own, with gradients that are combined first; ``stateless_apply`` calls it too."""
        return super().apply(self._farandole_reduce(list(grads)), trainable_variables)  # type: ignore[misc]

    def build(self, variables: Any) -> Any:
        """As the optimizer's own.

        Raises:
            ValueError: A LossScaleOptimizer has this one inside. It looks for infinite gradients before they are
                combined, and would leave out the step on some ranks only. Or a variable is one of float8 training,
                whose gradient is its next value.
        """
        for variable in variables:
            if getattr(variable, "overwrite_with_gradient", False):
                raise ValueError(f"DistributedOptimizer: {variable.path} of float8 training has no gradient to combine")
        for outer in callers(keras.optimizers.LossScaleOptimizer):
            if outer is not self:
                raise ValueError(
                    "DistributedOptimizer is inside of a LossScaleOptimizer, as compile() makes one of a model with "
                    "mixed_float16; pass DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer)) instead"
                )
        return super().build(variables)  # type: ignore[misc]


class DistributedLossScale(Distributed):
    """Likewise of a LossScaleOptimizer, whose ``stateless_apply`` does not call ``apply``."""

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        """See above."""
        reduced = self._farandole_reduce(list(grads))
        return super().stateless_apply(optimizer_variables, reduced, trainable_variables)  # type: ignore[misc]


def _load(kind: Any, file: Any, how: dict[str, Any]) -> Any:
    return DistributedOptimizer(kind._unpickle_model(file), **how)


@functools.cache
def _distributed(kind: Any) -> Any:
    """The class of an optimizer with the part above. Keras saves and makes it as ``kind``."""
    part = DistributedLossScale if issubclass(kind, keras.optimizers.LossScaleOptimizer) else Distributed
    names = {
        "__doc__": kind.__doc__, "__module__": kind.__module__, "__class__": property(lambda _: kind),
        "from_config": staticmethod(kind.from_config),
    }  # fmt: skip
    return type(kind.__name__, (part, kind), names)


def DistributedOptimizer(
    optimizer: Any, name: str | None = None, device_dense: str = "", device_sparse: str = "",
    compression: int = Compression.none, sparse_as_dense: bool = False, gradient_predivide_factor: float = 1.0,
    op: int | None = None, backward_passes_per_step: int = 1, average_aggregated_gradients: bool = False,
    num_groups: int = 0, groups: Any = None, process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:  # fmt: skip
    """Makes ``optimizer`` combine the gradients of all ranks, in one operation, before it clips and uses them.

    The optimizer stays what it is: it has its variables and configuration, is saved as an optimizer of its class, and
    loaded as such by Keras, or distributed by :func:`farandole.keras.load_model`. A LossScaleOptimizer belongs inside.

    Args:
        optimizer: Of Keras, built or not. It is changed itself.
        name: Of the operation, the same on all ranks; None: numbered in the order in which optimizers are made.
        device_dense, device_sparse, average_aggregated_gradients, num_groups, groups, scale_local_gradients: Ignored;
            for compatibility with Horovod.
        compression: One of :class:`Compression`.
        sparse_as_dense: With TensorFlow: makes IndexedSlices dense before, instead of gathering them.
        gradient_predivide_factor: Of a mean: divides gradients before the sum by it, and after it by size() / it.
        op: Average (default), Sum or, but with JAX, Adasum.
        backward_passes_per_step: 1; the optimizer's own gradient_accumulation_steps does more.
        process_set: The ranks that train together.
    Returns:
        ``optimizer``.
    Raises:
        TypeError: ``optimizer`` is none of Keras 3.
        ValueError: It is distributed already; an argument has another value.
    """
    del device_dense, device_sparse, average_aggregated_gradients, num_groups, groups, scale_local_gradients
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"DistributedOptimizer: optimizer must be a keras.optimizers.Optimizer, not {type(optimizer).__name__}"
        )
    if isinstance(optimizer, Distributed):
        raise ValueError("DistributedOptimizer: optimizer is distributed already")
    if backward_passes_per_step != 1:
        raise ValueError(
            f"DistributedOptimizer: backward_passes_per_step must be 1, not {backward_passes_per_step!r}; pass "
            "gradient_accumulation_steps to the optimizer instead"
        )
    called = f"keras optimizer {next(_numbers)}" if name is None else name
    reducer = make_reducer(op, gradient_predivide_factor, process_set, wire_of(compression), called, sparse_as_dense)
    how: dict[str, Any] = {
        "name": name, "compression": compression, "sparse_as_dense": sparse_as_dense, "op": op,
        "gradient_predivide_factor": gradient_predivide_factor,
    }  # fmt: skip
    if process_set is not global_process_set:
        how["process_set"] = process_set
    object.__setattr__(optimizer, "_farandole_reduce", reducer)  # which Keras does not track
    object.__setattr__(optimizer, "_farandole_how", how)
    kind: Any = type(optimizer)
    object.__setattr__(optimizer, "__class__", _distributed(kind))
    return optimizer
