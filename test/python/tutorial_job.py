"""A script as tutorials of torch.distributed teach it: collectives, messages, SGD on gradients averaged by hand.

``tutorial_job.py env|spawn|slurm|slurm-file BACKEND [PORT|FILE]`` says where its ranks and their addresses come from:
variables of torchrun or by hand, torch.multiprocessing, Slurm's variables, those and a file that all can read.
"""

import argparse
import hashlib
import os
import subprocess
import sys

import torch
import torch.distributed as dist
from torch import nn

import farandole.torch.distributed  # noqa: F401  (registers the backend)


def collectives(rank, size):
    """What each rank gets of its own: small whole numbers, whose sums are exact."""
    mine, everybody = torch.full((3,), rank + 1.0), dist.new_group(list(range(size)))
    total, first, largest = mine.clone(), mine.clone(), mine.clone()
    dist.all_reduce(total, dist.ReduceOp.SUM, group=everybody)
    dist.broadcast(first, src=0)
    dist.reduce(largest, dst=0, op=dist.ReduceOp.MAX)
    gathered = [torch.empty(3) for _ in range(size)]
    dist.all_gather(gathered, mine)
    at_root = [torch.empty(3) for _ in range(size)] if rank == 0 else None
    dist.gather(mine, at_root, dst=0)
    part = torch.empty(3)
    dist.scatter(part, [torch.full((3,), 10.0 * to) for to in range(size)] if rank == 0 else None, src=0)
    assert total.tolist() == [size * (size + 1) / 2] * 3 and first.tolist() == [1.0] * 3
    assert largest.tolist() == [size if rank == 0 else rank + 1.0] * 3 and part.tolist() == [10.0 * rank] * 3
    for parts in [gathered] if rank else [gathered, at_root]:
        assert [one.tolist() for one in parts] == [[other + 1.0] * 3 for other in range(size)]


def point_to_point(rank, size):
    """A value that goes from rank to rank, and an allreduce round the ring."""
    value = torch.zeros(1)
    if rank > 0:
        dist.recv(value, src=rank - 1)
    value += 1
    if rank < size - 1:
        dist.send(value, dst=rank + 1)
    assert value.item() == rank + 1
    right, left = (rank + 1) % size, (rank - 1) % size
    total = torch.arange(4.0) * (rank + 1)
    passed, received = total.clone(), torch.empty(4)
    for _ in range(size - 1):
        request = dist.isend(passed, right)
        dist.recv(received, left)
        request.wait()
        total += received
        passed, received = received, passed
    both = [dist.P2POp(dist.isend, total, right), dist.P2POp(dist.irecv, received, left)]
    for request in dist.batch_isend_irecv(both):
        request.wait()
    assert total.tolist() == received.tolist() == [size * (size + 1) / 2 * one for one in range(4)]


def train(rank, size):
    """The digest of a model's weights after an epoch; each rank has a part of each batch."""
    torch.manual_seed(7)
    data = torch.utils.data.TensorDataset(torch.randn(64, 20), torch.randint(0, 5, (64,)))
    sampler = torch.utils.data.distributed.DistributedSampler(data, size, rank)
    net = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 5))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5)
    sampler.set_epoch(1)
    for inputs, classes in torch.utils.data.DataLoader(data, batch_size=16 // size, sampler=sampler):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), classes).backward()
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= size
        optimizer.step()
    dist.barrier()
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters())).hexdigest()[:16]


def work():
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    collectives(rank, size)
    point_to_point(rank, size)
    sys.stdout.write(f"weights {train(rank, size)} of {size} ranks\n")  # in one write: ranks may share a pipe
    sys.stdout.flush()
    dist.destroy_process_group()


def spawned(rank, size, backend, address):
    dist.init_process_group(backend, init_method=address, world_size=size, rank=rank)
    work()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local-rank", type=int)  # which torch.distributed.launch gives
    for name in ("how", "backend", "place"):
        parser.add_argument(name, nargs="?" if name == "place" else None)
    options = parser.parse_args()
    how, backend = options.how, options.backend
    if how == "spawn":
        torch.multiprocessing.spawn(spawned, args=(2, backend, f"tcp://127.0.0.1:{options.place}"), nprocs=2)
        return
    if how == "env":
        dist.init_process_group(backend)
    elif how == "slurm":
        os.environ["RANK"], os.environ["WORLD_SIZE"] = os.environ["SLURM_PROCID"], os.environ["SLURM_NTASKS"]
        hosts = subprocess.check_output(["scontrol", "show", "hostnames", os.environ["SLURM_NODELIST"]], text=True)
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = hosts.split()[0], options.place
        dist.init_process_group(backend)
    else:
        rank, size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
        dist.init_process_group(backend, init_method=f"file://{options.place}", world_size=size, rank=rank)
    work()


if __name__ == "__main__":
    main()
