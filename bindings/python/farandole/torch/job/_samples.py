"""Which samples a slot of a step has, and how they are loaded."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from farandole.torch.job._randomness import seed_generators


class Part(NamedTuple):
    """What one call of the step function gets of a step: the ``passage``-th of the ``accumulate`` batches of a slot."""

    step: int
    slot: int
    passage: int


class Samples(Dataset[Any]):
    """The batches of a data set, by step and slot, the same for any number of ranks.

    Epoch e has the order ``torch.randperm`` of a generator seeded with seed + e. Step b of the epoch has the b-th
    ``slots * accumulate * batch_size`` samples of it, slot v the v-th part of these. Samples that are left at the end
    of an epoch, fewer than a step needs, are dropped: in another epoch they are others.

    Thread safety: none. Loading in this process and in workers gives the same batches: random generators are seeded
    before each batch is loaded.

    Args:
        dataset: Has ``__len__``, and ``__getitem__`` or ``__getitems__`` that depend on the index and on the global
            generators of torch, NumPy and Python alone.
        passages: Batches of a slot in a step.
        collate: Makes a batch of a list of samples; None: torch's default.
        workers: Processes that load ahead; 0: batches are loaded when they are needed.
    Raises:
        TypeError: The data set has no order of its own: an IterableDataset, a DataLoader, or what has no length.
        ValueError: It has fewer samples than a step needs.
    """

    def __init__(
        self, dataset: Any, slots: int, passages: int, batch_size: int, seed: int, shuffle: bool,
        collate: Callable[[list[Any]], Any] | None, workers: int,
    ) -> None:  # fmt: skip
        if isinstance(dataset, (IterableDataset, DataLoader)) or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                f"Job(dataset=...) of type {type(dataset).__name__}: which sample comes next depends on what was read "
                "before, so a lost step could not be run again; expected a data set with __len__ and __getitem__"
            )
        if not hasattr(dataset, "__len__"):
            raise TypeError(f"Job(dataset=...) of type {type(dataset).__name__} has no length")
        self.count = len(dataset)
        self.steps_per_epoch = self.count // (slots * passages * batch_size)
        if self.steps_per_epoch == 0:
            raise ValueError(
                f"Job(dataset=...) has {self.count} samples; a step needs {slots * passages * batch_size}: "
                f"slots={slots} x accumulate={passages} x batch_size={batch_size}"
            )
        self._dataset, self._slots, self._passages, self._batch_size = dataset, slots, passages, batch_size
        self._seed, self._shuffle, self._collate = seed, shuffle, collate or default_collate
        # These alone draw no random numbers for sure.
        self._draws = type(dataset) is not TensorDataset or collate is not None
        self._order: tuple[int, list[int]] = (-1, [])  # of an epoch
        self._loader = None
        self._ahead: Iterator[tuple[Part, Any]] | None = None  # what workers load, up to the range of slots
        self._ahead_of: tuple[int, range] | None = None
        self._plan: Iterator[Part] = iter(())
        if workers:
            self._loader = DataLoader(
                self, sampler=_Plan(self), batch_size=None, num_workers=workers, persistent_workers=True
            )

    def batches(self, step: int, slots: range) -> Iterator[tuple[Part, Any]]:
        """The batches of these slots of a step, in the order of slots."""
        parts = self._parts(step, slots)
        if self._loader is None:
            yield from ((part, self.load(part)) for part in parts)
            return
        if self._ahead is None or self._ahead_of != (step, slots):
            self._plan = (part for later in itertools.count(step) for part in self._parts(later, slots))
            self._ahead = iter(self._loader)
        self._ahead_of = None  # until all were taken
        yield from (next(self._ahead) for _ in parts)
        self._ahead_of = (step + 1, slots)

    def load(self, part: Part) -> Any:
        """A batch; leaves the generators as loading left them."""
        if self._draws:
            seed_generators(self._seed, "samples", *part)
        indices = self._indices(part)
        if hasattr(self._dataset, "__getitems__"):
            return self._collate(self._dataset.__getitems__(indices))
        return self._collate([self._dataset[index] for index in indices])

    def __getitem__(self, part: Part) -> tuple[Part, Any]:  # in a worker
        return part, self.load(part)

    def __getstate__(self) -> dict[str, Any]:  # where workers are spawned
        return {**self.__dict__, "_loader": None, "_ahead": None, "_plan": None}

    def next_part(self) -> Part:
        """What a worker is to load next."""
        return next(self._plan)

    def _parts(self, step: int, slots: range) -> list[Part]:
        return [Part(step, slot, passage) for slot in slots for passage in range(self._passages)]

    def _indices(self, part: Part) -> list[int]:
        epoch, batch = divmod(part.step, self.steps_per_epoch)
        if self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            order = torch.randperm(self.count, generator=generator) if self._shuffle else torch.arange(self.count)
            self._order = epoch, order.tolist()
        number = (batch * self._slots + part.slot) * self._passages + part.passage
        return self._order[1][number * self._batch_size : (number + 1) * self._batch_size]


class _Plan:
    """The order of loading, for a DataLoader: without an end, as the range of slots may change."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[Part]:
        while True:
            yield self._samples.next_part()

    def __len__(self) -> int:
        return 1 << 62  # DataLoader warns where more comes than this
