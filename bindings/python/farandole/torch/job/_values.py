"""What a step makes besides gradients: buffers of the model, and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from farandole.torch.job._slots import sum_over_slots

_MAX_FLOATS = 1 << 16  # of a buffer whose mean over the slots is taken
_MAX_INTEGERS = 1 << 10  # of a buffer that slot 0 decides


class SlotValues:
    """Buffers and metrics of the slots of a step.

    Each slot begins with the step's buffers. The new buffers are, for floating point, the mean over the slots, summed
    in float64 in the tree over the slots; for integers and bool those of slot 0. Larger buffers must stay as they
    are: masks, tables.

    Raises:
        ValueError: A buffer has a dtype of which there is no mean.
    """

    def __init__(self, model: torch.nn.Module, slots: int) -> None:
        self.names: tuple[str, ...] = ()  # of metrics
        self._slots = slots
        self._floats: list[_Buffer] = []
        self._integers: list[_Buffer] = []
        self._constants: list[_Buffer] = []
        self._metrics: list[list[float]] = []  # by slot
        self._float_rows: list[torch.Tensor] = []  # by slot
        self._first: list[int] = []  # integers after slot 0
        self._is_begun = False
        for name, module, key in _buffers(model):
            self._classify(_Buffer(name, module, key))

    def _classify(self, buffer: _Buffer) -> None:
        value = buffer.value
        if value.is_complex():
            raise ValueError(f'buffer "{buffer.name}" is {value.dtype}: a Job takes means of real buffers only')
        if value.dtype == torch.float64 and self._slots & (self._slots - 1):
            raise ValueError(
                f'buffer "{buffer.name}" is float64, whose mean over slots={self._slots} rounds: make it float32, or '
                "the number of slots a power of two"
            )
        limit = _MAX_FLOATS if value.is_floating_point() else _MAX_INTEGERS
        if value.numel() > limit:
            self._constants.append(buffer)
        else:
            (self._floats if value.is_floating_point() else self._integers).append(buffer)

    def begin(self) -> None:
        """Before the first slot of a step."""
        for buffer in (*self._floats, *self._integers, *self._constants):
            buffer.save(is_copied=buffer.value.numel() <= _MAX_FLOATS)
        self._metrics, self._float_rows = [], []
        self._first = [0] * sum(buffer.value.numel() for buffer in self._integers)
        self._is_begun = True

    def abandon(self) -> None:
        """Gives buffers back their values of before the step, if one has begun."""
        if self._is_begun:
            self.restore()
        self._is_begun = False

    def restore(self) -> None:
        """Before each other slot."""
        with torch.no_grad():
            for buffer in (*self._floats, *self._integers):
                buffer.restore()

    def keep(self, slot: int, metrics: Mapping[str, float]) -> None:
        """After a slot.

        Raises:
            ValueError: The slot's metrics have other names than another's; a large buffer has changed.
        """
        if not self._metrics:
            self.names = tuple(sorted(metrics))
        elif self.names != tuple(sorted(metrics)):
            raise ValueError(f"slot {slot} returned metrics {sorted(metrics)}, another slot {list(self.names)}")
        for buffer in self._constants:
            buffer.check()
        self._metrics.append([metrics[name] for name in self.names])
        if self._floats:
            self._float_rows.append(torch.cat([buffer.value.detach().reshape(-1).double() for buffer in self._floats]))
        if slot == 0:
            self._first = [int(n) for buffer in self._integers for n in buffer.value.reshape(-1).tolist()]

    def total(self) -> torch.Tensor:
        """The rank's sums, float64: metrics, then buffers. For op=Sum."""
        metrics = torch.tensor(self._metrics, dtype=torch.float64)
        rows = torch.cat([metrics, torch.stack(self._float_rows)], 1) if self._floats else metrics
        return sum_over_slots(rows)

    def integers(self) -> list[int]:
        """What slot 0 made of them; zeros where it is another rank's."""
        return self._first

    def apply(self, sums: torch.Tensor, integers: list[int], passages: int) -> dict[str, float]:
        """Gives the buffers their new values; returns the metrics' means."""
        means = sums / self._slots
        metrics = (means[: len(self.names)] / passages).tolist()
        sizes = [buffer.value.numel() for buffer in self._floats]
        for buffer, value in zip(self._floats, means[len(self.names) :].split(sizes), strict=True):
            buffer.value.copy_(value.view(buffer.value.shape))
        at = 0
        for buffer in self._integers:
            count = buffer.value.numel()
            buffer.value.copy_(torch.tensor(integers[at : at + count]).view(buffer.value.shape))
            at += count
        self._is_begun = False
        return dict(zip(self.names, metrics, strict=True))


class _Buffer:
    """A buffer of a module, which may replace the tensor."""

    def __init__(self, name: str, module: torch.nn.Module, key: str) -> None:
        self.name, self._module, self._key = name, module, key

    @property
    def value(self) -> torch.Tensor:
        value = self._module._buffers[self._key]
        if value is None:
            raise ValueError(f'buffer "{self.name}" was removed during a step of a Job')
        return value

    def save(self, is_copied: bool) -> None:
        """Remembers what it is now."""
        value = self.value
        self._saved = value.detach().clone() if is_copied else value
        self._mark: Any = value, value._version

    def restore(self) -> None:
        """Gives it the value that was saved."""
        self.value.detach().copy_(self._saved)

    def check(self) -> None:
        """ValueError if it was written to or replaced."""
        value, version = self._mark
        if self.value is not value or value._version != version:
            raise ValueError(
                f'buffer "{self.name}" with {value.numel()} elements was changed by a step: a Job takes the mean '
                f"over the slots of up to {_MAX_FLOATS} floating-point numbers, and slot 0's of up to {_MAX_INTEGERS} "
                "integers"
            )


def _buffers(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module, str]]:
    found, seen = [], set()
    for prefix, module in model.named_modules():
        for key, value in module._buffers.items():
            if value is not None and id(value) not in seen:
                seen.add(id(value))
                found.append((f"{prefix}.{key}" if prefix else key, module, key))
    return found
