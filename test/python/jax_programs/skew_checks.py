"""What one rank checks of ranks that are late, leave early, or fail alone. Each check is a job of its own."""

import concurrent.futures
import contextlib
import os
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import farandole.jax as hvd
from collective_checks import close
from failure_checks import error_of

SLOW = 40


def slow(x):
    """Some seconds of computing, which give zeros."""
    return jax.lax.fori_loop(0, SLOW, lambda _, y: jnp.tanh(y @ y), x * 0)


def seconds_of_slow():
    x = jnp.ones((1000, 1000))
    program = jax.jit(slow)
    program(x).block_until_ready()
    start = time.monotonic()
    program(x).block_until_ready()
    return time.monotonic() - start


def check_a_rank_that_computes_for_long_before_a_call_is_no_divergence(rank, size):
    late = jax.jit(lambda x: hvd.allreduce((x + slow(x) if rank else x)[0, 0], name="a", op=hvd.Sum))
    repeats = int(4 / seconds_of_slow()) + 1
    x = jnp.ones((1000, 1000))
    if rank:
        for _ in range(repeats):
            x = jax.jit(lambda x: x + slow(x))(x)
    total = late(x)
    if rank == 0:
        total.block_until_ready()
    hvd.barrier()
    assert total == size


def check_steps_in_flight_end_before_a_rank_leaves(rank, size):
    step = jax.jit(lambda x: hvd.allreduce(x + slow(jnp.broadcast_to(x, (500, 500)))[0, 0] * rank, name="step"))

    def train():
        x = jnp.ones(())
        for _ in range(20):
            x = step(x)
        if rank == 0:
            assert x == 1

    train()
    hvd.shutdown()


def check_a_call_in_flight_twice_on_one_rank_fails_on_all(rank, size):
    call = jax.jit(lambda x: hvd.allreduce(x, name="same", op=hvd.Sum))
    x = jnp.ones(100_000)
    call(x).block_until_ready()
    for step in range(3):
        hvd.barrier()
        if rank:
            time.sleep(0.5)
            call(x).block_until_ready()
            error_of(call, x, kind=(hvd.AbortedError, ValueError))
        else:
            with concurrent.futures.ThreadPoolExecutor(2) as threads:
                told = sorted(threads.map(lambda _: outcome_of(call, x), range(2)))
            assert told == ["", "in flight"]
        np.testing.assert_allclose(call(x * step), np.full(100_000, step * size))


