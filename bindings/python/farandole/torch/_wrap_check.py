"""Whether all ranks wrap the same optimizers in the same order.

Gradients are named by the number of their optimizer. Ranks that wrap in another order would wait for
gradients of different names until somebody looks at the stall report, so each wrap starts one
operation without data, whose tensors' names tell what is wrapped. Its outcome is asked for in the
optimizer's first round: wrapping waits for nobody.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from farandole import ops
from farandole.basics import Context
from farandole.exceptions import HorovodInternalError, MismatchError
from farandole.torch._settings import Settings

_HINT = ": every rank must wrap the same optimizers, with the same parameters, in the same order"
_COMPARED = 10_000  # parameters; of a larger optimizer the others are compared in the first round

#: Of a tensor without elements that takes part in every round: its shape tells the number.
COUNT_NAME = "number of wrapped optimizers"


class WrapCheck:
    """One optimizer's check.

    Args:
        rank: The context.
        number: Of the optimizer, in the order of wrapping.
        named: Its parameters.
        settings: Of its rounds.
    """

    def __init__(
        self,
        rank: Context,
        number: int,
        named: Iterable[tuple[str, torch.Tensor]],
        settings: Settings,
    ) -> None:
        labels = [_label(name, parameter) for name, parameter in named]
        labels = [f"{len(labels)} parameters", *labels[:_COMPARED]]
        nothing = [np.empty(0, np.uint8)] * len(labels)
        name = f"gradients.{number}.parameters at the wrap"
        flags = ops.GROUP | ops.IN_PLACE | ops.INTERNAL
        self._number = number
        self._lock = threading.Lock()
        self._error: HorovodInternalError | None = None
        self._handle: ops.Handle | None = None
        try:
            how = settings.plain(ops.ALLREDUCE)
            self._handle = rank.core.submit(how, nothing, name, flags, labels=labels)
        except HorovodInternalError as error:  # told by the first round, if there is one
            self._error = error

    def wait(self) -> None:
        """Returns when all ranks wrapped the same.

        Raises:
            MismatchError: They did not, now and at every later call: from there on numbers may mean
                different optimizers, until the next init().
            HorovodInternalError: As for any operation.
        """
        with self._lock:  # threads with an optimizer each ask for the earlier ones' checks too
            self._settle()
        if self._error is not None:
            raise self._error

    def _settle(self) -> None:
        if self._handle is None:
            return
        try:
            self._handle.wait()
        except MismatchError as error:
            self._error = MismatchError(
                f"{error}; it is wrapped optimizer {self._number + 1}{_HINT}"
            )
        except HorovodInternalError as error:
            self._error = error
        self._handle = None


def stages(checks: list[WrapCheck], number: int) -> Iterator[None]:
    """Yields once and waits for the checks of this optimizer and of those wrapped before it."""
    yield
    for check in checks[: number + 1]:
        check.wait()


def explain(error: BaseException) -> None:
    """Raises a round's error with its cause where ranks have wrapped different numbers."""
    if isinstance(error, MismatchError) and COUNT_NAME in str(error):
        raise MismatchError(f"{error}{_HINT}") from error


def _label(name: str, parameter: torch.Tensor) -> str:
    kind = f"{str(parameter.dtype).removeprefix('torch.')} {list(parameter.shape)}"
    needs = parameter.requires_grad or parameter.grad is not None
    return f"{name} {kind}" + ("" if needs else " (requires no gradient)")
