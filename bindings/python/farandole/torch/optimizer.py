"""DistributedOptimizer: the same optimizer object, whose gradients are reduced in backward()."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast, runtime_checkable

import torch

from farandole import basics, ops
from farandole.basics import ProcessSet
from farandole.torch import _gradient_memory, _parameters
from farandole.torch._adasum import AdasumSteps
from farandole.torch._parameters import Settings
from farandole.torch._reducer import GradientReducer
from farandole.torch._steps import Steps, adapt_scalers, evaluates_once, steps_of
from farandole.torch.compression import Compression, PowerSGD, native_wire


@runtime_checkable
class Distributed(Protocol):
    """What an optimizer gains by :func:`DistributedOptimizer`; ``isinstance`` tells whether one has it."""

    def synchronize(self) -> None:
        """Completes the gradients of the backward passes so far, which ``step()`` otherwise does."""

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Around a ``step()`` that takes the gradients as ``synchronize()`` left them."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Around backward passes whose gradients are accumulated here and not reduced."""

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes ``backward_passes_per_step``, on all ranks between two steps."""


class WrappedOptimizer(torch.optim.Optimizer, Distributed):
    """What type checkers see in a wrapped optimizer, whose class is its own at run time."""


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = ops.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: object = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = basics.global_process_set,
    complete: str = "backward",
    overlap: bool = True,
    reduce_loss: bool | None = None,
    gradient_as_bucket_view: bool = False,
    share_gradients: bool = False,
) -> WrappedOptimizer:
    """Makes ``backward()`` reduce the gradients of this optimizer's parameters over all ranks.

    They are final when the outermost ``backward()`` returns, so clipping, unscaling and logging
    need nothing special. With one rank nothing at all changes.

    Between two calls of ``step()`` every rank runs the same number of backward passes, those in
    ``no_sync()`` included; a rank may also run none. Otherwise all ranks get a MismatchError that
    names the step, the ranks and what each did, from the ``backward()`` or ``step()`` in which they
    meet. Steps count from 1 at the wrap, and again after a ``join()`` and after a failed round.

    Gradients that were written without a backward pass, and those assigned after one
    (``p.grad = ...``), are reduced in ``step()``; with op=Sum one that takes the place of a reduced
    gradient is refused. What is written in place after ``backward()``, as by clipping, and whatever
    comes after ``synchronize()``, is used as it is. A gradient that is written to while it travels
    is refused by name. Memory that ``.grad`` shares with other tensors is not written: such a
    gradient is copied first, except where the user has placed it there, as in a flat buffer. A
    write of which the tensor's version says nothing (through ``.data`` or NumPy) is seen only with
    op=Average and where no backward pass ran since the last step. Parameters may change their
    shape through ``.data`` between a step and the next forward, on all ranks alike. Between two
    steps one thread calls ``backward()``; another gets a RuntimeError.

    On a GPU "final" is meant in the order of streams: the current stream of the thread that called
    ``backward()``, or ``step()``, waits for the results, as for what backward itself computed. A
    backward that is captured into a CUDA graph is refused.

    Args:
        optimizer: Any torch optimizer; its parameters are the same on all ranks.
        named_parameters: Names for messages, usually ``model.named_parameters()``.
        compression: How gradients travel: a choice of ``Compression``, ``PowerSGD(rank)``, or a
            class of your own with ``compress(tensor) -> (tensor, context)`` and
            ``decompress(tensor, context)``; what it makes is reduced as it is. Sparse gradients
            travel uncompressed.
        backward_passes_per_step: Passes whose gradients are summed on each rank before they are
            reduced. The mean divides by the number of ranks only; ``step()`` in between reduces
            the passes seen.
        op: Average or Sum. Adasum: each rank takes ``step()`` with its own gradients, and what it
            changes is combined adaptively; ``groups``, ``sparse_as_dense``, ``complete``,
            ``overlap`` and ``reduce_loss`` mean nothing then, and gradients stay this rank's own.
        gradient_predivide_factor: With Average: divide by this before and by size() / this after
            the sum.
        num_groups: Deprecated: ``groups``.
        groups: An integer: cut the gradients into about so many groups. A list of lists of
            parameters is accepted and changes nothing: gradients are grouped by the order in which
            they become ready.
        sparse_as_dense: Sparse gradients travel as dense ones, and are sparse again afterwards;
            otherwise their rows are gathered.
        process_set: The ranks that share the gradients. On another rank nothing changes.
        complete: When gradients are final: "backward": when it returns; "step": in ``step()`` or
            ``synchronize()``, as with Horovod; with a ``torch.amp.GradScaler`` also in its
            ``unscale_()`` and ``step()``, so that all ranks see the same infinities.
        overlap: Gradients are sent during the backward pass, each when it has been accumulated as
            often as in earlier passes. False: all are sent at the end of the pass, which is slower
            and right for models that accumulate a gradient a varying number of times per pass, as
            loops over a checkpointed layer (``use_reentrant=True``) do. Ranks may differ in it.
        reduce_loss: Whether ``step(closure)`` reduces the number that the closure returns over the
            ranks, as the gradients are. None: where ``step()`` may evaluate it more than once,
            guided by the loss, as LBFGS does. That is so unless ``step()`` is that of another
            optimizer of torch's; these give every rank its own loss. Anything but a number, such as
            a dictionary, comes back as it is.
        gradient_as_bucket_view: Gradients in host memory lie in memory that the ranks of a host
            share, and are reduced there without a copy; results are the same. After a pass
            ``.grad`` is a tensor in that memory, the same one in every step. ``zero_grad()`` takes
            it away, autograd makes a new tensor, and that is copied there, as is what is assigned
            to ``.grad``: this costs about what it saves, and ``share_gradients`` is the better
            choice. After ``zero_grad(set_to_none=False)``, and in passes that accumulate, autograd
            adds to it in place, and the reduction takes about half the memory traffic.
            Gradients that are sparse, on a GPU, compressed by a class, of a parameter that is not
            in C order, or of torch < 2.10 stay as they are; those that are reduced together with
            one of them, with ``gradient_predivide_factor``, or between hosts are copied. Ranks may
            differ in it. Do not keep memory of ``.grad`` for later steps.
        share_gradients: Autograd makes gradients in memory that the ranks of a host share, and they
            are reduced there without a copy; results are the same. For that torch's allocator of
            host memory is replaced by one that gives such a block to whatever a backward pass
            allocates of a gradient's size, and all else to the allocator before. It is compiled
            with the system's C++ compiler when it is first used, in about ten seconds, and kept in
            ``~/.cache/farandole``. The blocks take up the memory of one gradient per parameter, and
            of one more of each size up to 1 MiB, also while there are none. ``.grad`` may be kept;
            the next one is then made elsewhere and copied, as is one whose block a temporary tensor
            of its size has got. Else what is copied is as with ``gradient_as_bucket_view``, except
            that channels-last order and older torch are as good as others. Ranks may differ in it.
    Returns:
        ``optimizer`` itself. Its class stays as it is; it gains ``no_sync()``,
        ``set_backward_passes_per_step()``, and, rarely needed, ``synchronize()`` and
        ``skip_synchronize()``. Copies and pickles are plain optimizers; :func:`unwrap` makes this
        one plain again.
    Raises:
        ValueError: An argument has no such value, or does not go with ``op=Adasum``; names are
            missing or used twice; gradients have a dtype that cannot be reduced; it is wrapped
            already; DistributedDataParallel or FSDP reduces the gradients; Farandole has not been
            initialized.
        RuntimeError: ``share_gradients`` finds no C++ compiler.
    """
    named = _parameters.name_parameters(optimizer, named_parameters)
    _check_choices(backward_passes_per_step, op, gradient_predivide_factor, complete)
    group_count = _count_groups(num_groups, groups)
    is_low_rank = isinstance(compression, PowerSGD) and op == ops.Average
    wire = None if is_low_rank else native_wire(compression)
    wrapped = steps_of(optimizer)
    if wrapped is not None and not wrapped.is_over:
        raise ValueError("this optimizer is wrapped already")
    _parameters.refuse_other_wrappers(named)
    basics.topology()  # raises where there is none
    if gradient_as_bucket_view and share_gradients:
        raise ValueError("share_gradients=True makes views needless: leave gradient_as_bucket_view out")
    steps: Steps
    if op == ops.Adasum:
        if gradient_as_bucket_view or share_gradients:
            name = "gradient_as_bucket_view" if gradient_as_bucket_view else "share_gradients"
            raise ValueError(
                f"{name}=True is for gradients, which op=Adasum does not reduce: it combines the optimizers' steps"
            )
        _parameters.refuse_irreducible(named)
        adapt_scalers()
        steps = AdasumSteps(optimizer, compression, process_set)
    else:
        group = process_set if process_set.included() else basics.global_process_set
        factor = gradient_predivide_factor
        settings = Settings(
            options=ops.reduction_options(ops.ALLREDUCE, op, 1 / factor, factor, group, wire or 0),
            compression=None if wire is not None else compression,
            size=(process_set.size() if process_set.included() else 1) or 1,
            passes=backward_passes_per_step,
            complete=complete,
            densifies=sparse_as_dense,
            group_count=group_count,
            overlaps=overlap,
            are_views=gradient_as_bucket_view,
            are_shared=share_gradients,
        )
        reduces_loss = not evaluates_once(optimizer) if reduce_loss is None else reduce_loss
        steps = _steps(optimizer, named, settings, reduces_loss)
    if wrapped is not None:  # of a job that is over
        unwrap(optimizer)
    steps.install(optimizer)
    optimizer.__dict__["_parameter_names"] = {parameter: name for name, parameter in named}
    return cast("WrappedOptimizer", optimizer)


def unwrap(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Makes a wrapped optimizer a plain one again, whose gradients are this rank's own.

    Its state and options stay. All ranks call it at the same point; nothing is exchanged. It can be
    wrapped again, with other arguments too. A parameter that another wrapped optimizer holds as well
    is reduced for that one on.

    Args:
        optimizer: What DistributedOptimizer gave; also after ``shutdown()``.
    Returns:
        ``optimizer`` itself.
    Raises:
        ValueError: It is not wrapped; or gradients are accumulated or sent that ``step()`` or
            ``synchronize()`` has to complete first.
    """
    steps = steps_of(optimizer)
    if steps is None:
        raise ValueError(f"this {type(optimizer).__name__} is not wrapped")
    steps.refuse_in_flight()
    steps.uninstall(optimizer)
    del optimizer.__dict__["_parameter_names"]
    return optimizer


