"""A training script to copy: plain PyTorch, and the lines with ``hvd`` that make it run on N ranks.

    farandolerun -np 2 python examples/first_steps.py
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

import farandole.torch as hvd


def make_data(count: int, seed: int) -> TensorDataset:
    """Points of a square and whether they lie in a circle; put your own data here."""
    points = 2 * torch.rand(count, 2, generator=torch.Generator().manual_seed(seed)) - 1
    return TensorDataset(points, (points.square().sum(1) < 0.6).long())


def measure(model: nn.Module, batch: list[torch.Tensor]) -> tuple[dict[str, torch.Tensor], int]:
    """Means over a batch, and how many samples they are of."""
    points, labels = batch
    scores = model(points)
    right = (scores.argmax(1) == labels).float().mean()
    return {"loss": nn.functional.cross_entropy(scores, labels), "accuracy": right}, len(labels)


def main() -> None:
    """Trains, and prints the loss and the accuracy after each epoch."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="a short run, to see that it works")
    count, epochs = (1024, 2) if parser.parse_args().smoke else (8192, 10)

    hvd.init()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
    model = hvd.SyncBatchNorm.convert_sync_batchnorm(model)  # statistics of all ranks' batches
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # the same start everywhere
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())  # averages gradients

    train, test = make_data(count, seed=1), make_data(1001, seed=2)
    sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank())
    batches = DataLoader(train, batch_size=32, sampler=sampler, drop_last=True)
    own_part = Subset(test, range(hvd.rank(), len(test), hvd.size()))  # each sample on one rank
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for batch in batches:
            optimizer.zero_grad()
            measure(model, batch)[0]["loss"].backward()
            optimizer.step()
        metrics = hvd.evaluate(model, DataLoader(own_part, batch_size=100), measure)
        if hvd.rank() == 0:
            print(f"epoch={epoch} loss={metrics['loss']:.3f} accuracy={metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main()
