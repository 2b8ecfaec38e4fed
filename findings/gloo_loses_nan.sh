#!/usr/bin/env bash
# torch 2.13.0, backend gloo (CPU).
#
# Expected: all_reduce with MAX or MIN of values of which one is nan gives nan, as torch.maximum does.
# Seen: it depends on which rank has the nan and on where the element lies in the tensor. A check such as "the greatest
#   loss of all ranks is finite" passes with a nan on rank 1 and fails with one on rank 0.
# Output seen, two ranks, rank r contributes r or nan:
#   nan on rank 0: 1 element: nan;     100000 elements: first nan, last 1.0
#   nan on rank 1: 1 element: 0.0;     100000 elements: first 0.0, last nan
# Farandole: nan stays nan in Max and Min, on every rank and place.
source "$(dirname "$0")/packages.sh"
install torch==2.13.0 numpy==2.4.6

on_ranks 2 <<'PYTHON'
import math, os
import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method="file://" + os.environ["MEET"], rank=rank, world_size=2)
assert torch.maximum(torch.tensor(math.nan), torch.tensor(1.0)).isnan()
seen = {}
for with_nan in (0, 1):
    for count in (1, 100_000):
        x = torch.full((count,), math.nan if rank == with_nan else float(rank))
        dist.all_reduce(x, dist.ReduceOp.MAX)
        seen[with_nan, count] = (x[0].item(), x[-1].item())
        print(f"rank {rank}: nan on rank {with_nan}, {count} elements: first {x[0].item()}, last {x[-1].item()}")
assert math.isnan(seen[0, 1][0]) and seen[1, 1][0] == 0.0, seen
assert math.isnan(seen[0, 100_000][0]) and seen[0, 100_000][1] == 1.0, seen
assert seen[1, 100_000][0] == 0.0 and math.isnan(seen[1, 100_000][1]), seen
dist.destroy_process_group()
PYTHON
