"""A communication hook for torch's DistributedDataParallel, whatever backend its process group has."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch

from farandole import basics, ops
from farandole.torch import _calls
from farandole.torch.compression import Compression, native_wire

__all__ = ["ddp_hook"]


class _Ranks:
    """All ranks of one context."""

    def __init__(self) -> None:
        self._calls = _calls.Calls()
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

    def start(self, core: Any, tensor: torch.Tensor, wire: int) -> Any:
        """Starts an average. They are matched by dtype and number of elements, and in order: the buckets of two
        models, which may be in flight together, have the same numbers."""
        key = (tensor.dtype, tensor.numel(), wire)
        found = self._calls.find(key)
        if found is None:
            how = ops.reduction_options(ops.ALLREDUCE, ops.Average, 1.0, 1.0, basics.global_process_set, wire)
            found = self._calls.add(key, how, f"ddp_hook: {str(tensor.dtype)[6:]}[{tensor.numel()}]")
        return _calls.start(core, found.options, found.name(), tensor, ops.IN_PLACE)


_ranks: weakref.WeakKeyDictionary[basics.Context, _Ranks] = weakref.WeakKeyDictionary()


def ddp_hook(state: Any, bucket: Any) -> Any:
    """Averages the gradients of torch's DistributedDataParallel over Farandole's ranks, with any process group.

        farandole.torch.init()
        model = DistributedDataParallel(model)
        model.register_comm_hook(farandole.torch.Compression.bf16, farandole.torch.ddp_hook)

    DDP still uses the process group for its other communication, such as the broadcast of the parameters. It must
    have the same ranks as ``farandole.init()``; gradients are averaged over all of them.

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
    handle = ranks.start(context.core, sent, wire or 0)

    def average() -> Any:
        handle.wait()
        if wire is None:
            with torch.no_grad():
                buffer.copy_(compression.decompress(sent, how_to_restore))
        return buffer

    return _future_of(handle, average, buffer.device)


def _future_of(handle: Any, value: Callable[[], Any], device: torch.device) -> Any:
    """A future of what ``value()`` gives or raises, called once when the operation is done.

    In host memory that is here, if the operation is done already, or on a thread of the library. On a GPU it is here,
    once the operation is in a stream: the future belongs to the caller's.
    """
    ended: Any = torch.futures.Future(devices=[device]) if device.type == "cuda" else torch.futures.Future()
    if device.type == "cuda":
        ended.set_result(value())
        return ended
    # An error set by set_exception() is a value to torch's C++, such as DDP's; one raised in then() is an error.
    future = ended.then(lambda _: value())
    handle.when_done(lambda: ended.set_result(None))
    return future


# DDP compares them with its own classes, which a torch without torch.distributed has not.
for _name in ("bucket", "return"):
    del ddp_hook.__annotations__[_name]
