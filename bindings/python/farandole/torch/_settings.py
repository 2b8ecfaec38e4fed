"""How the gradients of one optimizer are reduced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from farandole import _work


@dataclass(frozen=True)
class Settings:
    """What optimizers that share a parameter must agree on.

    Attributes:
        parameters: The reduction.
        compression: An object with ``compress`` and ``decompress``; None: ``parameters.wire`` does.
        passes: Backward passes per round.
        complete: "backward" or "step".
        densifies: Sparse gradients travel as dense ones.
        group_count: How many groups to cut the gradients into; 0: by their size.
        overlaps: Gradients are sent during the backward pass; otherwise at its end.
    """

    parameters: _work.Parameters
    compression: Any
    passes: int
    complete: str
    densifies: bool
    group_count: int
    overlaps: bool

    @property
    def is_average(self) -> bool:
        """Whether the result is a mean, which a second backward may be added to."""
        return self.parameters.op == _work.reduction(_work.Average)

    def scale(self, size: int) -> float:
        """What a plain sum over ``size`` ranks is multiplied with to give what gradients become."""
        factor = self.parameters.prescale * self.parameters.postscale
        return factor / size if self.is_average else factor
