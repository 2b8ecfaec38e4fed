"""As people wrote it for Horovod: batch norm, a barrier made of an allreduce, averaged losses."""

import torch

import horovod.torch as hvd


def reduce_mean(value):
    """The mean over ranks of a scalar that autograd knows; the name is used again and again."""
    rt = value.clone()
    hvd.allreduce(rt, name="barrier")
    return rt


def main():
    hvd.init()
    torch.manual_seed(hvd.rank())
    torch.set_num_threads(1)
    local_rank = hvd.local_rank()
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(),
        torch.nn.Flatten(), torch.nn.Linear(4 * 14 * 14, 10),
    )  # fmt: skip
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=1e-4)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    compression = hvd.Compression.fp16
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )
    data = torch.utils.data.TensorDataset(torch.rand(64, 3, 16, 16), torch.arange(64) % 10)
    sampler = torch.utils.data.distributed.DistributedSampler(
        data, num_replicas=hvd.size(), rank=hvd.rank()
    )
    loader = torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * 0.1**epoch
        for images, target in loader:
            output = model(images)
            loss = criterion(output, target)
            correct = (output.argmax(1) == target).float().mean()
            reduced = reduce_mean(loss)
            assert torch.equal(reduced, loss)  # the allreduce leaves its input alone
            reduce_mean(correct)
            reduce_mean(correct.reshape(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            reduce_mean(loss)
    digest = sum(p.double().sum() for p in model.parameters()).item()
    print("rank %d of %d: %.17g" % (hvd.rank(), hvd.size(), digest))


if __name__ == "__main__":
    main()
