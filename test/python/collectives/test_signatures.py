"""The public collectives: what ``inspect.signature`` and ``help`` say, and that pickle finds them."""

import inspect
import pickle
import pydoc
import traceback
import typing

import numpy as np
import pytest
import torch

import farandole
import farandole.runner
import farandole.torch
import farandole.torch.elastic

SET = "process_set: 'ProcessSet' = ProcessSet(process_set_id=0, ranks=None, mpi_comm=None)"
NAME = "name: 'str | None' = None"
FACTORS = "prescale_factor: 'float' = 1.0, postscale_factor: 'float' = 1.0"
OP = "op: 'int | None' = None"
AVERAGE = f"average: 'bool | None' = None, {NAME}"
COMPRESSION = "compression: 'Any' = <class 'farandole.torch.compression.NoneCompressor'>"
OUT = "out: 'torch.Tensor | None' = None"
SCATTER = f"op: 'int | None' = 0, {SET}, {FACTORS}"

#: Of arrays: the arguments after the first, which functions have them with and without a result.
ARRAYS = {
    f"{NAME}, {OP}, {FACTORS}, {SET}": "allreduce allreduce_ reducescatter",
    f"root_rank: 'int', {NAME}, {SET}": "broadcast broadcast_",
    f"{NAME}, {SET}": "allgather",
    f"splits: 'Any' = None, {NAME}, {SET}": "alltoall",
}
#: Of torch's tensors: those of the functions that wait, and of their asynchronous versions.
TENSORS = {
    "allreduce": (
        f"{AVERAGE}, {COMPRESSION}, {OP}, {FACTORS}, {SET}",
        f"{AVERAGE}, {OP}, {FACTORS}, {SET}",
    ),
    "allreduce_": (f"{AVERAGE}, {OP}, {FACTORS}, {SET}", f"{AVERAGE}, {OP}, {FACTORS}, {SET}"),
    "broadcast": (f"root_rank: 'int', {NAME}, {SET}", f"root_rank: 'int', {NAME}, {SET}"),
    "broadcast_": (f"root_rank: 'int', {NAME}, {SET}", f"root_rank: 'int', {NAME}, {SET}"),
    "allgather": (f"{NAME}, {SET}", f"{NAME}, {SET}"),
    "reducescatter": (f"{NAME}, {COMPRESSION}, {SCATTER}", f"{NAME}, {SCATTER}"),
}
WITH_OUT = ("allgather", "reducescatter", "alltoall")  # out=, but for grouped ones
GROUPED = ("allreduce", "allreduce_", "allgather", "reducescatter")


def variants(name):
    """``name`` and its asynchronous version: "allreduce_" and "allreduce_async_"."""
    return name, name.rstrip("_") + "_async" + "_" * name.endswith("_")


def expected():
    """Signatures by full name."""
    table = {}
    for arguments, names in ARRAYS.items():
        for name in names.split():
            for one, result in zip(variants(name), ("Any", "Handle"), strict=True):
                out = ", *, out: 'Any' = None" if name in WITH_OUT else ""
                table[f"farandole.{one}"] = f"(tensor: 'Any', {arguments}{out}) -> '{result}'"
                if name in GROUPED:
                    result = result.replace("Any", "list[Any]")
                    table[f"farandole.grouped_{one}"] = f"(tensors: 'Arrays', {arguments}) -> '{result}'"
    for name, both in TENSORS.items():
        for one, arguments, result in zip(variants(name), both, ("torch.Tensor", "Handle"), strict=True):
            out = f", *, {OUT}" if name in WITH_OUT else ""
            table[f"farandole.torch.{one}"] = f"(tensor: 'torch.Tensor', {arguments}{out}) -> '{result}'"
            if name in GROUPED:
                result = result.replace("torch.Tensor", "list[torch.Tensor]")
                text = f"(tensors: 'Tensors', {arguments}) -> '{result}'"
                table[f"farandole.torch.grouped_{one}"] = text
    exchange = f"(tensor: 'torch.Tensor', splits: 'Splits | None' = None, {NAME}, {SET}, *, {OUT}) -> "
    table["farandole.torch.alltoall"] = exchange + "'torch.Tensor | tuple[torch.Tensor, torch.Tensor]'"
    table["farandole.torch.alltoall_async"] = exchange + "'Handle'"
    return table


def function_of(full_name):
    module, _, name = full_name.rpartition(".")
    return getattr({"farandole": farandole, "farandole.torch": farandole.torch}[module], name)


def test_each_collective_of_both_frontends_is_in_the_table():
    words = ("allreduce", "broadcast", "allgather", "reducescatter", "alltoall")
    other = ("object", "tree", "optimizer", "parameters", "sparse")
    public = {
        f"{module.__name__}.{name}"
        for module in (farandole, farandole.torch)
        for name in module.__all__
        if any(word in name for word in words) and not any(word in name for word in other)
    }
    assert public == set(expected()) and len(public) == 2 * 22


@pytest.mark.parametrize(("full_name", "signature"), expected().items())
def test_a_collective_has_the_signature_name_and_help_of_its_own(full_name, signature):
    function = function_of(full_name)
    assert str(inspect.signature(function)) == signature
    assert f"{function.__module__}.{function.__name__}" == full_name.replace("le.", "le.ops.", 1).replace(
        "ops.torch.", "torch.ops."
    )
    assert function.__qualname__ == function.__name__
    assert pickle.loads(pickle.dumps(function)) is function
    text = pydoc.render_doc(function, renderer=pydoc.plaintext)
    assert f"{function.__name__}(tensor" in text and len(function.__doc__) > 30


def test_variants_point_to_the_function_that_has_the_description():
    for module in (farandole, farandole.torch):
        assert "Args:" in module.allreduce.__doc__
        assert module.allreduce_.__doc__ == "As :func:`allreduce`, in place. Returns ``tensor``."
        assert module.grouped_allreduce_async_.__doc__ == (
            "As :func:`grouped_allreduce_`; ``synchronize`` the handle. Leave ``tensors`` alone until then."
        )


@pytest.mark.parametrize(
    "module", [farandole, farandole.torch, farandole.torch.elastic, farandole.runner], ids=lambda m: m.__name__
)
def test_the_type_hints_of_every_public_function_resolve(module):
    for name in module.__all__:
        thing = getattr(module, name)
        functions = [thing] if inspect.isfunction(thing) or isinstance(thing, type) else []
        functions += [f for f in vars(thing).values() if inspect.isfunction(f)] if isinstance(thing, type) else []
        for function in functions:
            typing.get_type_hints(function)
    assert typing.get_type_hints(farandole.torch.DistributedOptimizer)["return"] is farandole.torch.WrappedOptimizer


@pytest.fixture
def alone():
    """A job of one rank."""
    farandole.init()
    yield
    farandole.shutdown()


def test_a_traceback_and_an_editor_find_the_source_of_a_collective(alone):
    for function in map(function_of, expected()):
        assert inspect.getsource(function).startswith(("def " + function.__name__, "@overload"))
    with pytest.raises(ValueError) as raised:
        farandole.allreduce(np.zeros(1), op=77)
    files = [frame.filename for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert files[1:] and all(file.endswith(".py") for file in files)


def test_isinstance_tells_whether_an_optimizer_is_distributed(alone):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
    assert not isinstance(optimizer, farandole.torch.Distributed)
    assert isinstance(farandole.torch.DistributedOptimizer(optimizer), farandole.torch.Distributed)
    assert not isinstance(farandole.torch.unwrap(optimizer), farandole.torch.Distributed)
