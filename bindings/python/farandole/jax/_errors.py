"""Errors of collectives in programs as exceptions of Farandole."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from farandole import basics, exceptions

#: By XLA's name of the status: see bindings/xla/call_frame.cc.
_CLASSES = {
    "FAILED_PRECONDITION": exceptions.MismatchError, "DEADLINE_EXCEEDED": exceptions.OperationTimeoutError,
    "UNAVAILABLE": exceptions.PeerLostError, "ABORTED": exceptions.AbortedError, "INVALID_ARGUMENT": ValueError,
}  # fmt: skip
#: Which do not end the job by themselves: that it has ended since is no reason.
_OF_ONE_CALL = ("FAILED_PRECONDITION", "INVALID_ARGUMENT")
_OURS = re.compile(r"([A-Z_]+): .*?farandole: (.*)", re.DOTALL)


@contextlib.contextmanager
def errors() -> Iterator[None]:
    """Raises what a collective failed with inside a program as the exception that it raises outside of jit.

    JAX itself raises a ``ValueError`` or a ``jax.errors.JaxRuntimeError`` with "farandole: " in the text, at the call
    or, as programs run while Python goes on, where a result is used: use it within this ``with`` block. As a decorator
    it does the same for a function.

    Raises:
        HorovodInternalError: A collective failed; its subclass and attributes say how.
        ValueError: The call of a collective is wrong by itself.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        found = None if isinstance(error, exceptions.HorovodInternalError) else _OURS.search(str(error))
        if found is None:
            raise
        context = basics.find()
        if context is not None:
            try:
                context.core.raise_if_ended()  # which knows more than the text
            except exceptions.HorovodInternalError as ended:
                if found[1] not in _OF_ONE_CALL or str(ended) in found[2]:
                    raise ended from error
        raise _CLASSES.get(found[1], exceptions.HorovodInternalError)(found[2]) from error
