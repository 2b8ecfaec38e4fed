"""Calls of torch.distributed over Farandole beside gloo, by two ranks in one run, and mpi4py where it is there.

    torchrun --nproc-per-node 2 test/bench/torch_distributed.py
    mpirun -np 2 python test/bench/torch_distributed.py

Prints the time of a call, the median of the fastest tenth of rounds, since others may use the machine, and how many
times as long as over Farandole that is; a ping-pong is one call.
"""

import os
import random
import statistics
import time

import torch
import torch.distributed as dist

import farandole.torch.distributed  # noqa: F401  (registers the backend)

ROUNDS = 30


def calls(group, rank):
    """Name -> one call, and how often a round makes it."""
    small, large, mebibyte = torch.ones(1), torch.ones(4 << 20), torch.ones(1 << 18)
    tiny, given, taken, half = torch.ones(2), torch.ones(4 << 20), torch.empty(4 << 20), torch.empty(2 << 20)

    def ping_pong(tensor):
        (dist.send if rank == 0 else dist.recv)(tensor, 1 - rank, group)
        (dist.recv if rank == 0 else dist.send)(tensor, 1 - rank, group)

    return {
        "all_reduce 4 B": (lambda: dist.all_reduce(small, group=group), 100),
        "all_reduce 16 MiB": (lambda: dist.all_reduce(given, dist.ReduceOp.MAX, group=group), 3),
        "broadcast 1 MiB": (lambda: dist.broadcast(mebibyte, 0, group=group), 20),
        "barrier": (lambda: dist.barrier(group=group), 100),
        "ping-pong 4 B": (lambda: ping_pong(small), 50),
        "ping-pong 16 MiB": (lambda: ping_pong(large), 2),
        "all_to_all_single 4 B": (lambda: dist.all_to_all_single(torch.empty(2), tiny, group=group), 100),
        "all_to_all_single 16 MiB": (lambda: dist.all_to_all_single(taken, given, group=group), 3),
        "all_gather_into_tensor 16 MiB": (lambda: dist.all_gather_into_tensor(taken, half, group=group), 3),
        "reduce_scatter_tensor 16 MiB": (lambda: dist.reduce_scatter_tensor(half, given, group=group), 3),
    }


def mpi_calls(rank):
    from mpi4py import MPI

    small, large, tiny = torch.ones(1).numpy(), torch.ones(4 << 20).numpy(), torch.ones(2).numpy()
    mebibyte, taken, few = torch.ones(1 << 18).numpy(), large.copy(), tiny.copy()
    world = MPI.COMM_WORLD

    def ping_pong(array):
        (world.Send if rank == 0 else world.Recv)(array, 1 - rank)
        (world.Recv if rank == 0 else world.Send)(array, 1 - rank)

    return {
        "all_reduce 4 B": (lambda: world.Allreduce(MPI.IN_PLACE, small), 100),
        "all_reduce 16 MiB": (lambda: world.Allreduce(MPI.IN_PLACE, large, MPI.MAX), 3),
        "broadcast 1 MiB": (lambda: world.Bcast(mebibyte, 0), 20),
        "barrier": (world.Barrier, 100),
        "ping-pong 4 B": (lambda: ping_pong(small), 50),
        "ping-pong 16 MiB": (lambda: ping_pong(large), 2),
        "all_to_all_single 4 B": (lambda: world.Alltoall(tiny, few), 100),
        "all_to_all_single 16 MiB": (lambda: world.Alltoall(large, taken), 3),
    }


def time_of(call, count, meet):
    meet()
    begin_s = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begin_s) / count * 1e6


def main():
    torch.set_num_threads(1)
    has_launcher = "RANK" in os.environ
    dist.init_process_group("farandole", init_method="env://" if has_launcher else "farandole://")
    rank = dist.get_rank()
    assert dist.get_world_size() == 2, "two ranks"
    found = {name: calls(dist.new_group(backend=name), rank) for name in ("farandole", "gloo")}
    if os.environ.get("OMPI_COMM_WORLD_SIZE") == "2":
        found["mpi4py"] = mpi_calls(rank)
    order = random.Random(1)  # the same on all ranks
    if rank == 0:
        print(f"{'us':30}" + "".join(f"{name:>12}" for name in found), flush=True)
    for what in found["farandole"]:
        names = [name for name in found if what in found[name]]
        times = {name: [] for name in names}
        for _ in range(ROUNDS):
            for name in order.sample(names, len(names)):
                times[name].append(time_of(*found[name][what], dist.barrier))
        if rank == 0:
            fast = {name: statistics.median(sorted(times[name])[: ROUNDS // 10]) for name in names}
            line = "".join(f"{fast[name]:12.1f}" if name in fast else f"{'':12}" for name in found)
            beside = ", ".join(f"{name}: {fast[name] / fast['farandole']:.2f} times as long" for name in names[1:])
            print(f"{what:30}{line}   {beside}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
