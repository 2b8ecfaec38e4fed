"""What one rank checks of collectives in traced code that cannot succeed. Each check is a job of its own."""

import os
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np

import farandole.jax as hvd
from farandole.jax import _chain


def error_of(function, *arguments, kind=hvd.MismatchError):
    try:
        with hvd.errors():
            jax.block_until_ready(function(*arguments))
    except kind as error:
        assert "farandole: " + str(error) in str(error.__cause__)
        return error
    raise AssertionError("no error")


def check_a_mismatch_names_all_and_the_next_step_works(rank, size):
    mean = jax.jit(lambda x: hvd.allreduce(x, name="loss"))
    text = str(error_of(mean, jnp.ones(10 + rank)))
    assert text == 'allreduce "loss": rank 0 sent float32 [10], rank 1 sent float32 [11]; shapes must be equal'
    np.testing.assert_allclose(mean(jnp.full(10, float(rank))), np.full(10, 0.5))


def check_two_programs_in_another_order_name_both(rank, size):
    programs = [jax.jit(lambda x, name=name: hvd.allreduce(x @ x, name=name)) for name in ("first", "second")]
    x = jnp.ones((500, 500))
    for program in programs:
        jax.block_until_ready(program(x))
    start = time.monotonic()
    text = str(error_of(lambda: [program(x) for program in programs[:: 1 - 2 * rank]]))
    assert 'rank 0 waits for allreduce "first"' in text
    assert 'rank 1 waits for allreduce "second"' in text
    assert time.monotonic() - start < 15


def check_a_killed_rank_is_named(rank, size):
    mean = jax.jit(lambda x: hvd.allreduce(x, name="last"))
    mean(jnp.ones(3)).block_until_ready()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    error = error_of(mean, jnp.ones(3), kind=hvd.PeerLostError)
    assert (error.failed_ranks, error.signal) == ((1,), signal.SIGKILL)


def check_a_program_after_shutdown_says_so_and_runs_after_the_next_init(rank, size):
    total = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))
    total(jnp.ones(3)).block_until_ready()
    hvd.shutdown()
    assert "was shut down" in str(error_of(total, jnp.ones(3), kind=hvd.AbortedError))
    hvd.init()
    np.testing.assert_allclose(total(jnp.ones(3)), np.full(3, size))


def check_a_program_whose_calls_have_no_order_is_refused(rank, size):
    mark, _chain.mark = _chain.mark, lambda module: None
    text = str(error_of(jax.jit(lambda x: hvd.allreduce(x, name="first")), jnp.ones(3), kind=ValueError))
    _chain.mark = mark
    assert '"first": the program was lowered in a way that farandole.jax does not know' in text


def of_an_elastic_job(rank, size):
    mean = jax.jit(lambda x: hvd.allreduce(jnp.sum(x @ x), name="step"))
    x = jnp.ones((100, 100))
    assert mean(x) == 1e6
    hvd.reinit()
    assert mean(x) == 1e6
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    error = error_of(lambda: [mean(x) for _ in range(5)], kind=hvd.PeerLostError)
    assert error.failed_ranks == (2,)
    hvd.reinit()
    assert hvd.size() == 2
    text = str(error_of(mean, x, kind=ValueError))
    assert text == '"step": the program was traced for 3 ranks, and there are 2; call jax.clear_caches()'
    jax.clear_caches()
    assert mean(x) == 1e6
