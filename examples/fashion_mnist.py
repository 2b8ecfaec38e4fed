"""Trains a small convolutional network on Fashion-MNIST, on as many ranks as it is launched with.

    farandolerun -np 2 python examples/fashion_mnist.py --epochs 2

What Farandole needs in a training script is marked with (1) to (4). The rest is plain PyTorch. The
data are read from Debian's package dataset-fashion-mnist. At the end every rank's parameters are
compared, and the last line says whether they are the same.

With --checkpoint FILE rank 0 writes a checkpoint after every epoch; the same command with --resume
goes on from it, bit for bit as if it had never stopped.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import pathlib
import sys
import time
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DistributedSampler
from tqdm import tqdm

import checkpoint
import farandole.torch as hvd
from checkpoint import Training
from evaluation import evaluate, use_cores_of_this_rank
from fashion_data import DATA_DIR, Part, forward, load, make_model
from reporting import Scalars, draw_loss_curve

SETTINGS = (
    "batch_size", "accumulate", "lr", "warmup_epochs", "compression", "adasum", "seed", "limit",
)  # fmt: skip


class Schedule:
    """Which images a rank sees: steps of ``accumulate`` batches. What is left over is dropped."""

    def __init__(self, arguments: argparse.Namespace, images: int) -> None:
        self._sampler = DistributedSampler(
            range(images), num_replicas=hvd.size(), rank=hvd.rank(), seed=arguments.seed
        )
        self._batches = BatchSampler(self._sampler, arguments.batch_size, drop_last=True)
        self._accumulate = arguments.accumulate
        self.steps = len(self._batches) // arguments.accumulate
        if self.steps == 0:
            raise ValueError(
                f"{images} images are not enough for one step: {hvd.size()} ranks take "
                f"{arguments.accumulate} batches of {arguments.batch_size} each"
            )

    def epoch(self, epoch: int, first_step: int) -> Iterator[list[torch.Tensor]]:
        """The indices of each step's batches, from ``first_step`` of that epoch on."""
        self._sampler.set_epoch(epoch)
        batches = [torch.tensor(indices) for indices in self._batches]
        for step in range(first_step, self.steps):
            yield batches[step * self._accumulate : (step + 1) * self._accumulate]


def warmed_up(step: int, steps: int, factor: float) -> float:
    """By what the learning rate is multiplied: rises evenly from 1 to ``factor`` in ``steps``.

    Source: Goyal et al., "Accurate, large minibatch SGD: training ImageNet in 1 hour", 2017,
    arXiv:1706.02677, section 2.2.
    """
    return factor if step >= steps else 1 + (factor - 1) * step / steps


def prepare(arguments: argparse.Namespace, steps_per_epoch: int) -> Training:
    """The model, its optimizer and the schedule of its learning rate."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9)
    # (2) Everybody starts from rank 0's parameters.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    # (3) Gradients are averaged in backward().
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=getattr(hvd.Compression, arguments.compression),
        backward_passes_per_step=arguments.accumulate,
        op=hvd.Adasum if arguments.adasum else hvd.Average,
    )
    # As many times more images per step allow for as many times the learning rate, in the end; Adasum
    # does that by itself, where the ranks' gradients point in different directions.
    rate = functools.partial(
        warmed_up,
        steps=round(arguments.warmup_epochs * steps_per_epoch),
        factor=arguments.accumulate * (1 if arguments.adasum else hvd.size()),
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    settings = {name: getattr(arguments, name) for name in SETTINGS} | {"ranks": hvd.size()}
    return Training(model, optimizer, scheduler, settings)


def take_step(training: Training, data: Part, batches: list[torch.Tensor]) -> torch.Tensor:
    """One step of the optimizer; the mean loss over this rank's batches."""
    images, labels = data
    total = torch.zeros(())
    training.optimizer.zero_grad()
    for chosen in batches:
        scores = forward(training.model, images[chosen])
        loss = F.cross_entropy(scores, labels[chosen].long()) / len(batches)
        loss.backward()
        total += loss.detach()
    training.optimizer.step()
    training.scheduler.step()
    training.step += 1
    return total


