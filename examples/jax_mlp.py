"""Trains a small network with JAX and optax on N ranks, each on its share of the examples.

    farandolerun -np 2 python examples/jax_mlp.py

The data are drawn by a seed. Every rank ends with the same parameters, those of one rank on all examples.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax

import farandole.jax as hvd


def make_data(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Points of a plane and whether they lie within a circle."""
    points = np.random.default_rng(0).uniform(-1, 1, size=(count, 2)).astype(np.float32)
    return points, (np.sum(points**2, axis=1) < 0.6).astype(np.float32)


def make_params(seed: int, width: int = 64) -> dict[str, jax.Array]:
    first, second = jax.random.split(jax.random.key(seed))
    return {
        "hidden": jax.random.normal(first, (2, width)), "bias": jnp.zeros(width),
        "out": jax.random.normal(second, (width,)) / width**0.5,
    }  # fmt: skip


def logits(params: dict[str, jax.Array], points: jax.Array) -> jax.Array:
    return jnp.tanh(points @ params["hidden"] + params["bias"]) @ params["out"]


def loss(params: dict[str, jax.Array], points: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.mean(optax.sigmoid_binary_cross_entropy(logits(params, points), labels))


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a small network with JAX.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=64, help="of each rank")
    arguments = parser.parse_args()

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optax.adam(1e-2))
    params = hvd.broadcast_parameters(make_params(seed=hvd.rank()))
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, points, labels):
        mine, gradients = jax.value_and_grad(loss)(params, points, labels)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, hvd.allreduce(mine, name="loss")

    points, labels = make_data(8192)
    order, size = np.random.default_rng(1), arguments.batch_size
    for _ in range(arguments.steps):
        chosen = order.choice(len(points), size * hvd.size())  # the same on all ranks
        mine = chosen[size * hvd.rank() : size * (hvd.rank() + 1)]
        params, state, mean = step(params, state, points[mine], labels[mine])
    accuracy = jnp.mean((logits(params, points) > 0) == (labels > 0.5))
    if hvd.rank() == 0:
        print(f"loss={mean:.3f} accuracy={accuracy:.3f}")


if __name__ == "__main__":
    main()
