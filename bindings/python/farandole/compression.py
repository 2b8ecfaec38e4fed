"""The choices for ``compression=`` of the frontends for JAX, Keras and TensorFlow."""

from __future__ import annotations

from typing import Any, Final

__all__ = ["Compression"]


class Compression:
    """As what float32 and float64 travel; tensors of other dtypes travel as they are.

    The cast is part of the reduction: contributions are rounded once, the sum is taken in float and rounded once.
    ``int8``, which JAX has not, rounds float32 between hosts only, with error feedback: see
    ``farandole.torch.Compression``.
    """

    none: Final = 0  # farandole_wire of the C ABI
    fp16: Final = 1
    bf16: Final = 2
    int8: Final = 3


def wire_of(compression: Any, last: int = Compression.int8) -> int:
    """farandole_wire of the C ABI; ValueError if it is none of :class:`Compression` up to ``last``."""
    if isinstance(compression, bool) or compression not in range(last + 1):
        expected = "none, fp16, bf16 or int8" if last == Compression.int8 else "none, fp16 or bf16"
        raise ValueError(f"compression must be Compression.{expected}, not {compression!r}")
    return int(compression)
