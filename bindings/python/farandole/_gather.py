"""Allgather, for all faces: a table of rows first, then the rows themselves.

The table is a small allreduce (Max) into which every rank fills its row, and not an allgather of
counts: a rank that has joined leaves zeros, which is what it gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from farandole import _context, _two_steps, _work
from farandole._two_steps import Piece
from farandole._work import Call, Handle, Parameters


class Gathered(NamedTuple):
    """Per piece the rows of all ranks in rank order; how many there are, int64 [size, pieces]."""

    tensors: list[Any]
    rows: npt.NDArray[np.int64]


def run(
    pieces: Sequence[Piece],
    name: str | None,
    finish: Callable[[Gathered], Any] = lambda gathered: gathered,
    failed: str | None = None,
    function: str = "allgather",
) -> Any:
    """Gathers and waits; see :func:`farandole._two_steps.run`.

    Args:
        pieces: The same number on all ranks.
        name: Of the call.
        finish: Makes the result.
        failed: This rank's error text: the operation is then refused on every rank with it.
        function: As the user called it.
    """
    gather = _Gather(pieces, failed, function)
    return _two_steps.run(gather, pieces[0].place, name, lambda: finish(gather.result()))


def start(
    pieces: Sequence[Piece],
    name: str | None,
    finish: Callable[[Gathered], Any],
    function: str = "allgather",
) -> Handle:
    """As :func:`run`, without waiting; ``finish`` makes the handle's result in ``synchronize``."""
    gather = _Gather(pieces, None, function)
    return _two_steps.start(gather, pieces[0].place, name, lambda: finish(gather.result()))


class _Gather:
    """This rank's part; see :class:`farandole._two_steps.Steps`."""

    def __init__(self, pieces: Sequence[Piece], failed: str | None, function: str) -> None:
        self.function = function
        topology = _context.current().topology
        self._pieces = pieces
        self._failed = failed
        self._tensors: list[Any] = []
        self._rows = np.zeros((topology.size, len(pieces)), np.int64)
        self._rows[topology.rank] = [piece.shape[0] for piece in pieces]

    def result(self) -> Gathered:
        """What was gathered."""
        return Gathered(self._tensors, self._rows)

    def telling(self, name: str) -> Call:
        """Everybody's row of the table; Max knows every dtype of the empty tensors."""
        table = ("rows", _work.DTYPES["int64"], self._rows.shape)
        empty = (
            (self._member(i, name) or name, piece.dtype, (0, *piece.shape[1:]))
            for i, piece in enumerate(self._pieces)
        )
        addresses = (self._rows, *(None for _ in self._pieces))
        op = _work.reduction(_work.Max)
        parameters = Parameters(_work.ALLREDUCE, op, function=self.function)
        return Call(
            parameters, name, (table, *empty), addresses, addresses, self._rows,
            lambda: None, self._failed,
        )  # fmt: skip

    def moving(self, name: str, failed: str | None) -> Call | None:
        """All ranks' rows into everybody's results."""
        totals = self._rows.sum(0).tolist()
        shapes = [(n, *p.shape[1:]) for n, p in zip(totals, self._pieces, strict=True)]
        allocated: list[tuple[Any, int | None]] = [(None, None)] * len(shapes)
        if failed is None:
            allocated = [p.allocate(shape) for p, shape in zip(self._pieces, shapes, strict=True)]
        self._tensors = [tensor for tensor, _ in allocated]
        if not any(math.prod(shape) for shape in shapes):
            return None
        return Call(
            Parameters(_work.ALLGATHER, rows=tuple(self._rows.T.ravel().tolist())),
            name,
            tuple((self._member(i, name), self._pieces[i].dtype, s) for i, s in enumerate(shapes)),
            [piece.address for piece in self._pieces],
            [address for _, address in allocated],
            (self._tensors, [piece.memory for piece in self._pieces]),
            lambda: None,
            failed,
            self._pieces[0].place,
        )

    def let_go(self) -> None:
        """Keeps no inputs any longer."""
        self._pieces = ()

    def _member(self, i: int, name: str) -> str | None:
        """What messages call a piece; only in groups."""
        return None if self._rows.shape[1] == 1 else f"{name}.{i}"
