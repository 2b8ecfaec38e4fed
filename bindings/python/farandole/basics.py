"""Life cycle, topology and process sets, with Horovod's names.

The default context is the package's one state of the whole process; all else asks :func:`current`
for the context to work on. Threads that are ranks of their own put theirs in place with ``using``.

One file: the life of that one state.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import ctypes
import dataclasses
import io
import json
import numbers
import os
import pathlib
import shlex
import signal
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from farandole import _activity as _activity  # of _core, which asks it when imports may be locked
from farandole import _core, _flight_folder, _horovod, _metrics, _step_times, _store, exceptions
from farandole.exceptions import (
    AbortedError,
    GenerationEndedError,
    HorovodInternalError,
    JobHaltedError,
    MismatchError,
    OperationTimeoutError,
    PeerLostError,
)

__all__ = [
    "ProcessSet", "add_process_set", "ccl_built", "counters", "cross_rank", "cross_size",
    "cuda_built", "ddl_built", "end_step", "global_process_set", "gloo_built", "gloo_enabled", "init",
    "is_homogeneous", "is_initialized", "local_rank", "local_size", "mpi_built", "mpi_enabled",
    "mpi_threads_supported", "nccl_built", "rank", "remove_process_set", "rocm_built", "shutdown",
    "size", "slot_range", "start_timeline", "stop_timeline",
]  # fmt: skip

_NOT_INITIALIZED = "Farandole has not been initialized; use farandole.init()."
_FORKED = (
    "Farandole was initialized before this process was forked and cannot be used in the child, which can only ask "
    "where its parent stands, as by rank(): call it in the parent process only."
)
_ALLREDUCE, _ALLGATHER, _BARRIER, _MAX = 0, 2, 5, 3  # of the C ABI
_GROUP, _BLOCKS = 1, 4  # of _core.Context.submit()
_EXIT_WAIT_S = 0.1  # for the others, until the library's exit handler knows the code
_EXIT_OPEN, _EXIT_BY_ERROR, _EXIT_BY_OTHER = 0, 1, 2  # of the C ABI
_HALTED = 75  # exit code
_RANK_PROCESS = "FARANDOLE_RANK_PROCESS"  # set by the C library when this process has joined


class Topology(NamedTuple):
    """Where a rank stands; see the functions of the same names."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


@dataclasses.dataclass(eq=False)
class Context:
    """A rank's engine and what Python keeps with it."""

    core: _core.Context
    process_sets: dict[int, ProcessSet] = dataclasses.field(default_factory=dict)  # not the global
    #: The gradient reducers of wrapped optimizers that still live.
    reducers: weakref.WeakSet[Any] = dataclasses.field(default_factory=weakref.WeakSet)
    #: By process set, how many optimizers were ever wrapped with op=Adasum.
    adasum_counts: dict[int, int] = dataclasses.field(default_factory=dict)
    is_homogeneous: bool = True  # all hosts have as many ranks
    stop: Any = None  # what stop_requested() knows

    def __post_init__(self) -> None:
        self.topology = Topology(*self.core.topology())
        _step_times.note_collections()

    def close(self, at_exit: bool = False) -> None:
        """Leaves the job. Work in flight ends with an error first, so its memory may go then.

        Failures that nobody has seen are reported in one warning. After Ctrl-C call it again.

        Args:
            at_exit: The others are told which exception ends the program, if one does. Else the
                exit code, which the interpreter does not tell, says how long to wait, and whether
                the rank has failed. So after 0.1 s, or FARANDOLE_SHUTDOWN_TIMEOUT_S, the library's
                own exit handler goes on; mpi4py would finalise MPI before that.
        """
        try:
            reason, cause = _why_it_ends()
            if at_exit and "mpi4py.MPI" not in sys.modules:
                limit_s = float(self.core.setting("FARANDOLE_SHUTDOWN_TIMEOUT_S"))
                self.core.close_at_exit(min(_EXIT_WAIT_S, limit_s), reason, cause)
            elif at_exit and cause:
                self.core.close_at_exit(-1, reason, cause)
            else:
                self.core.close()
        finally:
            if self.core.is_closed:
                for reducer in list(self.reducers):
                    reducer.close()
                for process_set in self.process_sets.values():
                    process_set.process_set_id = None
                self.process_sets.clear()
                self._warn_of_unseen_failures()

    def _warn_of_unseen_failures(self) -> None:
        what = "an asynchronous operation failed and was never synchronized:"
        failures = self.core.take_unseen_failures()
        if len(failures) > 1:
            count = f"{len(failures)} asynchronous operations"
            what = f"{count} failed and were never synchronized; the first:"
        if failures:  # no line of the caller is to blame, and at exit there is none
            text = f"rank {self.topology.rank}: {what} {failures[0]}"
            warnings.warn_explicit(text, RuntimeWarning, "farandole", 0)


