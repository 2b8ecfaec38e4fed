"""A transformation of optax that averages gradients before the optimizer sees them."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from farandole import ops
from farandole.basics import ProcessSet, global_process_set
from farandole.compression import Compression
from farandole.jax.ops import grouped_allreduce

_numbers = itertools.count()


class AccumulationState(NamedTuple):
    """Of an optimizer with ``backward_passes_per_step`` > 1."""

    inner: Any
    passes: jax.Array
    """int32 scalar: how many are in ``gradients``."""
    gradients: Any
    """The sum of this rank's since the last step."""


def DistributedOptimizer(
    optimizer: Any, op: int | None = None, compression: int = Compression.none, backward_passes_per_step: int = 1,
    name: str | None = None, process_set: ProcessSet = global_process_set,
) -> Any:  # fmt: skip
    """Makes ``update`` combine the gradients of all ranks, in one operation, before ``optimizer`` gets them.

    It belongs outermost: ``optax.chain``, ``optax.apply_if_finite`` and clipping go inside, where they see gradients
    that are the same on all ranks and so decide the same. Instead of ``optax.MultiSteps``, which around this would
    reduce in each of its small steps, pass ``backward_passes_per_step``.

    Args:
        optimizer: An optax transformation, such as ``optax.adam(1e-3)``.
        op: Average (default) or Sum.
        compression: One of :class:`Compression`.
        backward_passes_per_step: So many calls of ``update``, the same on all ranks, are one step: of all but the last
            the updates are zeros and nothing is sent; the optimizer gets the mean over them.
        name: Of the operation, the same on all ranks; None: numbered in the order in which optimizers are made.
        process_set: The ranks that train together.
    Returns:
        An ``optax.GradientTransformationExtraArgs``.
    Raises:
        ValueError: Another op, or less than one pass.
        TypeError: ``optimizer`` is no optax transformation.
    """
    import optax

    if op not in (None, ops.Average, ops.Sum):
        raise ValueError(f"DistributedOptimizer: op must be Average or Sum, not {op!r}")
    if not isinstance(backward_passes_per_step, int) or backward_passes_per_step < 1:
        raise ValueError(
            f"DistributedOptimizer: backward_passes_per_step must be an integer from 1 on, not "
            f"{backward_passes_per_step!r}"
        )
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise TypeError(f"DistributedOptimizer: expected an optax transformation, got a {type(optimizer).__name__}")
    inner = optax.with_extra_args_support(optimizer)
    called = f"optimizer.{next(_numbers)}" if name is None else name

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        leaves, tree = jax.tree.flatten(gradients)
        if leaves:
            leaves = grouped_allreduce(leaves, called, op, process_set=process_set, compression=compression)
        return inner.update(tree.unflatten(leaves), state, params, **extra)

    reducing = optax.GradientTransformationExtraArgs(inner.init, update)
    return reducing if backward_passes_per_step == 1 else _accumulating(reducing, backward_passes_per_step)


def _accumulating(optimizer: Any, passes: int) -> Any:
    """Calls ``optimizer`` once in so many passes. ``lax.cond`` on the number of passes, which is the same on all
    ranks, keeps what the optimizer does, the collective too, out of the others."""
    import optax

    def init(params: Any) -> AccumulationState:
        gradients = jax.tree.map(lambda leaf: jnp.zeros(jnp.shape(leaf), _sum_type(leaf)), params)
        return AccumulationState(optimizer.init(params), jnp.zeros((), jnp.int32), gradients)

    def update(gradients: Any, state: AccumulationState, params: Any = None, **extra: Any) -> Any:
        total = _as_types_of(jax.tree.map(jnp.add, state.gradients, gradients), state.gradients)

        def step() -> Any:
            means = jax.tree.map(lambda leaf: leaf / passes, total)
            updates, inner = optimizer.update(_as_types_of(means, gradients), state.inner, params, **extra)
            return updates, AccumulationState(
                _as_types_of(inner, state.inner), jnp.zeros_like(state.passes), _zeros(total)
            )

        def accumulate() -> Any:
            updates, _ = jax.eval_shape(step)
            return _zeros(updates), AccumulationState(state.inner, state.passes + 1, total)

        return jax.lax.cond(state.passes + 1 == passes, step, accumulate)

    return optax.GradientTransformationExtraArgs(init, update)


def _sum_type(leaf: Any) -> Any:
    """Of several of its kind: not narrower than float32."""
    kind = jnp.result_type(leaf)
    return jnp.promote_types(kind, jnp.float32) if jnp.issubdtype(kind, jnp.floating) else kind


def _as_types_of(tree: Any, others: Any) -> Any:
    return jax.tree.map(_as_type_of, tree, others)


def _as_type_of(leaf: Any, other: Any) -> Any:
    kind = jnp.result_type(other)
    return leaf if jnp.result_type(leaf) == kind else jnp.asarray(leaf, kind)


def _zeros(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)
