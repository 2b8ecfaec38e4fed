"""Functions on whole models and optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from farandole import allgather_object, broadcast_object, ops
from farandole.basics import ProcessSet, global_process_set
from farandole.torch._optimizer_state import broadcast_optimizer_state
from farandole.torch.ops import broadcast_named

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]

Parameterlike = Mapping[str, torch.Tensor] | Iterable[torch.Tensor | tuple[str, torch.Tensor]]


def broadcast_parameters(
    params: Parameterlike, root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> None:
    """Copies every tensor from ``root_rank`` to all ranks, in place.

    Args:
        params: Name -> tensor (usually ``model.state_dict()``), or ``named_parameters()``, or a
            list of tensors; None is passed over. Any shapes; the same names, shapes and dtypes on
            every rank.
        root_rank: Rank whose values win; among all ranks, also with a process set.
        process_set: The ranks that take part, of which this one is.
    Raises:
        MismatchError: Ranks passed different names, shapes or dtypes; the message says which.
        ValueError: ``params`` is nothing of the above; there is no such rank.
    """
    named = [(name, tensor) for name, tensor in _named(params) if tensor is not None]
    for name, tensor in named:
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f'params["{name}"] is of type {type(tensor).__name__}; expected a tensor (objects '
                "travel by broadcast_object, optimizers by broadcast_optimizer_state)"
            )
    broadcast_named(named, ops.broadcast_options(root_rank, process_set), "parameters")


def _named(params: Parameterlike) -> list[tuple[str, torch.Tensor]]:
    if isinstance(params, Mapping):
        return sorted(params.items())
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        raise ValueError(f"invalid params of type: {type(params)}")
    items = [p if isinstance(p, tuple) else (str(i), p) for i, p in enumerate(params)]
    if any(len(item) != 2 or not isinstance(item[0], str) for item in items):
        raise ValueError("params must hold tensors or (name, tensor) pairs")
    return items
