"""DistributedOptimizer(op=Adasum): each rank takes its own step, and the steps are combined.

Source: Maleki et al., "Scaling distributed training with adaptive summation", MLSys 2021,
arXiv:2006.02924, section 4: what is summed adaptively is the change that the optimizer makes, so that
momentum and per-parameter rates are those of a rank's own gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from farandole import basics, ops
from farandole.basics import ProcessSet
from farandole.exceptions import HorovodInternalError
from farandole.torch.compression import native_wire
from farandole.torch.ops import grouped_allreduce
from farandole.torch.optimizer._steps import Steps


class AdasumSteps(Steps):
    """Combines what ``step()`` of one optimizer changes.

    Every parameter that requires a gradient takes part, changed or not, so ranks agree on what
    travels. Tensors on a GPU travel through host memory.

    Args:
        optimizer: Held weakly.
        compression: How changes travel.
        process_set: The ranks; with one of them nothing is exchanged.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, compression: Any, process_set: ProcessSet) -> None:
        super().__init__(optimizer, basics.current(), None, [])
        self._compression = compression
        self._process_set = process_set
        self._is_alone = not process_set.included() or process_set.size() == 1
        if not self._is_alone:
            uid = basics.uid_of(process_set, "DistributedOptimizer")
            number = self._rank.adasum_counts.get(uid, 0)
            self._rank.adasum_counts[uid] = number + 1
            self._name = f"adasum.{number}"
        self._starts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._failed: ops.Handle | None = None  # the combination of a step that raised

    def before_step(self, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
        """Remembers where the parameters start; a closure stays this rank's own."""
        self._follow()  # raises where it was wrapped in a job of one rank, and is used in a larger one
        if self._failed is not None:
            failed, self._failed = self._failed, None
            with contextlib.suppress(HorovodInternalError):
                ops.synchronize(failed)
        optimizer = self._optimizer()
        if optimizer is not None and not self._is_alone:
            parameters = (p for group in optimizer.param_groups for p in group["params"])
            self._starts = [(p, p.detach().clone()) for p in parameters if p.requires_grad]
        return closure

    def after_step(self) -> None:
        """Replaces this rank's change of every parameter by that of all ranks."""
        starts, self._starts = self._starts, []
        if not starts:
            return
        with torch.no_grad():
            changes = [(parameter - start).cpu() for parameter, start in starts]
            combined = grouped_allreduce(
                changes, name=self._name, compression=self._compression, op=ops.Adasum,
                process_set=self._process_set,
            )  # fmt: skip
            for (parameter, start), change in zip(starts, combined, strict=True):
                parameter.copy_(start + change.to(start.device))

    def step_failed(self, error: BaseException) -> None:
        """Undoes what the step has changed, and fails that of every rank, without waiting for them."""
        starts, self._starts = self._starts, []
        rank = basics.find()
        if not starts or rank is None:
            return
        with torch.no_grad(), contextlib.suppress(HorovodInternalError, ValueError):
            for parameter, start in starts:
                parameter.copy_(start)
            options = ops.reduction_options(
                ops.ALLREDUCE, ops.Adasum, 1.0, 1.0, self._process_set,
                native_wire(self._compression) or 0,
            )  # fmt: skip
            self._failed = rank.core.submit(
                options, [start.cpu() for _, start in starts], self._name,
                ops.GROUP | ops.INTERNAL, failed=f"step() raised {type(error).__name__}: {error}",
            )  # fmt: skip

    def complete(self) -> None:
        """Of a GradScaler: a step that it leaves out on this rank alone changes nothing here."""
        self.before_step(None)

    def end(self) -> None:
        """Steps are this rank's own from now on, also those of a scheduler's wrapper around them."""
        super().end()
        self._is_alone = True
        self._starts = []

    def synchronize(self) -> None:
        """Does nothing: gradients are this rank's own."""

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raises AssertionError: there is nothing to skip, as Horovod says."""
        raise AssertionError("skip_synchronize() is not possible with op=Adasum")
        yield
