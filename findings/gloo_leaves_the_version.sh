#!/usr/bin/env bash
# torch 2.13.0, backend gloo (CPU).
#
# Expected: a collective that writes into a tensor counts as an in-place change, so that autograd refuses a backward
#   pass that still needs the old values ("modified by an inplace operation"), as it does for x.mul_(2).
# Seen: all_reduce (SUM), broadcast and recv leave the tensor's version as it was. backward() takes the new values
#   without an error: exp'(0) = 1 becomes 2. all_reduce with AVG, which divides by an operator, raises the version.
# Output seen, two ranks: versions 0 -> 0 (SUM), 0 -> 0 (broadcast), 0 -> 1 (AVG); gradient 2.0 instead of 1.0
source "$(dirname "$0")/packages.sh"
install torch==2.13.0 numpy==2.4.6

on_ranks 2 <<'PYTHON'
import os
import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method="file://" + os.environ["MEET"], rank=rank, world_size=2)

def change(collective):
    x = torch.ones(2)
    before = x._version
    collective(x)
    return x._version - before

summed = change(dist.all_reduce)
sent = change(lambda x: dist.broadcast(x, 0))
averaged = change(lambda x: dist.all_reduce(x, dist.ReduceOp.AVG))
x = torch.zeros(1, requires_grad=True)
y = x.exp()  # autograd keeps y for the backward pass
with torch.no_grad():
    dist.all_reduce(y)
y.sum().backward()
print(f"rank {rank}: version changes: SUM {summed}, broadcast {sent}, AVG {averaged}; gradient {x.grad.item()}")
assert (summed, sent, averaged) == (0, 0, 1)
assert x.grad.item() == 2.0
y = torch.zeros(1, requires_grad=True).exp()
with torch.no_grad():
    y.mul_(2)
try:
    y.sum().backward()
except RuntimeError as error:
    assert "inplace operation" in str(error)
else:
    raise AssertionError("autograd did not see mul_")
dist.destroy_process_group()
PYTHON