class _Process:
    default: Context | None = None
    init_lock = threading.Lock()
    is_forked_child = False
    parents: Context | None = None  # in a forked child: where the parent stands
    report_path = os.environ.pop("_FARANDOLE_REPORT", "")  # of farandolerun; not for programs that a rank starts
    show_uncaught = staticmethod(sys.excepthook)
    #: Told the address of the default context's farandole_context once it has begun, and 0 before it ends.
    listeners: list[Callable[[int], object]] = []

    @classmethod
    def announce(cls, context: Context | None) -> None:
        """To the listeners, and to who exports metrics."""
        _metrics.follow(context)
        for listener in cls.listeners:
            listener(context.core.address if context is not None else 0)


_of_thread: contextvars.ContextVar[Context | None] = contextvars.ContextVar("farandole_context", default=None)


def init(
    comm: Any = None,
    process_sets: Iterable[ProcessSet] | str | None = None,
    *,
    rank: int | None = None,
    size: int | None = None,
    local_rank: int | None = None,
    address: str | None = None,
    store: _store.Store | None = None,
    slots: int | None = None,
    elastic: bool = False,
    members: str | None = None,
) -> None:
    """Joins the job of this process, as the launcher or the arguments say; without either, a job of one rank.

    Collective: every rank calls it. Calling it again does nothing. Settings come from the
    ``FARANDOLE_*`` and ``HOROVOD_*`` environment variables. :func:`shutdown` is called at exit. After an exception,
    as after Ctrl-C, call ``init`` again to join again, or exit: over TCP nothing of the join remains, while MPI, which
    can be initialized once, goes on with it.

    Args:
        comm: None; or all ranks of the job, as a list or an mpi4py communicator. Ranks that Open MPI did not start
            meet through the communicator, whichever MPI library it is of.
        process_sets: Sets to add at once, the same on all ranks. If sets are created from mpi4py
            communicators, each rank passes those that it is in, and all are added. "dynamic" adds none (for
            compatibility with Horovod): :func:`add_process_set` can always be called.
        rank: This process's number, 0 <= rank < size; None, here and in the next two: as the launcher says.
            If a launcher started several ranks, the arguments must agree with it.
        size: The number of ranks of the job.
        local_rank: This rank's number among those of its host.
        address: Where rank 0 listens, ``"host:port"`` or ``"tcp://host:port"``; or
            ``"file:///folder"``, seen by all ranks and new for each job; or ``"env://"``, for
            MASTER_ADDR and MASTER_PORT.
        store: Instead of an address, an object with ``set``, ``get`` and ``wait``, such as a
            ``torch.distributed.TCPStore``. The store of torchrun, and that of ``torch.distributed``
            if it is initialized, is found without this. Rank 0 sets a key again for its next job. A prefix that
            is new for each job keeps processes that start later from what an earlier job has left. Threads of their
            own call it, one call after the other.
        slots: Parts of each step's work, at least as many as ranks: sums of floats over all ranks then have the same
            bits for any number of ranks, if each contributes the sum of its slots, see :func:`slot_range`; averages are
            these sums divided by the number of ranks. The same on all ranks. None or 0: as FARANDOLE_SLOTS says, by
            default none, and contributions are added up in the order of ranks.
        elastic: The job can go on with other ranks: see :func:`farandole.reinit`. The same on all ranks; also
            FARANDOLE_ELASTIC=1. Over TCP.
        members: Where ranks of a running elastic job listen, as :func:`farandole.members` says it: this process asks
            them to be let in, and takes the rank that they give it. Also FARANDOLE_MEMBERS.

    Raises:
        ModuleNotFoundError: FARANDOLE_METRICS=otlp needs packages that are not installed; the message names them.
        ValueError: A setting or an argument is invalid; the message names it and its range. Arguments and
            launcher contradict each other, or the address of rank 0 is unknown. ``comm`` has other ranks than
            the job. A rank passed two process sets of the same ranks.
        MismatchError: Ranks have different settings, are more than the slots, or did not pass a process set they must.
        OperationTimeoutError: Some rank did not join within FARANDOLE_INIT_TIMEOUT_S (60). Over MPI this process
            cannot join the job any more and should exit.
        HorovodInternalError: The job cannot be joined; the message says why. One cause: a rank started this
            process, which inherited the rank's variables.
    """
    if find() is not None:
        return
    if _Process.is_forked_child:
        raise HorovodInternalError(_FORKED)
    with _Process.init_lock:
        if find() is not None:
            return
        shutdown()  # the rest of one that was interrupted
        _metrics.read_targets()
        with _horovod.settings(), shown_briefly():
            core = _join(comm, rank, size, local_rank, address, store, slots or 0, elastic, members)
            _Process.default = Context(core)
        _horovod.report(*_Process.default.topology[:2])
        if address := _Process.default.core.members(_Process.default.topology.rank):
            tell_launcher(json.dumps({"member": address}))
        _mark_copies_of_the_environment()
        try:
            if comm is not None:
                _check_comm(comm)
            _compare_hosts(_Process.default)
            if process_sets is not None and not isinstance(process_sets, str):
                for process_set in _unite(process_sets):
                    add_process_set(process_set)
            _Process.announce(_Process.default)
        except Exception:
            shutdown()
            raise


