"""The primitive of all collectives in traced code, with its gradients, its batches, and how XLA gets it.

It takes the tensors of one operation and gives their results. There is no JAX effect: jit refuses effects on sharded
arrays, and jax.checkpoint in gradients. What keeps XLA from dropping, merging or moving a call is its own flag
``has_side_effect``, and what orders the calls of a program is a token: see _chain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from farandole import basics, ops
from farandole.jax import _chain, _library
from farandole.jax._internals import ir, stablehlo

_SUM, _AVERAGE = ops.reduction(ops.Sum), ops.reduction(ops.Average)


@dataclasses.dataclass(frozen=True)
class Call:
    """What all ranks agree on besides the tensors, and what shapes depend on. A parameter of the primitive."""

    kind: int
    name: str
    op: int = 0
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    """Of an allreduce: only this rank gets the result, the others zeros; -1: all do."""
    wire: int = 0
    set: int = 0
    rank: int = 0
    """Of this process in the set, which has ``size`` of them."""
    size: int = 1
    rows: tuple[int, ...] = ()
    """Of an allgather, how many each tensor has in all; (): as many from each rank as this one gives."""

    @property
    def function(self) -> str:
        """What users call."""
        return ops.KINDS[self.kind]

    def renamed(self, suffix: str, **changes: Any) -> Call:
        """Another one, of the same operation's derivative."""
        return dataclasses.replace(self, name=self.name.removesuffix(".tangent") + suffix, **changes)


collective_p = Primitive("farandole_collective")
collective_p.multiple_results = True


def bind(tensors: Sequence[Any], call: Call) -> list[Any]:
    """The results of one operation in traced code.

    Raises:
        ValueError: On a rank that is a thread.
    """
    if basics._of_thread.get() is not None:
        raise ValueError(f"{call.function}: in jit, grad and vmap, ranks are processes, and this one is a thread")
    _library.leave_thread()
    return _bind(tensors, call)


def _bind(tensors: Sequence[Any], call: Call) -> list[Any]:
    results: list[Any] = collective_p.bind(*tensors, call=call)
    return results


def _rows_of(call: Call, index: int, rows: int) -> int:
    """Of the result of tensor ``index``, which has ``rows``."""
    if call.kind == ops.ALLGATHER:
        return call.rows[index] if call.rows else rows * call.size
    if call.kind == ops.REDUCESCATTER:
        return (rows + call.size - 1 - call.rank) // call.size  # the first ranks get one row more
    return rows


def _shapes(*tensors: Any, call: Call) -> list[Any]:
    if call.kind == ops.BARRIER:
        return [jax.core.ShapedArray((), np.dtype(np.int8))]
    shapes = [tensor.shape for tensor in tensors]
    if call.kind in ops.BY_ROWS:
        shapes = [(_rows_of(call, index, shape[0]), *shape[1:]) for index, shape in enumerate(shapes)]
    # update: in shard_map the types say more, over which axes the arrays vary.
    return [tensor.update(shape=shape, weak_type=False) for tensor, shape in zip(tensors, shapes, strict=True)]


def _run(*tensors: Any, call: Call) -> list[Any]:
    """Outside of jit, as a part of a gradient or a batch."""
    results: list[Any] = _library.run_eagerly(_run_now, tensors, call)
    return results


def _run_now(tensors: Sequence[Any], call: Call) -> list[Any]:
    root = call.root if call.kind == ops.BROADCAST else -1
    how = ops.options(call.kind, call.op, call.prescale, call.postscale, root, call.wire, call.set)
    if call.kind == ops.BARRIER:
        basics.current().core.submit(how, (), None, ops.GROUP | ops.BLOCKS)
        return [jax.numpy.zeros((), np.int8)]
    results: list[Any] = ops.run_group(how, tensors, call.name)
    is_others = call.kind == ops.ALLREDUCE and call.root not in (-1, basics.topology().rank)
    return [jax.numpy.zeros_like(result) for result in results] if is_others else results


