"""Functions on whole models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from farandole import _work
from farandole._work import Call, Parameters
from farandole.torch import _tensors

Parameterlike = Mapping[str, torch.Tensor] | Iterable[torch.Tensor | tuple[str, torch.Tensor]]


def broadcast_parameters(params: Parameterlike, root_rank: int = 0) -> None:
    """Copies every tensor from ``root_rank`` to all ranks, in place.

    Args:
        params: Name -> tensor (usually ``model.state_dict()``), or ``named_parameters()``, or a
            list of tensors; any shapes, the same names, shapes and dtypes on every rank.
        root_rank: Rank whose values win; 0 <= root_rank < size().
    Raises:
        MismatchError: Ranks passed different names, shapes or dtypes; the message says which.
        ValueError: ``params`` is nothing of the above; there is no such rank.
    """
    named = [(name, tensor) for name, tensor in _named(params) if tensor is not None]
    parameters = Parameters(_work.BROADCAST, root=_work.check_root(root_rank))
    descriptions = tuple(_tensors.describe(tensor, name) for name, tensor in named)
    wires = [_tensors.canonical(tensor) for _, tensor in named]
    addresses = [_tensors.address(wire) for wire in wires]
    if not named:
        return

    def finish() -> None:
        for (_, tensor), wire in zip(named, wires, strict=True):
            _tensors.copy_into(tensor, wire)

    memory = (named, wires)
    _work.run(Call(parameters, "parameters", descriptions, addresses, addresses, memory, finish))


def _named(params: Parameterlike) -> list[tuple[str, torch.Tensor]]:
    if isinstance(params, Mapping):
        return sorted(params.items())
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        raise ValueError(f"invalid params of type: {type(params)}")
    items = [p if isinstance(p, tuple) else (str(i), p) for i, p in enumerate(params)]
    if any(len(item) != 2 or not isinstance(item[1], torch.Tensor) for item in items):
        raise ValueError("params must hold tensors or (name, tensor) pairs")
    return items
