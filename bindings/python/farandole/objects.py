"""Python objects between ranks, as pickles.

An object that cannot be pickled is an error on every rank, reported before anything is waited for.
Reading a pickle can run code: with FARANDOLE_ALLOW_PICKLE=0 only plain values travel, as JSON.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from farandole import basics, ops
from farandole.basics import ProcessSet, global_process_set
from farandole.exceptions import HorovodInternalError

if TYPE_CHECKING:  # imported below where it is used: see ops._with_numbers
    import numpy as np

    _Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Sends the object of ``root_rank`` to every rank.

    Args:
        obj: Anything that can be pickled; only the root's matters. Its classes and functions arrive as this rank's own
            where it has them, also those of the script.
        root_rank: Among all ranks, also with a process set; the same on all ranks.
        name: The same on all ranks; None: matched by the order of the unnamed calls.
        process_set: The ranks that take part, of which this one is.
    Returns:
        ``obj`` itself on the root, a copy of it elsewhere.
    Raises:
        HorovodInternalError: On every rank, if the root's object cannot be pickled, or must not
            be: FARANDOLE_ALLOW_PICKLE=0.
        ValueError: There is no such rank.
        KeyboardInterrupt: Ctrl-C. The other ranks may wait until this rank calls
            ``synchronize(interrupted())``.
    """
    return broadcast_made(lambda: obj, root_rank, name, process_set)


def broadcast_made(
    make: Callable[[], Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """As :func:`broadcast_object` of what ``make()`` returns on the root, or raises: on every rank."""
    broadcast = _Broadcast(make, root_rank, name, process_set)
    try:
        return broadcast.run()
    except HorovodInternalError as refused:
        raise refused from broadcast.error


class _Broadcast:
    """This rank's part: a broadcast of the size, whose end starts that of the pickle."""

    def __init__(self, make: Callable[[], Any], root_rank: int, name: str | None, process_set: ProcessSet) -> None:
        self._options = ops.broadcast_options(root_rank, process_set, "broadcast_object")
        self._name = name
        self._is_root = basics.topology().rank == root_rank
        self._obj, self._content, self.error = _made(make if self._is_root else lambda: None)
        self._handle: ops.Handle | None = None

    def run(self) -> Any:
        """The object; with an error of ``make`` it is refused on every rank instead."""
        import numpy as np

        return self._submit(np.array([self._content.size]), self._finish, ops.BLOCKS)

    def _finish(self, count: Any) -> Any:
        """The object; may be called again when it was interrupted."""
        import numpy as np

        if self._handle is None:
            try:
                if not self._is_root:
                    self._content = np.empty(count[0], np.uint8)
            except MemoryError as error:
                self.error = error  # refused on every rank
            self._handle = self._submit(self._content, self._result)
        return self._handle.wait()

    def _result(self, content: _Bytes) -> Any:
        return self._obj if self._is_root else _loads(content)

    def _submit(self, array: Any, finish: Callable[..., Any], flags: int = 0) -> Any:
        return basics.current().core.submit(
            self._options, array, self._name, flags | ops.IN_PLACE, finish,
            failed=_text(self.error),
        )  # fmt: skip


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Gathers the objects of all ranks on every rank.

    Args:
        obj: Anything that can be pickled.
        name, process_set: As for :func:`broadcast_object`.
    Returns:
        A copy of each rank's object, by rank.
    Raises:
        HorovodInternalError: On every rank, if one rank's object cannot be pickled, or must not
            be: FARANDOLE_ALLOW_PICKLE=0; the message names the rank.
        ValueError: The name is in flight already.
    """
    how = ops.gather_options(process_set, "allgather_object")
    _, content, error = _made(lambda: obj)
    submit = basics.current().core.submit
    try:
        gathered: list[Any] = submit(how, content, name, ops.BLOCKS, _load_all, failed=_text(error))
    except HorovodInternalError as refused:
        raise refused from error
    return gathered


def _load_all(joined: _Bytes, sizes: list[int]) -> list[Any]:
    import numpy as np

    return [_loads(content) for content in np.split(joined, np.cumsum(sizes)[:-1])]


def _made(make: Callable[[], Any]) -> tuple[Any, _Bytes, Exception | None]:
    """What ``make`` makes, its pickle, and the error if one of the two failed."""
    import numpy as np

    try:
        obj = make()
        return obj, np.frombuffer(_dumps(obj), np.uint8), None
    except Exception as error:
        return None, np.empty(0, np.uint8), error


def _text(error: Exception | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {error}"


def _dumps(obj: Any) -> memoryview:
    written = io.BytesIO()
    if _pickles_are_allowed():
        from farandole import _pickles  # here: farandolerun starts without cloudpickle

        _pickles.dump(obj, written)
    else:
        written.write(json.dumps(_tagged(obj)).encode())
    return written.getbuffer()


def _loads(content: _Bytes) -> Any:
    """The inverse on every rank: the setting is the same on all of them."""
    if _pickles_are_allowed():
        from farandole import _pickles

        return _pickles.load(content.data)
    return _untagged(json.loads(content.tobytes()))


def _pickles_are_allowed() -> bool:
    return basics.current().core.setting("FARANDOLE_ALLOW_PICKLE") == "1"


def _tagged(value: Any) -> Any:
    """A plain value as JSON has it: scalars as they are, all else a list that begins with its type."""
    kind = type(value)
    if kind in (type(None), bool, int, float, str):
        return value
    if kind is bytes:
        return ["bytes", base64.b64encode(value).decode()]
    if kind in (list, tuple):
        return [kind.__name__, *map(_tagged, value)]
    if kind is dict:
        return ["dict", *([_tagged(k), _tagged(v)] for k, v in value.items())]
    raise TypeError(
        f"an object of type {kind.__qualname__} can travel as a pickle only, which FARANDOLE_ALLOW_PICKLE=0 refuses"
    )


def _untagged(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    kind, *items = value
    if kind == "bytes":
        return base64.b64decode(items[0])
    if kind == "dict":
        return {_untagged(key): _untagged(item) for key, item in items}
    return {"list": list, "tuple": tuple}[kind](map(_untagged, items))
