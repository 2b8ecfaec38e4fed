"""Farandole for PyTorch, with the names and the meaning of ``horovod.torch``.

    import farandole.torch as fl

    fl.init()
    fl.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = fl.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

The gradients are averaged over all ranks when ``backward()`` returns.
"""

from farandole import (
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
    Product,
    Sum,
    allgather_object,
    barrier,
    broadcast_object,
    counters,
    cross_rank,
    cross_size,
    init,
    interrupted,
    is_initialized,
    join,
    local_rank,
    local_size,
    poll,
    rank,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
    synchronize,
)
from farandole.torch import elastic
from farandole.torch._collectives import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
)
from farandole.torch._groups import (
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from farandole.torch._rows import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    grouped_allgather,
    grouped_allgather_async,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from farandole.torch._sparse_sum import sparse_allreduce_async
from farandole.torch.compression import Compression
from farandole.torch.functions import broadcast_optimizer_state, broadcast_parameters
from farandole.torch.metrics import allreduce_tree, evaluate, metric_average
from farandole.torch.optimizer import DistributedOptimizer, unwrap
from farandole.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "AbortedError",
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Handle",
    "HorovodInternalError",
    "Max",
    "Min",
    "MismatchError",
    "OperationTimeoutError",
    "PeerLostError",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "allreduce_tree",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "counters",
    "cross_rank",
    "cross_size",
    "elastic",
    "evaluate",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "interrupted",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "metric_average",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
    "unwrap",
]
