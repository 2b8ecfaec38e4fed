"""Allgather, made of one small allreduce and one broadcast per rank; shared by all faces.

First the ranks learn how many rows each of them has. An empty tensor with the other dimensions
travels beside the counts, so that ranks which disagree are refused like in every collective. Then
each rank's rows are broadcast straight to their place in the results, all ranks' at once.

The second step starts when the first has ended. A blocking call does that by itself. An
asynchronous one has a thread for it, as ranks may synchronize their handles in any order and a rank
that computes must not keep the others waiting.
"""

from __future__ import annotations

import contextvars
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from farandole import _context, _work
from farandole._place import Place
from farandole._work import Call, Handle, Parameters
from farandole.exceptions import HorovodInternalError

_UNNAMED: Final = 256  # in flight at once; as many as the engine has of every other kind


class Piece(NamedTuple):
    """One tensor of this rank.

    Attributes:
        dtype: The C ABI's number.
        shape: [rows, ...]; the dimensions after the first are the same on all ranks.
        address: Of the contiguous elements; None when there are none.
        itemsize: Bytes per element.
        allocate: Shape -> a new contiguous tensor and its address.
        memory: Kept alive until the operation has finished.
        place: The GPU it is on, the same for all pieces; None: host memory.
    """

    dtype: int
    shape: tuple[int, ...]
    address: int | None
    itemsize: int
    allocate: Callable[[tuple[int, ...]], tuple[Any, int]]
    memory: object
    place: Place | None = None


class Gathered(NamedTuple):
    """Per piece the rows of all ranks in rank order; how many there are, int64 [size, pieces]."""

    tensors: list[Any]
    rows: npt.NDArray[np.int64]


def check_rows(shape: Sequence[int]) -> tuple[int, ...]:
    """``shape`` as a tuple; ValueError for a scalar, which has no rows."""
    if not len(shape):
        raise ValueError("allgather: a scalar has no rows to gather; reshape it to [1]")
    return tuple(shape)


def run(pieces: Sequence[Piece], name: str | None, failed: str | None = None) -> Gathered:
    """Gathers and waits.

    Args:
        pieces: The same number on all ranks.
        name: The same on all ranks; None: matched by the order of the unnamed calls.
        failed: This rank's error text: the operation is then refused on every rank with it.
    Raises:
        MismatchError: Dtypes or dimensions after the first differ.
        ValueError: The name is in flight already.
    """
    gather = _Gather(pieces, name, failed)
    try:
        gather.proceed()
    except BaseException:  # a signal's: the other ranks count on the second step
        gather.proceed_in_background()
        raise
    gather.wait()
    return gather.result()


def start(pieces: Sequence[Piece], name: str | None, finish: Callable[[Gathered], Any]) -> Handle:
    """As :func:`run`, without waiting; ``finish`` makes the handle's result in ``synchronize``."""
    gather = _Gather(pieces, name, None)
    gather.proceed_in_background()
    return Handle(_context.current(), None, lambda: finish(gather.result()), gather)


