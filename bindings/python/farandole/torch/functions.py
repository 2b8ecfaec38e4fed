"""Whole models and optimizers from one rank to all, whether models are alike, sums of sparse tensors, trees."""

from __future__ import annotations

import copy
import hashlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch

from farandole import _core, basics, objects, ops
from farandole.basics import ProcessSet, global_process_set
from farandole.exceptions import MismatchError
from farandole.torch import _library
from farandole.torch.ops import allgather, allreduce, broadcast_named

_CPU: Final = torch.device("cpu")
Parameterlike = Mapping[str, torch.Tensor] | Iterable[torch.Tensor | tuple[str, torch.Tensor]]


def broadcast_parameters(
    params: Parameterlike, root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> None:
    """Copies every tensor from ``root_rank`` to all ranks, in place.

    Args:
        params: Name -> tensor (usually ``model.state_dict()``), or ``named_parameters()``, or a
            list of tensors; None is passed over. The same names, shapes and dtypes on every rank.
        root_rank: Rank whose values win; among all ranks, also with a process set.
        process_set: The ranks that take part, of which this one is.
    Raises:
        MismatchError: Ranks passed different names, shapes or dtypes; the message says which.
        ValueError: ``params`` is none of the above; there is no such rank.
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


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    model: object = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copies the options and the state of the root's optimizer to every rank, without a step.

    The state may be anything that can be pickled (with FARANDOLE_ALLOW_PICKLE=0, what torch's own optimizers
    need). State that only the root has is created on the other ranks, and state that the root does not have
    is removed.

    Args:
        optimizer: Wrapped or not; of the same class and with the same parameters on every rank.
        root_rank: Rank whose state wins; 0 <= root_rank < size().
        model: Ignored; for compatibility with Horovod.
        process_set: The ranks that take part, of which this one is.
    Raises:
        MismatchError: Classes of optimizers, or numbers or shapes of parameters, differ.
        HorovodInternalError: On every rank, if something in the root's state cannot be sent.
        ValueError: There is no such rank; ``optimizer`` is none.
    """
    del model
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer)}")
    how = ops.broadcast_options(root_rank, process_set)
    _compare_parameters(optimizer, how)
    tensors: _Tensors = []
    sent = objects.broadcast_made(lambda: _take_apart(optimizer, tensors), root_rank, "optimizer state", process_set)
    if basics.topology().rank != root_rank:
        _put_together(optimizer, sent, tensors)
    broadcast_named(tensors, how, "optimizer state")


_Tensors = list[tuple[str, torch.Tensor]]  # each with a name for messages
#: Position of a leaf -> the tensor's number among _Tensors (the same one may be at two places), name,
#: dtype, shape, strides, and whether it is on the CPU, else on its parameter's device.
_Places = dict[int, tuple[int, str, str, tuple[int, ...], tuple[int, ...], bool]]


def _compare_parameters(optimizer: torch.optim.Optimizer, how: _core.Options) -> None:
    """Broadcasts an empty tensor per parameter, whose shapes tell ranks that differ.

    The name of one more tells the class: state of another optimizer has other keys.
    """
    kind = type(optimizer)
    named = [(f"an optimizer of class {kind.__module__}.{kind.__qualname__}", torch.empty(0))]
    named += [
        (f"parameter {i} of group {g}", torch.empty(0, *parameter.shape, dtype=parameter.dtype))
        for g, group in enumerate(optimizer.param_groups)
        for i, parameter in enumerate(group["params"])
    ]
    broadcast_named(named, how, "optimizer parameters")


