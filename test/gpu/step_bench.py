"""A training step of a model like ResNet-50: plain torch, farandole and DDP, in alternating blocks.

DDP is told `gradient_as_bucket_view=True`, with which it copies least. Prints one JSON object. With one
rank the overhead against plain torch is the result; with several (`farandolerun -np 2`), a GPU for each,
also how much of the communication was hidden behind backward: 1 - (step with farandole - plain step) /
(communication alone). Where ranks share a GPU nothing can be hidden; torch's NCCL group does that with
NCCL_MULTI_RANK_GPU_ENABLE=1.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from torch import nn

import farandole.torch as hvd

WAYS = ("plain", "farandole", "ddp")


class Bottleneck(nn.Module):
    """Three convolutions around a shortcut (He et al., "Deep residual learning", CVPR 2016)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True),
            nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def make_model(width: int, depths: list[int]) -> nn.Module:
    """With width 64 and depths 3, 4, 6, 3 it has ResNet-50's 161 parameters."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(True),
        nn.MaxPool2d(3, 2, 1),
    ]  # fmt: skip
    inputs = width
    for stage, depth in enumerate(depths):
        inner = width * 2**stage
        for block in range(depth):
            layers.append(Bottleneck(inputs, inner, 2 if stage and not block else 1))
            inputs = 4 * inner
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000)]
    return nn.Sequential(*layers)


class Bench:
    """One model per way, the same data for all."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device(options.device)
        size = options.image
        self.images = torch.randn(options.batch, 3, size, size, device=self.device)
        self.labels = torch.randint(0, 1000, (options.batch,), device=self.device)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def make_step(self, way: str) -> tuple[Callable[[], None], nn.Module]:
        """A training step of that way, and its model."""
        torch.manual_seed(0)
        model = make_model(self.options.width, self.options.depths).to(self.device)
        forward: nn.Module = model
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
        if way == "farandole":
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        if way == "ddp":
            forward = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)

        def step() -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(forward(self.images), self.labels).backward()
            optimizer.step()

        return step, model

    def block_ms(self, step: Callable[[], None]) -> float:
        """Milliseconds per step of a block."""
        self.synchronize()
        started_s = time.perf_counter()
        for _ in range(self.options.steps):
            step()
        self.synchronize()
        return (time.perf_counter() - started_s) * 1e3 / self.options.steps

    def communication_ms(self, model: nn.Module) -> float:
        """All gradients reduced, with nothing to hide behind."""
        gradients = [torch.zeros_like(parameter) for parameter in model.parameters()]

        def reduce() -> None:
            handles = [
                hvd.allreduce_async_(gradient, op=hvd.Average, name=f"alone {i}")
                for i, gradient in enumerate(gradients)
            ]
            for handle in handles:
                hvd.synchronize(handle)

        self.block_ms(reduce)
        return statistics.median(self.block_ms(reduce) for _ in range(self.options.blocks))


def run(options: argparse.Namespace) -> dict:
    """Measures every way in alternating blocks; medians over the blocks."""
    bench = Bench(options)
    ways = options.ways
    made = {way: bench.make_step(way) for way in ways}
    for way in ways:
        bench.block_ms(made[way][0])
    times: dict[str, list[float]] = {way: [] for way in ways}
    for block in range(options.blocks):
        for way in ways if block % 2 == 0 else reversed(ways):  # drifts cancel out
            times[way].append(bench.block_ms(made[way][0]))
    median_ms = {f"{way}_ms": statistics.median(times[way]) for way in ways}
    model = made[ways[0]][1]
    found = {
        "bench": "step", "device": device_name(bench.device), "ranks": hvd.size(),
        "tensors": sum(1 for _ in model.parameters()),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "shared": options.shared, "ddp_backend": torch.distributed.get_backend(),
        "window": int(os.environ.get("FARANDOLE_WINDOW") or 0), **median_ms,
    }  # fmt: skip
    if set(ways) != set(WAYS):
        return found
    plain, ours, ddp = (median_ms[f"{way}_ms"] for way in WAYS)
    alone = bench.communication_ms(model) if hvd.size() > 1 else None
    return found | {
        "overhead_percent": 100 * (ours / plain - 1),
        "ddp_overhead_percent": 100 * (ddp / plain - 1), "communication_ms": alone,
        "hidden": None if options.shared else hidden_share(plain, ours, alone),
    }  # fmt: skip


def hidden_share(plain_ms: float, ours_ms: float, alone_ms: float | None) -> float | None:
    """How much of the communication took no time; None if there was none."""
    if not alone_ms:
        return None
    return min(1.0, max(0.0, 1 - (ours_ms - plain_ms) / alone_ms))


def device_name(device: torch.device) -> str:
    """ "NVIDIA H100 80GB HBM3", or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; on the CPU a small model, for the benchmark's own sake."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10, help="of a block")
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    options = parser.parse_args(argv)
    on_cpu = options.device == "cpu"
    options.batch, options.image = (2, 32) if on_cpu else (64, 224)
    options.width, options.depths = (4, [1, 1, 1, 1]) if on_cpu else (64, [3, 4, 6, 3])
    return options


def main() -> None:
    """Joins the ranks, measures, prints."""
    options = parse()
    hvd.init()
    on_gpu = options.device == "cuda"
    options.shared = on_gpu and hvd.local_size() > torch.cuda.device_count()
    if on_gpu:
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    rendezvous = hvd.broadcast_object(f"{tempfile.mkdtemp()}/rendezvous", root_rank=0)
    torch.distributed.init_process_group(
        "nccl" if on_gpu else "gloo", init_method=f"file://{rendezvous}", rank=hvd.rank(),
        world_size=hvd.size(),
    )  # fmt: skip
    found = run(options)
    if hvd.rank() == 0:
        print(json.dumps(found))
    torch.distributed.destroy_process_group()
    hvd.shutdown()


if __name__ == "__main__":
    main()
