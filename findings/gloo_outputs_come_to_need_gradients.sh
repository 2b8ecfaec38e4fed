#!/usr/bin/env bash
# torch 2.13.0, backend gloo (CPU).
#
# Expected: torch.distributed's collectives are not recorded by autograd: a plain output tensor stays plain,
#   whatever the
#   input is.
# Seen: it depends on the collective. With an input that has a grad_fn, the plain output of reduce_scatter_tensor has
#   requires_grad and a grad_fn of a copy, so a loss of it has a backward pass with wrong gradients (no sum over ranks);
#   the output of all_reduce on a detached copy, or of broadcast, stays plain.
# Output seen, two ranks: reduce_scatter_tensor: requires_grad True, grad_fn CopyBackwards; broadcast: False
source "$(dirname "$0")/packages.sh"
install torch==2.13.0 numpy==2.4.6

on_ranks 2 <<'PYTHON'
import os
import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method="file://" + os.environ["MEET"], rank=rank, world_size=2)
x = torch.ones(4, requires_grad=True)
out = torch.zeros(2)
dist.reduce_scatter_tensor(out, x.tanh())
plain = x.tanh().detach()
dist.broadcast(plain, 0)
print(f"rank {rank}: requires_grad {out.requires_grad}, {type(out.grad_fn).__name__}; broadcast {plain.requires_grad}")
assert out.requires_grad and type(out.grad_fn).__name__ == "CopyBackwards"
assert not plain.requires_grad
out.sum().backward()
print(f"rank {rank}: gradient {x.grad.tolist()}")
dist.destroy_process_group()
PYTHON
