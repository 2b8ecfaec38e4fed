"""DistributedOptimizer: the same optimizer object, whose gradients are reduced in backward()."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch

from farandole import _context, _work
from farandole.torch._exchange import Exchange
from farandole.torch.compression import Compression, Compressor

_MARK = "_farandole"


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = _work.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: object = None,
    sparse_as_dense: bool = False,
    process_set: object = None,
) -> torch.optim.Optimizer:
    """Makes ``backward()`` reduce the gradients of this optimizer's parameters over all ranks.

    They are final when the outermost ``backward()`` returns, so clipping, unscaling and logging
    need nothing special. With one rank nothing at all changes.

    Args:
        optimizer: Any torch optimizer; its parameters are the same on all ranks.
        named_parameters: Names for messages, usually ``model.named_parameters()``.
        compression: How float32 and float64 gradients travel.
        backward_passes_per_step: Only 1 for now.
        op: Average or Sum.
        gradient_predivide_factor: With Average: divide by this before and by size() / this after
            the sum.
        num_groups: Ignored: gradients are always grouped by the order in which they become ready.
        groups: Ignored, likewise.
        sparse_as_dense: Only False for now.
        process_set: Only the global one for now.
    Returns:
        ``optimizer`` itself. Its class stays as it is; it gains ``synchronize()`` and
        ``skip_synchronize()``, which are never needed. Copies and pickles are plain optimizers.
    Raises:
        ValueError: Names are missing or used twice; it is wrapped already; Farandole has not been
            initialized.
        NotImplementedError: An argument that only has its default for now.
    """
    del num_groups, groups
    named = _name_parameters(optimizer, named_parameters)
    _refuse_unavailable(backward_passes_per_step, op, sparse_as_dense, process_set)
    if gradient_predivide_factor != 1.0 and op != _work.Average:
        raise ValueError("gradient_predivide_factor needs op == Average")
    if _MARK in optimizer.__dict__:
        raise ValueError("this optimizer is wrapped already")
    size = _context.topology().size
    optimizer.__dict__[_MARK] = True
    if size == 1:
        _add_methods(optimizer, None)
        return optimizer
    parameters = _work.Parameters(
        _work.ALLREDUCE,
        _work.reduction(op),
        1.0 / gradient_predivide_factor,
        gradient_predivide_factor,
        wire=compression.wire,
    )
    _connect(optimizer, named, parameters)
    return optimizer


def _connect(
    optimizer: torch.optim.Optimizer,
    named: list[tuple[str, torch.Tensor]],
    parameters: _work.Parameters,
) -> None:
    rank = _context.current()
    for name, parameter in named:
        if any(other.holds(parameter) for other in rank.exchanges):
            raise ValueError(f'parameter "{name}" belongs to another wrapped optimizer already')
    exchange = Exchange(rank, f"gradients.{rank.exchange_count}.", named, parameters)
    rank.exchange_count += 1
    rank.exchanges.add(exchange)
    optimizer.register_step_pre_hook(partial(_before_step, exchange))
    optimizer.register_step_post_hook(partial(_after_step, exchange))
    _add_methods(optimizer, exchange)


def _before_step(exchange: Exchange, _optimizer: Any, args: Any, kwargs: Any) -> None:
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:  # otherwise the closure's backward is the round
        exchange.before_step()


def _after_step(exchange: Exchange, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
    exchange.after_step()


def _add_methods(optimizer: torch.optim.Optimizer, exchange: Exchange | None) -> None:
    """Puts the extra methods into the instance, where pickling and copying do not see them."""
    plain = weakref.WeakMethod(optimizer.zero_grad)

    def zero_grad(set_to_none: bool = True) -> None:
        if exchange is not None:
            exchange.before_zero_grad()
        bound = plain()
        if bound is not None:
            bound(set_to_none)

    def synchronize() -> None:
        if exchange is not None:
            exchange.before_step()

    optimizer.__dict__.update(
        zero_grad=zero_grad, synchronize=synchronize, skip_synchronize=_skip_synchronize
    )


@contextlib.contextmanager
def _skip_synchronize() -> Iterator[None]:
    """For Horovod's scripts: step() knows by itself whether the gradients are reduced."""
    yield


def _name_parameters(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
) -> list[tuple[str, torch.Tensor]]:
    """The optimizer's parameters in its order, with their names."""
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


def _refuse_unavailable(
    backward_passes_per_step: int, op: int, sparse_as_dense: bool, process_set: object
) -> None:
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    if backward_passes_per_step != 1:
        raise NotImplementedError("backward_passes_per_step other than 1 is not available")
    if op not in (_work.Average, _work.Sum):
        _work.reduction(op)
        raise ValueError("op must be Average or Sum for gradients")
    if sparse_as_dense:
        raise NotImplementedError("sparse_as_dense is not available")
    _work.default_process_set(process_set)
