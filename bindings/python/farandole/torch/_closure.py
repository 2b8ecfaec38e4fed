"""A closure whose gradients and loss are those of all ranks, for ``step(closure)``.

Optimizers such as LBFGS decide by the loss whether to evaluate again. With every rank's own loss they
would evaluate unequally often and wait for each other in vain; so the loss is reduced as the
gradients are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from farandole import _context, _work
from farandole.exceptions import HorovodInternalError
from farandole.torch import _tensors

if TYPE_CHECKING:
    from farandole.torch._stepping import Steps


class SharedClosure:
    """Calls ``closure``; then the rounds of ``steps`` are complete and its loss is all ranks'.

    An exception in it fails on every rank at once.
    """

    def __init__(self, closure: Callable[[], Any], steps: Steps) -> None:
        self._closure = closure
        self._steps = steps

    def __call__(self) -> Any:
        """The loss, with its type, reduced over the ranks.

        Raises:
            ValueError: Some ranks returned a loss and others None.
            HorovodInternalError: Another rank's closure raised; the message says what.
        """
        self._steps.forget()
        loss: Any = None
        try:
            loss = self._closure()
            self._steps.complete()
            number = None if loss is None else float(torch.as_tensor(loss).detach())
        except BaseException as error:
            self._fail(error)
            raise
        return self._shared(loss, number)

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, HorovodInternalError) or self._steps.refuse(error):
            return
        text = f"{type(error).__name__}: {error}"
        with contextlib.suppress(HorovodInternalError, ValueError):
            with _context.using(self._steps.own.rank):
                call = self._call(torch.zeros(2, dtype=torch.float64))
                _work.start(call._replace(failed=text)).wait()

    def _shared(self, loss: Any, number: float | None) -> Any:
        wire = torch.tensor([number or 0.0, float(number is not None)], dtype=torch.float64)
        exchange = self._steps.own
        with _context.using(exchange.rank):
            _work.run(self._call(wire))
        if 0 < wire[1].item() < exchange.rank.topology.size:
            raise ValueError("the closure returned a loss on some ranks and None on others")
        if number is None:
            return None
        total = float(wire[0]) * exchange.settings.scale(exchange.rank.topology.size)
        return torch.full_like(loss, total) if isinstance(loss, torch.Tensor) else total

    def _call(self, wire: torch.Tensor) -> _work.Call:
        addresses = (_tensors.address(wire),)
        description = (_tensors.describe(wire),)
        what, name = _work.Parameters(_work.ALLREDUCE), self._steps.own.prefix + "loss"
        return _work.Call(what, name, description, addresses, addresses, wire, lambda: None)
