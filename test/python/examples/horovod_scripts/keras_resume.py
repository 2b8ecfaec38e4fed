# As users of Horovod write it, for Keras: checkpoints of rank 0, from which a second run goes on.
import os
import numpy as np
import keras
import horovod.keras as hvd

hvd.init()
checkpoint_format = './checkpoint-{epoch}.keras'
for epochs in (2, 6):
    resume_from_epoch = 0
    if hvd.rank() == 0:
        for try_epoch in range(epochs, 0, -1):
            if os.path.exists(checkpoint_format.format(epoch=try_epoch)):
                resume_from_epoch = try_epoch
                break
    resume_from_epoch = hvd.broadcast(resume_from_epoch, 0, name='resume_from_epoch')
    verbose = 1 if hvd.rank() == 0 else 0
    compression = hvd.Compression.fp16
    initial_lr = 0.05 * hvd.size()
    if resume_from_epoch > 0 and hvd.rank() == 0:
        model = hvd.load_model(checkpoint_format.format(epoch=resume_from_epoch), compression=compression)
    else:
        model = keras.Sequential([
            keras.layers.Dense(32, activation='relu'),
            keras.layers.Dense(2, activation='softmax')
        ])
        opt = keras.optimizers.SGD(learning_rate=initial_lr, momentum=0.9)
        opt = hvd.DistributedOptimizer(opt, compression=compression)
        model.compile(loss=keras.losses.sparse_categorical_crossentropy, optimizer=opt, metrics=['accuracy'])

    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(warmup_epochs=2, initial_lr=initial_lr, verbose=verbose),
        hvd.callbacks.LearningRateScheduleCallback(start_epoch=2, end_epoch=4, multiplier=1., initial_lr=initial_lr),
        hvd.callbacks.LearningRateScheduleCallback(start_epoch=4, multiplier=lambda epoch: 1e-1, initial_lr=initial_lr),
    ]
    if hvd.rank() == 0:
        callbacks.append(keras.callbacks.ModelCheckpoint(checkpoint_format))

    x = np.random.default_rng(hvd.rank()).uniform(-1, 1, (2048, 2)).astype(np.float32)
    y = (x * x).sum(1) < 0.6
    model.fit(x, y, batch_size=32, epochs=epochs, initial_epoch=resume_from_epoch, callbacks=callbacks, verbose=0,
              validation_data=(x[:64], y[:64]))
    score = hvd.allreduce(model.evaluate(x, y, verbose=0))
assert resume_from_epoch == 2
if verbose:
    print('accuracy=%.3f' % score[1])
