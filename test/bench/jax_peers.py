"""Collectives and training steps within jax.jit beside the NumPy call, mpi4jax and JAX's own collectives over gloo.

    mpirun -np 2 python test/bench/jax_peers.py            # farandolerun -np 2: without mpi4jax

Each rank is bound to a core. All take turns in one process, in another order in each round, and each round's figure is
the median of its calls on the slower rank; printed is the median of the rounds. A call lasts until its result is there.
"numpy" is farandole.allreduce of a NumPy array; "jit" is a program that adds 1. A step is that of an MLP: "alone"
exchanges nothing; after "barrier", which does the same, the ranks meet by an allreduce of 4 bytes, as they must to
exchange anything; the others average the gradients, farandole through DistributedOptimizer. In parentheses: by the time
of the NumPy call, or of "barrier".
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import itertools
import os
import random
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import farandole

farandole.init()
CORES = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, {CORES[farandole.rank() % len(CORES)]})  # before JAX counts them

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

import farandole.jax as hvd  # noqa: E402

Call = Callable[[], Any]
QUIET_S = 0.12  # after which farandole's engine sleeps
MODELS = {"small": (2, 64, 1), "large": (2582, 2582, 2582, 2582)}


def connect() -> Any:
    """A mesh of one device of each rank, over which JAX uses gloo."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    address = farandole.broadcast_object(address)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, farandole.size(), farandole.rank())
    return jax.make_mesh((farandole.size(),), ("ranks",))


def mpi_sum(x: jax.Array) -> jax.Array:
    import mpi4jax
    from mpi4py import MPI

    return mpi4jax.allreduce(x, op=MPI.SUM, comm=MPI.COMM_WORLD)


def over_ranks(function: Callable[..., Any], mesh: Any, inputs: Any, outputs: Any) -> Callable[..., Any]:
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False))


def allreduces(size_bytes: int, mesh: Any) -> dict[str, Call]:
    """Sums of ones."""
    ones = np.ones(size_bytes // 4, np.float32)
    mine = jnp.asarray(ones)
    split = PartitionSpec("ranks")
    of_all = jax.make_array_from_process_local_data(NamedSharding(mesh, split), ones)
    add = jax.jit(lambda x: x + 1)
    ours = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))
    mpis = jax.jit(mpi_sum)
    gloos = over_ranks(lambda x: jax.lax.psum(x, "ranks"), mesh, split, split)
    return {
        "jit": lambda: add(mine), "numpy": lambda: farandole.allreduce(ones, op=farandole.Sum, name="numpy"),
        "farandole": lambda: ours(mine), "mpi4jax": lambda: mpis(mine),
        "gloo": lambda: gloos(of_all).addressable_shards[0].data,
    }  # fmt: skip


def loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
    for weights in params[:-1]:
        x = jax.nn.relu(x @ weights)
    return jnp.mean(jnp.square(x @ params[-1]))


