"""Gradients that travel as two thin matrices: PowerSGD with error feedback and warm start.

Of a gradient M [rows, columns], with what earlier rounds left out added to it, each rank sends P = M Q, where Q
[columns, rank] is that of the round before; the averages of P, made orthonormal, are the same on all ranks. Then
Q = M^T P is averaged, of all gradients in one operation, and the result is P Q^T. What it lacks of M is kept.

Source: Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", NeurIPS 2019, arXiv:1905.13727.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from farandole import _core, ops
from farandole.basics import Context
from farandole.torch import _library
from farandole.torch.compression import PowerSGD
from farandole.torch.optimizer import _codecs
from farandole.torch.optimizer._parameters import Settings


def suits(parameter: torch.Tensor, rank: int) -> bool:
    """Whether two matrices of that rank have at most half of the parameter's elements."""
    if parameter.dim() < 2 or parameter.numel() == 0 or parameter.is_complex():
        return False
    rows = parameter.shape[0]
    columns = parameter.numel() // rows
    return 2 * rank * (rows + columns) <= rows * columns


class LowRank:
    """Gradients of one parameter; a codec as ``_codecs.Compressed`` is, but what travels first is half of it.

    All of it is float32, whatever autocast and torch's default dtype say.

    Args:
        slot: The parameter, and the gradients' dtype.
        rank: Columns of both matrices.
        name: The same on all ranks: from it comes the first Q.
        device: Where gradients travel.
    """

    __slots__ = ("_shape", "_dtype", "_device", "_first_q", "_q", "_left", "_matrix", "_p")

    def __init__(self, slot: _core.GradientSlot, rank: int, name: str, device: torch.device) -> None:
        self._shape = slot.parameter.shape
        self._dtype = slot.dtype
        self._device = device
        generator = torch.Generator("cpu").manual_seed(zlib.crc32(name.encode()))
        columns = self._shape.numel() // self._shape[0]
        first = torch.randn(columns, rank, generator=generator, dtype=torch.float32, device="cpu")
        self._first_q = self._q = first.to(device)
        self._left: torch.Tensor | None = None  # what earlier rounds left out
        self._matrix: torch.Tensor | None = None  # what this rank contributes to the round
        self._p: torch.Tensor

    def fits(self, slot: _core.GradientSlot, device: torch.device) -> bool:
        """Whether it is still the codec of the slot, whose parameter may have changed."""
        return (self._shape, self._dtype, self._device) == (slot.parameter.shape, slot.dtype, device)

    def begin(self) -> None:
        """A round begins: what an earlier one sent, which failed, is no part of it."""
        self._matrix = None

    def describe(self) -> _core.GradientDescription:
        """Dtype and shape of P."""
        rank = self._first_q.shape[1]
        return _core.GradientDescription(_library.number_of(torch.float32), [self._shape[0], rank])

    def pack(self, grad: torch.Tensor) -> torch.Tensor:
        """P of this rank."""
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            matrix = grad.detach().to(self._device, torch.float32).reshape(self._shape[0], -1)
            self._matrix = matrix.clone() if self._left is None else matrix + self._left
            return self._matrix @ self._q

    def pack_absent(self) -> torch.Tensor:
        """P where this rank has no gradient: of zeros, and of what earlier rounds left out."""
        zero = torch.zeros((), dtype=torch.float32, device=self._device)
        if self._left is not None:
            return self.pack(zero.expand(self._shape))
        columns, rank = self._q.shape
        self._matrix = zero.expand(self._shape[0], columns)  # without memory: a parameter may be frozen for good
        return zero.repeat(self._shape[0], rank)

    def unpack(self, wire: torch.Tensor) -> torch.Tensor:
        """Takes the averaged P; zeros, in whose place :class:`LowRankExchange` puts the result."""
        self._p = torch.linalg.qr(wire)[0]
        return torch.zeros(self._shape, dtype=self._dtype, device=self._device)

    def second(self) -> torch.Tensor:
        """Q of this rank; zeros where it sent nothing, as of a sparse gradient."""
        if self._matrix is None:
            return torch.zeros_like(self._q)
        with torch.autocast(self._device.type, enabled=False):
            return self._matrix.T @ self._p

    def finish(self, q: torch.Tensor) -> torch.Tensor:
        """The result, of the averaged Q; one that is not finite leaves nothing behind.

        A column of zeros would stay so as long as the gradient's first rows are zero: it begins anew. The host does
        not wait for the device to tell.
        """
        with torch.autocast(self._device.type, enabled=False):
            result = (self._p @ q.T).to(self._dtype)
        is_finite = torch.isfinite(q).all()
        self._q = torch.where(is_finite & q.any(dim=0), q, self._first_q)
        if self._matrix is not None:
            self._left = self._matrix - result
        if self._left is not None:
            self._left.masked_fill_(~is_finite, 0)
        self._matrix = None
        return result.reshape(self._shape)


def codec_for(
    slot: _core.GradientSlot, compression: Any, name: str, device: torch.device
) -> LowRank | _codecs.Compressed | None:
    """How the slot's gradients travel; None: as they are.

    Args:
        slot: As it looks now. If its codec still fits, it is kept, with what it has learned.
        compression: Of the optimizer.
        name: The same on all ranks.
        device: Where gradients travel.
    """
    if not isinstance(compression, PowerSGD):
        return None if compression is None else _codecs.Compressed(slot, compression, device)
    if not suits(slot.parameter, compression.rank):
        return None
    known = slot.codec
    return known if known is not None and known.fits(slot, device) else LowRank(slot, compression.rank, name, device)


def low_rank_of(gradients: Iterable[_core.GradientSlot]) -> dict[int, _core.GradientSlot]:
    """The slots with such a codec, by number."""
    return {i: slot for i, slot in enumerate(gradients) if isinstance(slot.codec, LowRank)}


class LowRankExchange:
    """The second half of one round.

    Args:
        rank: The context.
        prefix: Of the names; distinct per exchange.
        slots: Those with such a codec whose gradients the round has.
        settings: Of the rounds.
    """

    def __init__(self, rank: Context, prefix: str, slots: Sequence[_core.GradientSlot], settings: Settings) -> None:
        self._core = rank.core
        self._name = prefix + "low rank"
        self._how = settings.plain(ops.ALLREDUCE, ops.Average)
        self._slots = slots

    def stages(self) -> Iterator[None]:
        """Yields when all Q have been started."""
        if not self._slots:
            return
        parts = [slot.codec.second() for slot in self._slots]
        handle = self._core.submit(self._how, parts, self._name, ops.GROUP | ops.IN_PLACE)
        yield
        handle.wait()
        for slot, part in zip(self._slots, parts, strict=True):
            result = slot.codec.finish(part).to(slot.parameter.device)
            if slot.parameter.grad is None:
                slot.parameter.grad = result
            else:
                _library.copy_into(slot.parameter.grad, result)
            slot.note_reduced()
