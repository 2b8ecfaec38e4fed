"""The backend ``farandole`` of ``torch.distributed``, for DDP, FSDP and other users of it.

    import torch.distributed as dist
    import farandole.torch.distributed

    dist.init_process_group("farandole")

One file: a group, its works, calls and pairs are made of one another.

Importing this module registers the backend for tensors in host memory and on NVIDIA GPUs; torch 2.14 and
newer find it by its name, without the import. Every group is a job of its own. Its ranks meet at the store that
torch passes to the group, and its collectives, errors and end do not affect other groups. A group costs three
sleeping threads and about ten descriptors.

``init_method="farandole://"`` finds rank, size and store under any launcher of Farandole, such as
``farandolerun`` and ``mpirun``; the default, ``"env://"``, needs the variables that ``torchrun`` sets.

Collectives of a group are matched by collective, dtype, number of elements, operation and root, and by how
many such calls came before. All ranks must call them in the same order: if each rank waits for a call that
another one has not made, all get an error that names the calls and their places in the program.

Messages (``send``, ``recv``) between two ranks travel in a job of those two, created by the first message, as NCCL
creates a communicator for each pair; in a group of two ranks it is the group's job.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import datetime
import functools
import itertools
import queue
import sys
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed
from torch._C._distributed_c10d import Work as _TorchWork

from farandole import _core, _horovod, _store, basics, objects
from farandole.exceptions import AbortedError, HorovodInternalError, MismatchError, OperationTimeoutError
from farandole.ops import ALLGATHER, ALLREDUCE, ALLTOALL, BARRIER, BLOCKS, BROADCAST, GROUP, IN_PLACE, REDUCESCATTER
from farandole.torch import _calls, _library

__all__ = ["ProcessGroup", "Work"]

NAME = "farandole"
DEVICES = ("cpu", "cuda")
#: Messages from one rank to another, with one tag, that may be in flight at a time; one more waits. A byte's values.
MOST_MESSAGES = 256
_KINDS = ("allreduce", "broadcast", "allgather", "reduce_scatter", "all_to_all", "barrier")
_LONGEST_S = 365 * 86400.0  # that the library waits
_SHUTDOWN_S = "FARANDOLE_STALL_SHUTDOWN_S"  # its time limit is a group's time-out
#: By torch's names; numbers of the C ABI.
_REDUCTIONS = {"SUM": 0, "AVG": 1, "MIN": 2, "MAX": 3, "PRODUCT": 4, "PREMUL_SUM": 8}
_LINEAR = ("SUM", "AVG", "PREMUL_SUM")
#: As gloo and NCCL have it: a sum of truth values is whether one is true, a product whether all are.
_OF_BOOL = {"SUM": "MAX", "PRODUCT": "MIN"}
_BITWISE = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}
#: What the core knows; others travel where nothing is computed.
_DTYPES = {
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.bool,
}  # fmt: skip
#: How those travel, by the bytes of an element.
_OF_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Tensors = Sequence[torch.Tensor]
#: Untyped: from one torch to the next its methods have other names and arguments.
dist: Any = torch.distributed
_TorchGroup: Any = dist.ProcessGroup


class Work(_TorchWork):
    """A collective in flight, as ``async_op=True`` returns it.

    Args:
        handles: The operations.
        outputs: The value of the future: the tensors that receive something.
        finish: Called once with the operations' results, in whatever thread comes first.
        ranks: Of the job that the operations belong to, by their numbers in torch's job; None: those of the group.
        timeout: Of wait().

    What is no override of torch's begins with ``fl_``: a later torch may take any other name.

    Thread safety: any thread.
    """

    # Of few works another value: set where it is known, since a work is made with each call.
    fl_copied: Any = None  # the event after what `finish` has launched on a GPU
    fl_error: BaseException | None = None
    fl_ended: Any = None  # the future that this sets
    fl_future: Any = None  # what follows it, for the user

    def __init__(
        self, group: ProcessGroup, handles: list[Any], outputs: list[torch.Tensor],
        finish: Callable[[list[Any]], None] | None = None, ranks: list[int] | None = None,
        timeout: datetime.timedelta | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.fl_group, self.fl_handles, self.fl_outputs, self.fl_finish = group, handles, outputs, finish
        self.fl_ranks, self.fl_timeout = ranks, timeout
        self.fl_lock = threading.Lock()
        self.fl_is_done = not handles  # on a GPU: launched
        self.fl_future_lock = threading.Lock()

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Waits until the tensors hold the result, or, on a GPU, makes the current stream wait for it.

        Raises:
            TimeoutError: ``timeout`` has passed; the collective is still in flight.
            HorovodInternalError: It failed; the message says why and names the rank.
        """
        timeout = timeout or self.fl_timeout
        if timeout is not None and timeout.total_seconds() > 0 and not self.fl_poll_until(timeout.total_seconds()):
            raise TimeoutError(f"{NAME}: a collective of group {self.fl_group.group_name} did not end within {timeout}")
        self.fl_complete()
        if self.fl_error is not None:
            raise self.fl_error
        return True

    def synchronize(self) -> None:
        """As :meth:`wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the tensors hold the result, on a GPU too."""
        if not self.fl_is_done and self.fl_lock.acquire(blocking=False):  # else somebody waits for it
            try:
                if all(handle.poll() and handle.is_complete for handle in self.fl_handles):
                    self.fl_finish_locked()
            finally:
                self.fl_lock.release()
        if not self.fl_is_done or not all(handle.is_complete for handle in self.fl_handles):
            return False
        return self.fl_copied is None or bool(self.fl_copied.query())

    def is_success(self) -> bool:
        return self.fl_is_done and self.fl_error is None

    def exception(self) -> BaseException | None:
        return self.fl_error

    def result(self) -> list[torch.Tensor]:
        return self.fl_outputs

    def _source_rank(self) -> int:
        """Of a ``recv`` from any rank of a group of two."""
        return 1 - int(self.fl_group.rank())

    def get_future(self) -> Any:
        """A future of the list of tensors that receive something."""
        with self.fl_future_lock:
            if self.fl_future is not None:
                return self.fl_future
            devices: list[Any] = sorted({t.device for t in self.fl_outputs if t.is_cuda}, key=str)
            self.fl_ended = torch.futures.Future(devices=devices) if devices else torch.futures.Future()
            # An error set by set_exception() is a value to torch's C++, such as DDP's; one raised here is an error.
            self.fl_future = self.fl_ended.then(self.fl_value)
            if not devices and self.fl_outputs and self.fl_outputs[0].dtype == torch.float16:
                self.fl_future = _of_tensor_list(self.fl_future, self.fl_outputs)
        # On a GPU the host waits only until it is in a stream; the future belongs to the caller's.
        if devices:
            self.fl_complete()
        if devices or self.is_completed():
            self.fl_set_future()
        else:
            self.fl_group.fl_completer.add(self)
        return self.fl_future

    def fl_set_future(self) -> None:
        """Ends the future, after the collective."""
        self.fl_ended.set_result(self.fl_outputs)

    def fl_value(self, _: Any) -> list[torch.Tensor]:
        if self.fl_error is not None:
            raise self.fl_error
        return self.fl_outputs

    def fl_poll_until(self, timeout_s: float) -> bool:
        until_s = time.monotonic() + timeout_s
        while not self.is_completed():
            if time.monotonic() >= until_s:
                return False
            time.sleep(0.0005)
        return True

    def fl_complete(self) -> None:
        """Waits for the operations, on a GPU in the current stream: each time, as that may be another one."""
        with self.fl_lock:
            if not self.fl_is_done:
                self.fl_finish_locked()
                return
            for handle in self.fl_handles:
                handle.order_stream()
            if self.fl_copied is not None:
                self.fl_copied.wait(torch.cuda.current_stream(self.fl_outputs[0].device))

    def fl_finish_locked(self) -> None:
        """The first wait; KeyboardInterrupt leaves the operations in flight."""
        try:
            results = [handle.wait() for handle in self.fl_handles]
            if self.fl_finish is not None:
                with torch.no_grad():
                    self.fl_finish(results)
                self.fl_copied = _event_after(self.fl_outputs)
        except Exception as error:
            self.fl_error = self.fl_group.fl_renumber(error, self.fl_ranks)
        is_at_it = self.fl_error is None
        self.fl_handles = [handle for handle in self.fl_handles if is_at_it and not handle.is_complete]  # on a GPU
        self.fl_is_done = True
        self.fl_finish = None


