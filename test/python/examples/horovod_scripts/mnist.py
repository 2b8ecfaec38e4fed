"""As people wrote it for Horovod: images, fp16 gradients, averaged metrics of a test."""

import argparse

import torch
import torch.nn.functional as F

import horovod.torch as hvd


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(1, 4, kernel_size=5)
        self.conv2 = torch.nn.Conv2d(4, 8, kernel_size=5)
        self.fc1 = torch.nn.Linear(128, 20)
        self.fc2 = torch.nn.Linear(20, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        return F.log_softmax(self.fc2(x), dim=1)


def images(count, seed):
    """A square whose place tells its class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=generator)
    x = 0.1 * torch.rand(count, 1, 28, 28, generator=generator)
    for i, label in enumerate(labels.tolist()):
        row, column = divmod(label, 4)
        x[i, 0, 9 * row : 9 * row + 8, 7 * column : 7 * column + 6] += 1
    return torch.utils.data.TensorDataset(x, labels)


def metric_average(value, name):
    hvd.allreduce(torch.tensor([value]), name=name)  # a name is used again, with another shape
    return hvd.allreduce(torch.tensor(value), name=name).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fp16-allreduce", action="store_true", default=True)
    parser.add_argument("--use-adasum", action="store_true", default=False)
    parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    cuda = torch.cuda.is_available()

    hvd.init()
    torch.manual_seed(42)
    torch.set_num_threads(1)
    if cuda:
        torch.cuda.set_device(hvd.local_rank())

    folder = "data-%d" % hvd.rank()
    train = images(512, seed=1)
    sampler = torch.utils.data.distributed.DistributedSampler(
        train, num_replicas=hvd.size(), rank=hvd.rank()
    )
    loader = torch.utils.data.DataLoader(train, batch_size=16, sampler=sampler)
    test = images(128, seed=2)
    test_sampler = torch.utils.data.distributed.DistributedSampler(
        test, num_replicas=hvd.size(), rank=hvd.rank()
    )
    test_loader = torch.utils.data.DataLoader(test, batch_size=64, sampler=test_sampler)

    model = Net()
    scaler = hvd.size() if not args.use_adasum else 1
    if cuda:
        model.cuda()
        if args.use_adasum and hvd.nccl_built():
            scaler = hvd.local_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * scaler, momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=compression,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )

    for epoch in range(1, args.epochs + 1):
        model.train()
        sampler.set_epoch(epoch)
        for data, target in loader:
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
        model.eval()
        loss = accuracy = 0.0
        with torch.no_grad():
            for data, target in test_loader:
                output = model(data)
                loss += F.nll_loss(output, target, reduction="sum").item()
                accuracy += (output.argmax(1) == target).sum().item()
        loss = metric_average(loss / len(test_sampler), "avg_loss")
        accuracy = metric_average(accuracy / len(test_sampler), "avg_accuracy")
        if hvd.rank() == 0:
            print(f"{folder} epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.2f}")


if __name__ == "__main__":
    main()
