# As users of Horovod write it, for tf.keras.
import tensorflow as tf
import horovod.tensorflow.keras as hvd

hvd.init()

x = tf.random.stateless_uniform([4096, 2], [hvd.rank(), 1], -1, 1)
y = tf.cast(tf.reduce_sum(x * x, axis=1) < 0.6, tf.int64)
dataset = tf.data.Dataset.from_tensor_slices((x, y)).repeat().shuffle(1000).batch(64)

model = tf.keras.Sequential([
    tf.keras.layers.Dense(32, activation='relu'),
    tf.keras.layers.Dense(2, activation='softmax')
])
scaled_lr = 0.01 * hvd.size()
opt = tf.optimizers.Adam(scaled_lr)
opt = hvd.DistributedOptimizer(opt, backward_passes_per_step=1, average_aggregated_gradients=True)

model.compile(loss=tf.losses.SparseCategoricalCrossentropy(),
              optimizer=opt,
              metrics=['accuracy'],
              )
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=3, verbose=1),
]
if hvd.rank() == 0:
    callbacks.append(tf.keras.callbacks.ModelCheckpoint('./checkpoint-{epoch}.keras'))
verbose = 2 if hvd.rank() == 0 else 0
history = model.fit(dataset, steps_per_epoch=100 // hvd.size(), callbacks=callbacks, epochs=5, verbose=verbose)
if hvd.rank() == 0:
    print('accuracy=%.3f' % history.history['accuracy'][-1])
