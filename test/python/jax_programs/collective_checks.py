"""What one rank checks of collectives in traced code, against what NumPy makes of all ranks' contributions."""

import pathlib
import resource

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import farandole.jax as hvd
from farandole import ops

try:
    from jax import shard_map
except ImportError:  # before jax 0.7
    from jax.experimental.shard_map import shard_map


def close(made, expected):
    np.testing.assert_allclose(np.asarray(made), np.asarray(expected), rtol=1e-5)


def of_rank(rank, shape=(3,)):
    return np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape) * (rank + 1)


def of_all(size, shape=(3,)):
    return [of_rank(rank, shape) for rank in range(size)]


def submissions(function, *arguments):
    before = hvd.counters()["submissions"]
    jax.block_until_ready(function(*arguments))
    return hvd.counters()["submissions"] - before


def check_each_collective_in_jit_gives_what_it_gives_outside(rank, size):
    x = of_rank(rank, (2 * size + 1, 2))
    for call in (
        lambda x: hvd.allreduce(x, op=hvd.Sum), lambda x: hvd.allreduce(x, op=hvd.Max), hvd.allreduce, hvd.allgather,
        lambda x: hvd.reducescatter(x, op=hvd.Sum), lambda x: hvd.broadcast(x, size - 1),
        lambda x: hvd.alltoall(x[:-1]), lambda x: hvd.grouped_allreduce([x, x * 2])[1],
        lambda x: hvd.allreduce(x, compression=hvd.Compression.bf16),
        lambda x: hvd.allreduce(x, prescale_factor=0.5, postscale_factor=3, op=hvd.Sum),
    ):  # fmt: skip
        close(jax.jit(call)(x), call(jnp.asarray(x)))


def check_each_dtype_keeps_its_type_and_values(rank, size):
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        for dtype in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"):
            x = jnp.asarray([rank, 1, 0], dtype)
            made = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Max))(x)
            assert made.dtype == x.dtype
            close(made.astype("float64"), jnp.asarray([size - 1, 1, 0], dtype).astype("float64"))
        for dtype in ("complex64", "complex128", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2"):
            made = jax.jit(lambda x: hvd.broadcast(x, 0))(jnp.asarray([rank + 1, 2], dtype))
            assert made.dtype == dtype
            assert made.tolist() == [1, 2]


def check_complex_numbers_are_summed(rank, size):
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        for dtype in "complex64", "complex128":
            x = jnp.asarray([1 + 2j * rank, rank], dtype)
            made = jax.jit(lambda x: (hvd.allreduce(x), hvd.reducescatter(jnp.tile(x, size), op=hvd.Sum)))(x)
            assert made[0].dtype == made[1].dtype == dtype
            close(made[0], [1 + 1j * (size - 1), (size - 1) / 2])
            close(made[1], size * np.asarray(made[0]))


def check_a_group_in_jit_meets_that_of_numpy_arrays(rank, size):
    def group(call, x):
        return call([x, x * (1 + 2j)], "shared", hvd.Sum)

    x, total = of_rank(rank), sum(of_all(size))
    in_jit = jax.jit(lambda x: group(hvd.grouped_allreduce, x))
    made = in_jit(x) if rank == 0 else group(ops.grouped_allreduce, x)
    for one, factor in zip(made, (1, 1 + 2j), strict=True):
        close(one, factor * total)


def check_gradients_are_those_of_the_sum_of_all_ranks(rank, size):
    def gradient(call, x, weight):
        return jax.jit(jax.grad(lambda x: jnp.sum(call(x) * weight)))(x)

    total = size * (size + 1) / 2  # of the weights rank + 1
    x, weight = of_rank(rank, (size, 2)), rank + 1.0
    close(gradient(lambda x: hvd.allreduce(x, op=hvd.Sum), x, weight), np.full_like(x, total))
    close(gradient(hvd.allreduce, x, weight), np.full_like(x, total / size))
    close(gradient(hvd.allgather, x, weight), np.full_like(x, total))
    close(gradient(lambda x: hvd.broadcast(x, 0), x, weight), np.full_like(x, total if rank == 0 else 0))
    each = np.repeat(np.arange(1.0, size + 1)[:, None], 2, axis=1)
    close(gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum), x, weight), each)
    close(gradient(hvd.alltoall, x, weight), each)


def check_rows_that_cannot_be_shared_evenly_have_gradients_too(rank, size):
    x, rows = of_rank(rank, (size + 1, 2)), [2] + [1] * (size - 1)
    made = jax.jit(jax.grad(lambda x: jnp.sum(hvd.reducescatter(x)) * (rank + 1)))(x)
    close(made, np.repeat(np.arange(1.0, size + 1), rows)[:, None] * np.ones((1, 2)) / size)