class _Completer:
    """Threads that end futures: as many as there are at a time, since one may need what follows another."""

    NAME = "farandole-futures"  # errors.cc counts them

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = 0  # of these, without works that are in the queue for them
        self._lock = threading.Lock()

    def add(self, work: Work) -> None:
        """Ends the future of ``work``."""
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                self._threads.append(threading.Thread(target=self._run, name=self.NAME, daemon=True))
                self._threads[-1].start()
        self._queue.put(work)

    def stop(self, timeout_s: float = 0) -> None:
        with self._lock:
            threads, self._threads, self._idle = self._threads, [], 0
        for _ in threads:
            self._queue.put(None)
        for thread in threads:
            if thread is not threading.current_thread():  # what follows a future may end the group
                thread.join(timeout_s)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work.fl_complete()
            with contextlib.suppress(Exception):  # of a callback; its own future has it
                work.fl_set_future()
            del work  # its tensors need not live until the next one comes
            with self._lock:
                self._idle += 1


class _Later:
    """The handle of a message whose ranks have yet to join."""

    def __init__(self, group: ProcessGroup) -> None:
        self.started: Future[_core.Work] = Future()
        self._group = group

    def poll(self) -> bool:
        return self.started.done() and (self.started.exception() is not None or self.started.result().poll())

    @property
    def is_complete(self) -> bool:
        return self.started.done() and (self.started.exception() is not None or self.started.result().is_complete)

    def order_stream(self) -> None:
        self.started.result().order_stream()

    def wait(self) -> Any:
        while not futures.wait([self.started], 1.0).done:  # the thread that joins may be stuck in torch's store
            try:
                _raise_if_lost(self._group.fl_context.core)
            except HorovodInternalError as loss:
                raise self._group.fl_renumber(loss) from None
        return self.started.result().wait()


