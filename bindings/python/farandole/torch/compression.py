"""Sending floating-point tensors as 16-bit numbers, or as a class of the user's own makes them.

With the classes of :class:`Compression` the cast is part of the reduction itself: contributions are
rounded once, the sum is taken in float, and the result is rounded once. Tensors of other dtypes
travel as they are. Any other class with ``compress`` and ``decompress`` is called around it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Final

import torch


class Compressor:
    """How tensors travel. ``compress`` and ``decompress`` do the same cast by hand.

    Attributes:
        wire: farandole_wire of the C ABI.
        dtype: The dtype on the wire; None: the tensor's own.
    """

    wire: ClassVar[int] = 0
    dtype: ClassVar[torch.dtype | None] = None

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor as it travels, and what ``decompress`` needs."""
        if cls.dtype is None or not tensor.dtype.is_floating_point:
            return tensor, None
        return tensor.to(cls.dtype), tensor.dtype

    @classmethod
    def decompress(cls, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The tensor in the dtype it had before ``compress``."""
        return tensor if ctx is None else tensor.to(ctx)


class NoneCompressor(Compressor):
    """Tensors travel as they are."""


class FP16Compressor(Compressor):
    """float32 and float64 travel as float16: 10 bits of fraction; beyond +-65504 infinite."""

    wire = 1
    dtype = torch.float16


class BF16Compressor(Compressor):
    """float32 and float64 travel as bfloat16: 7 bits of fraction, the range of float32."""

    wire = 2
    dtype = torch.bfloat16


class Int8Compressor(Compressor):
    """Between hosts, float32 travels as int8 with a scale for each 256 elements: 0.254 of the bytes.

    The rank that rounds keeps the rounding error and adds it the next time (error feedback), as long as the name,
    shape and options of the tensor stay the same; a call without a name has no error feedback. Nothing is rounded
    within a host, for other dtypes and operations, and on GPUs. ``compress`` returns its input: the reduction itself
    rounds.
    """

    wire = 3


class Compression:
    """The choices for ``compression=``."""

    none: Final = NoneCompressor
    fp16: Final = FP16Compressor
    bf16: Final = BF16Compressor
    int8: Final = Int8Compressor


@dataclasses.dataclass(frozen=True)
class PowerSGD:
    """Sends a gradient as two thin matrices: ``compression=PowerSGD(rank=4)`` of a DistributedOptimizer.

    A gradient [rows, ...], seen as a matrix [rows, columns], takes ``rank * (rows + columns)`` float32 on the wire
    instead of ``rows * columns``. If that is more than half, and for a vector, the gradient travels as it is. Each
    rank keeps what the approximation leaves out and adds it to its next gradient (error feedback). Needs op=Average.
    Each rank multiplies the matrices itself: on different processors the last bits of the results may differ.

    Attributes:
        rank: The rank of the approximation; 1 or more, usually 1 to 8. A higher rank is more exact and costs more.
    """

    rank: int = 4

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"PowerSGD: rank must be an integer from 1 on, not {self.rank!r}")


def native_wire(compression: Any) -> int | None:
    """farandole_wire of the C ABI when the reduction itself does the cast; None: call the class.

    Raises:
        ValueError: It is no compression.
    """
    if isinstance(compression, PowerSGD):
        raise ValueError("PowerSGD compresses gradients of a DistributedOptimizer with op=Average, and nothing else")
    for method in ("compress", "decompress"):
        if not callable(getattr(compression, method, None)):
            raise ValueError(
                f"compression must have compress(tensor) and decompress(tensor, context), as "
                f"Compression.fp16 has them; {compression!r} has no {method}"
            )
    kind = compression if isinstance(compression, type) else type(compression)
    if not issubclass(kind, Compressor):
        return None
    is_native = all(
        getattr(getattr(kind, name), "__func__", None) is vars(Compressor)[name].__func__
        for name in ("compress", "decompress")
    )
    return kind.wire if is_native else None