class Loop:
    """Takes ``training`` from where it stands to the end."""

    def __init__(
        self, training: Training, data: Part, schedule: Schedule, arguments: argparse.Namespace
    ) -> None:
        self._training = training
        self._data = data
        self._schedule = schedule
        self._arguments = arguments
        self._losses: list[torch.Tensor] = []
        self._scalars = Scalars(arguments.tensorboard, len(training.losses))
        self.images = 0  # of all ranks, in this run

    def run(self) -> bool:
        """False if the job is to stop before the end."""
        self._training.model.train()
        while self._training.epoch < self._arguments.epochs:
            if not self._run_epoch():
                return False
            self._training.epoch, self._training.step = self._training.epoch + 1, 0
            self._save()
        self._scalars.close()
        return True

    def _run_epoch(self) -> bool:
        arguments, training, schedule = self._arguments, self._training, self._schedule
        progress = tqdm(
            schedule.epoch(training.epoch, training.step), total=schedule.steps,
            initial=training.step, desc=f"epoch {training.epoch + 1}/{arguments.epochs}",
            disable=hvd.rank() != 0, mininterval=1,
        )  # fmt: skip
        for batches in progress:
            self._losses.append(take_step(training, self._data, batches))
            self.images += len(batches) * arguments.batch_size * hvd.size()
            if training.step % (arguments.checkpoint_every or schedule.steps) == 0:
                self._settle()
                if training.step < schedule.steps:
                    self._save()
            if arguments.stop_after == len(training.losses) + len(self._losses):
                return False
        self._settle()
        return True

    def _save(self) -> None:
        if self._arguments.checkpoint:
            checkpoint.save(self._training, self._arguments.checkpoint)

    def _settle(self) -> None:
        """Averages the losses that have not been yet."""
        if not self._losses:
            return
        mean = hvd.allreduce(torch.stack(self._losses), name="losses")
        self._losses.clear()
        self._scalars.add("train/loss", mean, len(self._training.losses))
        self._training.losses = torch.cat([self._training.losses, mean])
        rate = self._training.scheduler.get_last_lr()[0]
        self._scalars.add("train/learning_rate", rate, len(self._training.losses) - 1)


def digest(model: nn.Module) -> bytes:
    """SHA-256 over the bits of all parameters."""
    sha = hashlib.sha256()
    for name, parameter in model.named_parameters():
        sha.update(name.encode())
        sha.update(parameter.detach().cpu().contiguous().numpy().tobytes())
    return sha.digest()


def compare_replicas(model: nn.Module) -> tuple[str, list[str]]:
    """("identical" or "DIFFER", every rank's digest, by rank); the same answer on every rank."""
    # (4) Whatever the ranks have to tell each other.
    digests = [one.hex() for one in hvd.allgather_object(digest(model), name="digests")]
    return ("identical" if len(set(digests)) == 1 else "DIFFER"), digests


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--epochs", type=int, default=2)
    add("--batch-size", type=int, default=64, help="images per rank and backward pass")
    add("--accumulate", type=int, default=1, help="backward passes per step")
    add("--lr", type=float, default=0.015, help="of SGD with momentum 0.9; with --accumulate K on "
        "N ranks it rises to N * K times as much")  # fmt: skip
    add("--warmup-epochs", type=float, default=0.5, help="how long it rises")
    add("--compression", choices=["none", "fp16", "bf16"], default="none", help="of gradients")
    add("--adasum", action="store_true", help="combine gradients by Adasum, do not average them")
    add("--seed", type=int, default=1)
    add("--checkpoint", type=pathlib.Path, help="written after every epoch, by rank 0")
    add("--checkpoint-every", type=int, default=0, help="and after so many steps of an epoch")
    add("--resume", action="store_true", help="go on from --checkpoint")
    add("--stop-after", type=int, help="end after so many steps, as if the machine were taken away")
    add("--data-dir", type=pathlib.Path, default=DATA_DIR)
    add("--limit", type=int, help="use only so many images")
    add("--smoke", action="store_true", help="one epoch of 2000 images, to see that it works")
    add("--loss-curve", type=pathlib.Path, default="results/fashion_mnist.png")
    add("--tensorboard", type=pathlib.Path, help="folder for scalars, if TensorBoard is installed")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.epochs, arguments.limit = 1, 2000
    if arguments.resume and not arguments.checkpoint:
        parser.error("--resume needs --checkpoint FILE")
    for name in ("epochs", "batch_size", "accumulate"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return arguments


def report(training: Training, images_per_s: float, arguments: argparse.Namespace) -> bool:
    """Evaluates the model and prints the result. Returns whether the replicas are the same."""
    figures = evaluate(training.model, load(arguments.data_dir, "t10k", arguments.limit))
    outcome, digests = compare_replicas(training.model)
    if hvd.rank() == 0:
        draw_loss_curve(training.losses, arguments.loss_curve)
        for rank, value in enumerate(digests):
            print(f"rank {rank}: sha256 {value}")
        print(
            f"accuracy={figures.accuracy:.2f} images_per_s={images_per_s:.0f} "
            f"loss_curve={arguments.loss_curve} replicas={outcome}"
        )
    return outcome == "identical"


def main() -> int:
    """Trains and prints the result; 1 if the replicas differ."""
    arguments = parse_arguments()
    hvd.init()  # (1)
    use_cores_of_this_rank()
    torch.manual_seed(arguments.seed + hvd.rank())
    data = load(arguments.data_dir, "train", arguments.limit)
    schedule = Schedule(arguments, len(data[1]))
    training = prepare(arguments, schedule.steps)
    if arguments.resume:
        checkpoint.resume(training, arguments.checkpoint)
    loop = Loop(training, data, schedule, arguments)
    begin = time.monotonic()
    if not loop.run():
        return 0
    images_per_s = loop.images / (time.monotonic() - begin)
    return int(not report(training, images_per_s, arguments))


if __name__ == "__main__":
    sys.exit(main())
