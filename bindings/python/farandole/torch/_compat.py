"""What only older torches need: before 2.1, and before 2.10, which brought DLPack's C functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch.utils.hooks import RemovableHandle

from farandole import _core

Callback = Callable[..., None]  # what torch passes is ignored

#: Keyword arguments of ``torch.sparse_coo_tensor``: torch >= 2.0 warns unless it is told whether to check
#: the indices.
CHECKED: Final[dict[str, Any]] = (
    {"check_invariants": True} if hasattr(torch.sparse, "check_sparse_tensor_invariants") else {}
)


def _write_nothing(tensor: torch.Tensor) -> None:
    """A write to none of the tensor's elements, which counts as one."""
    with torch.no_grad():
        tensor.detach().as_strided((0,), (1,)).zero_()


#: Tells autograd that the tensor's memory was changed behind its back; torch >= 2.1 has it.
increment_version: Final[Callable[[Any], None]] = getattr(
    torch.autograd.graph, "increment_version", _write_nothing
)


def _increment_each(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        increment_version(tensor)


#: Likewise of several tensors, in one call where torch takes them.
increment_versions: Callable[[Any], None] = increment_version
try:
    increment_version(())
except (TypeError, RuntimeError, AttributeError):
    increment_versions = _increment_each


#: Whether ``Module.to()`` swaps the tensors in parameters, which lose their hooks; torch >= 2.3 can.
swaps_parameters: Final[Callable[[], bool]] = getattr(
    torch.__future__, "get_swap_module_params_on_conversion", lambda: False
)


def keep_hooks(parameter: Any) -> None:
    """Gives the tensor of a parameter, which may have been swapped, the parameter's hooks."""
    parameter._backward_hooks = parameter._backward_hooks
    parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks


class NodeHooks:
    """Hooks on one parameter, before ``register_post_accumulate_grad_hook``, as in ``_hooks``.

    The node that accumulates takes a hook. It exists while somebody keeps it alive, is made anew when
    the parameter's data are replaced (``.data =``, ``.double()``), and a frozen parameter has none. A
    newer torch's node must not be kept alive: it insists on the shape that the parameter had when the
    node was made.
    """

    is_set = False  # none lasts

    def __init__(self, parameter: torch.Tensor, before: Callback | None, after: Callback) -> None:
        self._parameter = parameter
        self._before = before
        self._after = after
        self._node: Any = None
        self._shape = parameter.shape
        self._handles: list[RemovableHandle] = []
        self.refresh()

    def refresh(self) -> None:
        """Sets the hooks where they are missing: the parameter was frozen, or its data replaced."""
        parameter, before, after = self._parameter, self._before, self._after
        if not parameter.requires_grad:
            return
        if self._shape != parameter.shape:  # the node that is kept insists on the old one
            self.remove()
            self._node, self._shape = None, parameter.shape
        with torch.enable_grad():
            function = parameter.expand_as(parameter).grad_fn
        assert function is not None
        node: Any = function.next_functions[0][0]
        if node is self._node:
            return
        self.remove()
        self._node = node
        self._handles.append(node.register_hook(after))
        if before is not None:
            self._handles.append(parameter.register_hook(before))

    def remove(self) -> None:
        """Takes the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _Exported:
    """A result in a GPU's memory as bytes that torch can make a tensor of, which keeps it alive."""

    def __init__(self, memory: _core.ResultMemory) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (memory.nbytes,),
            "typestr": "|u1",
            "data": (memory.address, False),
        }


def with_reading(library: type) -> Any:
    """An object of ``library`` that reads and makes tensors for the extension: of torch < 2.10."""

    class Reading(library):  # type: ignore[misc]
        def read(self, tensor: torch.Tensor) -> tuple[int, str, Any, bool, int, bool] | None:
            device = tensor.device
            is_usable = device.type == "cpu" or (device.type == "cuda" and not torch.version.hip)
            if tensor.layout is not torch.strided or not is_usable:
                return None
            is_plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
            name = str(tensor.dtype).removeprefix("torch.")
            index = device.index if device.type == "cuda" else -1
            return tensor.data_ptr(), name, tensor.shape, is_plain, index, True

        def stream(self, tensor: torch.Tensor) -> tuple[int, int]:
            device = tensor.device
            return device.index, torch.cuda.current_stream(device).cuda_stream

        def empty(self, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
            return like.new_empty(shape)

        def wrap(
            self, memory: _core.ResultMemory, like: torch.Tensor, shape: tuple[int, ...]
        ) -> torch.Tensor:
            if memory.nbytes == 0:
                return like.new_empty(shape)
            if like.is_cuda:
                raw = torch.as_tensor(_Exported(memory), device=like.device)
                return raw.view(like.dtype).view(shape)
            return torch.frombuffer(memory, dtype=like.dtype).view(shape)

    return Reading()