class _Gather:
    """One allgather under way; to a Handle it is a piece of work.

    Thread safety: ``proceed`` by one thread at a time, the rest by any. Invariant: its name is
    taken from construction until it is done.
    """

    def __init__(self, pieces: Sequence[Piece], name: str | None, failed: str | None) -> None:
        self._rank = _context.current()
        self._pieces = pieces
        self._name = _take_name(self._rank, name)
        self._rank.gathers[self._name] = self
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._tensors: list[Any] = []
        self._rows = np.zeros((self._rank.topology.size, len(pieces)), np.int64)
        self._rows[self._rank.topology.rank] = [piece.shape[0] for piece in pieces]
        self._handles: list[Handle] | None = None
        self._place = pieces[0].place
        self._stream = None if self._place is None else self._place.stream()
        try:
            self._counting = _work.start(self._count_rows(failed))
        except BaseException as error:
            self._end(error)
            raise

    def poll(self) -> bool:
        """Whether it has ended, well or not."""
        return self._done.is_set()

    def over(self) -> bool:
        """Whether it keeps no memory; what is in flight keeps its own."""
        return self.poll()

    def wait(self, timeout_s: float = -1.0, stream: object = None) -> None:
        """Returns when it has ended well, else raises why not; on a GPU as ``synchronize``."""
        del timeout_s, stream
        self._done.wait()
        if self._error is not None:
            raise self._error
        while self._handles:
            self._handles[-1].wait()
            self._handles.pop()

    def result(self) -> Gathered:
        """What was gathered; after :meth:`wait`."""
        return Gathered(self._tensors, self._rows)

    def proceed(self) -> None:
        """Both steps, or what an interruption left of them. Does not raise their errors."""
        if self._done.is_set():
            return
        try:
            if self._handles is None:
                self._counting.wait()
                self._handles = [_work.start(call) for call in self._broadcasts()]
            for handle in self._handles:
                handle.wait_until_launched()
        except Exception as error:
            self._end(self._explained(error))
        else:
            self._end(None)

    def proceed_in_background(self) -> None:
        """As :meth:`proceed`, by a thread, which ends at the latest with the context."""
        thread = threading.Thread(
            target=contextvars.copy_context().run, args=(self._proceed_and_leave,), daemon=True
        )
        self._rank.threads.add(thread)
        thread.start()

    def _proceed_and_leave(self) -> None:
        if self._place is None or self._stream is None:
            self.proceed()
        else:
            with self._place.using(self._stream):  # the caller's; this thread has another
                self.proceed()
        self._rank.threads.discard(threading.current_thread())

    def _end(self, error: BaseException | None) -> None:
        self._error = error
        self._pieces = ()
        self._rank.gathers.pop(self._name, None)
        self._done.set()

    def _explained(self, error: Exception) -> Exception:
        if not isinstance(error, HorovodInternalError):
            return error
        text = str(error).replace(f'allreduce "allgather.{self._name}": member', "allgather")
        text = text.replace(f'allreduce "allgather.{self._name}"', f'allgather "{self._name}"')
        return type(error)(
            text.replace("shapes must be equal", "only the first dimension, shown as 0, may differ")
        )

    def _member(self, i: int) -> str:
        return self._name if self._rows.shape[1] == 1 else f"{self._name}.{i}"

    def _count_rows(self, failed: str | None) -> Call:
        """Everybody's row of the table; Max knows every dtype of the empty tensors."""
        table = ("rows", _work.DTYPES["int64"], self._rows.shape)
        empty = (
            (self._member(i), piece.dtype, (0, *piece.shape[1:]))
            for i, piece in enumerate(self._pieces)
        )
        addresses = (self._rows, *(None for _ in self._pieces))
        parameters = Parameters(_work.ALLREDUCE, _work.reduction(_work.Max))
        return Call(
            parameters, f"allgather.{self._name}", (table, *empty), addresses, addresses,
            self._rows, lambda: None, failed,
        )  # fmt: skip

    def _broadcasts(self) -> list[Call]:
        """One per rank that has rows, from its memory into everybody's results."""
        totals = self._rows.sum(0).tolist()
        shapes = [(n, *p.shape[1:]) for n, p in zip(totals, self._pieces, strict=True)]
        allocated = [
            piece.allocate(shape) for piece, shape in zip(self._pieces, shapes, strict=True)
        ]
        self._tensors = [tensor for tensor, _ in allocated]
        targets = [address for _, address in allocated]
        calls = []
        for root, rows in enumerate(self._rows.tolist()):
            if any(rows):
                calls.append(self._broadcast(root, rows, list(targets)))
            for i, piece in enumerate(self._pieces):
                targets[i] += rows[i] * math.prod(piece.shape[1:]) * piece.itemsize
        return calls

    def _broadcast(self, root: int, rows: Sequence[int], targets: Sequence[int]) -> Call:
        shapes = [(n, *p.shape[1:]) for n, p in zip(rows, self._pieces, strict=True)]
        is_root = root == self._rank.topology.rank
        return Call(
            Parameters(_work.BROADCAST, root=root),
            f"allgather.{self._name}.{root}",
            tuple((self._member(i), self._pieces[i].dtype, s) for i, s in enumerate(shapes)),
            [piece.address if is_root else None for piece in self._pieces],
            [address if math.prod(s) else None for address, s in zip(targets, shapes, strict=True)],
            (self._tensors, [piece.memory for piece in self._pieces]),
            lambda: None,
            place=self._place,
        )


def _take_name(rank: _context.Rank, name: str | None) -> str:
    """``name`` or that of the next unnamed call, which waits until an earlier one is through."""
    if name is None:
        name = f"noname.{rank.gather_count % _UNNAMED}"
        rank.gather_count += 1
        earlier = rank.gathers.get(name)
        if earlier is not None:
            earlier._done.wait()
    elif name in rank.gathers:
        raise ValueError(
            f'allgather "{name}" is already in flight on rank {rank.topology.rank}; wait for it, '
            "or use another name"
        )
    return name