def _join(
    comm: Any, rank: int | None, size: int | None, local_rank: int | None, address: str | None, store: Any, slots: int,
    elastic: bool, members: str | None,
) -> _core.Context:  # fmt: skip
    is_new = bool(members or os.environ.get("FARANDOLE_MEMBERS"))
    if store is None and address is None and size != 1 and not is_new:
        found = _store.of_communicator(comm) if hasattr(comm, "Get_group") else _store.Found()
        if found.store is None:
            found = _store.find()
        store = found.store
        rank = found.rank if rank is None else rank
        size = found.size if size is None else size
    calls = None if store is None else _store.calls(store)
    return _core.Context.init(rank, size, local_rank, address, calls, slots=slots, elastic=elastic, members=members)


@contextlib.contextmanager
def shown_briefly() -> Iterator[None]:
    """Shows errors of a join that nobody catches without traceback where the message says all: a JobHaltedError, whose
    exit code is its own, and under ``farandolerun``, which says it once for all ranks, a MismatchError."""
    before: Callable[..., None] = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        is_said = isinstance(error, MismatchError) and bool(_Process.report_path)
        if not is_said and not isinstance(error, JobHaltedError):
            return before(kind, error, trace)
        if _Process.report_path:
            _report(describe_failure(error))
        if not is_said:
            print(f"farandole: {error}", file=sys.stderr)
            _core.exit_with(_HALTED)

    try:
        yield
    except (JobHaltedError, MismatchError):
        sys.excepthook = show
        raise


def _check_comm(comm: Any) -> None:
    ranks = _ranks_of(comm) if hasattr(comm, "Get_group") else list(comm)
    if ranks != list(range(topology().size)):
        raise ValueError(
            f"init(comm=...) with ranks {ranks}: a job has all of its {topology().size} ranks, in "
            "order; for some of them use a process set"
        )