def check_second_derivatives_remat_and_forward_mode(rank, size):
    x, cubes = of_rank(rank), lambda x: jnp.sum(hvd.allreduce(x**3, op=hvd.Sum))
    close(jax.jit(jax.hessian(cubes))(x), size * np.diag(6 * x))
    mean = sum(each**2 for each in of_all(size)) / size
    again = jax.checkpoint(lambda x: jnp.sum(jnp.sin(hvd.allreduce(x * x))))
    close(jax.jit(jax.grad(again))(x), np.cos(mean) * 2 * x)
    close(jax.jvp(lambda x: hvd.allreduce(x, op=hvd.Sum), (x,), (x,))[1], sum(of_all(size)))


def check_a_maximum_has_no_gradient_and_says_so(rank, size):
    try:
        jax.grad(lambda x: jnp.sum(hvd.allreduce(x, op=hvd.Max, name="top")))(of_rank(rank))
    except NotImplementedError as error:
        assert "allreduce 'top'" in str(error)
    else:
        raise AssertionError("no error")


def check_a_batch_is_one_operation(rank, size):
    x = of_rank(rank, (5, 2, 3))
    gather = jax.jit(jax.vmap(hvd.allgather, in_axes=1, out_axes=1))
    close(gather(x), np.concatenate(of_all(size, (5, 2, 3))))
    mixed = jax.jit(jax.vmap(lambda x, y: hvd.grouped_allreduce([x, y], op=hvd.Sum), in_axes=(0, None)))
    assert submissions(mixed, x, x[0]) == 1
    close(mixed(x, x[0])[0], sum(of_all(size, (5, 2, 3))))


def check_each_iteration_of_a_loop_runs_though_nothing_changes(rank, size):
    x, total = of_rank(rank), sum(of_all(size))

    @jax.jit
    def loop(x):
        return jax.lax.scan(lambda sum, _: (sum + hvd.allreduce(x, op=hvd.Sum), None), jnp.zeros(3), None, length=5)[0]

    assert submissions(loop, x) == 5
    close(loop(x), 5 * total)
    close(jax.jit(jax.grad(lambda x: jnp.sum(loop(x))))(x), np.full(3, 5.0 * size))
    branch = jax.jit(lambda x: jax.lax.cond(x[0] > 0, lambda x: hvd.allreduce(x, op=hvd.Sum), lambda x: x, x))
    close(branch(x), total)


def check_equal_calls_are_not_merged(rank, size):
    twice = jax.jit(lambda x: hvd.allreduce(x, name="equal") + hvd.allreduce(x, name="equal"))
    assert submissions(twice, of_rank(rank)) == 2
    close(twice(of_rank(rank)), sum(of_all(size)) * 2 / size)


def check_a_result_that_xla_finds_unnecessary_is_reduced(rank, size):
    zero = jax.jit(lambda x: x + 0 * hvd.allreduce(x, op=hvd.Sum))
    assert submissions(zero, jnp.ones(3, "int32")) == 1


def check_two_hundred_independent_collectives_in_one_program(rank, size):
    for shape in (2,), (50_000,):
        many = jax.jit(lambda x: [hvd.allreduce(x + i, op=hvd.Sum) for i in range(200)])
        for i, made in enumerate(many(jnp.full(shape, rank + 1.0))):
            close(made, np.full(shape, size * (size + 1) / 2 + size * i))


def check_results_in_another_order_on_each_rank(rank, size):
    order = np.random.default_rng(rank).permutation(40)
    xs = [jnp.full(2000, float(i)) for i in range(40)]  # named in the order in which they are traced
    made = jax.jit(lambda xs: [(made := [hvd.allreduce(x, op=hvd.Sum) for x in xs]), [made[i] for i in order]][1])(xs)
    for i, one in zip(order, made, strict=True):
        close(one, np.full(2000, size * i))


def check_loops_branches_and_functions_returned_in_another_order_on_each_rank(rank, size):
    def total(x):
        return hvd.allreduce(x, op=hvd.Sum)

    def step(x):
        loop = jax.lax.scan(lambda x, _: (total(x), None), x, None, length=2)[0]
        twice = [inner(x), inner(x + 1)]
        branch = jax.lax.cond(x[0] > 0, lambda: total(x + 2), lambda: x)
        until = jax.lax.while_loop(lambda x: total(x)[0] < 100, lambda x: x + 100, x)
        made = [total(x), loop, branch, until, *twice, total(x + 3)]
        return [made[i] for i in order]

    inner, order = jax.jit(total), np.random.default_rng(rank).permutation(7)
    x = np.ones(2)
    expected = [x, size * x, 3 * x, np.array([101, 101]) / size, x, 2 * x, 4 * x]
    for _ in range(5):
        for i, made in zip(order, jax.jit(step)(jnp.ones(2)), strict=True):
            close(made, expected[i] * size)


