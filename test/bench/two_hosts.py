"""Allreduce and broadcast between two hosts that this machine plays, over a link of a given rate: run by hand, as root,

    python test/bench/two_hosts.py [RATE] [RANKS_OF_EACH_HOST] [MIB]

(1gbit, 2 and 64). Compares Farandole's collectives, hierarchical and flat, with MPI's in turn, and prints for each
the best time, the median, and what the first host sent and received, in tensors of float32; then what idle ranks use.
"""

import pathlib
import statistics
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "python"))

from hosts import TwoHosts, bytes_over_the_link

ROUNDS = 12


def on_a_rank(mib: float, kinds: list[str]) -> None:
    """What mpirun starts: the slowest rank's time of each round."""
    import numpy as np
    import torch
    from mpi4py import MPI

    import farandole.torch as fl

    fl.init()
    torch.set_num_threads(1)
    world, array = MPI.COMM_WORLD, np.ones(int(mib * 2**20) // 4, np.float32)
    tensor = torch.from_numpy(array)
    run = {
        "allreduce": lambda: fl.allreduce_(tensor, op=fl.Average, name="in place"),
        "fp16 wire": lambda: fl.allreduce(tensor, op=fl.Average, name="fp16", compression=fl.Compression.fp16),
        "bf16 wire": lambda: fl.allreduce(tensor, op=fl.Average, name="bf16", compression=fl.Compression.bf16),
        "broadcast": lambda: fl.broadcast_(tensor, 0, name="broadcast"),
        "MPI_Allreduce": lambda: world.Allreduce(MPI.IN_PLACE, array),
        "MPI_Bcast": lambda: world.Bcast(array, 0),
    }
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    moved = {}
    for _ in range(ROUNDS + 1):
        for kind in kinds:
            array[:] = 1
            world.Barrier()
            before, start = bytes_over_the_link(), time.perf_counter()
            run[kind]()
            times[kind].append(world.allreduce(time.perf_counter() - start, MPI.MAX))
            moved[kind] = [(b - a) / array.nbytes for a, b in zip(before, bytes_over_the_link())]
    for kind in kinds if fl.rank() == 0 else ():
        ms = [1e3 * s for s in times[kind][1:]]
        print(
            f"{kind:14} best {min(ms):9.3f} ms, median {statistics.median(ms):9.3f} ms; "
            f"sent {moved[kind][0]:.2f}, received {moved[kind][1]:.2f}", flush=True,
        )  # fmt: skip
    print(f"rank {fl.rank()}: {100 * idle_share():.2f} % of a core while idle", flush=True)
    fl.shutdown()


def idle_share(seconds: float = 3) -> float:
    """The share of a core that this process uses while nothing is pending: the first rank of a host polls MPI."""
    before = time.process_time()
    time.sleep(seconds)
    return (time.process_time() - before) / seconds


def main() -> None:
    rate, ranks, mib = [*sys.argv[1:], *("1gbit", "2", "64")[len(sys.argv) - 1 :]]
    with tempfile.TemporaryDirectory() as folder, TwoHosts(pathlib.Path(folder), rate) as hosts:
        ours = "allreduce,fp16 wire,bf16 wire,broadcast"
        for title, kinds, variables in [
            ("hierarchical", ours + ",MPI_Allreduce,MPI_Bcast", {}),
            ("flat", ours, {"FARANDOLE_HIERARCHICAL_ALLREDUCE": "0"}),
        ]:
            command = [sys.executable, __file__, "--rank", mib, kinds]
            done = hosts.mpirun(int(ranks), command, **variables)
            print(f"{title}, {mib} MiB, 2 hosts with {ranks} ranks, {rate}:\n{done.stdout}", end="", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        on_a_rank(float(sys.argv[2]), sys.argv[3].split(","))
    else:
        main()
