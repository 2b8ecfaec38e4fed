"""Collectives with gradients, as Horovod has them, also of complex tensors, and differentiable themselves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from farandole import _core, basics, ops
from farandole.ops import BLOCKS, GROUP, Average, Sum

Tensors = Sequence[torch.Tensor]


def needs_gradient(tensors: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in tensors)


def run(
    how: _core.Options, tensors: Sequence[Any], name: str | None, finish: Callable[[Tensors],
    list[torch.Tensor]] | None = None, splits: Any = None, rows: list[list[int]] | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    """Waits for a collective on several tensors, with gradients.

    ``finish`` makes of the results what users get. Where there are gradients, ``rows`` becomes how
    many rows came from each rank, of each tensor.
    """
    if needs_gradient(tensors):
        apply: Any = _Collective.apply
        results = list(apply(how, name, splits, [] if rows is None else rows, *tensors))
        return results if finish is None else finish(results)
    core, flags = basics.current().core, GROUP | BLOCKS
    made: list[torch.Tensor] = core.submit(how, tensors, name, flags, finish, splits=splits)
    return made


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: _core.Options, name: Any, splits: Any, rows: Any, *tensors: torch.Tensor) -> Any:
        ctx.how, ctx.name, ctx.rows, ctx.shape = how, name, rows, tensors[0].shape
        ctx.context = basics.current()

        def finish(results: Tensors, received: Sequence[list[int]] = ()) -> Any:
            rows[:] = received
            return tuple(results)

        core, flags = ctx.context.core, GROUP | BLOCKS
        return core.submit(how, tensors, name, flags, finish, splits=splits)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        is_sent = [g is not None and (g.is_floating_point() or g.is_complex()) for g in gradients]
        sent = list(itertools.compress(gradients, is_sent))
        rows = list(itertools.compress(ctx.rows, is_sent))
        name = None if ctx.name is None else f"{ctx.name}.gradient"
        with basics.using(ctx.context):  # autograd has threads of its own for GPUs
            done = iter(gradients_of(ctx.how, sent, name, rows, ctx.shape))
        return None, None, None, None, *(next(done) if is_one else None for is_one in is_sent)


def gradients_of(
    how: _core.Options, of_results: Tensors, name: str | None, rows: Sequence[list[int]], shape: torch.Size
) -> list[torch.Tensor]:
    """Those of the tensors, of which the first has this shape."""

    def options(kind: int, op: int = 0) -> _core.Options:
        return ops.options(kind, op, 1.0, 1.0, -1, 0, how.set)

    rank, size = basics.current().core.rank_and_size(how.set)
    if how.kind == ops.ALLREDUCE:
        return run(how, of_results, name)
    if how.kind == ops.REDUCESCATTER:
        factor = how.prescale * how.postscale * (size if how.op == ops.reduction(Sum) else 1)
        return run(options(ops.ALLGATHER), [gradient * factor for gradient in of_results], name)
    if how.kind == ops.ALLTOALL:
        (back,) = run(how, of_results, name, splits=rows[0])
        return [torch.cat([back, back.new_zeros(shape[0] - len(back), *shape[1:])])]
    means = run(options(ops.ALLREDUCE, ops.reduction(Average)), of_results, name)
    if how.kind == ops.ALLGATHER:
        own = [(sum(each[:rank]), each[rank]) for each in rows]
        return [mean.narrow(0, *mine) for mean, mine in zip(means, own, strict=True)]
    is_root = basics.topology().rank == how.root
    return means if is_root else [torch.zeros_like(mean) for mean in means]
