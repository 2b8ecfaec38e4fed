"""A rank's node of the tree over the slots: sums that come out the same, bit by bit, for any number of ranks.

The sum over V slots is that of a binary tree over their numbers. A rank holds one node of it, a contiguous range of
slots, and builds it like a binary counter: a slot's gradient is added to the node before it as long as that one has as
many slots, so that log2(V) + 1 nodes are alive at most. The order of summation between ranks is the core's
(``farandole.init(slots=V)``).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from farandole import ops
from farandole.exceptions import HorovodInternalError
from farandole.torch.ops import allreduce_async_

_ROW = 64  # words of 8 bytes; in a buffer, gradients begin at multiples of it
_BUCKET_BYTES = 1 << 20


class SlotGradients:
    """The gradients of a step, summed over a rank's slots and over the ranks.

    Hooks take each gradient as soon as it is accumulated, so parameters have none outside of a backward pass until
    :meth:`assign`. Once it was accumulated as often as in the first slot of the generation, it is added to the nodes
    before, and in the rank's last slot a bucket is sent when all of its gradients are there. Where a gradient is
    accumulated more often than that, :attr:`is_late` says so, and after :meth:`be_patient` the step runs again.

    Args:
        named: The parameters, in the same order on every rank; they keep their shapes.
    Attributes:
        names: Of the parameters, in the order of ``present`` and :attr:`results`.
        present: Which of them got a gradient in some slot here.
        is_alone: There is one rank: nothing is sent.
    """

    def __init__(self, named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        named = list(reversed(named))  # about the order in which gradients become ready
        self.names = [name for name, _ in named]
        self.present: list[bool] = []
        self.is_alone = True
        self.is_late = self._is_patient = self._is_last = False
        self._parameters = [parameter for _, parameter in named]
        self._layout = _Layout(self._parameters)
        self._free: list[_Node] = []
        self._stack: list[tuple[int, _Node]] = []  # how many slots, their sum; ever smaller ones
        self._merging: list[_Node] = []  # to which the present slot is added, one after the other
        self._own = self._result = _Node(self._layout)  # the present slot's; where its sum goes
        self._accumulations: list[int] = []  # by parameter, how often it was accumulated in this slot
        self._expected: list[int] = []
        self._missing: list[int] = []  # by bucket, gradients that are not there yet
        self._handles: list[ops.Handle] = []

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        """Inside, gradients of backward passes come here."""
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
        """Before the first step with these ranks, whose number of accumulations is learned anew."""
        self.is_alone = is_alone
        self._expected, self._is_patient = [], False

    def be_patient(self) -> None:
        """From now on gradients are taken for complete at the end of a slot."""
        self._expected, self._is_patient = [], True

    def begin(self) -> None:
        """Before the first slot of a step, also of one that runs again."""
        self._free += [node for _, node in self._stack]
        self._stack.clear()
        self._missing = list(self._layout.counts)
        self.present = [False] * len(self._parameters)
        self.is_late = False
        for parameter in self._parameters:
            parameter.grad = None

    def begin_slot(self, is_last: bool) -> None:
        """Before a slot; the rank's last one completes its node."""
        count, self._merging = 1, []
        for slots, node in reversed(self._stack):
            if slots != count and not is_last:
                break
            self._merging.append(node)
            count += slots
        self._result = self._merging[-1] if self._merging else self._own
        self._accumulations = [0] * len(self._parameters)
        self._is_last = is_last

    def end_slot(self) -> None:
        """After a slot. What it has no gradient of is zero."""
        with torch.no_grad():
            if self._accumulations != self._expected:
                for index, count in enumerate(self._accumulations):
                    if not self._expected or count < self._expected[index]:
                        own = self._own.views[index]
                        # Zeros are added too: -0.0 becomes +0.0, as it does where another rank sends the zeros.
                        self._finish(index, own if count else own.zero_())
        self.present = [count > 0 or before for count, before in zip(self._accumulations, self.present, strict=True)]
        if not self._expected and not self._is_patient:
            self._expected = [max(count, 1) for count in self._accumulations]
        count = 1 + sum(slots for slots, _ in self._stack[len(self._stack) - len(self._merging) :])
        self._free += self._merging[:-1]
        del self._stack[len(self._stack) - len(self._merging) :]
        self._stack.append((count, self._result))
        if self._result is self._own:
            self._own = self._free.pop() if self._free else _Node(self._layout)

    def wait(self, others: Sequence[ops.Handle] = ()) -> None:
        """After the last slot, until the sums over all ranks are there, and other operations have completed.

        Raises:
            HorovodInternalError: The first error of any; nothing is in flight any more.
        """
        handles, self._handles = [*self._handles, *others], []
        wait_for_all(handles)

    def abandon(self) -> None:
        """After a failure: nothing is in flight, and parameters have no gradients."""
        with contextlib.suppress(HorovodInternalError):
            self.wait()
        self.begin()

    def assign(self, present: Sequence[int], divisor: int) -> None:
        """Gives the parameters that have one on some rank their mean gradient, in memory of this object."""
        for flat in self._result.flats:
            flat.div_(divisor)
        for parameter, view, is_present in zip(self._parameters, self._result.views, present, strict=True):
            parameter.grad = view if is_present else None

    @property
    def results(self) -> list[torch.Tensor]:
        """Each parameter's mean gradient, as a vector in the order in which it lies in memory."""
        return self._result.vectors

    def _accumulated(self, index: int, parameter: torch.Tensor) -> None:
        gradient: Any = parameter.grad
        parameter.grad = None
        if gradient.requires_grad:
            raise RuntimeError("backward(create_graph=True) in a step of a Job: use torch.autograd.grad()")
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        self._accumulations[index] = count = self._accumulations[index] + 1
        expected = self._expected[index] if self._expected else 0
        if count == expected == 1:
            self._finish(index, gradient)
            return
        own = self._own.views[index]
        if count == 1:
            own.copy_(gradient)
        else:
            own.add_(gradient)
        if count == expected:
            self._finish(index, own)
        elif expected and count > expected:
            self.is_late = True

    def _finish(self, index: int, value: torch.Tensor) -> None:
        """Adds the slot's gradient to the nodes before, and sends its bucket if it is the last one there."""
        for node in self._merging:
            value = node.views[index].add_(value)
        if not self._merging and value is not self._own.views[index]:
            self._own.views[index].copy_(value)
        if not self._is_last or self.is_alone:
            return
        bucket = self._layout.bucket_of[index]
        self._missing[bucket] -= 1
        if self._missing[bucket] == 0:
            name = f"job.gradients.{bucket}"
            self._handles.append(allreduce_async_(self._result.buckets[bucket], name=name, op=ops.Sum))


