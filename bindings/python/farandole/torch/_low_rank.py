"""Gradients that travel as two thin matrices: PowerSGD with error feedback and warm start.

Of a gradient M [rows, columns], with what earlier rounds left out added to it, each rank sends P = M Q, where Q
[columns, rank] is that of the round before; the averages of P, made orthonormal, are the same on all ranks. Then
Q = M^T P is averaged, of all gradients in one operation, and the result is P Q^T. What it lacks of M is kept.

Source: Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", NeurIPS 2019, arXiv:1905.13727.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch

from farandole import _core, ops
from farandole.basics import Context
from farandole.torch import _library
from farandole.torch._parameters import Settings


def suits(parameter: torch.Tensor, rank: int) -> bool:
    """Whether two matrices of that rank have at most half of the parameter's elements."""
    if parameter.dim() < 2 or parameter.numel() == 0:
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

    def unpack(self, wire: torch.Tensor) -> torch.Tensor:
        """Takes the averaged P; zeros, in whose place :class:`LowRankExchange` puts the result."""
        self._p = torch.linalg.qr(wire)[0]
        return torch.zeros(self._shape, dtype=self._dtype, device=self._device)

    def second(self) -> torch.Tensor:
        """Q of this rank; zeros where it had no gradient."""
        if self._matrix is None:
            return torch.zeros_like(self._q)
        with torch.autocast(self._device.type, enabled=False):
            return self._matrix.T @ self._p

    def finish(self, q: torch.Tensor) -> torch.Tensor:
        """The result, of the averaged Q; one that is not finite leaves nothing behind.

        A column of zeros would stay so as long as the gradient's first rows are zero: it begins anew.
        """
        with torch.autocast(self._device.type, enabled=False):
            result = (self._p @ q.T).to(self._dtype)
        if not torch.isfinite(q).all():
            self._q, self._left = self._first_q, None
        else:
            self._q = torch.where(q.any(dim=0), q, self._first_q)
            if self._matrix is not None:
                self._left = self._matrix - result
        self._matrix = None
        return result.reshape(self._shape)


class LowRankExchange:
    """The second half of one round.

    Args:
        rank: The context.
        prefix: Of the names; distinct per exchange.
        gradients: Of a round that was received.
        settings: Of the rounds.
    """

    def __init__(self, rank: Context, prefix: str, gradients: _core.Gradients, settings: Settings) -> None:
        self._core = rank.core
        self._name = prefix + "low rank"
        self._how = settings.plain(ops.ALLREDUCE, ops.Average)
        slots = [slot for i, slot in enumerate(gradients) if not gradients.skipped(i)]
        self._slots = [slot for slot in slots if isinstance(slot.codec, LowRank)]

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
