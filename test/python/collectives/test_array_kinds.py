"""Arrays keep their library, dtype and device, or are refused by name: of each library that is installed."""

import os

import numpy as np
import pytest

import farandole as fl
from ranks import run_threads

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")  # before JAX is used
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

NUMPYS = "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 float32 float64 complex64 complex128".split()
NOT_REDUCED = "bool uint16 uint32 uint64 float8_e4m3fn float8_e5m2".split()
#: By library, what is moved. Paddle cannot be imported after TensorFlow.
TABLE = {
    "numpy": NUMPYS,
    "torch": [*NUMPYS, "bfloat16", "float8_e4m3fn", "float8_e5m2"],
    "jax": [*NUMPYS, "bfloat16", "float8_e4m3fn", "float8_e5m2"],
    "mlx.core": [*NUMPYS[:-1], "bfloat16"],
    "paddle": [name for name in NUMPYS if name not in NOT_REDUCED] + ["bool", "bfloat16", "float8_e4m3fn"],
    "tensorflow": [*NUMPYS, "bfloat16"],
}


def array_of(name, library, values, dtype):
    """An array of the library, in JAX on the second device."""
    if name == "numpy":
        return values.astype(dtype)
    if name == "torch":
        return library.from_numpy(values).to(getattr(library, dtype))
    if name == "jax":
        with library.enable_x64(True):
            return library.device_put(library.numpy.asarray(values, dtype), library.devices()[1])
    if name == "mlx.core":
        dtype = library.bool_ if dtype == "bool" else getattr(library, dtype)
        return library.array(values, dtype=dtype)
    return library.to_tensor(values).astype(dtype) if name == "paddle" else library.cast(values, dtype)


def numbers_in(name, library, array):
    """A list, also of what lists do not show, as float8."""
    if "float8" not in str(array.dtype) and "bfloat16" not in str(array.dtype):
        return np.asarray(array).tolist()
    if name == "tensorflow":
        return library.cast(array, "float32").numpy().tolist()
    single = library.float32 if name == "mlx.core" else "float32"
    return np.asarray(array.float() if name == "torch" else array.astype(single)).tolist()


def transposed(name, library, array):
    """A view where the library has views."""
    if name == "torch":
        return array.T
    return library.numpy.transpose(array) if name == "jax" else library.transpose(array, (1, 0))


def kind_of(array):
    """What results must have too."""
    place = getattr(array, "sharding", None) or getattr(array, "place", None) or getattr(array, "device", None)
    return type(array), str(array.dtype), str(place), getattr(array, "weak_type", None)


CASES = [(name, dtype) for name, dtypes in TABLE.items() for dtype in dtypes]


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=lambda value: value)
def test_results_are_of_the_librarys_dtype_and_on_the_arrays_device(name, dtype):
    library = pytest.importorskip(name)
    ops = pytest.importorskip("farandole.torch") if name == "torch" else fl
    values = [(np.arange(6.0).reshape(3, 2) + rank) % (2 if dtype == "bool" else 5) for rank in range(2)]
    values = [each * (1 - 2j if "complex" in dtype else 1) for each in values]

    def body(rank):
        for is_view in (False, True):
            mine = array_of(name, library, values[rank], dtype)
            both = [each.T for each in values] if is_view else values
            if is_view:
                mine = transposed(name, library, mine)
            expected = {"broadcast": both[1], "allgather": np.concatenate(both)}
            expected["alltoall"] = np.concatenate([each[:1] if rank == 0 else each[1:] for each in both])
            results = {"broadcast": ops.broadcast(mine, 1), "allgather": ops.allgather(mine)}
            results["alltoall"] = ops.alltoall(mine, [1, mine.shape[0] - 1])[0]
            if dtype not in NOT_REDUCED:
                expected["allreduce"] = both[0] + both[1]
                expected["reducescatter"] = np.array_split(both[0] + both[1], 2)[rank]
                results["allreduce"] = ops.allreduce(mine, op=fl.Sum)
                results["reducescatter"] = ops.reducescatter(mine, op=fl.Sum)
            for call, result in results.items():
                assert kind_of(result) == kind_of(mine), (call, is_view)
                assert numbers_in(name, library, result) == expected[call].tolist(), (call, is_view)

    run_threads(2, body)


def refused(call, *arguments):
    """The text of the error, by which no rank waits for another."""
    with pytest.raises((TypeError, ValueError)) as caught:
        run_threads(1, lambda _: call(*arguments))
    return str(caught.value)


def test_of_jax():
    jax = pytest.importorskip("jax")
    ones = jax.numpy.ones(4)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), "a")
    for spec in (jax.sharding.PartitionSpec("a"), jax.sharding.PartitionSpec()):
        spread = jax.device_put(ones, jax.sharding.NamedSharding(mesh, spec))
        assert "shape [4] lies on 2 devices; pass what is on one" in refused(fl.allreduce, spread)
    for dtype in ("int4", "float8_e4m3fn"):
        assert f"dtype {dtype} is not supported; use one of" in refused(fl.allreduce, jax.numpy.ones(4, dtype))
    assert "dtype int4 is not supported" in refused(fl.broadcast, jax.numpy.ones(4, "int4"), 0)
    assert "dtype key<fry> is not supported" in refused(fl.allreduce, jax.random.key(0))
    assert "an array that JAX traces has no values" in refused(jax.jit(fl.allreduce), ones)
    ones.delete()
    assert "allreduce: the array of shape [4] was deleted" in refused(fl.allreduce, ones)

    def body(rank):
        weak = jax.numpy.asarray(3.0 + rank)
        rows = jax.numpy.broadcast_to(weak, (2,))
        results = fl.allreduce(weak, op=fl.Sum), fl.allgather(rows), fl.allreduce(rows, op=fl.Max)
        assert all(result.weak_type and result.dtype == "float32" for result in results)
        return [result.tolist() for result in results]

    assert run_threads(2, body) == [[7, [3, 3, 4, 4], [4, 4]]] * 2


def test_of_paddle():
    paddle = pytest.importorskip("paddle")
    small = paddle.ones([2, 3]).astype("float8_e4m3fn")
    for given in (small, paddle.transpose(small, (1, 0))):
        assert "dtype float8_e4m3fn is not supported; use one of" in refused(fl.allreduce, given)
    of_parameter = paddle.transpose(paddle.to_tensor([[1.0, 2.0]], stop_gradient=False), (1, 0))
    assert run_threads(1, lambda _: fl.allreduce(of_parameter).tolist()) == [[[1.0], [2.0]]]


def test_of_tensorflow():
    tf = pytest.importorskip("tensorflow")
    variable = tf.Variable([1.0, 2.0])
    for given in (tf.constant(["a"]), variable.handle, tf.bitcast(tf.constant([1], tf.int8), tf.qint8)):
        assert f"dtype {given.dtype.name} is not supported; use one of" in refused(fl.broadcast, given, 0)
    assert "RaggedTensor has no dense values" in refused(fl.allreduce, tf.ragged.constant([[1.0], [2.0, 3.0]]))
    assert "SymbolicTensor has no dense values" in refused(tf.function(fl.allreduce, autograph=False), variable.value())
    result = run_threads(1, lambda _: fl.allreduce(variable))[0]
    assert isinstance(result, tf.Tensor) and result.numpy().tolist() == [1.0, 2.0]


def test_what_has_values_but_no_memory_is_told_how_to_pass_them():
    class Lazy:
        def numpy(self):
            return np.ones(1)

    assert (
        "Lazy has neither the buffer protocol nor DLPack; pass an array of its values, as its method numpy()"
        in refused(fl.allreduce, Lazy())
    )
