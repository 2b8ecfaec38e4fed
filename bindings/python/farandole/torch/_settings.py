"""How the gradients of one optimizer are reduced."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from farandole import _core, ops


@dataclass(frozen=True)
class Settings:
    """What optimizers that share a parameter must agree on.

    Attributes:
        options: The reduction.
        compression: An object with ``compress`` and ``decompress``; None: ``options.wire`` does.
        size: How many ranks share the gradients.
        passes: Backward passes per round.
        complete: "backward" or "step".
        densifies: Sparse gradients travel as dense ones.
        group_count: How many groups to cut the gradients into; 0: by their size.
        overlaps: Gradients are sent during the backward pass; otherwise at its end.
    """

    options: _core.Options
    compression: Any
    size: int
    passes: int
    complete: str
    densifies: bool
    group_count: int
    overlaps: bool

    def plain(self, kind: int, op: int = ops.Sum) -> _core.Options:
        """Of a collective among the same ranks."""
        reduction = ops.reduction(op) if kind == ops.ALLREDUCE else 0
        return ops.options(kind, reduction, 1.0, 1.0, -1, 0, self.options.set)

    @cached_property
    def is_average(self) -> bool:
        """Whether the result is a mean, which a second backward may be added to."""
        return self.options.op == ops.reduction(ops.Average)

    @property
    def scale(self) -> float:
        """What a plain sum over the ranks is multiplied with to give what gradients become."""
        factor = self.options.prescale * self.options.postscale
        return factor / self.size if self.is_average else factor
