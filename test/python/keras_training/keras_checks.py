"""What each rank finds of farandole.keras. Keras is imported by the checks: the test only names them."""

import copy
import os
import pickle
import tempfile

import numpy as np

from framework_ranks import raises

ROWS = 24


def data(size):
    """Of all ranks, so that rank r's batches are part r of each batch of a single process."""
    x = np.linspace(-1, 1, ROWS * size * 3, dtype=np.float32).reshape(-1, 3)
    return x, np.sin(3 * x.sum(1, keepdims=True))


def make_model(dtype=None):
    import keras

    keras.utils.set_random_seed(7)
    layers = [keras.layers.Dense(8, "tanh", dtype=dtype), keras.layers.Dense(1, dtype=dtype)]
    return keras.Sequential([keras.Input([3]), *layers])


def train(model, optimizer, rows, batch, epochs=2):
    """Compiles and fits; gives the weights."""
    x, y = rows
    model.compile(optimizer, loss="mse", jit_compile=backend() == "jax")  # which TensorFlow cannot, and torch need not
    model.fit(x, y, batch_size=batch, epochs=epochs, shuffle=False, verbose=0)
    return model.get_weights()


def backend():
    import keras

    return keras.backend.backend()


def check_training_against_one_process(rank, size):
    import keras

    import farandole.keras as hvd

    kinds = keras.optimizers
    cases = [
        lambda: kinds.SGD(0.1, momentum=0.9), lambda: kinds.Adam(0.01), lambda: kinds.SGD(0.1, clipnorm=0.01),
        lambda: kinds.SGD(0.1, global_clipnorm=0.01, weight_decay=0.01), lambda: kinds.AdamW(0.01, use_ema=True),
        lambda: kinds.SGD(0.1, gradient_accumulation_steps=3), lambda: kinds.SGD(0.1, loss_scale_factor=8.0),
        lambda: kinds.LossScaleOptimizer(kinds.Adam(0.01), dynamic_growth_steps=3),
    ]  # fmt: skip
    x, y = data(size)
    for i, make in enumerate(cases):
        alone = train(make_model(), make(), (x, y), 4 * size)
        if rank == 1:
            make_model()  # names of variables count the models of a process
        optimizer = hvd.DistributedOptimizer(make(), gradient_predivide_factor=2.0 if i == 1 else 1.0)
        assert isinstance(optimizer, type(make())) and optimizer.get_config().keys() == make().get_config().keys()
        found = train(make_model(), optimizer, (x[rank::size], y[rank::size]), 4)
        for one, expected in zip(found, alone, strict=True):
            np.testing.assert_allclose(one, expected, 1e-6, 1e-6, err_msg=f"case {i}")


def check_all_by_hand(rank, size):
    """apply(), and on JAX stateless_apply() in jit, with a variable without a gradient."""
    import keras

    import farandole.keras as hvd

    variables = [keras.Variable(np.full(3, 5.0, np.float32)) for _ in range(2)]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum)
    optimizer.build(variables)
    gradient = keras.ops.convert_to_tensor(np.full(3, rank + 1.0, np.float32))
    if backend() == "jax":
        import jax

        state = ([v.value for v in optimizer.variables], [gradient, gradient], [v.value for v in variables])
        (first, _), _ = jax.jit(optimizer.stateless_apply)(*state)
    else:
        optimizer.apply([gradient, None], variables)
        first = variables[0]
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(variables[1]), [5] * 3)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(first), [5 - size * (size + 1) / 2] * 3)


def check_an_infinite_gradient_on_one_rank(rank, size):
    """The step is left out on all ranks, and the scale is the same afterwards."""
    import keras

    import farandole.keras as hvd

    model = make_model()
    x, y = data(size)
    inner = keras.optimizers.SGD(0.1)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(inner, initial_scale=1024.0))
    before = model.get_weights()
    y = y[:4] * (np.inf if rank == 1 else 1)
    found = train(model, optimizer, (x[:4], y), 4, epochs=1)
    for one, expected in zip(found, before, strict=True):
        np.testing.assert_array_equal(one, expected)
    assert float(keras.ops.convert_to_numpy(optimizer.dynamic_scale)) == 512


