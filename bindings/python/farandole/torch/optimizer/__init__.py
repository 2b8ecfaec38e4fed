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
from farandole.torch.compression import Compression, PowerSGD, native_wire
from farandole.torch.optimizer import _gradient_memory, _parameters
from farandole.torch.optimizer._adasum import AdasumSteps
from farandole.torch.optimizer._hashes import GradientHashes
from farandole.torch.optimizer._parameters import Settings
from farandole.torch.optimizer._reducer import GradientReducer
from farandole.torch.optimizer._steps import Steps, adapt_scalers, evaluates_once, steps_of


@runtime_checkable
class Distributed(Protocol):
    """The methods that :func:`DistributedOptimizer` adds; ``isinstance`` says whether an optimizer is
    wrapped."""

    def synchronize(self) -> None:
        """Completes the reduction of the gradients so far, which ``step()`` otherwise does."""

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Around a ``step()`` that takes the gradients as ``synchronize()`` left them."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Around backward passes whose gradients are accumulated here and not reduced."""

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes ``backward_passes_per_step``, on all ranks between two steps."""


class WrappedOptimizer(torch.optim.Optimizer, Distributed):
    """The type of a wrapped optimizer for type checkers; at run time the optimizer keeps its class."""


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

    Gradients are final when the outermost ``backward()`` returns, so clipping, unscaling and logging need no
    extra call. With one rank nothing changes.

    Between two calls of ``step()`` every rank must run the same number of backward passes, those in
    ``no_sync()`` included; a rank may also run none. Otherwise all ranks get a MismatchError in
    ``backward()`` or ``step()`` that names the step, the ranks and what each did. Steps are counted from 1
    when the optimizer is wrapped, after a ``join()`` and after a failed round.

    ``step()`` reduces gradients that were written without a backward pass, or assigned after one (``p.grad =
    ...``); with op=Sum it refuses one that replaces a reduced gradient. Changes in place after
    ``backward()``, such as clipping, and any after ``synchronize()``, are used as they are. Writing to a
    gradient during its reduction is an error that names it. If autograd's ``.grad`` shares memory with other
    tensors, the gradient is copied first; one that you placed yourself, for example in a flat buffer, is
    reduced in place. A write that does not change the tensor's version (through ``.data`` or NumPy) is
    detected only with op=Average, and only if no backward pass ran since the last step. Parameters may change
    their shape through ``.data`` between a step and the next forward, in the same way on all ranks. Only one
    thread may call ``backward()`` between two steps; another gets a RuntimeError.

    On a GPU "final" means in stream order: the current stream of the thread that called ``backward()`` or
    ``step()`` waits for the results, as for what backward itself computed. Capturing such a backward into a
    CUDA graph is refused.

    Args:
        optimizer: Any torch optimizer; its parameters are the same on all ranks.
        named_parameters: Names for messages, usually ``model.named_parameters()``.
        compression: How gradients travel: a choice of ``Compression``, ``PowerSGD(rank)``, or a
            class of your own with ``compress(tensor) -> (tensor, context)`` and
            ``decompress(tensor, context)``; the compressed tensor is what is reduced. Sparse gradients travel
            uncompressed.
        backward_passes_per_step: Passes whose gradients are summed on each rank before they are
            reduced. The mean divides by the number of ranks only; ``step()`` in between reduces
            the passes seen.
        op: Average, Sum or Adasum. With Adasum each rank takes ``step()`` with its own gradients, and the
            changes of the parameters are combined; ``groups``, ``sparse_as_dense``, ``complete``, ``overlap``
            and ``reduce_loss`` are then ignored, and gradients stay this rank's own.
        gradient_predivide_factor: With Average: divide by this before and by size() / this after
            the sum.
        num_groups: Deprecated: ``groups``.
        groups: An integer: the approximate number of groups of gradients. A list of lists of parameters has
            no effect: gradients are grouped in the order in which they become ready.
        sparse_as_dense: Whether sparse gradients travel as dense tensors and become sparse again afterwards;
            otherwise their rows are gathered.
        process_set: The ranks that share the gradients. On other ranks the optimizer stays plain.
        complete: When gradients are final. "backward": when ``backward()`` returns. "step": in ``step()`` or
            ``synchronize()``, as with Horovod, and in ``unscale_()`` and ``step()`` of a
            ``torch.amp.GradScaler``, so that all ranks see the same infinities.
        overlap: Whether each gradient is sent during the backward pass, once it has been accumulated as often
            as in earlier passes. False: all are sent at the end of the pass. This is slower, and needed for
            models that accumulate a gradient a varying number of times per pass, such as loops over a
            checkpointed layer (``use_reentrant=True``). Ranks may differ in it.
        reduce_loss: Whether ``step(closure)`` reduces the number that the closure returns over the ranks, as
            it reduces the gradients. None: only if the loss may decide how often ``step()`` evaluates the
            closure. That is so for LBFGS and for optimizers that are not torch's; torch's other optimizers
            return each rank's own loss. Anything but a number, such as a dictionary, is returned unchanged.
        gradient_as_bucket_view: As ``share_gradients``, but without a C++ compiler it warns, and gradients are
            copied.
        share_gradients: Whether autograd allocates gradients in memory that the ranks of a host share, where
            they are reduced without a copy. Results are the same. This replaces torch's allocator of host
            memory by one that returns a shared block when a backward pass allocates a gradient's size, and
            forwards all other requests to the previous allocator. The system's C++ compiler compiles it when
            it is first used, in about ten seconds, into ``~/.cache/farandole``. The blocks always take the
            memory of one gradient per parameter, and of one more of each size up to 1 MiB. You may keep
            ``.grad``; the next gradient is then allocated elsewhere and copied, as is one whose block a
            temporary tensor of the same size has taken, and one that you assign. Gradients that are sparse, on
            a GPU or compressed by a class are not allocated there. Gradients that are reduced together with
            one of these, with ``gradient_predivide_factor``, or between hosts, are copied. Ranks may differ in
            it.
    Returns:
        ``optimizer`` itself, of the same class, with the additional methods ``no_sync()``,
        ``set_backward_passes_per_step()``, and, rarely needed, ``synchronize()`` and ``skip_synchronize()``.
        Copies and pickles are plain optimizers; :func:`unwrap` makes this one plain again.
    Raises:
        ValueError: An argument is invalid, or does not work with ``op=Adasum``; names are missing or used
            twice; gradients have a dtype that cannot be reduced; the optimizer is wrapped already;
            DistributedDataParallel or FSDP reduces the gradients; Farandole is not initialized.
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
    basics.current(ValueError)  # raises where there is none
    steps: Steps
    if op == ops.Adasum:
        if gradient_as_bucket_view or share_gradients:
            name = "gradient_as_bucket_view" if gradient_as_bucket_view else "share_gradients"
            raise ValueError(
                f"{name}=True is for gradients, which op=Adasum does not reduce: it combines the optimizers' steps"
            )
        _parameters.refuse_irreducible(named, takes_complex=False)
        adapt_scalers()
        steps = AdasumSteps(optimizer, compression, process_set)
    else:
        group = process_set if process_set.included() else basics.global_process_set
        factor = gradient_predivide_factor
        settings = Settings(
            process_set=group,
            options=ops.reduction_options(ops.ALLREDUCE, op, 1 / factor, factor, group, wire or 0),
            compression=None if wire is not None else compression,
            size=(process_set.size() if process_set.included() else 1) or 1,
            passes=backward_passes_per_step,
            complete=complete,
            densifies=sparse_as_dense,
            group_count=group_count,
            overlaps=overlap,
            are_shared=share_gradients or (gradient_as_bucket_view and _can_share(group)),
        )
        reduces_loss = not evaluates_once(optimizer) if reduce_loss is None else reduce_loss
        steps = _steps(optimizer, named, settings, reduces_loss)
        steps.hashes = _hashes_of(optimizer, named, group, None if settings.size == 1 else steps.own.number)
    if wrapped is not None:  # of a job that is over
        unwrap(optimizer)
    steps.install(optimizer)
    optimizer.__dict__["_parameter_names"] = {parameter: name for name, parameter in named}
    return cast("WrappedOptimizer", optimizer)


def unwrap(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Turns a wrapped optimizer into a plain one, whose gradients are this rank's own.

    Its state and options stay. All ranks call it at the same point; it does not communicate. You can wrap the
    optimizer again, also with other arguments. A parameter that another wrapped optimizer also holds is still
    reduced for that one.

    Args:
        optimizer: A wrapped optimizer; also after ``shutdown()``.
    Returns:
        ``optimizer`` itself.
    Raises:
        ValueError: The optimizer is not wrapped; or ``step()`` or ``synchronize()`` must first complete
            gradients that were accumulated or sent.
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


def _hashes_of(
    optimizer: torch.optim.Optimizer, named: list[tuple[str, torch.Tensor]], process_set: ProcessSet, number: int | None
) -> GradientHashes | None:
    core = basics.current().core
    every, folder = int(core.setting("FARANDOLE_HASH_STEPS")), core.setting("FARANDOLE_HASH_DIR")
    names = {parameter: name for name, parameter in named}
    return GradientHashes(optimizer, names, process_set, number, every, folder) if every else None


def _can_share(process_set: ProcessSet) -> bool:
    """Whether gradients of several ranks can be allocated in shared memory; warns if there is no compiler."""
    if process_set.size() == 1:
        return False
    try:
        _gradient_memory.allocator()
    except RuntimeError as error:
        warnings.warn(str(error).replace("share_gradients=True", "gradient_as_bucket_view=True"), stacklevel=3)
        return False
    return True


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
