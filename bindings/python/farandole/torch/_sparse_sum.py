"""Sums of sparse tensors over all ranks, as Horovod's ``sparse_allreduce_async`` gives them.

The optimizer has a way of its own, :mod:`farandole.torch._sparse`, which knows votes and windows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from farandole import _context, _work
from farandole.torch._rows import gather
from farandole.torch._sparse import CHECKED


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int | None = None,
    process_set: object = None,
) -> Callable[[], torch.Tensor]:
    """Starts the sum, or the mean, of a sparse tensor over all ranks.

    Args:
        tensor: Of the layout ``torch.sparse_coo``, the same shape, dtype and number of sparse
            dimensions on all ranks; each has elements of its own, also none.
        name: As for :func:`allreduce`.
        op: Average (default) or Sum. Averages of integers truncate toward zero element by element.
        process_set: Only the global one for now.
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
    if op not in (None, _work.Average, _work.Sum):
        raise ValueError(f"sparse_allreduce_async: op must be Average or Sum, not {op!r}")
    rows = tensor.detach().coalesce()
    like = torch.empty(0, *tensor.shape, device=tensor.device)  # ranks must agree on the shape
    parts = [rows.indices().t(), rows.values(), like]
    handle = _work.start(gather(parts, name, process_set, "sparse_allreduce_async"))
    divisor = 1 if op == _work.Sum else _context.current().topology.size
    shape = tensor.shape

    def wait() -> torch.Tensor:
        indices, values, _ = _work.synchronize(handle)
        total = torch.sparse_coo_tensor(indices.t(), values, shape, **CHECKED).coalesce()
        if divisor == 1:
            return total
        is_floating = values.is_floating_point()
        mean = torch.div(total.values(), divisor, rounding_mode=None if is_floating else "trunc")
        return torch.sparse_coo_tensor(total.indices(), mean, shape, **CHECKED).coalesce()

    return wait
