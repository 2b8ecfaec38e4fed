"""The names of ``horovod.torch.elastic``: commit in memory, and go on from there after a failure.

    @elastic.run
    def train(state):
        for state.epoch in range(state.epoch, epochs):
            ...
            state.commit()

    train(elastic.TorchState(model, optimizer, epoch=0))

When a collective fails on all ranks (ranks disagree about it, a backward pass raised on one of them)
the last commit is restored on all of them and the function runs again. The world is fixed: the ranks
of a job are those it was started with. A rank that is gone ends the job, and hosts are neither added
nor removed while it runs; that is later work.
"""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, TypeVar

import torch

import farandole.torch as fl
from farandole.exceptions import HorovodInternalError

__all__ = ["ElasticSampler", "HostsUpdatedInterrupt", "ObjectState", "State", "TorchState", "run"]

#: How often a function may fail without a commit in between.
MAX_FAILURES = 3

Result = TypeVar("Result")


class HostsUpdatedInterrupt(RuntimeError):
    """Horovod's notice that hosts came or went. Never raised here; scripts name it."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts of the job have changed")
        self.skip_sync = skip_sync


class State:
    """What a training function keeps; subclasses say how it is saved, restored and synchronized.

    Args:
        bcast_object: Gives every rank rank 0's object; None: ``broadcast_object``.
        get_rank: Not used; for compatibility with Horovod.
    """

    commits = 0

    def __init__(
        self, bcast_object: Callable[[Any], Any] | None = None, get_rank: object = None
    ) -> None:
        del get_rank
        self._bcast_object = bcast_object or _broadcast
        self._reset_callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Adds functions to be called after each restore, in their order."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Calls :meth:`reset`, then the callbacks."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Saves the state in memory, as what a failure goes back to.

        Every rank calls it at the same place of the program, after the optimizer's ``step()``:
        gradients are not saved. It costs a copy of the state and no communication.
        """
        self.save()
        self.commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Does nothing: the world is fixed, so no :class:`HostsUpdatedInterrupt` is ever raised."""

    def save(self) -> None:
        """Keeps a copy of the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Brings the state back to what was last saved."""
        raise NotImplementedError

    def sync(self) -> None:
        """Gives every rank rank 0's state, and saves it."""
        raise NotImplementedError

    def reset(self) -> None:
        """For subclasses: what to do after a restore, before the callbacks."""


class ObjectState(State):
    """State made of attributes: models, optimizers, samplers, schedulers, and any values.

    Of whatever has ``state_dict()`` and ``load_state_dict()`` the state is saved and the object stays
    the same; of everything else a deep copy.

    Args:
        bcast_object: As of :class:`State`.
        get_rank: Likewise.
        values: The attributes, the same names in the same order on every rank. All may be assigned
            later; what is added to them is not part of the state.
    Raises:
        ValueError: A name is that of a method.
    """

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] | None = None,
        get_rank: object = None,
        **values: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._names = tuple(values)
        for name, value in values.items():
            if hasattr(type(self), name):
                raise ValueError(f"{type(self).__name__}: an attribute cannot be named {name}")
            setattr(self, name, value)
        self.save()

    def save(self) -> None:
        """Keeps a copy of all attributes in memory; those on a GPU stay there."""
        self._saved = {name: copy.deepcopy(_content(getattr(self, name))) for name in self._names}

    def restore(self) -> None:
        """Brings all attributes back to what was last saved; gradients of optimizers are dropped."""
        for name, content in self._saved.items():
            self._assign(name, copy.deepcopy(content))
            value = getattr(self, name)
            if isinstance(value, torch.optim.Optimizer):
                _drop_gradients(value)

    def sync(self) -> None:
        """Gives every rank rank 0's attributes, as they are now, and saves them."""
        content = {}
        for name in self._names:
            value = getattr(self, name)
            if isinstance(value, torch.nn.Module):
                fl.broadcast_parameters(value.state_dict(), root_rank=0)
            elif isinstance(value, torch.optim.Optimizer):
                fl.broadcast_optimizer_state(value, root_rank=0)
            else:
                content[name] = _content(value)
        if content:
            for name, value in self._bcast_object(content).items():
                self._assign(name, value)
        self.save()

    def _assign(self, name: str, content: Any) -> None:
        value = getattr(self, name)
        if _is_stateful(value):
            value.load_state_dict(content)
        else:
            setattr(self, name, content)


