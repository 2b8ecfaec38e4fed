"""Calls when a parameter's gradient is about to be accumulated and when it has been, on any torch."""

from __future__ import annotations

import torch
from torch.utils.hooks import RemovableHandle, unserializable_hook

from farandole.torch import _compat
from farandole.torch._compat import Callback


class GradientHooks:
    """Hooks on one parameter.

    Args:
        parameter: A leaf; it may be frozen for now.
        before: Called before a gradient is added to ``.grad``, and before torch.autograd.grad() gives
            it away (``rounds.is_accumulating``); None: not needed.
        after: Called afterwards.
    """

    def __init__(self, parameter: torch.Tensor, before: Callback | None, after: Callback) -> None:
        self._parameter = parameter
        self._before = before
        self._after = after
        self._handles: list[RemovableHandle] = []
        self.refresh()

    def refresh(self) -> None:
        """Sets the hooks where they are missing: the parameter was frozen."""
        if self._handles or not self._parameter.requires_grad:
            return
        before, after = self._before, self._after
        hook = self._parameter.register_post_accumulate_grad_hook(after)
        self._handles.append(hook)
        if before is not None:
            hook = unserializable_hook(before)
            self._handles.append(self._parameter.register_hook(hook))

    @property
    def is_set(self) -> bool:
        """Whether a hook is there that lasts, whatever becomes of the parameter's data."""
        return bool(self._handles)

    def remove(self) -> None:
        """Takes the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


if not hasattr(torch.Tensor, "register_post_accumulate_grad_hook"):
    GradientHooks = _compat.NodeHooks  # type: ignore[assignment, misc]