def _steps(
    optimizer: torch.optim.Optimizer, named: list[tuple[str, torch.Tensor]], settings: Settings, reduces_loss: bool
) -> Steps:
    """The optimizer's reducer; parameters of another wrapped optimizer are left to that one's."""
    if settings.size == 1:
        return Steps(optimizer, basics.current(), None, [])
    if settings.compression is None or isinstance(settings.compression, PowerSGD):
        _parameters.refuse_irreducible(named)
    if settings.are_shared:
        _gradient_memory.allocator()  # raises where there is none
    adapt_scalers()
    rank = basics.current()
    own, shared = [], set()
    for name, parameter in named:
        other = next((e for e in rank.reducers if e.holds(parameter)), None)
        if other is None:
            own.append((name, parameter))
            continue
        _refuse_difference(name, other.settings, settings)
        shared.add(other)
    reducer = GradientReducer(rank, own, named, settings)
    rank.reducers.add(reducer)
    others = sorted(shared, key=lambda other: other.number)
    return Steps(optimizer, rank, reducer, others, reduces_loss)


def _check_choices(passes: int, op: int, predivide_factor: float, complete: str) -> None:
    """Raises ValueError for a value that does not exist."""
    if not isinstance(passes, int) or passes <= 0:
        raise ValueError(f"backward_passes_per_step must be > 0, not {passes!r}")
    if op not in (ops.Average, ops.Sum, ops.Adasum):
        ops.reduction(op)
        raise ValueError("op must be Average, Sum or Adasum for gradients")
    if predivide_factor != 1.0 and op != ops.Average:
        raise ValueError("gradient_predivide_factor needs op == Average")
    if complete not in ("backward", "step"):
        raise ValueError(f'complete must be "backward" or "step", not {complete!r}')


