"""A training script to copy: a loop in plain TensorFlow, and the lines with ``hvd`` that make it run on N ranks.

    farandolerun -np 2 python examples/tensorflow_mlp.py
"""

import argparse

import tensorflow as tf

import farandole.tensorflow as hvd


def make_data(count: int, seed: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Points of a square and whether they lie in a circle; put your own data here."""
    points = tf.random.stateless_uniform([count, 2], [seed, 0], -1, 1)
    return points, tf.cast(tf.reduce_sum(points**2, 1) < 0.6, tf.int32)


def main() -> None:
    """Trains, and prints the loss and the accuracy after each epoch."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="a short run, to see that it works")
    count, epochs = (2048, 3) if parser.parse_args().smoke else (8192, 10)

    hvd.init()
    dense = tf.keras.layers.Dense
    model = tf.keras.Sequential([tf.keras.Input([2]), dense(32, "relu"), dense(32, "relu"), dense(2)])
    optimizer = tf.keras.optimizers.SGD(0.05 * hvd.size(), momentum=0.9)
    measure_loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    hvd.broadcast_variables(model.weights, root_rank=0)  # the same start everywhere

    @tf.function  # without jit_compile=True
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = measure_loss(y, model(x, training=True))
        tape = hvd.DistributedGradientTape(tape)  # averages gradients
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    @tf.function
    def evaluate(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        right = tf.cast(tf.argmax(model(x), 1, tf.int32) == y, tf.float32)
        return hvd.allreduce(tf.reduce_mean(right), name="accuracy")

    own = tf.data.Dataset.from_tensor_slices(make_data(count, seed=1)).shard(hvd.size(), hvd.rank())
    batches = own.take(count // hvd.size()).shuffle(1024, seed=1).batch(32, drop_remainder=True)
    test = make_data(1000, seed=2 + hvd.rank())  # each rank its own
    for epoch in range(epochs):
        for x, y in batches:
            loss = step(x, y)
        loss, accuracy = hvd.allreduce(loss, name="loss"), evaluate(*test)
        if hvd.rank() == 0:
            print(f"epoch={epoch} loss={loss:.3f} accuracy={accuracy:.3f}")


if __name__ == "__main__":
    main()