def _unite(process_sets: Iterable[ProcessSet]) -> list[ProcessSet]:
    """The process sets of all ranks, in one order on all of them; this rank's own objects among them.

    ``Split`` gives ranks different communicators, so a set made of one is expected of its members; any
    other is expected of all ranks. Collective, so every rank raises the same error.
    """
    own = [s if isinstance(s, ProcessSet) else ProcessSet(s) for s in process_sets]
    described = json.dumps([(s.mpi_comm is not None, s.ranks or ()) for s in own])
    gather = _core.Options(_ALLGATHER, function="allgather_object")
    by_rank = current().core.submit(gather, described.encode(), "farandole.process sets", _BLOCKS, _split_texts)
    passed = sorted(
        (place, rank, has_communicator, tuple(ranks))
        for rank, text in enumerate(by_rank)
        for place, (has_communicator, ranks) in enumerate(json.loads(text))
    )
    passed_by: dict[tuple[int, ...], list[int]] = {}
    expected_of: dict[tuple[int, ...], Iterable[int]] = {}
    for _, rank, has_communicator, ranks in passed:
        passed_by.setdefault(ranks, []).append(rank)
        if has_communicator:
            expected_of[ranks] = ranks
    for ranks, found in passed_by.items():
        _check_passed(ranks, found, expected_of.get(ranks, range(len(by_rank))))
    mine = {tuple(s.ranks or ()): s for s in own}
    return [mine.get(ranks) or ProcessSet(ranks) for ranks in passed_by]


def _split_texts(joined: Any, sizes: Sequence[int]) -> list[bytes]:
    texts = io.BytesIO(joined)
    return [texts.read(size) for size in sizes]


def _check_passed(ranks: Sequence[int], found: list[int], expected: Iterable[int]) -> None:
    """Whether the ranks ``expected`` are among those that passed this process set, each once."""
    what = f"init(process_sets=...): a process set of ranks {list(ranks)}"
    for rank in found:
        if found.count(rank) > 1:
            raise ValueError(f"{what} is a duplicate: rank {rank} passed {found.count(rank)}")
    missing = sorted(set(expected) - set(found))
    if missing:
        raise MismatchError(f"{what} was passed by ranks {found}, but not by ranks {missing}")


def _compare_hosts(context: Context) -> None:
    """Whether all hosts have as many ranks; only jobs on several hosts ask each other."""
    here = context.topology.local_size
    if here != context.topology.size:
        import numpy as np  # not above: see ops._with_numbers

        options, sizes = _core.Options(_ALLREDUCE, _MAX), np.array([here, -here])
        most, fewest = context.core.submit(options, sizes, "farandole.local sizes", _BLOCKS)
        context.is_homogeneous = bool(most == -fewest)


def _mark_copies_of_the_environment() -> None:
    """``os.environ`` does not see what C changes; programs that a rank starts get copies of it."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    mark = getenv(_RANK_PROCESS.encode())
    if mark is not None:
        os.environ[_RANK_PROCESS] = os.fsdecode(mark)
    for name in ("FARANDOLE_KEY_FD", "FARANDOLE_LISTEN_FD"):  # used up
        if getenv(name.encode()) is None:
            os.environ.pop(name, None)


def shutdown() -> None:
    """Leaves the job; returns when every rank leaves. Without :func:`init` it does nothing.

    It waits as long as the other ranks live. Ctrl-C raises KeyboardInterrupt; afterwards no collective works:
    call ``shutdown`` again to continue to wait, or exit.

    Raises:
        OperationTimeoutError: A thread of this rank hangs inside a library and was left behind.
        HorovodInternalError: An earlier error, which no operation has raised yet, had ended the job; this is it.
    """
    _close(at_exit=False)


def _close(at_exit: bool) -> None:
    context = _Process.default
    if context is None:
        return
    _forget_handled_errors()
    _Process.announce(None)
    try:
        context.close(at_exit)
    finally:
        if context.core.is_closed:  # else Ctrl-C came first
            _Process.default = None


def _forget_handled_errors() -> None:
    """Before the job is left: while it goes on, or where other ranks have only left it, no error has ended it."""
    context, latest = find(), [*exceptions.latest]
    if context is None or not latest:
        return
    try:
        context.core.raise_if_ended()
    except HorovodInternalError as error:  # which is the latest now
        if error.failed_ranks or not latest[1].get("failed_ranks"):
            exceptions.latest[:] = latest
            return
    exceptions.latest.clear()


def find() -> Context | None:
    """The context of this thread, else the default one, if it is open."""
    context = _of_thread.get() or _Process.default
    return context if context is not None and context.core.is_open else None


def current(error: type[Exception] = HorovodInternalError) -> Context:
    """As :func:`find`; raises ``error`` if there is none."""
    context = _of_thread.get() or _Process.default
    if context is None or not context.core.is_open:
        raise error(_FORKED if _Process.is_forked_child else _NOT_INITIALIZED)
    return context


def _standing() -> Context:
    """As :func:`current`, but in a forked child its parent's: for questions that need no engine. ValueError."""
    return find() or _Process.parents or current(ValueError)


