"""Evaluates a checkpoint of fashion_mnist.py on as many ranks as it is launched with.

    farandolerun -np 2 python examples/evaluation.py --checkpoint results/fashion_mnist.pt

Each rank takes every size()-th batch. The loss and the accuracy are those of a single process, to
the last bit: every batch is the same on any number of ranks, and their losses are summed in order.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

import checkpoint
import farandole.torch as hvd
from fashion_data import DATA_DIR, Part, forward, load, make_model

BATCH_SIZE = 500


class Figures(NamedTuple):
    """Means over a data set: the cross-entropy, and the share of images that were recognised."""

    loss: float
    accuracy: float


@torch.no_grad()
def evaluate(model: nn.Module, data: Part) -> Figures:
    """The figures over the whole set, without padding; the same on every rank."""
    model.eval()
    batches = list(zip(*(part.split(BATCH_SIZE) for part in data), strict=True))
    table = torch.zeros(len(batches), 2, dtype=torch.float64)  # summed loss, recognised images
    for i in range(hvd.rank(), len(batches), hvd.size()):
        images, labels = batches[i]
        scores = forward(model, images)
        losses = F.cross_entropy(scores, labels.long(), reduction="none")
        table[i, 0] = losses.double().sum()
        table[i, 1] = (scores.argmax(1) == labels).sum()
    # Each row was filled by one rank; to the others' zeros it adds exactly.
    loss, recognised = hvd.allreduce(table, op=hvd.Sum, name="figures").sum(0).tolist()
    return Figures(loss / len(data[1]), recognised / len(data[1]))


def use_cores_of_this_rank() -> None:
    """Shares the host's cores among its ranks."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // hvd.local_size()))


def main() -> int:
    """Prints one line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--checkpoint", type=pathlib.Path, default="results/fashion_mnist.pt")
    parser.add_argument("--data-dir", type=pathlib.Path, default=DATA_DIR)
    parser.add_argument("--limit", type=int, help="use only so many images")
    arguments = parser.parse_args()
    hvd.init()
    use_cores_of_this_rank()
    model = make_model()
    if hvd.rank() == 0:
        model.load_state_dict(checkpoint.load(arguments.checkpoint)["model"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    figures = evaluate(model, load(arguments.data_dir, "t10k", arguments.limit))
    if hvd.rank() == 0:
        print(f"loss={figures.loss!r} accuracy={figures.accuracy!r} ranks={hvd.size()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
