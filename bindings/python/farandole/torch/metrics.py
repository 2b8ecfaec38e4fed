"""What training scripts report: averages over ranks, evaluation, and trees of tensors as one operation.

A tree is a tensor or number, or dictionaries, lists, tuples and named tuples of trees; None stays
None. Entries of a dictionary are matched by their keys, whatever their order.
"""

from __future__ import annotations

import copy
import numbers
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

import farandole.torch as fl
from farandole.torch.compression import Compression


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
        op: Average (default), Sum, Min, Max or Product.
        name: As for :func:`allreduce`.
        compression: Likewise; of numbers too.
        process_set: Whose trees; None: those of all ranks.
    Returns:
        A new tree of the same structure: tensors for tensors, floats for numbers.
    Raises:
        MismatchError: Ranks passed different numbers of tensors, shapes, dtypes or operations.
        TypeError: Something in the tree is neither a tensor nor a number.
    """
    leaves = _leaves(tree, "allreduce_tree")
    if not leaves:
        return tree
    where = _where(process_set)
    tensors = fl.grouped_allreduce(
        _tensors(leaves), op=op, name=name, compression=compression, **where
    )
    results = dict(zip(leaves, tensors, strict=True))
    return _map(
        tree, lambda path, leaf: results[path] if _is_tensor(leaf) else results[path].item()
    )


def metric_average(
    metrics: Any,
    name: str | None = None,
    weight: float | None = None,
    process_set: Any = None,
) -> Any:
    """Averages metrics over all ranks, in one operation, in float64.

        metric_average(loss, "loss")
        metric_average({"loss": loss, "accuracy": accuracy}, weight=len(samples))

    Args:
        metrics: A number, a tensor, or a tree of these with the same structure on every rank;
            tensors may be partly in host memory and partly on this rank's GPU.
        name: As for :func:`allreduce`.
        weight: How much this rank's metrics count, usually the number of samples they are a mean
            of; metrics of weight 0 count nothing, be they NaN. None on every rank: all count the
            same.
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
    leaves = _leaves(metrics, "metric_average")
    if not leaves:
        return metrics
    tensors = [tensor.detach() for tensor in _tensors(leaves)]
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), tensors[0].device)
    values = [tensor.to(device, torch.float64) for tensor in tensors]
    where = _where(process_set)
    if weight is None:
        means = fl.grouped_allreduce(values, op=fl.Average, name=name, **where)
    else:
        weighted = [value * weight if weight else torch.zeros_like(value) for value in values]
        weighted.append(values[0].new_tensor(weight))
        *sums, total = fl.grouped_allreduce(weighted, op=fl.Sum, name=name, **where)
        means = [value / total for value in sums]
    results = dict(zip(leaves, means, strict=True))
    return _map(metrics, lambda path, leaf: _like(results[path], leaf))


def evaluate(
    model: torch.nn.Module,
    batches: Iterable[Any],
    measure: Callable[[torch.nn.Module, Any], tuple[Any, float]],
    process_set: Any = None,
) -> Any:
    """The mean of each metric over all samples of all ranks.

    Runs ``measure(model, batch)`` on this rank's batches in eval mode and without gradients; then the
    ranks combine what they have, in one operation. Ranks may have different numbers of batches and
    samples, also none: ``Subset(data, range(rank(), len(data), size()))`` shares out a data set
    without the repetitions by which ``DistributedSampler`` makes the parts equal.

        def measure(model, batch):
            images, labels = batch
            scores = model(images)
            right = (scores.argmax(1) == labels).float().mean()
            return {"loss": cross_entropy(scores, labels), "accuracy": right}, len(labels)

        metrics = evaluate(model, loader, measure)

    Args:
        model: Its modules have their modes back afterwards.
        batches: This rank's.
        measure: Gives a tree of means over the batch, of the same structure and shapes everywhere,
            and the number of samples. It calls no collective.
        process_set: Whose batches; None: those of all ranks.
    Returns:
        The tree on every rank, with floats for numbers and for tensors of one value, and float64
        tensors in host memory for others.
    Raises:
        HorovodInternalError: On the other ranks, if ``measure`` or ``batches`` raised on one, which
            raises that; the message has the rank and the cause.
        ValueError: On every rank: there is no sample, or the trees of two ranks differ.
    """
    part, failure = _Part(), None
    try:
        part = _measured(model, batches, measure)
    except Exception as error:  # the other ranks wait for this one's part
        part, failure = _Part(error=f"{type(error).__name__}: {error}"), error
    parts = [_Part(*p) for p in fl.allgather_object(tuple(part), "evaluate", **_where(process_set))]
    if failure is not None:
        raise failure
    by_rank = dict(zip(_ranks(process_set), parts, strict=True))
    for rank, part in by_rank.items():
        if part.error is not None:
            raise fl.HorovodInternalError(f"evaluate: rank {rank} failed: {part.error}")
    return _combined(by_rank)


