"""The hooks of torch.distributed that observe collectives: pre and post hooks, NaN check and flight recorder.

torch calls them in its dispatcher, which hands a collective to the backend of a group of torch's own. A group of ours
answers itself, in less time, and takes that way only once there are hooks.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from typing import Any

from torch._C import _distributed_c10d

NAME = "farandole"
_BUFFER_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # the first that is set counts
#: What the dispatcher hands over.
_HANDED = """
    all_gather_single all_gather_single_coalesced all_to_all_single allgather allgather_coalesced allreduce
    allreduce_coalesced alltoall barrier broadcast gather recv recv_anysource reduce reduce_scatter
    reduce_scatter_single reduce_scatter_single_coalesced scatter send
""".split()
#: Names of some of these before torch 2.13.
_OLD = """
    _allgather_base _reduce_scatter_base allgather_into_tensor_coalesced alltoall_base reduce_scatter_tensor_coalesced
""".split()
_torch: Any = _distributed_c10d  # untyped: from one torch to the next


class _Backend(_torch.Backend):  # type: ignore[misc]  # see above
    """What torch's group has for a backend: the group of ours."""

    def __init__(self, group: Any) -> None:
        super().__init__(group.rank(), group.size())
        self._group = weakref.ref(group)  # C++ keeps this object, and the group keeps that
        self._here = threading.local()

    def getBackendName(self) -> str:
        return NAME

    def is_calling(self) -> bool:
        """Whether this thread is in a call of a method of the group."""
        return getattr(self._here, "is_calling", False)

    def call(self, name: str, *arguments: Any, **named: Any) -> Any:
        group, is_inner, self._here.is_calling = self._group(), self.is_calling(), True
        try:
            self._here.work = getattr(type(group), name)(group, *arguments, **named)
        finally:
            self._here.is_calling = is_inner
        return self._here.work

    def take_work(self) -> Any:
        """Of this thread's last call: C++ has wrapped what it was given, in something that knows of no end."""
        return self._here.__dict__.pop("work")


def _handing_over(name: str) -> Any:
    def hand_over(self: _Backend, *arguments: Any) -> Any:
        return self.call(name, *arguments)

    return hand_over


for _name in _HANDED:
    setattr(_Backend, _name, _handing_over(_name))
_Backend.allreduce_sparse = _handing_over("allreduce")


class Observed:
    """Has the hooks of a group: a group of torch's own before it.

    Args:
        group: Of ours, which keeps this; from now on its collectives come here.

    Raises:
        NotImplementedError: torch has no such hooks.

    Thread safety: as the group.
    """

    def __init__(self, group: Any) -> None:
        if not hasattr(_torch.ProcessGroup, "register_pre_hook"):
            raise NotImplementedError(f"{NAME}: hooks on collectives need torch 2.14 or newer")
        self._hooks: dict[tuple[str, int], Any] = {}
        self.renew(group)
        for name in (*_HANDED, *_OLD):
            setattr(group, name, functools.partial(self._call, name))

    def renew(self, group: Any) -> None:
        """With the hooks so far: the group has other members, and so needs another group of torch's."""
        self.group = _torch.ProcessGroup(group.get_group_store(), group.rank(), group.size())
        self._ours = _Backend(group)
        custom = _torch.ProcessGroup.BackendType.CUSTOM
        self.group._set_default_backend(custom)
        for device in group.fl_devices:
            self.group._register_backend(device, custom, self._ours)
        self.group._set_group_name(group.group_name)
        self.group._set_group_desc(group.group_desc)
        self._recorder: Any = None  # records as long as it is there
        for (kind, number), hook in self._hooks.items():
            getattr(self.group, f"register_{kind}_hook")(number, hook)

    def register(self, kind: str, number: int, hook: Any) -> None:
        """``kind``: pre or post."""
        getattr(self.group, f"register_{kind}_hook")(number, hook)
        self._hooks[kind, number] = hook

    def unregister(self, kind: str, number: int) -> None:
        getattr(self.group, f"unregister_{kind}_hook")(number)
        self._hooks.pop((kind, number), None)

    def attach_asked(self, ranks: list[int]) -> None:
        """The hooks that the environment asks for. ``ranks``: the group's, by their numbers in torch's job."""
        if is_nan_checked():
            _torch.NanCheckHook.attach(self.group)
        if is_recorded():
            self._recorder = _torch.FlightRecorderHook.attach(self.group, ranks)

    def _call(self, name: str, *arguments: Any, **named: Any) -> Any:
        if self._ours.is_calling():  # one method of the group calls another one
            return self._ours.call(name, *arguments, **named)
        getattr(self.group, name)(*arguments, **named)
        return self._ours.take_work()


def are_asked() -> bool:
    """Whether the environment asks for hooks."""
    return is_nan_checked() or is_recorded()


def is_nan_checked() -> bool:
    return os.environ.get("TORCH_DIST_NAN_CHECK") == "1" and hasattr(_torch, "NanCheckHook")


def is_recorded() -> bool:
    """Only if it is asked for: torch 2.15 records by default, and Farandole has a recorder that costs less."""
    sizes = [os.environ[name] for name in _BUFFER_SIZES if os.environ.get(name)]
    return bool(sizes) and int(sizes[0]) > 0 and hasattr(_torch, "HealthCheckHook")  # of torch 2.15
