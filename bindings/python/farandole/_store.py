"""Key-value stores through which ranks find each other: the user's, or torch.distributed's."""

from __future__ import annotations

import datetime
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from farandole.exceptions import HorovodInternalError


class Store(Protocol):
    """What ``init(store=...)`` takes: ``torch.distributed.Store`` is one."""

    def set(self, key: str, value: str, /) -> Any: ...
    def get(self, key: str, /) -> bytes | str: ...
    def wait(self, keys: list[str], timeout: datetime.timedelta, /) -> Any: ...


class StoreCalls(NamedTuple):
    """A store as the core calls it: with bytes, and without waiting for long. What is not done is asked again."""

    set: Callable[[str, bytes], bool]
    wait: Callable[[str, float], bool]
    get: Callable[[str], bytes | None]


_ANSWER_S = 0.05  # for the answer of a store; the core asks it to wait for 0.02 s


class _Call:
    """A call on a thread of its own, which is left alone if it does not return."""

    def __init__(self, what: object, function: Callable[[], Any]) -> None:
        self.what, self.is_done = what, threading.Event()
        self._function = function
        self._error: BaseException | None = None
        self._value: Any = None
        threading.Thread(target=self._run, name="farandole-store", daemon=True).start()

    def _run(self) -> None:
        try:
            self._value = self._function()
        except BaseException as error:
            self._error = error
        self.is_done.set()

    def answer(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value


def calls(store: Any) -> StoreCalls:
    """The calls of ``store``. Values are written as hexadecimal text, which all stores can hold.

    They are made one after the other, on threads of their own: a store may stand still, and then init() ends all the
    same. A call that is asked for again is the same call.

    Raises:
        TypeError: It has no ``set``, ``get`` and ``wait``.
    """
    if not all(callable(getattr(store, name, None)) for name in ("set", "get", "wait")):
        raise TypeError(f"init(store=...): expected an object with set, get and wait; got {store!r:.200}")

    def wait(key: str, timeout_s: float) -> bool:
        if callable(getattr(store, "check", None)):  # torch's, whose wait() cannot be interrupted
            if store.check([key]):
                return True
            time.sleep(timeout_s)
            return bool(store.check([key]))
        try:
            store.wait([key], datetime.timedelta(seconds=timeout_s))
        except (TimeoutError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "time" not in str(error).lower():
                raise
            return False
        return True

    def get(key: str) -> bytes:
        value = store.get(key)
        return bytes.fromhex(value if isinstance(value, str) else bytes(value).decode())

    def set_(key: str, value: bytes) -> bool:
        store.set(key, value.hex())
        return True

    pending: list[_Call] = []

    def ask(function: Callable[..., Any], *arguments: Any) -> Any:
        what = (function, arguments)
        if not pending or pending[0].what != what:
            pending[:] = [_Call(what, lambda: function(*arguments))]
        if not pending[0].is_done.wait(_ANSWER_S):
            return None
        return pending.pop().answer()

    return StoreCalls(
        lambda key, value: bool(ask(set_, key, value)),
        # A value that is on its way is there.
        lambda key, timeout_s: bool((pending and pending[0].what == (get, (key,))) or ask(wait, key, timeout_s)),
        lambda key: ask(get, key),
    )


class Found(NamedTuple):
    """What torch.distributed knows of the job."""

    store: Any = None
    rank: int | None = None
    size: int | None = None


_served: list[Any] = []
_OF_MPI = ("OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
_OF_ENV = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class _OverCommunicator:
    """A store of one value, which rank 0 of an mpi4py communicator broadcasts."""

    def __init__(self, comm: Any) -> None:
        self._comm, self._value = comm, ""

    def set(self, _: str, value: str) -> None:
        self._comm.bcast(value)

    def wait(self, _: list[str], __: datetime.timedelta) -> None:
        self._value = self._value or self._comm.bcast(None)

    def get(self, _: str) -> str:
        return self._value


def of_communicator(comm: Any) -> Found:
    """How the ranks of ``comm``, an mpi4py communicator of any MPI library, find each other without MPI as a network:
    nothing, where they have MPI (Open MPI's) or somebody says where rank 0 is.

    Raises:
        ValueError: MPI was initialized for calls of the main thread alone.
    """
    network = os.environ.get("FARANDOLE_NETWORK") or "auto"
    is_mpi = network == "mpi" or (network == "auto" and "OMPI_COMM_WORLD_RANK" in os.environ)
    if is_mpi or comm.size == 1 or any(map(os.environ.get, ("FARANDOLE_ADDRESS", "PMI_FD"))):
        return Found()
    mpi: Any = importlib.import_module("mpi4py.MPI")
    if mpi.Query_thread() < mpi.THREAD_SERIALIZED:
        raise ValueError("init(comm=...): MPI's thread level must be THREAD_SERIALIZED or THREAD_MULTIPLE (mpi4py.rc)")
    return Found(_OverCommunicator(comm), comm.rank, comm.size)


def find() -> Found:
    """The store of torch.distributed, where its launcher or the script has one.

    At MASTER_PORT torch.distributed listens: always under torchrun, otherwise at rank 0 once the script
    initializes it. So where torch is in use, ranks meet at a store of its kind, which shares the port.
    """
    network = os.environ.get("FARANDOLE_NETWORK") or "auto"
    is_mpi = network == "auto" and any(map(os.environ.get, _OF_MPI))
    if os.environ.get("FARANDOLE_ADDRESS") or network == "mpi" or is_mpi:
        return Found()
    distributed: Any = sys.modules.get("torch.distributed")
    is_there = distributed is not None and distributed.is_available()
    if is_there and distributed.is_initialized():
        store = distributed.distributed_c10d._get_default_store()
        return Found(distributed.PrefixStore("farandole", store), distributed.get_rank(), distributed.get_world_size())
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_env = is_there and not os.environ.get("FARANDOLE_RANK") and all(map(os.environ.get, _OF_ENV))
    if has_agent or (is_env and os.environ["WORLD_SIZE"] != "1"):
        return Found(_at_master(is_server=not has_agent and os.environ["RANK"] == "0"))
    return Found()


def _at_master(is_server: bool) -> Any:
    distributed: Any = importlib.import_module("torch.distributed")
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    timeout = datetime.timedelta(seconds=float(os.environ.get("FARANDOLE_INIT_TIMEOUT_S") or 60))
    try:
        store = distributed.TCPStore(
            host, int(port), is_master=is_server, timeout=timeout, wait_for_workers=False, multi_tenant=True
        )
    except RuntimeError as error:
        raise HorovodInternalError(
            f"init: no store of torch.distributed at MASTER_ADDR:MASTER_PORT, {host}:{port}: {error}"
        ) from error
    if is_server:  # as long as this process: ranks may still be about to use torch.distributed's store there
        _served.append(store)
    # Ranks that torchrun starts again may find the same store, with an address that rank 0 is about to replace. Their
    # count of restarts is no help: each of torchrun's agents counts its own.
    return distributed.PrefixStore("farandole", store)
