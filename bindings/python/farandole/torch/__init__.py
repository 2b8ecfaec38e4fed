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
from farandole.torch._collectives import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
)
from farandole.torch.compression import Compression
from farandole.torch.functions import broadcast_optimizer_state, broadcast_parameters
from farandole.torch.optimizer import DistributedOptimizer

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
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
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
    "grouped_allgather",
    "grouped_allgather_async",
    "init",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