class TorchState(ObjectState):
    """State of a training function: a model, its optimizer, and any further attributes.

    Args:
        model: Becomes the attribute ``model``, unless None.
        optimizer: Becomes the attribute ``optimizer``, unless None; wrapped or not.
        values: As of :class:`ObjectState`: samplers, schedulers, counters.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **values: Any,
    ) -> None:
        own: dict[str, Any] = {"model": model, "optimizer": optimizer}
        super().__init__(**{k: v for k, v in own.items() if v is not None}, **values)


def run(func: Callable[..., Result]) -> Callable[..., Result]:
    """Makes a function of a state go on from the last commit when a collective fails.

    The function gets rank 0's state on every rank. When it ends with a HorovodInternalError, which
    all ranks get, each goes back to its last commit, the state's callbacks are called, and the
    function is called again with rank 0's state. Rank 0 warns of every failure.

    Args:
        func: Called as ``func(state, *args, **kwargs)`` on every rank.
    Returns:
        A function with the same arguments and result.
    Raises:
        HorovodInternalError: A final one, after which no collective works (a rank is gone, training
            loops have parted), or one that came three times without a commit in between; the
            message says which. The state is as the failure left it, and ``state.restore()`` gives
            the last commit.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Result:
        failures = 0
        while True:
            state.sync()
            commits = state.commits
            try:
                return func(state, *args, **kwargs)
            except HorovodInternalError as error:
                failures = 1 if state.commits > commits else failures + 1
                _raise_unless_recoverable(error, failures)
            state.restore()
            state.on_reset()

    return wrapper


def _raise_unless_recoverable(error: HorovodInternalError, failures: int) -> None:
    """Waits until every rank is here; a collective that fails means that the job is over."""
    try:
        fl.allreduce(torch.zeros(1), op=fl.Max, name="elastic.restore")
    except HorovodInternalError:
        _raise(
            error,
            "the job is over and cannot go on from its last commit: start it again from a checkpoint",
        )
    if failures >= MAX_FAILURES:
        _raise(error, f"given up after {failures} failures without a commit in between")
    if fl.rank() == 0:
        warnings.warn(f"going on from the last commit after: {error}", RuntimeWarning, stacklevel=3)


def _raise(error: HorovodInternalError, sentence: str) -> None:
    error.args = (f"{error}; {sentence}", *error.args[1:])
    raise error


def _broadcast(obj: Any) -> Any:
    return fl.broadcast_object(obj, root_rank=0, name="elastic.state")


def _is_stateful(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _content(value: Any) -> Any:
    return value.state_dict() if _is_stateful(value) else value


def _drop_gradients(optimizer: Any) -> None:
    try:
        optimizer.zero_grad()
    except AssertionError:  # of a round in flight, which all ranks complete
        optimizer.synchronize()
        optimizer.zero_grad()


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Shares out a data set among the ranks, and goes on where a committed epoch was left.

    Use it as an attribute of the state and record every batch:

        for i, batch in enumerate(loader):
            ...
            state.sampler.record_batch(i, batch_size)
            state.commit()

    Each rank gets the same number of samples; where they do not divide, some come twice.

    Args:
        dataset: What has a length.
        shuffle: Whether each epoch has a random order, the same on every rank.
        seed: Of that order.
    Attributes:
        epoch: Whose order it is.
        processed_num: Samples of the epoch that all ranks together have recorded.
        num_replicas: Ranks.
        rank: This one.
        remaining_indices: Of the epoch, what was not recorded at the last :meth:`reset`, in order.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self._indices: list[int] = []  # this rank's
        self._recorded = 0  # of these
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch, of which nothing is recorded; nothing changes if it is the present one.

        So it may be called where the epoch begins, also when that is gone on with, or at the end of
        the epoch before.
        """
        if epoch != self.epoch:
            self.epoch = epoch
            self.processed_num = 0
            self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Records the next batch as processed, by all ranks.

        Args:
            batch_idx: Not used; for compatibility with Horovod.
            batch_size: Samples per rank; the last batch of an epoch may have fewer.
        """
        del batch_idx
        self._recorded = min(self._recorded + batch_size, len(self._indices))
        left = len(self.remaining_indices) - self._recorded * self.num_replicas
        self.processed_num = len(self.dataset) - max(left, 0)

    def record_indices(self, indices: Iterable[int]) -> None:
        """Records samples of this rank as processed; on the other ranks as many.

        Args:
            indices: The next ones that iterating gave.
        Raises:
            ValueError: They are others.
        """
        given = [int(index) for index in indices]
        expected = self._indices[self._recorded : self._recorded + len(given)]
        if sorted(given) != sorted(expected):
            raise ValueError(
                f"record_indices: the next samples of rank {self.rank} are {expected}, not {given}"
            )
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
        self.num_replicas, self.rank = fl.size(), fl.rank()
        count = len(self.dataset)
        order = list(range(count))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(count, generator=generator).tolist()
        self.remaining_indices = order[self.processed_num :]
        self._recorded = 0
        each = math.ceil(len(self.remaining_indices) / self.num_replicas)
        repeats = math.ceil(each * self.num_replicas / max(len(self.remaining_indices), 1))
        filled = (self.remaining_indices * repeats)[: each * self.num_replicas]
        self._indices = filled[self.rank :: self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._indices)
