"""A training by farandole.torch.Job, which each rank of any launcher runs: prints the digest of the weights.

Arguments: a model of MODELS, the folder of checkpoints, and as ``name=value``: ``epochs``, ``workers``, and in which
step what happens to a rank, such as ``die0=3``: see harm().
"""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import farandole
import farandole.torch as fl
from farandole.torch.job._slots import SlotGradients

SLOTS, SAMPLES, CLASSES = 8, 200, 5


class Transformer(nn.Module):
    """Two layers over 6 tokens."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.embedding, self.layers = nn.Embedding(20, 16), nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.head(self.layers(self.embedding(tokens.long())).mean(1))


class Varying(nn.Module):
    """Which of its layers are used, how often and whether twice, depends on the batch; one never is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(36, 36) for _ in range(3))
        self.head, self.unused = nn.Linear(36, CLASSES), nn.Linear(2, 2)
        self.register_buffer("mask", torch.full([36], torch.finfo(torch.float32).min))

    def forward(self, inputs: torch.Tensor) -> Any:
        inputs = inputs.flatten(1)
        hidden = (self.first if inputs[0, 0] > 0 else self.second)(inputs)
        hidden = torch.maximum(hidden, self.mask)
        return self.head(self.third(hidden) if inputs[0, 1] > 0.5 else hidden)


MODELS = {
    "conv": lambda: nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(128, CLASSES)
    ),
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 300), nn.Tanh(), nn.Linear(300, CLASSES)),
    "transformer": Transformer,
    "varying": Varying,
}


def make(name: str, folder: str | None, **arguments: Any) -> fl.Job:
    """A Job with its step function."""
    model: nn.Module = MODELS[name]()
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(SAMPLES, 1, 6, 6, generator=generator)
    if name == "transformer":
        inputs = torch.randint(0, 20, (SAMPLES, 6), generator=generator)
    targets = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
    schedulers = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-2, 100)
    if name == "mlp":
        arguments |= {"accumulate": 2, "clip_norm": 0.5}
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        arguments["epoch_schedulers"] = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2])
    else:
        arguments["schedulers"] = schedulers
    job = fl.Job(
        model, optimizer, TensorDataset(inputs, targets), slots=SLOTS, batch_size=4, seed=3, checkpoint=folder,
        checkpoint_steps=4, **arguments,
    )  # fmt: skip

    @job.step
    def train(batch: Any) -> dict[str, torch.Tensor]:
        with torch.autocast("cpu", enabled=name == "transformer"):
            scores = model(batch[0])
            loss = nn.functional.cross_entropy(scores.float(), batch[1])
        loss.backward(retain_graph=name == "varying")
        if name == "varying" and batch[1][0] == 0:
            (loss * 0.5).backward()
        return {"loss": loss.detach(), "right": (scores.argmax(1) == batch[1]).float().mean()}

    return job


def harm(job: fl.Job, what: str, at: int) -> None:
    """In a step of this rank: it dies, gets SIGTERM before or after it has told the others what it wants, waits for a
    newcomer, or a bit of what it has received flips."""
    function, wait = job._function, SlotGradients.wait

    def run(batch: Any) -> Any:
        if job.steps == at and what == "die":
            os._exit(9)
        if job.steps == at and what == "term":
            os.kill(os.getpid(), signal.SIGTERM)
        while job.steps == at and what == "wait" and not farandole.change_is_due():
            time.sleep(0.05)
        return function(batch)  # type: ignore[misc]

    def wait_and_flip(gradients: SlotGradients, *others: Any) -> None:
        wait(gradients, *others)
        if job.steps == at and what == "notice":
            os.kill(os.getpid(), signal.SIGTERM)
        if job.steps == at and what == "flip":
            gradients._result.views[1].view(torch.int32).view(-1)[3] ^= 1 << 20

    job.step(run)
    SlotGradients.wait = wait_and_flip  # type: ignore[method-assign]


def main(name: str, folder: str, *words: str) -> None:
    """Trains, and prints a line."""
    options = dict(word.split("=") for word in words)
    torch.manual_seed(5)
    job = make(name, folder or None, workers=int(options.get("workers", 0)))
    for what in ("die", "term", "notice", "wait", "flip"):
        step = options.get(f"{what}{os.environ.get('RANK')}")
        if step is not None:
            harm(job, what, int(step))
    if f"wait{farandole.rank()}" in options:
        pathlib.Path(folder, "members").write_text(farandole.members())
    for epoch in job.epochs(int(options.get("epochs", 2))):
        assert epoch.metrics.keys() == {"loss", "right"}
    print("steps", job.steps, "stopped", job.stop_requested, "losses", [e["loss"] for e in job.history], job.digest())


if __name__ == "__main__":
    main(*sys.argv[1:])
