"""What compressed gradients cost in loss: two trainings over five seeds, between two hosts that this machine plays.

    python test/bench/compression_loss.py [SEEDS]

As root, for the hosts are namespaces, of one rank each: within a host the 8-bit wire rounds nothing. Trainings: the
convolutional network of examples/fashion_mnist.py on 12,000 images of Fashion-MNIST (Debian's package
dataset-fashion-mnist), by SGD with momentum; and a model of the next character of this repository's documentation, by
Adam. Learning rates fall to zero. Prints for each compression the mean over the seeds of the final loss on data that
were not trained on, its ratio to float32's, and the bytes that the first host sent for each byte of gradients.
"""

import pathlib
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "test/python"), str(ROOT / "examples")]

from hosts import FIRST_ADDRESS, TwoHosts, bytes_over_the_link  # noqa: E402

CONTEXT = 12  # characters before the one to be guessed


class Task(NamedTuple):
    """A training: the model, its optimizer, how many steps, batches of this rank, and the loss on other data."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    steps: int
    batches: Iterator[tuple[torch.Tensor, torch.Tensor]]
    held_out: tuple[torch.Tensor, torch.Tensor]


def batches_of(x: torch.Tensor, y: torch.Tensor, size: int, rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Random ones, other ones on each rank."""
    generator = torch.Generator().manual_seed(1000 * rank + torch.initial_seed())
    while True:
        chosen = torch.randint(len(x), (size,), generator=generator)
        yield x[chosen], y[chosen]


def scaled(pixels: torch.Tensor) -> torch.Tensor:
    """Of mean 0 and deviation 1."""
    return (pixels.float() - 73.0) / 90.0


def images(rank: int) -> Task:
    """Fashion-MNIST."""
    from fashion_data import DATA_DIR, load, make_model

    (x, y), (test_x, test_y) = ((scaled(a), b.long()) for a, b in (load(DATA_DIR, "train"), load(DATA_DIR, "t10k")))
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return Task(model, optimizer, 500, batches_of(x[:12_000], y[:12_000], 32, rank), (test_x, test_y))


def characters(rank: int) -> Task:
    """The documentation."""
    text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    codes = torch.tensor([min(ord(c), 127) for c in text])
    windows = codes.unfold(0, CONTEXT + 1, 1)
    end = len(windows) * 9 // 10
    model = torch.nn.Sequential(
        torch.nn.Embedding(128, 16), torch.nn.Flatten(), torch.nn.Linear(16 * CONTEXT, 256), torch.nn.ReLU(),
        torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 128),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    x, y = windows[:, :-1], windows[:, -1]
    held_out = x[end + CONTEXT :: 2], y[end + CONTEXT :: 2]
    return Task(model, optimizer, 1500, batches_of(x[:end], y[:end], 128, rank), held_out)


TASKS: dict[str, Callable[[int], Task]] = {"images": images, "characters": characters}


def train(task: Task, compression: Any) -> tuple[float, float]:
    """The final loss; bytes sent for each byte of gradients."""
    import farandole.torch as fl

    model = task.model
    fl.broadcast_parameters(model.state_dict())
    optimizer = fl.DistributedOptimizer(task.optimizer, model.named_parameters(), compression=compression)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, task.steps)
    before = bytes_over_the_link()[0]
    for _ in range(task.steps):
        x, y = next(task.batches)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()
    sent = bytes_over_the_link()[0] - before
    gradients = task.steps * sum(4 * p.numel() for p in model.parameters())
    fl.check_replicas(model)
    model.eval()
    x, y = task.held_out
    with torch.no_grad():
        losses = [F.cross_entropy(model(a), b, reduction="sum").item() for a, b in zip(x.split(1000), y.split(1000))]
    fl.unwrap(optimizer)
    return sum(losses) / len(y), sent / gradients


def on_a_rank(seeds: int) -> None:
    import farandole.torch as fl

    torch.set_num_threads(1)
    fl.init()
    ways = {
        "float32": fl.Compression.none,
        "bf16": fl.Compression.bf16,
        "int8": fl.Compression.int8,
        "PowerSGD(4)": fl.PowerSGD(4),
    }
    for name, make in TASKS.items():
        losses: dict[str, list[float]] = {way: [] for way in ways}
        sent = {}
        for seed in range(seeds):
            for way, compression in ways.items():
                torch.manual_seed(seed)
                loss, sent[way] = train(make(fl.rank()), compression)
                losses[way].append(loss)
        for way in ways if fl.rank() == 0 else ():
            mean, base = statistics.mean(losses[way]), statistics.mean(losses["float32"])
            each = " ".join(f"{loss:.4f}" for loss in losses[way])
            print(f"{name:10} {way:12} {mean:.4f} {mean / base:.4f}, {sent[way]:.3f} of the bytes ({each})", flush=True)
    fl.shutdown()


def main() -> None:
    seeds = [*sys.argv[1:], "5"][0]
    with tempfile.TemporaryDirectory() as folder, TwoHosts(pathlib.Path(folder)) as hosts:
        over_tcp = {"FARANDOLE_NETWORK": "tcp", "FARANDOLE_ADDRESS": f"{FIRST_ADDRESS}:29500"}
        done = hosts.mpirun(1, [sys.executable, __file__, "--rank", seeds], timeout_s=3000, **over_tcp)
        print(done.stdout, end="")
        sys.exit(done.returncode)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        on_a_rank(int(sys.argv[2]))
    else:
        main()
