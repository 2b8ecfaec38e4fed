"""One chain of all collectives of a program, in the order in which they were traced.

XLA runs what does not depend on each other in an order that also follows from what is returned, and small programs one
call at a time: ranks that return their results in another order would wait for different collectives. So each takes a
token of the one before, through loops, branches and functions. JAX lowers an inner function once, however often it is
called; here each call gets a copy, whose collectives have names of their own.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import numpy as np

from farandole import ops
from farandole.jax._internals import (
    ir,
    jax_mlir,
    lower_jaxpr_to_module,
    sdy,
    source_info_util,
    stablehlo,
    traceback_util,
)

TARGET = "farandole_collective"
_SHARDINGS = ("in_shardings", "out_shardings")
#: What is in shard_map before jax 0.7; XLA's older partitioner refuses tokens that come from outside of it.
_MANUAL_FUNCTION = "shmap_body"


def start() -> ir.Value:
    """What the first call of a chain takes, where the insertion point is."""
    return stablehlo.constant(ir.DenseElementsAttr.get(np.array(0, np.int8)))


class _Chain:
    """Of one module. An operation that another one replaces is erased last: older bindings take a new operation at its
    address for the erased one while Python still has that."""

    def __init__(self, module: ir.Module) -> None:
        self._body, self._symbols = module.body, ir.SymbolTable(module.operation)
        functions = [one.operation for one in module.body.operations if one.operation.name == "func.func"]
        self._functions = {_symbol(one): one for one in functions}
        self._holds: dict[str, bool] = {}
        self._called: set[str] = set()
        self._counts: dict[str, int] = {}
        self._replaced: list[ir.Operation] = []

    def run(self) -> None:
        """From the functions that are not only called in others."""
        entries = [one for name, one in self._functions.items() if not _is_private(one) and self._has(name)]
        for one in entries:
            self._copy_called(one)
        for one in entries:
            self._separately(one)
        while self._replaced:
            self._replaced.pop().erase()

    def _copy_called(self, one: ir.Operation) -> None:
        """Gives each call in ``one`` whose function holds collectives a function of its own."""
        for inner in _operations(one):
            if inner.name != "func.call":
                self._copy_called(inner)
            elif self._has(name := _callee(inner)):
                self._copy_called(self._own(inner, name))

    def _own(self, call: ir.Operation, name: str) -> ir.Operation:
        if name not in self._called:
            self._called.add(name)
            return self._functions[name]
        function = self._functions[name].clone(ip=ir.InsertionPoint(self._body)).operation
        self._symbols.insert(function)
        copy = _symbol(function)
        self._functions[copy], self._holds[copy] = function, True
        self._called.add(copy)
        call.attributes["callee"] = ir.FlatSymbolRefAttr.get(copy)
        return function

    def _has(self, function: str) -> bool:
        """Whether there are collectives in it."""
        if function not in self._holds:
            self._holds[function] = any(map(self._is_or_holds, _operations(self._functions[function])))
        return self._holds[function]

    def _is_or_holds(self, one: ir.Operation) -> bool:
        if one.name == "func.call":
            return self._has(_callee(one))
        return _is_collective(one) or any(map(self._is_or_holds, _operations(one)))

    def _separately(self, one: ir.Operation) -> None:
        """A chain in each block of an operation that no token can go through."""
        for region in one.regions:
            for block in region.blocks:
                with ir.InsertionPoint.at_block_begin(block):
                    first = start()
                self._block(block, first)

    def _block(self, block: ir.Block, token: ir.Value) -> ir.Value:
        """The last one's token."""
        for one in [one.operation for one in block.operations]:
            if _is_collective(one):
                token = self._collective(one, token)
            elif one.name == "func.call" and self._has(_callee(one)):
                token = self._call(one, token)
            elif one.name != "func.call" and self._is_or_holds(one):
                token = self._regions(one, token)
        return token

    def _collective(self, one: ir.Operation, token: ir.Value) -> ir.Value:
        given = ir.DictAttr(one.attributes["backend_config"])
        config = {given[index].name: given[index].attr for index in range(len(given))}
        name = ir.StringAttr(config["name"]).value
        number = self._counts[name] = self._counts.get(name, -1) + 1
        config["number"] = ir.IntegerAttr.get(config["number"].type, number)  # without it the call is refused
        one.attributes["backend_config"] = ir.DictAttr.get(config)
        has_device = ir.IntegerAttr(config["devices"]).value == 0
        one.operands[len(one.operands) - 1 - has_device] = token
        if ir.IntegerAttr(config["kind"]).value in (ops.ALLREDUCE, ops.BROADCAST):
            _reuse_operands(one)
        return _last(one)

    def _call(self, one: ir.Operation, token: ir.Value) -> ir.Value:
        function = self._functions[_callee(one)]
        if _callee(one).startswith(_MANUAL_FUNCTION):
            self._separately(function)
            return token
        (block,) = function.regions[0].blocks
        self._return_also(block, self._block(block, block.add_argument(token.type, one.location)))
        kind = ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value)
        grown = ir.FunctionType.get([*kind.inputs, token.type], [*kind.results, token.type])
        function.attributes["function_type"] = ir.TypeAttr.get(grown)
        for which in ("arg_attrs", "res_attrs"):
            if which in function.attributes:
                given = ir.ArrayAttr(function.attributes[which])
                function.attributes[which] = ir.ArrayAttr.get([*given, ir.DictAttr.get({})])
        return _last(self._with_token(one, [token]))

    def _regions(self, one: ir.Operation, token: ir.Value) -> ir.Value:
        if one.name == "stablehlo.while":
            return self._loop(one, token)
        if one.name == "sdy.manual_computation":
            return self._manual(one, token)
        if one.name not in ("stablehlo.case", "stablehlo.if"):
            self._separately(one)
            return token
        grown = self._with_token(one, [])
        for region in grown.regions:
            (block,) = region.blocks
            self._return_also(block, self._block(block, token))
        return _last(grown)

    def _loop(self, one: ir.Operation, token: ir.Value) -> ir.Value:
        grown = self._with_token(one, [token])
        (condition,), (body,) = (region.blocks for region in grown.regions)
        self._block(condition, condition.add_argument(token.type, grown.location))
        first = body.add_argument(token.type, grown.location)
        last = self._block(body, first)
        if last == first:  # only the condition has collectives; XLA drops what a loop passes on as it is
            with ir.InsertionPoint.at_block_terminator(body):
                last = stablehlo.add(first, first)
        self._return_also(body, last)
        return _last(grown)

    def _manual(self, one: ir.Operation, token: ir.Value) -> ir.Value:
        """That of shard_map: the token is the same on all devices."""
        given = {key: list(sdy.TensorShardingPerValueAttr(one.attributes[key]).shardings) for key in _SHARDINGS}
        known = next((sharding for shardings in given.values() for sharding in shardings), None)
        if known is None:
            self._separately(one)
            return token
        grown = self._with_token(one, [token])
        everywhere = sdy.TensorShardingAttr.get(sdy.TensorShardingAttr(known).mesh_or_ref, [])
        for key in _SHARDINGS:
            grown.attributes[key] = sdy.TensorShardingPerValueAttr.get([*given[key], everywhere])
        (body,) = grown.regions[0].blocks
        self._return_also(body, self._block(body, body.add_argument(token.type, grown.location)))
        return _last(grown)

    def _with_token(self, one: ir.Operation, more: list[ir.Value]) -> ir.Operation:
        """In place of ``one``, the same with more operands, and a token as its last result."""
        token = ir.RankedTensorType.get([], ir.IntegerType.get_signless(8))
        grown = ir.Operation.create(
            one.name, results=[*(result.type for result in one.results), token], operands=[*one.operands, *more],
            attributes=_attributes(one), regions=len(one.regions), loc=one.location, ip=ir.InsertionPoint(one),
        )  # fmt: skip
        for region, target in zip(one.regions, grown.regions, strict=True):
            for block in list(region.blocks):
                block.append_to(target)
        for result, new in zip(one.results, grown.results, strict=False):
            result.replace_all_uses_with(new)
        self._replaced.append(one)
        return grown

    def _return_also(self, block: ir.Block, token: ir.Value) -> None:
        last = block.operations[len(block.operations) - 1].operation
        ir.Operation.create(
            last.name, operands=[*last.operands, token], attributes=_attributes(last), loc=last.location,
            ip=ir.InsertionPoint(last),
        )  # fmt: skip
        self._replaced.append(last)


