#!/usr/bin/env bash
# deepspeed 0.19.8, torch 2.13.0 (CPU); needs a C++ compiler and a processor with AVX-512.
#
# Expected: deepspeed.comm.inference_all_reduce() gives what all_reduce() gives, or refuses what its kernel for shared
#   memory does not know.
# Seen: where all ranks are on one host (LOCAL_SIZE, as DeepSpeed's launcher sets it) tensors of float64 and int64 and
#   strided ones come back as each rank's own, without a word; op=MAX gives the sum; a group of two ranks gives the sum
#   of all four. Of contiguous float32 the sum is right. So an integer or float64 tensor under tensor parallelism
#   differs from rank to rank from then on.
# Output seen, rank 0 of 4: float32 [10.0], float64 [1.0], int64 [1], strided [1.0, 1.0], max [10.0], group [10.0]
source "$(dirname "$0")/packages.sh"
install deepspeed==0.19.8 torch==2.13.0 numpy==2.4.6 ninja==1.13.2

export LOCAL_SIZE=4 MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + RANDOM % 20000))
TORCH_EXTENSIONS_DIR=$folder/extensions on_ranks 4 <<'PYTHON'
import os

os.environ["LOCAL_RANK"] = os.environ["RANK"]
import deepspeed
import deepspeed.comm as dist
import torch

deepspeed.init_distributed("gloo", verbose=False)
rank, dtypes = dist.get_rank(), (torch.float32, torch.float64, torch.int64)
pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]


def reduced(tensor, **how):
    dist.inference_all_reduce(tensor, **how)
    return tensor.tolist()


def mine(dtype=torch.float32):
    return torch.tensor([rank + 1]).to(dtype)


found = {str(dtype)[6:]: reduced(mine(dtype)) for dtype in dtypes}
found["strided"] = reduced(torch.full((2, 2), float(rank + 1))[:, 0])
found["max"] = reduced(mine(), op=dist.ReduceOp.MAX)
found["group"] = reduced(mine(), group=pairs[rank // 2])
expected = {"float32": [10.0], "float64": [float(rank + 1)], "int64": [rank + 1], "strided": [float(rank + 1)] * 2}
print(f"rank {rank}: {found}", flush=True)
assert found == expected | {"max": [10.0], "group": [10.0]}
dist.barrier()
PYTHON
