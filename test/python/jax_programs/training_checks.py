"""What one rank checks of training: against this process alone on all ranks' examples."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import farandole.jax as hvd

PARAMS = {"in": np.random.default_rng(1).normal(size=(5, 8)), "out": [np.random.default_rng(2).normal(size=(8, 1))]}


def loss(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"][0] - y) ** 2)


def train(optimizer, params, batches):
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, x, y):
        updates, state = optimizer.update(jax.grad(loss)(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    for x, y in batches:
        params, state = step(params, state, x, y)
    return params


def batches(size, rank=None):
    rng, count = np.random.default_rng(3), 8
    own = slice(None) if rank is None else slice(count * rank, count * (rank + 1))
    for _ in range(12):
        x, y = rng.normal(size=(count * size, 5)), rng.normal(size=(count * size, 1))
        yield jnp.float32(x[own]), jnp.float32(y[own])


def is_as_alone(rank, size, optimizer, alone):
    params = jax.tree.map(lambda leaf: jnp.float32(leaf + rank), PARAMS)
    made = train(optimizer, hvd.broadcast_parameters(params), batches(size, rank))
    expected = train(alone, jax.tree.map(jnp.float32, PARAMS), batches(size))
    for one, other in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def check_an_optimizer_trains_as_one_process_on_all_examples(rank, size):
    inner = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))
    is_as_alone(rank, size, hvd.DistributedOptimizer(inner), inner)


def check_several_passes_are_one_step(rank, size):
    optimizer = hvd.DistributedOptimizer(optax.adam(1e-2), backward_passes_per_step=3)
    is_as_alone(rank, size, optimizer, optax.MultiSteps(optax.adam(1e-2), 3))


def check_passes_that_are_no_step_send_nothing(rank, size):
    optimizer = hvd.DistributedOptimizer(optax.sgd(1.0), backward_passes_per_step=2)
    params = {"w": jnp.ones(3)}
    update, state, counts = jax.jit(optimizer.update), optimizer.init(params), []
    for _ in range(4):
        before = hvd.counters()["submissions"]
        updates, state = jax.block_until_ready(update({"w": jnp.full(3, float(rank))}, state))
        counts.append(hvd.counters()["submissions"] - before)
    assert counts == [0, 1, 0, 1]
    np.testing.assert_allclose(updates["w"], np.full(3, -(size - 1) / 2))


def check_passes_keep_the_dtypes_of_the_state_and_of_the_updates(rank, size):
    """Of 16-bit parameters with wider gradients, and of an optimizer that gives wider updates."""
    wider = optax.stateless(lambda updates, _: jax.tree.map(lambda leaf: -leaf.astype(jnp.float32), updates))
    optimizer = hvd.DistributedOptimizer(wider, backward_passes_per_step=3)
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    for dtype in (jnp.float32, jnp.bfloat16):
        state, update = optimizer.init(params), jax.jit(optimizer.update)
        types = jax.tree.map(jnp.result_type, state)
        for value in (256, 1, 1 + 6 * rank):  # in bfloat16 256 + 1 is 256
            updates, state = update({"w": jnp.full(3, value, dtype)}, state)
        np.testing.assert_allclose(
            updates["w"], np.full(3, -(258 + 3 * (size - 1)) / 3), rtol=1e-6 if dtype == jnp.float32 else 1e-2
        )
        assert jax.tree.map(jnp.result_type, state) == types


def check_a_rank_with_a_bad_gradient_skips_the_step_on_all(rank, size):
    optimizer = hvd.DistributedOptimizer(optax.apply_if_finite(optax.sgd(1.0), 5))
    state = optimizer.init(jnp.ones(2))
    updates, _ = jax.jit(optimizer.update)(jnp.full(2, jnp.nan if rank == 1 else 1.0), state)
    np.testing.assert_allclose(updates, np.zeros(2))


def check_broadcast_gives_keys_states_and_numpy_arrays(rank, size):
    state = optax.adam(1.0).init({"w": jnp.full(2, float(rank))})
    tree = {"key": jax.random.key(rank), "state": state, "numpy": np.full(2, float(rank))}
    made = hvd.broadcast_parameters(tree, root_rank=1)
    assert jax.tree.structure(made) == jax.tree.structure(tree)
    assert jax.random.uniform(made["key"]) == jax.random.uniform(jax.random.key(1))
    np.testing.assert_array_equal(made["numpy"], [1, 1])
    for bad, kind, text in (({"a": [3]}, TypeError, "params['a'][0] is of type int"),
                            ({"a": jnp.ones(2 + rank)}, hvd.MismatchError, "params['a']")):  # fmt: skip
        try:
            hvd.broadcast_parameters(bad)
        except kind as error:
            assert text in str(error)
        else:
            raise AssertionError(text)


def check_bad_arguments_of_the_optimizer(rank, size):
    for arguments, kind, text in (
        ({"op": hvd.Max}, ValueError, "op must be Average or Sum"),
        ({"backward_passes_per_step": 0}, ValueError, "an integer from 1 on, not 0"),
        ({"optimizer": 3}, TypeError, "expected an optax transformation, got a int"),
    ):
        try:
            hvd.DistributedOptimizer(**{"optimizer": optax.sgd(1.0)} | arguments)
        except kind as error:
            assert text in str(error)
        else:
            raise AssertionError(text)
