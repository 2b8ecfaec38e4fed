"""Averages over ranks, evaluation, and trees of tensors as one operation.

A tree is a tensor or number, or dictionaries, lists, tuples and named tuples of trees; None stays
None. Entries of a dictionary are matched by their keys, whatever their order.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from farandole.basics import global_process_set
from farandole.exceptions import HorovodInternalError
from farandole.objects import allgather_object
from farandole.ops import Average, Sum
from farandole.torch.compression import Compression
from farandole.torch.functions import map_tree
from farandole.torch.ops import grouped_allreduce

_Tensors = list[torch.Tensor]


def allreduce_tree(
    tree: Any,
    op: int | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    process_set: Any = None,
) -> Any:
    """Combines every tensor and number of ``tree`` over all ranks, in one operation.

    Args:
        tree: Of the same structure, shapes and dtypes on every rank, all tensors on one device.
            Numbers travel as float64.
        op: As for :func:`allreduce`; so are ``name`` and ``compression``.
        process_set: Whose trees; None: those of all ranks.
    Returns:
        A new tree of the same structure: tensors for tensors, floats for numbers.
    Raises:
        MismatchError: Ranks passed different numbers of tensors, shapes, dtypes or operations.
        TypeError: Something in the tree is neither a tensor nor a number.
    """
    members = process_set or global_process_set

    def reduce(tensors: _Tensors) -> _Tensors:
        return grouped_allreduce(tensors, op=op, name=name, compression=compression, process_set=members)

    return _with_leaves_reduced(tree, "allreduce_tree", reduce)


def metric_average(metrics: Any, name: str | None = None, weight: float | None = None, process_set: Any = None) -> Any:
    """Averages metrics over all ranks, in one operation, in float64.

        metric_average({"loss": loss, "accuracy": accuracy}, weight=len(samples))

    Args:
        metrics: A tree of the same structure on every rank; tensors may be partly in host memory
            and partly on this rank's GPU.
        name: As for :func:`allreduce`.
        weight: The weight of this rank's metrics, usually the number of samples that they average. Metrics of
            weight 0 are ignored, even NaN. None on every rank: all ranks have the same weight.
        process_set: Whose metrics; None: those of all ranks.
    Returns:
        The same on every rank: floats for numbers; for tensors tensors of their dtype, or of torch's
        default dtype where it is none of floats. NaN where all weights are 0.
    Raises:
        MismatchError: Ranks passed different numbers of metrics or shapes; or some no weight.
        TypeError: Something is neither a tensor nor a number.
        ValueError: The weight is negative.
    """
    if weight is not None and not weight >= 0:
        raise ValueError(f"metric_average: weight must be >= 0, not {weight}")
    members = process_set or global_process_set

    def average(tensors: _Tensors) -> _Tensors:
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), tensors[0].device)
        values = [tensor.detach().to(device, torch.float64) for tensor in tensors]
        if weight is None:
            means = grouped_allreduce(values, op=Average, name=name, process_set=members)
        else:
            weighted = [value * weight if weight else torch.zeros_like(value) for value in values]
            weighted.append(values[0].new_tensor(weight))
            sums = grouped_allreduce(weighted, op=Sum, name=name, process_set=members)
            means = [value / sums[-1] for value in sums[:-1]]
        return [_like(mean, tensor) for mean, tensor in zip(means, tensors, strict=True)]

    return _with_leaves_reduced(metrics, "metric_average", average)


def _like(mean: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    dtype = tensor.dtype if tensor.is_floating_point() else torch.get_default_dtype()
    return mean.to(tensor.device, dtype)


def evaluate(
    model: torch.nn.Module,
    batches: Iterable[Any],
    measure: Callable[[torch.nn.Module, Any], tuple[Any, float]],
    process_set: Any = None,
) -> Any:
    """The mean of each metric over all samples of all ranks.

    Runs ``measure(model, batch)`` on this rank's batches in eval mode and without gradients; then the
    ranks combine what they have. They may have different numbers of batches and samples, also none:
    ``Subset(data, range(rank(), len(data), size()))`` shares out a data set without repetitions.
    docs/recipes.md, "Evaluation and metrics", has an example.

    Args:
        model: Its modules return to their training or eval mode afterwards.
        batches: This rank's.
        measure: Returns a tree of means over the batch, of the same structure and shapes on every rank, and
            the number of samples. It must not call a collective.
        process_set: Whose batches; None: those of all ranks.
    Returns:
        The tree on every rank, with floats for numbers and for tensors of one value, and float64
        tensors in host memory for others.
    Raises:
        HorovodInternalError: On the other ranks, if ``measure`` or ``batches`` raised on one; the
            message has the rank and the cause.
        ValueError: On every rank: there is no sample, or the trees of two ranks differ.
    """
    members = process_set or global_process_set
    part: Any = None, {}, 0.0
    error = None
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad():
            model.eval()
            tree, sums, samples = _added(_of_batches(model, batches, measure))
        part = tree, {path: value.tolist() for path, value in sums.items()}, samples
    except Exception as caught:  # the other ranks wait for this one's part
        error = caught
    finally:
        for module, mode in modes:
            module.training = mode
    text = None if error is None else f"{type(error).__name__}: {error}"
    parts = allgather_object((*part, text), "evaluate", members)
    if error is not None:
        raise error
    by_rank = dict(zip(members.ranks or (), parts, strict=True))
    tree, sums, samples = _added(_of_ranks(by_rank))
    if not samples:
        raise ValueError("evaluate: no rank has a sample")
    means = {path: value / samples for path, value in sums.items()}
    return map_tree(tree, lambda _, path: means[path] if means[path].dim() else means[path].item())


#: A structure with each metric's path in its place, the metrics' sums by path, the number of samples.
_Sums = tuple[Any, dict[str, torch.Tensor], float]


def _of_batches(model: torch.nn.Module, batches: Any, measure: Any) -> Iterator[tuple[_Sums, str]]:
    for batch in batches:
        metrics, count = measure(model, batch)
        means = _leaves(metrics, "evaluate")
        sums = {path: mean.double() * count for path, mean in means.items()}
        yield (map_tree(metrics, lambda path, _: path), sums, count), "two batches"


def _of_ranks(parts: dict[int, Any]) -> Iterator[tuple[_Sums, str]]:
    """The sums of the ranks that have samples, by rank; raises what one of them failed with."""
    for rank, (*_, error) in parts.items():
        if error is not None:
            raise HorovodInternalError(f"evaluate: rank {rank} failed: {error}")
    with_samples = [rank for rank, (_, _, samples, _) in parts.items() if samples]
    for rank in with_samples:
        tree, sums, samples, _ = parts[rank]
        wide = {path: torch.tensor(value, dtype=torch.float64) for path, value in sums.items()}
        yield (tree, wide, samples), f"ranks {with_samples[0]} and {rank}"


def _added(parts: Iterable[tuple[_Sums, str]]) -> _Sums:
    """The sum of the parts in their order; each comes with whom to name if it does not fit."""
    tree, total, samples = None, dict[str, torch.Tensor](), 0.0
    for (tree, sums, count), whose in parts:
        shapes = [{p: list(value.shape) for p, value in side.items()} for side in (total, sums)]
        if total and shapes[0] != shapes[1]:
            raise ValueError(f"evaluate: the metrics of {whose} differ in path or shape: {shapes[0]}, {shapes[1]}")
        total = {path: total[path] + value if total else value for path, value in sums.items()}
        samples += count
    return tree, total, samples


def _with_leaves_reduced(tree: Any, function: str, reduce: Callable[[_Tensors], _Tensors]) -> Any:
    """The tree with what ``reduce`` makes of its leaves, and floats where numbers were."""
    leaves = _leaves(tree, function)
    if not leaves:
        return tree
    results = dict(zip(leaves, reduce(list(leaves.values())), strict=True))
    return map_tree(tree, lambda path, leaf: results[path] if torch.is_tensor(leaf) else results[path].item())


def _leaves(tree: Any, function: str) -> dict[str, torch.Tensor]:
    """The leaves by path, sorted; numbers as float64 tensors on the device of the first tensor."""
    found: dict[str, Any] = {}
    map_tree(tree, found.__setitem__)
    leaves = dict(sorted(found.items()))
    device = next((leaf.device for leaf in leaves.values() if torch.is_tensor(leaf)), None)
    for path, leaf in leaves.items():
        if torch.is_tensor(leaf):
            continue
        if not isinstance(leaf, numbers.Real):
            raise TypeError(
                f"{function}: {path or 'it'} is of type {type(leaf).__name__}; expected "
                "tensors, numbers, None, and dictionaries, lists and tuples of them"
            )
        leaves[path] = torch.tensor(float(leaf), dtype=torch.float64, device=device)
    return leaves