def check_a_loss_scale_around_is_refused(rank, size):
    import keras

    import farandole.keras as hvd

    model = make_model("mixed_float16")
    outer = keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    raises(ValueError, "inside of a LossScaleOptimizer", train, model, outer, data(1), 4)


def check_an_embedding(rank, size):
    """Whose gradients are IndexedSlices on TensorFlow."""
    import keras

    import farandole.keras as hvd

    words = np.arange(ROWS * size).reshape(-1, 1) * 5 % 11
    goals = np.cos(words).astype(np.float32)

    def weights(optimizer, rows, batch):
        keras.utils.set_random_seed(3)
        layers = [keras.layers.Embedding(11, 4), keras.layers.Flatten(), keras.layers.Dense(1)]
        return train(keras.Sequential([keras.Input([1]), *layers]), optimizer, rows, batch)

    alone = weights(keras.optimizers.SGD(0.2), (words, goals), 4 * size)
    for how in ({}, {"sparse_as_dense": True}):
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.2), **how)
        found = weights(optimizer, (words[rank::size], goals[rank::size]), 4)
        for one, expected in zip(found, alone, strict=True):
            np.testing.assert_allclose(one, expected, 1e-6, 1e-6)


def check_the_callbacks(rank, size):
    import keras

    import farandole.keras as hvd

    model = make_model()
    model.set_weights([weight + rank for weight in model.get_weights()])
    x, y = data(size)
    seen = []

    def see_rate(batch, logs):
        getattr(model, "jax_state_sync", lambda: None)()
        seen.append(float(model.optimizer.learning_rate))

    watch = keras.callbacks.LambdaCallback(
        on_train_batch_begin=see_rate,
        on_epoch_end=lambda epoch, logs: seen.append((logs["loss"], logs["lr"])),
    )
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.2, warmup_epochs=2),
        hvd.callbacks.LearningRateScheduleCallback(0.2, 0.5, start_epoch=2, momentum_correction=False),
        hvd.callbacks.MetricAverageCallback(), watch,
    ]  # fmt: skip
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    model.compile(optimizer, loss="mse", jit_compile=backend() != "torch")  # the callbacks turn it off on TensorFlow
    model.fit(x[rank::size], y[rank::size], batch_size=12, epochs=3, shuffle=False, verbose=0, callbacks=callbacks)
    rates = [one for one in seen if isinstance(one, float)]
    np.testing.assert_allclose(rates, [0.2 / size * (n * (size - 1) / 4 + 1) for n in (1, 2, 3, 4)] + [0.05] * 2, 1e-6)
    every = hvd.allgather_object((seen, [weight.tolist() for weight in model.get_weights()]))
    assert every == every[:1] * size and len(seen) == 9


def check_a_model_that_is_not_built_or_is_loaded_on_one_rank(rank, size):
    """Horovod's examples have no Input, and load a checkpoint on rank 0 alone."""
    import keras

    import farandole.keras as hvd

    rows = tuple(part[rank::size] for part in data(size))

    def make():
        keras.utils.set_random_seed(rank)
        return keras.Sequential([keras.layers.Dense(4), keras.layers.Dropout(0.5), keras.layers.Dense(1)])

    def is_the_same_everywhere(model):
        found = [*model.get_weights(), *map(keras.ops.convert_to_numpy, model.optimizer.variables)]
        every = hvd.allgather_object([value.tolist() for value in found])
        return every == every[:1] * size and len(every[0]) > 8

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.keras")
        for is_loaded in (False, rank == 0):
            model = hvd.load_model(path) if is_loaded else make()
            if not is_loaded:
                model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01 * (rank + 1))), loss="mse")
            start = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
            model.fit(*rows, batch_size=4, verbose=0, callbacks=start)
            assert is_the_same_everywhere(model)
            model.save(path)


