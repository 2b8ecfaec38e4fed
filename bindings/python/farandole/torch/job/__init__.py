"""Job: a training whose result does not depend on how many ranks run it, nor on which of them are lost.

A step is cut into slots. What a slot computes depends on the job's seed, the step's number and the slot's, and on the
step's weights and buffers; sums over slots are taken in a fixed tree. So weights have the same bits for any number of
ranks from one to the number of slots, whoever holds which slots, and a step that a loss interrupted runs again as if
nothing had been. docs/uninterrupted.md explains it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch

import farandole
from farandole import basics, ops
from farandole._signals import SignalNotes
from farandole.chain import Chain, settings_line
from farandole.exceptions import HorovodInternalError, MismatchError
from farandole.objects import allgather_object
from farandole.torch._digests import StepDigests
from farandole.torch.functions import map_tree
from farandole.torch.job._checkpoints import Checkpoints
from farandole.torch.job._message import Notes, decode, encode
from farandole.torch.job._randomness import repeatable, seed_generators
from farandole.torch.job._samples import Samples
from farandole.torch.job._slots import SlotGradients, wait_for_all
from farandole.torch.job._state import TrainingState, digest_of_tree, digests_of
from farandole.torch.job._values import SlotValues
from farandole.torch.ops import allgather, allreduce_async_

__all__ = ["Epoch", "Job"]

_STOP, _LEAVE = "stop", "leave"
_LEFT = 128 + signal.SIGTERM  # exit code
_VALUES = "buffers and metrics"

_Function = TypeVar("_Function", bound=Callable[[Any], Any])


class Epoch(NamedTuple):
    """What an epoch came to."""

    #: From 0.
    number: int
    #: By name, the mean over its slots and steps, the same on every rank.
    metrics: dict[str, float]


class Job:
    """A training loop over slots. All ranks make one with the same arguments::

        job = farandole.torch.Job(model, optimizer, dataset, slots=8, batch_size=16, checkpoint="run/")

        @job.step
        def train(batch):
            loss = criterion(model(batch[0]), batch[1])
            loss.backward()
            return {"loss": loss}

        for epoch in job.epochs(10):
            print(epoch.number, epoch.metrics)

    The result depends on the program, the data, the seed, the arguments below and the kind of CPU and torch, and on
    nothing else. Inside a step torch uses ``threads`` threads and deterministic kernels; a kernel that has no
    deterministic form raises torch's error, which names it.

    Thread safety: none; one thread calls it. Lifetime: of the training, over all changes of ranks.

    Args:
        model: On the CPU, parameters float32 or float64 (autocast inside the step is fine). Rank 0's parameters and
            buffers are everyone's.
        optimizer: Of these parameters, not wrapped. The Job averages gradients itself.
        dataset: Map-style: ``len(dataset)`` and ``dataset[i]``, which may use the global random generators.
        slots: Into how many parts a step is cut, for the life of the training; at most so many ranks take part.
        batch_size: Samples of a batch, of which a slot has one, or ``accumulate``.
        seed: Of the order of samples and of the random generators in steps.
        schedulers: Learning rate schedulers, stepped after each step.
        epoch_schedulers: Those stepped after each epoch.
        accumulate: Batches of a slot in a step; the step function is called for each, and their gradients are averaged.
        clip_norm: The largest 2-norm of the mean gradient; None: it is not clipped.
        shuffle: Whether each epoch has a random order.
        collate: Makes a batch of a list of samples; None: torch's default.
        workers: Processes that load batches ahead, on each rank; 0: none. Batches are the same.
        threads: Of torch in steps. They are part of the result; torch.get_num_threads() elsewhere stays as it is.
        checkpoint: A folder for checkpoints and the chain of hashes; None: neither is written. At the start the newest
            undamaged one is found by itself, whatever number of ranks wrote it.
        checkpoint_steps: Steps from one checkpoint to the next; also at the end one is written.
        keep: How many checkpoints are kept.
        signals: By signal, "stop": all ranks stop after the same step; or "leave": as by :meth:`leave`. Default:
            SIGTERM, in an elastic job to leave, else to stop. Only in the main thread.
    Raises:
        TypeError, ValueError: An argument is invalid, or something in it could not be repeated; the message names it.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, dataset: Any, *, slots: int = 8,
        batch_size: int, seed: int = 0, schedulers: Any = (), epoch_schedulers: Any = (), accumulate: int = 1,
        clip_norm: float | None = None, shuffle: bool = True, collate: Callable[[list[Any]], Any] | None = None,
        workers: int = 0, threads: int = 1, checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_steps: int = 100, keep: int = 3, signals: Mapping[int, str] | None = None,
    ) -> None:  # fmt: skip
        numbers = {"slots": slots, "batch_size": batch_size, "accumulate": accumulate, "threads": threads}
        for name, number in {**numbers, "checkpoint_steps": checkpoint_steps, "keep": keep}.items():
            if not isinstance(number, int) or number < 1:
                raise ValueError(f"Job({name}={number!r}): expected an integer of at least 1")
        if signals is not None and not set(signals.values()) <= {_STOP, _LEAVE}:
            raise ValueError(f'Job(signals={signals}): expected "stop" or "leave" for each signal')
        named = _check_model(model, optimizer)
        self._schedulers = _as_list(schedulers)
        self._epoch_schedulers = _as_list(epoch_schedulers)
        progress = {"step": 0, "sums": {}, "history": []}
        self._state = TrainingState(model, optimizer, [*self._schedulers, *self._epoch_schedulers], progress)
        self._samples = Samples(dataset, slots, accumulate, batch_size, seed, shuffle, collate, workers)
        self._values = SlotValues(model, slots)
        self._gradients = SlotGradients(named)
        self._parameters = [parameter for _, parameter in named]
        self._optimizer, self._slots, self._passages = optimizer, slots, accumulate
        self._seed, self._threads, self._clip_norm = seed, threads, clip_norm
        self._settings = {
            **numbers, "seed": seed, "samples": self._samples.count, "shuffle": shuffle, "clip_norm": clip_norm
        }  # fmt: skip
        self._checkpoints = None if checkpoint is None else Checkpoints(checkpoint, keep)
        self._checkpoint_steps = checkpoint_steps
        self._names = [*self._gradients.names, _VALUES]
        self._chain = Chain(checkpoint, settings_line(self._settings, self._names))
        self._function: Callable[[Any], Any] | None = None
        self._own_slots = range(0)
        self._is_fresh = True  # it has no state of the job yet
        self._is_joined = False  # with the ranks of this generation
        self._changes = self._leaves = False  # what ranks asked for with the last step: another generation, to leave
        self._unverified: StepDigests | None = None  # of the last step, which the next one compares
        self._final = -1  # the last step that cannot run again
        self._wants_stop = self._wants_leave = False
        #: Whether all ranks have stopped, as a signal to one of them or :meth:`stop` asked for.
        self.stop_requested = False
        if basics.find() is None:
            with repeatable(threads):
                pass  # what torch imports for it takes a second, in which the others would wait for a newcomer
            farandole.init(slots=slots)
        notice: dict[int, str] = {signal.SIGTERM: _LEAVE if farandole.members() else _STOP}
        self._signals = dict(notice if signals is None else signals)

    # What the user calls.

    def step(self, function: _Function) -> _Function:
        """Decorates the function that computes the gradients of one batch.

        It is called with a batch, runs ``backward()`` of the batch's mean loss, and returns metrics: a dictionary of
        numbers or tensors of one element, the same names each time, or None. Random generators are seeded before it.
        It changes nothing but gradients and buffers. For a step that a loss interrupted it is called again.
        """
        self._function = function
        return function

    def epochs(self, count: int) -> Iterator[Epoch]:
        """Trains until ``count`` epochs are complete, and gives each that ends here.

        A rank that joins later, or a job that goes on from a checkpoint, begins in the middle. What the loop's body
        does is not repeated on ranks that were not there: it must change nothing of the training.

        Raises:
            MismatchError: Results of a step differ between ranks, as after a bit flip: the message names the step, the
                first tensor, and which ranks are alike. Or ranks have different arguments.
            HorovodInternalError: The job cannot go on.
        """
        if self._function is None:
            raise ValueError("Job.epochs() before a step function was given: decorate one with @job.step")
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._gradients.hooked())
            stack.enter_context(self._handled_signals())
            stack.callback(self._close)
            self._recovering(lambda: None)  # joins
            given = len(self.history)
            while len(self.history) < count and not self.stop_requested:
                with repeatable(self._threads):
                    self._run_until_epoch_ends(count)
                while given < len(self.history):
                    yield Epoch(given, dict(self.history[given]))
                    given += 1
            self._recovering(ops.barrier)  # so that a rank that is behind still finds one that is ahead
            if self._checkpoints is None:
                self._final = self.steps - 1
            if self._wants_leave and len(self.history) < count and farandole.members():
                self._leave()

    def stop(self) -> None:
        """Makes all ranks stop after the same step. From any thread."""
        self._wants_stop = True

    def leave(self) -> None:
        """Makes this rank leave after a step: the process ends with code 143, and the others go on. From any thread.

        If all want to leave, they stop with a checkpoint, in an elastic job with the same code: ``farandolerun`` takes
        code 0 for the end of the training.
        """
        self._wants_leave = True

    def is_final(self, step: int) -> bool:
        """Whether a step will never run again: a checkpoint holds it; without checkpoints, all ranks applied it."""
        return step <= self._final

    @property
    def steps(self) -> int:
        """How many steps were applied since the training began."""
        return int(self._state.progress["step"])

    @property
    def history(self) -> list[dict[str, float]]:
        """The metrics of all epochs so far, also of those before this process began."""
        epochs: list[dict[str, float]] = self._state.progress["history"]
        return epochs

    def digest(self) -> str:
        """The SHA-256 of the model's parameters and buffers, with their names."""
        return digest_of_tree(self._state.tree()["model"])

    # Generations of ranks.

    def _recovering(self, work: Callable[[], None]) -> None:
        """Does work in step with the other ranks; after a loss again, with those that are left."""
        while True:
            try:
                if not self._is_joined:
                    self._join()
                return work()
            except MismatchError:
                raise
            except HorovodInternalError as error:
                self._values.abandon()
                self._gradients.abandon()
                try:
                    self._regroup()
                except ValueError as refused:  # the job is not elastic
                    raise error from refused

    def _regroup(self) -> None:
        self._is_joined, self._changes, self._leaves = False, False, False
        farandole.reinit()

    def _leave(self) -> NoReturn:
        with contextlib.suppress(HorovodInternalError):  # another rank may just have been lost
            farandole.shutdown()
        raise SystemExit(_LEFT)

    def _join(self) -> None:
        """Takes the state of the rank that has applied most steps, with the ranks of this generation."""
        place = basics.topology()
        self._own_slots = range(self._slots) if place.size == 1 else range(*farandole.slot_range())
        self._gradients.start_generation(place.size == 1)
        ranks = allgather_object(
            {"step": -1 if self._is_fresh else self.steps, "stops": self.stop_requested,
             "digest": self._unverified.total if self._unverified else None,
             "settings": self._settings, "platform": _platform(), "end": self._own_slots.stop,
             "model": self._state.shapes() if self._is_fresh else {}}, "job.ranks",
        )  # fmt: skip
        _compare(ranks, "settings", place.rank)
        _compare(ranks, "platform", place.rank)
        if ranks[-1]["end"] != self._slots:
            raise ValueError(f"Job(slots={self._slots}) in a job that farandole.init(slots={ranks[-1]['end']}) began")
        steps = [facts["step"] for facts in ranks]
        if max(steps) < 0:
            _compare(ranks, "model", place.rank)
            self._restore()
            steps = allgather_object(self.steps, "job.steps")
        _compare_last_step(max(steps), ranks)
        self._unverified = None
        leader = steps.index(max(steps))
        if self._is_fresh or min(steps) < max(steps):
            differed = self._state.share(leader, place.rank == leader)
            if differed and max(steps) == 0 and self._is_fresh:
                warnings.warn(
                    f"rank {place.rank} made other weights than rank {leader}, whose are taken: if that one is lost "
                    "before the first step, the result is another; seed torch alike before the model is made",
                    RuntimeWarning, stacklevel=2,
                )  # fmt: skip
        self._is_fresh = False
        self.stop_requested = self.stop_requested or any(facts["stops"] for facts in ranks)
        generation = {"size": place.size, **_platform()}
        self._chain.start(place.rank == 0, self.steps, generation)
        self._is_joined = True

    def _restore(self) -> None:
        """Loads the newest checkpoint that this rank can read, if there is one."""
        saved = None if self._checkpoints is None else self._checkpoints.newest()
        if saved is None:
            return
        for name, value in self._settings.items():
            if saved["settings"].get(name) != value:
                raise ValueError(
                    f"the checkpoint is of a job with {name}={saved['settings'].get(name)!r}, this one has {value!r}: "
                    "go on with the same, or choose another folder"
                )
        platform = _platform()
        if saved["platform"] != platform:
            warnings.warn(
                f"the checkpoint was written with {saved['platform']}, and this is {platform}: steps from here may "
                "have other bits than there", RuntimeWarning, stacklevel=2,
            )  # fmt: skip
        self._state.load(saved["state"])

    # Steps.

    def _run_until_epoch_ends(self, count: int) -> None:
        known = len(self.history)
        while len(self.history) == known and not self.stop_requested:
            self._recovering(functools.partial(self._step_after, self.steps))
            if self._leaves:
                self._leave()
            if self._changes:
                self._regroup()
            is_last = self.stop_requested or len(self.history) >= count
            if is_last or self.steps % self._checkpoint_steps == 0:
                self._recovering(self._verify)
                self._write_checkpoint(waits=is_last)

    def _step_after(self, steps: int) -> None:
        """The step after so many, unless this rank got it from another one after a loss, or that one has stopped."""
        if self.steps == steps and not self.stop_requested:
            self._step()

    def _step(self) -> None:
        """One step: the slots of this rank, the exchange, the update; then what ranks asked for."""
        self._run_slots()
        notes, present, integers, sums = self._exchange()
        if notes.is_late:
            self._gradients.be_patient()
            self._values.abandon()
            return self._step()
        self._update(present, integers, sums)
        self._final = max(self._final, notes.durable if self._checkpoints else self.steps - 2)
        self.stop_requested = bool(notes.stops) or notes.leaves == basics.topology().size  # it takes a checkpoint
        self._leaves = self._leaves and not self.stop_requested
        self._changes = bool(notes.leaves or notes.changes) and not self.stop_requested

    def _run_slots(self) -> None:
        assert self._function is not None
        slots = self._own_slots
        self._gradients.begin()
        self._values.begin()
        metrics: dict[str, float] = {}
        for part, batch in self._samples.batches(self.steps, slots):
            if part.passage == 0:
                if part.slot != slots[0]:
                    self._values.restore()
                self._gradients.begin_slot(part.slot == slots[-1])
            seed_generators(self._seed, "slot", *part)
            _add_metrics(metrics, self._function(batch))
            if part.passage == self._passages - 1:
                self._gradients.end_slot()
                self._values.keep(part.slot, metrics)
                metrics = {}

    def _exchange(self) -> tuple[Notes, list[int], list[int], torch.Tensor]:
        """Sums over all slots and ranks: what ranks note, which gradients there are, integers, metrics and buffers."""
        gradients, place = self._gradients, basics.topology()
        self._leaves = self._wants_leave  # a notice that comes from now on is for the next step
        notes = Notes(
            is_late=gradients.is_late,
            stops=self._wants_stop,
            leaves=self._leaves,
            changes=place.rank == 0 and farandole.change_is_due(),
            durable=self._checkpoints.last_step - 1 if self._checkpoints and place.rank == 0 else -1,
            names=_hash_of_names(self._values.names),
            digest=self._unverified.total if self._unverified else 0,
        )
        integers = self._values.integers()
        message = encode(notes, gradients.present, integers, self._values.total())
        gradients.wait([] if gradients.is_alone else [allreduce_async_(message, name="job.step", op=ops.Sum)])
        decoded = decode(message, place.size, len(gradients.present), len(integers))
        if not decoded[0].digest:
            self._name_difference()
        if not decoded[0].names:
            raise MismatchError(f"step {self.steps}: slots of different ranks returned metrics of different names")
        return decoded

    def _update(self, present: list[int], integers: list[int], sums: torch.Tensor) -> None:
        """Applies the step."""
        gradients, step = self._gradients, self.steps
        if not any(present):
            raise ValueError(f"step {step}: no parameter got a gradient: the step function must call backward()")
        gradients.assign(present, self._slots * self._passages)
        with torch.no_grad():
            metrics = self._values.apply(sums, integers, self._passages)
        self._unverified = StepDigests.of(step, [*gradients.results, sums])
        if self._clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        self._optimizer.step()
        for scheduler in self._schedulers:
            scheduler.step()
        self._advance(metrics)
        self._chain.append(step, self._unverified.line)

    def _verify(self) -> None:
        """Compares the results of the last step between ranks, where no other step follows that would."""
        place = basics.topology()
        if self._unverified is None or place.size == 1:
            return
        message = encode(Notes(0, 0, 0, 0, -1, 0, self._unverified.total), (), (), torch.empty(0, dtype=torch.float64))
        wait_for_all([allreduce_async_(message, name="job.digest", op=ops.Sum)])
        if not decode(message, place.size, 0, 0)[0].digest:
            self._name_difference()
        self._unverified = None

    def _advance(self, metrics: Mapping[str, float]) -> None:
        progress = self._state.progress
        progress["step"] += 1
        sums = progress["sums"]
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0.0) + value
        if progress["step"] % self._samples.steps_per_epoch == 0:
            progress["history"].append({name: sums[name] / self._samples.steps_per_epoch for name in sums})
            progress["sums"] = {}
            for scheduler in self._epoch_schedulers:
                scheduler.step()

    def _name_difference(self) -> None:
        """Raises MismatchError for a step whose results differ between ranks."""
        assert self._unverified is not None
        by_rank = allgather(self._unverified.tensors.view(1, -1), name="job.digests")
        error = self._unverified.name_difference(
            by_rank, self._names, lambda name: name if name == _VALUES else f'the gradient of "{name}"'
        )
        self._chain.write({"differs": str(error).rpartition(";")[0]})
        raise error

    # Checkpoints, signals.

    def _write_checkpoint(self, waits: bool) -> None:
        """On rank 0: copies the state, and begins to write it."""
        if self._checkpoints is None or basics.topology().rank != 0:
            return
        step = self.steps
        if step == self._checkpoints.last_step:
            return
        state = map_tree(self._state.tree(), lambda _, leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf)
        content = {"settings": self._settings, "platform": _platform(), "state": state}

        def note() -> None:
            hashes = {path: digest[:16] for path, digest in digests_of(state).items()}
            self._chain.write({"state": step, "sha256": digest_of_tree(state), "tensors": hashes})

        self._checkpoints.write(step, content, note)
        if waits:
            self._checkpoints.wait()
            self._final = self._checkpoints.last_step - 1

    def _close(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.wait()
        self._chain.close()
        self._gradients.abandon()

    @contextlib.contextmanager
    def _handled_signals(self) -> Iterator[None]:
        """Notes the signals that were asked for."""
        notes = SignalNotes(lambda number: self.leave() if self._signals[number] == _LEAVE else self.stop())
        notes.add(self._signals)
        try:
            yield
        finally:
            notes.close()


def _check_model(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters that get gradients. Raises ValueError for what a Job cannot train, by name."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind in ("DistributedDataParallel", "FullyShardedDataParallel", "SyncBatchNorm"):
            raise ValueError(f'the model has a {kind} ("{name}"), which communicates by itself: a Job does so')
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS evaluates a step as often as it likes: a Job runs each step once")
    if "_farandole" in optimizer.__dict__:
        raise ValueError("this optimizer is wrapped by DistributedOptimizer: give the Job the plain one")
    named = []
    for name, parameter in model.named_parameters():
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise ValueError(f'parameter "{name}" has no shape yet: run the model once before')
        if parameter.device.type != "cpu":
            raise ValueError(f'parameter "{name}" is on {parameter.device}: a Job trains on the CPU')
        if parameter.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f'parameter "{name}" is {parameter.dtype}; expected float32 or float64 (use torch.autocast in the step)'
            )
        if parameter.requires_grad:
            named.append((name, parameter))
    known = {id(parameter) for parameter in model.parameters()}
    if any(id(parameter) not in known for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError("the optimizer has parameters that the model has not")
    return named


def _as_list(schedulers: Any) -> list[Any]:
    found = list(schedulers) if isinstance(schedulers, Sequence) else [schedulers]
    for scheduler in found:
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ValueError("ReduceLROnPlateau needs a metric to step, which a Job does not choose")
    return found


def _add_metrics(sums: dict[str, float], result: Any) -> None:
    if result is None:
        return
    if not isinstance(result, Mapping):
        raise TypeError(f"the step function returned a {type(result).__name__}; expected a dictionary or None")
    for name, value in result.items():
        number = value.detach() if isinstance(value, torch.Tensor) else value
        sums[name] = sums.get(name, 0.0) + float(number)


def _platform() -> dict[str, str]:
    """What the bits of a result depend on besides the program."""
    return {"torch": str(torch.__version__), "cpu": torch.backends.cpu.get_cpu_capability()}  # a str, which loads again


def _compare_last_step(steps: int, ranks: Sequence[Mapping[str, Any]]) -> None:
    """What the next step would compare, where another generation comes before it."""
    digests = {rank: facts["digest"] for rank, facts in enumerate(ranks) if facts["step"] == steps and facts["digest"]}
    if len(set(digests.values())) > 1:
        alike = [[str(rank) for rank in digests if digests[rank] == one] for one in dict.fromkeys(digests.values())]
        groups = " | ".join(", ".join(group) for group in alike)
        raise MismatchError(f"step {steps - 1} had different results on different ranks; ranks alike: {groups}")


def _compare(ranks: Sequence[Mapping[str, Any]], kind: str, own: int) -> None:
    """Raises MismatchError for ranks that differ: on all; for a newcomer on that one, which leaves the others by it."""
    first = next((rank for rank, facts in enumerate(ranks) if facts["step"] >= 0), 0)
    mine = ranks[first][kind]
    for rank, facts in enumerate(ranks):
        is_newcomer = facts["step"] < 0 <= ranks[first]["step"]
        for name in {**mine, **facts[kind]} if rank == own or not is_newcomer else ():
            if facts[kind].get(name) != mine.get(name):
                raise MismatchError(
                    f"Job: {name} is {mine.get(name)!r} on rank {first} and {facts[kind].get(name)!r} on rank {rank}; "
                    "it is part of the result and must be the same"
                )


def _hash_of_names(names: Sequence[str]) -> int:
    """A number of 56 bits."""
    return int.from_bytes(hashlib.blake2b("\n".join(names).encode(), digest_size=7).digest(), "little")
