"""Checkpoints from which a job on N ranks goes on as if it had never stopped.

Rank 0 writes and reads the file. Model and optimizer are the same on all ranks; what differs is
each rank's random generator, so all of them are gathered into the file.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Any

import torch
from torch import nn

import farandole.torch as hvd


@dataclasses.dataclass
class Training:
    """All that changes while a model is trained.

    Attributes:
        settings: What must be the same when the job goes on, by name of the argument.
        epoch: Epochs that are complete.
        step: Steps of the optimizer taken in the epoch after these.
        losses: Of every step so far, or of every epoch, averaged over the ranks.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR
    settings: dict[str, Any]
    epoch: int = 0
    step: int = 0
    losses: torch.Tensor = dataclasses.field(default_factory=lambda: torch.zeros(0))


def save(training: Training, path: pathlib.Path) -> None:
    """Writes a checkpoint; every rank calls it. ``path`` has the old one or the new one, whole."""
    generators = hvd.allgather(torch.get_rng_state().unsqueeze(0), name="generators")
    if hvd.rank() != 0:
        return
    content = {
        "model": training.model.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "progress": {
            "scheduler": training.scheduler.state_dict(),
            "settings": training.settings,
            "epoch": training.epoch,
            "step": training.step,
            "losses": training.losses.tolist(),
        },
        "generators": generators,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def load(path: pathlib.Path) -> dict[str, Any]:
    """What ``save`` wrote: "model", "optimizer", "progress", "generators"."""
    content: dict[str, Any] = torch.load(path, weights_only=True)
    return content


def resume(training: Training, path: pathlib.Path) -> None:
    """Brings ``training`` and this rank's generator to where they were; every rank calls it.

    Raises:
        ValueError: On every rank: the checkpoint was written by a job with other settings.
    """
    content = load(path) if hvd.rank() == 0 else {}
    progress = hvd.broadcast_object(content.get("progress"), name="progress")
    _compare(progress["settings"], training.settings, path)
    if hvd.rank() == 0:
        training.model.load_state_dict(content["model"])
        training.optimizer.load_state_dict(content["optimizer"])
    hvd.broadcast_parameters(training.model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(training.optimizer, root_rank=0)
    training.scheduler.load_state_dict(progress["scheduler"])
    training.epoch, training.step = progress["epoch"], progress["step"]
    training.losses = torch.tensor(progress["losses"])
    mine = torch.get_rng_state()
    generators = content.get("generators", torch.empty(hvd.size(), len(mine), dtype=mine.dtype))
    hvd.broadcast_(generators, 0, name="generators")
    # A copy: torch 2.13 reads past the end of a tensor that is part of a larger one.
    torch.set_rng_state(generators[hvd.rank()].clone())


def _compare(then: dict[str, Any], now: dict[str, Any], path: pathlib.Path) -> None:
    for name, value in now.items():
        if then.get(name) != value:
            raise ValueError(
                f"{path} was written with {name} = {then.get(name)}; this job has {name} = {value}"
            )
