"""Names of collectives in traced code: equal on all ranks.

A call without a name is called after where it stands in the user's code, with a number if it is traced there again, as
in a Python loop. What has the same name in one program nevertheless, as where remat computes a part twice or an inner
function is called twice, gets another number when the program is lowered: see _chain.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from farandole.jax._internals import current_trace

#: Packages whose code users do not write: not where a call stands.
_PACKAGES = ("jax", "jaxlib", "optax", "flax", "farandole")


def is_tracing() -> bool:
    """Whether what JAX computes here may become a part of a program."""
    return bool(current_trace(convention="jax") != _untraced)


_untraced = current_trace(convention="jax")


class _Traces(threading.local):
    """How often calls were named in what this thread traces: by the trace, the last ones first."""

    counts: tuple[tuple[Any, dict[str, int]], ...] = ()

    def number(self, name: str) -> int:
        """From 0, in the current trace."""
        trace = current_trace(convention="jax")  # which only old versions need
        found = next((counts for known, counts in self.counts if known == trace), None)
        if found is None:
            found = {}
            self.counts = ((trace, found), *self.counts[:15])
        found[name] = found.get(name, -1) + 1
        return found[name]


_traces = _Traces()


def of_call_site(function: str) -> str:
    """Such as ``allreduce at train.py:42 in step``, of the first caller outside of the packages above."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _PACKAGES:
        frame = frame.f_back
    code = frame.f_code
    name = f"{function} at {os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"
    number = _traces.number(name)
    return f"{name}, no. {number + 1}" if number else name
