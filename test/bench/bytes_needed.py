"""What the bytes of an allreduce within a host need, and the share of it that Farandole reaches.

    mpirun -np 2 --bind-to none python test/bench/bytes_needed.py [rounds]

"bytes" moves what an allreduce of private tensors among P ranks has to move, all ranks at once and without ever
meeting: of each chunk of 256 KiB a rank copies the shards of the others into its slot, which they can read, adds its
own shard of all slots, leaves the sum in its tensor and its slot, and copies the other shards of the result from the
others' slots. So tensors are read and written once, and of N bytes 2 N (P-1)/P come from lines that another core has
written. NumPy copies and adds; a chunk costs it 2 us besides. "rmw" is the yardstick of farandole.bench, which takes
nothing from another core. What a call needs is "bytes" and one meeting, for which the time of 4 bytes stands.
docs/performance.md explains the rest; load and machine belong to the figures.
"""

import itertools
import math
import mmap
import os
import sys
import tempfile
from functools import partial

import numpy as np

import farandole
from farandole import bench

SLOT = 1 << 16  # elements: 256 KiB, the slots of the plane
SLOTS = 4  # of a rank, in turn
MLP = [(2582, 2582), (2582,)] * 3  # that of train_step.py


def shared_slots() -> np.ndarray:
    """[ranks, slots, elements], the same memory on all ranks."""
    size = 4 * farandole.size() * SLOTS * SLOT
    path = ""
    if farandole.rank() == 0:
        file, path = tempfile.mkstemp(dir="/dev/shm")
        os.truncate(file, size)
        os.close(file)
    path = farandole.broadcast_object(path)
    with open(path, "r+b") as opened:
        memory = mmap.mmap(opened.fileno(), size)
    farandole.barrier()
    if farandole.rank() == 0:
        os.unlink(path)
    return np.frombuffer(memory, np.float32).reshape(farandole.size(), SLOTS, SLOT)


def move(slots: np.ndarray, tensor: np.ndarray) -> list[np.ndarray]:
    rank, size = farandole.rank(), farandole.size()
    for number, begin in enumerate(range(0, tensor.size, SLOT)):
        chunk, all_slots = tensor[begin : begin + SLOT], slots[:, number % SLOTS]
        bounds = [len(chunk) * r // size for r in range(size + 1)]
        shards = [slice(*pair) for pair in itertools.pairwise(bounds)]
        others = [r for r in range(size) if r != rank]
        for r in others:
            np.copyto(all_slots[rank, shards[r]], chunk[shards[r]])
        mine = chunk[shards[rank]]
        for r in others:
            np.add(mine, all_slots[r, shards[rank]], out=mine)
        np.copyto(all_slots[rank, shards[rank]], mine)
        for r in others:
            np.copyto(chunk[shards[r]], all_slots[r, shards[r]])
    return []


def cases(peers: bench.Peers):
    make = partial(bench.make_case, collective="allreduce", dtype="float32", peers=peers)
    for size_bytes in (4, 4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20):
        counts = [size_bytes // 4] * max(1, min(100, (1 << 20) // size_bytes))
        yield make(bench._as_size(size_bytes), counts=counts, is_set=False)
    for name, shapes in (("ResNet-50", bench.resnet50()), ("MLP", MLP)):
        yield make(name, counts=list(map(math.prod, shapes)), is_set=True)


def main(rounds: int = 15) -> None:
    farandole.init()
    if farandole.local_size() < farandole.size() or farandole.size() == 1:
        sys.exit("bytes_needed.py: wants two ranks or more, all on one host")
    slots, meeting = shared_slots(), 0.0
    peers, _ = bench.connect([])
    load = os.getloadavg()[0]
    bench._say("| bytes | Farandole | rmw | bytes and a meeting | share of what the bytes need |\n" + 5 * "|---" + "|")
    for case in cases(peers):
        case.runs["bytes"] = partial(move, slots, np.zeros(case.size_bytes * case.calls // 4, np.float32))
        rows, _ = bench.measure(case, peers, rounds)
        times = {row["implementation"]: row["seconds"][1] for row in rows}
        meeting = meeting or times["farandole"]
        needed = times["bytes"] + meeting
        columns = [case.name, *map(bench._time, (times["farandole"], times["rmw"], needed))]
        bench._say("| " + " | ".join([*columns, f"{needed / times['farandole']:.0%}"]) + " |")
    bench._say(f"load: {load:.1f} before, {os.getloadavg()[0]:.1f} after")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