def _count_groups(num_groups: int, groups: object) -> int:
    """How many groups to divide the gradients into; 0: by their size.

    A list of lists is checked and gives 0: what it would keep together is together anyway, in the
    order in which gradients become ready.
    """
    if num_groups:
        warnings.warn("num_groups= is deprecated; use groups=", DeprecationWarning, stacklevel=3)
        groups = num_groups if groups is None else groups
    if groups is None:
        return 0
    if isinstance(groups, int) and not isinstance(groups, bool) and groups >= 0:
        return groups
    if isinstance(groups, list) and all(_is_group(group) for group in groups):
        counts = Counter(id(parameter) for group in groups for parameter in group)
        if max(counts.values(), default=1) > 1:
            raise ValueError("groups: a parameter is in more than one group")
        return 0
    raise ValueError(f"groups should be a non-negative integer or a list of lists of tensors, not {groups!r}")


def _is_group(group: Any) -> bool:
    return isinstance(group, list) and all(isinstance(p, torch.Tensor) for p in group)


def _refuse_difference(name: str, first: Settings, second: Settings) -> None:
    def reduction(settings: Settings) -> tuple[int, float, float, int]:
        options = settings.options
        return options.op, options.prescale, options.postscale, options.set

    for what, a, b in (
        ("op or gradient_predivide_factor", reduction(first), reduction(second)),
        ("compression", first.options.wire, second.options.wire),
        ("compression", first.compression, second.compression),
        ("backward_passes_per_step", first.passes, second.passes),
        ("complete", first.complete, second.complete),
        ("sparse_as_dense", first.densifies, second.densifies),
        ("overlap", first.overlaps, second.overlaps),
    ):
        if a != b:
            raise ValueError(
                f'parameter "{name}" belongs to another wrapped optimizer already, which was given '
                f"another {what}; both must be the same"
            )
