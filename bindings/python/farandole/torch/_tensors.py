"""How a torch tensor becomes an address, a shape and a dtype, without any torch header.

What travels is the tensor's elements in a *canonical order*, equal on all ranks whatever their
strides: rows first, as ``contiguous()`` gives them. Tensors that are not like that are copied there
and back, on their own device and in the current stream.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from farandole import _core, _work
from farandole.torch import _devices

DTYPE_NUMBERS: Final[dict[torch.dtype, int]] = {
    getattr(torch, name): number for name, number in _work.DTYPES.items()
}


def dtype_number(tensor: torch.Tensor) -> int:
    """The C ABI's number of the tensor's dtype.

    Raises:
        TypeError: Not a tensor, or not a dense one.
        ValueError: A dtype that cannot be reduced.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise TypeError(f"expected a dense tensor, got layout {tensor.layout}")
    return number_of(tensor.dtype)


def number_of(dtype: torch.dtype) -> int:
    """The C ABI's number of a dtype.

    Raises:
        ValueError: A dtype that cannot be reduced.
    """
    number = DTYPE_NUMBERS.get(dtype)
    if number is None:
        raise ValueError(f"Tensor type {dtype} is not supported.")
    return number


def canonical(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements in canonical order: itself (detached) or a copy."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def shares_memory(tensor: torch.Tensor, wire: torch.Tensor) -> bool:
    """Whether ``wire`` is ``tensor`` itself rather than a copy."""
    return tensor.device == wire.device and tensor.data_ptr() == wire.data_ptr()


def address(tensor: torch.Tensor) -> int | None:
    """Where the elements are; None for an empty tensor."""
    return tensor.data_ptr() or None


def over(result: _core.Result, like: torch.Tensor) -> torch.Tensor:
    """The rows that came, as a tensor like ``like`` which lies in the result's memory."""
    shape = (sum(result.rows), *like.shape[1:])
    if result.nbytes == 0:
        return like.new_empty(shape)
    if like.is_cuda:
        exported = _devices.Exported(result)
        return torch.as_tensor(exported, device=like.device).view(like.dtype).view(shape)
    return torch.frombuffer(result, dtype=like.dtype).view(shape)


def written(tensor: torch.Tensor) -> None:
    """Tells autograd that the tensor's memory was changed behind its back."""
    if tensor.is_inference():
        return
    if hasattr(torch.autograd.graph, "increment_version"):
        torch.autograd.graph.increment_version(tensor)
    else:  # torch < 2.1: a write to none of its elements counts
        with torch.no_grad():
            tensor.detach().as_strided((0,), (1,)).zero_()


def copy_into(target: torch.Tensor, wire: torch.Tensor) -> None:
    """Gives ``target`` the values of ``wire``; autograd sees a write and records nothing."""
    if shares_memory(target, wire):
        written(target)
        return
    with torch.no_grad():
        target.detach().copy_(_devices.use_here(wire))


def describe(tensor: torch.Tensor, name: str | None = None) -> tuple[str | None, int, Any]:
    """Name, dtype and shape as the core wants them."""
    return (name, dtype_number(tensor), tuple(tensor.shape))