def topology() -> Topology:
    """Where this rank stands, or the one that forked this process; ValueError if there is no context."""
    return _standing().topology


@contextlib.contextmanager
def using(context: Context) -> Iterator[Context]:
    """Makes ``context`` that of the calling thread for the length of a ``with`` block."""
    token = _of_thread.set(context)
    try:
        yield context
    finally:
        _of_thread.reset(token)


def is_initialized() -> bool:
    """Whether this process is a rank, or was forked by one, where collectives are refused."""
    return (find() or _Process.parents) is not None


def rank() -> int:
    """This process's number, 0 <= rank() < size(); in a forked one, as of a data loader, its parent's.

    ValueError when not initialized, as in the functions below."""
    return topology().rank


def size() -> int:
    """The number of ranks of the job."""
    return topology().size


def local_rank() -> int:
    """This rank's number among the ranks of its host."""
    return topology().local_rank


def local_size() -> int:
    """The number of ranks on this host."""
    return topology().local_size


def slot_range() -> tuple[int, int]:
    """The first slot of this rank, and the one after its last, in a job with slots: see :func:`init`.

    They are those of one node of the binary tree over all slots, cut at the last one. A rank adds up pairs of its slots
    with the same parent, then pairs of these sums, and so on; sums over all ranks go on in the same tree.

    Raises:
        ValueError: The job has no slots.
    """
    return current().core.slot_range()


def cross_rank() -> int:
    """This rank's number among the ranks with the same :func:`local_rank`, one per host."""
    return topology().cross_rank


def cross_size() -> int:
    """The number of hosts that have a rank with this :func:`local_rank`."""
    return topology().cross_size


def counters() -> dict[str, int]:
    """Returns the engine's counters by name: messages, batches, wake-ups, bytes and others."""
    return current().core.counters()


def end_step() -> None:
    """Ends a step of training that no ``DistributedOptimizer`` ends: a rank that makes the others wait is named.

    All ranks call this at the same point of each step, in the thread that trains. It waits for nobody.
    """
    current().core.end_step()


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Starts to write a timeline of all operations, for chrome://tracing or ui.perfetto.dev.

    Args:
        file_path: A new file. ``{rank}`` in it becomes the rank, and every rank that calls this writes
            its own; without it rank 0 alone writes.
        mark_cycles: Whether to mark rank 0's decisions.
    Raises:
        ValueError: Another file is being written.
        HorovodInternalError: The file cannot be opened.
    """
    current().core.start_timeline(os.fspath(file_path), mark_cycles)


def stop_timeline() -> None:
    """Writes the rest of the timeline and closes its file. Without one it does nothing."""
    current().core.stop_timeline()


# Process sets.

_GLOBAL: Final = 0  # the id, and the core's uid, of the set of all ranks


class ProcessSet:
    """A subset of the job's ranks, for collectives among them; see :func:`add_process_set`.

    Args:
        ranks_or_comm: Ranks of the job, in any order; or an mpi4py communicator, for its ranks.
    Attributes:
        process_set_id: A small number; None if the set is not registered, or was removed.
        mpi_comm: The communicator, if the set was created from one.
    Raises:
        ValueError: A rank is no integer.
    """

    process_set_id: int | None = None
    mpi_comm: Any = None
    _uid: int = _GLOBAL
    _ranks: list[int] | None = None  # None: all

    def __init__(self, ranks_or_comm: Sequence[int] | Any) -> None:
        if hasattr(ranks_or_comm, "Get_group"):
            self.mpi_comm = ranks_or_comm
            ranks_or_comm = _ranks_of(ranks_or_comm)
        ranks = list(ranks_or_comm)
        if any(isinstance(r, bool) or not isinstance(r, numbers.Integral) for r in ranks):
            raise ValueError(f"a process set is made of ranks, which are integers; got {ranks!r:.80}")
        self._ranks = sorted(map(int, ranks))

    @property
    def ranks(self) -> list[int] | None:
        """In ascending order; of the global set None before ``init()``."""
        if self._ranks is not None:
            return self._ranks
        return list(range(topology().size)) if is_initialized() else None

    def size(self) -> int | None:
        """How many ranks are in it; None where it is not registered."""
        ranks = None if self.process_set_id is None else self.ranks
        return None if ranks is None else len(ranks)

    def rank(self) -> int | None:
        """This rank's number in it, or ValueError; None where it is not registered."""
        ranks = None if self.process_set_id is None else self.ranks
        if ranks is None:
            return None
        if topology().rank not in ranks:
            raise ValueError(f"rank {topology().rank} is not in {self}")
        return ranks.index(topology().rank)

    def included(self) -> bool | None:
        """Whether this rank is in it; None where nobody knows yet."""
        return None if self.ranks is None else topology().rank in self.ranks

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


