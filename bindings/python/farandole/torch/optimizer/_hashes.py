"""Hashes of the gradients that a wrapped optimizer's steps use: FARANDOLE_HASH_STEPS."""

from __future__ import annotations

import contextlib
import itertools
import pathlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from farandole import basics, ops
from farandole.basics import Context, ProcessSet
from farandole.chain import Chain, settings_line
from farandole.exceptions import HorovodInternalError
from farandole.torch._digests import StepDigests
from farandole.torch.ops import allgather, allreduce

_alone = itertools.count()  # numbers of optimizers in jobs of one rank


class GradientHashes:
    """Compares the gradients of each n-th step between ranks, and writes a line for each.

    Args:
        optimizer: Held weakly.
        names: Of its parameters.
        process_set: Whose gradients are the same.
        number: Of the optimizer, the same on all ranks; None: there is one rank.
        every: How many steps from one that is hashed to the next.
        folder: For the chain; "": none is written.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, str], process_set: ProcessSet,
        number: int | None, every: int, folder: str,
    ) -> None:  # fmt: skip
        self._optimizer, self._names = weakref.ref(optimizer), names
        self._set, self._every = process_set, every
        number = next(_alone) if number is None else number
        self._name = f"hashes.{number}"
        set_id = process_set.process_set_id
        ids = ([f"set{set_id}"] if set_id else []) + ([str(number)] if number or set_id else [])
        path = pathlib.Path(folder, ".".join(["chain", *ids, "jsonl"])) if folder else None
        named = [name for name, _ in self._parameters()]
        self._chain = Chain(path, settings_line({"optimizer": type(optimizer).__name__}, named))
        self._path = path
        self.are_due = False  # of a step with a closure, which has begun
        self._steps = 0  # before this one, the same on all ranks
        self._rank: Context | None = None  # with whose ranks
        self._unverified: StepDigests | None = None
        self._vote: ops.Handle | None = None

    def __del__(self) -> None:
        self._chain.close()

    def verify(self) -> None:
        """Before a step: that the last gradients had the same hash on all ranks.

        Raises:
            MismatchError: They had not, on any of them.
        """
        vote, unverified = self._vote, self._unverified
        if vote is None or unverified is None or self._rank is None or not self._rank.core.is_open:
            return
        try:
            most, least = ops.synchronize(vote).tolist()
        except HorovodInternalError:
            self._vote = None
            raise
        self._vote = None
        if most == ~least:
            return
        by_rank = allgather(unverified.tensors.view(1, -1), name=f"{self._name}.tensors", process_set=self._set)
        named = [name for name, _ in self._parameters()]
        error = unverified.name_difference(by_rank, named, lambda name: f'the gradient of "{name}"')
        self._chain.write({"differs": str(error).rpartition(";")[0]})
        raise error

    def take(self) -> None:
        """Of the gradients that are there now."""
        self.are_due = False
        rank = basics.find()
        if rank is None:
            return
        if rank is not self._rank:
            self._join(rank)
        step, self._steps = self._steps, self._steps + 1
        if step % self._every:
            return
        self._unverified = digests = StepDigests.of(step, [_vector(*item) for item in self._parameters()])
        self._chain.append(step, digests.line)
        if self._size() > 1:
            numbers = torch.tensor([digests.total, ~digests.total])
            how = ops.reduction_options(ops.ALLREDUCE, ops.Max, 1.0, 1.0, self._set)
            self._vote = ops.start(how, numbers, self._name, ops.IN_PLACE | ops.INTERNAL)

    def _join(self, rank: Context) -> None:
        """Counts on where the rank is that has taken most steps, as those that join an elastic job have taken none."""
        if self._rank is None and self._steps == 0 and self._writes() and self._path is not None:
            with contextlib.suppress(OSError):  # of a run before this one, in which steps had the same numbers
                self._path.replace(f"{self._path}.before")
        self._rank, self._vote = rank, None
        if self._size() > 1:
            steps = torch.tensor(self._steps)
            self._steps = int(allreduce(steps, op=ops.Max, name=f"{self._name}.steps", process_set=self._set))
        self._chain.start(self._writes(), self._steps, {"size": self._size(), "torch": str(torch.__version__)})

    def _size(self) -> int:
        return (self._set.included() and self._set.size()) or 1

    def _writes(self) -> bool:
        return bool(self._set.included()) and self._set.rank() == 0

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        optimizer: Any = self._optimizer()
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                yield self._names.get(parameter) or f"noname.{number}.{place}", parameter


def _vector(name: str, parameter: torch.Tensor) -> torch.Tensor:
    """The gradient in host memory, in C order; without one nothing."""
    gradient = parameter.grad
    if gradient is None:
        return torch.empty(0)
    if gradient.layout is torch.sparse_coo:
        gradient = gradient._values()
    if gradient.device.type != "cpu":
        raise ValueError(f'FARANDOLE_HASH_STEPS: the gradient of "{name}" is on {gradient.device}, not on the CPU')
    return gradient.detach().resolve_conj().resolve_neg().contiguous()
