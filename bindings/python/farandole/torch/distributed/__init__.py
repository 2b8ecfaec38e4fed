"""The backend ``farandole`` of ``torch.distributed``, for DDP, FSDP and other users of it.

    import torch.distributed as dist
    import farandole.torch.distributed

    dist.init_process_group("farandole")

Importing this module registers the backend for tensors in host memory and on NVIDIA GPUs; torch 2.14 and
newer find it by its name, without the import. Every group is a job of its own. Its ranks meet at the store that
torch passes to the group, and its collectives, errors and end do not affect other groups. A group costs three
sleeping threads (four with the flight recorder's files, which are on under a launcher) and about ten descriptors.

``init_method="farandole://"`` finds rank, size and store under any launcher, such as ``mpirun``; the default,
``"env://"``, needs the variables that ``torchrun`` and ``farandolerun`` set.

Collectives of a group are matched by collective, dtype, number of elements, operation and root, and by how
many such calls came before. All ranks must call them in the same order: if each rank waits for a call that
another one has not made, all get an error that names the calls and their places in the program.

Messages (``send``, ``recv``) between two ranks travel in a job of those two, created by the first message, as NCCL
creates a communicator for each pair; in a group of two ranks it is the group's job.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import socket
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch.distributed

from farandole import basics, objects
from farandole.torch import _calls, _compat
from farandole.torch.distributed._futures import Completer
from farandole.torch.distributed._group import DEVICES, NAME, ProcessGroup
from farandole.torch.distributed._hooks import Observed
from farandole.torch.distributed._job import Job
from farandole.torch.distributed._members import serve_store
from farandole.torch.distributed._pair import Later, Pair
from farandole.torch.distributed._work import Work

__all__ = ["ProcessGroup", "Work"]

dist: Any = torch.distributed


def _create(options: Any, *_: Any) -> ProcessGroup:
    ranks, timeout_s = options.global_ranks_in_group, options.timeout.total_seconds()
    devices = _devices_of(sys._getframe(1))
    is_joined = not getattr(options, "enable_reconfigure", False)  # of torch 2.14
    return ProcessGroup(options.store, options.group_rank, options.group_size, ranks, timeout_s, devices, is_joined)


def _devices_of(frame: types.FrameType | None) -> list[str]:
    """The devices that torch's function that makes a group, which called, wants served.

    Raises:
        ValueError: It wants others served by another backend. A ProcessGroup replaces the group with all of its
            backends without a word, and the backend is not told of these.
    """
    config = frame.f_locals.get("backend_config") if frame is not None else None
    backends: dict[str, str] = config.get_device_backend_map() if config is not None else {}
    if any(str(backend) != NAME for backend in backends.values()):
        asked = ",".join(f"{device}:{backend}" for device, backend in backends.items())
        raise ValueError(f'{NAME}: backend "{asked}" is not supported: a group of {NAME} has no other backend beside '
                         f'it; expected "{NAME}", which serves {" and ".join(DEVICES)}')  # fmt: skip
    return list(backends) or list(DEVICES)


def _rendezvous(_url: str, timeout: datetime.timedelta = datetime.timedelta(minutes=5), **_: Any) -> Iterator[Any]:
    """``init_method="farandole://"``: a store of torch's on the host of rank 0, which :func:`init` finds."""
    basics.init()
    rank, size = basics.rank(), basics.size()
    store, address = None, ("", 0)
    if rank == 0:
        store = serve_store(size, timeout)
        host = socket.gethostname() if basics.cross_size() > 1 else "127.0.0.1"
        address = (host, store.port)
    host, port = objects.broadcast_object(address, 0, "farandole.torch.distributed")
    if store is None:
        store = dist.TCPStore(host, port, size, False, timeout, wait_for_workers=False)
    yield store, rank, size
    raise RuntimeError("farandole:// does not support a change of the world")


def _ask_groups_of_ours() -> None:
    """torch's function before 2.14 refuses any backend that is not named gloo."""
    of_torch = dist.monitored_barrier

    @functools.wraps(of_torch)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        asked = dist.group.WORLD if group is None else group
        call = asked.monitored_barrier if isinstance(asked, ProcessGroup) else functools.partial(of_torch, group)
        call(timeout, wait_all_ranks)

    dist.monitored_barrier = dist.distributed_c10d.monitored_barrier = monitored_barrier


def _register() -> None:
    """What importing this module does, for torch 2.14 and newer, which find it as an entry point of the package."""
    with contextlib.suppress(RuntimeError):  # registered before, as by a reload
        dist.register_rendezvous_handler(NAME, _rendezvous)
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=list(DEVICES))
        if not hasattr(dist, "_reconfigure"):  # before torch 2.14
            _ask_groups_of_ours()


_compat.hide_from_compiler((ProcessGroup, Work, Observed, _calls.Kind, _calls.Calls, Completer, Job, Later, Pair))
_register()
