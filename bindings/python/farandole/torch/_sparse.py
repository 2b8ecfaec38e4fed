"""Sparse gradients: the rows of all ranks, put together on every rank.

A round learns from one shared number whether any rank had a sparse gradient; only then this runs.
First every rank tells, per parameter, whether it has one and how many rows; then all ranks' rows
are gathered as runs of bytes, on a GPU there. How many rows there are is known on the host alone,
which therefore waits for the gradients. Everything is named and started before it is waited for, so that
ranks may run it for several optimizers in different orders.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from farandole import _context, _work
from farandole._place import Place
from farandole.torch import _tensors
from farandole.torch._devices import Home
from farandole.torch._settings import Settings
from farandole.torch._slots import Slot

_NONE, _PRESENT, _CLEAN = 0, 1, 2
# torch >= 2.0 warns unless it is told whether to check the indices.
CHECKED: dict[str, Any] = (
    {"check_invariants": True} if hasattr(torch.sparse, "check_sparse_tensor_invariants") else {}
)
_ALIGNMENT = 8  # bytes; so that any part of a buffer can be viewed as int64 or float64


class SparseExchange:
    """One round's sparse gradients.

    Args:
        rank: The context.
        prefix: Of the names; distinct per exchange.
        slots: The parameters; ``slot.sparse`` is what this rank has.
        dense: Per slot: a dense sum over the ranks was received too.
        settings: Of the rounds. If it densifies, the dense sums hold the sparse gradients already;
            they only change their layout.
    """

    def __init__(
        self,
        rank: _context.Rank,
        prefix: str,
        slots: Sequence[Slot],
        dense: Sequence[bool],
        settings: Settings,
    ) -> None:
        self._rank = rank
        self._prefix = prefix
        self._slots = slots
        self._dense = dense
        self._scale = settings.scale(rank.topology.size)  # of the sum over the ranks
        self._densifies = settings.densifies
        self._rows: list[torch.Tensor | None] = []

    def stages(self, home: Home) -> Iterator[None]:
        """Yields whenever something was started that the next stage waits for."""
        slots = self._slots
        self._rows = [None if s.sparse is None else by_rows(s.sparse, home.device) for s in slots]
        topology = self._rank.topology
        table = torch.zeros(topology.size, len(self._slots), 2, dtype=torch.int64)
        for i, slot in enumerate(self._slots):
            rows = self._rows[i]
            if rows is not None:
                kind = _PRESENT if slot.is_present else _CLEAN
                table[topology.rank, i] = torch.tensor([kind, rows._nnz()])
        handle = self._start(_work.Parameters(_work.ALLREDUCE), "rows", table, table, None)
        yield
        handle.wait()
        taken = self._taken(table)
        if self._densifies:
            self._give_layout(taken)
            return
        sizes = [[self._size(i, int(of_rank[i, 1])) for i in taken] for of_rank in table]
        lengths = [sum(of_rank) for of_rank in sizes]
        mine = self._buffer(taken, sizes[topology.rank], home.device)
        gathered = torch.empty(sum(lengths), dtype=torch.uint8, device=home.device)
        if gathered.numel():
            parameters = _work.Parameters(_work.ALLGATHER, rows=tuple(lengths))
            handle = self._start(parameters, "all rows", mine, gathered, home.place)
            yield
            handle.wait()
        self._put_together(table, taken, gathered.split(lengths))

    def _start(
        self,
        what: _work.Parameters,
        name: str,
        given: torch.Tensor,
        result: torch.Tensor,
        place: Place | None,
    ) -> _work.Handle:
        call = _work.Call(
            what, self._prefix + name, (_tensors.describe(result),), (_tensors.address(given),),
            (_tensors.address(result),), (given, result), lambda: None, place=place,
        )  # fmt: skip
        with _context.using(self._rank):
            return _work.start(call)

    def _taken(self, table: torch.Tensor) -> list[int]:
        """The slots in which some rank contributes a sparse gradient, or a dense one to clean ones."""
        kinds = table[:, :, 0]
        taken = []
        for i, slot in enumerate(self._slots):
            slot.was_sparse = slot.was_sparse or bool((kinds[:, i] != _NONE).any())
            is_present = bool((kinds[:, i] == _PRESENT).any())
            if is_present or (self._dense[i] and bool((kinds[:, i] == _CLEAN).any())):
                taken.append(i)
        return taken

    def _give_layout(self, taken: list[int]) -> None:
        for i in taken:
            grad = self._slots[i].parameter.grad
            if grad is not None and grad.layout is torch.strided:
                self._slots[i].parameter.grad = grad.to_sparse(1)
                self._slots[i].note_reduced()

    def _buffer(self, taken: list[int], sizes: list[int], device: torch.device) -> torch.Tensor:
        """This rank's rows, end to end."""
        buffer = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
        for i, part in zip(taken, buffer.split(sizes), strict=True):
            rows = self._rows[i]
            if rows is not None:
                indices, values = self._views(i, rows._nnz(), part)
                indices.copy_(rows._indices()[0])
                values.copy_(rows._values())
        return buffer

    def _size(self, index: int, rows: int) -> int:
        """Bytes of the indices and values of so many rows, filled up."""
        slot = self._slots[index]
        element_size = torch.empty(0, dtype=slot.dtype).element_size()
        row_size = 8 + slot.parameter.shape[1:].numel() * element_size
        return -(-rows * row_size // _ALIGNMENT) * _ALIGNMENT

    def _views(
        self, index: int, rows: int, part: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices [rows] and values [rows, ...] in a slot's part of a buffer."""
        slot = self._slots[index]
        row_shape = slot.parameter.shape[1:]
        values = part[8 * rows :].view(slot.dtype)[: rows * row_shape.numel()]
        return part[: 8 * rows].view(torch.int64), values.view(rows, *row_shape)

    def _put_together(
        self, table: torch.Tensor, taken: list[int], buffers: Sequence[torch.Tensor]
    ) -> None:
        offsets = [0] * len(buffers)
        for i in taken:
            parts = []
            for r, buffer in enumerate(buffers):
                rows = int(table[r, i, 1])
                end = offsets[r] + self._size(i, rows)
                parts.append(self._views(i, rows, buffer[offsets[r] : end]))
                offsets[r] = end
            indices, values = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
            parameter = self._slots[i].parameter
            total = torch.sparse_coo_tensor(
                indices.unsqueeze(0), values * self._scale, parameter.shape, **CHECKED
            )
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
