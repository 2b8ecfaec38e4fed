"""What each rank finds of farandole.keras when something goes wrong in fit(): each check in a job of its own."""

import os
import signal

from keras_checks import backend, data, make_model


def fit(batches, epochs=1, callbacks=()):
    """With so many batches; the text of the error, or "" without one."""
    import keras

    import farandole.keras as hvd

    model = make_model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse", jit_compile=backend() == "jax")
    x, y = data(1)
    rows = [part[: 2 * batches] for part in (x, y)]
    try:
        model.fit(*rows, batch_size=2, epochs=epochs, validation_data=(x, y), verbose=0, callbacks=[*callbacks])
    except Exception as error:
        return str(error)
    return ""


def check_a_killed_rank_is_named(rank, size):
    import keras

    def kill(batch, logs):
        if rank == 1 and batch == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    assert "rank 1" in fit(6, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=kill)])


def check_more_batches_on_one_rank_are_an_error(rank, size):
    import farandole.keras as hvd

    text = fit(5 + rank, callbacks=[hvd.callbacks.MetricAverageCallback()])
    assert "ranks wait for different" in text and "metrics" in text and "keras optimizer 0" in text, text


def check_the_end_on_one_rank_is_an_error(rank, size):
    text = fit(5 + rank)
    assert ("rank 0 has left" in text) == (rank == 1), text
