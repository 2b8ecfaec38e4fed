#!/usr/bin/env bash
# torch 2.13.0, backend gloo (CPU).
#
# Expected: element [i, j] of the result is the sum of the elements [i, j] of all ranks, or tensors of other strides are
#   refused.
# Seen: tensors of equal shape, dense in memory but in another order (here transposed on one rank), are summed as they
#   lie in memory. No error; the values are wrong on both ranks, and the ranks do not even agree.
# Output seen: rank 0 (transposed) [[0, 4, 8], [2, 6, 10]], rank 1 [[0, 2, 4], [6, 8, 10]]; right is
#   [[0, 3, 6], [4, 7, 10]]
source "$(dirname "$0")/packages.sh"
install torch==2.13.0 numpy==2.4.6

on_ranks 2 <<'PYTHON'
import os
import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method="file://" + os.environ["MEET"], rank=rank, world_size=2)
transposed = torch.arange(6.0).reshape(3, 2).t()
plain = torch.arange(6.0).reshape(2, 3)
right = transposed + plain
x = transposed.clone() if rank == 0 else plain.clone()
assert x.shape == (2, 3) and x.stride() == ((1, 2) if rank == 0 else (3, 1))
dist.all_reduce(x)
print(f"rank {rank}: {x.tolist()}, right is {right.tolist()}")
assert x.tolist() == ([[0, 4, 8], [2, 6, 10]] if rank == 0 else [[0, 2, 4], [6, 8, 10]])
assert x.tolist() != right.tolist()
dist.destroy_process_group()
PYTHON
