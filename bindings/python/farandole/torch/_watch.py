"""``watch``: a process group that stays on gloo or NCCL, with its collectives compared and its ranks watched.

Every collective that torch dispatches, by C++ such as DDP's as well, passes a kernel here, which notes its number,
what all ranks must agree on, and its line in the user's program; nothing is sent in the caller's thread. A thread
exchanges what is new with the group's other ranks ten times a second, in one allgather of a job of their own. That
job's control plane names ranks that die, stop or cannot be reached; what the allgather brings shows ranks that call
different collectives, or do not call one.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import sys
import threading
import time
from typing import Any

import torch

from farandole import _activity, _core, basics, objects, ops
from farandole.exceptions import HorovodInternalError, MismatchError, OperationTimeoutError
from farandole.torch import _compat

__all__ = ["watch"]

_EVERY_S = 0.1  # between two exchanges
_GRACE_S = 2.0  # for the program to see the failure by itself
_EXIT_WAIT_S = 2.0  # at exit, for the last exchange
_MOST_KNOWN = 4096  # descriptions
_LEAVES, _REPORTS, _ENDS = 1, 2, 4  # flags of a rank in an exchange
#: What all ranks agree on, by torch's operators: the function called, the argument with the tensors, and whether
#: these have as many elements on all ranks.
_COLLECTIVES = {
    "allreduce_": ("all_reduce", "tensors", True),
    "allreduce_coalesced_": ("all_reduce_coalesced", "tensors", True),
    "broadcast_": ("broadcast", "tensors", True),
    "reduce_": ("reduce", "tensors", True),
    "allgather_": ("all_gather", "output_tensors", True),
    "_allgather_base_": ("all_gather_into_tensor", "output_tensor", True),
    "allgather_coalesced_": ("all_gather_coalesced", "output_lists", True),
    "allgather_into_tensor_coalesced_": ("all_gather_into_tensor_coalesced", "outputs", True),
    "gather_": ("gather", "input_tensors", False),
    "scatter_": ("scatter", "output_tensors", False),
    "reduce_scatter_": ("reduce_scatter", "input_tensors", True),
    "_reduce_scatter_base_": ("reduce_scatter_tensor", "input_tensor", True),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter_tensor_coalesced", "inputs", True),
    "alltoall_": ("all_to_all", "input_tensors", False),
    "alltoall_base_": ("all_to_all_single", "input", False),
    "barrier": ("barrier", "", False),
    "monitored_barrier_": ("monitored_barrier", "", False),
}
_LIBRARIES = _activity.libraries()
_ENTERED: Any = object()  # a collective that has not given its Work yet


def watch(group: Any = None, on_failure: str = "exit") -> None:
    """Watches a process group of ``torch.distributed`` of any backend, until it is destroyed.

        dist.init_process_group("nccl")
        farandole.torch.watch()

    Collective: all ranks of the group call it at the same place of their programs; other ranks may, too. From then on
    every rank of the group prints one line to stderr when ranks call different collectives (within about 0.1 s, with
    both calls and their lines), when a rank dies or is stopped, and when some ranks have not made a call that others
    made FARANDOLE_STALL_WARNING_S ago (with the places of the missing ranks). The last is a failure only after
    FARANDOLE_STALL_SHUTDOWN_S, if set. After a failure every further collective of the group raises it.

    Args:
        group: None: the default group.
        on_failure: "exit": a process that is still inside a collective of the group 2 s after a failure ends with
            exit code 1, as it could otherwise wait until torch's time-out. "raise": such a process is not ended.
    Raises:
        ValueError: Another ``on_failure``.
        HorovodInternalError: The ranks did not meet at the group's store.
    """
    if on_failure not in ("exit", "raise"):
        raise ValueError(f'watch(on_failure=...): expected "exit" or "raise", got {on_failure!r}')
    distributed: Any = torch.distributed
    group = distributed.group.WORLD if group is None else group
    if group is None:
        raise ValueError("watch(): torch.distributed has no default process group yet")
    if isinstance(group, int) or group in _watches or group.size() == 1:  # an int: of ranks that are not in it
        return
    _intercept()
    _watches[group] = _Watch(group, on_failure == "exit")


class _Kernel:
    """What torch calls in the place of one operator of ``c10d``, which it calls in turn."""

    def __init__(self, operator: Any) -> None:
        names = [argument.name for argument in operator._schema.arguments]
        self.function, tensors, self.has_sizes = _COLLECTIVES[operator._schema.name.partition("::")[2]]
        self._group_at = names.index("process_group")
        self._tensors_at = names.index(tensors) if tensors else -1
        self._root_at = names.index("root_rank") if "root_rank" in names else -1
        self._op_at = names.index("reduce_op") if "reduce_op" in names else -1
        self._redispatch = operator._handle.redispatch_boxed
        self._below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
        self._unbox = torch.distributed.ProcessGroup.unbox

    def __call__(self, keys: Any, *args: Any) -> Any:
        watch = _watches.get(self._unbox(args[self._group_at]))
        if watch is None:
            return self._redispatch(keys & self._below, *args)
        watch.note(self, args)
        watch.last, result = _ENTERED, None
        try:
            result = self._redispatch(keys & self._below, *args)
        finally:
            watch.last = result[-1] if isinstance(result, tuple) else result
        return result

    def describe(self, args: Any) -> tuple[Any, ...]:
        """What is to be compared, without the tensors; in the caller's thread, so as little as can be."""
        tensors: Any = () if self._tensors_at < 0 else args[self._tensors_at]
        if isinstance(tensors, torch.Tensor):
            tensors = (tensors,)
        elif tensors and isinstance(tensors[0], (list, tuple)):
            tensors = [tensor for of_rank in tensors for tensor in of_rank]
        root = args[self._root_at] if self._root_at >= 0 else -1
        op = args[self._op_at] if self._op_at >= 0 else None
        return self, tuple([(tensor.dtype, tensor.shape) for tensor in tensors]), root, op


