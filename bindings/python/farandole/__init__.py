"""Farandole averages gradients, and runs other collectives, across the processes of a training job.

This module works on NumPy arrays, on anything with the buffer protocol or DLPack, and on arrays on
an NVIDIA GPU. It imports no framework. ``farandole.torch`` is the frontend for PyTorch.

    import farandole
    import numpy as np

    farandole.init()
    mean = farandole.allreduce(np.full(4, farandole.rank(), np.float32))
"""

from farandole import _loading as _loading  # isort: skip  # before all that imports _core
from farandole import _core, basics, exceptions, generations, ops, stopping
from farandole._in_process import in_process
from farandole._spawn import spawn
from farandole.basics import *
from farandole.exceptions import *
from farandole.generations import *
from farandole.objects import allgather_object, broadcast_object
from farandole.ops import *
from farandole.stopping import *

__version__: str = _core.version

__all__ = ["allgather_object", "broadcast_object", "in_process", "spawn"]
__all__ += basics.__all__
__all__ += exceptions.__all__
__all__ += generations.__all__
__all__ += ops.__all__
__all__ += stopping.__all__
