"""A training script to copy: plain Keras, and the lines with ``hvd`` that make it run on N ranks.

    KERAS_BACKEND=torch farandolerun -np 2 python examples/keras_mlp.py      (or jax, or tensorflow)
"""

import argparse

import keras
import numpy as np

import farandole.keras as hvd


def make_data(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Points of a square and whether they lie in a circle; put your own data here."""
    points = np.random.default_rng(seed).uniform(-1, 1, (count, 2)).astype(np.float32)
    return points, (np.square(points).sum(1) < 0.6).astype(np.int32)


def main() -> None:
    """Trains, prints the loss and the accuracy, and saves the model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="a short run, to see that it works")
    count, epochs = (2048, 3) if parser.parse_args().smoke else (8192, 10)

    hvd.init()
    keras.utils.set_random_seed(1)
    dense = keras.layers.Dense
    model = keras.Sequential([keras.Input([2]), dense(32, "relu"), dense(32, "relu"), dense(2)])
    rate = 0.05 * hvd.size()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.9))  # averages gradients
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])

    points, labels = make_data(count, seed=1)
    own = slice(hvd.rank(), count // hvd.size() * hvd.size(), hvd.size())  # as many samples on every rank
    test = make_data(1000, seed=2)
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),  # the same start everywhere
        hvd.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=2),
        hvd.callbacks.MetricAverageCallback(),
    ]
    model.fit(points[own], labels[own], batch_size=32, epochs=epochs, callbacks=callbacks, verbose=0)
    loss_of_test, accuracy = model.evaluate(*test, verbose=0)
    if hvd.rank() == 0:
        print(f"backend={keras.backend.backend()} ranks={hvd.size()} loss={loss_of_test:.3f} accuracy={accuracy:.3f}")
        model.save("circle.keras")  # a file of Keras; hvd.load_model() goes on with it


if __name__ == "__main__":
    main()