class _Pair:
    """The job in which this rank and another one of its group send messages to one another.

    A message is a broadcast in it, named by sender and tag and by how many such came before; so one that
    is received with another size or dtype is an error on both ranks. Joining waits for the other rank, so
    a thread does it, which then starts what has come meanwhile, in order.

    Thread safety: any thread. Lifetime: its group closes it.
    """

    def __init__(self, group: ProcessGroup, peer: int) -> None:
        self._group, self._peer, self._members = group, peer, sorted((group.rank(), peer))
        self.ranks = [group.fl_global_ranks[rank] for rank in self._members]
        self._kinds = {is_sent: self._kind(is_sent) for is_sent in (False, True)}
        self._numbers: dict[int, bytearray] = {}  # of the next messages; a byte for each tag, by 256 tags
        self._numbers_lock = threading.Lock()
        self._lock = threading.Lock()  # of what follows
        self._waiting: collections.deque[tuple[_Later, _core.Options, str, torch.Tensor, Any]] = collections.deque()
        self._context: basics.Context | None = None
        self._is_ready = False  # nothing waits any more
        self._error: Exception | None = None
        self._is_closing = False
        self._thread: threading.Thread | None = None
        if group.size() == 2:
            self._context, self._is_ready = group.fl_context, True
        else:
            self._thread = threading.Thread(target=self._join, name="farandole-pair", daemon=True)
            self._thread.start()

    def start(self, tensor: torch.Tensor, is_sent: bool, tag: int) -> Any:
        """Starts a message, of which it gives the handle. ``tensor``: contiguous, of one dimension."""
        options, text = self._kinds[is_sent]
        name = f"{text}, tag {tag}, message {self._number(is_sent, tag)}"
        if not self._is_ready:
            with self._lock:
                if self._error is not None:
                    raise self._error
                if not self._is_ready:
                    later = _Later(self._group)
                    stream = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None
                    self._waiting.append((later, options, name, tensor, stream))
                    return later
        assert self._context is not None
        return _calls.start(self._context.core, options, name, tensor, IN_PLACE)

    def close(self, at_exit: bool = False) -> None:
        """Leaves the job once the other rank does."""
        self._is_closing = True
        if self._thread is not None:
            self._thread.join(5.0)  # it may be stuck in torch's store
        if self._context is not None and self._context is not self._group.fl_context:
            self._context.close(at_exit)

    def abort(self) -> None:
        """Leaves the job at once."""
        with self._lock:
            self._is_closing = True
        if self._context is not None:
            self._context.core.close_at_exit(0.0)

    def __lt__(self, other: _Pair) -> bool:
        """The order in which all ranks close them, so that they cannot wait for one another in a circle."""
        return self._members < other._members

    def _kind(self, is_sent: bool) -> tuple[_core.Options, str]:
        root = self._members.index(self._group.rank() if is_sent else self._peer)
        text = f"group {self._group.group_name}: rank {self.ranks[root]} to rank {self.ranks[1 - root]}"
        return _core.Options(BROADCAST, root=root, function="send"), text

    def _number(self, is_sent: bool, tag: int) -> int:
        """Of the next message, modulo MOST_MESSAGES."""
        page, at = 2 * (tag >> 8) + is_sent, tag & 255
        with self._numbers_lock:
            numbers = self._numbers.get(page) or self._numbers.setdefault(page, bytearray(256))
            number = numbers[at]
            numbers[at] = (number + 1) % MOST_MESSAGES
        return number

    def _join(self) -> None:
        try:
            context = self._rendezvous()
        except Exception as error:
            with self._lock:
                self._error = self._group.fl_renumber(self._cause_of(error))
                for later, *_ in self._waiting:
                    later.started.set_exception(self._error)
                self._waiting.clear()
            return
        with self._lock:
            self._context = context
            if self._is_closing:
                context.core.close_at_exit(0.0)
        while not self._is_ready:
            with self._lock:
                self._is_ready = not self._waiting
                waiting = None if self._is_ready else self._waiting.popleft()
            if waiting is not None:
                self._start_later(context, *waiting)

    @staticmethod
    def _start_later(
        context: basics.Context, later: _Later, options: _core.Options, name: str, tensor: torch.Tensor, stream: Any
    ) -> None:  # fmt: skip
        """Without the lock, which whoever aborts the group needs: it may wait until others are received."""
        try:
            with torch.cuda.stream(stream):
                later.started.set_result(_calls.start(context.core, options, name, tensor, IN_PLACE))
        except Exception as error:
            later.started.set_exception(error)

    def _rendezvous(self) -> basics.Context:
        """Joins the other rank when it comes, however late."""
        number = self._members.index(self._group.rank())
        shared = self._group.fl_own_store()
        store = dist.PrefixStore(f"pair {self._members}", shared)

        def is_there(keys: list[str]) -> bool:
            self._check_peer(shared)
            return bool(store.check(keys))

        store.set(f"has come {number}", "")
        pause_s, until_s = 0.0005, time.monotonic() + (self._group.fl_timeout_s or _LONGEST_S)
        while not is_there([f"has come {1 - number}"]):
            if time.monotonic() > until_s:
                peer = f"rank {self._group.fl_global_ranks[self._peer]}"
                error = OperationTimeoutError(f"{peer} started no message within {self._group.fl_timeout_s:g} s")
                raise _with_ranks_of_job(error)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
        calls = types.SimpleNamespace(set=store.set, get=store.get, wait=store.wait, check=is_there)
        try:
            return _connect(calls, number, 2, self._group.fl_timeout_s, in_order=False)
        except HorovodInternalError as error:
            raise self._group.fl_renumber(error, self.ranks) from None

    def _cause_of(self, error: Exception) -> Exception:
        """Why joining failed: a store goes with its rank, and the group says a little later which one that was."""
        until_s = time.monotonic() + 1.0
        while not isinstance(error, HorovodInternalError):
            try:
                _raise_if_lost(self._group.fl_context.core)
            except HorovodInternalError as loss:
                return loss
            if time.monotonic() > until_s:
                text = f"ranks {self.ranks} cannot meet at torch's store: {error}"
                return _with_ranks_of_job(HorovodInternalError(text))
            time.sleep(0.02)
        return error

    def _check_peer(self, store: Any) -> None:
        """Raises an error if the other rank will not come any more."""
        if self._is_closing:
            raise _with_ranks_of_job(AbortedError(f"group {self._group.group_name} has been left by this rank"))
        _raise_if_lost(self._group.fl_context.core)
        if store.check([_left(self._peer)]):
            rank = self._group.fl_global_ranks[self._peer]
            raise _with_ranks_of_job(AbortedError(f"group {self._group.group_name} has been left by rank {rank}"))


