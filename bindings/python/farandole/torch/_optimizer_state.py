"""An optimizer's state from one rank to all, without a step.

The root tells the structure of its state and options, with a placeholder for every tensor; each
other rank builds the same structure, and one broadcast fills all tensors. So state that only the
root has (loaded from a checkpoint, say) appears elsewhere, and state that only others have goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import torch

from farandole import _core, basics, objects, ops
from farandole.basics import ProcessSet, global_process_set
from farandole.torch import _library
from farandole.torch.ops import broadcast_named


_PLACE: Final = "farandole tensor"


class _Place(NamedTuple):
    """A tensor's place in the structure, where it stands as {_PLACE: these values}.

    Attributes:
        number: Among the tensors; the same tensor in two places has one number.
        dtype: The name of its dtype.
        shape: Its shape.
        strides: In elements, of a tensor without holes.
        follows: Whether it lives on its parameter's device; else on the CPU.
    """

    number: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    follows: bool


class _Structure(NamedTuple):
    """What travels as an object.

    Attributes:
        options: Per parameter group; all but "params".
        state: Per parameter, by its number over all groups.
        other_state: By the optimizer's own keys.
        names: Of the tensors, by number.
    """

    options: list[dict[str, Any]]
    state: dict[int, Any]
    other_state: dict[Any, Any]
    names: list[str]


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    model: object = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Gives every rank the options and the state of the root's optimizer.

    Any optimizer, wrapped or not, with any state: tensors, numbers, lists and what else can be
    pickled (FARANDOLE_ALLOW_PICKLE=0 leaves all that torch's own optimizers need). No step is
    taken. Options are assigned inside the existing parameter groups; state tensors of the other
    ranks are replaced.

    Args:
        optimizer: Of the same class and with the same parameters on every rank.
        root_rank: Rank whose state wins; 0 <= root_rank < size().
        model: Ignored; for compatibility with Horovod.
        process_set: The ranks that take part, of which this one is.
    Raises:
        MismatchError: Classes of optimizers, or numbers or shapes of parameters, differ between
            ranks.
        HorovodInternalError: On every rank, if something in the root's state cannot be sent.
        ValueError: There is no such rank; ``optimizer`` is none.
    """
    del model
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer)}")
    how = ops.broadcast_options(root_rank, process_set)
    _compare_parameters(optimizer, how)
    tensors: dict[int, torch.Tensor] = {}
    structure = _Structure(
        *objects.broadcast_made(
            lambda: tuple(_take_apart(optimizer, tensors)), root_rank, "optimizer state", process_set
        )
    )
    if basics.topology().rank != root_rank:
        _put_together(optimizer, structure, tensors)
    named = [(name, tensors[number]) for number, name in enumerate(structure.names)]
    broadcast_named(named, how, "optimizer state")


def _compare_parameters(optimizer: torch.optim.Optimizer, how: _core.Options) -> None:
    """Broadcasts an empty tensor per parameter, whose shapes tell ranks that differ.

    The name of one more tells the class: state of another optimizer has other keys.
    """
    kind = type(optimizer)
    named = [(f"an optimizer of class {kind.__module__}.{kind.__qualname__}", torch.empty(0))]
    named += [
        (f"parameter {i} of group {g}", torch.empty(0, *parameter.shape, dtype=parameter.dtype))
        for g, group in enumerate(optimizer.param_groups)
        for i, parameter in enumerate(group["params"])
    ]
    broadcast_named(named, how, "optimizer parameters")


def _all_parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _take_apart(optimizer: torch.optim.Optimizer, tensors: dict[int, torch.Tensor]) -> _Structure:
    """The structure of this rank's state; its tensors go into ``tensors``, by number."""
    parameters = list(_all_parameters(optimizer))
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    structure = _Structure([], {}, {}, [])
    known: dict[int, int] = {}

    def place(path: str, tensor: torch.Tensor, device: torch.device) -> dict[str, Any]:
        number = known.setdefault(id(tensor), len(known))
        if number not in tensors:
            _library.check_dense(tensor)  # refuses what cannot be sent, while it can be told
            tensors[number] = tensor
            structure.names.append(path)
        shape, strides = tuple(tensor.shape), torch.empty_like(tensor, device="meta").stride()
        dtype = str(tensor.dtype).removeprefix("torch.")
        return {_PLACE: tuple(_Place(number, dtype, shape, strides, tensor.device == device))}

    for g, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key != "params"}
        device = _device_of(group)
        structure.options.append(_map(options, f"group {g}", _is_tensor, place, device))
    for key, value in optimizer.state.items():
        number = numbers.get(id(key))
        if number is None:
            device = torch.device("cpu")
            structure.other_state[key] = _map(value, f"state {key}", _is_tensor, place, device)
        else:
            device = parameters[number].device
            structure.state[number] = _map(value, f"state {number}", _is_tensor, place, device)
    return structure


def _put_together(
    optimizer: torch.optim.Optimizer, structure: _Structure, tensors: dict[int, torch.Tensor]
) -> None:
    """Gives the optimizer the root's structure, with tensors still to be filled."""

    def make(_path: str, value: dict[str, Any], device: torch.device) -> torch.Tensor:
        place = _Place(*value[_PLACE])
        if place.number not in tensors:
            tensors[place.number] = torch.empty_strided(
                place.shape,
                place.strides,
                dtype=getattr(torch, place.dtype),
                device=device if place.follows else torch.device("cpu"),
            )
        return tensors[place.number]

    for group, options in zip(optimizer.param_groups, structure.options, strict=True):
        for key in group.keys() - options.keys() - {"params"}:
            del group[key]
        group.update(_map(options, "", _is_place, make, _device_of(group)))
    parameters = list(_all_parameters(optimizer))
    optimizer.state.clear()
    for key, value in structure.other_state.items():
        optimizer.state[key] = _map(value, "", _is_place, make, torch.device("cpu"))
    for number, value in structure.state.items():
        parameter = parameters[number]
        optimizer.state[parameter] = _map(value, "", _is_place, make, parameter.device)


def _device_of(group: dict[str, Any]) -> torch.device:
    return group["params"][0].device if group["params"] else torch.device("cpu")


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_place(value: Any) -> bool:
    return type(value) is dict and _PLACE in value


def _map(
    value: Any,
    path: str,
    is_wanted: Callable[[Any], bool],
    change: Callable[[str, Any, torch.device], Any],
    device: torch.device,
) -> Any:
    """``value`` with what is wanted in its dictionaries, lists and tuples changed."""
    if is_wanted(value):
        return change(path, value, device)
    if type(value) is dict:
        return {k: _map(v, f"{path} {k}", is_wanted, change, device) for k, v in value.items()}
    if type(value) in (list, tuple):
        items = (_map(v, f"{path} {i}", is_wanted, change, device) for i, v in enumerate(value))
        return type(value)(items)
    return value
