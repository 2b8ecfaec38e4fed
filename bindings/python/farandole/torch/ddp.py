"""A communication hook for torch's DistributedDataParallel, whatever backend its process group has."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch

from farandole import basics, ops
from farandole.torch.compression import Compression, native_wire

__all__ = ["ddp_hook"]


class _Ranks:
    """All ranks of one context, as the group of a Work of the backend."""

    group_name = "of all ranks"

    def __init__(self) -> None:
        from farandole.torch import distributed  # not above: it registers the backend

        self.backend = distributed
        self.completer = distributed._Completer()
        self._calls: dict[Any, Any] = {}
        self._checked: set[int] = set()  # ids of parameters

    def check_group_of(self, parameter: torch.Tensor) -> None:
        """Once for each model: a bucket does not say whose it is, so it is looked for.

        Raises:
            ValueError: The model's process group has other ranks than farandole.
        """
        if id(parameter) in self._checked:
            return
        for model in gc.get_objects():
            if not issubclass(type(model), torch.nn.parallel.DistributedDataParallel):
                continue
            group = model.process_group.size()
            if group != basics.size() and any(one is parameter for one in model.parameters()):
                raise ValueError(f"ddp_hook: the model's process group has {group} ranks and farandole {basics.size()}")
        self._checked.add(id(parameter))

    def renumber(self, error: Exception, _: Any = None) -> Exception:
        return error

    def calls_of(self, tensor: torch.Tensor, wire: int) -> Any:
        """The averages of tensors of this shape and dtype. They are matched by that, and in order: the buckets
        of two models, which may be in flight together, have the same numbers."""
        key = (tensor.dtype, tensor.shape, wire)
        if key not in self._calls:
            how = ops.reduction_options(ops.ALLREDUCE, ops.Average, 1.0, 1.0, basics.global_process_set, wire)
            text = f"ddp_hook: {str(tensor.dtype)[6:]}{list(tensor.shape)}"
            self._calls[key] = self.backend._Calls(how, text)
        return self._calls[key]


_ranks: weakref.WeakKeyDictionary[basics.Context, _Ranks] = weakref.WeakKeyDictionary()


def ddp_hook(state: Any, bucket: Any) -> Any:
    """Averages the gradients of torch's DistributedDataParallel over Farandole's ranks, beside any process group.

        farandole.torch.init()
        model = DistributedDataParallel(model)
        model.register_comm_hook(farandole.torch.Compression.bf16, farandole.torch.ddp_hook)

    The process group still serves what DDP does once, such as the broadcast of the parameters. It must have the
    same ranks as ``farandole.init()``, over all of which gradients are averaged.

    Args:
        state: How gradients travel, as ``compression=`` of :func:`farandole.torch.allreduce`; None: as they are.
        bucket: torch's GradBucket.
    Returns:
        A future of the bucket's buffer with the averages. Backward goes on meanwhile; on a GPU it waits until the
        allreduce is in a stream.
    Raises:
        HorovodInternalError: Out of ``backward()``: a rank is lost, or not initialized.
        ValueError: ``state`` is no compression; the process group has another number of ranks.
    """
    context = basics.current()
    ranks = _ranks.get(context) or _ranks.setdefault(context, _Ranks())
    size = torch.distributed.get_world_size()
    if size != basics.size():
        raise ValueError(f"ddp_hook: torch.distributed has {size} ranks and farandole {basics.size()}")
    if bucket.index() == 0:
        ranks.check_group_of(bucket.parameters()[0])
    compression = Compression.none if state is None else state
    wire, buffer = native_wire(compression), bucket.buffer()
    sent, how_to_restore = (buffer, None) if wire is not None else compression.compress(buffer)

    def restore(_: Any) -> None:
        buffer.copy_(compression.decompress(sent, how_to_restore))

    handle = ranks.calls_of(sent, wire or 0).start(context.core, sent, ops.IN_PLACE, None)
    work = ranks.backend.Work(ranks, [handle], [buffer], None if wire is not None else restore)
    return work.get_future().then(lambda future: future.value()[0])


# DDP compares them with its own classes, which a torch without torch.distributed has not.
for _name in ("bucket", "return"):
    del ddp_hook.__annotations__[_name]
