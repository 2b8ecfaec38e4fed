"""Reconfigure handles of torch: where the members of a group's next generation meet, and in which order they are."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch.distributed

from farandole.exceptions import HorovodInternalError, OperationTimeoutError

_PREFIX = "farandole"
#: How long reconfigure() waits for the other members, if it is not told.
DEFAULT_TIMEOUT_S = 60.0
#: Untyped: from one torch to the next.
_dist: Any = torch.distributed
_lock = threading.Lock()
_servers: list[Any] = []  # the store that this process serves, once a group has been asked for its handle
_clients: dict[tuple[str, int], Any] = {}  # those that others serve, by address


class Handle(NamedTuple):
    """A process's object of a group: its id, the process's rank in torch's default group, and the address of the store
    that the process serves for next generations."""

    id: str
    rank: int
    host: str
    port: int

    @classmethod
    def create(cls, store: Any, size: int) -> Handle:
        """For a group of ``size`` ranks that have met at torch's ``store``."""
        with _lock:
            if not _servers:
                _servers.append(serve_store())
        return cls(uuid.uuid4().hex, 0, _own_address(store, size), int(_servers[0].port))

    @classmethod
    def parse(cls, text: str) -> Handle:
        """Raises ValueError if it is no handle of this backend's."""
        found = re.fullmatch(_PREFIX + r":(\w+):(\d+):(.+):(\d+)", text)
        if found is None:
            raise ValueError(f'reconfigure: expected handles of backend "{_PREFIX}"; got "{text}"')
        id_, rank, host, port = found.groups()
        return cls(id_, int(rank), host, int(port))

    def __str__(self) -> str:
        return f"{_PREFIX}:{self.id}:{self.rank}:{self.host}:{self.port}"


def serve_store(size: int | None = None, timeout: datetime.timedelta = datetime.timedelta(minutes=5)) -> Any:
    """A store of torch's that this process serves, at a port as :func:`supervisor.open_listener` finds it."""
    from farandole.runner import supervisor  # only here: most jobs serve none

    listener = supervisor.open_listener()
    port, descriptor = listener.getsockname()[1], listener.detach()
    try:
        return _dist.TCPStore("0.0.0.0", port, size, True, timeout, wait_for_workers=False, master_listen_fd=descriptor)
    except TypeError:  # it refuses an argument; after any other error torch has closed the descriptor
        os.close(descriptor)
        raise


def order(handles: Iterable[str], own: Handle | None) -> tuple[list[Handle], int]:
    """The members by rank, and which of them is this process. A set, which has no order, is sorted.

    Raises:
        ValueError: They are not of different groups' objects, or ``own``, of this process, is not among them.
    """
    texts = sorted(handles) if isinstance(handles, (set, frozenset)) else list(handles)
    members = [Handle.parse(text) for text in texts]
    ids = [member.id for member in members]
    if len(set(ids)) < len(ids):
        raise ValueError(f"reconfigure: expected different handles; got {texts}")
    if own is None or own.id not in ids:
        raise ValueError(f"reconfigure: this process, {own}, is not among the {len(texts)} given: {texts}")
    return members, ids.index(own.id)


def meet(members: list[Handle], rank: int, number: int, timeout_s: float) -> Any:
    """The store of a generation, at its rank 0, once all members are there. ``number``: the generation's alone.

    Raises:
        OperationTimeoutError: Some are not in time: its ``failed_ranks``.
        HorovodInternalError: Nobody serves the store.
    """
    until_s, pause_s = time.monotonic() + timeout_s, 0.0005
    address = members[0].host, members[0].port
    for gone in _clients.keys() - {(one.host, one.port) for one in members}:
        _clients.pop(gone, None)  # of those that are members no more; other groups connect again
    keys = [f"has come {one}" for one in range(len(members))]
    try:
        served = _servers[0] if rank == 0 else _connect(address, timeout_s)
        store = _dist.PrefixStore(f"{_PREFIX} {number} {members[0].id}", served)
        store.set(keys[rank], "")
        while not store.check(keys):  # wait() could not be interrupted
            if time.monotonic() > until_s:
                missing = [one for one, key in enumerate(keys) if not store.check([key])]
                text = f"reconfigure: ranks {missing} of {len(members)} have not come within {timeout_s:g} s"
                raise _failed(missing, OperationTimeoutError(text))
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
    except HorovodInternalError:
        raise
    except (OSError, RuntimeError) as error:
        _clients.pop(address, None)
        where = "{}:{}".format(*address)
        text = f"reconfigure: rank 0 cannot be reached at {where}: {error}"
        raise _failed([0], HorovodInternalError(text)) from error
    return store


def _failed(ranks: list[int], error: HorovodInternalError) -> HorovodInternalError:
    error.failed_ranks = tuple(ranks)
    return error


def _connect(address: tuple[str, int], timeout_s: float) -> Any:
    """The store that another process serves, by one connection for all generations: for each, torch's store asks the
    name server for the names of both ends, and waits for it."""
    if address not in _clients:
        with socket.create_connection(address, timeout=timeout_s):  # refused if it has ended: torch would try again
            pass
        limit = datetime.timedelta(seconds=timeout_s)
        _clients[address] = _dist.TCPStore(*address, is_master=False, wait_for_workers=False, timeout=limit)
    return _clients[address]


def _own_address(store: Any, size: int) -> str:
    """By which other processes reach this one: on the way to the group's store, where that is one of TCP that several
    ranks use; else this host's name."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    with contextlib.suppress(OSError):
        if size > 1 and hasattr(store, "host"):
            for family, kind, _, _, address in socket.getaddrinfo(store.host, store.port, 0, socket.SOCK_DGRAM):
                with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                    probe.connect(address)
                    return str(probe.getsockname()[0])
        name = socket.gethostname()
        socket.getaddrinfo(name, None)
        return name
    return "127.0.0.1"
