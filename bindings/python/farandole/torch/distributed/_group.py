"""The group itself: torch's collectives as calls of the core."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import itertools
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed

from farandole import _core, _metrics
from farandole.exceptions import HorovodInternalError, OperationTimeoutError
from farandole.ops import ALLGATHER, ALLREDUCE, ALLTOALL, BARRIER, BLOCKS, BROADCAST, GROUP, IN_PLACE, REDUCESCATTER
from farandole.torch import _calls
from farandole.torch.distributed import _hooks, _members, _tensors
from farandole.torch.distributed._job import Job
from farandole.torch.distributed._monitored import MonitoredBarrier
from farandole.torch.distributed._pair import Pair
from farandole.torch.distributed._tensors import Tensors
from farandole.torch.distributed._work import Work

NAME = _hooks.NAME
DEVICES = ("cpu", "cuda")
_KINDS = ("allreduce", "broadcast", "allgather", "reduce_scatter", "all_to_all", "barrier")
#: By torch's names; numbers of the C ABI.
_REDUCTIONS = {"SUM": 0, "AVG": 1, "MIN": 2, "MAX": 3, "PRODUCT": 4, "PREMUL_SUM": 8}
_LINEAR = ("SUM", "AVG", "PREMUL_SUM")
#: As gloo and NCCL have it: a sum of truth values is whether one is true, a product whether all are.
_OF_BOOL = {"SUM": "MAX", "PRODUCT": "MIN"}
#: How long reconfigure() waits at its end for members so far that live, and are members no more.
_LEAVING_S = 0.2
#: How long shutdown() of a group that changes its members waits for the others.
_LONGEST_END_S = 2.0
_NOT_JOINED = f"{NAME}: the group has no members: expected a call of reconfigure(), that succeeds, before operations"
_BITWISE = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}
#: Untyped: from one torch to the next its methods have other names and arguments.
dist: Any = torch.distributed
_TorchGroup: Any = dist.ProcessGroup
_TorchOptions: Any = torch._C._distributed_c10d.Backend.Options


class Options(_TorchOptions):  # type: ignore[misc]  # see above
    """What torch asks the backend of a group for."""

    def __deepcopy__(self, _: Any) -> Options:  # split_group of torch < 2.15
        return self


class ProcessGroup(_TorchGroup):  # type: ignore[misc]  # see above
    """A group of ranks, created by ``torch.distributed``.

    What is no override of torch's begins with ``fl_``: a later torch may take any other name.

    Args:
        is_joined: False: the ranks meet at the first :meth:`reconfigure`.

    Thread safety: any thread; collectives must come in the same order on all ranks.
    """

    def __init__(
        self, store: Any, rank: int, size: int, global_ranks: Sequence[int] = (), timeout_s: float = 0,
        devices: Sequence[str] = DEVICES, is_joined: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(rank, size)
        self.fl_desc = "undefined"
        self.fl_abort_hooks: dict[int, Callable[[], None]] = {}
        self.fl_observed: _hooks.Observed | None = None
        self.fl_devices = [torch.device(device) for device in devices]
        self.fl_pairs_lock = threading.Lock()
        self.fl_store, self.fl_timeout_s = store, timeout_s
        self.fl_handle: _members.Handle | None = None
        self.fl_uuids: set[int] = set()  # of reconfigure()
        self.fl_changes = not is_joined  # its members
        self.fl_leaving: list[_core.Context] = []  # jobs of earlier members, of which some are still there
        self.fl_use(Job(store, rank, size, global_ranks, timeout_s, "" if is_joined else _NOT_JOINED))
        _open_groups.add(self)

    # What torch calls a group.

    def getRank(self) -> int:
        return self.fl_job.rank

    def getSize(self) -> int:
        return self.fl_size

    rank, size = getRank, getSize

    def getBackendName(self) -> str:
        return NAME

    name = getBackendName

    def _set_group_name(self, name: str) -> None:
        self.fl_job.name = name

    def _set_group_desc(self, desc: str) -> None:
        """The last that torch tells a group before others may use it."""
        self.fl_desc = desc
        if self.fl_observed is None and _hooks.are_asked():
            self.fl_observe().attach_asked(self.fl_job.ranks)

    setGroupName, setGroupDesc = _set_group_name, _set_group_desc

    def getGroupName(self) -> str:
        return self.fl_job.name

    def getGroupDesc(self) -> str:
        return self.fl_desc

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        """None for torch's flight recorder, which asks the C++ base for a name that only groups with registered
        backends have; see :mod:`_hooks`."""
        is_recorder = sys._getframe(1).f_code.co_name == "_maybe_attach_flight_recorder"
        return [] if is_recorder else self.fl_devices

    supports_splitting = True

    def split_group(
        self, new_ranks: Sequence[int], timeout: datetime.timedelta | None = None, opts: Any = None,
        group_name: str | None = None, group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> ProcessGroup | None:  # fmt: skip
        """A group of some of the ranks; all call it, and those that are not among them get None."""
        job, number = self.fl_job, next(self.fl_splits)
        if job.rank not in new_ranks:
            return None
        name = group_name or f"{job.name}:split:{number}"
        store = dist.PrefixStore(f"split {number} {list(new_ranks)}", job.store)
        timeout_s = self.fl_timeout_s if timeout is None else timeout.total_seconds()
        group = ProcessGroup(
            store, list(new_ranks).index(job.rank), len(new_ranks), [job.ranks[rank] for rank in new_ranks], timeout_s,
            [device.type for device in device_types or self.fl_devices],
        )  # fmt: skip
        group._set_group_name(name)
        group._set_group_desc("undefined" if group_desc is None else group_desc)
        return group

    def merge_remote_group(self, *_: Any, **__: Any) -> ProcessGroup:
        raise NotImplementedError(f"{NAME}: merge_remote_group is not supported; reconfigure() adds members")

    def _get_backend(self, _device: Any) -> ProcessGroup:
        """It serves all devices."""
        return self

    get_backend = _get_backend

    supports_coalescing = supports_shrinking = supports_time_estimate = _supports_time_estimate = False
    supports_window = supports_completion_hooks = False

    def supports_tensor_alloc(self, _device: Any) -> bool:
        return False

    def eager_connect_single_device(self, _device: Any) -> None:
        """The ranks are connected."""

    @property
    def options(self) -> Options:
        options = Options(NAME, datetime.timedelta(seconds=self.fl_timeout_s))
        options.group_name, options.global_ranks_in_group = self.fl_job.name, self.fl_job.ranks
        return options

    def get_group_store(self) -> Any:
        return self.fl_job.store

    def _get_sequence_number_for_group(self) -> int:
        """How many collectives this rank has called; messages do not count."""
        return self.fl_sequence

    def _set_sequence_number_for_group(self) -> None:
        """It begins at 0 on all ranks."""

    # Hooks.

    supports_abort_hooks = True

    def register_abort_hook(self, hook_id: int, hook: Callable[[], None]) -> None:
        """Called once in whatever thread first raises the error by which the group has ended."""
        self.fl_abort_hooks[hook_id] = hook

    def unregister_abort_hook(self, hook_id: int) -> None:
        self.fl_abort_hooks.pop(hook_id, None)

    def register_pre_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
        self.fl_observe().register("pre", hook_id, hook)

    def unregister_pre_hook(self, hook_id: int) -> None:
        self.fl_observe().unregister("pre", hook_id)

    def register_post_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
        self.fl_observe().register("post", hook_id, hook)

    def unregister_post_hook(self, hook_id: int) -> None:
        self.fl_observe().unregister("post", hook_id)

    def fl_observe(self) -> _hooks.Observed:
        if self.fl_observed is None:
            self.fl_observed = _hooks.Observed(self)
        return self.fl_observed

    def get_error(self) -> Any:
        """torch's word for the error with which the group has ended; success if ranks have left it, as they may."""
        kinds = torch._C._distributed_c10d.ErrorType
        try:
            self.fl_job.raise_if_lost()
        except OperationTimeoutError:
            return kinds.TIMEOUT
        except HorovodInternalError:
            return kinds.REMOTE_ERROR
        return kinds.SUCCESS

    # Other members.

    supports_reconfigure = True

    def get_reconfigure_handle(self) -> str:
        """By which :meth:`reconfigure` of other processes finds this one, as long as the group lives."""
        if self.fl_handle is None:
            self.fl_handle = _members.Handle.create(self.fl_store, self.fl_size)
        world = dist.distributed_c10d.GroupMember.WORLD
        self.fl_handle = self.fl_handle._replace(rank=(world or self).rank())
        return str(self.fl_handle)

    def reconfigure(self, opts: Any) -> Work:
        """Goes on with other members, as a job of their own: after a failure, too, of which nothing remains.

        Returns once all have called it. Operations in flight end with an error. Meanwhile no other thread may use
        the group. The handles of those with whom it goes on must have come to this process by other means.

        Args:
            opts: torch's: ``handles``, a list by rank or a set; ``uuid``, another one each time; ``timeout``, by
                default 60 s.

        Raises:
            ValueError: This process is not among them, or they are no handles, or the ``uuid`` was used before. The
                group stays as it is.
            HorovodInternalError: Members did not come in time (OperationTimeoutError), or rank 0 of them cannot be
                reached; ``failed_ranks`` are their places in ``handles``. The group has no members then, and can be
                reconfigured again.
        """
        members, rank = _members.order(opts.handles, self.fl_handle)
        if opts.uuid in self.fl_uuids:
            raise ValueError(f"reconfigure: expected another uuid each time; got {opts.uuid} again")
        self.fl_uuids.add(opts.uuid)
        self.fl_changes = True
        timeout_s = opts.timeout.total_seconds() if opts.timeout else _members.DEFAULT_TIMEOUT_S
        ranks = [member.rank for member in members]
        if self is dist.distributed_c10d.GroupMember.WORLD or len(set(ranks)) < len(ranks):  # of several jobs
            ranks = []
        self.fl_leave(rank, len(members))
        store = _members.meet(members, rank, opts.uuid, timeout_s) if len(members) > 1 else None
        job = Job(store, rank, len(members), ranks, self.fl_timeout_s)
        job.name = self.fl_job.name
        self.fl_use(job)
        self.fl_finish_leaving(_LEAVING_S)
        return Work(job, [], [])

    # Its end.

    def shutdown(self) -> None:
        """Leaves the group when all its ranks do, as ``destroy_process_group`` does; one that can change its members
        after 2 s at the latest, since others may wait for whoever takes this rank's place.

        A failure that no collective has raised on this rank is a warning: an error would leave the other groups
        open.
        """
        _open_groups.discard(self)
        _metrics.leave_group(self.fl_job.context)
        self.fl_close_pairs()
        self.fl_finish_leaving(0.0, is_end=True)
        try:
            if not self.fl_changes:
                self.fl_job.context.close()
            elif not self.fl_core.close_within(_LONGEST_END_S):
                self.fl_core.close_at_exit(0.0)
        except HorovodInternalError as error:
            if not self.fl_job.has_seen_failure:
                warnings.warn(f"{NAME}: {self.fl_job.renumber(error)}", RuntimeWarning, stacklevel=2)
        finally:
            self.fl_job.completer.stop()

    def abort(self) -> None:
        """Leaves the group at once: operations in flight end with an error on all its ranks."""
        _open_groups.discard(self)
        _metrics.leave_group(self.fl_job.context)
        self.fl_job.announce_leaving()
        for pair in list(self.fl_pairs.values()):
            pair.abort()
        with contextlib.suppress(HorovodInternalError):  # with which it has ended
            self.fl_core.close_at_exit(0.0)
        self.fl_finish_leaving(0.0, is_end=True)
        self.fl_job.completer.stop()

    def fl_close_at_exit(self) -> None:
        """As :meth:`shutdown`, for a script that ends without ``destroy_process_group``."""
        _metrics.leave_group(self.fl_job.context)
        with contextlib.suppress(HorovodInternalError):  # the script has seen it, or waited for nothing more
            self.fl_close_pairs(at_exit=True)
        self.fl_finish_leaving(0.0, is_end=True)
        with contextlib.suppress(HorovodInternalError):
            self.fl_job.context.close(at_exit=True)
        self.fl_job.completer.stop(1.0)

    def fl_close_pairs(self, at_exit: bool = False) -> None:
        """Before the group: its store is there as long as all ranks are in it."""
        self.fl_job.announce_leaving()
        for pair in sorted(self.fl_pairs.values()):
            with contextlib.suppress(HorovodInternalError):  # as that of the group
                pair.close(at_exit)

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Of what is called from now on, as ``dist.set_timeout``: all ranks set it."""
        self.fl_job.set_timeout(timeout.total_seconds())
        self.fl_timeout_s = timeout.total_seconds()
        for pair in list(self.fl_pairs.values()):
            pair.set_timeout(self.fl_job.timeout_s)

    # Collectives. `opts` are torch's; a missing one means the defaults.

    def allreduce(self, tensors: Tensors, opts: Any = None, *_: Any) -> Work:
        for tensor in tensors:
            if tensor.is_sparse:
                return self.fl_reduce_sparse(tensors, opts)
        return self.fl_reduce(tensors, opts)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Tensors, opts: Any = None, *_: Any) -> Work:
        root = 0 if opts is None else opts.rootRank
        views, write_back = _tensors.contiguous([_tensors.movable(tensor) for tensor in tensors])
        finish = None if write_back is None or self.rank() == root else write_back
        return self.fl_work(opts, BROADCAST, views, list(tensors), finish, how=IN_PLACE, root=root)

    def reduce(self, tensors: Tensors, opts: Any, *_: Any) -> Work:
        """The tensors of ranks other than the root stay as they are."""
        targets = tensors if self.rank() == opts.rootRank else [tensor.clone() for tensor in tensors]
        return self.fl_reduce(targets, opts, list(tensors))

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None, *_: Any) -> Work:
        received = [[_tensors.movable(part).numel() for part in parts] for parts in outputs]
        return self.fl_gather(outputs, inputs, received, [part for parts in outputs for part in parts], opts)

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None, *_: Any) -> Work:
        """As :meth:`allgather`, but ``outputs`` has a list for each rank, of a tensor for each of ``inputs``."""
        return self.allgather([list(of_ranks) for of_ranks in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None, *_: Any) -> Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None, *_: Any) -> Work:
        for output, given in zip(outputs, inputs, strict=True):
            _tensors.check_numel(
                "all_gather", output, self.fl_size * given.numel(), "the input's times the group's size"
            )
        received = [[_tensors.movable(given).numel()] * self.fl_size for given in inputs]
        return self.fl_gather([[output] for output in outputs], inputs, received, list(outputs), opts)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None, *_: Any) -> Work:
        if any(part.numel() != into.numel() for into, parts in zip(outputs, inputs, strict=True) for part in parts):
            return self.fl_reduce_scatter_uneven(outputs, inputs, opts)
        return self.fl_reduce_scatter(outputs, [_tensors.joined(parts) for parts in inputs], opts)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None, *_: Any) -> Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None, *_: Any) -> Work:
        for output, given in zip(outputs, inputs, strict=True):
            _tensors.check_numel(
                "reduce_scatter", given, self.fl_size * output.numel(), "the output's times the group's size"
            )
        return self.fl_reduce_scatter(outputs, [given.reshape(-1) for given in inputs], opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None, *_: Any) -> Work:
        return self.fl_exchange(opts, outputs, inputs, "all_to_all", list(outputs))

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int], opts: Any = None, *_: Any,
    ) -> Work:  # fmt: skip
        received = _tensors.elements_of(output, output_split_sizes, self.fl_size)
        sent = _tensors.elements_of(input, input_split_sizes, self.fl_size)
        flat = _tensors.movable(input).reshape(-1)
        return self.fl_receive(
            opts, ALLTOALL, [flat], [[output]], [received], [output], splits=sent, label="all_to_all_single"
        )

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any, *_: Any) -> Work:
        nothing = inputs[0].new_empty(0)
        is_root = self.rank() == opts.rootRank
        sent = [inputs[0] if rank == opts.rootRank else nothing for rank in range(self.fl_size)]
        received = list(outputs[0]) if is_root else []
        what = f"gather to rank {opts.rootRank}{_tensors.count_in_name(inputs[0])}"
        return self.fl_exchange(opts, received or [nothing] * self.fl_size, sent, what, received)

    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any, *_: Any) -> Work:
        if self.rank() != opts.rootRank:
            return self.gather([], [input], opts)
        _tensors.check_numel("gather", output, self.fl_size * input.numel(), "the input's times the group's size")
        return self.gather([output.view(self.fl_size, input.numel()).unbind()], [input], opts)

    gather_into_tensor = gather_single

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any, *_: Any) -> Work:
        nothing = outputs[0].new_empty(0)
        is_root = self.rank() == opts.rootRank
        sent = list(inputs[0]) if is_root else [nothing] * self.fl_size
        received = [outputs[0] if rank == opts.rootRank else nothing for rank in range(self.fl_size)]
        what = f"scatter from rank {opts.rootRank}{_tensors.count_in_name(outputs[0])}"
        return self.fl_exchange(opts, received, sent, what, [outputs[0]])

    def barrier(self, opts: Any = None, *_: Any) -> Work:
        timeout = getattr(opts, "timeout", datetime.timedelta(0))
        if timeout <= datetime.timedelta(0):
            return self.fl_work(opts, BARRIER, (), [])
        return self.fl_work(None, BARRIER, (), [], timeout=timeout)

    def monitored_barrier(
        self, timeout: datetime.timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:  # fmt: skip
        """A barrier whose errors name the ranks that rank 0 has not seen in time; the group goes on."""
        limit_s = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else timeout
        self.fl_monitored.wait(limit_s, wait_all_ranks)

    # Messages. Both ranks' calls end when the message has arrived.

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> Work:
        flat = _tensors.movable(tensors[0]).contiguous().view(-1)
        return self.fl_message(flat, dst, tag, is_sent=True, outputs=[])

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> Work:
        target = _tensors.movable(tensors[0])
        if target.is_contiguous():
            return self.fl_message(target.view(-1), src, tag, is_sent=False, outputs=list(tensors))
        flat = torch.empty(target.shape, dtype=target.dtype, device=target.device).view(-1)
        finish = functools.partial(_tensors.fill, target, flat)
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

    def fl_use(self, job: Job) -> None:
        """Operations from now on are the job's."""
        self.fl_calls, self.fl_pairs = _calls.Calls(), dict[int, Pair]()
        self.fl_sequence, self.fl_splits = 0, itertools.count()  # collectives so far; as of a member that is new
        self.fl_job, self.fl_core, self.fl_size = job, job.context.core, job.size
        self.fl_monitored = MonitoredBarrier(job)
        job.abort_hooks = self.fl_abort_hooks
        numbers = dist.distributed_c10d._world.pg_group_ranks  # by which torch finds `src` and `dst`
        if self in numbers:
            numbers[self] = {rank: number for number, rank in enumerate(job.ranks)}
        if self.fl_observed is not None:
            self.fl_observed.renew(self)
            self.fl_observed.attach_asked(job.ranks)

    def fl_leave(self, rank: int, size: int) -> None:
        """Begins to leave the members so far, which ends what is in flight here, and there what waits for this rank.
        Until the others join, the group is without members."""
        job, pairs = self.fl_job, sorted(self.fl_pairs.values())
        job.announce_leaving()
        cores = [core for pair in pairs if (core := pair.give_up()) is not None]
        self.fl_leaving += [*cores, self.fl_core]
        new = Job(None, rank, size, (), self.fl_timeout_s, _NOT_JOINED)
        new.name = job.name
        self.fl_use(new)
        self.fl_finish_leaving(0.0)
        job.completer.stop()

    def fl_finish_leaving(self, limit_s: float, is_end: bool = False) -> None:
        """Leaves the jobs of earlier members that have left them, too: a process that is a member no more may live on.

        Args:
            limit_s: How long to wait for all together.
            is_end: Does not come again: the rest ends with the process.
        """
        until_s = time.monotonic() + limit_s
        for core in list(self.fl_leaving):
            with contextlib.suppress(HorovodInternalError):  # of those members
                if is_end:
                    core.close_at_exit(0.0)
                elif not core.close_within(max(0.0, until_s - time.monotonic())):
                    continue
            self.fl_leaving.remove(core)

    def fl_message(
        self, flat: torch.Tensor, peer: int, tag: int, is_sent: bool, outputs: list[torch.Tensor],
        finish: Callable[[list[Any]], None] | None = None,
    ) -> Work:  # fmt: skip
        _tensors.check_travels(flat)
        pair = self.fl_pairs.get(peer) or self.fl_pair_with(peer)
        try:
            return Work(self.fl_job, [pair.start(flat, is_sent, tag)], outputs, finish, pair.ranks)
        except HorovodInternalError as error:
            raise self.fl_job.renumber(error, pair.ranks) from None

    def fl_pair_with(self, peer: int) -> Pair:
        if peer == self.rank() or not 0 <= peer < self.fl_size:
            raise ValueError(f"{NAME}: rank {self.rank()} of {self.fl_size} cannot exchange messages with rank {peer}")
        with self.fl_pairs_lock:
            if peer not in self.fl_pairs:
                self.fl_pairs[peer] = Pair(self.fl_job, peer)
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
            views, finish = _tensors.contiguous([torch.view_as_real(t) if t.is_complex() else t for t in tensors])
            if then is not None:
                finish = functools.partial(_tensors.call_each, finish, then)
            return self.fl_work(opts, ALLREDUCE, views, outputs, finish, how=IN_PLACE, op=op, factor=factor)

        def combine(results: list[Any]) -> None:
            for tensor, gathered in zip(tensors, _tensors.all_of(results), strict=True):
                parts = gathered.view(self.fl_size, -1)
                _tensors.write(tensor, functools.reduce(_BITWISE[op], parts.unbind()))
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
            gathered = _tensors.all_of(results)
            for tensor, indices, values in zip(tensors, gathered[::2], gathered[1::2], strict=True):
                values = torch.view_as_complex(values) if tensor.is_complex() else values
                total = torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=True)
                tensor.copy_(total.coalesce())

        label = f"allreduce (sparse, {', '.join(str(list(tensor.shape)) for tensor in tensors)})"
        return self.fl_work(opts, ALLGATHER, sent, list(tensors), add_up, label=label, is_ragged=True)

    def fl_reduce_scatter(self, outputs: Tensors, flat: list[torch.Tensor], opts: Any) -> Work:
        def finish(results: list[Any]) -> None:
            for output, reduced in zip(outputs, _tensors.all_of(results), strict=True):
                _tensors.write(output, reduced)

        op, factor = _op_of(opts)
        flat, into = _tensors.places(flat, [[output] for output in outputs])
        then = finish if into is None else None
        return self.fl_work(opts, REDUCESCATTER, flat, list(outputs), then, op=op, factor=factor, into=into)

    def fl_reduce_scatter_uneven(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Work:
        joined = [torch.cat([part.reshape(-1) for part in parts]) for parts in inputs]

        def take_own(_: list[Any]) -> None:
            for output, total, parts in zip(outputs, joined, inputs, strict=True):
                splits = torch.split(total, [part.numel() for part in parts])
                _tensors.write(output, splits[self.rank()])

        return self.fl_reduce(joined, opts, list(outputs), take_own)

    def fl_gather(
        self, places: Sequence[Tensors], inputs: Tensors, received: list[list[int]], outputs: list[torch.Tensor],
        opts: Any,
    ) -> Work:  # fmt: skip
        sent = [_tensors.movable(tensor).reshape(-1) for tensor in inputs]
        return self.fl_receive(opts, ALLGATHER, sent, places, received, outputs)

    def fl_exchange(self, opts: Any, outputs: Tensors, inputs: Tensors, what: str, whole: list[torch.Tensor]) -> Work:
        """Tensor `i` of `inputs` goes to rank `i`; what comes from there goes into `outputs[i]`."""
        for name, parts in (("inputs", inputs), ("outputs", outputs)):
            if len(parts) != self.fl_size:
                raise ValueError(f"{what}: expected {self.fl_size} {name}, one for each rank; got {len(parts)}")
        splits, received = ([_tensors.movable(tensor).numel() for tensor in parts] for parts in (inputs, outputs))
        sent = [_tensors.joined([_tensors.movable(tensor) for tensor in inputs])]
        return self.fl_receive(opts, ALLTOALL, sent, [outputs], [received], whole, splits=splits, label=what)

    def fl_receive(
        self, opts: Any, kind: int, sent: list[torch.Tensor], places: Sequence[Tensors], received: list[list[int]],
        outputs: list[torch.Tensor], splits: Any = None, label: str = "",
    ) -> Work:  # fmt: skip
        """An allgather or alltoall: of ``sent[i]``, `received[i][r]` elements come from rank `r`, into the tensors
        ``places[i]``, end to end. MismatchError on this rank if others come."""
        sent, into = _tensors.places(sent, places)
        rows = list(itertools.chain.from_iterable(received))
        is_ragged = any(len(set(numbers)) > 1 for numbers in received)
        finish = functools.partial(_tensors.spread, label or _KINDS[kind], places, received) if into is None else None
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
            _tensors.check_travels(tensor)
        calls = self.fl_kind(kind, tensors, op, factor, root, label, is_ragged)
        self.fl_sequence += 1
        self.fl_job.has_started = True
        if getattr(opts, "asyncOp", True):
            handle = _calls.start(self.fl_core, calls.options, calls.name(), given, how, splits, into, rows)
            return Work(self.fl_job, [handle], outputs, finish, timeout=timeout)
        # Whoever asked waits at once: no thread is woken for it.
        try:
            result = _calls.start(self.fl_core, calls.options, calls.name(), given, how | BLOCKS, splits, into, rows)
        except HorovodInternalError as error:
            raise self.fl_job.renumber(error) from None
        if finish is not None:
            with torch.no_grad():
                finish([result])
        return Work(self.fl_job, [], outputs)

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
        return self.fl_calls.add(key, options, f"group {self.fl_job.name}: {text}")


_open_groups: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()


@atexit.register
def _close_groups() -> None:
    for group in list(_open_groups):
        group.fl_close_at_exit()


def _op_of(opts: Any) -> tuple[str, float]:
    """The name of a reduce operation, and the factor of PREMUL_SUM."""
    if opts is None:
        return "SUM", 1.0
    op = getattr(opts.reduceOp, "op", opts.reduceOp).name
    return op, float(opts.reduceOp.factor) if op == "PREMUL_SUM" else 1.0
