# As users of Horovod write it: a loop with a tape, the optimizer broadcast after the first batch.
import tensorflow as tf
import horovod.tensorflow as hvd

hvd.init()
gpus = tf.config.experimental.list_physical_devices('GPU')
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], 'GPU')

x = tf.random.stateless_uniform([4096, 2], [hvd.rank(), 1], -1, 1)
y = tf.cast(tf.reduce_sum(x * x, axis=1) < 0.6, tf.int64)
dataset = tf.data.Dataset.from_tensor_slices((x, y)).repeat().shuffle(1000).batch(64)

model = tf.keras.Sequential([
    tf.keras.layers.Dense(32, activation='relu'),
    tf.keras.layers.Dense(2, activation='softmax')
])
loss = tf.losses.SparseCategoricalCrossentropy()
opt = tf.optimizers.Adam(0.01 * hvd.size())
checkpoint = tf.train.Checkpoint(model=model, optimizer=opt)


@tf.function
def training_step(images, labels, first_batch):
    with tf.GradientTape() as tape:
        probs = model(images, training=True)
        loss_value = loss(labels, probs)

    tape = hvd.DistributedGradientTape(tape, compression=hvd.Compression.none)
    grads = tape.gradient(loss_value, model.trainable_variables)
    opt.apply_gradients(zip(grads, model.trainable_variables))

    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(opt.variables, root_rank=0)
    return loss_value


for batch, (images, labels) in enumerate(dataset.take(400 // hvd.size())):
    loss_value = training_step(images, labels, batch == 0)
    if batch % 50 == 0 and hvd.local_rank() == 0:
        print('Step #%d\tLoss: %.6f' % (batch, loss_value))

right = tf.reduce_mean(tf.cast(tf.argmax(model(x), axis=1) == y, tf.float32))
right = hvd.allreduce(right, average=True)
if hvd.rank() == 0:
    checkpoint.save('./checkpoints')
    print('accuracy=%.3f' % right)
