"""Plain values as text that runs nothing when it is read: JSON, with the types that JSON lacks."""

from __future__ import annotations

import base64
import json
from typing import Any, Final

_SCALARS: Final = (type(None), bool, int, float, str)


def dumps(value: Any) -> bytes:
    """None, bool, int, float, str, bytes, and lists, tuples and dictionaries of these.

    Raises:
        TypeError: Something else is in it.
    """
    return json.dumps(_tagged(value)).encode()


def loads(text: bytes) -> Any:
    """What was given to :func:`dumps`, with the same types and bits."""
    return _untagged(json.loads(text))


def _tagged(value: Any) -> Any:
    """Scalars as they are; everything else as a list whose first item tells what it is."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is bytes:
        return ["bytes", base64.b64encode(value).decode()]
    if kind in (list, tuple):
        return [kind.__name__, *map(_tagged, value)]
    if kind is dict:
        return ["dict", *([_tagged(k), _tagged(v)] for k, v in value.items())]
    raise TypeError(
        f"an object of type {kind.__qualname__} can travel as a pickle only, which "
        "FARANDOLE_ALLOW_PICKLE=0 refuses"
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
