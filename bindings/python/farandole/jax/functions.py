"""What makes ranks alike at the start."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from farandole import basics, objects, ops
from farandole.basics import ProcessSet, global_process_set
from farandole.jax._library import run_eagerly

_Function = TypeVar("_Function", bound=Callable[..., Any])


def broadcast_parameters(params: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set) -> Any:
    """Gives every rank the arrays of ``root_rank``, in one operation. Outside of jit.

    Args:
        params: A pytree of arrays: parameters, or the state of an optimizer, keys of ``jax.random`` included. The same
            tree, shapes and dtypes on every rank.
        root_rank: Rank whose values win; 0 <= root_rank < size().
        process_set: The ranks that take part; the root is one of them.
    Returns:
        The same tree, of new arrays.
    Raises:
        MismatchError: Ranks passed different trees, shapes or dtypes; the message lists them.
        TypeError: A leaf is no array; the message says which.
    """
    how = ops.broadcast_options(root_rank, process_set)
    placed, tree = jax.tree_util.tree_flatten_with_path(params)
    if not placed:
        return params
    labels = [f"params{jax.tree_util.keystr(path)}" for path, _ in placed]
    leaves = [leaf for _, leaf in placed]
    arrays = [_to_send(label, leaf) for label, leaf in zip(labels, leaves, strict=True)]
    submit, flags = basics.current().core.submit, ops.GROUP | ops.BLOCKS
    received = run_eagerly(submit, how, arrays, "parameters", flags, labels=labels)
    return tree.unflatten(_as_before(leaf, made) for leaf, made in zip(leaves, received, strict=True))


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _to_send(label: str, leaf: Any) -> Any:
    if isinstance(leaf, jax.core.Tracer):
        raise TypeError(f"{label} has no values, as it is traced: call broadcast_parameters outside of jit")
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        raise TypeError(
            f"{label} is of type {type(leaf).__name__}; expected an array (objects are sent by broadcast_object)"
        )
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _as_before(leaf: Any, made: Any) -> Any:
    return jax.random.wrap_key_data(jnp.asarray(made), impl=jax.random.key_impl(leaf)) if _is_key(leaf) else made


def _leave_after(function: _Function) -> _Function:
    """The same function of Farandole's, which other threads' programs need not wait for afterwards."""

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        return run_eagerly(function, *arguments, **options)

    return cast(_Function, call)


add_process_set = _leave_after(basics.add_process_set)
allgather_object = _leave_after(objects.allgather_object)
broadcast_object = _leave_after(objects.broadcast_object)
join = _leave_after(ops.join)
remove_process_set = _leave_after(basics.remove_process_set)
