#!/usr/bin/env bash
# accelerate 1.15.0, torch 2.13.0 (CPU).
#
# Expected: in a process whose torch.distributed has been initialised with two ranks, Accelerator() uses that group, or
#   refuses it.
# Seen: without the variables that torchrun sets it says num_processes = 1 and "NO" distribution: each rank trains
#   alone,
#   with all of the data, without a word and with exit code 0. With these variables the same program has two processes.
# Output seen, both ranks: world size 2, num_processes 1; with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_*: num_processes 2
source "$(dirname "$0")/packages.sh"
install accelerate==1.15.0 torch==2.13.0 numpy==2.4.6

on_ranks 2 <<'PYTHON'
import os

rank = int(os.environ.pop("RANK"))
size = int(os.environ.pop("WORLD_SIZE"))
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import PartialState

dist.init_process_group("gloo", init_method="file://" + os.environ["MEET"], rank=rank, world_size=size)
alone = Accelerator(cpu=True).num_processes
PartialState._reset_state()
os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size),
                  MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # the group exists: nobody listens there
together = PartialState(cpu=True).num_processes
print(f"rank {rank}: world size {dist.get_world_size()}, num_processes {alone}; with torchrun's variables {together}")
assert (dist.get_world_size(), alone, together) == (2, 1, 2)
dist.destroy_process_group()
PYTHON
