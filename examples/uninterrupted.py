"""Trains a network on Fashion-MNIST while its ranks are killed. The weights are those of an undisturbed training.

    farandolerun -np 4 --elastic python examples/uninterrupted.py --folder results/killed --kill-every 3
    python examples/uninterrupted.py --folder results/calm
    farandole verify results/killed results/calm
    python examples/uninterrupted.py --draw results/calm results/killed --picture results/uninterrupted.svg

Each rank ends with a line with the SHA-256 of the weights, which is one for all runs and any number of ranks. The
picture (it takes matplotlib) has the loss of both runs, and when ranks were lost and came back.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import signal
import threading
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import farandole
import farandole.torch as fl
from fashion_data import CLASSES, DATA_DIR, load
from reporting import draw_generations

SLOTS = 8


def make_convolutions() -> nn.Module:
    """With what is hard to repeat: batch normalisation and dropout."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(32 * 7 * 7, CLASSES),
    )  # fmt: skip


def make_perceptron() -> nn.Module:
    """Three linear layers."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(28 * 28, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, CLASSES)
    )  # fmt: skip


class Transformer(nn.Module):
    """An encoder of two layers over the rows of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.classes = nn.Linear(28, 32), nn.Linear(32, CLASSES)
        self.positions = nn.Parameter(torch.randn(28, 32) / 8)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        rows = self.embedding(images.squeeze(1)) + self.positions
        return self.classes(self.encoder(rows).mean(1))


MODELS = {"conv": make_convolutions, "mlp": make_perceptron, "transformer": Transformer}


def die_sometime(mean_s: float) -> None:
    """Kills this process, without a chance to clean up, after a random time."""
    timer = threading.Timer(random.Random().expovariate(1 / mean_s), os.kill, [os.getpid(), signal.SIGKILL])
    timer.daemon = True
    timer.start()


def generations(folder: pathlib.Path) -> list[tuple[int, int]]:
    """From which step on there were how many ranks, as the chain of hashes tells."""
    lines = [json.loads(text) for text in (folder / "chain.jsonl").read_text().splitlines() if "next_step" in text]
    return [(line["next_step"], line["generation"]["size"]) for line in lines]


def progress(folder: pathlib.Path) -> Any:
    """How many steps there were, and the metrics of each epoch, as the newest checkpoint has it."""
    return torch.load(max(folder.glob("step-*.pt")), weights_only=True)["state"]["progress"]


def main() -> None:
    """Prints a line per epoch, and the digest."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("results/uninterrupted"))
    parser.add_argument("--model", choices=MODELS, default="conv")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--images", type=int, default=6000, help="of the training set")
    parser.add_argument("--batch-size", type=int, default=16, help="of each of the 8 slots")
    parser.add_argument("--data", type=pathlib.Path, default=DATA_DIR)
    parser.add_argument("--pause", type=float, default=0, help="seconds after each batch, to see something")
    parser.add_argument("--kill-every", type=float, default=0, help="seconds between two deaths, on average; 0: none")
    parser.add_argument("--draw", type=pathlib.Path, nargs=2, metavar=("CALM", "KILLED"), help="draw these two runs")
    parser.add_argument("--picture", type=pathlib.Path, default=pathlib.Path("results/uninterrupted.svg"))
    given = parser.parse_args()
    if given.draw:
        draw(*given.draw, given.picture)
    else:
        train(given)


def draw(calm: pathlib.Path, killed: pathlib.Path, picture: pathlib.Path) -> None:
    """Writes the losses of two runs, and the ranks of the second, as a picture."""
    losses = [[epoch["loss"] for epoch in progress(folder)["history"]] for folder in (calm, killed)]
    draw_generations(*losses, generations(killed), progress(killed)["step"], picture)


def train(given: argparse.Namespace) -> None:
    torch.manual_seed(given.seed)
    model = MODELS[given.model]()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    images, labels = load(given.data, "train", given.images)
    steps = given.epochs * (len(images) // (SLOTS * given.batch_size))
    job = fl.Job(
        model, optimizer, TensorDataset(images, labels), slots=SLOTS, batch_size=given.batch_size, seed=given.seed,
        schedulers=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps), checkpoint=given.folder,
        checkpoint_steps=20,
    )  # fmt: skip
    if given.kill_every:
        die_sometime(given.kill_every * farandole.size())

    @job.step
    def step(batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        scores = model((batch[0].float() - 73.0) / 90.0)
        loss = nn.functional.cross_entropy(scores, batch[1].long())
        loss.backward()
        time.sleep(given.pause)
        return {"loss": loss, "accuracy": (scores.argmax(1) == batch[1]).float().mean()}

    for epoch in job.epochs(given.epochs):
        if farandole.rank() == 0:
            print(f"epoch {epoch.number}: " + ", ".join(f"{k} {v:.4f}" for k, v in epoch.metrics.items()), flush=True)
    if farandole.rank() == 0:
        print("ranks:", ", ".join(f"{size} from step {step}" for step, size in generations(given.folder)))
    print(f"weights {job.digest()} after {job.steps} steps", flush=True)


if __name__ == "__main__":
    main()