global_process_set: Final = ProcessSet.__new__(ProcessSet)
global_process_set.process_set_id = _GLOBAL
global_process_set.__doc__ = "All ranks, of whatever job this process, or this thread, is in."


def add_process_set(process_set: ProcessSet | Sequence[int] | Any) -> ProcessSet:
    """Registers a process set, for ``process_set=`` of the collectives.

    Collective: every rank of the job calls it, member or not, in the same order.

    Args:
        process_set: A :class:`ProcessSet`, or an argument for one.
    Returns:
        The set.
    Raises:
        ValueError: The set exists already; a rank does not exist or repeats; the set is empty.
        MismatchError: Ranks passed different sets.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    context = current()
    if process_set.process_set_id is not None:
        raise ValueError(f"{process_set} is registered already")
    assert process_set.ranks is not None
    if process_set.ranks == list(range(context.topology.size)):
        raise ValueError(f"{process_set}: all ranks are in the global process set")
    process_set._uid = context.core.add_set(process_set.ranks)
    # A rank that leaves now, which ends the set, would keep slower ones from finding it.
    context.core.submit(_core.Options(_BARRIER), (), None, _GROUP | _BLOCKS)
    known = context.process_sets
    process_set.process_set_id = next(i for i in range(1, len(known) + 2) if i not in known)
    known[process_set.process_set_id] = process_set
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a process set. Operations that are ready on all its members still run; the others fail with
    AbortedError.

    Collective: every rank of the job calls it, member or not, in the same order.

    Returns:
        Whether it was removed: False for the global set and for one that is not registered.
    """
    context = current()
    number = process_set.process_set_id
    if number is None or number == _GLOBAL:
        return False
    context.core.remove_set(process_set._uid)
    context.process_sets.pop(number, None)
    process_set.process_set_id = None
    return True


def uid_of(process_set: Any, function: str) -> int:
    """The core's number of a set that this rank is in; None: the global one.

    Raises:
        TypeError: It is not registered, or no process set; ``function`` is named.
        ValueError: This rank is no member.
    """
    if process_set is global_process_set or process_set is None:
        return _GLOBAL
    if getattr(process_set, "process_set_id", None) is None or not isinstance(process_set, ProcessSet):
        raise TypeError(
            f"{function}: Process set provided does not exist, or has not been registered: {process_set!r:.200}"
        )
    if not process_set.included():
        raise ValueError(f"{function}: Rank {topology().rank} is not a member of the provided process set.")
    return process_set._uid


def _ranks_of(comm: Any) -> list[int]:
    """The ranks of an mpi4py communicator, as the job numbers them."""
    from mpi4py import MPI

    group, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    return list(MPI.Group.Translate_ranks(group, list(range(group.Get_size())), world))


