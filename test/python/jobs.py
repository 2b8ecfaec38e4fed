"""Every row of the gradients' contract on one to four ranks, with both moments of completion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import farandole.torch as fl
from models import batch, loss_of, scrambled
from ranks import run_threads


@dataclass(frozen=True)
class Job:
    """Ranks as threads and how their optimizers complete rounds.

    Attributes:
        size: Ranks.
        complete: Of DistributedOptimizer.
    """

    size: int
    complete: str = "backward"

    @property
    def mean_rank(self) -> float:
        """The mean of 0, 1, ..., size - 1."""
        return (self.size - 1) / 2

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        """``body(rank)`` on every rank; the results by rank."""
        return run_threads(self.size, body)

    def wrap(self, optimizer: torch.optim.Optimizer, named: Any = None, **arguments: Any) -> Any:
        """A DistributedOptimizer of this job."""
        return fl.DistributedOptimizer(optimizer, named, complete=self.complete, **arguments)

    def sgd(self, *parameters: torch.Tensor, lr: float = 1.0, **arguments: Any) -> Any:
        """A distributed SGD over parameters named p0, p1, ..."""
        named = [(f"p{i}", p) for i, p in enumerate(parameters)]
        return self.wrap(torch.optim.SGD(parameters, lr=lr), named, **arguments)

    def train(self, make: Callable[..., Any], model: Any, sets_to_none: Callable[[int], bool], **arguments: Any) -> Any:
        """The weights on every rank after four steps of an optimizer that ``make`` gives, from a copy of ``model``.

        Args:
            sets_to_none: By the number of the step.
            arguments: Of DistributedOptimizer.
        """

        def body(rank: int) -> list[torch.Tensor]:
            mine = scrambled(model, rank)
            fl.broadcast_parameters(mine.state_dict())
            optimizer = self.wrap(make(list(mine.parameters())), mine.named_parameters(), **arguments)
            for step in range(4):
                optimizer.zero_grad(set_to_none=sets_to_none(step))
                loss_of(mine, batch(rank, step)).backward()
                optimizer.step()
            return [p.detach().clone() for p in mine.parameters()]

        return self.run(body)

    def finish(self, optimizer: Any) -> None:
        """Makes gradients final where backward() does not."""
        if self.complete == "step":
            optimizer.synchronize()


def _name(job: Job) -> str:
    return f"{job.size} ranks, {job.complete}"


_SIZES = (1, 2, 3, 4)
on_all = pytest.mark.parametrize(
    "job", [Job(size, c) for size in _SIZES for c in ("backward", "step")], ids=_name
)
on_all_at_backward = pytest.mark.parametrize("job", [Job(size) for size in _SIZES], ids=_name)
on_several = pytest.mark.parametrize(
    "job", [Job(size, c) for size in _SIZES[1:] for c in ("backward", "step")], ids=_name
)
