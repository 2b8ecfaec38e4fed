"""docs/arrays.md: arrays keep their library, dtype and device, or are refused by name, and what is read-only or
immutable is never written to. Of each library that is installed."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import mmap
import os
import re
import sys
import tempfile

import numpy as np
import pytest

import farandole as fl
from farandole import _core
from operations import CASES, MOVED, Numpy, Torch, check, named
from ranks import REPOSITORY, run_threads

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")  # before JAX is used
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

LIBRARIES, _, REFUSALS = (REPOSITORY / "docs" / "arrays.md").read_text().partition("## What is refused")
#: By library, the other columns. Paddle cannot be imported after TensorFlow.
TABLE = {name: re.split(r" ?\| ", row) for name, row in re.findall(r"^\| `([\w.]+)` \| (.*) \|$", LIBRARIES, re.M)}
#: By array, the text of the error.
REFUSED = dict(re.findall(r"^\| (.*?) \| `([^`]*)`(?: …)? \|$", REFUSALS, re.M))
METHODS = {"DLPack": "__dlpack__", "C functions": "__dlpack_c_exchange_api__"}


def dtypes_of(name):
    """What the table says."""
    text = TABLE[name][2]
    left_out = re.split(", | and ", text.removeprefix("all but ")) if text != "none" else [""]
    return [dtype for dtype in _core.dtypes if text == "all" or not dtype.startswith(tuple(left_out))]


class Library(Numpy):
    """Arrays of the library with a name, in JAX on the second device."""

    forms = ("blocking", "async", "grouped")

    def __init__(self, name):
        self.name, self.dtypes, self.library = name, dtypes_of(name), pytest.importorskip(name)
        if name == "numpy" and importlib.util.find_spec("ml_dtypes") is None:
            self.dtypes = MOVED
        if TABLE[name][-1] == "yes":
            self.forms = Numpy.forms

    def make(self, values, dtype):
        values, library = np.array(values), self.library
        if self.name == "numpy":
            ml_dtypes = importlib.import_module("ml_dtypes") if dtype.startswith(("bfloat", "float8")) else None
            return values.astype(getattr(ml_dtypes, dtype, dtype))
        if self.name == "torch":
            return Torch().make(values, dtype)
        if self.name == "jax":
            with library.enable_x64(True):
                return library.device_put(library.numpy.asarray(values, dtype), library.devices()[1])
        if self.name == "mlx.core":
            return library.array(values, dtype=library.bool_ if dtype == "bool" else getattr(library, dtype))
        return library.to_tensor(values).astype(dtype) if self.name == "paddle" else library.cast(values, dtype)

    def transposed(self, array):
        """A view where the library has views."""
        axes = tuple(reversed(range(len(array.shape))))
        if self.name == "torch":
            return array.permute(axes)
        return (self.library.numpy if self.name == "jax" else self.library).transpose(array, axes)

    def numbers(self, array):
        """A list, also of what lists do not show, as float8."""
        if self.name == "torch":
            return Torch().numbers(array)
        if "float8" not in str(array.dtype) and "bfloat16" not in str(array.dtype):
            return np.asarray(array).tolist()
        if self.name == "tensorflow":
            return self.library.cast(array, "float32").numpy().tolist()
        return np.asarray(array.astype(self.library.float32 if self.name == "mlx.core" else "float32")).tolist()

    def kind_of(self, array):
        """What results must have too."""
        place = getattr(array, "sharding", None) or getattr(array, "place", None) or getattr(array, "device", None)
        return type(array), str(array.dtype), str(place), getattr(array, "weak_type", None)


KINDS = [name for name, (_, _, dtypes, *_) in TABLE.items() if dtypes != "none"]


@pytest.mark.parametrize("name", KINDS)
def test_results_are_of_the_librarys_dtype_and_on_the_arrays_device(name):
    library = Library(name)
    chosen = (
        "allreduce by Sum",
        "reducescatter by Sum",
        "broadcast from rank 1",
        "allgather of as",
        "alltoall by splits",
    )
    cases = [*named(CASES, *chosen), *(case for case in CASES if case.is_strided)]
    run_threads(2, lambda rank: check(library, rank, 2, cases))


@pytest.mark.parametrize("name", TABLE)
def test_the_table_says_what_each_library_has(name):
    library, (version, read_by, _, result, _) = pytest.importorskip(name), TABLE[name]
    package = {"mlx.core": "mlx", "paddle": "paddlepaddle", "cupy": "cupy-cuda13x"}.get(name, name)
    installed = importlib.metadata.version(package).partition("+")[0]
    assert installed == version or version.endswith("or newer")
    if name == "cupy":
        with pytest.raises(library.cuda.runtime.CUDARuntimeError):
            library.empty(1)
        return
    array = library.Tensor([1.0]) if name == "tinygrad" else Library(name).make([1.0], "float32")
    has = [how for how, method in METHODS.items() if hasattr(array, method)]
    with contextlib.suppress(TypeError):
        has = [*(memoryview(array) and ["buffer protocol"]), *has]
    assert (", ".join(has) or "nothing") == read_by
    if result:
        module, _, kind = result.strip("`").rpartition(".")
        assert isinstance(array, getattr(importlib.import_module(module), kind))


@pytest.mark.parametrize("name", KINDS)
def test_the_dtypes_left_out_are_those_that_the_library_lacks(name):
    library = Library(name)
    for dtype in set(_core.dtypes) - set(library.dtypes):
        with pytest.raises((AttributeError, ValueError, AssertionError)):
            assert str(library.make([1], dtype).dtype).endswith(f".{dtype}")  # Paddle's uint16 is bfloat16


def frozen(values):
    """A copy that cannot be written to."""
    values = values.copy()
    values.flags.writeable = False
    return values


def mapped(values):
    """A file's memory, opened for reading."""
    with tempfile.TemporaryFile() as file:
        file.write(values.tobytes())
        file.flush()
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


