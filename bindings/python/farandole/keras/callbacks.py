"""Callbacks of Keras, with the names and arguments of ``horovod.keras.callbacks``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from farandole import basics, ops
from farandole.basics import ProcessSet, global_process_set
from farandole.keras.functions import broadcast_variables, turn_off_xla
from farandole.keras.optimizer import Distributed

__all__ = [
    "BroadcastGlobalVariablesCallback", "LearningRateScheduleCallback", "LearningRateWarmupCallback",
    "MetricAverageCallback",
]  # fmt: skip


class _Callback(keras.callbacks.Callback):  # type: ignore[misc]
    """With TensorFlow it turns off XLA for models with a distributed optimizer."""

    def set_model(self, model: Any) -> None:
        """Keras calls it before it compiles the step."""
        super().set_model(model)
        if isinstance(getattr(model, "optimizer", None), Distributed):
            turn_off_xla(model)


class BroadcastGlobalVariablesCallback(_Callback):
    """Gives every rank the root's model and state of the optimizer before the first batch.

    With TensorFlow a model that has not been built, because it has no Input, has no variables then: it gets them after
    the first batch, as with Horovod. Seeds of layers such as Dropout stay each rank's own.

    Args:
        root_rank: Rank whose values win.
        device: Ignored; for compatibility with Horovod.
        process_set: The ranks that train together; the root is one of them.
    """

    def __init__(self, root_rank: int = 0, device: str = "", process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        del device
        self.root_rank, self._process_set, self._is_done = root_rank, process_set, False

    def on_train_begin(self, logs: Any = None) -> None:
        """In the first ``fit()``."""
        if not self._is_done and self._is_built_everywhere():
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """After the first one, of a model that was not built before."""
        if not self._is_done:
            self._broadcast()

    def _is_built_everywhere(self) -> bool:
        if keras.backend.backend() != "tensorflow":
            return True  # fit() has built it
        how = ops.reduction_options(ops.ALLREDUCE, ops.Min, 1.0, 1.0, self._process_set)
        return bool(ops.run(how, np.array(self.model.built), "model.built"))

    def _broadcast(self) -> None:
        optimizer = getattr(self.model, "optimizer", None)
        if optimizer is not None and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        variables = [*self.model.weights, *(optimizer.variables if optimizer is not None else ())]
        broadcast_variables(variables, self.root_rank, self._process_set)
        self._is_done = True


class MetricAverageCallback(_Callback):
    """Averages the metrics of an epoch over all ranks, for the callbacks after it, too.

    Args:
        device: Ignored; for compatibility with Horovod.
        process_set: The ranks that train together.
    """

    def __init__(self, device: str = "", process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        del device
        self._process_set = process_set

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """In ``logs``; MismatchError if ranks have different metrics."""
        if not logs:
            return
        names = sorted(logs)
        how = ops.reduction_options(ops.ALLREDUCE, ops.Average, 1.0, 1.0, self._process_set)
        values = [np.asarray(logs[name], np.float64) for name in names]
        core, flags = basics.current().core, ops.GROUP | ops.BLOCKS
        made = core.submit(how, values, "metrics", flags, labels=names)
        logs.update({name: value if value.ndim else float(value) for name, value in zip(names, made, strict=True)})


class LearningRateScheduleCallback(_Callback):
    """Sets the learning rate to ``initial_lr * multiplier(epoch)``, as Horovod does.

    Args:
        initial_lr: Usually that of one rank times the number of ranks.
        multiplier: A function of the epoch; or a number, of which the epoch is the exponent.
        start_epoch, end_epoch: From and before which epoch; None: to the end.
        staircase: Once at the start of an epoch; False: at each batch, with fractions of the epoch.
        momentum_correction: Scales the momenta of SGD and RMSprop as the learning rate, which they contain: Goyal et
            al., "Accurate, Large Minibatch SGD", 2017, section 3. Horovod changes the optimizer's factor for one batch
            instead, which compiled steps would not see; what is in the momenta is the same.
        steps_per_epoch: None: as many as Keras says.
    """

    def __init__(
        self, initial_lr: float, multiplier: Callable[[float], float] | float, start_epoch: int = 0,
        end_epoch: int | None = None, staircase: bool = True, momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if initial_lr is None:
            raise ValueError("initial_lr must be a number, not None")
        self.initial_lr, self.start_epoch, self.end_epoch = initial_lr, start_epoch, end_epoch
        self.staircase, self.momentum_correction, self.steps_per_epoch = staircase, momentum_correction, steps_per_epoch
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier**epoch
        self._epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """ValueError if the number of steps is needed and not known."""
        if self.staircase or self.steps_per_epoch:
            return
        self.steps_per_epoch = self.params.get("steps")
        if not self.steps_per_epoch:
            raise ValueError(f"{type(self).__name__}: Keras does not know the steps of an epoch; pass steps_per_epoch")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Notes the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Sets the learning rate of this batch."""
        if self._epoch < self.start_epoch or (self.end_epoch is not None and self._epoch >= self.end_epoch):
            return
        if not self.staircase:
            assert self.steps_per_epoch is not None
            self._adjust(self._epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._adjust(self._epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the learning rate to ``logs``, as Horovod does."""
        if logs is not None:
            logs["lr"] = self._learning_rate()

    def _learning_rate(self) -> float:
        return float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def _adjust(self, epoch: float) -> None:
        if hasattr(self.model, "jax_state_sync"):  # the step's own copies of the variables
            self.model.jax_state_sync()
        before, now = self._learning_rate(), self.initial_lr * self.multiplier(epoch)
        optimizer = self.model.optimizer
        optimizer.learning_rate = now
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if not self.momentum_correction or not getattr(inner, "momentum", 0) or before in (0, now):
            return
        for momentum in getattr(inner, "momentums", None) or getattr(inner, "_momentums", None) or ():
            if momentum is not None:
                momentum.assign(momentum * (now / before))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Lets the learning rate grow, batch by batch, from ``initial_lr / size()`` to ``initial_lr``.

    Args:
        initial_lr: That of after the warm-up: usually that of one rank times the number of ranks.
        warmup_epochs: In how many epochs.
        momentum_correction, steps_per_epoch: As above.
        verbose: 1: rank 0 says when it is done.
    """

    def __init__(
        self, initial_lr: float, warmup_epochs: int = 5, momentum_correction: bool = True,
        steps_per_epoch: int | None = None, verbose: int = 0,
    ) -> None:  # fmt: skip
        if not warmup_epochs > 0:
            raise ValueError(f"warmup_epochs must be above 0, not {warmup_epochs!r}")

        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch is not None
            size = basics.size()
            done = epoch + 1 / self.steps_per_epoch  # a round number at the end of an epoch
            return (done * (size - 1) / warmup_epochs + 1) / size

        super().__init__(initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """See above."""
        super().on_epoch_end(epoch, logs)
        if self.verbose and epoch + 1 == self.end_epoch and basics.rank() == 0:
            print(f"Epoch {epoch + 1}: finished gradual learning rate warmup to {self._learning_rate():g}.")
