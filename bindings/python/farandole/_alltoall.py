"""Alltoall, for all faces: each rank tells each other how many rows come, then they move.

Beside its rows for the other a rank tells the most that it has for anyone: from these all ranks
know the same largest piece, which the core wants agreed on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from farandole import _context, _two_steps, _work
from farandole._two_steps import Piece
from farandole._work import Call, Handle, Parameters


class Received(NamedTuple):
    """The rows for this rank in rank order; how many came from each rank."""

    tensor: Any
    splits: list[int]


def rows_to_each(splits: Any, rows: int) -> list[int]:
    """How many rows go to each rank.

    Args:
        splits: Integers, one per rank, as a sequence or an array; what they leave over of the rows
            goes nowhere. None: the same number to each rank.
        rows: Of the tensor.
    Raises:
        ValueError: They do not fit.
    """
    size = _context.current().topology.size
    if splits is None:
        if rows % size != 0:
            raise ValueError(
                "alltoall: splits not provided, but first dimension of tensor is not an even "
                f"multiple of the number of workers: {rows} rows for {size} ranks"
            )
        return [rows // size] * size
    numbers = _as_array(splits)
    if numbers.ndim != 1:
        raise ValueError(
            f"alltoall expects a 1D splits tensor, one number per rank; got shape {numbers.shape}"
        )
    if len(numbers) != size:
        raise ValueError(
            "alltoall: Number of entries in splits does not equal number of workers: "
            f"{len(numbers)} for {size} ranks"
        )
    if numbers.dtype.kind not in "iu":
        raise ValueError(f"alltoall expects splits to contain integers, not {numbers.dtype}")
    sends: list[int] = numbers.tolist()
    if min(sends) < 0:
        raise ValueError(f"alltoall: splits must not be negative: {sends}")
    if sum(sends) > rows:
        raise ValueError(
            "alltoall: Sum of splits entries is greater than the first dimension of tensor: "
            f"{sends} for {rows} rows"
        )
    return sends


def _as_array(splits: Any) -> npt.NDArray[Any]:
    """``splits`` as NumPy sees them.

    Raises:
        ValueError: They are no sequence of numbers and no array.
    """
    try:
        numbers = np.asarray(splits)
    except ValueError:  # of unequal lengths
        numbers = np.asarray(None)
    if numbers.dtype.kind in "OSU":
        raise ValueError(
            "alltoall expects splits as a sequence or an array of integers, one per rank; got "
            f"{splits!r:.80}"
        )
    return numbers


def run(
    piece: Piece, sends: list[int], name: str | None, finish: Callable[[Received], Any]
) -> Any:
    """Exchanges and waits; see :func:`farandole._two_steps.run`. ``finish`` makes the result."""
    exchange = _Exchange(piece, sends)
    return _two_steps.run(exchange, piece.place, name, lambda: finish(exchange.result()))


def start(
    piece: Piece, sends: list[int], name: str | None, finish: Callable[[Received], Any]
) -> Handle:
    """As :func:`run`, without waiting; ``finish`` makes the handle's result in ``synchronize``."""
    exchange = _Exchange(piece, sends)
    return _two_steps.start(exchange, piece.place, name, lambda: finish(exchange.result()))


class _Exchange:
    """This rank's part; see :class:`farandole._two_steps.Steps`."""

    function = "alltoall"

    def __init__(self, piece: Piece, sends: list[int]) -> None:
        self._piece: Piece | None = piece
        self._sends = sends
        self._told = np.array([(rows, max(sends)) for rows in sends], np.int64)
        self._heard: npt.NDArray[np.int64] = np.empty_like(self._told)
        self._tensor: Any = None

    def result(self) -> Received:
        """What came."""
        return Received(self._tensor, self._heard[:, 0].tolist())

    def telling(self, name: str) -> Call:
        """To each rank a pair: rows for it, most rows for anyone."""
        assert self._piece is not None
        size = len(self._sends)
        pairs = ("pairs", _work.DTYPES["int64"], (1, 2))
        empty = (name, self._piece.dtype, (0, *self._piece.shape[1:]))
        return Call(
            Parameters(
                _work.ALLTOALL,
                rows=(1,) * (2 * size) + (0,) * (2 * size),
                function=self.function,
            ),
            name,
            (pairs, empty),
            (self._told, None),
            (self._heard, None),
            (self._told, self._heard),
            lambda: None,
        )

    def moving(self, name: str, failed: str | None) -> Call | None:
        """The rows."""
        assert self._piece is not None
        row = self._piece.shape[1:]
        receives = self._heard[:, 0].tolist()
        address = None
        if failed is None:
            self._tensor, address = self._piece.allocate((sum(receives), *row))
        largest = int(self._heard[:, 1].max())
        if largest * math.prod(row) == 0:
            return None
        return Call(
            Parameters(_work.ALLTOALL, rows=(*self._sends, *receives)),
            name,
            ((None, self._piece.dtype, (largest, *row)),),
            (self._piece.address,),
            (address,),
            (self._piece.memory, self._tensor),
            lambda: None,
            failed,
            self._piece.place,
        )

    def let_go(self) -> None:
        """Keeps no inputs any longer."""
        self._piece = None