def _operations(one: ir.Operation) -> list[ir.Operation]:
    """Those in its regions."""
    return [inner.operation for region in one.regions for block in region.blocks for inner in block.operations]


def _is_private(function: ir.Operation) -> bool:
    attributes = function.attributes
    return "sym_visibility" in attributes and ir.StringAttr(attributes["sym_visibility"]).value == "private"


def _is_collective(one: ir.Operation) -> bool:
    if one.name != "stablehlo.custom_call":
        return False
    return bool(ir.StringAttr(one.attributes["call_target_name"]).value == TARGET)


def _callee(call: ir.Operation) -> str:
    return str(ir.FlatSymbolRefAttr(call.attributes["callee"]).value)


def _symbol(function: ir.Operation) -> str:
    return str(ir.StringAttr(function.attributes["sym_name"]).value)


def _last(one: ir.Operation) -> ir.Value:
    return one.results[len(one.results) - 1]


def _reuse_operands(one: ir.Operation) -> None:
    """Has the results of a collective lie where its operands do, which saves memory that is written for the first time.
    Operands that are needed afterwards XLA would copy before."""
    aliases = [
        stablehlo.OutputOperandAlias.get([index], index, [])
        for index in range(len(one.results) - 1)
        if _is_temporary(one.operands[index], one)
    ]
    if aliases:
        one.attributes["output_operand_aliases"] = ir.ArrayAttr.get(aliases)


