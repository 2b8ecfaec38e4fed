"""Allreduce and broadcast between two hosts that this machine plays, over a link of a given rate: run by hand, as root,

    python test/bench/two_hosts.py [RATE] [RANKS_OF_EACH_HOST] [MIB]

(1gbit, 2 and 64). Compares Farandole's collectives over MPI and over TCP, hierarchical and flat, with MPI's, gloo's and
what a socket between the hosts takes for as many bytes each way, in turn. Prints for each the best time, the median,
and what the first host sent and received, in tensors of float32; then what idle ranks use.
"""

import pathlib
import socket
import statistics
import sys
import tempfile
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "python"))

from hosts import TwoHosts, bytes_over_the_link

ROUNDS, SMALL_ROUNDS = 12, 1000  # of sizes up to 64 KiB the latter
FIRST_HOST = "10.77.0.1"


def on_a_rank(mib: float, kinds: list[str]) -> None:
    """What mpirun starts: the slowest rank's time of each round."""
    import numpy as np
    import torch
    from mpi4py import MPI

    import farandole.torch as fl

    fl.init()
    torch.distributed.init_process_group(
        "gloo", f"tcp://{FIRST_HOST}:29501", rank=fl.rank(), world_size=fl.size(),
    )  # fmt: skip
    stream = Stream(fl.rank(), fl.size())
    torch.set_num_threads(1)
    world, array = MPI.COMM_WORLD, np.ones(int(mib * 2**20) // 4, np.float32)
    tensor = torch.from_numpy(array)
    run = {
        "allreduce": lambda: fl.allreduce_(tensor, op=fl.Average, name="in place"),
        "fp16 wire": lambda: fl.allreduce(tensor, op=fl.Average, name="fp16", compression=fl.Compression.fp16),
        "bf16 wire": lambda: fl.allreduce(tensor, op=fl.Average, name="bf16", compression=fl.Compression.bf16),
        "int8 wire": lambda: fl.allreduce(tensor, op=fl.Average, name="int8", compression=fl.Compression.int8),
        "broadcast": lambda: fl.broadcast_(tensor, 0, name="broadcast"),
        "MPI_Allreduce": lambda: world.Allreduce(MPI.IN_PLACE, array),
        "MPI_Bcast": lambda: world.Bcast(array, 0),
        "gloo": lambda: torch.distributed.all_reduce(tensor),
        "sockets": lambda: stream.exchange(memoryview(array).cast("B")),
    }
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    moved = {}
    for _ in range(1 + (SMALL_ROUNDS if array.nbytes <= 65536 else ROUNDS)):
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


class Stream:
    """A connection between the first ranks of both hosts; nothing on the others."""

    def __init__(self, rank: int, size: int) -> None:
        self._socket: socket.socket | None = None
        if rank == 0:
            with socket.create_server((FIRST_HOST, 29502)) as server:
                self._socket = server.accept()[0]
        while rank == size // 2 and self._socket is None:
            try:
                self._socket = socket.create_connection((FIRST_HOST, 29502))
            except ConnectionRefusedError:
                time.sleep(0.05)
        if self._socket is not None:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def exchange(self, data: memoryview) -> None:
        """Sends all bytes and receives as many."""
        if self._socket is None:
            return
        sender = None
        if len(data) > 4096:
            sender = threading.Thread(target=self._socket.sendall, args=(data,))
            sender.start()
        else:
            self._socket.sendall(data)
        received, room = 0, bytearray(min(len(data), 2**20))
        while received < len(data):
            received += self._socket.recv_into(room, min(len(room), len(data) - received))
        if sender is not None:
            sender.join()


def idle_share(seconds: float = 3) -> float:
    """The share of a core that this process uses while nothing is pending: the first rank of a host polls MPI."""
    before = time.process_time()
    time.sleep(seconds)
    return (time.process_time() - before) / seconds


def main() -> None:
    rate, ranks, mib = [*sys.argv[1:], *("1gbit", "2", "64")[len(sys.argv) - 1 :]]
    with tempfile.TemporaryDirectory() as folder, TwoHosts(pathlib.Path(folder), rate) as hosts:
        ours = "allreduce,fp16 wire,bf16 wire,int8 wire,broadcast"
        over_tcp = {"FARANDOLE_NETWORK": "tcp", "FARANDOLE_ADDRESS": f"{FIRST_HOST}:29500"}
        flat = {"FARANDOLE_HIERARCHICAL_ALLREDUCE": "0"}
        for title, kinds, variables in [
            ("MPI, hierarchical", ours + ",MPI_Allreduce,MPI_Bcast,gloo,sockets", {}),
            ("MPI, flat", ours, flat),
            ("TCP, hierarchical", ours + ",MPI_Allreduce,gloo,sockets", over_tcp),
            ("TCP, flat", ours, over_tcp | flat),
        ]:
            command = [sys.executable, __file__, "--rank", mib, kinds]
            done = hosts.mpirun(int(ranks), command, GLOO_SOCKET_IFNAME="eth0", **variables)
            print(f"{title}, {mib} MiB, 2 hosts with {ranks} ranks, {rate}:\n{done.stdout}", end="", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        on_a_rank(float(sys.argv[2]), sys.argv[3].split(","))
    else:
        main()
