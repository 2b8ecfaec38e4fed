"""Farandole for Keras 3, on PyTorch, JAX and TensorFlow, with the names and the meaning of ``horovod.keras``.

    import farandole.keras as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01 * hvd.size()))
    model.compile(optimizer, loss="mse")
    model.fit(x, y, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
"""

from farandole import allgather_object, basics, broadcast_object, exceptions, generations, in_process, stopping
from farandole.basics import *
from farandole.compression import Compression
from farandole.exceptions import *
from farandole.generations import *
from farandole.keras import callbacks, functions
from farandole.keras.functions import *
from farandole.keras.optimizer import DistributedOptimizer
from farandole.ops import Adasum, Average, Max, Min, Product, Sum, barrier, join
from farandole.stopping import *

__all__ = [
    "Adasum", "Average", "Compression", "DistributedOptimizer", "Max", "Min", "Product", "Sum", "allgather_object",
    "barrier", "broadcast_object", "callbacks", "in_process", "join",
]  # fmt: skip
__all__ += basics.__all__
__all__ += exceptions.__all__
__all__ += functions.__all__
__all__ += generations.__all__
__all__ += stopping.__all__