def _take_apart(optimizer: torch.optim.Optimizer, tensors: _Tensors) -> tuple[Any, Any, _Places]:
    """What the root sends: options by group, state by parameter, and where their tensors were."""
    places: _Places = {}
    numbers: dict[int, int] = {}
    positions = itertools.count()

    def take(path: str, leaf: Any) -> Any:
        position = next(positions)
        if not isinstance(leaf, torch.Tensor):
            return leaf
        _library.check_dense(leaf)  # here the other ranks can still be told
        number = numbers.setdefault(id(leaf), len(tensors))
        if number == len(tensors):
            tensors.append((path, leaf))
        dtype = str(leaf.dtype).removeprefix("torch.")
        strides = torch.empty_like(leaf, device="meta").stride()  # without holes
        is_on_cpu = leaf.device.type == "cpu"
        places[position] = number, path, dtype, tuple(leaf.shape), strides, is_on_cpu
        return 0

    options = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    of_parameter = {id(p): number for number, p in enumerate(_parameters(optimizer))}
    state = {of_parameter.get(id(k), ("own", k)): v for k, v in optimizer.state.items()}
    return map_tree(options, take, "group"), map_tree(state, take, "state"), places


def _put_together(optimizer: torch.optim.Optimizer, sent: tuple[Any, Any, _Places], tensors: _Tensors) -> None:
    """Gives the optimizer the root's options and state, with tensors still to be filled."""
    options, state, places = sent
    positions = itertools.count()

    def with_tensors(tree: Any, device: torch.device) -> Any:
        def make(_path: str, leaf: Any) -> Any:
            position = next(positions)
            if position not in places:
                return leaf
            number, name, dtype, shape, strides, is_on_cpu = places[position]
            if number == len(tensors):
                where = _CPU if is_on_cpu else device
                tensor = torch.empty_strided(shape, strides, dtype=getattr(torch, dtype), device=where)
                tensors.append((name, tensor))
            return tensors[number][1]

        return map_tree(tree, make)

    for group, values in zip(optimizer.param_groups, options, strict=True):
        for name in group.keys() - values.keys() - {"params"}:
            del group[name]
        group.update(with_tensors(values, group["params"][0].device if group["params"] else _CPU))
    parameters = _parameters(optimizer)
    optimizer.state.clear()
    for key, value in state.items():
        is_own = isinstance(key, tuple)
        owner = key[1] if is_own else parameters[key]
        optimizer.state[owner] = with_tensors(value, _CPU if is_own else owner.device)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def map_tree(tree: Any, change: Callable[[str, Any], Any], path: str = "") -> Any:
    """A tree of the same structure with ``change(path, leaf)`` in place of every leaf but None."""
    if tree is None:
        return None
    if isinstance(tree, dict):
        changed = copy.copy(tree)  # an OrderedDict, a defaultdict stay what they are
        for key, value in tree.items():  # not update(), by which a Counter adds
            changed[key] = map_tree(value, change, f"{path}[{key!r}]")
        return changed
    if isinstance(tree, (list, tuple)):
        items = [map_tree(item, change, f"{path}[{i}]") for i, item in enumerate(tree)]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return change(path, tree)


#: How often check_replicas was called for a model.
_calls: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
_WORDS: Final = 1 << 20  # of a tensor that are in work at a time: 24 MB
_MULTIPLIER: Final = 0x9E3779B97F4A7C1  # odd; Knuth's, from the golden ratio


