"""torch as a library of arrays, for the extension and for gradients (see ``farandole._libraries``).

The extension reads tensors by DLPack's C functions, which torch has from 2.10 on. What they cannot give
as it is comes here: tensors travel in a *canonical order*, equal on all ranks whatever their strides:
rows first, as ``contiguous()`` gives them. Others are copied there and back, on their own device and in
the current stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from farandole import _core
from farandole.torch import _compat

ALL_DTYPES: Final = _core.dtypes
DTYPES: Final = _core.reducible_dtypes
REDUCED: Final = _core.reduced_dtypes
DTYPE_NUMBERS: Final[dict[torch.dtype, int]] = {getattr(torch, name): number for number, name in enumerate(DTYPES)}
PAIRS: Final = {torch.complex64: torch.float32, torch.complex128: torch.float64}  # summed as pairs of these


class Torch:
    """What the extension asks of torch."""

    is_mutable = True
    is_lazy = True
    #: As int4 and uint1, of which DLPack says int8 and uint8.
    opaque_dtypes = frozenset(each for each in vars(torch).values() if isinstance(each, torch.dtype)) - {
        getattr(torch, name, None) for name in ALL_DTYPES
    }

    def canonical(self, tensors: Sequence[Any], function: str, in_place: bool, moves_bytes: bool) -> list[torch.Tensor]:
        """The tensors in canonical order; TypeError for what is no dense tensor, ValueError for a
        dtype that cannot travel, or tensors that are not on one CPU or NVIDIA GPU."""
        del in_place
        for tensor in tensors:
            check_dense(tensor)
            _check_dtype(tensor.dtype, ALL_DTYPES if moves_bytes else REDUCED)
            if tensor.device != tensors[0].device:
                raise ValueError(
                    f"{function}: tensors on {tensors[0].device} and on {tensor.device}; those of "
                    "one call must be on one device"
                )
        check_device(tensors[0])
        return [canonical(tensor) for tensor in tensors]

    def written(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """After a result came into ``source``, which is ``target`` or its copy."""
        copy_into(target, source)

    #: Likewise of tensors that were not copied.
    written_in_place = staticmethod(_compat.increment_versions)

    def use_here(self, made: torch.Tensor, _target: object) -> torch.Tensor:
        """Before a result on a GPU is used in the current stream."""
        return use_here(made)


def check_dense(tensor: Any) -> None:
    """TypeError unless it is a dense tensor, with its elements in memory of its own."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise TypeError(f"expected a dense tensor, got layout {tensor.layout}")
    if tensor.device.type in ("cpu", "cuda") and tensor.numel() and not tensor.data_ptr():
        raise TypeError(
            f"{type(tensor).__name__} of shape {list(tensor.shape)} has no memory of its own; pass the "
            "tensor with this rank's elements, as DTensor.to_local() gives it"
        )


def check_device(tensor: torch.Tensor) -> None:
    """ValueError, which names the device, unless it is the CPU or an NVIDIA GPU."""
    device = tensor.device
    if device.type == "cpu" or (device.type == "cuda" and torch.version.hip is None):
        return
    kind = "an AMD GPU" if device.type == "cuda" else f'"{device}"'
    raise ValueError(
        f"a tensor of shape {list(tensor.shape)} is on {kind}; Farandole reduces tensors on the "
        "CPU and on NVIDIA GPUs: pass tensor.cpu()"
    )


def number_of(dtype: torch.dtype) -> int:
    """The C ABI's number of a dtype; ValueError for one that cannot be reduced."""
    _check_dtype(dtype, DTYPES)
    return DTYPE_NUMBERS[dtype]


def _check_dtype(dtype: torch.dtype, known: Sequence[str]) -> None:
    if str(dtype).removeprefix("torch.") not in known:
        raise ValueError(f"Tensor type {dtype} is not supported. Use one of {', '.join(known)}.")


def canonical(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements in canonical order: itself (detached) or a copy."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def shares_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether ``other`` is ``tensor`` itself rather than a copy."""
    return tensor.device == other.device and tensor.data_ptr() == other.data_ptr()


def _owner_count() -> tuple[Callable[[int], int] | None, int]:
    """How many tensors and nodes own a storage, by its ``_cdata``, and the number where one does.

    torch says it under a private name only; where that is missing, or says something else, None.
    """
    count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
    if count is None:
        return None, 0
    tensor = torch.zeros(1)
    storage = tensor.untyped_storage()  # alive, as where it is asked: in an older torch it counts, too
    sole = count(storage._cdata)
    _, with_view = tensor.view(1), count(storage._cdata)
    return (count, sole) if with_view == sole + 1 else (None, 0)


#: What tells whether memory of a gradient has another owner than ``.grad``.
count_owners, SOLE_OWNER = _owner_count()


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether elements share memory, as those of ``expand()`` do: torch copies to no such tensor."""
    return any(n > 1 and stride == 0 for n, stride in zip(tensor.shape, tensor.stride(), strict=True))


def address(tensor: torch.Tensor) -> int | None:
    """Where the elements are; None for an empty tensor."""
    return tensor.data_ptr() or None


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Gives ``target`` the values of ``source``; autograd sees a write and records nothing."""
    if shares_memory(target, source):
        if not target.is_inference():
            _compat.increment_version(target)
        return
    with torch.no_grad():
        target, source = target.detach(), use_here(source)
        if is_expanded(target):
            target, source = _without_copies(target, source)
        target.copy_(source)


def _without_copies(target: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each element of an expanded tensor one, and what it gets; ValueError if that is not one value."""
    first = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in target.stride())
    values = source[first].expand_as(source)
    if not ((source == values) | (source != source) & (values != values)).all():
        raise ValueError(
            f"the result cannot be written to a tensor of shape {list(target.shape)} and strides "
            f"{list(target.stride())}: elements of it share memory, and the result has other values for them; "
            "pass tensor.clone()"
        )
    return target[first], source[first]


def use_here(tensor: torch.Tensor) -> torch.Tensor:
    """Tells torch's allocator that the current stream uses the tensor, which may have been
    allocated while another was current. Returns it."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor


def own_here(tensor: torch.Tensor) -> torch.Tensor:
    """A result that was allocated in the default stream, to be used and freed in the current one.

    Memory that came by DLPack takes no record_stream(): in another stream a copy is used instead, and
    what the default stream allocates next comes after the copy.
    """
    if not tensor.is_cuda:
        return tensor
    here, default = torch.cuda.current_stream(tensor.device), torch.cuda.default_stream(tensor.device)
    if here == default:
        return tensor
    copy = tensor.clone()
    default.wait_stream(here)
    return copy


#: From torch 2.10 on the extension reads tensors by itself.
TORCH: Final[Torch] = Torch() if hasattr(torch.Tensor, "__dlpack_c_exchange_api__") else _compat.with_reading(Torch)
_core.use_library(torch.Tensor, TORCH)
