"""Small models and single-process references shared by the tests."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

import farandole.torch as fl

MakeOptimizer = Callable[[list], torch.optim.Optimizer]


class Branched(nn.Module):
    """A network with a branch that a batch may skip."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 8, dtype=dtype)
        self.branch = nn.Linear(8, 8, dtype=dtype)
        self.head = nn.Linear(8, 3, dtype=dtype)
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype) / 3)

    def forward(self, x: torch.Tensor, use_branch: bool = True) -> torch.Tensor:
        hidden = torch.tanh(self.trunk(x))
        if use_branch:
            hidden = hidden + torch.tanh(self.branch(hidden))
        return self.head(hidden)


def batch(rank: int, step: int, dtype: torch.dtype = torch.float64) -> tuple:
    """Inputs [5, 6] and targets [5, 3] of one rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    shapes = [(5, 6), (5, 3)]
    return tuple(torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)


def loss_of(model: nn.Module, data: tuple, use_branch: bool = True) -> torch.Tensor:
    """Mean squared error."""
    inputs, targets = data
    return (model(inputs, use_branch) - targets).square().mean()


def train_alone(
    model: nn.Module,
    make: MakeOptimizer,
    ranks: int,
    steps: int,
    uses_branch: Callable[[int, int], bool] = lambda rank, step: True,
    dtype: torch.dtype = torch.float64,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Trains one replica on all ranks' batches; gives the last gradients and the weights."""
    optimizer = make(list(model.parameters()))
    gradients: list[torch.Tensor] = []
    for step in range(steps):
        optimizer.zero_grad()
        losses = [
            loss_of(model, batch(rank, step, dtype), uses_branch(rank, step))
            for rank in range(ranks)
        ]
        (sum(losses) / ranks).backward()
        gradients = [copied(p.grad) for p in model.parameters()]
        optimizer.step()
    return gradients, [p.detach().clone() for p in model.parameters()]


def train_rank(
    model: nn.Module,
    make: MakeOptimizer,
    rank: int,
    steps: int,
    uses_branch: Callable[[int, int], bool] = lambda rank, step: True,
    dtype: torch.dtype = torch.float64,
    **arguments: object,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """One rank's part of the same training; gives its last gradients and its weights."""
    fl.broadcast_parameters(model.state_dict())
    optimizer = fl.DistributedOptimizer(
        make(list(model.parameters())), model.named_parameters(), **arguments
    )
    gradients: list[torch.Tensor] = []
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, batch(rank, step, dtype), uses_branch(rank, step)).backward()
        gradients = [copied(p.grad) for p in model.parameters()]
        optimizer.step()
    return gradients, [p.detach().clone() for p in model.parameters()]


def copied(grad: torch.Tensor | None) -> torch.Tensor:
    """A copy of a gradient; an empty tensor for None."""
    return torch.empty(0) if grad is None else grad.clone()


def scrambled(model: nn.Module, rank: int) -> nn.Module:
    """A copy whose weights are rank 0's only after a broadcast."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(rank)
    return model


def parameter(*values: float) -> nn.Parameter:
    """A vector of weights."""
    return nn.Parameter(torch.tensor(values))


def wrapped(*parameters: nn.Parameter, lr: float = 1.0, **arguments: object) -> torch.optim.SGD:
    """A distributed SGD over parameters named p0, p1, ..."""
    named = [(f"p{i}", p) for i, p in enumerate(parameters)]
    return fl.DistributedOptimizer(torch.optim.SGD(parameters, lr=lr), named, **arguments)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}


class Halved:
    """A compression class of a user's own: sends x / 2 as float64; keeps the dtype as context."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        return tensor.double() / 2, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
        return (tensor * 2).to(ctx)