def check_replicas(model: torch.nn.Module, every: int = 1, process_set: ProcessSet = global_process_set) -> None:
    """Compares the parameters of ``model`` over the ranks, bit by bit, by a digest of 64 bits each.

    Call it after each step on every rank. A comparison reads the parameters once, where they lie, and sends
    16 bytes per parameter.

    Args:
        model: The same parameters, in the same order, on every rank. Buffers are not compared: running means of
            batch normalisation differ between ranks in ordinary training.
        every: Only each ``every``-th call for this model compares.
        process_set: The ranks that take part, of which this one is.
    Raises:
        MismatchError: On every rank: the message names the first parameter that differs, and which ranks are
            alike. Its ``tensor`` is the parameter's name. Also if the models have different parameters.
        ValueError: ``every`` is less than 1.
    """
    if every < 1:
        raise ValueError(f"check_replicas: every must be at least 1, not {every}")
    _calls[model] = _calls.get(model, 0) + 1
    if _calls[model] % every:
        return
    named = list(model.named_parameters())
    kinds = [f"{name} {str(p.dtype).removeprefix('torch.')} {list(p.shape)}" for name, p in named]
    text = hashlib.blake2b("\n".join(kinds).encode(), digest_size=8).digest()
    digests = [torch.tensor([int.from_bytes(text, signed=True, byteorder="little")])]
    digests += [_digest(parameter).cpu() for _, parameter in named]
    mine = torch.cat(digests)
    extremes = allreduce(torch.cat([mine, ~mine]), name="check_replicas", op=ops.Min, process_set=process_set)
    differing = (extremes[: mine.numel()] != ~extremes[mine.numel() :]).nonzero().flatten().tolist()
    if not differing:
        return
    first = differing[0]
    values = allgather(mine[first : first + 1], "check_replicas.differing", process_set).tolist()
    ranks = process_set.ranks or []
    by_value: dict[int, list[str]] = {}
    for rank, value in zip(ranks, values, strict=True):
        by_value.setdefault(value, []).append(str(rank))
    groups = " | ".join(", ".join(group) for group in by_value.values())
    if first == 0:
        raise MismatchError(f"check_replicas: the models have other names, dtypes or shapes; ranks alike: {groups}")
    error = MismatchError(
        f'check_replicas: parameter "{kinds[first - 1]}" differs; ranks alike: {groups}; '
        f"{len(differing)} of {len(named)} parameters differ"
    )
    error.tensor = named[first - 1][0]
    raise error


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    """A number of 64 bits, the same for the same bytes on every device; there are no elements of other bits."""
    _library.check_dense(tensor)
    content = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    words = content.view(torch.int32) if content.numel() % 4 == 0 else content
    digest = torch.zeros(1, dtype=torch.int64, device=tensor.device)
    for part in words.split(_WORDS):
        weights = torch.arange(1, part.numel() + 1, device=tensor.device) * _MULTIPLIER | 1
        digest = digest * _MULTIPLIER + (weights * part).sum()
    return digest


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None = None, op: int | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Starts the sum, or the mean, of a sparse tensor over all ranks.

    Args:
        tensor: Of the layout ``torch.sparse_coo``, the same shape, dtype and number of sparse
            dimensions on all ranks; each has elements of its own, also none.
        name: As for :func:`allreduce`.
        op: Average (default) or Sum. Averages of integers truncate toward zero element by element.
        process_set: The ranks that take part, of which this one is.
    Returns:
        A function that waits for the result and returns it: a new, coalesced tensor.
    Raises:
        TypeError: ``tensor`` is not of that layout.
        ValueError: Another ``op``.
    """
    if tensor.layout is not torch.sparse_coo:
        raise TypeError(f"sparse_allreduce_async takes torch.sparse_coo tensors, not {tensor.layout}")
    if op not in (None, ops.Average, ops.Sum):
        raise ValueError(f"sparse_allreduce_async: op must be Average or Sum, not {op!r}")
    rows = tensor.detach().coalesce()
    like = torch.empty(0, *tensor.shape, device=tensor.device)  # ranks must agree on the shape
    parts = [rows.indices().t(), rows.values(), like]
    how = ops.gather_options(process_set, "sparse_allreduce_async")
    handle = ops.start_group(how, parts, name)
    divisor = 1 if op == ops.Sum else process_set.size() or 1
    shape = tensor.shape

    def wait() -> torch.Tensor:
        indices, values, _ = ops.synchronize(handle)
        total = torch.sparse_coo_tensor(indices.t(), values, shape, check_invariants=True).coalesce()
        if divisor == 1:
            return total
        is_floating = values.is_floating_point()
        mean = torch.div(total.values(), divisor, rounding_mode=None if is_floating else "trunc")
        return torch.sparse_coo_tensor(total.indices(), mean, shape, check_invariants=True).coalesce()

    return wait
