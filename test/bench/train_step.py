"""Training steps on the CPU: alone, and with gradients that are averaged.

    mpirun -np 2 python test/bench/train_step.py --model mlp

"alone": rank 0 by itself, the other cores idle. "bare": every rank by itself at the same time. "barrier": bare
steps after each of which the ranks meet, as they must to exchange anything. "farandole": through
DistributedOptimizer; "shared": with share_gradients=True. "ddp": DistributedDataParallel on the backend
farandole; "gloo": on gloo; "idle ddp": with a hook that exchanges nothing; "horovod" (--peers horovod): through
Horovod's DistributedOptimizer, whose thread takes processor time from all others. "exposed" is what a step
takes more than a bare one, or than that of the idle DistributedDataParallel: the exchange that the backward
pass did not hide, and the waiting for the slower rank, which "barrier" shows by itself. The last column is the
step by that with a barrier. In the end those that average must have the same parameters, on all ranks.
"""

import argparse
import importlib
import itertools
import sys
import zlib

import numpy as np
import torch
from torch import nn

import farandole
import farandole.torch as fl
import farandole.torch.distributed
from farandole import bench


def mlp():
    """Three layers of 2,582 x 2,582: 20.0 million parameters, 80 MB."""
    layers = [layer for _ in range(3) for layer in (nn.Linear(2582, 2582), nn.ReLU())]
    return nn.Sequential(*layers[:-1]), (2582,)


def cnn():
    """About 100,000 parameters, for images of 28 x 28."""
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 36, 80), nn.ReLU(), nn.Linear(80, 10),
    )  # fmt: skip
    return model, (1, 28, 28)


class Means(torch.autograd.Function):
    """Means of many tensors; their gradients have memory of their own, as those of layers have."""

    @staticmethod
    def forward(ctx, x, *parameters):
        ctx.save_for_backward(*parameters)
        return x.mean() * torch.stack(parameters)

    @staticmethod
    def backward(ctx, gradient):
        return None, *(torch.full_like(p, 0.01) for p in ctx.saved_tensors)


class Small(nn.Module):
    """1,000 parameters of 64 elements, with next to nothing to compute."""

    def __init__(self):
        super().__init__()
        self.all = nn.ParameterList(torch.randn(64) for _ in range(1000))

    def forward(self, x):
        return Means.apply(x, *self.all)


def small():
    """The time of a step is that of hooks and of many small gradients."""
    return Small(), (1,)


class Residual(nn.Module):
    """Two convolutions of 3 x 3 beside a shortcut (He et al., "Deep residual learning", 2016)."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x):
        return nn.functional.relu(self.body(x) + self.shortcut(x))


def resnet18():
    """ResNet-18 for images of 32 x 32: 11 million parameters, 45 MB."""
    widths = [64, 64, 128, 256, 512]
    blocks = [
        block for inputs, outputs in itertools.pairwise(widths)
        for block in (Residual(inputs, outputs, 1 + (inputs != outputs)), Residual(outputs, outputs, 1))
    ]  # fmt: skip
    first = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    return nn.Sequential(*first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)), (3, 32, 32)


def bert():
    """The layers of BERT-base on 16 tokens each: 85 million parameters, 340 MB."""
    layer = nn.TransformerEncoderLayer(768, 12, 3072, dropout=0.0, activation="gelu", batch_first=True)
    return nn.TransformerEncoder(layer, 12, enable_nested_tensor=False), (16, 768)


def exchange_nothing(_, bucket):
    """A communication hook."""
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def make_step(kind, make, batch, views):
    """A training step of a model of its own, and that model."""
    torch.manual_seed(0)  # the same parameters everywhere
    model, shape = make()
    inputs = torch.randn(batch, *shape, generator=torch.Generator().manual_seed(farandole.rank()))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    call = model
    if kind in ("farandole", "shared"):
        fl.DistributedOptimizer(optimizer, model.named_parameters(), share_gradients=kind == "shared")
    elif kind == "horovod":
        hvd = importlib.import_module("horovod.torch")
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    elif kind in ("gloo", "ddp", "idle ddp"):
        group = torch.distributed.new_group(backend="farandole") if kind == "ddp" else None
        call = nn.parallel.DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=views)
        if kind == "idle ddp":
            call.register_comm_hook(None, exchange_nothing)

    def step():
        if kind != "alone" or farandole.rank() == 0:
            optimizer.zero_grad()
            call(inputs).square().mean().backward()
            optimizer.step()
        if kind == "barrier":
            farandole.barrier()
        return ()

    return step, model


def check(models):
    """Exits unless parameters are the same on all ranks, and with every library."""
    flat = {kind: nn.utils.parameters_to_vector(m.parameters()).detach() for kind, m in models.items()}
    for kind, vector in flat.items():
        digests = set(farandole.allgather(np.array([zlib.crc32(vector.numpy().data)])).tolist())
        if len(digests) > 1 or not torch.allclose(vector, flat["farandole"], rtol=1e-4, atol=1e-6):
            sys.exit(f"rank {farandole.rank()}: {kind}: the parameters differ after the same steps")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=["mlp", "cnn", "resnet18", "bert", "small"], default="mlp")
    parser.add_argument("--batch", type=int, default=32, help="samples of each rank")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--threads", type=int, default=1, help="of torch, on each rank")
    parser.add_argument("--views", action="store_true", help="DistributedDataParallel: gradient_as_bucket_view")
    parser.add_argument("--peers", nargs="*", choices=["gloo", "horovod"], default=["gloo"])
    arguments = parser.parse_args()
    farandole.init()
    torch.set_num_threads(arguments.threads)
    peers, missing = bench.connect(arguments.peers)
    peers["shared"] = peers["farandole"]
    if "gloo" in peers:
        peers["ddp"] = peers["farandole"]
    kinds = ["alone", "bare", "barrier", *(["idle ddp"] if "gloo" in peers else []), *peers]
    make = globals()[arguments.model]
    steps = {kind: make_step(kind, make, arguments.batch, arguments.views) for kind in kinds}
    count = sum(p.numel() for p in steps["bare"][1].parameters())
    name = f"{arguments.model}, {count:,} parameters, batches of {arguments.batch}"
    case = bench.Case(
        name + ", views" * arguments.views, "allreduce", 4 * count,
        1, lambda: None, {kind: step for kind, (step, _) in steps.items()}, (), {},
    )  # fmt: skip
    rows, _ = bench.measure(case, peers, arguments.rounds)
    check({kind: steps[kind][1] for kind in peers})
    if farandole.rank() == 0:
        print(bench.fingerprint(peers), missing, case.name, sep="\n")
        median_ms = {row["implementation"]: 1e3 * row["seconds"][1] for row in rows}
        base = {"farandole": "bare", "shared": "bare", "horovod": "bare", "ddp": "idle ddp", "gloo": "idle ddp"}
        for row in rows:
            kind = row["implementation"]
            p10, p50, p90 = (1e3 * seconds for seconds in row["seconds"])
            exposed = f", exposed {p50 - median_ms[base[kind]]:.2f} ms" if kind in base else ""
            ratio = p50 / median_ms["barrier"]
            print(f"  {kind:<10}{p50:8.2f} ms ({p10:.2f}-{p90:.2f}){exposed}, clean {row['clean']}/{row['rounds']}, "
                  f"{ratio:.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