def check_a_barrier_goes_with_the_values(rank, size):
    assert submissions(jax.jit(lambda x: hvd.barrier(x)["a"] * 2), {"a": of_rank(rank)}) == 1
    assert hvd.barrier() is None
    try:
        jax.jit(lambda x: (hvd.barrier(), x))(1.0)
    except ValueError as error:
        assert "x = barrier(x)" in str(error)
    else:
        raise AssertionError("no error")


def check_a_process_set(rank, size):
    own = hvd.add_process_set(range(1, size))
    if rank > 0:
        gather = jax.jit(lambda x: hvd.allgather(x, process_set=own))
        close(gather(of_rank(rank)), np.concatenate(of_all(size)[1:]))
    hvd.remove_process_set(own)


def check_the_devices_of_a_process(rank, size):
    mesh = Mesh(np.array(jax.devices()), ("device",))
    x, total = of_rank(rank, (8,)), sum(of_all(size, (8,)))
    each = shard_map(lambda x: hvd.allreduce(x, op=hvd.Sum), mesh=mesh, in_specs=P("device"), out_specs=P("device"))
    assert submissions(jax.jit(each), x) == len(jax.devices())
    close(jax.jit(each)(x), total)
    close(jax.jit(jax.grad(lambda x: jnp.sum(each(x * x))))(x), 2 * x * size)
    mixed = jax.jit(lambda x: hvd.allreduce(each(hvd.allreduce(x)) + 1))
    for _ in range(5):
        close(mixed(x), total + 1)
    spread = jax.device_put(x, NamedSharding(mesh, P("device")))
    together = jax.jit(lambda x: hvd.allreduce(x * 2, op=hvd.Sum) + 1)
    assert submissions(together, spread) == 1
    for _ in range(20):
        close(together(spread), 2 * total + 1)


def check_pmap_works_or_says_that_it_does_not(rank, size):
    x = jnp.ones((len(jax.devices()), 3))
    try:
        close(jax.pmap(lambda x: hvd.allreduce(x, op=hvd.Sum))(x), x * size)
    except NotImplementedError as error:  # before jax 0.8
        assert "in pmap there are no collectives between processes; use jax.shard_map" in str(error)
        assert jax.__version_info__ < (0, 8)


def check_donated_memory_and_several_programs_in_flight(rank, size):
    step = jax.jit(lambda x, y: (hvd.allreduce(x + y), jnp.sum(y)), donate_argnums=0)
    x = jnp.zeros(1000)
    for i in range(30):
        x, _ = step(x, jnp.full(1000, float(rank)))
    close(x, np.full(1000, 30 * (size - 1) / 2))


def check_a_large_result_lies_in_huge_pages(rank, size):
    huge = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not huge.exists() or "[never]" in huge.read_text():
        return
    call, x, faults = jax.jit(hvd.allreduce), jnp.ones(16 << 20), []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        jax.block_until_ready(call(x))
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    assert min(faults) < 4000, faults


def check_a_temporary_is_reduced_in_its_place(rank, size):
    x = jnp.ones(1 << 20)
    for call in (hvd.allreduce, lambda x: hvd.broadcast(x, 0)):
        step = jax.jit(lambda x, call=call: call(x * 2) + 1).lower(x).compile()
        assert step.memory_analysis().temp_size_in_bytes < x.nbytes / 2
    x, total = of_rank(rank), sum(of_all(size))

    @jax.jit
    def again(x):
        y, z = x * 2, x + 1
        whole = hvd.grouped_allreduce([y, y, z], op=hvd.Sum)
        branch = jax.lax.cond(x[0] > 0, lambda: hvd.allreduce(z, op=hvd.Sum), lambda: z)
        return [*whole, branch, y, z, hvd.broadcast(x * 3, 0)]

    for _ in range(2):
        expected = [total * 2, total * 2, total + size, total + size, x * 2, x + 1, of_rank(0) * 3]
        for made, right in zip(again(x), expected, strict=True):
            close(made, right)


def check_bad_calls_say_what_was_expected(rank, size):
    for call, kind, text in (
        (lambda x: hvd.allgather(x[0]), ValueError, "allgather: a scalar has no rows"),
        (lambda x: hvd.alltoall(jnp.ones(size + 1)), ValueError, f"alltoall: {size + 1} rows"),
        (lambda x: hvd.alltoall(x, splits=[1] * size), ValueError, "splits must be None"),
        (lambda x: hvd.allreduce(x, compression="fp16"), ValueError, "compression must be Compression.none"),
        (lambda x: hvd.allreduce(x.astype("complex64").astype("uint16")), TypeError, "uint16"),
        (lambda x: hvd.broadcast(x, size), ValueError, f"root rank {size} is not in"),
        (lambda x: hvd.grouped_allreduce([]), ValueError, "at least one tensor"),
    ):
        try:
            jax.jit(call)(of_rank(rank))
        except kind as error:
            assert text in str(error), error
        else:
            raise AssertionError(text)