def check_copies_are_distributed(rank, size):
    import keras

    import farandole.keras as hvd

    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum)
    for one in (copy.deepcopy(optimizer), copy.copy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        variable = keras.Variable(np.zeros(2, np.float32))
        one.apply([keras.ops.convert_to_tensor(np.full(2, rank + 1.0, np.float32))], [variable])
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), [-size * (size + 1) / 2] * 2)


def check_momenta_follow_the_learning_rate(rank, size):
    """As Horovod's change of the factor for one batch does, of a loss whose gradient is 0."""
    import keras

    import farandole.keras as hvd

    model = make_model()
    optimizer = keras.optimizers.SGD(0.1, momentum=0.5)
    optimizer.build(model.trainable_variables)
    optimizer.momentums[-1].assign([8.0])
    callback = hvd.callbacks.LearningRateScheduleCallback(0.2, lambda epoch: 2.0)
    model.compile(optimizer, loss=lambda y, z: 0 * keras.ops.mean(z))
    model.fit(*data(1), batch_size=ROWS, epochs=1, verbose=0, callbacks=[callback])
    np.testing.assert_allclose(keras.ops.convert_to_numpy(optimizer.momentums[-1]), [8 * 0.5 * 0.4 / 0.1], 1e-6)
    raises(ValueError, "warmup_epochs must be above 0", hvd.callbacks.LearningRateWarmupCallback, 0.1, 0)


def check_saving_and_loading(rank, size):
    """The file is Keras's own; training goes on, with the optimizer's state, as without a stop."""
    import keras

    import farandole.keras as hvd

    rows = tuple(part[rank::size] for part in data(size))

    def fit(model):
        model.fit(*rows, batch_size=4, epochs=2, shuffle=False, verbose=0)
        return [*model.get_weights(), *map(keras.ops.convert_to_numpy, model.optimizer.variables)]

    model = make_model()
    train(model, hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), rows, 4)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.keras")
        model.save(path)
        plain, again = keras.saving.load_model(path), hvd.load_model(path)
    for one in (plain.optimizer, model.optimizer.from_config(model.optimizer.get_config())):
        assert isinstance(one, keras.optimizers.Adam) and not hasattr(one, "_farandole_reduce")
    for one, expected in zip(fit(again), fit(model), strict=True):
        np.testing.assert_array_equal(one, expected)


def check_values(rank, size):
    import keras

    import farandole.keras as hvd

    assert float(hvd.allreduce(float(rank), op=hvd.Sum)) == sum(range(size))
    variable = keras.Variable(np.full(2, rank, np.float32))
    made = hvd.allgather(variable, name="v")
    assert keras.ops.is_tensor(made)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(made), np.repeat(np.arange(size), 2))
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(hvd.broadcast(variable, 1)), [1, 1])
    assert np.asarray(hvd.reducescatter(np.arange(2.0 * size), op=hvd.Sum)).tolist()[0] == size * 2 * rank
    hvd.broadcast_variables([variable], root_rank=1)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), [1, 1])


def check_what_is_refused(rank, size):
    import keras

    import farandole.keras as hvd

    def wrap(**how):
        return hvd.DistributedOptimizer(keras.optimizers.SGD(), **how)

    raises(ValueError, "gradient_accumulation_steps", wrap, backward_passes_per_step=2)
    raises(ValueError, "op must be Average, Sum or Adasum, not 3", wrap, op=hvd.Min)
    raises(ValueError, "needs op=Average", wrap, op=hvd.Sum, gradient_predivide_factor=2.0)
    raises(ValueError, "compression must be", wrap, compression=7)
    raises(ValueError, "distributed already", hvd.DistributedOptimizer, wrap())
    raises(TypeError, "optimizer must be a keras.optimizers.Optimizer, not str", hvd.DistributedOptimizer, "sgd")
    raises(TypeError, r"variables\[0\] is of type int", hvd.broadcast_variables, [1])
    if backend() == "tensorflow":
        model = make_model()
        model.compile(wrap(), loss="mse", jit_compile=True)  # as Keras does by itself where there is a GPU
        raises(ValueError, "jit_compile of the model is True", model.fit, *data(1), verbose=0)
