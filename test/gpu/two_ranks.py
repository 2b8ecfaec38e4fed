"""Two ranks on one GPU, the whole way through Python: `farandolerun -np 2 python two_ranks.py`.

Exits with an error if a sum is wrong. With FARANDOLE_SHARE_GPU=1 they go over NCCL.
"""

import torch

import farandole.torch as hvd


def check(what: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Raises SystemExit if they differ."""
    if not torch.equal(got.cpu(), wanted.cpu()):
        raise SystemExit(f"rank {hvd.rank()}: {what} is wrong: {got.flatten()[:4].tolist()} ...")


def check_sums(rank: int) -> None:
    """Sums and broadcasts in several types, made late on a side stream."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            mine = torch.arange(5000, device="cuda").remainder(100).to(dtype) * (rank + 1)
            total = hvd.allreduce(mine, op=hvd.Sum, name=f"sum {dtype}")
            root = hvd.broadcast(mine, root_rank=1, name=f"broadcast {dtype}")
        stream.synchronize()
        numbers = torch.arange(5000).remainder(100).to(dtype)
        check(f"the sum of {dtype}", total, numbers * 3)
        check(f"the broadcast of {dtype}", root, numbers * 2)


def check_training(rank: int) -> None:
    """Ranks with different data have the same weights after some steps."""
    torch.manual_seed(rank)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)
    ).cuda()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    plain = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(32, 64, device="cuda")).square().mean().backward()
        optimizer.step()
    for name, value in model.state_dict().items():
        check(
            f"{name} after training", value, hvd.broadcast(value, root_rank=0, name=f"same {name}")
        )


def main() -> None:
    """Checks, on device 0."""
    hvd.init()
    torch.cuda.set_device(0)
    check_sums(hvd.rank())
    check_training(hvd.rank())
    print(f"rank {hvd.rank()} of {hvd.size()}: well")
    hvd.shutdown()


if __name__ == "__main__":
    main()
