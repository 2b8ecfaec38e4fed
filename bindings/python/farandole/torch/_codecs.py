"""How one parameter's gradients become elements on the wire and come back.

*Direct*: as they are, in their own dtype and in the parameter's memory order where that order is one
of two, rows first or channels last, so that a dense gradient travels without a copy. Ranks that
disagree are told apart by the shape they announce; where both orders announce the same shape, rows
first is used and channels-last gradients are copied.

*Compressed*: as a user's ``compress`` makes them; what it makes of zeros tells every rank what will
travel.

Both put the elements on one device, whatever the parameter's.
"""

from __future__ import annotations

from typing import Any

import torch

from farandole.torch import _library

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def wire_order(tensor: torch.Tensor) -> tuple[torch.memory_format, tuple[int, ...]]:
    """The memory format in which a parameter's gradients travel, and the shape to announce."""
    shape = tuple(tensor.shape)
    channels_last = _CHANNELS_LAST.get(tensor.dim())
    if channels_last is None or tensor.is_contiguous():
        return torch.contiguous_format, shape
    moved = (shape[0], *shape[2:], shape[1])
    if moved == shape or not tensor.is_contiguous(memory_format=channels_last):
        return torch.contiguous_format, shape
    return channels_last, moved


def gradient_dtype(parameter: torch.Tensor, last: torch.dtype | None) -> torch.dtype:
    """The dtype of the parameter's gradient, or of the next one where it has none.

    Args:
        parameter: torch >= 2.10 lets its ``grad_dtype`` differ from its dtype; None there stands for
            any dtype.
        last: That of the gradient seen last, which the next one is expected to have where it may
            have any; None: there was none.
    """
    if parameter.grad is not None:
        return parameter.grad.dtype
    return getattr(parameter, "grad_dtype", parameter.dtype) or last or parameter.dtype


class _Likeness:
    """What a parameter looked like when its gradients were described."""

    __slots__ = ("_parameter", "_kind", "dtype", "shape")

    def __init__(self, parameter: torch.Tensor, dtype: torch.dtype) -> None:
        self._parameter = parameter
        self._kind = self._look()
        self.dtype = dtype  # of the gradients
        self.shape = parameter.shape

    def is_valid(self) -> bool:
        """Whether the parameter still has the dtype, device, shape and strides it had."""
        return self._look() == self._kind

    def _look(self) -> tuple[torch.dtype, torch.device, torch.Size, tuple[int, ...]]:
        parameter = self._parameter
        return parameter.dtype, parameter.device, parameter.shape, parameter.stride()


class Direct(_Likeness):
    """Gradients travel in their own dtype and their parameter's memory order, on ``device``."""

    __slots__ = ("_device", "_format", "_shape")

    def __init__(
        self, parameter: torch.Tensor, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(parameter, dtype)
        self._device = device
        self._format, self._shape = wire_order(parameter)

    def describe(self) -> tuple[int, tuple[int, ...]]:
        """Dtype's number and shape on the wire."""
        return _library.number_of(self.dtype), self._shape

    def pack(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient, of ``dtype`` and ``shape``, in wire form: itself if it is like that already."""
        if grad.device == self._device and grad.is_contiguous(memory_format=self._format):
            return grad
        return grad.detach().to(self._device).contiguous(memory_format=self._format)

    def landing(self) -> torch.Tensor:
        """Memory for the result where this rank has no gradient; not initialised."""
        return torch.empty(
            self.shape, dtype=self.dtype, device=self._device, memory_format=self._format
        )

    def unpack(self, wire: torch.Tensor) -> torch.Tensor:
        """The gradient that came."""
        return wire


class Compressed(_Likeness):
    """Gradients travel as a user's class compresses them."""

    __slots__ = ("_name", "_compression", "_device", "_like", "_context")

    def __init__(
        self,
        name: str,
        parameter: torch.Tensor,
        dtype: torch.dtype,
        compression: Any,
        device: torch.device,
    ) -> None:
        super().__init__(parameter, dtype)
        self._name = name
        self._compression = compression
        self._device = device
        zeros = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        wire, self._context = compression.compress(zeros)
        self._like = _library.canonical(wire).to(device)

    def describe(self) -> tuple[int, tuple[int, ...]]:
        """Dtype's number and shape of what ``compress`` makes."""
        return _library.number_of(self._like.dtype), tuple(self._like.shape)

    def pack(self, grad: torch.Tensor) -> torch.Tensor:
        """The compressed gradient.

        Raises:
            ValueError: It differs in shape or dtype from what ``compress`` made of zeros.
        """
        compressed, self._context = self._compression.compress(grad.detach())
        wire = _library.canonical(compressed).to(self._device)
        if wire.shape != self._like.shape or wire.dtype != self._like.dtype:
            raise ValueError(
                f'compress() made {wire.dtype} {list(wire.shape)} of the gradient of "{self._name}"'
                f"; expected {self._like.dtype} {list(self._like.shape)}, as it made of zeros"
            )
        # What was compressed must survive: it may be the gradient itself.
        return wire.clone() if _library.shares_memory(grad, wire) else wire

    def landing(self) -> torch.Tensor:
        """Memory for the result where this rank has no gradient; not initialised."""
        return torch.empty_like(self._like)

    def unpack(self, wire: torch.Tensor) -> torch.Tensor:
        """The decompressed result."""
        result: torch.Tensor = self._compression.decompress(wire, self._context)
        if result.shape != self.shape:
            raise ValueError(
                f'decompress() made {list(result.shape)} for "{self._name}"; '
                f"expected {list(self.shape)}"
            )
        return result


Codec = Direct | Compressed
