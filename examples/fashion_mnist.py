"""Trains a small convolutional network on Fashion-MNIST, on as many ranks as it is launched with.

    mpirun -np 2 python examples/fashion_mnist.py --epochs 2

What Farandole needs in a training script is marked with (1) to (4). The rest is plain PyTorch. The
data are read from Debian's package dataset-fashion-mnist. At the end every rank's parameters are
compared, and the last line says whether they are the same.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import pathlib
import struct
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DistributedSampler
from tqdm import tqdm

import farandole.torch as fl

DATA_DIR = pathlib.Path("/usr/share/datasets/fashion-mnist")
CLASSES = 10


def read_idx(path: pathlib.Path) -> torch.Tensor:
    """Reads a gzipped idx file of bytes.

    Returns:
        A uint8 tensor with the file's dimensions.
    Raises:
        ValueError: Not such a file, or cut short.
    """
    content = gzip.decompress(path.read_bytes())
    zeros, kind, dimensions = struct.unpack_from(">HBB", content)
    if zeros != 0 or kind != 8:
        raise ValueError(f"{path} is not an idx file of unsigned bytes")
    shape = struct.unpack_from(f">{dimensions}I", content, 4)
    values = torch.frombuffer(bytearray(content[4 + 4 * dimensions :]), dtype=torch.uint8)
    if values.numel() != torch.Size(shape).numel():
        raise ValueError(f"{path} announces shape {shape} but has {values.numel()} bytes")
    return values.reshape(shape)


def load(data_dir: pathlib.Path, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Images [n, 1, 28, 28] and labels [n], both uint8; ``part`` is "train" or "t10k"."""
    images = read_idx(data_dir / f"{part}-images-idx3-ubyte.gz")
    return images.unsqueeze(1), read_idx(data_dir / f"{part}-labels-idx1-ubyte.gz")


def make_model() -> nn.Module:
    """Two convolutions and two linear layers, 105,866 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, CLASSES),
    )  # fmt: skip


def forward(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Class scores [n, 10] of uint8 images."""
    return model((images.float() - 73.0) / 90.0)  # the training set's mean and deviation


def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: tuple[torch.Tensor, torch.Tensor],
    batches: BatchSampler,
    title: str,
) -> torch.Tensor:
    """One pass over this rank's share.

    Returns:
        The loss of every step, averaged over the ranks.
    """
    model.train()
    images, labels = data
    losses = []
    for indices in tqdm(batches, desc=title, disable=fl.rank() != 0, mininterval=1):
        chosen = torch.tensor(indices)
        loss = F.cross_entropy(forward(model, images[chosen]), labels[chosen].long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return fl.allreduce(torch.stack(losses), name="losses")


@torch.no_grad()
def evaluate(model: nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> float:
    """The accuracy over the whole set: every rank counts a share of its own, without padding."""
    model.eval()
    images, labels = (part[fl.rank() :: fl.size()] for part in data)
    correct = 0
    for i in range(0, len(images), 500):
        predicted = forward(model, images[i : i + 500]).argmax(1)
        correct += int((predicted == labels[i : i + 500]).sum())
    # (4) Sums of what the ranks counted.
    counts = fl.allreduce(torch.tensor([correct, len(images)]), op=fl.Sum, name="counts")
    return counts[0].item() / counts[1].item()


def digest(model: nn.Module) -> bytes:
    """SHA-256 over the bits of all parameters."""
    sha = hashlib.sha256()
    for name, parameter in model.named_parameters():
        sha.update(name.encode())
        sha.update(parameter.detach().cpu().contiguous().numpy().tobytes())
    return sha.digest()


def gather_digests(model: nn.Module) -> list[str]:
    """Every rank's digest, by rank, as hexadecimal text."""
    rows = torch.zeros(fl.size(), hashlib.sha256().digest_size, dtype=torch.uint8)
    rows[fl.rank()] = torch.frombuffer(bytearray(digest(model)), dtype=torch.uint8)
    return [bytes(row.tolist()).hex() for row in fl.allreduce(rows, op=fl.Sum, name="digests")]


def compare_replicas(model: nn.Module) -> tuple[str, list[str]]:
    """("identical" or "DIFFER", every rank's digest); the same answer on every rank."""
    digests = gather_digests(model)
    return ("identical" if len(set(digests)) == 1 else "DIFFER"), digests


def draw_loss_curve(losses: torch.Tensor, path: pathlib.Path) -> None:
    """Writes the loss of every step, and its running mean, as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    width = max(1, len(losses) // 50)
    mean = losses.unfold(0, width, 1).mean(1)
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(losses, alpha=0.3, label="each step, mean over ranks")
    axes.plot(range(width - 1, len(losses)), mean, label=f"mean of {width} steps")
    axes.set(xlabel="step", ylabel="cross-entropy", title=f"Fashion-MNIST on {fl.size()} ranks")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=0.03, help="of SGD with momentum 0.9")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data-dir", type=pathlib.Path, default=DATA_DIR)
    parser.add_argument("--loss-curve", type=pathlib.Path, default="results/fashion_mnist.png")
    return parser.parse_args()


def train(
    model: nn.Module, arguments: argparse.Namespace, data: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, float]:
    """Trains, and gives the losses and the images per second of all ranks together."""
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9)
    # (2) Everybody starts from rank 0's parameters.
    fl.broadcast_parameters(model.state_dict(), root_rank=0)
    # (3) Gradients are averaged in backward().
    optimizer = fl.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    sampler = DistributedSampler(
        data[1], num_replicas=fl.size(), rank=fl.rank(), seed=arguments.seed
    )
    batches = BatchSampler(sampler, arguments.batch_size, drop_last=True)
    losses = []
    begin = time.monotonic()
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        title = f"epoch {epoch + 1}/{arguments.epochs}"
        losses.append(train_epoch(model, optimizer, data, batches, title))
    images = arguments.epochs * len(batches) * arguments.batch_size * fl.size()
    return torch.cat(losses), images / (time.monotonic() - begin)


def main() -> int:
    """Trains and prints the result; 1 if the replicas differ."""
    arguments = parse_arguments()
    fl.init()  # (1)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // fl.local_size()))
    torch.manual_seed(arguments.seed + fl.rank())
    model = make_model()
    losses, images_per_s = train(model, arguments, load(arguments.data_dir, "train"))
    accuracy = evaluate(model, load(arguments.data_dir, "t10k"))
    verdict, digests = compare_replicas(model)
    if fl.rank() == 0:
        draw_loss_curve(losses, arguments.loss_curve)
        for rank, value in enumerate(digests):
            print(f"rank {rank}: sha256 {value}")
        print(
            f"accuracy={accuracy:.2f} images_per_s={images_per_s:.0f} "
            f"loss_curve={arguments.loss_curve} replicas={verdict}"
        )
    return int(verdict != "identical")


if __name__ == "__main__":
    sys.exit(main())
