"""Farandole for TensorFlow 2, with the names and the meaning of ``horovod.tensorflow``.

    import farandole.tensorflow as hvd

    hvd.init()
    hvd.broadcast_variables(model.weights, root_rank=0)
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = ...
    gradients = tape.gradient(loss, model.trainable_weights)  # means over all ranks

The functions work on eager tensors, and inside ``tf.function`` without ``jit_compile=True``.
"""

from farandole import allgather_object, basics, broadcast_object, exceptions, generations, in_process, stopping
from farandole.basics import *
from farandole.compression import Compression
from farandole.exceptions import *
from farandole.generations import *
from farandole.ops import Adasum, Average, Max, Min, Product, Sum
from farandole.stopping import *
from farandole.tensorflow import ops
from farandole.tensorflow.gradients import DistributedGradientTape
from farandole.tensorflow.ops import *
from farandole.tensorflow.optimizer import DistributedOptimizer

__all__ = [
    "Adasum", "Average", "Compression", "DistributedGradientTape", "DistributedOptimizer", "Max", "Min", "Product",
    "Sum", "allgather_object", "broadcast_object", "in_process",
]  # fmt: skip
__all__ += basics.__all__
__all__ += exceptions.__all__
__all__ += generations.__all__
__all__ += ops.__all__
__all__ += stopping.__all__
