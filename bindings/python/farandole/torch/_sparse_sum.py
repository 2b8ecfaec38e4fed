"""Sums of sparse tensors over all ranks, as Horovod's ``sparse_allreduce_async`` gives them.

The optimizer has a way of its own, :mod:`farandole.torch._sparse`, which knows votes and windows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from farandole import ops
from farandole.basics import ProcessSet, global_process_set
from farandole.torch._compat import CHECKED


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], torch.Tensor]:
    """Starts the sum, or the mean, of a sparse tensor over all ranks.

    Args:
        tensor: Of the layout ``torch.sparse_coo``, the same shape, dtype and number of sparse
            dimensions on all ranks; each has elements of its own, also none.
        name: As for :func:`allreduce`.
        op: Average (default) or Sum. Averages of integers truncate toward zero element by element.
        process_set: The ranks that take part, of which this one is.
    Returns:
        What waits for the result and gives it: a new, coalesced tensor.
    Raises:
        TypeError: ``tensor`` is not of that layout.
        ValueError: Another ``op``.
    """
    if tensor.layout is not torch.sparse_coo:
        raise TypeError(
            f"sparse_allreduce_async takes torch.sparse_coo tensors, not {tensor.layout}"
        )
    if op not in (None, ops.Average, ops.Sum):
        raise ValueError(f"sparse_allreduce_async: op must be Average or Sum, not {op!r}")
    rows = tensor.detach().coalesce()
    like = torch.empty(0, *tensor.shape, device=tensor.device)  # ranks must agree on the shape
    parts = [rows.indices().t(), rows.values(), like]
    how = ops.gather_options(process_set, "sparse_allreduce_async")
    handle = ops.submit_group(how, parts, name)
    divisor = 1 if op == ops.Sum else process_set.size() or 1
    shape = tensor.shape

    def wait() -> torch.Tensor:
        indices, values, _ = ops.synchronize(handle)
        total = torch.sparse_coo_tensor(indices.t(), values, shape, **CHECKED).coalesce()
        if divisor == 1:
            return total
        is_floating = values.is_floating_point()
        mean = torch.div(total.values(), divisor, rounding_mode=None if is_floating else "trunc")
        return torch.sparse_coo_tensor(total.indices(), mean, shape, **CHECKED).coalesce()

    return wait
