"""Tensors as a group sends and receives them: contiguous memory of a dtype that the core can move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from farandole.exceptions import MismatchError
from farandole.torch import _library

#: How dtypes travel that the core does not know, where nothing is computed; by the bytes of an element.
_OF_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Tensors = Sequence[torch.Tensor]


def all_of(results: list[Any]) -> list[torch.Tensor]:
    """Of one operation: of a group the list of tensors."""
    return list(results[0]) if isinstance(results[0], (list, tuple)) else [results[0]]


def write(target: torch.Tensor, source: torch.Tensor) -> None:
    """As gloo and NCCL write: autograd does not see it."""
    target.data.copy_(source.view(target.shape))


def fill(target: torch.Tensor, flat: torch.Tensor, _: list[Any]) -> None:
    _library.copy_into(target.data, flat.view(target.shape))  # elements of the target may share memory


def call_each(first: Callable[[Any], None] | None, then: Callable[[Any], None], results: list[Any]) -> None:
    if first is not None:
        first(results)
    then(results)


def contiguous(tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], Callable[[list[Any]], None] | None]:
    """The tensors, of which others than contiguous ones are copied, and what writes the copies back, if there are any.

    So ranks whose strides differ exchange elements of the same places.
    """
    for tensor in tensors:
        if not tensor.is_contiguous():
            break
    else:
        return tensors, None
    for tensor in tensors:
        check_travels(tensor)  # the copy would not be one that negates
    copies = [tensor.detach().contiguous() for tensor in tensors]

    def write_back(_: list[Any]) -> None:
        for tensor, copy in zip(tensors, copies, strict=True):
            if not tensor.is_contiguous():
                fill(tensor, copy, [])

    return copies, write_back


def movable(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a dtype that the core can move."""
    if tensor.dtype in _library.DTYPE_NUMBERS:
        return tensor
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor.view(_OF_BYTES[tensor.element_size()])


def check_travels(tensor: torch.Tensor) -> None:
    if tensor.is_neg():
        raise ValueError("farandole: a view that negates its tensor cannot travel; resolve_neg() gives one that can")


def count_in_name(tensor: torch.Tensor) -> str:
    """But for bytes, as objects are, which do not make names without end."""
    return "" if tensor.dtype == torch.uint8 else f", [{tensor.numel()}]"


def end_to_end(tensors: Tensors) -> torch.Tensor | None:
    """The tensors as one of one dimension, in their memory; None if they do not lie there end to end."""
    parts = [tensor for tensor in tensors if tensor.numel()] or [tensors[0]]
    if any(part.is_neg() for part in parts):  # the memory does not hold the values
        return None
    first = parts[0].detach()
    if len(parts) == 1:
        return first.view(-1) if first.is_contiguous() else None
    storage, at = first.untyped_storage().data_ptr(), first.data_ptr()
    for part in parts:
        is_next = part.data_ptr() == at and part.untyped_storage().data_ptr() == storage
        if not is_next or part.dtype != first.dtype or not part.is_contiguous():
            return None
        at += part.nbytes
    return first.as_strided((sum(part.numel() for part in parts),), (1,))


def joined(tensors: Tensors) -> torch.Tensor:
    """The tensors as one of one dimension: in their memory if they lie there end to end, else a copy."""
    flat = end_to_end(tensors)
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if flat is None else flat


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    begin, at = one.data_ptr(), other.data_ptr()
    return begin < at + other.nbytes and at < begin + one.nbytes


def places(sent: list[torch.Tensor], places: Sequence[Tensors]) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
    """What is sent, and for each of it where its result can be written: None if the tensors of some place do not lie
    end to end, or are of another dtype. What is sent is copied if it lies in such a place, as FSDP's does."""
    into = []
    for given, parts in zip(sent, places, strict=True):
        flat = end_to_end([movable(part) for part in parts])
        if flat is None or flat.dtype != movable(given).dtype:
            return sent, None
        into.append(flat)
    return [tensor.clone() if any(_overlap(tensor, flat) for flat in into) else tensor for tensor in sent], into


def spread(what: str, places: Sequence[Tensors], expected: list[list[int]], results: list[Any]) -> None:
    """Copies what came into the tensors that it is for."""
    rows, numbers = results[0]
    if isinstance(rows, torch.Tensor):
        rows, numbers = [rows], [numbers]
    for parts, came, gathered, awaited in zip(places, numbers, rows, expected, strict=True):
        if list(came) != awaited:
            raise MismatchError(f"{what}: the output expects rows {awaited} from the ranks; {list(came)} came")
        views = [movable(part) for part in parts]
        for view, part in zip(views, torch.split(gathered, [view.numel() for view in views]), strict=True):
            write(view, part)


def check_numel(what: str, tensor: torch.Tensor, expected: int, whose: str) -> None:
    if tensor.numel() != expected:
        raise ValueError(
            f"{what}: a tensor of shape {list(tensor.shape)} has {tensor.numel()} elements, but {whose} are {expected}"
        )


def elements_of(tensor: torch.Tensor, splits: Sequence[int], size: int) -> list[int]:
    """How many elements are each rank's of a tensor with ``splits`` rows of each, or as many."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if not splits and rows % size:
        raise ValueError(f"all_to_all_single: {rows} rows cannot be divided among {size} ranks; give split sizes")
    numbers = list(splits) or [rows // size] * size
    if sum(numbers) != rows or len(numbers) != size:
        raise ValueError(f"all_to_all_single: split sizes {numbers} do not add up to {rows} rows, for {size} ranks")
    row = movable(tensor).numel() // rows if rows else 0
    return [number * row for number in numbers]