# For XLA.


def _attributes(call: Call, devices: int) -> ir.DictAttr:
    """What bindings/xla/call_frame.h reads."""
    integer, real = ir.IntegerType.get_signless(64), ir.F64Type.get()
    numbers = {"devices": devices, "kind": call.kind, "number": -1, "op": call.op, "rank": call.rank,
               "root": call.root, "set": call.set, "size": call.size, "wire": call.wire}  # fmt: skip
    attributes: dict[str, Any] = {key: ir.IntegerAttr.get(integer, value) for key, value in numbers.items()}
    attributes["prescale"] = ir.FloatAttr.get(real, call.prescale)
    attributes["postscale"] = ir.FloatAttr.get(real, call.postscale)
    attributes["name"] = ir.StringAttr.get(call.name)
    return ir.DictAttr.get(attributes)


def _layouts(ranks: Sequence[int]) -> ir.ArrayAttr:
    """In C order."""
    orders = [np.arange(rank - 1, -1, -1) for rank in ranks]
    return ir.ArrayAttr.get([ir.DenseIntElementsAttr.get(order, type=ir.IndexType.get()) for order in orders])


def _devices(ctx: mlir.LoweringRuleContext, call: Call) -> int:
    """How many devices of this process run the program and call alike; 0: shard_map's, each with its own arrays.

    Raises:
        NotImplementedError: They are not all of this process, or some axes of the mesh are left to XLA.
    """
    axes = ctx.module_context.axis_context
    what = f"{call.function} {call.name!r}"
    if not isinstance(axes, mlir.SPMDAxisContext):
        if getattr(getattr(axes, "axis_env", None), "sizes", ()):  # pmap's
            raise NotImplementedError(f"{what}: in pmap there are no collectives between processes; use jax.shard_map")
        _check_are_local(getattr(axes, "device_assignment", None) or (), what)
        return int(getattr(axes, "num_devices", 1))
    _check_are_local(getattr(axes.mesh, "_flat_devices_tuple", None) or (), what)
    if not axes.manual_axes or axes.mesh.size == 1:
        return int(axes.mesh.size)
    left = [name for name, size in axes.mesh.shape.items() if name not in axes.manual_axes and size > 1]
    if left:
        raise NotImplementedError(
            f"{what}: shard_map leaves axes {left} of the mesh to XLA; expected all in axis_names"
        )
    return 0


def _check_are_local(devices: Sequence[Any], what: str) -> None:
    others = [device for device in devices if device.process_index != jax.process_index()]
    if others:
        raise NotImplementedError(
            f"{what}: {others[0]} is another process's; each rank runs its own programs, on its own devices"
        )


def _lower(ctx: mlir.LoweringRuleContext, *operands: ir.Value, call: Call) -> list[ir.Value]:
    devices, given = _devices(ctx, call), list(operands)
    _chain.mark(ctx.module_context.module)
    results = [
        ir.RankedTensorType.get(aval.shape, ir.RankedTensorType(operand.type).element_type)
        for operand, aval in zip(operands, ctx.avals_out)
        if call.kind != ops.BARRIER  # whose only result is the token
    ]
    given.append(_chain.start())
    results.append(given[-1].type)
    ranks = [ir.RankedTensorType(one.type).rank for one in given]
    if devices == 0:
        given.append(stablehlo.partition_id())
        ranks.append(0)
    made = stablehlo.CustomCallOp.build_generic(
        results=results,
        operands=given,
        attributes={
            "call_target_name": ir.StringAttr.get(_chain.TARGET),
            "has_side_effect": ir.BoolAttr.get(devices <= 1),  # which XLA refuses where it partitions
            "backend_config": _attributes(call, devices),
            "api_version": ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 4),  # typed FFI
            "operand_layouts": _layouts(ranks),
            "result_layouts": _layouts([ir.RankedTensorType(result).rank for result in results]),
        },
    ).results
    return list(made) if call.kind == ops.BARRIER else list(made)[:-1]


