"""torch's GradScaler with wrapped optimizers: it acts on reduced gradients, the same on every rank.

A scaler looks for infinities in the gradients it is about to unscale, and then leaves ``step()`` out.
Were these a rank's own, as they are with ``complete="step"`` until the round is complete, some ranks
would leave out a step in which the others wait for them. So ``unscale_()`` and ``step()`` of a scaler
complete the round of a wrapped optimizer first; and a step that was left out counts as one, since it is
left out on all ranks.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from farandole.torch._stepping import Steps

MARK = "_farandole"  # of what was changed here: an optimizer, a scaler's method
_adapting = threading.Lock()  # several threads may be ranks


def steps_of(optimizer: object) -> Steps | None:
    """What wrapping gave to the optimizer; None: it is not wrapped."""
    steps: Steps | None = getattr(optimizer, "__dict__", {}).get(MARK)
    return steps


def adapt() -> None:
    """Makes scalers treat wrapped optimizers so, in the whole process, once."""
    # torch < 2.3 has a scaler for CUDA alone; later that one inherits from the other.
    kind = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler
    with _adapting:
        if not hasattr(kind.step, MARK):
            kind.unscale_ = _completing(kind.unscale_, ends_step=False)
            kind.step = _completing(kind.step, ends_step=True)


def _completing(plain: Callable[..., Any], ends_step: bool) -> Callable[..., Any]:
    @functools.wraps(plain)
    def method(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        steps = steps_of(optimizer) if scaler.is_enabled() else None
        if steps is None:
            return plain(scaler, optimizer, *args, **kwargs)
        steps.complete()
        result = plain(scaler, optimizer, *args, **kwargs)
        if ends_step:
            steps.after_step()
        return result

    setattr(method, MARK, True)
    return method
