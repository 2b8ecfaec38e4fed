"""Farandole keeps the replicas of a model in step.

This module works on NumPy arrays, on anything with the buffer protocol or DLPack, and on arrays on an
NVIDIA GPU; it imports no framework. ``farandole.torch`` is the face for PyTorch.

    import farandole
    import numpy as np

    farandole.init()
    mean = farandole.allreduce(np.full(4, farandole.rank(), np.float32))
"""

from farandole import _core
from farandole._context import (
    counters,
    cross_rank,
    cross_size,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from farandole._interrupted import interrupted
from farandole._numpy import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    reducescatter,
    reducescatter_async,
)
from farandole._numpy_rows import allgather, allgather_async, alltoall, alltoall_async
from farandole._objects import allgather_object, broadcast_object
from farandole._work import (
    Adasum,
    Average,
    Handle,
    Max,
    Min,
    Product,
    Sum,
    barrier,
    join,
    poll,
    synchronize,
)
from farandole.exceptions import (
    AbortedError,
    HorovodInternalError,
    MismatchError,
    OperationTimeoutError,
    PeerLostError,
)

__version__: str = _core.version

__all__ = [
    "AbortedError",
    "Adasum",
    "Average",
    "Handle",
    "HorovodInternalError",
    "Max",
    "Min",
    "MismatchError",
    "OperationTimeoutError",
    "PeerLostError",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "counters",
    "cross_rank",
    "cross_size",
    "init",
    "interrupted",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
