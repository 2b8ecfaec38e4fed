"""Farandole for PyTorch, with the names and the meaning of ``horovod.torch``.

    import farandole.torch as fl

    fl.init()
    fl.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = fl.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

The gradients are averaged over all ranks when ``backward()`` returns.
"""

from farandole import (
    allgather_object,
    broadcast_object,
    AbortedError,
    Adasum,
    Average,
    Handle,
    HorovodInternalError,
    Max,
    Min,
    MismatchError,
    OperationTimeoutError,
    PeerLostError,
    ProcessSet,
    Product,
    Sum,
    add_process_set,
    barrier,
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
    interrupted,
    is_homogeneous,
    is_initialized,
    join,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    poll,
    rank,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
    synchronize,
)
from farandole.torch import elastic
from farandole.torch.compression import Compression
from farandole.torch.functions import (
    broadcast_optimizer_state,
    broadcast_parameters,
    sparse_allreduce_async,
)
from farandole.torch.metrics import allreduce_tree, evaluate, metric_average
from farandole.torch.ops import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
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
    reducescatter,
    reducescatter_async,
)
from farandole.torch.optimizer import DistributedOptimizer, unwrap
from farandole.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "AbortedError", "Adasum", "Average", "Compression", "DistributedOptimizer", "Handle",
    "HorovodInternalError", "Max", "Min", "MismatchError", "OperationTimeoutError", "PeerLostError",
    "ProcessSet", "Product", "Sum", "SyncBatchNorm", "add_process_set", "allgather",
    "allgather_async", "allgather_object", "allreduce", "allreduce_", "allreduce_async",
    "allreduce_async_", "allreduce_tree", "alltoall", "alltoall_async", "barrier", "broadcast",
    "broadcast_", "broadcast_async", "broadcast_async_", "broadcast_object",
    "broadcast_optimizer_state", "broadcast_parameters", "ccl_built", "counters", "cross_rank",
    "cross_size", "cuda_built", "ddl_built", "elastic", "evaluate", "global_process_set",
    "gloo_built", "gloo_enabled", "grouped_allgather", "grouped_allgather_async",
    "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async",
    "grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async", "init",
    "interrupted", "is_homogeneous", "is_initialized", "join", "local_rank", "local_size",
    "metric_average", "mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built", "poll",
    "rank", "reducescatter", "reducescatter_async", "remove_process_set", "rocm_built", "shutdown",
    "size", "sparse_allreduce_async", "start_timeline", "stop_timeline", "synchronize", "unwrap",
]  # fmt: skip