#: What must stay as it is, made of an array with the module of its library.
FROZEN = {
    "numpy, writeable=False": lambda _, values: frozen(values),
    "numpy, a subclass": lambda _, values: frozen(values).view(np.recarray),
    "numpy, of bytes": lambda _, values: np.frombuffer(values.tobytes(), values.dtype),
    "numpy, broadcast": lambda _, values: np.broadcast_to(values[:1], values.shape),
    "numpy, of a map": lambda _, values: np.frombuffer(mapped(values), values.dtype),
    "mmap": lambda _, values: mapped(values),
    "builtins, bytes": lambda _, values: values.tobytes(),
    "builtins, memoryview": lambda _, values: memoryview(values.tobytes()),
    "jax": lambda jax, values: jax.numpy.asarray(values),
    "mlx.core": lambda mx, values: mx.array(values),
    "mlx.core, a view": lambda mx, values: mx.array(np.repeat(values, 2))[::2],
    "tensorflow": lambda tf, values: tf.constant(values),
    "tensorflow, a variable": lambda tf, values: tf.Variable(values),
    "tinygrad": lambda tinygrad, values: tinygrad.Tensor(values.tolist(), dtype="uint8"),
}
#: Calls with what must not change and an array that may.
WRITES = [
    lambda array, _: fl.allreduce_(array, op=fl.Sum),
    lambda array, _: fl.synchronize(fl.allreduce_async_(array, op=fl.Sum)),
    lambda array, mine: fl.grouped_allreduce_([mine, array], op=fl.Sum),
    lambda array, mine: fl.synchronize(fl.grouped_allreduce_async_([array, mine], op=fl.Sum)),
    lambda array, _: fl.broadcast_(array, 1),
    lambda array, _: fl.synchronize(fl.broadcast_async_(array, 1)),
    lambda array, mine: fl.allgather(mine[:1], out=array),
    lambda array, mine: fl.synchronize(fl.allgather_async(mine[:1], out=array)),
    lambda array, mine: fl.reducescatter(np.repeat(mine, 2), op=fl.Sum, out=array),
    lambda array, mine: fl.alltoall(mine, out=array),
]
READS = [
    lambda array: fl.allreduce(array, op=fl.Sum, prescale_factor=2.0),
    lambda array: fl.synchronize(fl.allreduce_async(array, op=fl.Sum)),
    lambda array: fl.grouped_allreduce([array, array], op=fl.Sum),
    lambda array: fl.broadcast(array, 1),
    lambda array: fl.reducescatter(array, op=fl.Sum),
    lambda array: fl.alltoall(array),
]