class _Layout:
    """Where gradients lie in a buffer for each dtype, and how it is divided into buckets."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters = parameters
        self.bucket_of = [0] * len(parameters)
        self.starts = [0] * len(parameters)
        self.strides = [torch.empty_like(p, device="meta").stride() for p in parameters]  # as theirs, without holes
        self.flats: list[tuple[torch.dtype, int, list[int]]] = []  # dtype, elements, whose
        self.buckets: list[tuple[int, int, int]] = []  # number of the buffer, begin, end
        for dtype in sorted({p.dtype for p in parameters}, key=str):
            self._add(dtype, [i for i, p in enumerate(parameters) if p.dtype == dtype])
        self.counts = [self.bucket_of.count(bucket) for bucket in range(len(self.buckets))]

    def _add(self, dtype: torch.dtype, indices: list[int]) -> None:
        sizes = [self._size(i) for i in indices]
        total, begin, end = sum(sizes), 0, 0
        limit = max(_BUCKET_BYTES, total * dtype.itemsize // 16)
        for index, size in zip(indices, sizes, strict=True):
            self.starts[index], self.bucket_of[index] = end, len(self.buckets)
            end += size
            if (end - begin) * dtype.itemsize >= limit or index == indices[-1]:
                self.buckets.append((len(self.flats), begin, end))
                begin = end
        self.flats.append((dtype, total, indices))

    def _size(self, index: int) -> int:
        row = 8 * _ROW // self.parameters[index].itemsize
        return -(-self.parameters[index].numel() // row) * row


class _Node:
    """Gradients, one for each parameter, in as many buffers as there are dtypes. Between them are zeros."""

    def __init__(self, layout: _Layout) -> None:
        self.flats = [torch.zeros(size, dtype=dtype) for dtype, size, _ in layout.flats]
        self.views: list[torch.Tensor] = [torch.empty(0)] * len(layout.parameters)
        self.vectors = list(self.views)
        for flat, (_, _, indices) in zip(self.flats, layout.flats, strict=True):
            for i in indices:
                self.views[i] = flat.as_strided(layout.parameters[i].shape, layout.strides[i], layout.starts[i])
                self.vectors[i] = flat[layout.starts[i] : layout.starts[i] + layout.parameters[i].numel()]
        self.buckets = [self.flats[number][begin:end] for number, begin, end in layout.buckets]


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


def sum_over_slots(rows: torch.Tensor) -> torch.Tensor:
    """The sum of rows in the tree over them. Shape [slots, n] to [n]."""
    while len(rows) > 1:
        pairs = len(rows) // 2 * 2
        rows = torch.cat([rows[0:pairs:2] + rows[1:pairs:2], rows[pairs:]])  # an odd one is a node cut at the end
    return rows[0]
