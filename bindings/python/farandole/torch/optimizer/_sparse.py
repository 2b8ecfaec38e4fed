"""Sparse gradients: the rows of all ranks, put together on every rank.

A round learns from one shared number whether any rank had a sparse gradient; only then this runs.
First the ranks learn, per parameter, whether any has one; then all ranks' indices and values are
gathered in one operation, on a GPU there. How many rows a rank has is known once its gradients are
coalesced, for which the host waits. Everything is named and started before it is waited for, so that
ranks may run it for several optimizers in different orders.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from farandole import ops
from farandole._core import Gradients
from farandole.basics import Context
from farandole.torch.optimizer._codecs import DefaultDevice
from farandole.torch.optimizer._parameters import Settings

_PRESENT, _CLEAN = 0, 1  # columns of what ranks have of each parameter


class SparseExchange:
    """One round's sparse gradients.

    Args:
        rank: The context.
        prefix: Of the names; distinct per exchange.
        gradients: Of a round that was received; ``slot.sparse`` is what this rank has.
        settings: Of the rounds. If it densifies, the dense sums hold the sparse gradients already;
            they only change their layout.
    """

    def __init__(self, rank: Context, prefix: str, gradients: Gradients, settings: Settings) -> None:
        self._rank = rank
        self._prefix = prefix
        self._slots = list(gradients)
        # Of which a dense sum over the ranks was received too.
        self._dense = [not gradients.skipped(i) for i in range(len(gradients))]
        self._scale = settings.scale  # of the sum over the ranks
        self._settings = settings
        self._rows: list[torch.Tensor | None] = []

    def stages(self, default: DefaultDevice) -> Iterator[None]:
        """Yields whenever something was started that the next stage waits for."""
        slots = self._slots
        self._rows = [None if s.sparse is None else by_rows(s.sparse, default.device) for s in slots]
        kinds = torch.zeros(len(slots), 2, dtype=torch.bool)
        for i, slot in enumerate(slots):
            kinds[i, _PRESENT if slot.is_present else _CLEAN] = self._rows[i] is not None
        core, how = self._rank.core, self._settings.plain(ops.ALLREDUCE, ops.Max)
        handle = core.submit(how, kinds, self._prefix + "rows", ops.IN_PLACE)
        yield
        handle.wait()
        taken = self._taken(kinds)
        if self._settings.densifies:
            self._give_layout(taken)
            return
        if taken:
            parts = [part for i in taken for part in self._parts(i, default.device)]
            how = self._settings.plain(ops.ALLGATHER)
            handle = core.submit(how, parts, self._prefix + "all rows", ops.GROUP)
            yield
            self._put_together(taken, handle.wait())

    def _taken(self, kinds: torch.Tensor) -> list[int]:
        """The slots in which some rank contributes a sparse gradient, or a dense one to clean ones."""
        taken = []
        for i, (slot, (present, clean)) in enumerate(zip(self._slots, kinds.tolist(), strict=True)):
            slot.was_sparse = slot.was_sparse or present or clean
            if present or (self._dense[i] and clean):
                taken.append(i)
        return taken

    def _give_layout(self, taken: list[int]) -> None:
        for i in taken:
            grad = self._slots[i].parameter.grad
            if grad is not None and grad.layout is torch.strided:
                self._slots[i].parameter.grad = grad.to_sparse(1)
                self._slots[i].note_reduced()

    def _parts(self, index: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices [rows] and values [rows, ...] that this rank has."""
        slot, rows = self._slots[index], self._rows[index]
        if rows is not None:
            return rows._indices()[0], rows._values().to(slot.dtype)
        values = torch.empty(0, *slot.parameter.shape[1:], dtype=slot.dtype, device=device)
        return torch.empty(0, dtype=torch.int64, device=device), values

    def _put_together(self, taken: list[int], parts: list[torch.Tensor]) -> None:
        for i, indices, values in zip(taken, parts[::2], parts[1::2], strict=True):
            parameter = self._slots[i].parameter
            # A copy of the indices: rows may be added in place, and received memory cannot grow.
            total = torch.sparse_coo_tensor(
                indices.unsqueeze(0).clone(), values * self._scale, parameter.shape,
                check_invariants=True,
            )  # fmt: skip
            self._give(i, total.coalesce().to(parameter.device))

    def _give(self, index: int, total: torch.Tensor) -> None:
        slot = self._slots[index]
        grad = slot.parameter.grad
        if self._dense[index] and grad is not None:
            total = grad + total
        slot.parameter.grad = total
        slot.note_reduced()


def by_rows(grad: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A gradient of any sparse layout as coalesced rows on ``device``, one index each."""
    grad = grad.detach()
    if grad.layout is not torch.sparse_coo or grad.sparse_dim() != 1:
        grad = grad.to_dense().to_sparse(1)
    return grad.coalesce().to(device)
