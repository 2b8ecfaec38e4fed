"""``farandole bench``, also ``python -m farandole.bench``: how fast collectives are here, beside other libraries.

    farandolerun -np 2 farandole bench --sizes 4 64K 16M --peers gloo --json bench.json

All ranks call every library in turn, in random order within each round, with the same tensors in
host memory. These hold small integers, so that every result is known exactly; each is compared, and
a wrong one ends the run. A trial takes as long as its slowest rank; trials in which the kernel
interrupted a rank (``ru_nivcsw``) are dropped unless fewer than a third remain.
docs/performance.md explains the figures.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import math
import os
import pathlib
import platform
import random
import re
import resource
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import farandole

Array = np.ndarray[Any, Any]
Shapes = list[tuple[int, ...]]
Call = Callable[[Any, str], Any]
Row = dict[str, Any]  # of the report

COLLECTIVES = ("allreduce", "broadcast", "allgather", "reducescatter", "alltoall")
DTYPES = ("float32", "float64", "float16", "int32", "int64", "uint8")
_LARGE_BYTES = 4 << 20  # beyond it fewer rounds
#: Engines poll without pause for 1 ms after their last operation, and each 100 us for 100 ms.
_QUIET_S, _LONG_QUIET_S = 0.002, 0.11
_CHECKED_AT_ONCE = 1 << 16  # elements: larger temporary arrays would count as memory of what is measured


class WrongResultError(Exception):
    """A collective gave something else than it should; the message says where, and what."""


# The tensors of well-known models.


def resnet50() -> Shapes:
    """The 161 parameters of ResNet-50 (He et al., "Deep residual learning", 2016)."""
    shapes: Shapes = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolutions = [(width, channels, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            convolutions += [(4 * width, channels, 1, 1)] if block == 0 else []
            shapes += [shape for full in convolutions for shape in (full, full[:1], full[:1])]
            channels = 4 * width
    return [*shapes, (1000, channels), (1000,)]


def _dense(outputs: int, inputs: int) -> Shapes:
    return [(outputs, inputs), (outputs,)]


def bert_large() -> Shapes:
    """The 398 parameters of BERT-large with its heads for pre-training (Devlin et al., 2019)."""
    h, words, norm = 1024, 30522, [(1024,)] * 2
    layer = 4 * _dense(h, h) + norm + _dense(4 * h, h) + _dense(h, 4 * h) + norm
    heads = [(words,), *_dense(h, h), *norm, *_dense(2, h)]
    return [(words, h), (512, h), (2, h), *norm, *24 * layer, *_dense(h, h), *heads]


def gpt2() -> Shapes:
    """The 148 parameters of GPT-2 small (Radford et al., 2019); the output layer has the words'."""
    h, norm = 768, [(768,)] * 2
    layer = norm + _dense(3 * h, h) + _dense(h, h) + norm + _dense(4 * h, h) + _dense(h, 4 * h)
    return [(50257, h), (1024, h), *12 * layer, *norm]


SETS = {"resnet50": resnet50, "bert-large": bert_large, "gpt2": gpt2}


# Libraries.


class Peer(NamedTuple):
    """A library that is timed. Its calls get what ``adapt`` makes of an array, and a name."""

    version: str
    adapt: Callable[[Array], Any]
    barrier: Callable[[], object]
    calls: Sequence[Call]  # blocking, in the order of COLLECTIVES; they give the result
    start: Call  # an allreduce in place; what it gives goes to `wait`
    wait: Callable[[Any], object]


def _into(call: Callable[[Any], object], like: Any, count: int) -> Any:
    """A new array or tensor that ``call`` has filled."""
    is_tensor = hasattr(like, "new_empty")
    out = like.new_empty(count) if is_tensor else np.empty(count, like.dtype)
    call(out)
    return out


def _horovod_like(api: Any, version: str, adapt: Callable[[Array], Any]) -> Peer:
    """Of Horovod and of Farandole, whose functions have the same names and arguments."""
    calls = (
        lambda a, name: api.allreduce_(a, name=name, op=api.Sum),
        lambda a, name: api.broadcast_(a, 0, name=name),
        lambda a, name: api.allgather(a, name=name),
        lambda a, name: api.reducescatter(a, name=name, op=api.Sum),
        lambda a, name: api.alltoall(a, name=name),
    )
    return Peer(
        version, adapt, api.barrier, calls,
        lambda a, name: api.allreduce_async_(a, name=name, op=api.Sum), api.synchronize,
    )  # fmt: skip


