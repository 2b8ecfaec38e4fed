"""A closure whose gradients, and where needed its loss, are those of all ranks, for ``step(closure)``.

Optimizers such as LBFGS decide by the loss whether to evaluate again. With every rank's own loss they
would evaluate unequally often and wait for each other in vain; so the loss is reduced as the
gradients are. Most of torch's own evaluate once and look at no loss: they give each rank its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from farandole import ops
from farandole.exceptions import HorovodInternalError

if TYPE_CHECKING:
    from farandole.torch._stepping import Steps


def evaluates_once(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``step()`` is one of torch's own that evaluates its closure exactly once.

    Unknown ones may do otherwise; of torch's own only LBFGS does.
    """
    owner = next(c for c in type(optimizer).__mro__ if "step" in vars(c))
    return owner.__module__.startswith("torch.optim.") and owner is not torch.optim.LBFGS


class SharedClosure:
    """Calls ``closure``; then the rounds of ``steps`` are complete, and so is the loss.

    An exception in it before its rounds are complete fails on every rank at once.
    """

    def __init__(self, closure: Callable[[], Any], steps: Steps) -> None:
        self._closure = closure
        self._steps = steps

    def __call__(self) -> Any:
        """The loss; with ``steps.reduces_loss`` reduced over the ranks if it is a number.

        Raises:
            ValueError: Some ranks returned a number and others did not.
            HorovodInternalError: Another rank's closure raised; the message says what.
        """
        self._steps.forget()
        try:
            loss = self._closure()
            self._steps.complete()
            self._steps.count()  # before the loss, in which ranks that went on would wait
            number = _number(loss) if self._steps.reduces_loss else None
        except BaseException as error:
            self._fail(error)
            raise
        return self._shared(loss, number) if self._steps.reduces_loss else loss

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, HorovodInternalError) or self._steps.refuse(error):
            return
        if not self._steps.reduces_loss:  # the others wait for nothing
            return
        self._steps.count()  # as the others did
        text = f"{type(error).__name__}: {error}"
        with contextlib.suppress(HorovodInternalError, ValueError):
            self._reduce(torch.zeros(2, dtype=torch.float64), text)

    def _shared(self, loss: Any, number: float | None) -> Any:
        wire = torch.tensor([number or 0.0, float(number is not None)], dtype=torch.float64)
        exchange = self._steps.own
        self._reduce(wire)
        if 0 < wire[1].item() < exchange.settings.size:
            raise ValueError("the closure returned a loss on some ranks and None on others")
        if number is None:
            return loss
        total = float(wire[0]) * exchange.settings.scale
        return torch.full_like(loss, total) if isinstance(loss, torch.Tensor) else total

    def _reduce(self, wire: torch.Tensor, failed: str | None = None) -> None:
        exchange = self._steps.own
        how, flags = exchange.settings.plain(ops.ALLREDUCE), ops.IN_PLACE | ops.BLOCKS
        exchange.rank.core.submit(how, wire, exchange.prefix + "loss", flags, failed=failed)


def _number(loss: Any) -> float | None:
    """The loss as a number; None if it is anything else: None, a dictionary, several values."""
    if isinstance(loss, torch.Tensor):
        return float(loss.detach()) if loss.numel() == 1 else None
    return float(loss) if hasattr(type(loss), "__float__") else None
