"""Digests of a step's results, by which ranks and runs are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from farandole import _core
from farandole.exceptions import MismatchError


class StepDigests(NamedTuple):
    """Numbers of 64 bits of a step's results: of all, and of each tensor."""

    step: int
    total: int
    tensors: torch.Tensor

    @classmethod
    def of(cls, step: int, tensors: Sequence[torch.Tensor]) -> StepDigests:
        """Of tensors in host memory, in C order."""
        numbers = torch.tensor(_core.digests([*tensors]))
        return cls(step, _core.digests([numbers])[0], numbers)

    def line(self) -> dict[str, Any]:
        """As farandole.chain has it."""
        hints = "".join(f"{(number >> 48) & 0xFFFF:04x}" for number in self.tensors.tolist())
        return {"step": self.step, "gradients": f"{self.total & (1 << 64) - 1:016x}", "tensors": hints}

    def name_difference(self, by_rank: torch.Tensor, names: Sequence[str], what: Callable[[str], str]) -> MismatchError:
        """The error that says which tensor is the first that differs, and on which ranks it is alike.

        Args:
            by_rank: The digests of tensors of all ranks. Shape [ranks, tensors].
            names: Of tensors.
            what: Says a tensor by its name.
        """
        differing = (by_rank != by_rank[0]).any(0).nonzero().flatten().tolist()
        name = names[differing[0]]
        alike: dict[int, list[str]] = {}
        for rank, number in enumerate(by_rank[:, differing[0]].tolist()):
            alike.setdefault(number, []).append(str(rank))
        groups = " | ".join(", ".join(group) for group in alike.values())
        reduced = f"{what(name)} was reduced to different values on different ranks"
        text = f"step {self.step}: {reduced}; ranks alike: {groups}"
        error = MismatchError(f"{text}; {len(differing)} of {len(names)} tensors differ")
        error.tensor = name
        return error
