"""One parameter's part in the gradient rounds: its order of elements on the wire and its buffers.

The wire carries a gradient in its parameter's own memory order where that order is one of two, rows
first or channels last, so that a dense gradient travels without a copy. Ranks that disagree are
told apart by the shape they announce; where both orders announce the same shape, rows first is
used and channels-last gradients are copied.
"""

from __future__ import annotations

import weakref
from enum import IntEnum

import torch

from farandole.torch import _tensors

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class Vote(IntEnum):
    """How a rank takes part with one gradient; the numbers are the C ABI's."""

    PRESENT = 0
    ABSENT = 1
    CLEAN = 2


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


class Slot:
    """A parameter and the state of its gradient in the open round.

    Attributes:
        name: The parameter's name.
        parameter: The parameter.
        fired: How often it fired in this round.
        learned: The most often it fired in one round; 0: never yet.
        reduced: The gradient tensor that was last reduced and has not fired since, weakly.
    """

    __slots__ = (
        "name", "parameter", "fired", "learned", "reduced",
        "_dtype", "_format", "_target", "_wire", "_landing",
    )  # fmt: skip

    def __init__(self, name: str, parameter: torch.Tensor) -> None:
        self.name = name
        self.parameter = parameter
        self.fired = 0
        self.learned = 0
        self.reduced: weakref.ref[torch.Tensor] | None = None
        self._target: torch.Tensor | None = None
        self._wire: torch.Tensor | None = None
        self._landing: torch.Tensor | None = None

    def describe(self) -> tuple[str, int, tuple[int, ...]]:
        """Name, dtype and shape on the wire, which the next gradients will have."""
        self._format, shape = wire_order(self.parameter)
        self._dtype = self.parameter.dtype
        self._landing = None
        return (self.name, _tensors.dtype_number(self.parameter), shape)

    def is_described(self) -> bool:
        """Whether the parameter still has the dtype and the order that describe() told."""
        return self.parameter.dtype == self._dtype and wire_order(self.parameter)[0] == self._format

    def vote(self) -> Vote:
        """How this rank takes part as things stand."""
        grad = self.parameter.grad
        if grad is None:
            return Vote.ABSENT
        is_clean = not self.fired and self.reduced is not None and self.reduced() is grad
        return Vote.CLEAN if is_clean else Vote.PRESENT

    def lend(self) -> tuple[int | None, int | None]:
        """Addresses to read the contribution from and to write the result to.

        The memory stays alive until take_back().

        Raises:
            TypeError: The gradient is sparse.
        """
        grad = self._target = self.parameter.grad
        if grad is None:
            if self._landing is None:
                self._landing = torch.empty_like(
                    self.parameter, device="cpu", memory_format=self._format, requires_grad=False
                )
            self._wire = self._landing
            return None, _tensors.address(self._wire)
        if grad.layout is not torch.strided:
            raise TypeError(f'the gradient of "{self.name}" is {grad.layout}, not dense')
        wire = grad.detach().to(device="cpu", dtype=self._dtype)
        self._wire = wire.contiguous(memory_format=self._format)
        return _tensors.address(self._wire), _tensors.address(self._wire)

    def take_back(self, is_written: bool) -> None:
        """Ends the loan; with ``is_written`` the parameter receives the result."""
        target, wire = self._target, self._wire
        self._target = self._wire = None
        if is_written and wire is not None:
            if target is not None:
                _tensors.copy_into(target, wire)
            elif self.parameter.grad is None:
                self.parameter.grad = wire.to(self.parameter.device)
                self._landing = None
        grad = self.parameter.grad
        self.reduced = None if grad is None else weakref.ref(grad)

    def drop(self) -> None:
        """Ends the loan of a round that failed: what the memory holds counts as not reduced."""
        self._target = self._wire = self.reduced = None
