"""Python objects between ranks: pickled, by cloudpickle where it is installed.

An object that cannot be pickled is an error on every rank, told before anything is waited for.
Reading a pickle can run code: with FARANDOLE_ALLOW_PICKLE=0 only plain values travel, as text.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from farandole import _context, _gather, _plain, _two_steps, _work
from farandole._two_steps import Piece
from farandole._work import Call, Parameters
from farandole.exceptions import HorovodInternalError

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: object = None
) -> Any:
    """Gives every rank the object of ``root_rank``.

    Args:
        obj: Anything that can be pickled; only the root's matters.
        root_rank: 0 <= root_rank < size(), the same on all ranks.
        name: The same on all ranks; None: matched by the order of the unnamed calls.
        process_set: Only the global one for now.
    Returns:
        ``obj`` itself on the root, a copy of it elsewhere.
    Raises:
        HorovodInternalError: On every rank, if the root's object cannot be pickled, or must not
            be: FARANDOLE_ALLOW_PICKLE=0.
        ValueError: There is no such rank.
    """
    return broadcast_made(lambda: obj, root_rank, name, process_set)


def broadcast_made(
    make: Callable[[], Any], root_rank: int, name: str | None = None, process_set: object = None
) -> Any:
    """As :func:`broadcast_object` of what ``make()`` returns on the root.

    An exception of ``make`` is one on every rank.
    """
    _work.default_process_set(process_set)
    broadcast = _Broadcast(make, _work.check_root(root_rank))
    try:
        return _two_steps.run(broadcast, None, name, broadcast.result)
    except HorovodInternalError as refused:
        raise refused from broadcast.error


class _Broadcast:
    """This rank's part; see :class:`farandole._two_steps.Steps`: the size, then the pickle."""

    function = "broadcast_object"

    def __init__(self, make: Callable[[], Any], root: int) -> None:
        self._is_root = _context.current().topology.rank == root
        self._parameters = Parameters(_work.BROADCAST, root=root, function=self.function)
        self._obj: Any = None
        self._content = _no_bytes()
        self.error: Exception | None = None
        if self._is_root:
            self._obj, self._content, self.error = _made(make)
        self._count = np.array([self._content.size])

    def result(self) -> Any:
        """The object that was broadcast."""
        return self._obj if self._is_root else _loads(self._content)

    def telling(self, name: str) -> Call:
        """The size; with an error of ``make`` it is refused on every rank instead."""
        return self._call(name, self._count, _text(self.error))

    def moving(self, name: str, failed: str | None) -> Call | None:
        """The pickle."""
        if not self._is_root and failed is None:
            self._content = np.empty(self._count[0], np.uint8)
        return self._call(name, self._content, failed)

    def _call(self, name: str, array: Any, failed: str | None) -> Call:
        description = (None, _work.DTYPES[array.dtype.name], array.shape)
        addresses = (_address(array),)
        return Call(
            self._parameters, name, (description,), addresses, addresses, array, lambda: None, failed
        )

    def let_go(self) -> None:
        """The pickle is the result."""


def allgather_object(obj: Any, name: str | None = None, process_set: object = None) -> list[Any]:
    """Gives every rank the objects of all ranks.

    Args:
        obj: Anything that can be pickled.
        name: The same on all ranks; None: matched by the order of the unnamed calls.
        process_set: Only the global one for now.
    Returns:
        A copy of each rank's object, by rank.
    Raises:
        HorovodInternalError: On every rank, if one rank's object cannot be pickled, or must not
            be: FARANDOLE_ALLOW_PICKLE=0; the message names the rank.
        ValueError: The name is in flight already.
    """
    _work.default_process_set(process_set)
    _, content, error = _made(lambda: obj)
    dtype = _work.DTYPES["uint8"]
    piece = Piece(dtype, content.shape, _address(content), _allocate, content)
    try:
        return _gather.run([piece], name, _load_all, _text(error), "allgather_object")
    except HorovodInternalError as refused:
        raise refused from error


def _load_all(gathered: _gather.Gathered) -> list[Any]:
    ends = gathered.rows[:, 0].cumsum().tolist()
    (joined,) = gathered.tensors
    return [_loads(joined[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]


def _made(make: Callable[[], Any]) -> tuple[Any, _Bytes, Exception | None]:
    """What ``make`` makes, its pickle, and the error if one of the two failed."""
    try:
        obj = make()
        return obj, np.frombuffer(_dumps(obj), np.uint8), None
    except Exception as error:
        return None, _no_bytes(), error


def _dumps(obj: Any) -> bytes:
    if not _pickles_are_allowed():
        return _plain.dumps(obj)
    try:
        import cloudpickle
    except ImportError:
        return pickle.dumps(obj)
    return bytes(cloudpickle.dumps(obj))


def _loads(content: _Bytes) -> Any:
    """The inverse on every rank: the setting is the same on all of them."""
    return (pickle.loads if _pickles_are_allowed() else _plain.loads)(content.tobytes())


def _pickles_are_allowed() -> bool:
    return _context.current().context.setting("FARANDOLE_ALLOW_PICKLE") == "1"


def _text(error: Exception | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {error}"


def _address(array: np.ndarray[Any, Any]) -> int | None:
    return array.ctypes.data if array.size else None


def _no_bytes() -> _Bytes:
    return np.empty(0, np.uint8)


def _allocate(shape: tuple[int, ...]) -> tuple[_Bytes, int | None]:
    result = np.empty(shape, np.uint8)
    return result, _address(result)
