"""Trains a network on Fashion-MNIST while its ranks are killed. The weights are those of an undisturbed training.

    farandolerun -np 4 --elastic python examples/uninterrupted.py --folder results/killed --kill-every 3
    python examples/uninterrupted.py --folder results/calm
    farandole verify results/killed results/calm

Each rank ends with a line with the SHA-256 of the weights, which is one for all runs and any number of ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import signal
import threading

import torch
from torch import nn
from torch.utils.data import TensorDataset

import farandole
import farandole.torch as fl
from fashion_data import CLASSES, DATA_DIR, load

SLOTS = 8


def make_model() -> nn.Module:
    """With what is hard to repeat: batch normalisation and dropout."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(32 * 7 * 7, CLASSES),
    )  # fmt: skip


def die_sometime(mean_s: float) -> None:
    """Kills this process, without a chance to clean up, after a random time."""
    timer = threading.Timer(random.Random().expovariate(1 / mean_s), os.kill, [os.getpid(), signal.SIGKILL])
    timer.daemon = True
    timer.start()


def generations(folder: pathlib.Path) -> str:
    """In which steps the ranks became how many, as the chain of hashes tells."""
    lines = [json.loads(text) for text in (folder / "chain.jsonl").read_text().splitlines() if "next_step" in text]
    return ", ".join(f"{line['generation']['size']} from step {line['next_step']}" for line in lines)


def main() -> None:
    """Prints a line per epoch, and the digest."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("results/uninterrupted"))
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--images", type=int, default=6000, help="of the training set")
    parser.add_argument("--data", type=pathlib.Path, default=DATA_DIR)
    parser.add_argument("--kill-every", type=float, default=0, help="seconds between two deaths, on average; 0: none")
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    images, labels = load(given.data, "train", given.images)
    job = fl.Job(
        model, optimizer, TensorDataset(images, labels), slots=SLOTS, batch_size=16, seed=given.seed,
        schedulers=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, given.epochs * len(images) // (SLOTS * 16)),
        checkpoint=given.folder, checkpoint_steps=20,
    )  # fmt: skip
    if given.kill_every:
        die_sometime(given.kill_every * farandole.size())

    @job.step
    def train(batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        scores = model((batch[0].float() - 73.0) / 90.0)
        loss = nn.functional.cross_entropy(scores, batch[1].long())
        loss.backward()
        return {"loss": loss, "accuracy": (scores.argmax(1) == batch[1]).float().mean()}

    for epoch in job.epochs(given.epochs):
        if farandole.rank() == 0:
            print(f"epoch {epoch.number}: " + ", ".join(f"{k} {v:.4f}" for k, v in epoch.metrics.items()), flush=True)
    if farandole.rank() == 0:
        print("ranks:", generations(given.folder))
    print(f"weights {job.digest()} after {job.steps} steps", flush=True)


if __name__ == "__main__":
    main()