def _horovod() -> Peer:
    modules = (importlib.import_module(name) for name in ("torch", "horovod", "horovod.torch"))
    torch, horovod, hvd = modules
    if pathlib.Path(farandole.__file__).parent in pathlib.Path(str(horovod.__file__)).parents:
        raise RuntimeError("the package horovod that is found here is Farandole's own")
    hvd.init()
    if (hvd.rank(), hvd.size()) != (farandole.rank(), farandole.size()):
        raise RuntimeError(f"it takes this for rank {hvd.rank()} of {hvd.size()}")
    return _horovod_like(hvd, horovod.__version__, torch.from_numpy)


def _mpi() -> Peer:
    """MPI through mpi4py. Sets are blocking calls in turn, which are faster than MPI_Iallreduce."""
    MPI, size = importlib.import_module("mpi4py.MPI"), farandole.size()
    comm = MPI.COMM_WORLD.Dup()
    if comm.Get_size() != size:
        raise RuntimeError(f"MPI takes this for a job of {comm.Get_size()} ranks; start it by mpirun")

    calls = (
        lambda a, _: comm.Allreduce(MPI.IN_PLACE, a) or a,
        lambda a, _: comm.Bcast(a, 0) or a,
        lambda a, _: _into(partial(comm.Allgather, a), a, a.size * size),
        lambda a, _: _into(partial(comm.Reduce_scatter_block, a), a, a.size // size),
        lambda a, _: _into(partial(comm.Alltoall, a), a, a.size),
    )
    return Peer(
        MPI.Get_library_version().split(",")[0],
        np.asarray, comm.Barrier, calls, calls[0], lambda _: None,
    )  # fmt: skip


def _gloo() -> Peer:
    """Gloo through torch.distributed, over TCP; the ranks meet at a store of rank 0."""
    torch, dist = (importlib.import_module(name) for name in ("torch", "torch.distributed"))
    rank, size, limit = farandole.rank(), farandole.size(), datetime.timedelta(seconds=60)
    host = "127.0.0.1" if farandole.local_size() == size else socket.gethostname()
    serve = partial(dist.TCPStore, host, 0, size, True, limit, False)
    store, error = _on_all_ranks(serve if rank == 0 else lambda: None)
    if error:
        raise RuntimeError(error)
    host, port = farandole.broadcast_object((host, store.port if store else 0))
    store = store or dist.TCPStore(host, port, size, False, limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    calls = (
        lambda t, _: dist.all_reduce(t) or t,
        lambda t, _: dist.broadcast(t, 0) or t,
        lambda t, _: _into(lambda out: dist.all_gather(list(out.chunk(size)), t), t, len(t) * size),
        lambda t, _: _into(
            lambda out: dist.reduce_scatter(out, list(t.chunk(size))), t, len(t) // size
        ),
        lambda t, _: _into(lambda out: dist.all_to_all_single(out, t), t, len(t)),
    )
    return Peer(
        f"torch {torch.__version__}", torch.from_numpy, dist.barrier, calls,
        lambda t, _: dist.all_reduce(t, async_op=True), lambda work: work.wait(),
    )  # fmt: skip


Peers = dict[str, Peer]
#: How to connect to each, and the module it needs.
PEERS = {"mpi": (_mpi, "mpi4py"), "gloo": (_gloo, "torch.distributed"),
         "horovod": (_horovod, "horovod.torch")}  # fmt: skip


def connect(names: Sequence[str]) -> tuple[Peers, dict[str, str]]:
    """Farandole and those of ``names`` that all ranks have; why each of the others is missing."""
    peers = {"farandole": _horovod_like(farandole, farandole.__version__, np.asarray)}
    missing = dict.fromkeys(names, "one rank exchanges nothing")
    for name in names if farandole.size() > 1 else ():
        make, module = PEERS[name]
        _, missing[name] = _on_all_ranks(partial(importlib.import_module, module))
        if not missing[name]:
            peers[name], missing[name] = _on_all_ranks(make)
    missing = {name: error for name, error in missing.items() if error}
    return {name: peer for name, peer in peers.items() if name not in missing}, missing


def _on_all_ranks(call: Callable[[], Any]) -> tuple[Any, str]:
    """What ``call()`` returns, and the first rank's error if it failed anywhere, else ""."""
    result, error = None, ""
    try:
        result = call()
    except farandole.HorovodInternalError:
        raise
    except Exception as failure:
        error = f"rank {farandole.rank()}: {type(failure).__name__}: {failure}".splitlines()[0]
    return result, next(filter(None, farandole.allgather_object(error)), "")


# Test data.


def _values(rank: int, first: int, count: int) -> Array:
    """What ``rank`` contributes at indices ``first``, ``first + 1``, ...: small integers."""
    period = np.arange(first, first + 7, dtype=np.int32) % 7 + rank % 5
    return np.tile(period, -(-count // 7))[:count]


def _expected(collective: str, first: int, count: int) -> Array:
    """This rank's result, where the larger one of a collective's input and result has ``count``."""
    rank, size = farandole.rank(), farandole.size()
    part = count // size
    if collective == "allreduce":
        return size * _values(0, first, count) + sum(r % 5 for r in range(size))
    if collective == "broadcast":
        return _values(0, first, count)
    if collective == "reducescatter":
        return _expected("allreduce", first + rank * part, part)
    at = first + rank * part if collective == "alltoall" else first
    return np.concatenate([_values(r, at, part) for r in range(size)])


# Cases.


class Case(NamedTuple):
    """What each implementation does with the same tensors."""

    name: str
    collective: str
    size_bytes: int  # as nccl-tests counts: of the larger one of input and result
    calls: int  # that a trial's time is divided by
    fill: Callable[[], object]  # puts this rank's contributions into the tensors
    runs: dict[str, Callable[[], Sequence[Any]]]  # by implementation; give the results
    expected: Sequence[Array]  # what they are, bit by bit
    submit_s: dict[str, list[float]]  # by implementation, of every run: the time to start all


def make_case(
    name: str, collective: str, dtype: str, counts: Sequence[int], peers: Peers, is_set: bool
) -> Case:
    """A collective on tensors of ``counts`` elements.

    Those of a set are all started, then waited for; otherwise one blocking call follows the other.
    """
    rank, shares = farandole.rank(), farandole.size() if collective == "allgather" else 1
    sources = [_values(rank, i % 7, n // shares).astype(dtype) for i, n in enumerate(counts)]
    expected = [_expected(collective, i % 7, n).astype(dtype) for i, n in enumerate(counts)]
    rows = [np.empty_like(source) for source in sources]
    submit_s: dict[str, list[float]] = {who: [] for who in peers}
    size_bytes = sum(counts) * sources[0].itemsize

    def run_of(peer: Peer, taken_s: list[float]) -> Callable[[], Sequence[Any]]:
        call = peer.start if is_set else peer.calls[COLLECTIVES.index(collective)]
        tensors = [(peer.adapt(row), f"bench.{name}.{i * is_set}") for i, row in enumerate(rows)]

        def run() -> Sequence[Any]:
            start_s = time.perf_counter()
            results = [call(*tensor) for tensor in tensors]
            taken_s.append(time.perf_counter() - start_s)
            for handle in results if is_set else ():
                peer.wait(handle)
            return rows if is_set else results

        return run

    def fill() -> None:
        for row, source in zip(rows, sources, strict=True):
            np.copyto(row, source)

    runs = {who: run_of(peer, submit_s[who]) for who, peer in peers.items()}
    if collective == "allreduce":  # the yardstick: as many bytes read and written, in place
        floats = [np.ones(-(-row.nbytes // 4), np.float32) for row in rows]
        runs["rmw"] = lambda: [np.multiply(a, np.float32(1), out=a) for a in floats][:0]
    calls = 1 if is_set else len(rows)
    return Case(name, collective, size_bytes // calls, calls, fill, runs, expected, submit_s)


def optimizer_case(name: str, shapes: Shapes, peers: Peers) -> Case:
    """Backward pass and step of a model that computes nothing: its gradients become ready at once.

    Through DistributedOptimizer, Horovod's too; for gloo through DistributedDataParallel; "bare": without either.
    """
    torch, fl = (importlib.import_module(module) for module in ("torch", "farandole.torch"))
    rank, size, counts = farandole.rank(), farandole.size(), list(map(math.prod, shapes))
    # The mean of size * values is a sum of small integers, which is exact.
    sources = [size * _values(rank, i % 7, n).astype("float32") for i, n in enumerate(counts)]
    expected = [_expected("allreduce", i % 7, n).astype("float32") for i, n in enumerate(counts)]
    gradients = [torch.from_numpy(a).view(s) for a, s in zip(sources, shapes, strict=True)]
    optimizers: list[Any] = []

    def run_of(kind: str) -> Callable[[], Sequence[Any]]:
        parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
        model = torch.nn.Module()
        for i, parameter in enumerate(parameters):
            model.register_parameter(f"{name}{i}", parameter)
            parameter.grad = torch.zeros_like(parameter)  # here, so as not to count as overhead
        model.forward = lambda: parameters
        optimizer = torch.optim.SGD(parameters, lr=0.0)
        optimizers.append(optimizer)
        if kind == "farandole":
            fl.DistributedOptimizer(optimizer, model.named_parameters())
        elif kind == "horovod":
            hvd = importlib.import_module("horovod.torch")
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        elif kind == "gloo":
            model = torch.nn.parallel.DistributedDataParallel(model)

        def step() -> Sequence[Any]:
            torch.autograd.backward(model(), gradients)
            optimizer.step()
            return [p.grad for p in parameters] if kind != "bare" else []

        return step

    def fill() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=False)

    runs = {kind: run_of(kind) for kind in (*peers, "bare") if kind != "mpi"}
    return Case(f"{name} optimizer", "allreduce", 4 * sum(counts), 1, fill, runs, expected, {})


# Measuring.


def measure(case: Case, peers: Peers, rounds: int) -> tuple[list[Row], dict[str, str]]:
    """The rows of a case, and why each implementation that cannot do it is missing. Collective.

    Raises:
        WrongResultError: On all ranks, if a result is wrong on one.
    """
    memory_bytes, missing, wrong = dict.fromkeys(case.runs, 0), dict.fromkeys(case.runs, ""), []
    case.fill()
    for name in [*case.runs] * 2:  # warm up
        if not missing[name]:
            before_bytes = _kib_line("/proc/self/status", "VmRSS")
            trial, missing[name] = _on_all_ranks(partial(_trial, case, name, peers))
            memory_bytes[name] += _kib_line("/proc/self/status", "VmRSS") - before_bytes
            wrong.append(trial[2] if trial else "")
    if missing["farandole"]:
        raise RuntimeError(missing["farandole"])
    names, draws = [name for name in case.runs if not missing[name]], random.Random(0)
    figures = np.zeros((2, len(names), rounds))
    for at in range(rounds):
        for i in draws.sample(range(len(names)), len(names)):
            *figures[:, i, at], found = _trial(case, names[i], peers)
            wrong.append(found)
    wrong = list(filter(None, farandole.allgather_object(next(filter(None, wrong), ""))))
    if wrong:
        raise WrongResultError("\n".join(wrong))
    slowest = farandole.allreduce(figures, op=farandole.Max)
    unable = {name: error for name, error in missing.items() if error}
    return summarize(case, names, slowest, memory_bytes), unable


def _trial(case: Case, name: str, peers: Peers) -> tuple[float, int, str]:
    """Seconds of a call, involuntary context switches of this rank, and what was wrong."""
    case.fill()
    farandole.barrier()
    # No engine shall take a core from the library that comes next.
    quiet_s = _LONG_QUIET_S if case.size_bytes > _LARGE_BYTES else _QUIET_S
    time.sleep(quiet_s)
    if name in peers:
        peers[name].barrier()
    else:
        farandole.barrier()
        quiet_from_s = time.perf_counter() + quiet_s
        while time.perf_counter() < quiet_from_s:  # ranks that wake up would begin apart again
            pass
    switches, start_s = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw, time.perf_counter()
    results = case.runs[name]()
    taken_s = time.perf_counter() - start_s
    switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - switches
    return taken_s / case.calls, switches, _find_wrong(case, name, results)


def _find_wrong(case: Case, name: str, results: Sequence[Any]) -> str:
    head = f"{name}: {case.name}, {case.size_bytes} bytes, is wrong on rank {farandole.rank()}: "
    for i, (got, expected) in enumerate(zip(results, case.expected)):
        result = np.asarray(got).reshape(-1)
        if result.shape != expected.shape:
            return f"{head}tensor {i} has {result.size} elements, expected {expected.size}"
        for begin in range(0, result.size, _CHECKED_AT_ONCE):
            part = slice(begin, begin + _CHECKED_AT_ONCE)
            if (differs := result[part] != expected[part]).any():
                at = begin + int(differs.argmax())
                return f"{head}element {at} of tensor {i} is {result[at]}, expected {expected[at]}"
    return ""


def bus_factor(collective: str, ranks: int) -> float:
    """Bus bandwidth by algorithm bandwidth, as nccl-tests defines it (its doc/PERFORMANCE.md)."""
    factors = {"allreduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0}
    return factors.get(collective, (ranks - 1) / ranks)


def _percentiles(values: Array, is_clean: Array) -> list[float]:
    """10, 50 and 90 %, of clean trials unless these are fewer than a third."""
    kept = values[is_clean] if 3 * is_clean.sum() >= is_clean.size else values
    return [float(value) for value in np.percentile(kept, (10, 50, 90))]


def summarize(case: Case, names: list[str], figures: Array, memory: dict[str, int]) -> list[Row]:
    """Rows of the report. ``figures``: [seconds or context switches, implementation, round]."""
    seconds, is_clean, ours = figures[0], figures[1] == 0, names.index("farandole")
    times = {name: _percentiles(seconds[i], is_clean[i]) for i, name in enumerate(names)}
    rows = []
    for i, name in enumerate(names):
        bandwidth, clean = case.size_bytes / times[name][1] / 1e9, int(is_clean[i].sum())
        submit_s = case.submit_s.get(name) if case.calls == 1 and len(case.expected) > 1 else None
        rows.append({
            "case": case.name, "bytes": case.size_bytes, "implementation": name,
            "seconds": times[name], "algorithm_gb_per_s": bandwidth,
            "bus_gb_per_s": bandwidth * bus_factor(case.collective, farandole.size()),
            "ratio": _percentiles(seconds[i] / seconds[ours], is_clean[i] & is_clean[ours]),
            "share_of_rmw": times["rmw"][1] / times[name][1] if "rmw" in times else None,
            "submit_s": float(np.median(submit_s)) / len(case.expected) if submit_s else None,
            "memory_bytes": memory[name], "clean": clean, "rounds": seconds.shape[1],
            "all_kept": 3 * clean < seconds.shape[1],
        })  # fmt: skip
    return rows


# The machine.


def _kib_line(file: str, key: str) -> int:
    """The bytes that a line such as ``VmRSS: 12 kB`` says."""
    found = re.search(rf"^{key}:\s+(\d+) kB", pathlib.Path(file).read_text(), re.M)
    return int(found.group(1)) << 10 if found else 0


def _fits(needed_bytes: int) -> bool:
    """Whether all ranks have so much memory left, with a quarter to spare. Collective."""
    here = _kib_line("/proc/meminfo", "MemAvailable") // farandole.local_size()
    return bool(farandole.allreduce(np.array([here]), op=farandole.Min)[0] > 1.25 * needed_bytes)


def idle_shares(seconds: float = 1.5) -> list[float]:
    """By rank, the share of a core that its process uses while nothing is pending. Collective."""
    farandole.barrier()
    time.sleep(0.2)
    cpu_s, start_s = time.process_time(), time.monotonic()
    time.sleep(seconds)
    share = (time.process_time() - cpu_s) / (time.monotonic() - start_s)
    return list(map(float, farandole.allgather(np.array([share]))))


def _load() -> float:
    """The highest of all hosts. Collective."""
    return float(farandole.allreduce(np.array([os.getloadavg()[0]]), op=farandole.Max)[0])


def fingerprint(peers: Peers) -> Row:
    """What the figures depend on."""
    cpu = re.search(r"^model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text(), re.M)
    shown = re.compile("FARANDOLE_(?!RANK)|HOROVOD_|MALLOC_|OMP_|OMPI_MCA_(btl|coll|mpi|pml)_")
    return {
        "cpu": cpu.group(1) if cpu else platform.machine(), "cores": os.cpu_count(),
        "cores_of_rank_0": len(os.sched_getaffinity(0)),
        "ranks": farandole.size(), "hosts": farandole.cross_size(), "kernel": platform.release(),
        "python": platform.python_version(), "numpy": np.__version__,
        "versions": {name: peer.version for name, peer in peers.items()},
        "settings": {k: v for k, v in sorted(os.environ.items()) if shown.match(k)},
    }  # fmt: skip


# The report.


def _say(text: str) -> None:
    if farandole.rank() == 0:
        print(text, flush=True)


def _time(seconds: float) -> str:
    return f"{1e6 * seconds:.1f} us" if seconds < 1e-3 else f"{1e3 * seconds:.2f} ms"


HEADER = (f"  {'':<11}{'p50':>9} {'(p10-p90)':<23}{'algbw':>7}{'busbw':>7}"
          f"  {'ratio (p10-p90)':<18}{'of rmw':>6}{'MiB':>7}  clean")  # fmt: skip


def as_line(row: Row) -> str:
    """A row of the table."""
    times, ratio, share = [_time(s) for s in row["seconds"]], row["ratio"], row["share_of_rmw"]
    return (
        f"  {row['implementation']:<10}{times[1]:>10} {f'({times[0]}-{times[2]})':<23}"
        f"{row['algorithm_gb_per_s']:7.2f}{row['bus_gb_per_s']:7.2f}"
        f"  {f'{ratio[1]:.2f} ({ratio[0]:.2f}-{ratio[2]:.2f})':<18}"
        f"{'' if share is None else f'{share:.0%}':>6}{row['memory_bytes'] / 2**20:7.1f}"
        f"  {row['clean']}/{row['rounds']}{', all kept' * row['all_kept']}"
        + (f", submit {_time(row['submit_s'])}" if row["submit_s"] else "")
    )


def comparison(rows: Sequence[Row]) -> str:
    """By the first collective, how fast Farandole is beside each other library, by median ratios."""
    first = [row for row in rows if row["case"] == rows[0]["case"]]
    parts = []
    for who in dict.fromkeys(row["implementation"] for row in first):
        if who not in ("farandole", "rmw", "bare"):
            own = [row for row in first if row["implementation"] == who]
            ends = [own[0], *own[1:][-1:]]
            times = [f"{row['ratio'][1]:.2f} times as fast as {who} at {_in_units(row['bytes'])}" for row in ends]
            parts.append(" and ".join(times))
    return f"{first[0]['case']}: Farandole is {'; '.join(parts)}." if parts else ""


def _in_units(size_bytes: int) -> str:
    text = _as_size(size_bytes)
    return f"{text[:-1]} {text[-1]}iB" if text[-1].isalpha() else f"{text} bytes"


#: In a picture: what a row is called, and its colour, the same in all panels and in docs/drawings.py.
_LOOKS = {
    "farandole": ("Farandole", "#1f77b4"), "mpi": ("MPI", "#ff7f0e"), "gloo": ("gloo", "#2ca02c"),
    "horovod": ("Horovod", "#d62728"), "rmw": ("yardstick: NumPy scales\nas many bytes in place", "#8c959f"),
    "bare": ("yardstick: the step\nof one process alone", "#8c959f"),
}  # fmt: skip


def draw(rows: Sequence[Row], path: str) -> None:
    """A panel for each case into an image file: bars of times; over several sizes, lines of bandwidths."""
    cases: dict[str, list[Row]] = {}
    for row in rows:
        cases.setdefault(row["case"], []).append(row)
    is_swept = [len({row["bytes"] for row in own}) > 1 for own in cases.values()]
    heights = [3.6 if swept else 0.9 + 0.42 * len(own) for swept, own in zip(is_swept, cases.values())]
    matplotlib = importlib.import_module("matplotlib.figure")
    figure = matplotlib.Figure(figsize=(8.6, sum(heights)), layout="constrained")
    panels = figure.subplots(len(cases), squeeze=False, height_ratios=heights)[:, 0]
    for axes, (case, own), swept in zip(panels, cases.items(), is_swept, strict=True):
        axes.spines[["top", "right"]].set_visible(False)
        if swept:
            _draw_lines(axes, case, own)
        else:
            _draw_bars(axes, case, own)
    figure.savefig(path)


def _draw_bars(axes: Any, case: str, rows: Sequence[Row]) -> None:
    """The median times of one size, thin lines from 10 to 90 %."""
    is_long = max(row["seconds"][1] for row in rows) >= 1e-3
    unit, scale = ("milliseconds", 1e3) if is_long else ("microseconds", 1e6)
    times = [[scale * s for s in row["seconds"]] for row in rows]
    looks = [_LOOKS[row["implementation"]] for row in rows]
    bars = axes.barh(range(len(rows)), [t[1] for t in times], 0.72, color=[colour for _, colour in looks])
    axes.hlines(range(len(rows)), [t[0] for t in times], [t[2] for t in times], "#24292f", linewidth=1)
    for bar, (_, middle, high) in zip(bars, times):
        axes.annotate(f"{middle:.3g}", (high, bar.get_y() + 0.36), (5, 0), va="center", textcoords="offset points")
    axes.set_yticks(range(len(rows)), [name for name, _ in looks])
    axes.margins(x=0.12)
    axes.invert_yaxis()
    axes.set_title(f"{_in_words(case, rows[0]['bytes'])}: {unit}", loc="left", fontsize=11)


def _in_words(case: str, size_bytes: int) -> str:
    model = case.removesuffix(" optimizer")
    if model not in SETS:
        return f"{case} at once" if case[0].isdigit() else f"{case}, {_as_size(size_bytes)} bytes"
    gradients = f"{model}'s gradients ({size_bytes / 2**20:.0f} MiB)"
    if model != case:
        return f"backward() and step(), {gradients} ready at once"
    return f"{gradients}, all started, then waited for"


def _draw_lines(axes: Any, case: str, rows: Sequence[Row]) -> None:
    """Bus bandwidths by size."""
    for who in dict.fromkeys(row["implementation"] for row in rows):
        name, colour = _LOOKS[who]
        own = [row for row in rows if row["implementation"] == who]
        style = "--" if who == "rmw" else "o-"
        speeds = [row["bus_gb_per_s"] for row in own]
        axes.loglog([row["bytes"] for row in own], speeds, style, color=colour, label=name)
    ticks = sorted({row["bytes"] for row in rows})
    axes.set_xticks(ticks, [_as_size(tick) for tick in ticks])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_title(f"{case}: bus bandwidth by size, GB/s; higher is better", loc="left", fontsize=11)
    axes.grid(axis="y", color="#eaeef2")
    axes.legend(frameon=False)


def _as_size(size_bytes: int) -> str:
    """As ``--sizes`` takes it."""
    power = min(3, (size_bytes.bit_length() - 1) // 10)
    return f"{size_bytes / (1 << 10 * power):g}{' KMG'[power]}".strip()


# The command.


def parse_size(text: str) -> int:
    """Bytes of "4", "64K", "16MiB" or "1G"; units are powers of 1024."""
    found = re.fullmatch(r"([1-9]\d*)([KMG]?)(?:i?B)?", text, re.I)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 4, 64K, 16M or 1G")
    return int(found.group(1)) << 10 * " KMG".index(found.group(2).upper() or " ")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; exits with 2 after a message where they are wrong."""
    about = "Times collectives on tensors in host memory, beside other libraries. All ranks run it."
    parser = argparse.ArgumentParser(prog="farandole bench", description=about)
    sizes = [4, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20]
    add = parser.add_argument
    add("--sizes", nargs="*", type=parse_size, default=sizes, help="such as 4 64K 16M; or none")
    add("--dtypes", nargs="+", choices=DTYPES, default=["float32"])
    add("--collectives", nargs="+", choices=COLLECTIVES, default=["allreduce"])
    add("--sets", nargs="+", choices=SETS, default=[], help="the tensors of a model, all at once")
    add("--peers", nargs="*", choices=PEERS, default=["mpi", "gloo"], help="other libraries")
    add("--rounds", type=int, help="default: 25, beyond 4 MiB 9")
    add("--latency", action="store_true", help="4 bytes blocking, and 200 times 256 bytes at once")
    add("--submit", action="store_true", help="200 times 256 bytes: what it costs to start one")
    add("--json", metavar="FILE", help="write the report with all figures")
    add("--png", metavar="FILE", help="draw the times, and bandwidths by size; needs matplotlib")
    arguments = parser.parse_args(argv)
    if arguments.rounds is not None and arguments.rounds < 1:
        parser.error(f"argument --rounds: {arguments.rounds} is less than 1")
    return arguments


def cases(arguments: argparse.Namespace, peers: Peers, missing: Row) -> Iterator[Case]:
    """What is to be measured, made when its turn comes; what cannot be is put into ``missing``."""
    size, sizes = farandole.size(), arguments.sizes
    if arguments.latency and 4 not in sizes:
        sizes = [4, *sizes]
    for dtype in arguments.dtypes:
        item = np.dtype(dtype).itemsize
        if size > {"float16": 200, "uint8": 25}.get(dtype, 1 << 20):
            missing[dtype] = f"sums of the test data over {size} ranks do not fit into it"
            continue
        for collective in arguments.collectives:
            unit = 1 if collective in ("allreduce", "broadcast") else size
            for size_bytes in sizes:
                count = max(1, size_bytes // item // unit) * unit
                counts = [count] * max(1, min(100, (1 << 20) // (count * item)))
                yield make_case(f"{collective} {dtype}", collective, dtype, counts, peers, False)
    if arguments.latency or arguments.submit:
        yield make_case("200 x 256 bytes", "allreduce", "float32", [64] * 200, peers, True)
    has_torch = not _on_all_ranks(partial(importlib.import_module, "torch"))[1]
    for name in arguments.sets:
        shapes = SETS[name]()
        counts = list(map(math.prod, shapes))
        in_set = partial(make_case, name, "allreduce", "float32", counts, peers, True)
        in_optimizer = partial(optimizer_case, name, shapes, peers)
        for title, make, copies in ((name, in_set, 4), (f"{name} optimizer", in_optimizer, 10)):
            needed_bytes = copies * 4 * sum(counts)
            if make is in_optimizer and not has_torch:
                missing[title] = "torch cannot be imported"
            elif not _fits(needed_bytes):
                missing[title] = f"{needed_bytes >> 20} MiB per rank do not fit into memory"
            else:
                yield make()


def run(arguments: argparse.Namespace) -> Row:
    """Measures, prints on rank 0 what it finds, and returns the report. Collective."""
    if farandole.size() == 1:
        _say("one rank exchanges nothing: farandolerun -np 2 farandole bench")
    load, idle = _load(), idle_shares()
    peers, missing = connect(arguments.peers)
    report: Row = {"fingerprint": fingerprint(peers) | {"load_before": load}, "idle_share": idle}
    report |= {"rows": [], "missing": missing}
    _say("\n".join(f"{key}: {value}" for key, value in report["fingerprint"].items()))
    _say("idle share of a core, by rank: " + " ".join(f"{share:.2%}" for share in idle))
    for case in cases(arguments, peers, missing):
        rounds = arguments.rounds or (9 if case.size_bytes > _LARGE_BYTES else 25)
        rows, unable = measure(case, peers, rounds)
        missing |= {f"{who}, {case.name}": why for who, why in unable.items()}
        if case.name != (report["rows"] or [{"case": ""}])[-1]["case"]:
            _say(f"\n{case.name}\n{HEADER}")
        _say("\n".join([f" {case.size_bytes:,} bytes", *map(as_line, rows)]))
        report["rows"] += rows
    report["fingerprint"]["load_after"] = _load()
    _say(f"\nload_after: {report['fingerprint']['load_after']:.2f}")
    _say("".join(f"not measured: {what}: {why}\n" for what, why in missing.items()))
    _say(comparison(report["rows"]))
    if "gloo" in peers:
        importlib.import_module("torch.distributed").destroy_process_group()
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code: 1 for a wrong result or an unwritable file."""
    words = sys.argv[1:] if argv is None else argv
    rank = os.environ.get("RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or "0"
    if rank != "0" and {"-h", "--help"} & set(words):
        return 0  # rank 0 says it for all
    arguments = parse_arguments(words)
    farandole.init()
    is_writer, report = farandole.rank() == 0, {}
    paths = [path for path in (arguments.json, arguments.png) if path and is_writer]
    _, error = _on_all_ranks(lambda: [open(path, "a") for path in paths])  # noqa: SIM115 (only tried)
    try:
        report = {} if error else run(arguments)
    except WrongResultError as wrong:
        error = str(wrong)
    if error and is_writer:
        print(f"farandole bench: {error}", file=sys.stderr)
    if report and is_writer and arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")
    if report and is_writer and arguments.png:
        try:
            draw(report["rows"], arguments.png)
        except ImportError:
            print(f"{arguments.png} was not drawn: matplotlib cannot be imported", file=sys.stderr)
    return 1 if error else 0


if __name__ == "__main__":
    sys.exit(main())
