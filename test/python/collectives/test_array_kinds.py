"""Arrays keep their library, dtype and device, or are refused by name: of each library that is installed."""

import os

import numpy as np
import pytest

import farandole as fl
from operations import CASES, MOVED, Numpy, check, named
from ranks import run_threads

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")  # before JAX is used
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

OF_PADDLE = [name for name in MOVED if not name.startswith("uint") or name == "uint8"]
#: By library, what is moved. Paddle cannot be imported after TensorFlow.
TABLE = {
    "jax": [*MOVED, "bfloat16", "float8_e4m3fn", "float8_e5m2"],
    "mlx.core": [*MOVED[:-1], "bfloat16"],
    "paddle": [*OF_PADDLE, "bfloat16", "float8_e4m3fn"],
    "tensorflow": [*MOVED, "bfloat16"],
}


class Library(Numpy):
    """Arrays of the library with a name, in JAX on the second device."""

    forms = ("blocking", "async", "grouped")

    def __init__(self, name):
        self.name, self.dtypes, self.library = name, TABLE[name], pytest.importorskip(name)

    def make(self, values, dtype):
        values, library = np.array(values), self.library
        if self.name == "jax":
            with library.enable_x64(True):
                return library.device_put(library.numpy.asarray(values, dtype), library.devices()[1])
        if self.name == "mlx.core":
            return library.array(values, dtype=library.bool_ if dtype == "bool" else getattr(library, dtype))
        return library.to_tensor(values).astype(dtype) if self.name == "paddle" else library.cast(values, dtype)

    def transposed(self, array):
        """A view where the library has views."""
        axes = tuple(reversed(range(len(array.shape))))
        return (self.library.numpy if self.name == "jax" else self.library).transpose(array, axes)

    def numbers(self, array):
        """A list, also of what lists do not show, as float8."""
        if "float8" not in str(array.dtype) and "bfloat16" not in str(array.dtype):
            return np.asarray(array).tolist()
        if self.name == "tensorflow":
            return self.library.cast(array, "float32").numpy().tolist()
        return np.asarray(array.astype(self.library.float32 if self.name == "mlx.core" else "float32")).tolist()

    def kind_of(self, array):
        """What results must have too."""
        place = getattr(array, "sharding", None) or getattr(array, "place", None) or getattr(array, "device", None)
        return type(array), str(array.dtype), str(place), getattr(array, "weak_type", None)


@pytest.mark.parametrize("name", TABLE)
def test_results_are_of_the_librarys_dtype_and_on_the_arrays_device(name):
    library = Library(name)
    chosen = ("allreduce by Sum", "reducescatter by Sum", "broadcast from rank 1", "allgather of as",
       "alltoall by splits")
    cases = [*named(CASES, *chosen), *(case for case in CASES if case.is_strided)]
    run_threads(2, lambda rank: check(library, rank, 2, cases))


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
