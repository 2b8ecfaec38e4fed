"""What each rank finds of farandole.tensorflow. TensorFlow is imported by the checks: the test only names them."""

import importlib
import re
import sys

import numpy as np

from framework_ranks import raises


def near(found, expected, tolerance=1e-6):
    np.testing.assert_allclose(np.asarray(found, np.float64), np.asarray(expected, np.float64), tolerance, tolerance)


def both_ways(function):
    """As eager code and as a graph."""
    import tensorflow as tf

    return function, tf.function(function)


def check_reductions_of_every_dtype(rank, size):
    import tensorflow as tf

    import farandole.tensorflow as hvd

    for name in ("float16", "bfloat16", "float32", "float64", "int8", "int32", "int64", "uint8", "complex64"):
        given = tf.cast(tf.range(6), name)[:, None] + tf.cast(rank, name)
        expected = tf.cast(size * tf.range(6)[:, None] + size * (size - 1) // 2, name)
        for call in both_ways(lambda x: hvd.allreduce(x, op=hvd.Sum, name="sum")):
            made = call(given)
            assert isinstance(made, tf.Tensor) and made.dtype == given.dtype and made.shape == given.shape
            assert (made.numpy() == expected.numpy()).all()
    for call in both_ways(lambda x: hvd.allreduce(x, op=hvd.Max)):
        assert call(tf.constant(rank == 1)).numpy() == (size > 1)
    for call in both_ways(lambda: hvd.allreduce(tf.Variable([1.0 + rank]) if tf.executing_eagerly() else [1.0 + rank])):
        near(call(), [(size + 1) / 2])
    means = hvd.grouped_allreduce([tf.ones([2]) * rank, tf.ones([], tf.float64)], compression=hvd.Compression.fp16)
    near(means[0], [(size - 1) / 2] * 2)
    near(means[1], 1)


def check_what_moves_rows(rank, size):
    import tensorflow as tf

    import farandole.tensorflow as hvd

    own = tf.fill([rank + 1, 2], rank)
    every = np.concatenate([np.full((r + 1, 2), r) for r in range(size)])
    for call in both_ways(lambda: hvd.allgather(own, name="rows")):
        assert (call().numpy() == every).all()
    for call in both_ways(lambda: hvd.broadcast(own[:1], root_rank=1)):
        assert (call().numpy() == 1).all()
    for call in both_ways(lambda: hvd.reducescatter(tf.range(size + 1.0), op=hvd.Sum)):
        first = rank + min(rank, 1)
        near(call(), size * np.arange(first, first + (2 if rank == 0 else 1)))
    for call in both_ways(lambda: hvd.alltoall(tf.fill([2 * size], rank))):
        assert (call().numpy() == np.repeat(np.arange(size), 2)).all()
    splits = tf.constant([rank + 1] * size, tf.int32)
    for call in both_ways(lambda: hvd.alltoall(tf.fill([(rank + 1) * size], rank), splits)):
        rows, received = call()
        assert (rows.numpy() == np.repeat(np.arange(size), np.arange(size) + 1)).all()
        assert received.dtype == tf.int32 and received.numpy().tolist() == list(range(1, size + 1))
    for call in both_ways(lambda: (hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op())):
        assert [int(each) for each in call()] == [rank, size, rank, size]
    both_ways(hvd.barrier)[1]()
    assert tf.function(lambda x: hvd.allgather(x))(tf.ones([2, 3])).shape[1] == 3
    assert int(tf.function(hvd.join)()) in range(size)


def check_gradients(rank, size):
    import tensorflow as tf

    import farandole.tensorflow as hvd

    scale = tf.constant(rank + 1.0)
    total = size * (size + 1) / 2

    def gradient(function, given):
        with tf.GradientTape() as tape:
            tape.watch(given)
            loss = tf.reduce_sum(function(given)) * scale
        return tape.gradient(loss, given)

    cases = [
        (lambda x: hvd.allreduce(x, op=hvd.Sum, name="a"), [total] * 4),
        (lambda x: hvd.allreduce(x, prescale_factor=3.0), [3 * total / size] * 4),
        (lambda x: hvd.allgather(x[: rank + 1], name="g"), [total] * min(rank + 1, 4) + [0] * (3 - rank)),
        (lambda x: hvd.broadcast(x, 1), [total if rank == 1 else 0] * 4),
        (lambda x: hvd.alltoall(x, [1] * size, name="t")[0], [r + 1 for r in range(size)] + [0] * (4 - size)),
        (
            lambda x: hvd.reducescatter(x, op=hvd.Sum),
            np.repeat(np.arange(size) + 1, [4 // size + (r < 4 % size) for r in range(size)]),
        ),
    ]
    for function, expected in cases:
        for call in both_ways(gradient):
            near(call(function, tf.ones([4])), expected)
    raises(NotImplementedError, "only op=Sum and op=Average", gradient, lambda x: hvd.allreduce(x, op=hvd.Max), scale)


def check_indexed_slices(rank, size):
    import tensorflow as tf

    import farandole.tensorflow as hvd

    slices = tf.IndexedSlices(tf.ones([rank + 1, 2]), tf.range(rank + 1, dtype=tf.int64), tf.constant([4, 2]))
    expected = sum(np.repeat([[1.0] * 2, [0.0] * 2], [r + 1, 3 - r], 0) for r in range(size))
    for op, factor in ((hvd.Sum, 1), (hvd.Average, 1 / size)):
        for call in both_ways(hvd.grouped_allreduce):
            made, one = call([slices, tf.ones([])], op=op, name="s")
            assert isinstance(made, tf.IndexedSlices)
            near(tf.convert_to_tensor(made), expected * factor)
            near(one, size * factor)
    raises(ValueError, "op=Average or op=Sum", hvd.allreduce, slices, op=hvd.Max)
    whole = tf.IndexedSlices(tf.fill([rank, 2], 3), tf.range(rank), tf.constant([4, 2]))  # rank 0 has none
    for call in both_ways(lambda: tf.convert_to_tensor(hvd.allreduce(whole, op=hvd.Sum))):
        assert call()[:, 0].numpy().tolist() == [3 * max(size - 1 - row, 0) for row in range(4)]
    raises(ValueError, "of int32 needs op=Sum", hvd.allreduce, whole)


def check_training_with_a_tape(rank, size):
    """An embedding and a layer, against one process on all ranks' rows."""
    import tensorflow as tf

    import farandole.tensorflow as hvd

    words, goals = np.arange(8 * size) * 5 % 7, np.linspace(0, 1, 8 * size, dtype=np.float32)[:, None]

    def train(rows, wrap, **how):
        start = tf.random.stateless_uniform([7, 3], [1, 2])
        weights = [tf.Variable(start), tf.Variable(tf.ones([3, 1]) / 3), tf.Variable(tf.zeros([1]))]

        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                hidden = tf.tanh(tf.gather(weights[0], x))
                loss = tf.reduce_mean((hidden @ weights[1] + weights[2] - y) ** 2)
            gradients = (hvd.DistributedGradientTape(tape, **how) if wrap else tape).gradient(loss, weights)
            for weight, each in zip(weights, gradients, strict=True):
                if isinstance(each, tf.IndexedSlices):
                    weight.scatter_sub(tf.IndexedSlices(0.3 * each.values, each.indices))
                else:
                    weight.assign_sub(0.3 * each)

        for _ in range(10):
            step(words[rows], goals[rows])
        return weights

    alone = train(slice(None), False)
    for how in ({}, {"sparse_as_dense": True}, {"gradient_predivide_factor": 2.0}):
        for found, expected in zip(train(slice(rank, None, size), True, **how), alone, strict=True):
            near(found, expected)
    with hvd.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
        x = tf.Variable([1.0, 2.0])
        loss = tf.reduce_sum(x * float(rank))
    found = tape.gradient(loss, {"x": x, "none": tf.Variable(1.0)})
    near(found["x"], [(size - 1) / 2] * 2)
    assert found["none"] is None
    for _ in range(3):  # ended by the distributed tape, and not once more by the plain one
        with tf.GradientTape() as tape:
            loss = x * float(rank)
            near(hvd.DistributedGradientTape(tape).gradient(loss, x), [(size - 1) / 2] * 2)


def check_broadcast_variables(rank, size):
    import tensorflow as tf

    import farandole.tensorflow as hvd

    def make():
        dtypes = (tf.float32, tf.int64, tf.bfloat16, tf.bool)
        return [tf.Variable(tf.cast(tf.fill([3], rank), dtype)) for dtype in dtypes]

    for call in both_ways(hvd.broadcast_variables):
        variables = make()
        call(variables, 1)
        assert [float(tf.cast(each, tf.float32)[0]) for each in variables] == [1] * 4
    raises(TypeError, r"variables\[1\] is of type int", hvd.broadcast_variables, [variables[0], 3], 0)


def check_many_collectives_in_one_program(rank, size):
    """On one thread, chained and not, in a loop, and under one name with another shape."""
    import tensorflow as tf

    import farandole.tensorflow as hvd

    @tf.function
    def program(x):
        made = [hvd.allreduce(x * i, op=hvd.Sum, name=f"call {i}") for i in range(100)]
        for i in tf.range(10):
            made[0] += hvd.allreduce(x * tf.cast(i, tf.float32), op=hvd.Sum, name="loop")
        return tf.add_n(made)

    for shape in ([4], [5]):
        near(program(tf.ones(shape)), np.full(shape, size * (4950 + 45)))


def check_what_is_refused(rank, size):
    import tensorflow as tf

    import farandole.tensorflow as hvd

    raises(TypeError, "allreduce: dtype string is not supported", hvd.allreduce, tf.constant("a"))
    raises(TypeError, "broadcast: dtype string", tf.function(lambda: hvd.broadcast(tf.constant(["a"]), 0)))
    raises(TypeError, "expected a dense tensor, got a SparseTensor", hvd.allreduce, tf.sparse.eye(2))
    raises(ValueError, "allgather: a scalar has no rows", hvd.allgather, 1.0)
    raises(ValueError, "compression must be Compression.none", hvd.allreduce, 1.0, compression="fp16")
    raises(TypeError, "gradtape must be a tf.GradientTape, not a int", hvd.DistributedGradientTape, 3)
    raises(ValueError, "op must be Average, Sum", hvd.DistributedGradientTape, tf.GradientTape(), op=hvd.Max)
    compiled = tf.function(lambda: hvd.allreduce(tf.ones([2])), jit_compile=True)
    raises(Exception, "(?i)unsupported|not compilable|PyFunc", compiled)


def check_the_names_of_horovod(rank, size):
    """Those that docs/tensorflow.md and docs/keras.md say are there."""
    from farandole import compat
    from ranks import REPOSITORY

    sys.path.insert(0, compat.path())
    for page, modules in (("tensorflow", ["tensorflow"]), ("keras", ["keras", "tensorflow.keras"])):
        text = (REPOSITORY / "docs" / f"{page}.md").read_text().partition("## Names of horovod")[2]
        rows = [row.split("|")[1:3] for row in text.splitlines() if row.startswith("| `")]
        there = " ".join(row for row, here in rows if not here.startswith(" no"))
        names = re.findall("`([A-Za-z_]+)`", there)
        for module in modules:
            found = importlib.import_module(f"horovod.{module}")
            missing = [name for name in names if not hasattr(found, name)]
            assert len(names) > 12 and missing == [], (module, missing)
    assert hasattr(found.callbacks, "LearningRateWarmupCallback")
