"""Where a GPU's tensors are, and which of its streams the calling thread uses now.

The faces know how their framework says it; everything else asks a :class:`Place`. Host memory has
none: there a place is None.
"""

from __future__ import annotations

import contextlib
from typing import Protocol

Stream = tuple[int, int]  #: CUDA device as this process numbers them, cudaStream_t


class Place(Protocol):
    """A CUDA device as one framework uses it."""

    def stream(self) -> Stream:
        """The calling thread's current stream there."""
        ...

    def using(self, stream: Stream) -> contextlib.AbstractContextManager[object]:
        """Makes ``stream`` the calling thread's current one for the length of a ``with`` block."""
        ...
