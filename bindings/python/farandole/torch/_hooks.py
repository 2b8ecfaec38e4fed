"""Calls when a parameter's gradient is about to be accumulated and when it has been, on any torch.

torch >= 2.1 has ``register_post_accumulate_grad_hook``. Before, the node that accumulates takes a
hook; it exists while somebody keeps it alive, is made anew when the parameter's data are replaced
(``.data =``, ``.double()``), and a frozen parameter has none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

Callback = Callable[[], None]

_HAS_POST_HOOKS = hasattr(torch.Tensor, "register_post_accumulate_grad_hook")


class GradientHooks:
    """Hooks on one parameter.

    Args:
        parameter: A leaf; it may be frozen for now.
        before: Called before a gradient is added to ``.grad``; None: not needed.
        after: Called afterwards.
    """

    def __init__(self, parameter: torch.Tensor, before: Callback | None, after: Callback) -> None:
        self._parameter = parameter
        self._before = before
        self._after = after
        self._node: Any = None
        self._handles: list[RemovableHandle] = []
        self._node_handles: list[RemovableHandle] = []
        self.refresh()

    def refresh(self) -> None:
        """Sets the hooks where they are missing: the parameter was frozen, or its data replaced."""
        if not self._parameter.requires_grad:
            return
        before, after = self._before, self._after
        if _HAS_POST_HOOKS and not self._handles:
            hook = self._parameter.register_post_accumulate_grad_hook
            self._handles.append(hook(lambda *_: after()))
        if _HAS_POST_HOOKS and before is None:
            return
        node = _accumulating_node(self._parameter)
        if node is self._node:
            return
        self._remove(self._node_handles)
        self._node = node
        if not _HAS_POST_HOOKS:
            self._node_handles.append(node.register_hook(lambda *_: after()))
        if before is not None:
            # A hook of the node runs where it accumulates; one of the tensor also in autograd.grad.
            hook = node.register_prehook if _HAS_POST_HOOKS else self._parameter.register_hook
            self._node_handles.append(hook(lambda *_: before()))

    def remove(self) -> None:
        """Takes the hooks away."""
        self._remove(self._handles)
        self._remove(self._node_handles)

    @staticmethod
    def _remove(handles: list[RemovableHandle]) -> None:
        for handle in handles:
            handle.remove()
        handles.clear()


def _accumulating_node(parameter: torch.Tensor) -> Any:
    with torch.enable_grad():
        function = parameter.expand_as(parameter).grad_fn
    assert function is not None
    return function.next_functions[0][0]