class _Part(NamedTuple):
    """What one rank measured.

    Attributes:
        tree: The structure, with each metric's path in its place.
        sums: By path: the metric's sum over the samples, a number or nested lists.
        samples: How many there were.
        error: Why there is nothing else.
    """

    tree: Any = None
    sums: dict[str, Any] = {}
    samples: float = 0
    error: str | None = None


@torch.no_grad()
def _measured(
    model: torch.nn.Module,
    batches: Iterable[Any],
    measure: Callable[[torch.nn.Module, Any], tuple[Any, float]],
) -> _Part:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    sums: dict[str, torch.Tensor] = {}
    tree, samples = None, 0.0
    try:
        for batch in batches:
            metrics, count = measure(model, batch)
            leaves = _leaves(metrics, "evaluate")
            means = zip(leaves, _tensors(leaves), strict=True)
            _add(sums, {path: mean.double() * count for path, mean in means}, "two batches")
            tree = _map(metrics, lambda path, leaf: path)
            samples += count
    finally:
        for module, mode in modes:
            module.training = mode
    return _Part(tree, {path: value.tolist() for path, value in sums.items()}, samples)


def _combined(parts: dict[int, _Part]) -> Any:
    """The means over all samples; sums are added in the order of the ranks."""
    sums: dict[str, torch.Tensor] = {}
    tree, samples = None, 0.0
    first = None
    for rank, part in parts.items():
        if not part.samples:
            continue
        values = {
            path: torch.tensor(value, dtype=torch.float64) for path, value in part.sums.items()
        }
        _add(sums, values, f"ranks {first} and {rank}")
        tree, samples = part.tree, samples + part.samples
        first = rank if first is None else first
    if not samples:
        raise ValueError("evaluate: no rank has a sample")
    means = {path: value / samples for path, value in sums.items()}
    return _map(tree, lambda path, leaf: _plain(means[path]))


def _add(sums: dict[str, torch.Tensor], more: dict[str, torch.Tensor], whose: str) -> None:
    """Adds ``more`` to ``sums``, which is empty or has the same paths and shapes."""
    shapes = [{path: list(value.shape) for path, value in side.items()} for side in (sums, more)]
    if sums and shapes[0] != shapes[1]:
        raise ValueError(
            f"evaluate: the metrics of {whose} differ in path or shape: {shapes[0]}, {shapes[1]}"
        )
    for path, value in more.items():
        sums[path] = sums[path] + value if path in sums else value


# Trees.


def _map(tree: Any, change: Callable[[str, Any], Any], path: str = "") -> Any:
    """A tree of the same structure with ``change(path, leaf)`` in place of every leaf."""
    if tree is None:
        return None
    if isinstance(tree, dict):
        changed = copy.copy(tree)  # an OrderedDict, a defaultdict stay what they are
        changed.update({k: _map(v, change, f"{path}[{k!r}]") for k, v in tree.items()})
        return changed
    if isinstance(tree, (list, tuple)):
        items = [_map(item, change, f"{path}[{i}]") for i, item in enumerate(tree)]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return change(path, tree)


def _leaves(tree: Any, function: str) -> dict[str, Any]:
    """The leaves by path, in an order that does not depend on that of dictionaries.

    Raises:
        TypeError: One is neither a tensor nor a number.
    """
    leaves: dict[str, Any] = {}
    _map(tree, leaves.__setitem__)
    for path, leaf in leaves.items():
        if not _is_tensor(leaf) and not isinstance(leaf, numbers.Real):
            raise TypeError(
                f"{function}: {path.lstrip() or 'it'} is of type {type(leaf).__name__}; expected "
                "tensors, numbers, None, and dictionaries, lists and tuples of them"
            )
    return dict(sorted(leaves.items()))


def _tensors(leaves: dict[str, Any]) -> list[torch.Tensor]:
    """The leaves as tensors; numbers as float64 on the device of the first tensor."""
    device = next((leaf.device for leaf in leaves.values() if _is_tensor(leaf)), None)
    return [
        leaf if _is_tensor(leaf) else torch.tensor(float(leaf), dtype=torch.float64, device=device)
        for leaf in leaves.values()
    ]


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _like(mean: torch.Tensor, leaf: Any) -> Any:
    """A float for a number, a tensor of floats for a tensor."""
    if not _is_tensor(leaf):
        return mean.item()
    dtype = leaf.dtype if leaf.is_floating_point() else torch.get_default_dtype()
    return mean.to(leaf.device, dtype)


def _plain(mean: torch.Tensor) -> Any:
    return mean.item() if mean.dim() == 0 else mean


def _ranks(process_set: Any) -> Iterable[int]:
    return range(fl.size()) if process_set is None else process_set.ranks


def _where(process_set: Any) -> dict[str, Any]:
    return {} if process_set is None else {"process_set": process_set}