# What this run is made of. Horovod's names; what it had and Farandole has not is never there.

_MPI_PLUGIN: Final = pathlib.Path(__file__).resolve().with_name("libfarandole_mpi.so")
_THREAD_MULTIPLE: Final = 3  # MPI_THREAD_MULTIPLE of Open MPI, MPICH and MPI's own ABI


def mpi_built() -> bool:
    """Whether Farandole can run under MPI: its MPI plug-in is installed."""
    return _MPI_PLUGIN.exists()


def _mpi() -> ctypes.CDLL | None:
    """The plug-in, if this job uses it."""
    try:
        how = os.RTLD_NOLOAD | os.RTLD_LAZY
        return ctypes.CDLL(str(_MPI_PLUGIN), mode=how) if find() is not None else None
    except OSError:
        return None


def mpi_enabled() -> bool:
    """Whether the ranks of this job communicate over MPI."""
    return _mpi() is not None


def mpi_threads_supported() -> bool:
    """Whether the job's MPI may be called from several threads at once; ValueError without MPI."""
    library = _mpi()
    if library is None:
        raise ValueError("mpi_threads_supported(): this job does not use MPI")
    level = ctypes.c_int(-1)
    library.MPI_Query_thread(ctypes.byref(level))
    return level.value == _THREAD_MULTIPLE


def nccl_built() -> int:
    """NCCL's version as a number (23203 is 2.32.3) where GPU tensors would travel over it; else 0."""
    from farandole import _probe, doctor

    if not cuda_built():
        return 0
    said = _probe.load("nccl", "libnccl.so", doctor.nccl_files(os.environ))
    number = int(said.get("number", 0))
    return number if number >= doctor.OLDEST_NCCL else 0


def cuda_built() -> bool:
    """Whether Farandole was built where nvcc is, so that it can reduce tensors on a GPU."""
    from farandole import doctor

    return bool(doctor.find_plugin(os.environ, has_gpu=False).version)


def gloo_built() -> bool:
    """False: Farandole does not use Gloo."""
    return False


gloo_enabled = ddl_built = ccl_built = rocm_built = gloo_built


def is_homogeneous() -> bool:
    """Whether all hosts have the same number of ranks. ValueError when not initialized."""
    return _standing().is_homogeneous


def _is_consequence(error: type[BaseException], facts: Mapping[str, Any]) -> bool:
    """Whether an error of the engine says that another rank has left, failed or not called init."""
    context, failed_ranks = _Process.default, facts.get("failed_ranks", ())
    if context is None and issubclass(error, OperationTimeoutError):
        return True  # of init
    if issubclass(error, GenerationEndedError):
        return False  # this rank's own mistake
    is_own = context is not None and context.topology.rank in failed_ranks
    return not is_own and (bool(failed_ranks) or issubclass(error, (AbortedError, PeerLostError)))


def _report(report: str) -> None:
    """Tells ``farandolerun`` what ends this rank, so that it names the one that failed first."""
    tell_launcher(report)
    _Process.report_path = ""


def tell_launcher(report: str) -> None:
    """Reports a line of JSON to ``farandolerun``, if that has started this rank."""
    if pathlib.Path(_Process.report_path).is_fifo():  # a name of /proc, which in a container can be another file's
        with contextlib.suppress(OSError), open(_Process.report_path, "w") as file:
            file.write(report + "\n")


def _make_report(text: str, is_consequence: bool, facts: Mapping[str, Any]) -> str:
    return json.dumps({"text": text, "is_consequence": is_consequence, "facts": dict(facts)}, default=str)


def describe_failure(error: BaseException, text: str = "") -> str:
    """What a launcher wants to know of the error that ends this rank: the arguments of FirstFailure.reported, as JSON.

    Args:
        text: The traceback; the default makes one.
    """
    cause = _of_engine(error)
    facts = {"cause": _in_a_line(error)} if cause is None else vars(cause)
    is_of_init = _Process.default is None and isinstance(cause, OperationTimeoutError)
    facts = {**facts, "is_shared": isinstance(cause, MismatchError), "is_of_init": is_of_init}
    return _make_report(text or "".join(traceback.format_exception(error)), is_consequence(error), facts)