def check_two_threads_in_one_program_do_not_share_a_call(rank, size):
    own = [hvd.add_process_set([one]) for one in range(size)][rank]
    call = jax.jit(lambda x: hvd.allreduce(x, name="same", op=hvd.Sum, process_set=own))
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("devices",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def run(value):
        x = jax.device_put(jnp.full(1000 + value // 2, float(value)), everywhere)  # two have the same shape
        for _ in range(50):
            try:
                with hvd.errors():
                    made = call(x).block_until_ready()
            except (hvd.HorovodInternalError, ValueError) as error:
                assert "in flight" in str(error)
                continue
            for shard in made.addressable_shards:
                np.testing.assert_array_equal(shard.data, x)

    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        list(threads.map(run, (2, 3, 5000)))
    hvd.barrier()


def outcome_of(call, x):
    try:
        with hvd.errors():
            call(x).block_until_ready()
    except (hvd.HorovodInternalError, ValueError) as error:
        return "in flight" if "in flight" in str(error) else str(error)
    return ""


def check_a_call_that_one_rank_cannot_make_fails_on_all(rank, size):
    wrong = jax.jit(lambda x: hvd.allreduce(x, name="flags", op=hvd.Sum))
    x = jnp.ones(3, bool) if rank else jnp.ones(3)
    error_of(wrong, x, kind=(hvd.AbortedError, ValueError))
    np.testing.assert_allclose(wrong(jnp.full(3, 2.0)), np.full(3, 2.0 * size))


def check_two_chains_of_which_one_fails_end_and_the_next_step_works(rank, size):
    def step(x, y, repeats):
        first = hvd.allreduce(x, name="a", op=hvd.Sum)
        others = [jnp.sum(jnp.tanh(y + one)) for one in range(40)]  # with few operations XLA runs one after the other
        late = jax.lax.fori_loop(0, repeats, lambda _, z: jnp.tanh(z @ z), jnp.zeros((1000, 1000)))
        second = jax.lax.cond(late[0, 0] < 1, lambda y: hvd.allreduce(y, name="b", op=hvd.Sum), lambda y: y, y)
        return first, second, others

    program = jax.jit(step)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("devices",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def run(*arguments):
        return program(*(jax.device_put(argument, everywhere) for argument in arguments))

    stays = jax.__version_info__ < (0, 7) and len(jax.devices()) > 1  # XLA then fails what comes next, too
    kind = hvd.HorovodInternalError if stays else hvd.MismatchError
    for _ in range(3):
        error_of(run, jnp.ones(1000 + rank), jnp.ones(200_000), 1 + SLOW * rank, kind=kind)
        if stays:
            return
        first, second, _ = run(jnp.ones(1000), jnp.full(200_000, 3.0), 1)
        np.testing.assert_allclose(first, np.full(1000, size))
        np.testing.assert_allclose(second, np.full(200_000, 3 * size))


@contextlib.contextmanager
def busy_thread():
    is_over = threading.Event()

    def count():
        while not is_over.is_set():
            sum(range(1000))

    threading.Thread(target=count, daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def check_a_busy_thread_does_not_hide_a_divergence(rank, size):
    total = jax.jit(lambda x: hvd.allreduce(x, name="first"))
    with busy_thread():
        if rank == 0:
            text = str(error_of(total, jnp.ones(3), kind=hvd.HorovodInternalError))
        else:
            with pytest.raises(hvd.HorovodInternalError) as caught:
                hvd.allreduce(np.ones(3), name="second")
            text = str(caught.value)
    assert '"first"' in text
    assert '"second"' in text


def check_a_busy_thread_does_not_hide_a_divergence_of_programs(rank, size):
    name = "second" if rank else "first"
    total = jax.jit(lambda x: hvd.allreduce(x, name=name))
    with busy_thread():
        text = str(error_of(total, jnp.ones(3), kind=hvd.HorovodInternalError))
        hvd.shutdown()
    assert "none can go on" in text
    assert '"first"' in text
    assert '"second"' in text


def check_a_rank_that_sleeps_is_no_divergence(rank, size):
    """In the program of another thread, and in the main thread, with a program in flight."""
    total = jax.jit(lambda x: hvd.allreduce(jnp.sum(x @ x), name="x"))  # JAX runs what is small while it is called
    x = jnp.ones((100, 100))

    def late(x):
        shape = jax.ShapeDtypeStruct((), x.dtype)
        slept = jax.pure_callback(lambda x: (time.sleep(5 * (rank == 0)), x)[1], shape, x[0])
        return hvd.allreduce(slept, name="y", op=hvd.Sum)

    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        other = threads.submit(lambda: jax.jit(late)(jnp.ones(3)).block_until_ready())
        if rank:
            other.result()
        assert total(x) == 1e6
        assert other.result() == size
    made = total(x) if rank == 0 else None
    time.sleep(5 * (rank == 0))
    hvd.allreduce(np.ones(3), name="z")
    assert (total(x) if made is None else made) == 1e6


def check_an_object_before_a_program_does_not_hide_a_divergence(rank, size):
    hvd.broadcast_object(3)
    hvd.allgather_object(3)
    start = time.monotonic()
    names = ("first", "second") if rank else ("second", "first")
    x = jnp.ones((500, 500))
    programs = [jax.jit(lambda x, name=name: hvd.allreduce(x @ x, name=name)) for name in names]
    text = str(error_of(lambda: [program(x).block_until_ready() for program in programs]))
    assert '"first"' in text
    assert '"second"' in text
    assert time.monotonic() - start < 15


def check_a_forked_child_is_refused_and_keeps_what_is_compiled(rank, size):
    traced = []
    plain = jax.jit(lambda x: (traced.append(x), x + 1)[1])
    compiled, other = (jax.jit(lambda x: hvd.allreduce(jnp.sum(x @ x), op=hvd.Sum)) for _ in range(2))
    x = jnp.ones((1, 1))  # JAX runs what is small while it is called
    jax.block_until_ready((plain(x), compiled(x)))
    for program in (compiled, other):
        child = os.fork()
        if child == 0:
            plain(x)
            try:
                with hvd.errors():
                    program(x).block_until_ready()
            except hvd.HorovodInternalError as error:
                os._exit(7 if "before this process was forked" in str(error) and len(traced) == 1 else 8)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    hvd.barrier()


def check_other_rows_than_other_ranks_have_fail_on_all(rank, size):
    rows = jax.jit(lambda x: hvd.allgather(x, name="rows"))
    for shape in (3 + rank,), (3 + (1, 0, 2, 0)[rank], 2):
        assert '"rows"' in str(error_of(rows, jnp.ones(shape)))
        close(rows(jnp.ones(4)), np.ones(4 * size))


def check_a_program_traced_for_other_ranks_is_refused(rank, size):
    program = jax.jit(lambda x: hvd.allgather(x, name="rows"))
    np.testing.assert_allclose(program(jnp.ones(2)), np.ones(2 * size))
    hvd.shutdown()
    for name in ("RANK", "SIZE", "ADDRESS"):
        del os.environ[f"FARANDOLE_{name}"]
    hvd.init()
    text = str(error_of(program, jnp.ones(2), kind=ValueError))
    assert text == '"rows": the program was traced for 2 ranks, and there are 1; call jax.clear_caches()'
    jax.clear_caches()
    np.testing.assert_allclose(program(jnp.ones(2)), np.ones(2))


def check_a_mesh_that_leaves_axes_to_xla_is_refused(rank, size):
    if not hasattr(jax, "shard_map"):  # before jax 0.7, whose function has other parameters
        return
    devices = np.array(jax.devices())
    mesh = jax.sharding.Mesh(devices.reshape(-1, 2) if len(devices) > 1 else devices.reshape(1, 1), ("a", "b"))
    rows = jax.sharding.PartitionSpec("a")
    part = jax.shard_map(hvd.allreduce, mesh=mesh, in_specs=rows, out_specs=rows, axis_names={"a"})
    x = jnp.ones((4, 2))
    if len(devices) == 1:
        np.testing.assert_allclose(jax.jit(part)(x), x)
    else:
        with pytest.raises(NotImplementedError, match=r"leaves axes \['b'\] of the mesh to XLA"):
            jax.jit(part)(x)