class ProcessGroup(_TorchGroup):  # type: ignore[misc]  # see above
    """A group of ranks, created by ``torch.distributed``.

    What is no override of torch's begins with ``fl_``: a later torch may take any other name.

    Thread safety: any thread; collectives must come in the same order on all ranks.
    """

    def __init__(
        self, store: Any, rank: int, size: int, global_ranks: Sequence[int] = (), timeout_s: float = 0,
        devices: Sequence[str] = DEVICES,
    ) -> None:  # fmt: skip
        super().__init__(rank, size)
        self.fl_global_ranks = list(global_ranks) or list(range(size))
        self.fl_names = {"name": "", "desc": "undefined"}
        self.fl_devices = [torch.device(device) for device in devices]
        self.fl_calls = _calls.Calls()
        self.fl_size = size
        self.fl_has_seen_failure = False  # one that ended the group
        self.fl_completer = _Completer()
        self.fl_timeout_s = min(timeout_s, _LONGEST_S)
        self.fl_store = store
        self.fl_pairs: dict[int, _Pair] = {}
        self.fl_pairs_lock = threading.Lock()
        self.fl_context = _connect(store, rank, size, self.fl_timeout_s)
        self.fl_core = self.fl_context.core
        _open_groups.add(self)

    # What torch calls a group.

    def getBackendName(self) -> str:
        return NAME

    name = getBackendName

    def _set_group_name(self, name: str) -> None:
        self.fl_names["name"] = name

    def _set_group_desc(self, desc: str) -> None:
        self.fl_names["desc"] = desc

    setGroupName, setGroupDesc = _set_group_name, _set_group_desc

    def getGroupName(self) -> str:
        return self.fl_names["name"]

    def getGroupDesc(self) -> str:
        return self.fl_names["desc"]

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        """None before torch knows the group: torch 2.15 would attach its flight recorder, which asks the C++ base
        for a name that only groups with registered backends have."""
        return self.fl_devices if self in dist.distributed_c10d._world.pg_map else []

    #: ``split_group``, and groups that are made of one with a ``device_id``, ask for it.
    supports_splitting = False

    def _get_backend(self, _device: Any) -> ProcessGroup:
        """It serves all devices; asked for where ``init_process_group`` has a ``device_id``."""
        return self

    # Its end.

    def shutdown(self) -> None:
        """Leaves the group when all its ranks do, as ``destroy_process_group`` does.

        A failure that no collective has raised on this rank is a warning: an error would leave the other groups
        open.
        """
        _open_groups.discard(self)
        self.fl_close_pairs()
        try:
            self.fl_context.close()
        except HorovodInternalError as error:
            if not self.fl_has_seen_failure:
                warnings.warn(f"{NAME}: {self.fl_renumber(error)}", RuntimeWarning, stacklevel=2)
        finally:
            self.fl_completer.stop()

    def abort(self) -> None:
        """Leaves the group at once: operations in flight end with an error on all its ranks."""
        _open_groups.discard(self)
        self.fl_announce_leaving()
        for pair in list(self.fl_pairs.values()):
            pair.abort()
        self.fl_core.close_at_exit(0.0)
        self.fl_completer.stop()

    def fl_close_at_exit(self) -> None:
        """As :meth:`shutdown`, for a script that ends without ``destroy_process_group``."""
        with contextlib.suppress(HorovodInternalError):  # the script has seen it, or waited for nothing more
            self.fl_close_pairs(at_exit=True)
        with contextlib.suppress(HorovodInternalError):
            self.fl_context.close(at_exit=True)
        self.fl_completer.stop(1.0)

    def fl_close_pairs(self, at_exit: bool = False) -> None:
        """Before the group: its store is there as long as all ranks are in it."""
        self.fl_announce_leaving()
        for pair in sorted(self.fl_pairs.values()):
            with contextlib.suppress(HorovodInternalError):  # as that of the group
                pair.close(at_exit)

    def fl_announce_leaving(self) -> None:
        """To ranks that wait for a first message; in a group of two there are none."""
        if self.fl_size > 2:
            with contextlib.suppress(Exception):  # of a store that has gone with its rank
                _raise_if_lost(self.fl_core)
                self.fl_store.set(_left(self.rank()), "")

    def fl_own_store(self) -> Any:
        """The group's store, by a connection of its own where the store has one: a wait blocks that for all threads."""
        return self.fl_store.clone() if callable(getattr(self.fl_store, "clone", None)) else self.fl_store

    def fl_renumber(self, error: Exception, ranks: list[int] | None = None) -> Exception:
        """An error, once with ranks of torch's job instead of those of the group, or of the job of ``ranks``."""
        ranks = self.fl_global_ranks if ranks is None else ranks
        if not isinstance(error, HorovodInternalError) or hasattr(error, "is_renumbered"):
            return error
        vars(error).update(is_renumbered=True)
        if ranks != list(range(len(ranks))):
            error.failed_ranks = tuple(ranks[rank] for rank in error.failed_ranks)
            error.args = (f"group {self.group_name} of ranks {ranks}, numbered from 0: {error}",)
        if not isinstance(error, MismatchError):
            self.fl_has_seen_failure = True
        if isinstance(error, OperationTimeoutError):  # named as the user has set it
            error.args = (str(error).replace(_SHUTDOWN_S, "the timeout of the group"),)
        return error

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Does nothing: a group's time-out is the one that it was made with."""

    # Collectives. `opts` are torch's; a missing one means the defaults.

    def allreduce(self, tensors: Tensors, opts: Any = None, *_: Any) -> Work:
        for tensor in tensors:
            if tensor.is_sparse:
                return self.fl_reduce_sparse(tensors, opts)
        return self.fl_reduce(tensors, opts)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Tensors, opts: Any = None, *_: Any) -> Work:
        root = 0 if opts is None else opts.rootRank
        views, write_back = _contiguous([_movable(tensor) for tensor in tensors])
        finish = None if write_back is None or self.rank() == root else write_back
        return self.fl_work(opts, BROADCAST, views, list(tensors), finish, how=IN_PLACE, root=root)

    def reduce(self, tensors: Tensors, opts: Any, *_: Any) -> Work:
        """The tensors of ranks other than the root stay as they are."""
        targets = tensors if self.rank() == opts.rootRank else [tensor.clone() for tensor in tensors]
        return self.fl_reduce(targets, opts, list(tensors))

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None, *_: Any) -> Work:
        received = [[_movable(part).numel() for part in parts] for parts in outputs]
        return self.fl_gather(outputs, inputs, received, [part for parts in outputs for part in parts], opts)

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None, *_: Any) -> Work:
        """As :meth:`allgather`, but ``outputs`` has a list for each rank, of a tensor for each of ``inputs``."""
        return self.allgather([list(of_ranks) for of_ranks in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None, *_: Any) -> Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None, *_: Any) -> Work:
        for output, given in zip(outputs, inputs, strict=True):
            _check_numel("all_gather", output, self.fl_size * given.numel(), "the input's times the group's size")
        received = [[_movable(given).numel()] * self.fl_size for given in inputs]
        return self.fl_gather([[output] for output in outputs], inputs, received, list(outputs), opts)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None, *_: Any) -> Work:
        if any(part.numel() != into.numel() for into, parts in zip(outputs, inputs, strict=True) for part in parts):
            return self.fl_reduce_scatter_uneven(outputs, inputs, opts)
        return self.fl_reduce_scatter(outputs, [_joined(parts) for parts in inputs], opts)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None, *_: Any) -> Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None, *_: Any) -> Work:
        for output, given in zip(outputs, inputs, strict=True):
            _check_numel("reduce_scatter", given, self.fl_size * output.numel(), "the output's times the group's size")
        return self.fl_reduce_scatter(outputs, [given.reshape(-1) for given in inputs], opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None, *_: Any) -> Work:
        return self.fl_exchange(opts, outputs, inputs, "all_to_all", list(outputs))

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int], opts: Any = None, *_: Any,
    ) -> Work:  # fmt: skip
        received = _elements_of(output, output_split_sizes, self.fl_size)
        sent = _elements_of(input, input_split_sizes, self.fl_size)
        flat = _movable(input).reshape(-1)
        return self.fl_receive(
            opts, ALLTOALL, [flat], [[output]], [received], [output], splits=sent, label="all_to_all_single"
        )

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any, *_: Any) -> Work:
        nothing = inputs[0].new_empty(0)
        is_root = self.rank() == opts.rootRank
        sent = [inputs[0] if rank == opts.rootRank else nothing for rank in range(self.fl_size)]
        received = list(outputs[0]) if is_root else []
        what = f"gather to rank {opts.rootRank}{_count_in_name(inputs[0])}"
        return self.fl_exchange(opts, received or [nothing] * self.fl_size, sent, what, received)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any, *_: Any) -> Work:
        nothing = outputs[0].new_empty(0)
        is_root = self.rank() == opts.rootRank
        sent = list(inputs[0]) if is_root else [nothing] * self.fl_size
        received = [outputs[0] if rank == opts.rootRank else nothing for rank in range(self.fl_size)]
        what = f"scatter from rank {opts.rootRank}{_count_in_name(outputs[0])}"
        return self.fl_exchange(opts, received, sent, what, [outputs[0]])

    def barrier(self, opts: Any = None, *_: Any) -> Work:
        timeout = getattr(opts, "timeout", datetime.timedelta(0))
        if timeout <= datetime.timedelta(0):
            return self.fl_work(opts, BARRIER, (), [])
        return self.fl_work(None, BARRIER, (), [], timeout=timeout)

    # Messages. Both ranks' calls end when the message has arrived.

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> Work:
        flat = _movable(tensors[0]).contiguous().view(-1)
        return self.fl_message(flat, dst, tag, is_sent=True, outputs=[])

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> Work:
        target = _movable(tensors[0])
        if target.is_contiguous():
            return self.fl_message(target.view(-1), src, tag, is_sent=False, outputs=list(tensors))
        flat = torch.empty(target.shape, dtype=target.dtype, device=target.device).view(-1)
        finish = functools.partial(_fill, target, flat)
        return self.fl_message(flat, src, tag, is_sent=False, outputs=list(tensors), finish=finish)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        if self.fl_size != 2:
            raise NotImplementedError(f"{NAME}: recv from any of several ranks is not supported; say which")
        return self.recv(tensors, 1 - self.rank(), tag)

    # Names before torch 2.13.

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # The rest is internal.

    def fl_message(
        self, flat: torch.Tensor, peer: int, tag: int, is_sent: bool, outputs: list[torch.Tensor],
        finish: Callable[[list[Any]], None] | None = None,
    ) -> Work:  # fmt: skip
        _check_travels(flat)
        pair = self.fl_pairs.get(peer) or self.fl_pair_with(peer)
        try:
            return Work(self, [pair.start(flat, is_sent, tag)], outputs, finish, pair.ranks)
        except HorovodInternalError as error:
            raise self.fl_renumber(error, pair.ranks) from None

    def fl_pair_with(self, peer: int) -> _Pair:
        if peer == self.rank() or not 0 <= peer < self.fl_size:
            raise ValueError(f"{NAME}: rank {self.rank()} of {self.fl_size} cannot exchange messages with rank {peer}")
        with self.fl_pairs_lock:
            if peer not in self.fl_pairs:
                self.fl_pairs[peer] = _Pair(self, peer)
            return self.fl_pairs[peer]

    def fl_reduce(
        self, tensors: Tensors, opts: Any, outputs: list[torch.Tensor] | None = None,
        then: Callable[[list[Any]], None] | None = None,
    ) -> Work:  # fmt: skip
        """Reduces in place, then calls ``then``."""
        op, factor = _op_of(opts)
        outputs = list(tensors) if outputs is None else outputs
        if op not in _BITWISE:
            if op not in _LINEAR and any(t.is_complex() for t in tensors):
                raise ValueError(f"{NAME}: a reduction of complex tensors by {op} is not supported")
            views, finish = _contiguous([torch.view_as_real(t) if t.is_complex() else t for t in tensors])
            if then is not None:
                finish = functools.partial(_call_each, finish, then)
            return self.fl_work(opts, ALLREDUCE, views, outputs, finish, how=IN_PLACE, op=op, factor=factor)

        def combine(results: list[Any]) -> None:
            for tensor, gathered in zip(tensors, _all_of(results), strict=True):
                parts = gathered.view(self.fl_size, -1)
                _write(tensor, functools.reduce(_BITWISE[op], parts.unbind()))
            if then is not None:
                then(results)

        flat = [tensor.reshape(-1) for tensor in tensors]
        return self.fl_work(opts, ALLGATHER, flat, outputs, combine, label=f"allreduce ({op})")

    def fl_reduce_sparse(self, tensors: Tensors, opts: Any) -> Work:
        """Gathers all ranks' indices and values, and adds the values of equal indices."""
        op, _ = _op_of(opts)
        if op != "SUM" or not all(tensor.is_sparse for tensor in tensors):
            raise ValueError(f"{NAME}: sparse tensors can only be summed, and not beside dense ones; got {op}")
        sent = []
        for tensor in map(torch.Tensor.coalesce, tensors):
            values = tensor.values()
            sent += [tensor.indices().t(), torch.view_as_real(values) if tensor.is_complex() else values]

        def add_up(results: list[Any]) -> None:
            gathered = _all_of(results)
            for tensor, indices, values in zip(tensors, gathered[::2], gathered[1::2], strict=True):
                values = torch.view_as_complex(values) if tensor.is_complex() else values
                tensor.copy_(torch.sparse_coo_tensor(indices.t(), values, tensor.shape).coalesce())

        label = f"allreduce (sparse, {', '.join(str(list(tensor.shape)) for tensor in tensors)})"
        return self.fl_work(opts, ALLGATHER, sent, list(tensors), add_up, label=label, is_ragged=True)

    def fl_reduce_scatter(self, outputs: Tensors, flat: list[torch.Tensor], opts: Any) -> Work:
        def finish(results: list[Any]) -> None:
            for output, reduced in zip(outputs, _all_of(results), strict=True):
                _write(output, reduced)

        op, factor = _op_of(opts)
        flat, into = _places(flat, [[output] for output in outputs])
        then = finish if into is None else None
        return self.fl_work(opts, REDUCESCATTER, flat, list(outputs), then, op=op, factor=factor, into=into)

    def fl_reduce_scatter_uneven(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Work:
        joined = [torch.cat([part.reshape(-1) for part in parts]) for parts in inputs]

        def take_own(_: list[Any]) -> None:
            for output, total, parts in zip(outputs, joined, inputs, strict=True):
                splits = torch.split(total, [part.numel() for part in parts])
                _write(output, splits[self.rank()])

        return self.fl_reduce(joined, opts, list(outputs), take_own)

    def fl_gather(
        self, places: Sequence[Tensors], inputs: Tensors, received: list[list[int]], outputs: list[torch.Tensor],
        opts: Any,
    ) -> Work:  # fmt: skip
        sent = [_movable(tensor).reshape(-1) for tensor in inputs]
        return self.fl_receive(opts, ALLGATHER, sent, places, received, outputs)

    def fl_exchange(self, opts: Any, outputs: Tensors, inputs: Tensors, what: str, whole: list[torch.Tensor]) -> Work:
        """Tensor `i` of `inputs` goes to rank `i`; what comes from there goes into `outputs[i]`."""
        for name, parts in (("inputs", inputs), ("outputs", outputs)):
            if len(parts) != self.fl_size:
                raise ValueError(f"{what}: expected {self.fl_size} {name}, one for each rank; got {len(parts)}")
        splits, received = ([_movable(tensor).numel() for tensor in parts] for parts in (inputs, outputs))
        sent = [_joined([_movable(tensor) for tensor in inputs])]
        return self.fl_receive(opts, ALLTOALL, sent, [outputs], [received], whole, splits=splits, label=what)

    def fl_receive(
        self, opts: Any, kind: int, sent: list[torch.Tensor], places: Sequence[Tensors], received: list[list[int]],
        outputs: list[torch.Tensor], splits: Any = None, label: str = "",
    ) -> Work:  # fmt: skip
        """An allgather or alltoall: of ``sent[i]``, `received[i][r]` elements come from rank `r`, into the tensors
        ``places[i]``, end to end. MismatchError on this rank if others come."""
        sent, into = _places(sent, places)
        rows = list(itertools.chain.from_iterable(received))
        is_ragged = any(len(set(numbers)) > 1 for numbers in received)
        finish = functools.partial(_spread, label or _KINDS[kind], places, received) if into is None else None
        return self.fl_work(
            opts, kind, sent, outputs, finish, splits=splits, label=label, is_ragged=is_ragged, into=into, rows=rows
        )

    def fl_work(
        self, opts: Any, kind: int, tensors: Any, outputs: list[torch.Tensor],
        finish: Callable[[list[Any]], None] | None = None, how: int = 0, op: str = "SUM", factor: float = 1.0,
        root: int = -1, splits: Any = None, label: str = "", is_ragged: bool = False, into: Any = None,
        rows: Sequence[int] = (), timeout: datetime.timedelta | None = None,
    ) -> Work:  # fmt: skip
        """Starts a collective on one tensor or, as one operation, on several.

        Args:
            is_ragged: Other ranks may give other shapes.
            into: Where the results go; None: into new tensors.
            rows: Of an allgather or alltoall, for each tensor: how many elements come from each rank.
            timeout: Of the work's wait().
        """
        if len(tensors) != 1:
            how |= GROUP
        given = tensors[0] if len(tensors) == 1 else tensors
        if into is not None and len(tensors) == 1:
            into = into[0]
        for tensor in tensors:
            _check_travels(tensor)
        calls = self.fl_kind(kind, tensors, op, factor, root, label, is_ragged)
        if getattr(opts, "asyncOp", True):
            handle = _calls.start(self.fl_core, calls.options, calls.name(), given, how, splits, into, rows)
            return Work(self, [handle], outputs, finish, timeout=timeout)
        # Whoever asked waits at once: no thread is woken for it.
        try:
            result = _calls.start(self.fl_core, calls.options, calls.name(), given, how | BLOCKS, splits, into, rows)
        except HorovodInternalError as error:
            raise self.fl_renumber(error) from None
        if finish is not None:
            with torch.no_grad():
                finish([result])
        return Work(self, [], outputs)

    def fl_kind(
        self, kind: int, tensors: Any, op: str, factor: float, root: int, label: str, is_ragged: bool
    ) -> _calls.Kind:  # fmt: skip
        """Its text, by which ranks match calls, has the numbers of elements, and no shapes."""
        # Where rows may differ between the ranks the name does not say how many there are, nor of bytes that are
        # gathered: so objects, of which each has a length of its own, do not make names without end.
        has_counts = kind != ALLTOALL and not is_ragged
        counts = tuple([  # of a list: a generator takes twice as long
            (t.dtype, t.numel() if has_counts and (kind != ALLGATHER or t.dtype != torch.uint8) else None)
            for t in tensors
        ])  # fmt: skip
        key = (kind, counts, op, factor, root, label)
        found = self.fl_calls.find(key)
        if found is not None:
            return found
        if op not in _REDUCTIONS:
            raise ValueError(f"{NAME}: {_KINDS[kind]} with {op} is not supported")
        described = ", ".join(f"{str(dtype)[6:]}{'' if count is None else [count]}" for dtype, count in counts[:3])
        more = f", ... ({len(counts)} tensors)" if len(counts) > 3 else ""
        how = (f" ({op})" if op != "SUM" and not label else "") + (f" from rank {root}" if root >= 0 else "")
        text = f"{label or _KINDS[kind]}{how} of {described}{more}" if counts else _KINDS[kind]
        if counts and all(dtype == torch.bool for dtype, _ in counts):
            op = _OF_BOOL.get(op, op)
        options = _core.Options(kind, _REDUCTIONS[op], factor, 1.0, root)
        return self.fl_calls.add(key, options, f"group {self.group_name}: {text}")


def _connect(store: Any, rank: int, size: int, timeout_s: float, in_order: bool = True) -> basics.Context:
    """Joins the ranks that have the same store; each group has one of its own."""
    with _horovod.settings():
        found = _store.calls(store) if size > 1 else None
        return basics.Context(_core.Context.init(rank, size, None, None, found, True, timeout_s, in_order))


def _raise_if_lost(core: _core.Context) -> None:
    """Raises the error of a group that has lost a rank. Ranks that have left one do not concern the others here."""
    with contextlib.suppress(AbortedError):
        core.raise_if_ended()


def _with_ranks_of_job(error: HorovodInternalError) -> HorovodInternalError:
    """An error that speaks of ranks by their numbers in torch's job already; see :meth:`ProcessGroup.fl_renumber`."""
    vars(error).update(is_renumbered=True)
    return error


def _left(rank: int) -> str:
    """The key that tells that a rank, by its number in the group, has left it."""
    return f"has left {rank}"


def _create(options: Any, *_: Any) -> ProcessGroup:
    ranks, timeout_s = options.global_ranks_in_group, options.timeout.total_seconds()
    devices = _devices_of(sys._getframe(1))
    return ProcessGroup(options.store, options.group_rank, options.group_size, ranks, timeout_s, devices)


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


_open_groups: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()


@atexit.register
def _close_groups() -> None:
    for group in list(_open_groups):
        group.fl_close_at_exit()


def _rendezvous(_url: str, timeout: datetime.timedelta = datetime.timedelta(minutes=5), **_: Any) -> Iterator[Any]:
    """``init_method="farandole://"``: a store of torch's on the host of rank 0, which :func:`init` finds."""
    basics.init()
    rank, size = basics.rank(), basics.size()
    store, address = None, ("", 0)
    if rank == 0:
        import socket

        store = dist.TCPStore("0.0.0.0", 0, size, True, timeout, wait_for_workers=False)
        host = socket.gethostname() if basics.cross_size() > 1 else "127.0.0.1"
        address = (host, store.port)
    host, port = objects.broadcast_object(address, 0, "farandole.torch.distributed")
    if store is None:
        store = dist.TCPStore(host, port, size, False, timeout, wait_for_workers=False)
    yield store, rank, size
    raise RuntimeError("farandole:// does not support a change of the world")


def _after(ended: torch.jit.Future[int], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """TorchScript, as is what follows."""
    torch.jit.wait(ended)
    return tensors


def _follow(ended: torch.jit.Future[int], tensors: list[torch.Tensor]) -> torch.jit.Future[list[torch.Tensor]]:
    return torch.jit.fork(_after, ended, tensors)  # type: ignore[no-any-return]


@functools.cache
def _compiled_follow() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates it, and has nothing else that makes such a future
        return torch.jit.script(_follow)


def _of_tensor_list(ended: Any, tensors: list[torch.Tensor]) -> Any:
    """A future of the tensors, after another one, whose value C++ takes for a list of tensors.

    A torch.futures.Future has an object of Python's. DDP's C++ takes that too, but for its hook that sends 16 bits.
    This takes 80 us, so other dtypes do without.
    """
    try:
        return _compiled_follow()(ended, tensors)
    except RuntimeError:  # a torch without TorchScript
        return ended


def _event_after(outputs: list[torch.Tensor]) -> Any:
    """An event after what the current stream has been told to do with tensors on a GPU; None for others."""
    if not outputs or not outputs[0].is_cuda:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(outputs[0].device))
    return event


def _op_of(opts: Any) -> tuple[str, float]:
    """The name of a reduce operation, and the factor of PREMUL_SUM."""
    if opts is None:
        return "SUM", 1.0
    op = getattr(opts.reduceOp, "op", opts.reduceOp).name
    return op, float(opts.reduceOp.factor) if op == "PREMUL_SUM" else 1.0


def _all_of(results: list[Any]) -> list[torch.Tensor]:
    """Of one operation: of a group the list of tensors."""
    return list(results[0]) if isinstance(results[0], (list, tuple)) else [results[0]]


def _write(target: torch.Tensor, source: torch.Tensor) -> None:
    """As gloo and NCCL write: autograd does not see it."""
    target.data.copy_(source.view(target.shape))


def _fill(target: torch.Tensor, flat: torch.Tensor, _: list[Any]) -> None:
    _library.copy_into(target.data, flat.view(target.shape))  # elements of the target may share memory


def _call_each(first: Callable[[Any], None] | None, then: Callable[[Any], None], results: list[Any]) -> None:
    if first is not None:
        first(results)
    then(results)


def _contiguous(tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], Callable[[list[Any]], None] | None]:
    """The tensors, of which others than contiguous ones are copied, and what writes the copies back, if there are any.

    So ranks whose strides differ exchange elements of the same places.
    """
    for tensor in tensors:
        if not tensor.is_contiguous():
            break
    else:
        return tensors, None
    for tensor in tensors:
        _check_travels(tensor)  # the copy would not be one that negates
    copies = [tensor.detach().contiguous() for tensor in tensors]

    def write_back(_: list[Any]) -> None:
        for tensor, copy in zip(tensors, copies, strict=True):
            if not tensor.is_contiguous():
                _fill(tensor, copy, [])

    return copies, write_back


