"""The state of a training: what a step depends on, its digests, and how it goes from one rank to others."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from farandole import ops
from farandole.basics import global_process_set
from farandole.objects import broadcast_object
from farandole.torch import _library
from farandole.torch.functions import map_tree
from farandole.torch.ops import allreduce, broadcast_named

_HOLE = "\0tensor"  # where a tensor was


class TrainingState:
    """The model's parameters and buffers, the optimizer's and the schedulers' state, and the progress of the job.

    Args:
        progress: Plain values, replaced by :meth:`load`: how many steps were applied, and sums of metrics.
    Raises:
        ValueError: The model has extra state, of which there is no copy that is known to be exact.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, schedulers: Sequence[Any], progress: Any
    ) -> None:
        extra = [key for key in model.state_dict() if key.endswith("_extra_state")]
        if extra:
            raise ValueError(f'the model has "{extra[0]}", which a Job cannot carry: keep it in a buffer')
        self.progress = progress
        self._model, self._optimizer, self._schedulers = model, optimizer, schedulers

    def tree(self) -> dict[str, Any]:
        """All of it, with the tensors themselves."""
        tensors = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        return {
            "model": {name: tensor.detach() for name, tensor in tensors.items()},
            "optimizer": self._optimizer.state_dict(),
            "schedulers": [scheduler.state_dict() for scheduler in self._schedulers],
            "progress": self.progress,
        }

    def shapes(self) -> dict[str, str]:
        """The dtypes and shapes of the model's tensors, by name."""
        return {name: f"{one.dtype} {list(one.shape)}" for name, one in self.tree()["model"].items()}

    def load(self, tree: Mapping[str, Any]) -> None:
        """Takes over what :meth:`tree` gave, on this rank or another.

        Raises:
            ValueError: The model or the optimizer has other parameters; or does not restore its state exactly.
        """
        own = self.tree()["model"]
        for name in {**own, **tree["model"]}:
            mine, given = (None if t is None else (t.dtype, t.shape) for t in (own.get(name), tree["model"].get(name)))
            if mine != given:
                raise ValueError(f'"{name}" of the model: here {mine}, in the state {given}')
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(tree["model"][name])
        self._optimizer.load_state_dict(tree["optimizer"])
        for scheduler, state in zip(self._schedulers, tree["schedulers"], strict=True):
            scheduler.load_state_dict(state)
        self.progress = map_tree(tree["progress"], lambda _, leaf: leaf)
        if digest_of_tree(self.tree()) != digest_of_tree(tree):
            differing = first_difference(digests_of(self.tree()), digests_of(tree))
            raise ValueError(
                f'{type(self._optimizer).__name__} or a scheduler does not restore "{differing}" exactly from its '
                "state_dict(): a Job cannot carry it to another rank"
            )

    def share(self, leader: int, is_leader: bool) -> bool:
        """Gives all ranks the leader's state, of which only what differs by its digest travels.

        Collective. Returns whether this rank's state was another.
        """
        tree = self.tree()
        mine, skeleton = take_apart(tree)
        digests = {path: (_digest(tensor), tensor.dtype, tuple(tensor.shape)) for path, tensor in mine.items()}
        content = broadcast_object(_to_bytes((digests, skeleton)) if is_leader else None, leader, "job.digests")
        theirs, their_skeleton = torch.load(io.BytesIO(content), weights_only=True)
        lacks = [digests.get(path) != theirs[path] for path in theirs]
        needed = allreduce(torch.tensor([*lacks, False], dtype=torch.uint8), name="job.lacking", op=ops.Max)
        travelling = []
        for path, is_needed in zip(theirs, needed.tolist(), strict=False):
            _, dtype, shape = theirs[path]
            if is_needed:
                tensor = mine[path].contiguous() if is_leader else torch.empty(shape, dtype=dtype)
                travelling.append((path, tensor))
        broadcast_named(travelling, ops.broadcast_options(leader, global_process_set), "job.state")
        if is_leader or (not any(lacks) and repr(skeleton) == repr(their_skeleton) and len(mine) == len(theirs)):
            return False
        self.load(put_together(their_skeleton, {**mine, **dict(travelling)}))
        return True


def _to_bytes(values: Any) -> bytes:
    """As torch.load(weights_only=True) takes it, which runs no code: FARANDOLE_ALLOW_PICKLE=0 may hold."""
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return buffer.getvalue()


def take_apart(tree: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Its tensors by path, and the tree without them."""
    tensors: dict[str, torch.Tensor] = {}

    def take(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        _library.check_dense(leaf)
        tensors[path] = leaf.detach()
        return _HOLE

    return tensors, map_tree(tree, take)


def put_together(skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The tree that was taken apart."""
    return map_tree(skeleton, lambda path, leaf: tensors[path] if isinstance(leaf, str) and leaf == _HOLE else leaf)


def digests_of(tree: Any) -> dict[str, str]:
    """SHA-256 by path, such as ``model.0.weight``, of tensors; of the rest the text."""
    tensors, skeleton = take_apart(tree)
    found: dict[str, str] = {}
    map_tree(skeleton, lambda path, leaf: found.setdefault(path, repr(leaf)))
    found.update((path, _digest(tensor)) for path, tensor in tensors.items())
    return {re.sub(r"\[('?)(.*?)\1\]", r".\2", path).lstrip("."): digest for path, digest in found.items()}


def digest_of_tree(tree: Any) -> str:
    """SHA-256 of all."""
    return hashlib.sha256(repr(sorted(digests_of(tree).items())).encode()).hexdigest()


def first_difference(one: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    """The first path, in the order of the first mapping, whose digests differ."""
    return next((path for path in {**one, **other} if one.get(path) != other.get(path)), None)


def _digest(tensor: torch.Tensor) -> str:
    content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)} ".encode() + content.tobytes()).hexdigest()
