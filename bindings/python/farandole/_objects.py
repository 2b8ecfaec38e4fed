"""Python objects between ranks: pickled, by cloudpickle where it is installed.

An object that cannot be pickled is an error on every rank, told before anything is waited for.
Reading a pickle can run code: with FARANDOLE_ALLOW_PICKLE=0 only plain values travel, as text.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from farandole import _arrays, _context, _core, _plain, _work
from farandole._work import Call, Handle, Parameters
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
        ``obj`` itself on the root, a copy of it elsewhere. Where Ctrl-C interrupts the call, the
        other ranks may wait for ``synchronize(interrupted())``.
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
        return _work.run_by_handle(broadcast.of_size(name))
    except HorovodInternalError as refused:
        raise refused from broadcast.error


class _Broadcast:
    """This rank's part: a broadcast of the size, whose end starts that of the pickle."""

    def __init__(self, make: Callable[[], Any], root: int) -> None:
        self._is_root = _context.current().topology.rank == root
        self._parameters = Parameters(_work.BROADCAST, root=root, function="broadcast_object")
        self._obj: Any = None
        self._content = _no_bytes()
        self._handle: Handle | None = None
        self.error: Exception | None = None
        if self._is_root:
            self._obj, self._content, self.error = _made(make)
        self._count = np.array([self._content.size])

    def of_size(self, name: str | None) -> Call:
        """The first; with an error of ``make`` it is refused on every rank instead."""
        return self._call(name, self._count, lambda: self._finish(name))

    def _finish(self, name: str | None) -> Any:
        """The object; may be called again when it was interrupted."""
        if self._handle is None:
            self._handle = _work.start(self._of_content(name))
        return self._handle.wait()

    def _of_content(self, name: str | None) -> Call:
        """The pickle; without memory for it it is refused on every rank."""
        if not self._is_root:
            try:
                self._content = np.empty(self._count[0], np.uint8)
            except MemoryError as error:
                self.error = error
        return self._call(name, self._content, self._result)

    def _result(self) -> Any:
        return self._obj if self._is_root else _loads(self._content)

    def _call(self, name: str | None, array: Any, finish: Callable[[], Any]) -> Call:
        description = (None, _work.DTYPES[array.dtype.name], array.shape)
        addresses = (array.ctypes.data if array.size else None,)
        return Call(
            self._parameters, name, (description,), addresses, addresses, array, finish,
            _text(self.error),
        )  # fmt: skip


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
    call = Call(
        Parameters(_work.ALLGATHER, function="allgather_object"), name,
        ((None, _work.DTYPES["uint8"], content.shape),), (_arrays.bytes_of(content),), None,
        content, _load_all, _text(error),
    )  # fmt: skip
    try:
        return _work.run(call)
    except HorovodInternalError as refused:
        raise refused from error


def _load_all(gathered: _core.Result) -> list[Any]:
    joined = memoryview(gathered)
    ends = np.cumsum(gathered.rows).tolist()
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


def _loads(content: _Bytes | memoryview) -> Any:
    """The inverse on every rank: the setting is the same on all of them."""
    return (pickle.loads if _pickles_are_allowed() else _plain.loads)(content.tobytes())


def _pickles_are_allowed() -> bool:
    return _context.current().context.setting("FARANDOLE_ALLOW_PICKLE") == "1"


def _text(error: Exception | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {error}"


def _no_bytes() -> _Bytes:
    return np.empty(0, np.uint8)
