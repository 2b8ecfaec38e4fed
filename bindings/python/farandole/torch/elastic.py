"""The names of ``horovod.torch.elastic``: commits in memory, and continues from there after a failure.

In an elastic job (``farandole.init(elastic=True)``, ``farandolerun --elastic``) the ranks that are left go on after the
loss of others, and newcomers are let in at a commit; else the number of ranks is fixed, and the loss of a rank ends the
job. docs/training.md, "Commit and restore", has an example.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import queue
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, TypeVar

import torch

from farandole.basics import init, rank, shutdown, size
from farandole.exceptions import HorovodInternalError, JobHaltedError
from farandole.generations import change_is_due, members, reinit
from farandole.objects import broadcast_object
from farandole.ops import Max
from farandole.torch.functions import broadcast_optimizer_state, broadcast_parameters
from farandole.torch.ops import allreduce

__all__ = [
    "ElasticSampler", "HorovodInternalError", "HostsUpdatedInterrupt", "ModelStateHandler", "ObjectState",
    "OptimizerStateHandler", "SamplerStateHandler", "State", "StateHandler", "TorchState", "get_handler_registry",
    "init", "notification_manager", "run", "run_fn", "set_handler_registry", "shutdown",
]  # fmt: skip

_MAX_FAILURES = 3  # of a function without a commit in between
_REMOVED, _ADDED = 1, 2  # bits of what Horovod tells of hosts
_Broadcast = Callable[[Any], Any] | None
_Result = TypeVar("_Result")


class HostsUpdatedInterrupt(RuntimeError):
    """Processes wait to be let into the elastic job: :func:`run` lets them in, and calls its function again.

    Args:
        skip_sync: That function then gets the state as it is on each rank, not rank 0's.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts of the job have changed")
        self.skip_sync = skip_sync


class State:
    """The state of a training function; subclasses define how to save, restore and synchronize it.

    Args:
        bcast_object: A function that sends rank 0's object to every rank; None: ``broadcast_object``.
        get_rank: Ignored; for compatibility with Horovod.
    """

    commits = 0

    def __init__(self, bcast_object: _Broadcast = None, get_rank: object = None) -> None:
        del get_rank
        self._bcast_object = bcast_object or _broadcast
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._host_updates: queue.SimpleQueue[int] = queue.SimpleQueue()

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Adds functions to be called after each restore, in their order."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Calls :meth:`reset`, then the callbacks."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Saves the state in memory, to which a failure returns; then :meth:`check_host_updates`.

        Every rank calls it at the same place of the program, after the optimizer's ``step()``:
        gradients are not saved.
        """
        self.save()
        self.commits += 1
        self.check_host_updates()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Makes the next :meth:`check_host_updates` interrupt all ranks. From any thread.

        Args:
            timestamp: Ignored; for compatibility with Horovod.
            update_res: 1: hosts were removed; 2: added; 3: both; 0: neither.
        """
        del timestamp
        self._host_updates.put(update_res)

    def check_host_updates(self) -> None:
        """In an elastic job of all ranks together: whether processes wait to be let in, or a rank was told that hosts
        have changed. Else it does nothing.

        Raises:
            HostsUpdatedInterrupt: On all ranks. With ``skip_sync`` if hosts were removed and none added.
        """
        if not members():
            return
        updates = _ADDED if change_is_due() else 0
        while not self._host_updates.empty():
            updates |= self._host_updates.get()
        most = allreduce(torch.tensor(updates), op=Max, name="elastic.change").item()
        if most:
            raise HostsUpdatedInterrupt(skip_sync=most == _REMOVED)

    def save(self) -> None:
        """Keeps a copy of the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restores what was last saved."""
        raise NotImplementedError

    def sync(self) -> None:
        """Copies rank 0's state to every rank, and saves it."""
        raise NotImplementedError

    def reset(self) -> None:
        """For subclasses: what to do after a restore, before the callbacks."""


class StateHandler:
    """How an attribute of a :class:`TorchState` is saved, restored and synchronized; for subclasses, which
    :func:`set_handler_registry` makes known.

    Args:
        value: The attribute.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Keeps a copy in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Brings back what was last saved."""
        raise NotImplementedError

    def sync(self) -> None:
        """Gives every rank rank 0's, and saves it."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Takes another object in its place, and saves it."""
        self.value = value
        self.save()


