"""A rank's node of the tree over the slots: sums that come out the same, bit by bit, for any number of ranks.

The sum over V slots is that of a binary tree over their numbers. A rank holds one node of it, a contiguous range of
slots, and builds it like a binary counter: after each slot it merges nodes of equal size, so that log2(V) + 1 of them
are alive at most. The order of summation between ranks is the core's (``farandole.init(slots=V)``).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import torch

from farandole import ops
from farandole.exceptions import HorovodInternalError
from farandole.torch.ops import allreduce_async_

ROW = 64  # words of 8 bytes of which a digest adds; parameters begin at multiples of it in the buffer of gradients
_BUCKET_BYTES = 1 << 20
_MULTIPLIER = 0x9E3779B97F4A7C1  # odd; Knuth's, from the golden ratio

Node = list[torch.Tensor | None]


class SlotNodes:
    """A binary counter of sums: lists of tensors, in which None stands for zeros."""

    def __init__(self) -> None:
        self._stack: list[tuple[int, Node]] = []  # how many slots, their sum; ever smaller ones

    def clear(self) -> None:
        """Forgets all."""
        self._stack.clear()

    def push(self, values: Node) -> None:
        """Adds those of the next slot, in place: they belong to the counter from now on."""
        count = 1
        while self._stack and self._stack[-1][0] == count:
            values = _merge(self._stack.pop()[1], values)
            count *= 2
        self._stack.append((count, values))

    def terms(self, index: int) -> Node:
        """One tensor's sums, the latest first: in this order they are added to the last slot's."""
        return [values[index] for _, values in reversed(self._stack)]

    def total(self) -> Node:
        """The sum of all; the counter is empty afterwards."""
        values = self._stack.pop()[1]
        while self._stack:
            values = _merge(self._stack.pop()[1], values)
        return values


def _merge(left: Node, right: Node) -> Node:
    both = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if len(both) == len(left):
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
        return left
    return [a if b is None else _add([b, a], b) for a, b in zip(left, right, strict=True)]


def _add(terms: Node, out: torch.Tensor) -> torch.Tensor:
    """Adds from the left into ``out``, which may be the first one.

    A rank sends zeros for what none of its slots has. So where some term is None, -0.0 becomes +0.0 here too.
    """
    given = [term for term in terms if term is not None]
    if len(given) > 1:
        torch.add(given[0], given[1], out=out)
    elif not given:
        return out.zero_()
    elif given[0] is not out:
        out.copy_(given[0])
    for term in given[2:]:
        out.add_(term)
    return out if len(given) == len(terms) else out.add_(0.0)


class SlotGradients:
    """The gradients of a step, summed over a rank's slots and over the ranks.

    In the last slot's backward pass a parameter's sum goes into the buffer of all gradients once its gradient is
    accumulated as often as in the first step, and a bucket is sent once all of its parameters are there. Where a
    gradient is accumulated more often, :attr:`is_late` says so, and all ranks call :meth:`repeat`.

    Args:
        named: The parameters, in the same order on every rank; they keep their shapes.
        is_alone: There is one rank: nothing is sent.
    Attributes:
        names: Of the parameters, in the order of ``present`` and :meth:`digests`.
        present: Which of them got a gradient in some slot here.
    """

    def __init__(self, named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        named = list(reversed(named))  # about the order in which gradients become ready
        self.names = [name for name, _ in named]
        self.is_alone = True
        self.is_late = self._overlaps = self._is_last = False
        self.present: list[bool] = []
        self._parameters = [parameter for _, parameter in named]
        self._nodes = SlotNodes()
        self._views: list[torch.Tensor] = [torch.empty(0)] * len(named)
        self._buckets: list[torch.Tensor] = []
        self._bucket_of = [0] * len(named)
        self._fired = [0] * len(named)  # by parameter, accumulations in the last passage of the last slot
        self._expected: list[int] = []
        self._missing: list[int] = []  # by bucket
        self._handles: list[ops.Handle] = []
        self._flats: list[_Flat] = []
        for dtype in sorted({p.dtype for p in self._parameters}, key=str):
            self._lay_out([i for i, p in enumerate(self._parameters) if p.dtype == dtype], dtype)

    def _lay_out(self, indices: list[int], dtype: torch.dtype) -> None:
        """Places gradients of one dtype into a buffer, and divides it into buckets."""
        row = ROW * 8 // dtype.itemsize
        sizes = [-(-self._parameters[i].numel() // row) * row for i in indices]
        flat = torch.zeros(sum(sizes), dtype=dtype)
        limit = max(_BUCKET_BYTES, flat.nbytes // 16)
        begin = start = 0
        for index, size in zip(indices, sizes, strict=True):
            parameter = self._parameters[index]
            strides = torch.empty_like(parameter, device="meta").stride()  # its own, without holes
            self._views[index] = flat[start : start + parameter.numel()].as_strided(parameter.shape, strides, start)
            self._bucket_of[index] = len(self._buckets)
            start += size
            if (start - begin) * dtype.itemsize >= limit or start == len(flat):
                self._buckets.append(flat[begin:start])
                begin = start
        self._flats.append(_Flat(flat, sizes, indices))

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        """Inside, backward passes tell which gradients are there."""
        hooks = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._accumulated, index))
            for index, parameter in enumerate(self._parameters)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def start_generation(self, is_alone: bool) -> None:
        """Before the first step with these ranks, in which nothing is sent during the backward pass."""
        self.is_alone = is_alone
        self._expected, self._overlaps = [], not is_alone

    def begin(self) -> None:
        """Before the first slot of a step, also of one that runs again."""
        self._nodes.clear()
        self._missing = [self._bucket_of.count(bucket) for bucket in range(len(self._buckets))]
        self.present = [False] * len(self._parameters)
        self.is_late = self._is_last = False
        self._clear_gradients()

    def await_last(self) -> None:
        """Before the last passage of the rank's last slot."""
        self._fired = [0] * len(self._parameters)
        self._is_last = True

    def keep(self) -> None:
        """After a slot that is not the rank's last."""
        gradients = self._gradients()
        self._clear_gradients()
        self._nodes.push(gradients)

    def end(self) -> None:
        """After the last slot: sends what is not on its way."""
        self._is_last = False
        self._gradients()
        waits = bool(self._expected)
        for index in range(len(self._parameters)):
            if not waits or self._fired[index] < self._expected[index]:
                self._finish(index)
        if self._overlaps:
            self._expected = self._expected or [count or -1 for count in self._fired]

    def repeat(self) -> None:
        """Sends all gradients again, as some rank's were accumulated once more when they were on their way."""
        self.wait()
        self._missing = [self._bucket_of.count(bucket) for bucket in range(len(self._buckets))]
        self._overlaps, self._expected = False, []
        for index in range(len(self._parameters)):
            self._finish(index)

    def wait(self) -> None:
        """Until the sums over all ranks are there; raises what the exchange raises."""
        handles, self._handles = self._handles, []
        wait_for_all(handles)

    def abandon(self) -> None:
        """After a failure: nothing is in flight, and parameters have no gradients."""
        with contextlib.suppress(HorovodInternalError):
            self.wait()
        self.begin()

    def assign(self, present: Sequence[int], divisor: int) -> None:
        """Gives the parameters that have one on some rank their mean gradient, in memory of this object."""
        for flat in self._flats:
            flat.values.div_(divisor)
        for parameter, view, is_present in zip(self._parameters, self._views, present, strict=True):
            parameter.grad = view if is_present else None
        self._nodes.clear()

    def digests(self) -> torch.Tensor:
        """A number of 64 bits for each parameter's assigned gradient, which changes with any of its bits."""
        digests = torch.empty(len(self._parameters), dtype=torch.int64)
        for flat in self._flats:
            digests[flat.indices] = flat.digests()
        return digests

    def _accumulated(self, index: int, _parameter: torch.Tensor) -> None:
        if not self._is_last:
            return
        self._fired[index] += 1
        if self._expected and self._overlaps:
            if self._fired[index] == self._expected[index]:
                self._finish(index)
            elif self._fired[index] > self._expected[index]:
                self.is_late = True

    def _finish(self, index: int) -> None:
        """Sums what the slots have of a gradient, and sends its bucket if it is the last one there."""
        with torch.no_grad():
            _add([self._parameters[index].grad, *self._nodes.terms(index)], self._views[index])
        bucket = self._bucket_of[index]
        self._missing[bucket] -= 1
        if self._missing[bucket] == 0 and not self.is_alone:
            name = f"job.gradients.{bucket}"
            self._handles.append(allreduce_async_(self._buckets[bucket], name=name, op=ops.Sum))

    def _gradients(self) -> Node:
        gradients = [parameter.grad for parameter in self._parameters]
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                self.present[index] = True
                if gradient.layout is not torch.strided:
                    raise ValueError(
                        f'the gradient of "{self.names[index]}" is sparse, which a Job cannot sum: use sparse=False'
                    )
        return gradients

    def _clear_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


