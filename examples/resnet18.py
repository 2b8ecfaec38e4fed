"""Trains ResNet-18 on Fashion-MNIST, as images of 3 x 32 x 32: a complete recipe for N ranks.

    farandolerun -np 2 python examples/resnet18.py
    farandolerun -np 2 python examples/resnet18.py --resume
    farandolerun -np 2 python examples/resnet18.py --config my.yaml epochs=3 lr=0.1

The settings come from a YAML file; those after the options overrule it. The learning rate rises
during the first epochs to N times that of one rank, and falls at given epochs; gradients travel in 16
bits; batch norm sees all ranks' batches; after each epoch the ranks share out the evaluation, and
rank 0 writes a checkpoint, from which --resume goes on bit for bit. Scalars go to TensorBoard if it
is installed. Ranks use a GPU each where there are any.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
import sys
import time
from collections.abc import Iterable
from typing import Any

import torch
import yaml
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

import checkpoint
import farandole.torch as hvd
from evaluation import use_cores_of_this_rank
from fashion_data import CLASSES, DATA_DIR, load
from reporting import Scalars
from resnet_model import make_resnet18

CONFIG = pathlib.Path(__file__).with_suffix(".yaml")
SMOKE = {"epochs": 2, "batch_size": 16, "width": 8, "warmup_epochs": 1.0, "milestones": [1],
         "train_images": 320, "test_images": 101}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the YAML file may hold.

    Attributes:
        batch_size: Images per rank and step.
        lr: Learning rate of one rank.
        warmup_epochs: How long it rises to N times as much.
        milestones: Epochs before which it is divided by 10.
        compression: Of gradients: none, fp16 or bf16.
        width: Channels of the network's first stage.
        train_images: Use only so many; 0: all. Likewise test_images.
        output: Folder of the checkpoint and the scalars.
    """

    epochs: int = 30
    batch_size: int = 128
    lr: float = 0.05
    warmup_epochs: float = 5.0
    milestones: list[int] = dataclasses.field(default_factory=lambda: [15, 22, 27])
    momentum: float = 0.9
    weight_decay: float = 5e-4
    compression: str = "fp16"
    sync_batch_norm: bool = True
    width: int = 64
    seed: int = 1
    train_images: int = 0
    test_images: int = 0
    output: str = "results/resnet18"