# Derivatives.


def _check_is_linear(call: Call) -> None:
    if call.kind in ops.REDUCING and call.op not in (_SUM, _AVERAGE):
        raise NotImplementedError(
            f"{call.function} {call.name!r}: only op=Sum and op=Average have gradients; use jax.lax.stop_gradient"
        )


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: Call) -> tuple[list[Any], list[Any]]:
    results = _bind(primals, call)
    derived = [ad.Zero(jax.typeof(result).to_tangent_aval()) for result in results]
    chosen = [index for index, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]
    if chosen and call.kind != ops.BARRIER:
        _check_is_linear(call)
        rows = tuple(call.rows[index] for index in chosen) if call.rows else ()
        changed = call.renamed(".tangent", rows=rows)
        made = _bind([tangents[index] for index in chosen], changed)
        for index, tangent in zip(chosen, made, strict=True):
            derived[index] = tangent
    return results, derived


def _transpose(cotangents: Sequence[Any], *operands: Any, call: Call) -> list[Any]:
    chosen = [index for index, cotangent in enumerate(cotangents) if type(cotangent) is not ad.Zero]
    results: list[Any] = [None] * len(cotangents)
    if chosen:
        rows = [operands[index].aval.shape[0] if call.kind in ops.BY_ROWS else 0 for index in chosen]
        given = [cotangents[index] for index in chosen]
        for index, made in zip(chosen, _gradients(given, rows, call), strict=True):
            results[index] = made
    return results


def _gradients(cotangents: list[Any], rows: list[int], call: Call) -> list[Any]:
    """Of the sum of all ranks' results with respect to this rank's tensors, which have ``rows``."""
    if call.kind == ops.ALLREDUCE and call.root >= 0:
        changed = call.renamed(".gradient", kind=ops.BROADCAST, op=0, prescale=1.0, postscale=1.0, wire=0)
        return _bind(cotangents, changed)
    if call.kind in (ops.ALLREDUCE, ops.ALLTOALL):
        return _bind(cotangents, call.renamed(".gradient"))
    if call.kind == ops.ALLGATHER:
        changed = call.renamed(".gradient", kind=ops.REDUCESCATTER, op=_SUM, rows=())
        return _bind(cotangents, changed)
    if call.kind == ops.BROADCAST:
        # Only the root gets it. A constant here, which differs by rank, would let XLA order programs differently.
        return _bind(cotangents, call.renamed(".gradient", kind=ops.ALLREDUCE, op=_SUM))
    factor = call.prescale * call.postscale / (call.size if call.op == _AVERAGE else 1)
    changed = call.renamed(".gradient", kind=ops.ALLGATHER, op=0, prescale=1.0, postscale=1.0, wire=0, rows=tuple(rows))
    made = _bind(cotangents, changed)
    return made if factor == 1 else [one * np.asarray(factor, one.dtype) for one in made]


# Batches: one operation of all of it.


def _batch(tensors: Sequence[Any], axes: Sequence[Any], *, call: Call) -> tuple[list[Any], list[Any]]:
    if call.kind == ops.BARRIER:
        return _bind(tensors, call), [None]
    axes, tensors = list(axes), list(tensors)
    if call.kind in ops.BY_ROWS:
        for index, axis in enumerate(axes):
            if axis is not None:
                tensors[index] = jax.numpy.moveaxis(tensors[index], axis, 1)
                axes[index] = 1
    return _bind(tensors, call), axes


def _define() -> None:
    collective_p.def_impl(_run)
    collective_p.def_abstract_eval(_shapes)
    mlir.register_lowering(collective_p, _lower, platform="cpu")
    ad.primitive_jvps[collective_p] = _jvp
    ad.primitive_transposes[collective_p] = _transpose
    batching.primitive_batchers[collective_p] = _batch


_define()