def _of_engine(error: BaseException) -> HorovodInternalError | None:
    """The engine's error that this one is, or comes of."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, HorovodInternalError):
        cause = cause.__cause__ or cause.__context__
    return cause


def is_consequence(error: BaseException) -> bool:
    """Whether an error comes of another rank's failure."""
    cause = _of_engine(error)
    return cause is not None and _is_consequence(type(cause), vars(cause))


def _in_a_line(error: BaseException) -> str:
    """An exception's class and the first line of its text; not its notes, nor the place of a syntax error."""
    lines = "".join(traceback.format_exception_only(type(error), error)).splitlines()
    return next((line for line in lines if not line.startswith(" ")), type(error).__name__)


def _why_it_ends() -> tuple[int, str]:
    """At exit: as farandole_leave_at_exit has it, the uncaught exception that ends the program."""
    error = getattr(sys, "last_value", None)
    if error is None or hasattr(sys, "ps1"):  # where a user types, the program has gone on
        return _EXIT_OPEN, ""
    if is_consequence(error):
        return _EXIT_BY_OTHER, str(_of_engine(error))
    return _EXIT_BY_ERROR, _in_a_line(error)


def _report_uncaught(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    text, is_folded = _format(kind, error, trace)
    _report(describe_failure(error, text))
    if is_folded and _Process.show_uncaught is sys.__excepthook__ and sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # it is closed
            print(text, end="", file=sys.stderr)
    else:
        _Process.show_uncaught(kind, error, trace)


def _format(kind: type[BaseException], error: BaseException, trace: Any) -> tuple[str, bool]:
    """A traceback, and whether it is one without the frames of this package: of an error of the engine, unless
    FARANDOLE_FULL_TRACEBACK=1."""
    whole = traceback.TracebackException(kind, error, trace)
    part: traceback.TracebackException | None = whole
    is_folded = _of_engine(error) is not None and os.environ.get("FARANDOLE_FULL_TRACEBACK", "0") in ("", "0")
    while part is not None and is_folded:
        users = [frame for frame in part.stack if not frame.filename.startswith(_activity.PACKAGE)]
        if users:
            part.stack[:] = users
        part = part.__cause__ or part.__context__
    return "".join(whole.format()), is_folded


if _Process.report_path:
    sys.excepthook = _report_uncaught


def _become_inert() -> None:
    """In a forked child: no engine thread lives here, so nothing is used and nothing finalised."""
    context = _of_thread.get() or _Process.default
    if context is not None and context.core.is_open:
        _Process.parents = context
    _core.Context.forget_all()
    if _Process.default is not None:
        for reducer in list(_Process.default.reducers):
            reducer.close()  # the child's backward() is a plain one
    _Process.is_forked_child = _Process.is_forked_child or _Process.default is not None
    _Process.default, _Process.report_path = None, ""
    _Process.init_lock = threading.Lock()


os.register_at_fork(after_in_child=_become_inert)


def _leave_at_exit() -> None:
    _forget_handled_errors()
    if exceptions.latest and _is_consequence(*exceptions.latest):
        _report(_make_report("", True, exceptions.latest[1]))  # the program caught it, and has a code of its own
    try:
        _close(at_exit=True)
    except HorovodInternalError as error:
        if not hasattr(sys, "last_value"):  # no traceback has said it
            print(f"farandole: {error}", file=sys.stderr)
    except KeyboardInterrupt:  # which would not change the exit code of a process that is ending
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    _name_files()


def _name_files() -> None:
    """Says where this rank, the first of its host, which ends by an error, and others have left what they did last."""
    local_ranks = map(os.environ.get, ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"))
    if any(rank not in (None, "0") for rank in local_ranks):
        return
    folder = _flight_folder.left_by_rank()
    if folder and (hasattr(sys, "last_value") or exceptions.latest):
        print(f"farandole: what the ranks did last: farandole explain {shlex.quote(folder)}", file=sys.stderr)


atexit.register(_leave_at_exit)
