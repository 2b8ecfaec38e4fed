"""Loads the extension, apart from another copy of Protocol Buffers that the process may have.

TensorFlow shows the symbols of its own copy, of another version, to every library that is loaded after it. Ours would
mix the two and crash in ``init()``. Loaded before TensorFlow it has bound its own already: Python binds at once.
"""

import ctypes
import os
import sys

#: The type information of google::protobuf::MessageLite, which all versions have.
_SYMBOL = "_ZTIN6google8protobuf11MessageLiteE"


def _has_other_malloc(program: ctypes.CDLL) -> bool:
    """A preloaded one, which the extension would not bind with RTLD_DEEPBIND."""
    addresses = [ctypes.cast(one.malloc, ctypes.c_void_p).value for one in (program, ctypes.CDLL("libc.so.6"))]
    return addresses[0] != addresses[1]


def _load() -> None:
    flags, program = sys.getdlopenflags(), ctypes.CDLL(None)
    if hasattr(program, _SYMBOL):
        if _has_other_malloc(program):
            raise ImportError("with a preloaded malloc import farandole before TensorFlow, with its Protocol Buffers")
        sys.setdlopenflags(flags | os.RTLD_NOW | os.RTLD_DEEPBIND)
    try:
        from farandole import _core as _core
    finally:
        sys.setdlopenflags(flags)


_load()