class _Watch:
    """One group's watch.

    Thread safety: ``note`` from any thread; the rest from the watch's own, unless it says otherwise. Invariant: all
    ranks get the same of each exchange, so all of them come to the same end at the same one.
    """

    def __init__(self, group: Any, exits: bool) -> None:
        from farandole.torch.distributed import _job  # not above: it registers the backend

        c10d: Any = torch.distributed.distributed_c10d
        self.last: Any = None  # the Work of the last collective
        self._group, self._exits, self._groups = group, exits, c10d._world.pg_map
        self._ranks = c10d.get_process_group_ranks(group)
        self._name = f"group {group.group_name}"
        store = c10d.PrefixStore("farandole watch", self._groups[group][1])
        self._context = _job.connect(store, group.rank(), group.size(), 0.0, in_order=False)
        self._error: HorovodInternalError | None = None
        self._calls: list[Any] = []  # those that not all ranks have made: see _Kernel.describe(); code and line
        self._digests: dict[Any, int] = {}
        self._compared = 0  # collectives before those
        self._ahead: list[list[int]] = [[] for _ in self._ranks]  # of `_calls`, by rank
        self._gather, self._submit = _core.Options(ops.ALLGATHER), self._context.core.submit
        self._title = f"watch of {self._name}"
        self._left: list[int] = []  # ranks that have
        self._flags = 0  # for the next exchange
        self._stalled, self._since_s, self._is_reported = -1, 0.0, False
        self._warning_s, self._shutdown_s = self._limits()
        self._stop = threading.Event()
        self._is_closing = False  # by the main thread
        self._of_job = f"{torch.distributed.get_rank()}/{torch.distributed.get_world_size()}"
        self._thread = threading.Thread(target=self._run, name=f"farandole-watch-{group.group_name}", daemon=True)
        self._thread.start()

    def note(self, kernel: _Kernel, args: Any) -> None:
        """Of a collective that begins."""
        if self._error is not None:
            raise self._error.with_traceback(None)
        frame: Any = sys._getframe(1).f_back  # None: a thread of C++, such as that of a GPU in autograd
        while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
            frame = frame.f_back
        place = None if frame is None else (frame.f_code, frame.f_lineno)
        self._calls.append((*kernel.describe(args), place))

    def begin_leaving(self) -> None:
        """At exit, from the main thread. If an exception ends the program, its cause may be about to be known."""
        until_s = time.monotonic() + _EXIT_WAIT_S / 2
        while hasattr(sys, "last_value") and self._error is None and time.monotonic() < until_s:
            time.sleep(0.01)
        self._stop.set()

    def leave(self) -> None:
        """After that. The other ranks are told of such an exception."""
        if not hasattr(sys, "last_value"):
            self._thread.join(_EXIT_WAIT_S)
        self._is_closing = True
        with contextlib.suppress(HorovodInternalError):
            self._context.close(at_exit=True)
        self._thread.join(_EXIT_WAIT_S)  # one that comes back from C++ to an interpreter that ends would abort it

    # The thread.

    def _run(self) -> None:
        try:
            with basics.using(self._context):
                while not self._exchange():
                    self._stop.wait(_EVERY_S)
            with contextlib.suppress(HorovodInternalError):
                self._context.core.close()
            while not self._is_leaving():
                self._check_left()
                self._stop.wait(_EVERY_S)
        except HorovodInternalError as error:
            if not self._is_closing:
                self._fail(error)
        except Exception as error:
            if not self._is_leaving():
                self._tell("warning", f"{self._name} is watched no more: {type(error).__name__}: {error}")
                self._context.core.close_at_exit(0.0)
        finally:
            _watches.pop(self._group, None)

    def _is_leaving(self) -> bool:
        return self._stop.is_set() or self._group not in self._groups

    def _exchange(self) -> bool:
        """Whether a rank leaves the group; the watch then ends on all of them.

        Raises:
            HorovodInternalError: What has gone wrong.
        """
        import numpy as np  # not above: see ops._with_numbers

        flags = self._flags | (_LEAVES if self._is_leaving() else 0)
        own = self._ahead[self._group.rank()]
        sent = [flags, *map(self._digest, self._calls[len(own) :])]
        rows, counts = self._submit(self._gather, np.array(sent, np.int64), self._title, ops.BLOCKS, _as_lists)
        flags_of, at = [], 0
        for ahead, count in zip(self._ahead, counts, strict=True):
            flags_of.append(rows[at])
            ahead.extend(rows[at + 1 : at + count])
            at += count
        self._compare()
        if flags_of[0] & (_REPORTS | _ENDS):
            self._report_stall(is_end=bool(flags_of[0] & _ENDS))
        self._left = [rank for rank, flags in enumerate(flags_of) if flags & _LEAVES]
        fewest = min(map(len, self._ahead))
        for ahead in self._ahead:
            del ahead[:fewest]
        del self._calls[:fewest]
        self._compared += fewest
        self._flags = self._stall_flags()
        return bool(self._left)

    def _compare(self) -> None:
        longest = max(self._ahead, key=len)
        if all(ahead == longest[: len(ahead)] for ahead in self._ahead):
            return
        index = next(i for i in range(len(longest)) if len({ahead[i] for ahead in self._ahead if i < len(ahead)}) > 1)
        calls, _ = self._described(index)
        raise MismatchError(f"ranks of {self._name} differ in its collective {self._compared + index + 1}: {calls}")

    def _stall_flags(self) -> int:
        """What rank 0 tells all to do in the next exchange: its clock alone decides."""
        if not any(self._ahead):
            self._stalled = -1
        elif self._stalled != self._compared:
            self._stalled, self._since_s, self._is_reported = self._compared, time.monotonic(), False
        waited_s = time.monotonic() - self._since_s
        if self._group.rank() != 0 or self._stalled < 0:
            return 0
        if self._shutdown_s and waited_s >= self._shutdown_s:
            return _ENDS
        if self._warning_s and waited_s >= self._warning_s and not self._is_reported:
            self._is_reported = True
            return _REPORTS
        return 0

    def _report_stall(self, is_end: bool) -> None:
        """All ranks say where they are; rank 0 reports it, or it is an error on all of them."""
        called, missing = self._described(0)
        if not missing:  # they have come meanwhile
            return
        limit_s = self._shutdown_s if is_end else self._warning_s
        text = f"collective {self._compared + 1} of {self._name}: {called}; after {limit_s:g} s {missing}"
        if is_end:
            raise OperationTimeoutError(f"{text}; the limit is FARANDOLE_STALL_SHUTDOWN_S")
        if self._group.rank() == 0:
            self._tell("warning", text)

    def _described(self, index: int) -> tuple[str, str]:
        """What the ranks that have made a call of `_calls` called and where; and where the others are. Collective."""
        has_called = index < len(self._ahead[self._group.rank()])
        own = self._text_of(index) if has_called else _activity.describe([])
        texts = objects.allgather_object(own, f"places of {self._name}")
        called: dict[str, list[int]] = {}
        missing: dict[str, list[int]] = {}
        for rank, ahead, text in zip(self._ranks, self._ahead, texts, strict=True):
            (called if index < len(ahead) else missing).setdefault(text, []).append(rank)
        return (
            "; ".join(f"{_named(ranks)} called {text}" for text, ranks in called.items()),
            "; ".join(f"{_named(ranks)} did not: at {text}" for text, ranks in missing.items()),
        )

    def _check_left(self) -> None:
        """After a rank has left well: raises an error if this one goes on."""
        for rank in self._left:
            if self._calls[len(self._ahead[rank]) :]:
                number = self._compared + len(self._ahead[rank])
                raise HorovodInternalError(
                    f"rank {self._ranks[rank]} has left {self._name} after {number} collectives, and this rank calls "
                    f"another one: {self._text_of(len(self._ahead[rank]))}"
                )

    def _fail(self, error: HorovodInternalError) -> None:
        if error.failed_ranks and self._ranks != list(range(len(self._ranks))):
            error.failed_ranks = tuple(self._ranks[rank] for rank in error.failed_ranks)
            error.args = (f"{self._name} of ranks {self._ranks}, numbered from 0: {error}",)
        if error.failed_ranks and self._calls:
            number = self._compared + len(self._calls)
            error.args = (f"{error}; this rank called collective {number}, {self._text_of(-1)}",)
        self._error = error
        self._tell("error", str(error))
        with contextlib.suppress(HorovodInternalError):
            self._context.core.close_at_exit(_GRACE_S / 2)
        since_s = time.monotonic()
        while not self._is_leaving():  # until then it is raised
            self._stop.wait(_EVERY_S)
            if not self._exits or not self._is_stuck():
                since_s = time.monotonic()
            elif time.monotonic() - since_s >= _GRACE_S:
                self._exit(error)

    def _is_stuck(self) -> bool:
        """Whether the last collective has not ended."""
        if self.last is None or self.last is _ENTERED:
            return self.last is _ENTERED
        return not torch.distributed.Work.unbox(self.last).is_completed()

    def _exit(self, error: HorovodInternalError) -> None:
        self._tell("error", f"this process is inside a collective of {self._name} that cannot end, and exits")
        basics._report(basics.describe_failure(error, str(error)))
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(1)

    # Texts.

    def _tell(self, level: str, text: str) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # of a stderr that is closed
            sys.stderr.write(f"[farandole {self._of_job}] {level}: {text}\n")
            sys.stderr.flush()

    def _limits(self) -> tuple[float, float]:
        """FARANDOLE_STALL_WARNING_S and FARANDOLE_STALL_SHUTDOWN_S; 0: never."""
        setting = self._context.core.setting
        if setting("FARANDOLE_STALL_CHECK_DISABLE") != "0":
            return 0.0, 0.0
        return float(setting("FARANDOLE_STALL_WARNING_S")), float(setting("FARANDOLE_STALL_SHUTDOWN_S"))

    def _digest(self, call: Any) -> int:
        """The same on all ranks that call the same: shapes of as many elements are."""
        kernel, tensors, root, op, _ = call
        key = (kernel, tensors, root, -1 if op is None else op.op())
        digest = self._digests.get(key)
        if digest is None:
            if len(self._digests) >= _MOST_KNOWN:
                self._digests.clear()
            compared: Any = [(str(dtype), shape.numel()) for dtype, shape in tensors]
            if not kernel.has_sizes:
                compared = [dtype for dtype, _ in compared[:1]]
            text = repr((kernel.function, compared, *key[2:]))
            digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
            self._digests[key] = digest
        return digest

    def _text_of(self, index: int) -> str:
        kernel, tensors, root, op, place = self._calls[index]
        text: str = kernel.function
        described = ", ".join(f"{str(dtype)[6:]}{list(shape)}" for dtype, shape in tensors[:3])
        if described:
            text += f" of {described}" + (f", ... ({len(tensors)} tensors)" if len(tensors) > 3 else "")
        if op is not None:
            names: Any = torch.distributed.ReduceOp.RedOpType.__members__
            text += " with " + next(name for name, value in names.items() if int(value) == op.op())
        if root >= 0:
            text += f"{' to' if kernel.function in ('reduce', 'gather') else ' from'} rank {self._ranks[root]}"
        return text if place is None else f"{text} at {_activity.place(*place)}"


def _as_lists(rows: Any, counts: list[int]) -> tuple[list[int], list[int]]:
    return rows.tolist(), counts


def _named(ranks: list[int]) -> str:
    text = ", ".join(map(str, ranks[:8])) + (f", ... ({len(ranks)} ranks)" if len(ranks) > 8 else "")
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


_watches: dict[Any, _Watch] = {}
_library: list[Any] = []  # as long as this process


def _intercept() -> None:
    """Puts the kernels in their place, once. BackendSelect: below autograd, and also without gradients."""
    if _library:
        return
    _compat.hide_from_compiler((_Kernel, _Watch))
    _library.append(torch.library.Library("c10d", "IMPL"))
    for name in _COLLECTIVES:
        packet = getattr(torch.ops.c10d, name, None)
        if packet is not None:
            _library[0].impl(name, _Kernel(packet.default), "BackendSelect", with_keyset=True)


@atexit.register
def _leave_all() -> None:
    watches = list(_watches.values())
    for watch in watches:
        watch.begin_leaving()
    for watch in watches:
        watch.leave()


os.register_at_fork(after_in_child=_watches.clear)  # no thread of theirs lives there
