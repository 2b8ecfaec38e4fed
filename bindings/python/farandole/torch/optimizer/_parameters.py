"""Which parameters an optimizer's gradients are reduced of and how, and that all ranks agree on it."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from farandole import _core, basics, ops
from farandole.basics import ProcessSet
from farandole.torch import _compat, _library

Callback = Callable[..., None]  # what torch passes is ignored
Named = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Settings:
    """What optimizers that share a parameter must agree on.

    Attributes:
        process_set: The ranks that share the gradients.
        options: The reduction.
        compression: An object with ``compress`` and ``decompress``; None: ``options.wire`` does.
        size: How many ranks share the gradients.
        passes: Backward passes per round.
        complete: "backward" or "step".
        densifies: Sparse gradients travel as dense ones.
        group_count: How many groups to cut the gradients into; 0: by their size.
        overlaps: Gradients are sent during the backward pass; otherwise at its end.
        are_shared: Gradients in host memory are made by autograd where ranks reduce without copies.
    """

    process_set: ProcessSet
    options: _core.Options
    compression: Any
    size: int
    passes: int
    complete: str
    densifies: bool
    group_count: int
    overlaps: bool
    are_shared: bool

    def of_now(self) -> Settings:
        """The same in the job that this thread is in, whose ranks may be others.

        Raises:
            TypeError: The process set has not been added to it.
        """
        options = self.options.of_set(basics.uid_of(self.process_set, "DistributedOptimizer"))
        return replace(self, options=options, size=self.process_set.size() or 1)

    def plain(self, kind: int, op: int = ops.Sum) -> _core.Options:
        """Of a collective among the same ranks."""
        reduction = ops.reduction(op) if kind == ops.ALLREDUCE else 0
        return ops.options(kind, reduction, 1.0, 1.0, -1, 0, self.options.set)

    @cached_property
    def is_average(self) -> bool:
        """Whether the result is a mean, which a second backward may be added to."""
        return self.options.op == ops.reduction(ops.Average)

    @property
    def scale(self) -> float:
        """What a plain sum over the ranks is multiplied with to give what gradients become."""
        factor = self.options.prescale * self.options.postscale
        return factor / self.size if self.is_average else factor


def name_parameters(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> Named:
    """The optimizer's parameters in its order, with their names.

    Raises:
        ValueError: Names are missing or used twice; these are no (name, parameter) pairs; or a
            parameter is lazy.
    """
    given = list(named_parameters or ())
    if any(not isinstance(item, tuple) or len(item) != 2 for item in given):
        raise ValueError("named_parameters should be a sequence of tuples (name, parameter)")
    duplicates = sorted(name for name, count in Counter(n for n, _ in given).items() if count > 1)
    if duplicates:
        raise ValueError(f"parameter names must be unique; used twice: {', '.join(duplicates)}")
    names: dict[int, str] = {}
    for name, parameter in given:
        names.setdefault(id(parameter), name)
    named = []
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            if given and id(parameter) not in names:
                raise ValueError(
                    f"named_parameters was specified, but parameter {i} of group {g}, shape "
                    f"{list(parameter.shape)}, is not in it"
                )
            named.append((names.get(id(parameter), f"noname.{g}.{i}"), parameter))
    lazy = [name for name, parameter in named if is_lazy(parameter)]
    if lazy:
        raise ValueError(
            f'parameter "{lazy[0]}" is lazy and has no shape yet: run a forward pass of the model '
            "before DistributedOptimizer"
        )
    return named


def refuse_irreducible(named: Named, takes_complex: bool = True) -> None:
    """Raises ValueError for a parameter whose gradients cannot be reduced: where it is, or its dtype."""
    known = _library.REDUCED if takes_complex else _library.DTYPES
    for name, parameter in named:
        if not is_live(parameter):
            continue
        try:
            _library.check_dense(parameter)
            _library.check_device(parameter)
        except (TypeError, ValueError) as error:
            raise ValueError(f'parameter "{name}": {error}') from None
        if str(parameter.dtype).removeprefix("torch.") not in known:
            raise ValueError(
                f'parameter "{name}" is of dtype {parameter.dtype}, which cannot be reduced '
                f"(only {', '.join(known)}): freeze it, give it to an optimizer that is "
                "not wrapped, or pass a compression= class that makes another dtype of it"
            )


def refuse_other_wrappers(named: Named) -> None:
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


def is_live(parameter: torch.Tensor) -> bool:
    """Whether there is a gradient, or can be one."""
    return parameter.requires_grad or parameter.grad is not None


class GradientHooks:
    """Hooks on one parameter, which outlast a change of its data.

    Args:
        parameter: A leaf; it may be frozen for now.
        before: Called before a gradient is added to ``.grad``, and before torch.autograd.grad() gives
            it away (``_backward_end.is_accumulating``); None: not needed.
        after: Called afterwards.
    """

    def __init__(self, parameter: torch.Tensor, before: Callback | None, after: Callback) -> None:
        self.parameter = parameter
        self._before = before
        self._after = after
        self._handles: list[RemovableHandle] = []
        self.refresh()

    def refresh(self) -> None:
        """Sets the hooks where they are missing: the parameter was frozen, or its tensor swapped."""
        if not self.parameter.requires_grad:
            return
        if self._handles:
            if _compat.swaps_parameters():
                _compat.keep_hooks(self.parameter)
            return
        self._handles.append(self.parameter.register_post_accumulate_grad_hook(self._after))
        if self._before is not None:
            self._handles.append(self.parameter.register_hook(self._before))

    @property
    def is_set(self) -> bool:
        """Whether the hooks are there: the parameter has required a gradient."""
        return bool(self._handles)

    def remove(self) -> None:
        """Takes the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def label(name: str, parameter: torch.Tensor) -> str:
    """What ranks compare of a parameter at the wrap."""
    kind = f"{str(parameter.dtype).removeprefix('torch.')} {list(parameter.shape)}"
    return f"{name} {kind}" + ("" if is_live(parameter) else " (requires no gradient)")
