#!/usr/bin/env bash
# torch 2.13.0, backend gloo (CPU).
#
# Expected: recv into a tensor of another dtype or number of elements than was sent is an error.
# Seen: four float32 sent to a receiver of four int32 arrive as their bits (1.0 is 1065353216); four elements sent to a
#   receiver of six fill the first four and leave the rest. Both without a word: a pipeline whose stages disagree
#   about a
#   dtype trains on noise.
# Output seen on rank 1: [1065353216] * 4; [1, 1, 1, 1, 7, 7]
source "$(dirname "$0")/packages.sh"
install torch==2.13.0 numpy==2.4.6

on_ranks 2 <<'PYTHON'
import os
import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method="file://" + os.environ["MEET"], rank=rank, world_size=2)
bits, longer = torch.zeros(4, dtype=torch.int32), torch.full((6,), 7.0)
if rank == 0:
    dist.send(torch.ones(4), 1)
    dist.send(torch.ones(4), 1)
else:
    dist.recv(bits, 0)
    dist.recv(longer, 0)
    print(f"rank 1: {bits.tolist()}, {longer.tolist()}")
    assert bits.tolist() == [1065353216] * 4
    assert longer.tolist() == [1, 1, 1, 1, 7, 7]
dist.barrier()
dist.destroy_process_group()
PYTHON
