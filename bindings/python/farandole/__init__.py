"""Farandole keeps the replicas of a model in step.

This module works on arrays of any library: NumPy's, on anything with the buffer protocol or DLPack,
and on arrays on an NVIDIA GPU; it imports no framework. ``farandole.torch`` is the frontend for
PyTorch.

    import farandole
    import numpy as np

    farandole.init()
    mean = farandole.allreduce(np.full(4, farandole.rank(), np.float32))
"""

from farandole import _core
from farandole.basics import (
    ProcessSet,
    add_process_set,
    ccl_built,
    counters,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from farandole.exceptions import (
    AbortedError,
    HorovodInternalError,
    MismatchError,
    OperationTimeoutError,
    PeerLostError,
)
from farandole.objects import allgather_object, broadcast_object
from farandole.ops import (
    Adasum,
    Average,
    Handle,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    interrupted,
    join,
    poll,
    reducescatter,
    reducescatter_async,
    synchronize,
)

__version__: str = _core.version

__all__ = [
    "AbortedError", "Adasum", "Average", "Handle", "HorovodInternalError", "Max", "Min",
    "MismatchError", "OperationTimeoutError", "PeerLostError", "ProcessSet", "Product", "Sum",
    "add_process_set", "allgather", "allgather_async", "allgather_object", "allreduce", "allreduce_", "allreduce_async",
    "allreduce_async_", "alltoall", "alltoall_async", "barrier", "broadcast", "broadcast_",
    "broadcast_async", "broadcast_async_", "broadcast_object", "ccl_built", "counters", "cross_rank", "cross_size",
    "cuda_built", "ddl_built", "global_process_set", "gloo_built", "gloo_enabled",
    "grouped_allgather", "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_",
    "grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter",
    "grouped_reducescatter_async", "init", "interrupted", "is_homogeneous", "is_initialized",
    "join", "local_rank", "local_size", "mpi_built", "mpi_enabled", "mpi_threads_supported",
    "nccl_built", "poll", "rank", "reducescatter", "reducescatter_async", "remove_process_set",
    "rocm_built", "shutdown", "size", "start_timeline", "stop_timeline", "synchronize",
]  # fmt: skip
