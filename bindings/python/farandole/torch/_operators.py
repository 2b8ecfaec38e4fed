"""The blocking collectives as operators of torch.library, so that torch.compile keeps a graph whole.

Compiled code calls ``torch.ops.farandole.allreduce`` and its like where the program calls the functions of
:mod:`farandole.torch.ops`; a program that is not compiled calls the extension, as ever. Each takes the tensors of one
operation, and returns their results and how many rows of each came from each rank. Gradients are one operator more.
They need torch 2.4; before that a graph breaks at a collective.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from farandole import basics, ops
from farandole.ops import BLOCKS, GROUP
from farandole.torch import _autograd

_KINDS = {
    "allreduce": ops.ALLREDUCE, "allgather": ops.ALLGATHER, "alltoall": ops.ALLTOALL, "broadcast": ops.BROADCAST,
    "reducescatter": ops.REDUCESCATTER,
}  # fmt: skip
_OPTIONS = "int op, float prescale, float postscale, int root, int wire, int set"
Tensors = Sequence[torch.Tensor]


def _run(kind: int, tensors: Tensors, name: str | None, *options: Any) -> list[torch.Tensor]:
    *numbers, splits = options

    def finish(results: Tensors, received: Sequence[list[int]] = ()) -> list[torch.Tensor]:
        if kind == ops.ALLTOALL and max(map(max, received)) >= 2**31:
            raise OverflowError("alltoall in compiled code gives int32 numbers of rows; more than 2**31 - 1 came")
        return [*results, torch.tensor(received, dtype=torch.int64)]

    how = ops.options(kind, *numbers)
    given = None if splits is None else splits.cpu().numpy()
    results: list[torch.Tensor] = basics.current().core.submit(how, tensors, name, GROUP | BLOCKS, finish, splits=given)
    return results


def _fake(kind: int, tensors: Tensors, _name: str | None, *options: Any) -> list[torch.Tensor]:
    rank, size = basics.current().core.rank_and_size(options[5])
    shapes: list[Any] = [list(tensor.shape) for tensor in tensors]
    for shape in shapes:
        if kind == ops.REDUCESCATTER:
            shape[0] = (shape[0] + size - 1 - rank) // size  # the first ranks get one row more
        elif kind in (ops.ALLGATHER, ops.ALLTOALL):
            shape[0] = torch.library.get_ctx().new_dynamic_size()
    has_rows = kind in (ops.ALLGATHER, ops.ALLTOALL)
    rows = torch.empty((len(tensors), size) if has_rows else (0,), dtype=torch.int64)
    return [*(tensor.new_empty(shape) for tensor, shape in zip(tensors, shapes, strict=True)), rows]


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    tensors, ctx.name, *ctx.options, _ = inputs
    ctx.lengths = [tensor.shape[0] if tensor.dim() else 1 for tensor in tensors]
    ctx.save_for_backward(output[-1])


def _backward(kind: int, ctx: Any, gradients: Any) -> Any:
    (rows,) = ctx.saved_tensors
    sent = [g is not None and (g.is_floating_point() or g.is_complex()) for g in gradients[:-1]]
    chosen = [index for index, is_sent in enumerate(sent) if is_sent]
    name = None if ctx.name is None else f"{ctx.name}.gradient"
    done = iter(
        torch.ops.farandole.gradient(
            [gradients[index].contiguous() for index in chosen], rows[chosen] if len(rows) else rows,
            [ctx.lengths[index] for index in chosen], kind, name, *ctx.options,
        )
    )  # fmt: skip
    return [next(done) if is_sent else None for is_sent in sent], *[None] * 8


def _run_gradient(
    gradients: Tensors, rows: torch.Tensor, lengths: Sequence[int], kind: int, name: str | None, *numbers: Any
) -> list[torch.Tensor]:
    shape = torch.Size([lengths[0], *gradients[0].shape[1:]])
    return _autograd.gradients_of(ops.options(kind, *numbers), gradients, name, rows.tolist(), shape)


def _fake_gradient(gradients: Tensors, _: Any, lengths: Sequence[int], kind: int, *__: Any) -> list[torch.Tensor]:
    if kind in (ops.ALLREDUCE, ops.BROADCAST):
        return [gradient.new_empty(gradient.shape) for gradient in gradients]
    return [g.new_empty([length, *g.shape[1:]]) for g, length in zip(gradients, lengths, strict=True)]


def _define() -> torch.library.Library:
    library = torch.library.Library("farandole", "DEF")
    for name, kind in _KINDS.items():
        library.define(f"{name}(Tensor[] tensors, str? name, {_OPTIONS}, Tensor? splits) -> Tensor[]")
        library.impl(name, functools.partial(_run, kind), "CompositeExplicitAutograd")
        torch.library.register_fake(f"farandole::{name}", functools.partial(_fake, kind), lib=library)
        gradient = functools.partial(_backward, kind)
        torch.library.register_autograd(f"farandole::{name}", gradient, setup_context=_keep, lib=library)
    gradient_of = "Tensor[] gradients, Tensor rows, SymInt[] lengths, int kind, str? name"
    library.define(f"gradient({gradient_of}, {_OPTIONS}) -> Tensor[]")
    library.impl("gradient", _run_gradient, "CompositeExplicitAutograd")
    torch.library.register_fake("farandole::gradient", _fake_gradient, lib=library)
    for name in (*_KINDS, "gradient"):  # one whose result a rank does not use is still a part of the others'
        torch.fx.node.has_side_effect(getattr(torch.ops.farandole, name).default)
    return library


#: The operators live as long as this does.
LIBRARY = _define() if hasattr(torch.library, "register_autograd") else None


def _never() -> bool:
    return False


#: Whether torch.compile looks at the caller, which then calls an operator.
is_traced = torch.compiler.is_dynamo_compiling if LIBRARY is not None else _never


def call(
    kind: str, tensors: Tensors, name: str | None, process_set: Any, splits: torch.Tensor | None = None, *,
    op: int = 0, prescale: float = 1.0, postscale: float = 1.0, root: int = -1, wire: int = 0,
) -> tuple[list[torch.Tensor], torch.Tensor]:  # fmt: skip
    """Of traced code: the results, and the numbers of rows [tensors, ranks] where they may differ."""
    set = 0 if process_set is None else process_set._uid
    operator = getattr(torch.ops.farandole, kind)
    *results, rows = operator(list(tensors), name, op, float(prescale), float(postscale), root, wire, set, splits)
    return results, rows
