"""Farandole for JAX: collectives inside and outside of ``jax.jit``, and an optimizer of optax that averages gradients.

import farandole.jax as hvd

hvd.init()
params = hvd.broadcast_parameters(params, root_rank=0)
optimizer = hvd.DistributedOptimizer(optax.adam(1e-3))
"""

from farandole import basics, exceptions, generations, in_process, stopping
from farandole.basics import *
from farandole.exceptions import *
from farandole.generations import *
from farandole.jax import ops
from farandole.jax._errors import errors
from farandole.jax.functions import (
    add_process_set,
    allgather_object,
    broadcast_object,
    broadcast_parameters,
    join,
    remove_process_set,
)
from farandole.jax.ops import *
from farandole.jax.optimizer import DistributedOptimizer
from farandole.ops import Average, Max, Min, Product, Sum
from farandole.stopping import *

__all__ = [
    "Average", "DistributedOptimizer", "Max", "Min", "Product", "Sum", "add_process_set", "allgather_object",
    "broadcast_object", "broadcast_parameters", "errors", "in_process", "join", "remove_process_set",
]  # fmt: skip
__all__ += basics.__all__
__all__ += exceptions.__all__
__all__ += generations.__all__
__all__ += ops.__all__
__all__ += stopping.__all__
