"""Which torch will do, and what only some of them need: before 2.10, which brought DLPack's C functions."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch

from farandole import _core

if not hasattr(torch.Tensor, "register_post_accumulate_grad_hook"):
    raise ImportError(f"farandole.torch needs PyTorch 2.1 or newer; this is {torch.__version__}")

increment_version: Final[Callable[[Any], None]] = torch.autograd.graph.increment_version


def _increment_each(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        if not tensor.is_inference():
            increment_version(tensor)


#: Likewise of several tensors, in one call of C++ where torch takes them and leaves out those that have no version.
increment_versions: Callable[[Any], None] = getattr(torch._C, "_increment_version", _increment_each)
try:
    with torch.inference_mode():
        _unversioned = torch.empty(0)
    increment_versions((_unversioned,))
except (RuntimeError, TypeError, AttributeError):
    increment_versions = _increment_each

#: Whether ``Module.to()`` swaps the tensors in parameters, which lose their hooks; torch >= 2.3 can.
swaps_parameters: Final[Callable[[], bool]] = getattr(
    torch.__future__, "get_swap_module_params_on_conversion", lambda: False
)


def keep_hooks(parameter: Any) -> None:
    """Gives the tensor of a parameter, which may have been swapped, the parameter's hooks."""
    parameter._backward_hooks = parameter._backward_hooks
    parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks


def hide_from_compiler(kinds: Sequence[type]) -> None:
    """``torch.compile`` runs their methods as they are: compiled code calls them, as DDP's does."""
    frames: Any = torch._C._dynamo.eval_frame
    for kind in kinds:
        for one in vars(kind).values():
            if not isinstance(one, types.FunctionType):
                continue
            if hasattr(frames, "skip_code"):  # before torch 2.8
                frames.skip_code(one.__code__)
            else:
                strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
                frames.set_code_exec_strategy(one.__code__, strategy)


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

        def look(self, tensor: torch.Tensor) -> tuple[int, str, tuple[int, ...], tuple[int, ...], int] | None:
            if tensor.layout is not torch.strided or tensor.device.type not in ("cpu", "cuda"):
                return None
            name = str(tensor.dtype).removeprefix("torch.")
            index = tensor.device.index if tensor.is_cuda else -1
            return tensor.data_ptr(), name, tuple(tensor.shape), tensor.stride(), index

        def stream(self, tensor: torch.Tensor) -> tuple[int, int]:
            index = tensor.get_device()  # without a torch.cuda.Stream: this runs for each gradient
            return index, torch._C._cuda_getCurrentRawStream(index)

        def empty(self, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
            return like.new_empty(shape)

        def wrap(self, memory: _core.ResultMemory, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
            if memory.nbytes == 0:
                return like.new_empty(shape)
            if like.is_cuda:
                raw = torch.as_tensor(_Exported(memory), device=like.device)
                return raw.view(like.dtype).view(shape)
            return torch.frombuffer(memory, dtype=like.dtype).view(shape)

    return Reading()
