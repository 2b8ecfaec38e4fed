"""Pickles for other ranks, in which classes and functions arrive as the receiver's own where it has them.

They travel by reference, also those of the script, ``__main__``, which as a rule is the same on all ranks: so
``isinstance``, ``==``, ``except`` and keys of dictionaries work on both sides. Where the receiver's script lacks one
(each rank may run another), and for what has no name that can be looked up (lambdas, local classes), the definition
travels, as cloudpickle has it.
"""

from __future__ import annotations

import functools
import io
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any, Final

import cloudpickle

_LENGTH_BYTES: Final = 8


def dump(obj: Any, written: io.BytesIO) -> None:
    """Writes the pickle, the definitions of what it takes from the script, and the length of these."""
    pickler = _ByReference(written)
    pickler.dump(obj)
    definitions = _definitions_of(pickler.of_script) if pickler.of_script else b""
    written.write(definitions)
    written.write(len(definitions).to_bytes(_LENGTH_BYTES, "little"))


def load(content: memoryview) -> Any:
    """The object that :func:`dump` wrote on some rank.

    Raises:
        pickle.UnpicklingError: A class or function of the sender's script neither is in this one nor could travel.
        Exception: What unpickling raises.
    """
    length = int.from_bytes(content[-_LENGTH_BYTES:], "little")
    if length == 0:
        return pickle.loads(content)
    kinds, by_value, refusal = pickle.loads(content[-_LENGTH_BYTES - length : -_LENGTH_BYTES])
    missing = [name for name, is_class in kinds.items() if _of_script(name, is_class) is None]
    if not missing:
        return pickle.loads(content)
    if by_value is None:
        raise pickle.UnpicklingError(
            f"{missing[0]} of the sender's script is not in this rank's, and its definition cannot travel ({refusal}): "
            "define it on every rank, or in a module"
        )
    unpickler = _WithDefinitions(io.BytesIO(content))
    unpickler.definitions = dict(zip(kinds, pickle.loads(by_value), strict=True))
    return unpickler.load()


def _definitions_of(of_script: dict[str, Any]) -> bytes:
    """By name, whether it is a class; a pickle of all of them by value, or None and why there is none."""
    kinds = {name: isinstance(item, type) for name, item in of_script.items()}
    written = io.BytesIO()
    try:
        _ByValue(written).dump(list(of_script.values()))
    except Exception as error:  # a method may refer to anything
        return pickle.dumps((kinds, None, f"{type(error).__name__}: {error}"))
    return pickle.dumps((kinds, written.getvalue(), None))


def _of_script(name: str, is_class: bool) -> Any:
    """A class or function that this process's script defines under a qualified name; None: it does not."""
    found: Any = sys.modules.get("__main__")
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) == is_class and callable(found) else None


def _name_in_script(obj: Any) -> str | None:
    """The name under which a class or function is found in the script; None: it is not, or is none."""
    if not isinstance(obj, (type, types.FunctionType)) or obj.__module__ != "__main__":
        return None
    return obj.__qualname__ if _of_script(obj.__qualname__, isinstance(obj, type)) is obj else None


class _ByReference(cloudpickle.CloudPickler):  # type: ignore[misc]
    """Notes in ``of_script``, by name, which classes and functions of the script it has met."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.of_script: dict[str, Any] = {}

    def reducer_override(self, obj: Any) -> Any:
        name = _name_in_script(obj)
        if name is None:
            return super().reducer_override(obj)
        self.of_script[name] = obj
        return NotImplemented  # by reference, as pickle does


class _ByValue(cloudpickle.CloudPickler):  # type: ignore[misc]
    """Classes and functions of the script as cloudpickle makes them anew, unless the receiver has them."""

    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        name = _name_in_script(obj)
        if name is None:
            return reduced
        make, arguments, state, items, pairs, set_state = reduced
        make = functools.partial(_found_or_made, name, isinstance(obj, type), make)
        return make, arguments, state, items, pairs, functools.partial(_set_if_made, set_state)


def _found_or_made(name: str, is_class: bool, make: Callable[..., Any], *arguments: Any) -> Any:
    found = _of_script(name, is_class)
    return make(*arguments) if found is None else found


def _set_if_made(set_state: Callable[..., None], obj: Any, state: Any) -> None:
    if _name_in_script(obj) is None:
        set_state(obj, state)


class _WithDefinitions(pickle.Unpickler):
    definitions: dict[str, Any]

    def find_class(self, module: str, name: str) -> Any:
        if module == "__main__" and name in self.definitions:
            return self.definitions[name]
        return super().find_class(module, name)