def read_settings(path: pathlib.Path, smoke: bool, assignments: Iterable[str]) -> Settings:
    """The file's settings, then those of a smoke test, then ``key=value`` assignments.

    Raises:
        ValueError: There is no such setting, or its value is of another type.
    """
    given: dict[str, Any] = yaml.safe_load(path.read_text()) or {}
    given |= SMOKE if smoke else {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals:
            raise ValueError(f"expected key=value, got {assignment!r}")
        given[key] = yaml.safe_load(value)
    defaults = dataclasses.asdict(Settings())
    for key, value in given.items():
        if key not in defaults:
            raise ValueError(f"there is no setting {key}; known: {', '.join(defaults)}")
        wanted = type(defaults[key])
        if wanted is float and type(value) is int:
            given[key] = float(value)
        elif type(value) is not wanted:
            raise ValueError(f"{key} must be of type {wanted.__name__}, not {value!r}")
    return Settings(**given)


def learning_rate_factor(step: int, steps_per_epoch: int, settings: Settings, ranks: int) -> float:
    """What the learning rate of one rank is multiplied by: rises evenly to ``ranks``, then falls.

    Source: Goyal et al., "Accurate, large minibatch SGD: training ImageNet in 1 hour", 2017,
    arXiv:1706.02677, sections 2.1 and 2.2.
    """
    epoch = step / steps_per_epoch
    if epoch < settings.warmup_epochs:
        return 1 + (ranks - 1) * epoch / settings.warmup_epochs
    return ranks * 0.1 ** sum(epoch >= milestone for milestone in settings.milestones)


def to_network(images: torch.Tensor, is_training: bool) -> torch.Tensor:
    """Floats [n, 3, 32, 32] of bytes [n, 1, 28, 28]; in training shifted by up to 4, and mirrored."""
    values = (images.float() - 73.0) / 90.0  # the training set's mean and deviation
    values = F.pad(values, [2, 2, 2, 2], value=-73.0 / 90.0)
    if is_training:
        values = torch.stack([_varied(image) for image in values])
    return values.expand(-1, 3, -1, -1)


def _varied(image: torch.Tensor) -> torch.Tensor:
    down, right, mirrored = torch.randint(-4, 5, (3,)).tolist()
    image = image.roll((down, right), (1, 2))
    return image.flip(2) if mirrored > 0 else image


def measure(model: nn.Module, batch: list[torch.Tensor]) -> tuple[dict[str, torch.Tensor], int]:
    """Means over a batch, and the number of its images."""
    images, labels = batch
    device = next(model.parameters()).device
    scores = model(to_network(images, model.training).to(device))
    labels = labels.long().to(device)
    right = (scores.argmax(1) == labels).float().mean()
    return {"loss": F.cross_entropy(scores, labels), "accuracy": right}, len(labels)


class Recipe:
    """The training job of one rank."""

    def __init__(self, settings: Settings, data_dir: pathlib.Path, device: torch.device) -> None:
        self.settings = settings
        train = TensorDataset(*load(data_dir, "train", settings.train_images or None))
        test = TensorDataset(*load(data_dir, "t10k", settings.test_images or None))
        self._sampler = DistributedSampler(
            train, num_replicas=hvd.size(), rank=hvd.rank(), seed=settings.seed
        )
        self._train = DataLoader(train, settings.batch_size, sampler=self._sampler, drop_last=True)
        own_part = Subset(test, range(hvd.rank(), len(test), hvd.size()))  # each image on one rank
        self._test = DataLoader(own_part, batch_size=250)
        self.training = self._prepare(device)

    def _prepare(self, device: torch.device) -> checkpoint.Training:
        settings = self.settings
        model: nn.Module = make_resnet18(CLASSES, settings.width).to(device)
        if settings.sync_batch_norm:
            model = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
        optimizer = torch.optim.SGD(
            model.parameters(), lr=settings.lr, momentum=settings.momentum,
            weight_decay=settings.weight_decay,
        )  # fmt: skip
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            compression=getattr(hvd.Compression, settings.compression),
        )
        factor = functools.partial(
            learning_rate_factor,
            steps_per_epoch=len(self._train), settings=settings, ranks=hvd.size(),
        )  # fmt: skip
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        fixed = dataclasses.asdict(settings) | {"ranks": hvd.size()}
        del fixed["epochs"], fixed["output"]  # these may be others when the job goes on
        return checkpoint.Training(model, optimizer, scheduler, fixed)

    def run(self, path: pathlib.Path, scalars: Scalars) -> dict[str, float]:
        """Trains the epochs that are left; the last epoch's metrics, on every rank."""
        training = self.training
        metrics: dict[str, float] = {}
        while training.epoch < self.settings.epochs:
            begin = time.monotonic()
            loss = self._train_epoch()
            speed = len(self._train) * self.settings.batch_size * hvd.size()
            speed /= time.monotonic() - begin
            metrics = hvd.evaluate(training.model, self._test, measure)
            training.epoch += 1
            training.losses = torch.cat([training.losses, torch.tensor([loss])])
            checkpoint.save(training, path)
            figures = {"train/loss": loss, "test/loss": metrics["loss"],
                       "test/accuracy": metrics["accuracy"],
                       "learning_rate": training.scheduler.get_last_lr()[0]}  # fmt: skip
            for name, value in figures.items():
                scalars.add(name, value, training.epoch)
            if hvd.rank() == 0:
                text = " ".join(f"{name}={value:.4g}" for name, value in figures.items())
                print(f"epoch={training.epoch} {text} images_per_s={speed:.0f}", flush=True)
        return metrics or hvd.evaluate(training.model, self._test, measure)

    def _train_epoch(self) -> float:
        """One epoch; the mean loss over all ranks."""
        training = self.training
        training.model.train()
        self._sampler.set_epoch(training.epoch)
        losses = []
        for batch in self._train:
            training.optimizer.zero_grad()
            loss = measure(training.model, batch)[0]["loss"]
            loss.backward()
            training.optimizer.step()
            training.scheduler.step()
            losses.append(loss.detach())
        return hvd.metric_average(torch.stack(losses).mean().item(), "train/loss")


def choose_device() -> torch.device:
    """This rank's GPU, or the CPU."""
    if not torch.cuda.is_available():
        use_cores_of_this_rank()
        return torch.device("cpu")
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def parse_arguments() -> tuple[argparse.Namespace, Settings]:
    """The command line, and the settings it chooses."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", type=pathlib.Path, default=CONFIG, help="YAML file")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--smoke", action="store_true", help="small network, few images, 2 epochs")
    parser.add_argument("--data-dir", type=pathlib.Path, default=DATA_DIR)
    parser.add_argument("assignments", nargs="*", metavar="key=value", help="a setting to overrule")
    arguments = parser.parse_intermixed_args()
    try:
        return arguments, read_settings(arguments.config, arguments.smoke, arguments.assignments)
    except ValueError as error:
        parser.error(str(error))


def main() -> int:
    """Trains, with a line per epoch and one at the end."""
    arguments, settings = parse_arguments()
    hvd.init()
    device = choose_device()
    torch.manual_seed(settings.seed + hvd.rank())
    recipe = Recipe(settings, arguments.data_dir, device)
    output = pathlib.Path(settings.output)
    path = output / "checkpoint.pt"
    if arguments.resume:
        checkpoint.resume(recipe.training, path)
    scalars = Scalars(output, recipe.training.epoch + 1)
    metrics = recipe.run(path, scalars)
    scalars.close()
    if hvd.rank() == 0:
        print(f"accuracy={metrics['accuracy']:.4f} loss={metrics['loss']:.4f} ranks={hvd.size()} "
              f"checkpoint={path}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
