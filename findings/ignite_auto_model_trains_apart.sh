#!/usr/bin/env bash
# pytorch-ignite 0.5.5, torch 2.13.0 (CPU).
#
# Expected: idist.auto_model(model) wraps the model in DistributedDataParallel where torch.distributed has two ranks, or
#   says that it cannot.
# Seen: it compares dist.get_backend() with "nccl", "gloo" and "mpi". After init_process_group() without a backend,
#   torch's default, that is "undefined", after "cpu:gloo" it is "cpu:gloo": the model comes back as it is,
#   idist.get_world_size() is 2, the data are split, and each rank trains a model of its own, without a word.
# Output seen, rank 1: gloo: DistributedDataParallel, gradient 0.5; None: Linear, gradient 1.0; cpu:gloo: Linear, 1.0
source "$(dirname "$0")/packages.sh"
install pytorch-ignite==0.5.5 torch==2.13.0 numpy==2.4.6

on_ranks 2 <<'PYTHON'
import os

import ignite.distributed as idist
import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
for backend, wrapped, gradient in (("gloo", True, 0.5), (None, False, rank), ("cpu:gloo", False, rank)):
    meet = f"file://{os.environ['MEET']}-{backend}"
    dist.init_process_group(backend, init_method=meet, rank=rank, world_size=2)
    model = torch.nn.Linear(1, 1, bias=False)
    trained = idist.auto_model(model)
    (trained(torch.ones(1, 1)) * rank).sum().backward()
    print(f"rank {rank}, {backend}: {type(trained).__name__}, gradient {model.weight.grad.item()}")
    assert idist.get_world_size() == 2
    assert isinstance(trained, torch.nn.parallel.DistributedDataParallel) == wrapped
    assert model.weight.grad.item() == gradient
    dist.destroy_process_group()
PYTHON
