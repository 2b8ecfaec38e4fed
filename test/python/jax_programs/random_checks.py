"""Random programs of collectives, each the same on all ranks.

The oracle is JAX alone: the same program under ``vmap`` with an axis of ranks, whose collectives are those of lax.
"""

import os
import random

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import farandole.jax as hvd

#: The first seed, and how many.
SEEDS = os.environ.get("FARANDOLE_TEST_PROGRAMS", "0 6")


class Alone:
    """Of all ranks' values in one process, under vmap."""

    def __init__(self, size):
        self.size = size

    def total(self, x):
        return lax.psum(x, "ranks")

    def mean(self, x):
        return lax.pmean(x, "ranks")

    def gathered(self, x):
        return jnp.sum(lax.all_gather(x, "ranks", tiled=True).reshape(self.size, -1) * 0.5, axis=0)

    def scattered(self, x):
        return jnp.tile(lax.psum_scatter(x, "ranks", tiled=True), self.size)

    def exchanged(self, x):
        x = x + 0 * lax.axis_index("ranks")  # lax.all_to_all gives what is alike on all ranks a dimension more
        return lax.all_to_all(x, "ranks", 0, 0, tiled=True)

    def sent(self, x):
        return lax.all_gather(x, "ranks")[self.size - 1]


class Ranks(Alone):
    """Of ranks."""

    def total(self, x):
        return hvd.allreduce(x, op=hvd.Sum)

    def mean(self, x):
        return hvd.allreduce(x)

    def gathered(self, x):
        return jnp.sum(hvd.allgather(x).reshape(self.size, -1) * 0.5, axis=0)

    def scattered(self, x):
        return jnp.tile(hvd.reducescatter(x, op=hvd.Sum), self.size)

    def exchanged(self, x):
        return hvd.alltoall(x)

    def sent(self, x):
        return hvd.broadcast(x, self.size - 1)


KINDS = ("total", "mean", "gathered", "scattered", "exchanged", "sent")


class Program:
    """Of steps that a seed draws; each takes earlier values and gives one more."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        steps = ("plain", "plain", "collective", "collective", "collective", "scan", "cond", "vmap", "remat", "grad",
                 "jit")  # fmt: skip
        self.steps = []
        for number in range(self.draw.randint(3, 14)):
            sources = [self.draw.randrange(number + 1) for _ in range(2)]
            self.steps.append((self.draw.choice(steps), sources, self.draw.choice(KINDS), self.draw.choice(KINDS)))
        self.seed, self.length = seed, self.draw.choice((2, 600))  # few elements run on one thread

    def __call__(self, with_, x):
        values = [x]
        for step, (one, other), kind, second in self.steps:
            first, then = getattr(with_, kind), getattr(with_, second)
            values.append(jnp.sin(getattr(self, step)(values[one], values[other], first, then)))
        return values[1:]

    def plain(self, x, y, first, then):
        return x * jnp.cos(y) + 1

    def collective(self, x, y, first, then):
        return first(x) + y

    def scan(self, x, y, first, then):
        return lax.scan(lambda sum, _: (jnp.sin(first(sum) + then(y)), None), x, None, length=3)[0]

    def cond(self, x, y, first, then):
        return lax.cond(jnp.max(x) > 0.3 if self.seed % 2 else self.seed % 3 > 0, lambda: x, lambda: y) + first(then(y))

    def vmap(self, x, y, first, then):
        return jax.vmap(first)(jnp.stack([x, y])).sum(0)

    def remat(self, x, y, first, then):
        return jax.grad(jax.checkpoint(lambda x: jnp.sum(jnp.sin(first(x * y)))))(x)

    def grad(self, x, y, first, then):
        return jax.grad(lambda x: jnp.sum(jnp.sin(first(x)) * then(y)))(x)

    def jit(self, x, y, first, then):
        inner = jax.jit(lambda x: first(jnp.sin(x)))
        return inner(inner(x) + y)


def inputs(program, size):
    return np.random.default_rng(program.seed).normal(size=(size, program.length * size)).astype(np.float32)


def permuted(results, order):
    return [results[i] for i in order]


def run(seed, rank, size):
    """Two programs in flight at once, which return their results in another order on each rank."""
    programs = [Program(2 * seed), Program(2 * seed + 1)]
    given = [jnp.asarray(inputs(program, size)[rank]) for program in programs]
    orders = [np.random.default_rng([p.seed, rank]).permutation(len(p.steps)) for p in programs]
    jitted = [
        jax.jit(lambda x, program=program, order=order: permuted(program(Ranks(size), x), order))
        for program, order in zip(programs, orders, strict=True)
    ]
    for _ in range(2):
        made = [function(x) for function, x in zip(jitted, given, strict=True)]
    for program, order, results in zip(programs, orders, made, strict=True):
        expected = jax.jit(jax.vmap(lambda x, p=program: p(Alone(size), x), axis_name="ranks"))(inputs(program, size))
        for i, result in zip(order, results, strict=True):
            np.testing.assert_allclose(
                result, expected[i][rank], rtol=2e-3, atol=2e-4, err_msg=f"{seed} {program.steps[i]}"
            )


def check_random_programs(rank, size):
    first, count = (int(number) for number in SEEDS.split())
    for seed in range(first, first + count):
        run(seed, rank, size)
