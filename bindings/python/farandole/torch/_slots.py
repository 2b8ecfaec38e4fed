"""One parameter's part in the gradient rounds: how it takes part and its buffers."""

from __future__ import annotations

import weakref
from enum import IntEnum
from typing import Any

import torch

from farandole.torch import _library
from farandole.torch._codecs import Codec, Compressed, Direct, gradient_dtype
from farandole.torch._devices import Stream


class Vote(IntEnum):
    """How a rank takes part with one gradient; the numbers are the C ABI's."""

    PRESENT = 0
    ABSENT = 1
    CLEAN = 2


class Slot:
    """A parameter and the state of its gradient in the open round.

    Attributes:
        name: The parameter's name.
        parameter: The parameter.
        fired: How often it fired in the pass that sends.
        learned: The most often it fired in one such pass; 0: never yet.
        reduced: The gradient tensor that was last reduced and has not fired since, weakly.
        was_sparse: Some rank had a sparse gradient once; the same on all ranks.
        sparse: This rank's sparse gradient in the round; None: it has none or a dense one.
        is_present: This rank contributes a gradient, of whatever layout, to the round.
        stream: In which its gradient was accumulated last; None: host memory.
    """

    __slots__ = (
        "name", "parameter", "fired", "learned", "was_sparse", "sparse",
        "is_present", "stream", "_compression", "_densifies", "_codec", "_dtype",
        "_target", "_wire", "reduced", "_version",
    )  # fmt: skip

    def __init__(
        self, name: str, parameter: torch.Tensor, compression: Any, densifies: bool
    ) -> None:
        self.name = name
        self.parameter = parameter
        self.fired = 0
        self.learned = 0
        self.was_sparse = False
        self.sparse: torch.Tensor | None = None
        self.is_present = False
        self.stream: Stream | None = None
        self._compression = compression
        self._densifies = densifies
        self._codec: Codec | None = None
        self._dtype: torch.dtype | None = None  # of the gradient that was seen last
        self._target: torch.Tensor | None = None
        self._wire: torch.Tensor | None = None
        self.reduced: weakref.ref[torch.Tensor] | None = None
        self._version: int | None = None

    def describe(self, device: torch.device) -> tuple[str, int, tuple[int, ...]]:
        """Name, dtype and shape on the wire, which the next gradients will have on ``device``."""
        dtype = self._dtype = gradient_dtype(self.parameter, self._dtype)
        if self._compression is None:
            self._codec = Direct(self.parameter, dtype, device)
        else:
            self._codec = Compressed(self.name, self.parameter, dtype, self._compression, device)
        return (self.name, *self._codec.describe())

    def is_described(self) -> bool:
        """Whether describe() would tell the same again."""
        return (
            self._codec is not None
            and self._codec.is_valid()
            and self._codec.dtype == gradient_dtype(self.parameter, self._dtype)
        )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the gradients as described."""
        assert self._codec is not None
        return self._codec.dtype

    def vote(self) -> Vote:
        """How this rank takes part as things stand, with whatever gradient it has."""
        grad = self.parameter.grad
        if grad is None:
            return Vote.ABSENT
        is_clean = not self.fired and self.holds_reduced() and self._version == _version_of(grad)
        return Vote.CLEAN if is_clean else Vote.PRESENT

    def lend(self) -> tuple[Vote, int | None, int | None]:
        """The vote on the dense gradient, and the addresses to read it from and to write to.

        The memory stays alive until take_back(). A sparse gradient that is not to be densified is
        absent here and kept in ``sparse``.

        Raises:
            ValueError: As :meth:`check`.
        """
        assert self._codec is not None
        self._target = self.parameter.grad
        self.check()
        vote, self.sparse = self.vote(), None
        self.is_present = vote == Vote.PRESENT
        grad = self._target
        if grad is not None and grad.layout is not torch.strided:
            self.sparse = grad
            if self._densifies:
                grad = grad.to_dense()
            else:
                vote, grad = Vote.ABSENT, None
        self.forget_reduced()
        if grad is None:
            self._wire = self._codec.landing()  # for this round only: it is as large as the weights
            return vote, None, _library.address(self._wire)
        self._wire = self._codec.pack(grad)
        address = _library.address(self._wire)
        return vote, address, address

    @property
    def was_replaced(self) -> bool:
        """Whether ``.grad`` is another tensor than the one that was lent."""
        return self.parameter.grad is not self._target

    def check(self) -> None:
        """That what was lent, or is about to be, is what was described.

        Raises:
            ValueError: Parameter or gradient has another shape, the gradient another dtype, or it
                was replaced; the message names it.
        """
        assert self._codec is not None
        grad, shape = self.parameter.grad, self._codec.shape
        if self.parameter.shape != shape:
            raise ValueError(
                f'parameter "{self.name}" was changed within a round, from {list(shape)} to '
                f"{list(self.parameter.shape)}: call optimizer.synchronize() before"
            )
        if grad is None:
            return
        if grad.shape != shape:
            raise ValueError(
                f'the gradient of "{self.name}" has shape {list(grad.shape)}, the parameter '
                f"{list(shape)}: set .grad to None, or give it the parameter's shape too"
            )
        if grad is not self._target:
            raise ValueError(
                f'the gradient of "{self.name}" was replaced while it was in flight: call '
                "optimizer.synchronize() before"
            )
        if grad.dtype != self._codec.dtype:
            self._dtype = grad.dtype
            raise ValueError(
                f'the gradient of "{self.name}" is {grad.dtype}; expected {self._codec.dtype}, as '
                "when the round began: call zero_grad() and run the step again"
            )

    @property
    def lent(self) -> object:
        """What must stay alive while the memory of the last loan is read or written."""
        return self._target, self._wire

    def take_back(self, is_written: bool) -> torch.Tensor | None:
        """Ends the loan; with ``is_written`` the parameter receives the result.

        Returns:
            The gradient if it was changed in place, of which autograd knows nothing yet.
        """
        assert self._codec is not None
        target, wire = self._target, self._wire
        self._target = self._wire = None
        if not is_written or wire is None:
            return None
        if wire is target:
            _library.use_here(wire)
            return None if wire.is_inference() else wire
        result = self._codec.unpack(_library.use_here(wire))
        if target is not None and target.layout is torch.strided:
            _library.copy_into(target, result)
        elif target is self.parameter.grad:
            self.parameter.grad = result.to(self.parameter.device, self._codec.dtype)
        return None

    def note_reduced(self) -> None:
        """The gradient as it stands is the reduced one."""
        grad = self.parameter.grad
        if grad is None:
            self.forget_reduced()
        else:
            self.reduced, self._version = weakref.ref(grad), _version_of(grad)

    def forget_reduced(self) -> None:
        """The gradient, if there is one, counts as not reduced."""
        self.reduced = None

    def holds_reduced(self) -> bool:
        """Whether the gradient was reduced and has not fired since; it may have been written to."""
        grad = self.parameter.grad
        return grad is not None and self.reduced is not None and self.reduced() is grad

    def drop(self) -> None:
        """Ends the loan of a round that failed: what the memory holds counts as not reduced."""
        self._target = self._wire = self.sparse = None
        self.forget_reduced()


def _version_of(tensor: torch.Tensor) -> int | None:
    """Counts the writes to the tensor's memory that autograd sees; None: it counts none."""
    try:
        return tensor._version
    except RuntimeError:  # of a tensor made in inference mode
        return None
