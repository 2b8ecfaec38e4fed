"""Allreduces of float32 whose elements travel as float32, float16 and bfloat16, by turns.

mpirun -np 2 --bind-to none python test/bench/wire_formats.py [MiB] [rounds]

Prints the median time of each, on the slowest rank, and how many times as fast it is as float32.
"""

import statistics
import sys
import time

import torch

import farandole.torch as fl

WIRES = {"float32": fl.Compression.none, "float16": fl.Compression.fp16, "bfloat16": fl.Compression.bf16}


def seconds(x: torch.Tensor, name: str) -> float:
    """One allreduce, on the slowest rank."""
    fl.barrier()
    begin = time.perf_counter()
    fl.allreduce(x, name=name, op=fl.Sum, compression=WIRES[name])
    took = torch.tensor([time.perf_counter() - begin])
    return float(fl.allreduce(took, name="slowest", op=fl.Max))


def main(mebibytes: int = 64, rounds: int = 25) -> None:
    fl.init()
    tensors = {name: torch.zeros(mebibytes << 18) for name in WIRES}
    taken: dict[str, list[float]] = {name: [] for name in WIRES}
    for _ in range(rounds + 2):
        for name, x in tensors.items():
            taken[name].append(seconds(x, name))
    medians = {name: statistics.median(times[2:]) for name, times in taken.items()}
    for name, median in medians.items():
        if fl.rank() == 0:
            print(f"{name:9} {median * 1e3:7.2f} ms  {medians['float32'] / median:.2f}")
    fl.shutdown()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
