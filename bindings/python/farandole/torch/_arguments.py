"""Checks of what ``DistributedOptimizer`` is given."""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from farandole import _libraries, ops
from farandole.torch import _library
from farandole.torch._waiting import is_live

Optimizer = torch.optim.Optimizer


def name_parameters(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> list[tuple[str, torch.Tensor]]:
    """The optimizer's parameters in its order, with their names.

    Raises:
        ValueError: Names are missing or used twice; or these are no (name, parameter) pairs.
    """
    given = list(named_parameters or ())
    if any(not isinstance(item, tuple) or len(item) != 2 for item in given):
        raise ValueError("named_parameters should be a sequence of tuples (name, parameter)")
    names: dict[int, str] = {}
    for name, parameter in given:
        names.setdefault(id(parameter), name)
    _refuse_duplicates([name for name, _ in given])
    named = []
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            if given and id(parameter) not in names:
                raise ValueError(
                    f"named_parameters was specified, but parameter {i} of group {g}, shape "
                    f"{list(parameter.shape)}, is not in it"
                )
            named.append((names.get(id(parameter), f"noname.{g}.{i}"), parameter))
    return named


def _refuse_duplicates(names: list[str]) -> None:
    duplicates = sorted(name for name, count in Counter(names).items() if count > 1)
    if duplicates:
        raise ValueError(f"parameter names must be unique; used twice: {', '.join(duplicates)}")


def check_choices(passes: int, op: int, predivide_factor: float, complete: str) -> None:
    """Raises ValueError for a value that does not exist."""
    if not isinstance(passes, int) or passes <= 0:
        raise ValueError(f"backward_passes_per_step must be > 0, not {passes!r}")
    if op not in (ops.Average, ops.Sum, ops.Adasum):
        ops.reduction(op)
        raise ValueError("op must be Average, Sum or Adasum for gradients")
    if predivide_factor != 1.0 and op != ops.Average:
        raise ValueError("gradient_predivide_factor needs op == Average")
    if complete not in ("backward", "step"):
        raise ValueError(f'complete must be "backward" or "step", not {complete!r}')


def count_groups(num_groups: int, groups: object) -> int:
    """How many groups to cut the gradients into; 0: cut them by their size.

    A list of lists is checked and gives 0: what it would keep together is together anyway, in the
    order in which gradients become ready.
    """
    if num_groups:
        warnings.warn("num_groups= is deprecated; use groups=", DeprecationWarning, stacklevel=3)
        groups = num_groups if groups is None else groups
    if groups is None:
        return 0
    if isinstance(groups, int) and not isinstance(groups, bool) and groups >= 0:
        return groups
    if isinstance(groups, list) and all(_is_group(group) for group in groups):
        members = Counter(id(parameter) for group in groups for parameter in group)
        if max(members.values(), default=1) > 1:
            raise ValueError("groups: a parameter is in more than one group")
        return 0
    raise ValueError(
        f"groups should be a non-negative integer or a list of lists of tensors, not {groups!r}"
    )


def _is_group(group: Any) -> bool:
    return isinstance(group, list) and all(isinstance(p, torch.Tensor) for p in group)


def refuse_irreducible(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises ValueError for a parameter whose gradients have a dtype that cannot be reduced."""
    for name, parameter in named:
        if is_live(parameter) and parameter.dtype not in _library.DTYPE_NUMBERS:
            raise ValueError(
                f'parameter "{name}" is of dtype {parameter.dtype}, which cannot be reduced '
                f"(only {', '.join(_libraries.DTYPES)}): freeze it, give it to an optimizer that is not "
                "wrapped, or pass a compression= class that makes another dtype of it"
            )


def refuse_other_wrappers(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises ValueError when DistributedDataParallel or FSDP reduces these gradients already."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    ours = {id(parameter) for _, parameter in named}
    kinds = ("DistributedDataParallel", "FullyShardedDataParallel")
    modules = [m for m in gc.get_objects() if type(m).__name__ in kinds]
    wrappers = [m for m in modules if any(id(p) in ours for p in m.parameters())]
    sharded = [name for name, p in named if type(p).__name__ in ("DTensor", "FlatParameter")]
    if wrappers or sharded:
        kind = type(wrappers[0]).__name__ if wrappers else "FSDP"
        raise ValueError(
            f"the parameters belong to a {kind} module, which reduces their gradients itself; "
            "wrap the plain model's optimizer, or use that module without DistributedOptimizer"
        )
