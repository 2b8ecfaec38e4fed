"""Calls when a parameter's gradient is about to be accumulated and when it has been, on any torch.

torch >= 2.1 has ``register_post_accumulate_grad_hook``. Before, the node that accumulates takes a
hook; it exists while somebody keeps it alive, is made anew when the parameter's data are replaced
(``.data =``, ``.double()``), and a frozen parameter has none. A newer torch's node must not be kept
alive: it insists on the shape that the parameter had when the node was made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle, unserializable_hook

Callback = Callable[[], None]

_HAS_POST_HOOKS = hasattr(torch.Tensor, "register_post_accumulate_grad_hook")


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
        self._node: Any = None  # before torch 2.1
        self._shape = parameter.shape
        self._handles: list[RemovableHandle] = []
        self.refresh()

    def refresh(self) -> None:
        """Sets the hooks where they are missing: the parameter was frozen, or its data replaced."""
        if not self._parameter.requires_grad or (_HAS_POST_HOOKS and self._handles):
            return
        before, after = self._before, self._after
        if _HAS_POST_HOOKS:
            after_hooks = self._parameter.register_post_accumulate_grad_hook
        else:
            if self._shape != self._parameter.shape:  # the node that is kept insists on the old one
                self.remove()
                self._node, self._shape = None, self._parameter.shape
            node = _accumulating_node(self._parameter)
            if node is self._node:
                return
            self.remove()
            self._node, after_hooks = node, node.register_hook
        self._handles.append(after_hooks(lambda *_: after()))
        if before is not None:
            hook = unserializable_hook(lambda *_: before())
            self._handles.append(self._parameter.register_hook(hook))

    @property
    def is_set(self) -> bool:
        """Whether a hook is there that lasts, whatever becomes of the parameter's data."""
        return _HAS_POST_HOOKS and bool(self._handles)

    def remove(self) -> None:
        """Takes the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _accumulating_node(parameter: torch.Tensor) -> Any:
    with torch.enable_grad():
        function = parameter.expand_as(parameter).grad_fn
    assert function is not None
    return function.next_functions[0][0]
