#!/usr/bin/env bash
# torch 2.13.0: DistributedDataParallel after a backward pass that raised, on all ranks.
#
# Expected: a loop that skips a bad batch (an exception in backward() on every rank, caught, then zero_grad()) trains on
#   with the next batch, as the plain module does; or, if the error's advice is followed, at least then.
# Seen: the wrapped module can never be used again: each later forward pass raises "Expected to have finished reduction
#   in the prior iteration ... parameters that were not used in producing loss", though all are used, and so it does
#   with find_unused_parameters=True, which the message advises, and with static_graph=True. Wrapping anew helps.
# Output seen (both ranks): plain module: 3 of 3 later passes; DDP: 0 of 3, find_unused_parameters 0 of 3, static_graph
#   0 of 3; wrapped anew 3 of 3
source "$(dirname "$0")/packages.sh"
install torch==2.13.0 numpy==2.4.6

on_ranks 2 <<'PYTHON'
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Check(torch.autograd.Function):
    """Passes values on; raises in the backward pass of a bad batch."""

    @staticmethod
    def forward(ctx, x, is_bad):
        ctx.is_bad = is_bad
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.is_bad:
            raise ValueError("bad batch")
        return gradient, None


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)

    def forward(self, x, is_bad):
        return self.second(Check.apply(torch.tanh(self.first(x)), is_bad)).sum()


def train(model, is_bad):
    model.zero_grad()
    model(torch.ones(3, 4), is_bad).backward()


def passes_after_a_bad_batch(model, wrap_anew=lambda model: model):
    train(model, False)
    try:
        train(model, True)
    except ValueError:
        model = wrap_anew(model)
    passed = 0
    for _ in range(3):
        try:
            train(model, False)
            passed += 1
        except RuntimeError as error:
            assert "Expected to have finished reduction in the prior iteration" in str(error)
    return passed


rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=f"file://{os.environ['MEET']}", rank=rank, world_size=size)
found = {"plain": passes_after_a_bad_batch(Model())}
for option in ("broadcast_buffers", "find_unused_parameters", "static_graph"):
    found[option] = passes_after_a_bad_batch(DistributedDataParallel(Model(), **{option: True}))
found["wrapped anew"] = passes_after_a_bad_batch(
    DistributedDataParallel(Model()), lambda model: DistributedDataParallel(model.module)
)
print(f"rank {rank}: passes of 3 after a bad batch: {found}")
assert found == {"plain": 3, "broadcast_buffers": 0, "find_unused_parameters": 0, "static_graph": 0, "wrapped anew": 3}
PYTHON