def _movable(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a dtype that the core can move."""
    if tensor.dtype in _DTYPES:
        return tensor
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor.view(_OF_BYTES[tensor.element_size()])


def _check_travels(tensor: torch.Tensor) -> None:
    if tensor.is_neg():
        raise ValueError(f"{NAME}: a view that negates its tensor cannot travel; resolve_neg() gives one that can")


def _count_in_name(tensor: torch.Tensor) -> str:
    """But for bytes, as objects are, which do not make names without end."""
    return "" if tensor.dtype == torch.uint8 else f", [{tensor.numel()}]"


def _end_to_end(tensors: Tensors) -> torch.Tensor | None:
    """The tensors as one of one dimension, in their memory; None if they do not lie there end to end."""
    parts = [tensor for tensor in tensors if tensor.numel()] or [tensors[0]]
    if any(part.is_neg() for part in parts):  # the memory does not hold the values
        return None
    first = parts[0].detach()
    if len(parts) == 1:
        return first.view(-1) if first.is_contiguous() else None
    storage, at = first.untyped_storage().data_ptr(), first.data_ptr()
    for part in parts:
        is_next = part.data_ptr() == at and part.untyped_storage().data_ptr() == storage
        if not is_next or part.dtype != first.dtype or not part.is_contiguous():
            return None
        at += part.nbytes
    return first.as_strided((sum(part.numel() for part in parts),), (1,))


def _joined(tensors: Tensors) -> torch.Tensor:
    """The tensors as one of one dimension: in their memory if they lie there end to end, else a copy."""
    flat = _end_to_end(tensors)
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if flat is None else flat


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    begin, at = one.data_ptr(), other.data_ptr()
    return begin < at + other.nbytes and at < begin + one.nbytes


def _places(
    sent: list[torch.Tensor], places: Sequence[Tensors]
) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
    """What is sent, and for each of it where its result can be written: None if the tensors of some place do not lie
    end to end, or are of another dtype. What is sent is copied if it lies in such a place, as FSDP's does."""
    into = []
    for given, parts in zip(sent, places, strict=True):
        flat = _end_to_end([_movable(part) for part in parts])
        if flat is None or flat.dtype != _movable(given).dtype:
            return sent, None
        into.append(flat)
    return [tensor.clone() if any(_overlap(tensor, flat) for flat in into) else tensor for tensor in sent], into


def _spread(what: str, places: Sequence[Tensors], expected: list[list[int]], results: list[Any]) -> None:
    """Copies what came into the tensors that it is for."""
    rows, numbers = results[0]
    if isinstance(rows, torch.Tensor):
        rows, numbers = [rows], [numbers]
    for parts, came, gathered, awaited in zip(places, numbers, rows, expected, strict=True):
        if list(came) != awaited:
            raise MismatchError(f"{what}: the output expects rows {awaited} from the ranks; {list(came)} came")
        views = [_movable(part) for part in parts]
        for view, part in zip(views, torch.split(gathered, [view.numel() for view in views]), strict=True):
            _write(view, part)


def _check_numel(what: str, tensor: torch.Tensor, expected: int, whose: str) -> None:
    if tensor.numel() != expected:
        raise ValueError(
            f"{what}: a tensor of shape {list(tensor.shape)} has {tensor.numel()} elements, but {whose} are {expected}"
        )


def _elements_of(tensor: torch.Tensor, splits: Sequence[int], size: int) -> list[int]:
    """How many elements are each rank's of a tensor with ``splits`` rows of each, or as many."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if not splits and rows % size:
        raise ValueError(f"all_to_all_single: {rows} rows cannot be divided among {size} ranks; give split sizes")
    numbers = list(splits) or [rows // size] * size
    if sum(numbers) != rows or len(numbers) != size:
        raise ValueError(f"all_to_all_single: split sizes {numbers} do not add up to {rows} rows, for {size} ranks")
    row = _movable(tensor).numel() // rows if rows else 0
    return [number * row for number in numbers]


def _hide_from_compiler(kinds: Sequence[type]) -> None:
    """``torch.compile`` runs their methods as they are: compiled code calls them, as DDP's does."""
    frames: Any = torch._C._dynamo.eval_frame
    for kind in kinds:
        for one in vars(kind).values():
            if not isinstance(one, types.FunctionType):
                continue
            if hasattr(frames, "skip_code"):  # before torch 2.8
                frames.skip_code(one.__code__)
            else:
                strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
                frames.set_code_exec_strategy(one.__code__, strategy)


def _register() -> None:
    """What importing this module does, for torch 2.14 and newer, which find it as an entry point of the package."""
    with contextlib.suppress(RuntimeError):  # registered before, as by a reload
        dist.register_rendezvous_handler(NAME, _rendezvous)
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=list(DEVICES))


_hide_from_compiler((ProcessGroup, Work, _calls.Kind, _calls.Calls, _Completer, _Pair, _Later))
_register()
