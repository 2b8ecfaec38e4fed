"""What a Job adds to a step without failures, beside a loop with a DistributedOptimizer and the same slots.

    farandolerun -np 2 python test/bench/job_step.py

Both train the same network on the same batches, in one process, an epoch of four steps in turn: the loop draws
permutations, collates, accumulates its slots' gradients and reads each loss, as the Job does for its user. The Job
besides writes chain and checkpoints, compares hashes and sums slot by slot. Printed are lower quartiles and medians.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.data import TensorDataset, default_collate

import farandole
import farandole.torch as fl

SLOTS, STEPS = 8, 4


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.1),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 49, 10),
    )  # fmt: skip


def plain_epoch(data: TensorDataset, batch_size: int) -> Callable[[int], float]:
    """The loop that a user would write."""
    model = make_model()
    adam = torch.optim.Adam(model.parameters(), 1e-3)
    optimizer = fl.DistributedOptimizer(adam, named_parameters=model.named_parameters())
    rank, size = farandole.rank(), farandole.size()
    own = range(rank * SLOTS // size, (rank + 1) * SLOTS // size)

    def run(epoch: int) -> float:
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch)).tolist()
        total = 0.0
        for step in range(STEPS):
            for slot in own:
                at = (step * SLOTS + slot) * batch_size
                images, labels = default_collate([data[i] for i in order[at : at + batch_size]])
                loss = nn.functional.cross_entropy(model(images), labels) / len(own)
                if slot == own[-1]:
                    loss.backward()
                else:
                    with optimizer.no_sync():
                        loss.backward()
                total += float(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        return total

    return run


def job_epoch(data: TensorDataset, batch_size: int, folder: str) -> Callable[[int], object]:
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    job = fl.Job(model, optimizer, data, slots=SLOTS, batch_size=batch_size, checkpoint=folder, checkpoint_steps=100)

    @job.step
    def step(batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        return {"loss": loss}

    epochs = job.epochs(1_000_000)
    return lambda _: next(epochs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=100, help="of each, after ten that are not counted")
    parser.add_argument("--batch", type=int, default=16, help="samples of a slot")
    given = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    count = SLOTS * given.batch * STEPS
    images, labels = torch.randn(count, 1, 28, 28, generator=generator), torch.randint(0, 10, (count,))
    data = TensorDataset(images, labels)
    with tempfile.TemporaryDirectory() as folder:
        loops = {"Job": job_epoch(data, given.batch, folder), "DistributedOptimizer": plain_epoch(data, given.batch)}
        times: dict[str, list[float]] = {name: [] for name in loops}
        for epoch in range(given.epochs + 10):
            for name, run in loops.items():
                begin_s = time.perf_counter()
                run(epoch)
                if epoch >= 10:
                    times[name].append((time.perf_counter() - begin_s) * 1000 / STEPS)
        if farandole.rank() == 0:
            print(f"{farandole.size()} ranks, {SLOTS} slots of {given.batch}; ms per step")
            parts = {}
            for name, all_ms in times.items():
                by_size = sorted(all_ms)
                parts[name] = by_size[len(by_size) // 4], by_size[len(by_size) // 2]
            for name, (quartile, median) in parts.items():
                print(f"{name:22} lower quartile {quartile:8.3f}, median {median:8.3f}")
            ratios = [a / b for a, b in zip(parts["Job"], parts["DistributedOptimizer"], strict=True)]
            print(f"{'ratio':22} lower quartile {ratios[0]:8.4f}, median {ratios[1]:8.4f}")


if __name__ == "__main__":
    main()
