"""One rank of a job whose ranks use different frameworks: it averages named arrays, and gradients of one network.

    python mixed_job.py FRAMEWORK FOLDER [rank to kill]

What a rank got is in FOLDER as an npz file; the errors of a job in which a rank is killed as a text file.
"""

import contextlib
import os
import pathlib
import signal
import sys

import numpy as np

import farandole as fl

DTYPES = "float32 float64 float16 bfloat16 int32 int64 uint8 complex64".split()
SIZES = (1, 7, 1000, 300_000)
FRAMEWORKS = ("numpy", "jax", "torch", "tensorflow", "keras")


def values_of(rank, dtype, size):
    """Of a rank, as an array that NumPy has."""
    values = np.random.default_rng([rank, size]).uniform(1, 100, size)
    return values.astype("float32" if dtype == "bfloat16" else dtype)


def network(seed):
    """Weights of an MLP, equal on all ranks."""
    draw = np.random.default_rng(seed).normal
    return {"w1": draw(size=(4, 8)).astype("float32"), "b1": draw(size=8).astype("float32"),
            "w2": draw(size=(8, 1)).astype("float32")}  # fmt: skip


def batch(rank):
    return np.random.default_rng(rank).normal(size=(16, 4)).astype("float32")


class OfNumpy:
    """How a framework makes arrays, combines them and computes gradients."""

    count = 0  # of calls

    def __init__(self):
        self.ops = fl

    def make(self, values, dtype):
        if dtype != "bfloat16":
            return values
        import ml_dtypes

        return values.astype(ml_dtypes.bfloat16)

    def call(self, kind, array, **options):
        return self.function(kind)(array, **options)

    def function(self, kind):
        """Keras has some of them."""
        return getattr(self.ops, kind, None) or getattr(fl, kind)

    def back(self, array):
        array = np.asarray(array)
        return array.astype("float32") if array.dtype.name == "bfloat16" else array

    def gradients(self, weights, x):
        """Of mean(tanh(x w1 + b1) w2)."""
        hidden = np.tanh(x @ weights["w1"] + weights["b1"])
        back = (1 - hidden**2) * weights["w2"][:, 0] / len(x)
        return {"w1": x.T @ back, "b1": back.sum(0), "w2": hidden.mean(0)[:, None]}


class OfTorch(OfNumpy):
    def __init__(self):
        import torch

        import farandole.torch as hvd

        self.ops, self.torch = hvd, torch

    def make(self, values, dtype):
        return self.torch.from_numpy(values).to(getattr(self.torch, dtype))

    def back(self, array):
        return (array.float() if array.dtype == self.torch.bfloat16 else array).numpy()

    def gradients(self, weights, x):
        given = {name: self.torch.tensor(value, requires_grad=True) for name, value in weights.items()}
        (self.torch.tanh(self.torch.from_numpy(x) @ given["w1"] + given["b1"]) @ given["w2"]).mean().backward()
        return {name: value.grad for name, value in given.items()}


class OfKeras(OfTorch):
    """With torch below it."""

    def __init__(self):
        super().__init__()
        import farandole.keras as hvd

        self.ops = hvd


class OfJax(OfNumpy):
    """In jit, but for every second call."""

    def __init__(self):
        import jax

        import farandole.jax as hvd

        jax.config.update("jax_enable_x64", True)
        self.ops, self.jax = hvd, jax

    def make(self, values, dtype):
        return self.jax.numpy.asarray(values, dtype)

    def call(self, kind, array, **options):
        self.count += 1
        function = self.function(kind)
        if self.count % 2:
            return function(array, **options)
        return self.jax.jit(lambda array: function(array, **options))(array)

    def gradients(self, weights, x):
        def loss(weights):
            return (self.jax.numpy.tanh(x @ weights["w1"] + weights["b1"]) @ weights["w2"]).mean()

        return self.jax.jit(self.jax.grad(loss))(weights)


class OfTensorFlow(OfNumpy):
    """In a graph, but for every second call."""

    def __init__(self):
        import tensorflow as tf

        import farandole.tensorflow as hvd

        self.ops, self.tf = hvd, tf

    def make(self, values, dtype):
        return self.tf.cast(values, dtype)

    def call(self, kind, array, **options):
        self.count += 1
        function = self.function(kind)
        if self.count % 2:
            return function(array, **options)
        return self.tf.function(lambda array: function(array, **options), autograph=False)(array)

    def gradients(self, weights, x):
        given = {name: self.tf.Variable(value) for name, value in weights.items()}
        with self.tf.GradientTape() as tape:
            made = self.tf.reduce_mean(self.tf.tanh(x @ given["w1"] + given["b1"]) @ given["w2"])
        return tape.gradient(made, given)


CLASSES = {"numpy": OfNumpy, "torch": OfTorch, "keras": OfKeras, "jax": OfJax, "tensorflow": OfTensorFlow}


def results(framework, rank, size):
    """By name, what each call gave; each once in jit, or in a graph, where there is such a thing."""
    rows = framework.make(values_of(rank, "float32", 12 * size).reshape(3 * size, 4), "float32")
    for turn in range(2):
        framework.count = turn
        for count in SIZES:
            for dtype in DTYPES:
                name = f"{turn} {dtype} {count}"
                mine = framework.make(values_of(rank, dtype, count), dtype)
                yield name, framework.call("allreduce", mine, name=name)
                yield f"{name} sum", framework.call("allreduce", mine, name=f"{name} sum", op=fl.Sum)
        yield f"{turn} allgather", framework.call("allgather", rows, name=f"{turn} rows")
        yield f"{turn} broadcast", framework.call("broadcast", rows, root_rank=size - 1, name=f"{turn} root's")
        yield f"{turn} reducescatter", framework.call("reducescatter", rows, name=f"{turn} parts")
        yield f"{turn} alltoall", framework.call("alltoall", rows, name=f"{turn} exchange")
        for number, one in enumerate(framework.call("grouped_allreduce", [rows, rows[:2]], name=f"{turn} group")):
            yield f"{turn} group {number}", one
        for name, gradient in sorted(framework.gradients(network(1), batch(rank)).items()):
            yield f"{turn} gradient {name}", framework.call("allreduce", gradient, name=f"{turn} gradient {name}")


def main(kind, folder, killed=None):
    framework = CLASSES[kind]()  # frameworks take seconds to start
    fl.init()
    rank, size = fl.rank(), fl.size()
    got = {name: framework.back(result) for name, result in results(framework, rank, size)}
    np.savez(pathlib.Path(folder, f"{rank}.npz"), **got)
    if killed is not None:
        if rank == int(killed):
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            framework.back(framework.call("allreduce", framework.make(np.ones(4), "float64"), name="after"))
        except Exception as error:
            pathlib.Path(folder, f"{rank}.txt").write_text(f"{type(error).__name__}: {error}")
        with contextlib.suppress(fl.HorovodInternalError):
            fl.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