class _Flat:
    """The gradients of one dtype, one after the other at multiples of ROW words."""

    def __init__(self, values: torch.Tensor, sizes: list[int], indices: list[int]) -> None:
        self.values, self.indices = values, indices
        self._rows = values.view(torch.int64).view(-1, ROW)
        ends = torch.tensor(sizes).cumsum(0) * values.itemsize // (ROW * 8)
        self._last = ends - 1  # row of each
        self._weights = weights_of(len(self._rows))

    def digests(self) -> torch.Tensor:
        # A vectorised sum of rows, then one multiplication per row: 10 us per 400 KB, where a hash takes 500.
        sums = (self._rows.sum(1) * self._weights).cumsum(0)[self._last]
        return torch.diff(sums, prepend=sums.new_zeros(1))


def wait_for_all(handles: Sequence[ops.Handle]) -> None:
    """Waits for each; then raises the first error."""
    errors = []
    for handle in handles:
        try:
            ops.synchronize(handle)
        except HorovodInternalError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def weights_of(count: int) -> torch.Tensor:
    """Odd numbers of 64 bits: a change of one bit of a number changes its product with an odd one."""
    return torch.arange(1, count + 1) * _MULTIPLIER | 1


def digest_of(numbers: torch.Tensor) -> torch.Tensor:
    """One number of 64 bits for a tensor of numbers of 64 bits."""
    return (numbers * weights_of(numbers.numel())).sum()
