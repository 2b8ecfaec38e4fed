"""Farandole for PyTorch, with the names and the meaning of ``horovod.torch``.

    import farandole.torch as hvd

    hvd.init()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

The gradients are averaged over all ranks when ``backward()`` returns.
"""

from farandole import allgather_object, basics, broadcast_object, exceptions, generations, in_process, stopping
from farandole.basics import *
from farandole.exceptions import *
from farandole.generations import *
from farandole.ops import Adasum, Average, Handle, Max, Min, Product, Sum, barrier, interrupted, join, poll, synchronize
from farandole.stopping import *
from farandole.torch import _input, elastic, ops  # noqa: F401  (the first notes how long loaders take)
from farandole.torch._watch import watch
from farandole.torch.compression import Compression, PowerSGD
from farandole.torch.ddp import ddp_hook
from farandole.torch.functions import (
    broadcast_optimizer_state,
    broadcast_parameters,
    check_replicas,
    sparse_allreduce_async,
)
from farandole.torch.job import Epoch, Job
from farandole.torch.metrics import allreduce_tree, evaluate, metric_average
from farandole.torch.ops import *
from farandole.torch.optimizer import Distributed, DistributedOptimizer, WrappedOptimizer, unwrap
from farandole.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "Adasum", "Average", "Compression", "Distributed", "DistributedOptimizer", "Epoch", "Handle", "Job", "Max", "Min",
    "PowerSGD", "Product", "Sum", "SyncBatchNorm", "WrappedOptimizer", "allgather_object", "allreduce_tree", "barrier",
    "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters", "check_replicas", "ddp_hook", "elastic",
    "evaluate", "in_process", "interrupted", "join", "metric_average", "poll", "sparse_allreduce_async", "synchronize",
    "unwrap", "watch",
]  # fmt: skip
__all__ += basics.__all__
__all__ += exceptions.__all__
__all__ += generations.__all__
__all__ += ops.__all__
__all__ += stopping.__all__