@pytest.mark.parametrize("kind", FROZEN)
def test_what_is_read_only_or_immutable_is_never_written_to(kind):
    library = pytest.importorskip(kind.partition(",")[0])

    def body(rank):
        mine = np.array([rank + 1, 3], np.uint8)
        array = FROZEN[kind](library, mine)
        mine = mine.copy()

        def state():
            values = array.numpy() if hasattr(array, "numpy") else memoryview(array)
            return np.array(values).tobytes(), mine.tobytes()

        before = state()
        for number, write in enumerate(WRITES):
            with pytest.raises((TypeError, ValueError)):
                write(array, mine)
            assert state() == before, number
        for number, read in enumerate(READS):
            if kind != "tinygrad":
                read(array)
            assert state() == before, number

    run_threads(2, body)


def of_numpy(_):
    yield "in place: `writeable=False`, `bytes`, a map for reading", fl.allreduce_, bytes(2)
    yield "`numpy.ma.MaskedArray`", fl.allreduce, np.ma.MaskedArray([1.0, 2.0], [True, False])


def of_jax(jax):
    ones, mesh = jax.numpy.ones(4), jax.sharding.Mesh(np.array(jax.devices()), "a")
    for spec in (jax.sharding.PartitionSpec("a"), jax.sharding.PartitionSpec()):
        spread = jax.device_put(ones, jax.sharding.NamedSharding(mesh, spec))
        yield "JAX: sharded or replicated", fl.allreduce, spread
    yield "a reduction of float8", fl.allreduce, jax.numpy.ones(4, "float8_e4m3fn")
    yield "int4 of JAX", fl.allreduce, jax.numpy.ones(4, "int4")
    yield "int4 of JAX", fl.broadcast, jax.numpy.ones(4, "int4"), 0
    yield "JAX: a key of `jax.random`", fl.allreduce, jax.random.key(0)
    yield "JAX: traced, by the functions of `farandole`", jax.jit(fl.allreduce), ones
    yield "in place: one of JAX, MLX or TensorFlow", fl.allreduce_, ones
    ones.delete()
    yield "JAX: deleted or donated", fl.allreduce, ones


def of_mlx(mx):
    for group in ([mx.ones(2), np.ones(2)], [np.ones(2), mx.ones(2)]):
        yield "in place: one of JAX, MLX or TensorFlow", fl.grouped_allreduce_, group


def of_paddle(paddle):
    small = paddle.ones([2, 3]).astype("float8_e4m3fn")
    for given in (small, paddle.transpose(small, (1, 0))):
        yield "a reduction of float8", fl.allreduce, given
    yield "a reduction of float8", fl.allreduce_, small
    wide = paddle.ones([2, 3])
    yield "in place: strided, of Paddle", fl.allreduce_, wide.T
    yield "in place: strided, of Paddle", fl.grouped_allreduce_, [wide, wide.T]