def _is_temporary(value: ir.Value, user: ir.Operation) -> bool:
    """Whether only ``user`` needs it, and it is computed beside, or an argument of the program that was donated."""
    if len(list(value.uses)) != 1:
        return False
    if isinstance(value.owner, ir.Block):
        return _is_donated(ir.BlockArgument(value))
    made_by = value.owner.operation
    if made_by.name == "stablehlo.reshape":  # of the same memory
        return _is_temporary(made_by.operands[0], made_by)
    return bool(made_by.name != "stablehlo.constant" and made_by.parent == user.parent)


def _is_donated(argument: ir.BlockArgument) -> bool:
    function = argument.owner.owner.operation
    if function.name != "func.func" or "arg_attrs" not in function.attributes:
        return False
    given = ir.DictAttr(ir.ArrayAttr(function.attributes["arg_attrs"])[argument.arg_number])
    return "tf.aliasing_output" in given or "jax.buffer_donor" in given


def _attributes(one: ir.Operation) -> dict[str, ir.Attribute]:
    names = [one.attributes[index].name for index in range(len(one.attributes))]
    return {name: one.attributes[name] for name in names}


class _Lowered(threading.local):
    """What this thread lowers."""

    has_programs = False  # of any thread's
    module: ir.Module | None = None


_lowered = _Lowered()


def mark(module: ir.Module) -> None:
    """There are collectives in it."""
    _Lowered.has_programs = True
    _lowered.module = module


def has_programs() -> bool:
    """Whether a program with collectives was ever lowered in this process."""
    return _Lowered.has_programs


def _install() -> None:
    """JAX has no public place for what comes after the lowering of a whole program."""

    @functools.wraps(lower_jaxpr_to_module)
    def lower_and_chain(*arguments: Any, **options: Any) -> Any:
        result = lower_jaxpr_to_module(*arguments, **options)
        module: Any = result.module
        has_collectives = _lowered.module is module
        if has_collectives:
            _lowered.module = None
            with module.context, ir.Location.unknown():
                _Chain(module).run()
                module.operation.verify()
        return result

    jax_mlir.lower_jaxpr_to_module = lower_and_chain
    for util in (source_info_util, traceback_util):  # it is no place of the user's
        util.register_exclusion(__file__)


_install()
