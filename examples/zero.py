"""Adam whose state is shared out among the ranks (ZeRO, stage 1), compared with plain Adam.

    farandolerun -np 2 python examples/zero.py

Each rank averages a part of the gradient only, by a reducescatter, steps on that part of the
parameters with its part of Adam's moments, and gets the other parts of the new parameters by an
allgather. That moves as many bytes as the allreduce it replaces, and divides the optimizer's memory
by size().

Source: Rajbhandari, Rasley, Ruwase and He, "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", SC20, 2020, doi:10.1109/SC41405.2020.00024.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import nn

import farandole.torch as hvd

STEPS = 20


class Figures(NamedTuple):
    """The largest difference between the models; the bytes of Adam's state, whole and shared out."""

    difference: float
    whole_bytes: int
    part_bytes: int


class ShardedOptimizer:
    """Steps on this rank's part of the parameters, and gathers the other ranks'.

    Args:
        parameters: All of one dtype and on one device, the same on all ranks. They become parts of
            one tensor, and so do their gradients.
        make: Makes the optimizer of a list of parameters; one that treats every element by itself.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    ) -> None:
        parameters = list(parameters)
        with torch.no_grad():
            self._values = torch.cat([parameter.reshape(-1) for parameter in parameters])
        self._gradients = torch.zeros_like(self._values)
        offset = 0
        for parameter in parameters:
            end = offset + parameter.numel()
            parameter.data = self._values[offset:end].view(parameter.shape)
            parameter.grad = self._gradients[offset:end].view(parameter.shape)
            offset = end
        self._part = nn.Parameter(self._values[own_part(offset)])
        self.optimizer = make([self._part])

    def zero_grad(self) -> None:
        """Before every backward pass."""
        self._gradients.zero_()

    @torch.no_grad()
    def step(self) -> None:
        """After it: all ranks then have the same new parameters."""
        self._part.grad = hvd.reducescatter(self._gradients, name="gradients")
        self.optimizer.step()
        self._values.copy_(hvd.allgather(self._part, name="parameters"))


def own_part(elements: int) -> slice:
    """What a reducescatter of so many elements leaves to this rank."""
    few, left_over = divmod(elements, hvd.size())
    begin = hvd.rank() * few + min(hvd.rank(), left_over)
    return slice(begin, begin + few + (hvd.rank() < left_over))


def train(step: Callable[[], None], zero_grad: Callable[[], None], model: nn.Module) -> None:
    """A few steps on made-up data, other data on each rank."""
    generator = torch.Generator().manual_seed(hvd.rank())
    for _ in range(STEPS):
        zero_grad()
        inputs = torch.randn(32, 64, generator=generator)
        (model(inputs) - inputs.roll(1, 1)).square().mean().backward()
        step()


def make_model() -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 257), nn.Tanh(), nn.Linear(257, 64))


def adam(parameters: list[nn.Parameter]) -> torch.optim.Adam:
    """As both use it."""
    return torch.optim.Adam(parameters, lr=0.01)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Memory of its tensors."""
    state = (value for of_one in optimizer.state.values() for value in of_one.values())
    return sum(value.numel() * value.element_size() for value in state if value.dim() > 0)


def compare(model: nn.Module) -> Figures:
    """Trains two copies of the model, which is the same on every rank."""
    plain, sharded = copy.deepcopy(model), copy.deepcopy(model)
    whole = hvd.DistributedOptimizer(adam(list(plain.parameters())), plain.named_parameters())
    train(whole.step, whole.zero_grad, plain)
    parts = ShardedOptimizer(sharded.parameters(), adam)
    train(parts.step, parts.zero_grad, sharded)
    pairs = zip(plain.parameters(), sharded.parameters(), strict=True)
    difference = max((a - b).abs().max().item() for a, b in pairs)
    return Figures(difference, state_bytes(whole), state_bytes(parts.optimizer))


def main() -> int:
    """Prints one line; 1 if the two models differ."""
    hvd.init()
    figures = compare(make_model())
    if hvd.rank() == 0:
        print(
            f"difference={figures.difference:.1e} state_bytes={figures.part_bytes} "
            f"instead_of={figures.whole_bytes} ranks={hvd.size()}"
        )
    return 0 if figures.difference < 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