def steps(model: str, mesh: Any) -> dict[str, Call]:
    """Each trains parameters of its own, which it returns."""
    rows, optimizer = (64, optax.adam(1e-2)) if model == "small" else (32, optax.sgd(1e-3))
    draw, sizes = np.random.default_rng(0), MODELS[model]
    first = [draw.normal(0, a**-0.5, (a, b)).astype(np.float32) for a, b in itertools.pairwise(sizes)]
    inputs = np.random.default_rng(1 + farandole.rank()).normal(size=(rows, sizes[0])).astype(np.float32)
    alike, split = PartitionSpec(), PartitionSpec("ranks")

    def make(average: Callable[[Any], Any], optimizer: Any, wrap: Any = jax.jit, place: Any = jnp.asarray) -> Call:
        def step(params: Any, state: Any, x: Any) -> Any:
            updates, state = optimizer.update(average(jax.grad(loss)(params, x)), state, params)
            return optax.apply_updates(params, updates), state

        jitted = wrap(step)
        params = [place(one) for one in first]
        held = [params, jax.tree.map(place, optimizer.init([jnp.asarray(one) for one in first]))]
        x = jnp.asarray(inputs) if place is jnp.asarray else jax.make_array_from_process_local_data(
            NamedSharding(mesh, split), inputs)  # fmt: skip

        def run() -> Any:
            held[:] = jitted(*held, x)
            return held[0]

        return run

    def apart(gradients: Any) -> Any:
        return gradients

    alone = make(apart, optimizer)
    one = np.zeros(1, np.float32)
    with_barrier = make(apart, optimizer)

    def barrier() -> Any:
        made = jax.block_until_ready(with_barrier())
        farandole.allreduce_(one, name="meeting")
        return made

    return {
        "alone": alone, "barrier": barrier, "farandole": make(apart, hvd.DistributedOptimizer(optimizer)),
        "mpi4jax": make(lambda tree: jax.tree.map(lambda g: mpi_sum(g) / farandole.size(), tree), optimizer),
        "gloo": make(
            lambda tree: jax.lax.pmean(tree, "ranks"), optimizer,
            lambda step: over_ranks(step, mesh, (alike, alike, split), alike),
            lambda one: jax.make_array_from_process_local_data(NamedSharding(mesh, alike), np.asarray(one)),
        ),
    }  # fmt: skip


def measure(calls: dict[str, Call], count: int, rounds: int) -> dict[str, float]:
    """Seconds."""
    found: dict[str, list[float]] = {who: [] for who in calls}
    for number in range(rounds + 1):  # the first one compiles
        for who in random.Random(number).sample(list(calls), len(calls)):
            farandole.barrier()
            time.sleep(QUIET_S)
            times = []
            for _ in range(count if number else 3):
                begin_s = time.perf_counter()
                jax.block_until_ready(calls[who]())
                times.append(time.perf_counter() - begin_s)
            median = np.array([statistics.median(times)])
            found[who].append(float(farandole.allreduce(median, op=farandole.Max, name="slower")[0]))
    return {who: statistics.median(seconds[1:]) for who, seconds in found.items()}


def check(calls: dict[str, Call], names: list[str]) -> None:
    """Exits unless all that exchange give the same."""
    made = {who: [np.asarray(leaf) for leaf in jax.tree.leaves(calls[who]())] for who in names}
    for who, leaves in made.items():
        for leaf, other in zip(leaves, made["farandole"], strict=True):
            if not np.allclose(leaf, other, rtol=1e-3, atol=1e-5):
                raise SystemExit(f"rank {farandole.rank()}: {who} gives {leaf}, farandole {other}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="+", default="4 65536 67108864 small large".split(), help="bytes, models")
    given = parser.parse_args()
    mesh = connect()
    has_mpi = importlib.util.find_spec("mpi4jax") is not None and "OMPI_COMM_WORLD_SIZE" in os.environ
    names = ["farandole", *(["mpi4jax"] if has_mpi else []), "gloo"]
    if farandole.rank() == 0:
        versions = [f"{one} {importlib.metadata.version(one)}" for one in ["jax", *names[1:-1]]]
        print(f"{farandole.size()} ranks, {', '.join(versions)}; us, load {os.getloadavg()[0]:.1f}", flush=True)
    for case in given.cases:
        is_step = case in MODELS
        calls = steps(case, mesh) if is_step else allreduces(int(case), mesh)
        calls = {who: call for who, call in calls.items() if has_mpi or who != "mpi4jax"}
        count = {"large": 3, "small": 100}.get(case, 300 if len(case) < 7 else 3)
        us = {who: seconds * 1e6 for who, seconds in measure(calls, count, given.rounds).items()}
        check(calls, names)
        base = us["barrier" if is_step else "numpy"]
        if farandole.rank() == 0:
            print(f"{case:>9}", *(f"{who} {value:.1f} ({value / base:.2f})" for who, value in us.items()), flush=True)


if __name__ == "__main__":
    main()