def of_tensorflow(tf):
    variable = tf.Variable([1.0, 2.0])
    yield "TensorFlow: strings", fl.broadcast, tf.constant(["a"]), 0
    yield "TensorFlow: a handle of a resource", fl.broadcast, variable.handle, 0
    yield "TensorFlow: quantized", fl.broadcast, tf.bitcast(tf.constant([1], tf.int8), tf.qint8), 0
    yield "TensorFlow: ragged", fl.allreduce, tf.ragged.constant([[1.0], [2.0, 3.0]])
    graph = tf.function(fl.allreduce, autograph=False)
    yield "TensorFlow: in a graph, as in JAX", graph, variable.value()
    yield "a reduction of float8", fl.allreduce, tf.cast(variable, "float8_e4m3fn")


def of_tinygrad(tinygrad):
    yield "tinygrad", fl.allreduce, tinygrad.Tensor([1.0])


REFUSALS_OF = {"numpy": of_numpy, "jax": of_jax, "mlx.core": of_mlx, "paddle": of_paddle, "tensorflow": of_tensorflow,
            "tinygrad": of_tinygrad}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS_OF)
def test_the_page_says_what_is_refused(name):
    for array, call, *arguments in REFUSALS_OF[name](pytest.importorskip(name)):
        with pytest.raises((TypeError, ValueError)) as caught:
            run_threads(1, lambda _, call=call, arguments=arguments: call(*arguments))
        assert REFUSED[array] in str(caught.value)


def test_each_refusal_of_the_page_is_tested():
    source = inspect.getsource(sys.modules[__name__])
    assert len(REFUSED) == REFUSALS.count("\n| ") - 1
    assert [array for array in REFUSED if f'"{array}"' not in source] == []


def test_results_of_jax_are_weakly_typed_where_the_array_is():
    jax = pytest.importorskip("jax")

    def body(rank):
        weak = jax.numpy.asarray(3.0 + rank)
        rows = jax.numpy.broadcast_to(weak, (2,))
        results = fl.allreduce(weak, op=fl.Sum), fl.allgather(rows), fl.allreduce(rows, op=fl.Max)
        assert all(result.weak_type and result.dtype == "float32" for result in results)
        return [result.tolist() for result in results]

    assert run_threads(2, body) == [[7, [3, 3, 4, 4], [4, 4]]] * 2


def test_a_strided_parameter_of_paddle_is_copied():
    paddle = pytest.importorskip("paddle")
    of_parameter = paddle.transpose(paddle.to_tensor([[1.0, 2.0]], stop_gradient=False), (1, 0))
    assert run_threads(1, lambda _: fl.allreduce(of_parameter).tolist()) == [[[1.0], [2.0]]]


def test_a_variable_of_tensorflow_gives_a_tensor():
    tf = pytest.importorskip("tensorflow")
    result = run_threads(1, lambda _: fl.allreduce(tf.Variable([1.0, 2.0])))[0]
    assert isinstance(result, tf.Tensor) and result.numpy().tolist() == [1.0, 2.0]


def test_numpys_arrays_of_tinygrad_are_copies_and_those_it_is_made_of_are_not():
    tinygrad = pytest.importorskip("tinygrad")
    tensor = tinygrad.Tensor([1.0, 2.0]).realize()
    run_threads(
        1,
        lambda _: (
            fl.allreduce_(tensor.data(), postscale_factor=2.0),
            fl.allreduce_(tensor.numpy(), postscale_factor=2.0),
        ),
    )
    assert tensor.tolist() == [1.0, 2.0]
    result = run_threads(1, lambda _: fl.allreduce(tensor.numpy()))[0]
    made = tinygrad.Tensor(result)
    result[0] = 3.0
    assert made.tolist() == [3.0, 2.0]


def test_what_has_values_but_no_memory_is_told_how_to_pass_them():
    class Lazy:
        def numpy(self):
            return np.ones(1)

    with pytest.raises(TypeError, match=r"Lazy has neither .*; pass an array of its values, as its method numpy\(\)"):
        run_threads(1, lambda _: fl.allreduce(Lazy()))
