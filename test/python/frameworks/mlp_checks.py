"""The same network, trained by each framework: on all ranks as one process alone does it on all ranks' examples."""

import os
import signal

import numpy as np

RATE, MOMENTUM, STEPS, ROWS = 0.1, 0.9, 8, 6


def data(size):
    """By step: the examples of all ranks, those of each one behind those of the last."""
    x = np.random.default_rng(1).normal(size=(STEPS, ROWS * size, 5)).astype(np.float32)
    return x, np.tanh(x.sum(2, keepdims=True))


def start():
    """Kernels and biases."""
    draw = np.random.default_rng(2).normal
    shapes = [(5, 8), (8,), (8, 1), (1,)]
    return [(draw(size=shape) / 3).astype(np.float32) for shape in shapes]


def is_as_alone(train, rank, size):
    """Of a function of examples and whether to be distributed, which gives kernels and biases."""
    x, y = data(size)
    own = slice(ROWS * rank, ROWS * (rank + 1))
    found, expected = train(x[:, own], y[:, own], True), train(x, y, False)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), 1e-6, 1e-6)


def check_torch(rank, size):
    import torch

    import farandole.torch as hvd

    def train(x, y, is_distributed):
        model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        for own, value in zip(model.parameters(), start(), strict=True):
            own.data.copy_(torch.from_numpy(value.T))
        optimizer = torch.optim.SGD(model.parameters(), RATE, MOMENTUM)
        if is_distributed:
            optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        for one, goal in zip(torch.from_numpy(x), torch.from_numpy(y), strict=True):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(one), goal).backward()
            optimizer.step()
        return [own.detach() for own in model.parameters()]

    is_as_alone(train, rank, size)


def check_jax(rank, size):
    import jax
    import jax.numpy as jnp
    import optax

    import farandole.jax as hvd

    def loss(params, x, y):
        return jnp.mean((jnp.tanh(x @ params[0] + params[1]) @ params[2] + params[3] - y) ** 2)

    def train(x, y, is_distributed):
        params, optimizer = start(), optax.sgd(RATE, MOMENTUM)
        if is_distributed:
            optimizer = hvd.DistributedOptimizer(optimizer)
            params = hvd.broadcast_parameters(params)
        state = optimizer.init(params)

        @jax.jit
        def step(params, state, x, y):
            updates, state = optimizer.update(jax.grad(loss)(params, x, y), state)
            return optax.apply_updates(params, updates), state

        for one, goal in zip(x, y, strict=True):
            params, state = step(params, state, one, goal)
        return params

    is_as_alone(train, rank, size)


def train_nnx(x, y, is_distributed, before_step=lambda number: None):
    import jax.numpy as jnp
    import optax
    from flax import nnx

    import farandole.jax as hvd

    class Network(nnx.Module):
        def __init__(self, rngs):
            self.hidden, self.out = nnx.Linear(5, 8, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)

        def __call__(self, x):
            return self.out(jnp.tanh(self.hidden(x)))

    model, optimizer = Network(nnx.Rngs(hvd.rank() if is_distributed else 0)), optax.sgd(RATE, MOMENTUM)
    if is_distributed:
        optimizer = hvd.DistributedOptimizer(optimizer)
        nnx.update(model, hvd.broadcast_parameters(nnx.state(model)))
    optimizer = nnx.Optimizer(model, optimizer, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, y):
        gradients = nnx.grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
        optimizer.update(model, gradients)

    for number, (one, goal) in enumerate(zip(x, y, strict=True)):
        before_step(number)
        step(model, optimizer, one, goal)
    return [layer[...] for each in (model.hidden, model.out) for layer in (each.kernel, each.bias)]


def check_flax_nnx(rank, size):
    is_as_alone(train_nnx, rank, size)


def check_keras(rank, size):
    """With the backend that the process has."""
    import keras

    import farandole.keras as hvd

    def train(x, y, is_distributed):
        model = keras.Sequential([keras.Input([5]), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
        model.set_weights(start())
        optimizer = keras.optimizers.SGD(RATE, MOMENTUM)
        optimizer = hvd.DistributedOptimizer(optimizer) if is_distributed else optimizer
        model.compile(optimizer, loss="mse", jit_compile=keras.backend.backend() == "jax")
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)] if is_distributed else []
        rows = [part.reshape(-1, part.shape[2]) for part in (x, y)]
        model.fit(*rows, batch_size=x.shape[1], shuffle=False, verbose=0, callbacks=callbacks)
        return model.get_weights()

    is_as_alone(train, rank, size)


def check_tensorflow(rank, size):
    import tensorflow as tf

    import farandole.tensorflow as hvd

    def train(x, y, is_distributed):
        weights = [tf.Variable(value) for value in start()]
        momenta = [tf.Variable(tf.zeros_like(value)) for value in weights]
        if is_distributed:
            hvd.broadcast_variables(weights, root_rank=0)

        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                made = tf.tanh(x @ weights[0] + weights[1]) @ weights[2] + weights[3]
                loss = tf.reduce_mean((made - y) ** 2)
            tape = hvd.DistributedGradientTape(tape) if is_distributed else tape
            for own, momentum, each in zip(weights, momenta, tape.gradient(loss, weights), strict=True):
                momentum.assign(MOMENTUM * momentum + each)
                own.assign_sub(RATE * momentum)

        for one, goal in zip(x, y, strict=True):
            step(one, goal)
        return weights

    is_as_alone(train, rank, size)


def check_a_killed_rank_is_named_in_nnx(rank, size):
    """In a job of its own; the other frameworks have theirs in their folders."""
    import farandole.jax as hvd

    def kill(number):
        if number == 3 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        with hvd.errors():
            [value.block_until_ready() for value in train_nnx(*data(1), True, kill)]
    except hvd.PeerLostError as error:
        assert error.failed_ranks == (1,) and "rank 1" in str(error), (error.failed_ranks, error)
    else:
        raise AssertionError("no error")
