"""Fashion-MNIST as Debian's package dataset-fashion-mnist has it, and a small network for it."""

from __future__ import annotations

import gzip
import pathlib
import struct

import torch
from torch import nn

DATA_DIR = pathlib.Path("/usr/share/datasets/fashion-mnist")
CLASSES = 10

Part = tuple[torch.Tensor, torch.Tensor]
"""Images [n, 1, 28, 28] and labels [n], both uint8."""


def read_idx(path: pathlib.Path, limit: int | None = None) -> torch.Tensor:
    """Reads the first ``limit`` (None: all) items of a gzipped idx file of bytes.

    Returns:
        A uint8 tensor with the file's dimensions.
    Raises:
        ValueError: Not such a file, or cut short.
    """
    with gzip.open(path) as file:
        zeros, kind, dimensions = struct.unpack(">HBB", file.read(4))
        if zeros != 0 or kind != 8:
            raise ValueError(f"{path} is not an idx file of unsigned bytes")
        shape = list(struct.unpack(f">{dimensions}I", file.read(4 * dimensions)))
        if limit is not None:
            shape[0] = min(shape[0], limit)
        values = torch.frombuffer(bytearray(file.read(torch.Size(shape).numel())), dtype=torch.uint8)
    if values.numel() != torch.Size(shape).numel():
        raise ValueError(f"{path} announces shape {shape} but has {values.numel()} bytes")
    return values.reshape(shape)


def load(data_dir: pathlib.Path, part: str, limit: int | None = None) -> Part:
    """The first ``limit`` (None: all) images and labels of ``part``, which is "train" or "t10k"."""
    images = read_idx(data_dir / f"{part}-images-idx3-ubyte.gz", limit).unsqueeze(1)
    labels = read_idx(data_dir / f"{part}-labels-idx1-ubyte.gz", limit)
    return images, labels


def make_model() -> nn.Module:
    """Two convolutions and two linear layers, 105,866 parameters; a little dropout."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 7 * 7, 64), nn.ReLU(), nn.Dropout(0.1),
        nn.Linear(64, CLASSES),
    )  # fmt: skip


def forward(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Class scores [n, 10] of uint8 images."""
    return model((images.float() - 73.0) / 90.0)  # the training set's mean and deviation