class ModelStateHandler(StateHandler):
    """Of a model."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class OptimizerStateHandler(ModelStateHandler):
    """Of an optimizer, whose gradients a restore drops."""

    def restore(self) -> None:
        super().restore()
        _drop_gradients(self.value)

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class SamplerStateHandler(ModelStateHandler):
    """Of an :class:`ElasticSampler`, and of anything else with ``state_dict()`` and ``load_state_dict()``."""

    def sync(self) -> None:
        self.value.load_state_dict(_broadcast(self.value.state_dict()))
        self.save()


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """The handlers of attributes, by type; the first that fits counts."""
    return _handlers_by_type


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Those of states that are made from now on."""
    global _handlers_by_type
    _handlers_by_type = registry


class ObjectState(State):
    """State made of attributes: models, optimizers, samplers, schedulers, and any values.

    For objects of a type of :func:`get_handler_registry`, and for those with ``state_dict()`` and
    ``load_state_dict()``, it saves the state and keeps the object; everything else is deep-copied.

    Args:
        bcast_object, get_rank: As of :class:`State`.
        values: The attributes, with the same names in the same order on every rank; they may be reassigned.
    Raises:
        ValueError: A name is the name of a method.
    """

    _handlers: Mapping[str, StateHandler] = {}  # until there are attributes

    def __init__(self, bcast_object: _Broadcast = None, get_rank: object = None, **values: Any) -> None:
        super().__init__(bcast_object, get_rank)
        for name in values:
            if hasattr(type(self), name):
                raise ValueError(f"{type(self).__name__}: an attribute cannot be named {name}")
        self._handlers = {name: kind(value) for name, value in values.items() if (kind := _handler_of(value))}
        self._names = tuple(name for name in values if name not in self._handlers)
        for name, value in values.items():
            setattr(self, name, value)
        self._save_values()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self._handlers and self._handlers[name].value is not value:
            self._handlers[name].set_value(value)

    def save(self) -> None:
        """Keeps a copy of all attributes in memory; those on a GPU stay there."""
        for handler in self._handlers.values():
            handler.save()
        self._save_values()

    def restore(self) -> None:
        """Brings all attributes back to what was last saved; gradients of optimizers are dropped."""
        for handler in self._handlers.values():
            handler.restore()
        self._set(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Gives every rank rank 0's attributes, as they are now, and saves them."""
        for handler in self._handlers.values():
            handler.sync()
        if self._names:
            self._set(self._bcast_object({name: getattr(self, name) for name in self._names}))
        self._save_values()

    def _save_values(self) -> None:
        self._saved = {name: copy.deepcopy(getattr(self, name)) for name in self._names}

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


class TorchState(ObjectState):
    """State of a training function: a model, its optimizer, and any further attributes.

    Args:
        model, optimizer: Become the attributes of these names, unless None.
        values: As of :class:`ObjectState`: samplers, schedulers, counters.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **values: Any
    ) -> None:
        own: dict[str, Any] = {"model": model, "optimizer": optimizer}
        super().__init__(**{k: v for k, v in own.items() if v is not None}, **values)


class _NotificationManager:
    """Tells states of hosts that come and go; Horovod's driver calls it, and here whoever knows of them."""

    def __init__(self) -> None:
        self._states: list[State] = []

    def init(self) -> None:
        """Does nothing; for compatibility with Horovod."""

    def register_listener(self, state: State) -> None:
        """From now on a state is told. :func:`run` does this while its function runs."""
        self._states.append(state)

    def remove_listener(self, state: State) -> None:
        """And no longer."""
        self._states.remove(state)

    def handle_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Calls :meth:`State.on_hosts_updated` of all."""
        for state in [*self._states]:
            state.on_hosts_updated(timestamp, update_res)


notification_manager = _NotificationManager()


def run(func: Callable[..., _Result]) -> Callable[..., _Result]:
    """Makes ``func(state, *args, **kwargs)`` go on from the last commit when a collective fails.

    The function gets rank 0's state on every rank. When it ends with a HorovodInternalError, which
    all ranks get, each goes back to its last commit, the state's callbacks are called, and the
    function is called again with rank 0's state. Rank 0 warns of every failure. In an elastic job this holds for the
    ranks that are left when others are lost, and after :class:`HostsUpdatedInterrupt` for those that have come,
    without a step back: ``rank()`` and ``size()`` are new.

    Raises:
        HorovodInternalError: A final one, after which no collective works, or one that came three
            times without a commit in between; the message says which. The state is as the failure
            left it, and ``state.restore()`` gives the last commit.
        JobHaltedError: Of an elastic job whose other ranks may go on, or have gone on, without this one.
    """
    return run_fn(func, lambda: None)


def run_fn(func: Callable[..., _Result], reset: Callable[[], object]) -> Callable[..., _Result]:
    """As :func:`run`, with a function that each rank calls once it is back at its last commit, or let newcomers in."""

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> _Result:
        notification_manager.init()
        notification_manager.register_listener(state)
        try:
            return go_on(state, *args, **kwargs)
        finally:
            notification_manager.remove_listener(state)

    def go_on(state: State, *args: Any, **kwargs: Any) -> _Result:
        failures, syncs, is_again, commits = 0, True, False, state.commits
        while True:
            try:
                if is_again:
                    reset()
                    state.on_reset()
                if syncs:
                    state.sync()
                commits = state.commits
                return func(state, *args, **kwargs)
            except JobHaltedError:
                raise
            except HorovodInternalError as error:
                failures = 1 if state.commits > commits else failures + 1
                _recover(error, failures)
                state.restore()
                syncs = True
            except HostsUpdatedInterrupt as update:
                if not members():
                    raise
                before = {*members().split(",")}
                reinit()
                syncs = not update.skip_sync or not {*members().split(",")} <= before  # newcomers do
            is_again = True

    return wrapper


def _recover(error: HorovodInternalError, failures: int) -> None:
    """Waits until every rank is here, of an elastic job all that are left; raises what nobody can go on after."""
    reason = None
    if failures >= _MAX_FAILURES:
        reason = f"given up after {failures} failures without a commit in between"
    try:
        allreduce(torch.zeros(1), op=Max, name="elastic.restore")
    except HorovodInternalError:
        if members():
            reinit()
            reason = None  # it is no failure of the function
        else:
            reason = "the job is over and cannot go on from its last commit: start it again from a checkpoint"
    if reason is not None:
        error.args = (f"{error}; {reason}", *error.args[1:])
        raise error
    if rank() == 0:
        warnings.warn(f"going on from the last commit after: {error}", RuntimeWarning, stacklevel=3)


def _broadcast(obj: Any) -> Any:
    return broadcast_object(obj, root_rank=0, name="elastic.state")


def _handler_of(value: Any) -> type[StateHandler] | None:
    for kind, handler in _handlers_by_type:
        if isinstance(value, kind):
            return handler
    is_stateful = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
    return SamplerStateHandler if is_stateful else None


def _drop_gradients(optimizer: Any) -> None:
    try:
        optimizer.zero_grad()
    except AssertionError:  # of a round in flight, which all ranks complete
        optimizer.synchronize()
        optimizer.zero_grad()


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Shares out a data set among the ranks, and goes on where a committed epoch was left.

    Use it as an attribute of the state; after each batch ``state.sampler.record_batch(i, batch_size)``,
    then ``state.commit()``. Each rank gets the same number of samples; where they do not divide, some
    come twice.

    Args:
        dataset: What has a length.
        shuffle: Whether each epoch has a random order, the same on every rank.
        seed: Of that order.
    Attributes:
        epoch, rank, num_replicas: Whose order it is; this rank; how many there are.
        processed_num: Samples of the epoch that all ranks together have recorded.
        remaining_indices: Of the epoch, what was not recorded at the last :meth:`reset`, in order.
    """

    _indices: list[int]  # this rank's
    _recorded: int  # how many of these

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch, of which nothing is recorded; nothing changes if it is the present one."""
        if epoch != self.epoch:
            self.epoch, self.processed_num = epoch, 0
            self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Records ``batch_size`` samples per rank as processed; the last batch may have fewer.

        ``batch_idx`` is Horovod's and not used.
        """
        del batch_idx
        self._recorded = min(self._recorded + batch_size, len(self._indices))
        left = len(self.remaining_indices) - self._recorded * self.num_replicas
        self.processed_num = len(self.dataset) - max(left, 0)

    def record_indices(self, indices: Iterable[int]) -> None:
        """Records the next samples that iterating gave as processed; on the other ranks as many.

        Raises:
            ValueError: They are others.
        """
        given = [int(index) for index in indices]
        expected = self._indices[self._recorded : self._recorded + len(given)]
        if sorted(given) != sorted(expected):
            raise ValueError(f"record_indices: the next samples of rank {self.rank} are {expected}, not {given}")
        self.record_batch(0, len(given))

    def state_dict(self) -> dict[str, int]:
        """Where the epoch stands; the same on every rank."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Goes to where the epoch stood, then does :meth:`reset`."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Shares out what is not recorded; an iterator made before goes on as it was."""
        self.num_replicas, self.rank = size(), rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(len(order), generator=generator).tolist()
        self.remaining_indices = order[self.processed_num :]
        total = math.ceil(len(self.remaining_indices) / self.num_replicas) * self.num_replicas
        filled = list(itertools.islice(itertools.cycle(self.remaining_indices), total))
        self._indices = filled[self.rank :: self.num_replicas]
        self._recorded = 0

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._indices)


_handlers_by_type: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler), (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]  # fmt: skip
