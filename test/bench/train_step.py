"""Training steps of small models on the CPU: alone, and with gradients that are averaged.

    mpirun -np 2 python test/bench/train_step.py --model mlp

"alone": rank 0 by itself, the other cores idle. "bare": every rank by itself at the same time.
"farandole": through DistributedOptimizer. "gloo": DistributedDataParallel, if torch has it. What a step
takes more than a bare one is the time of the exchange that the backward pass did not hide. In the end
the two that average must have the same parameters, on all ranks.
"""

import argparse
import sys
import zlib

import numpy as np
import torch
from torch import nn

import farandole
import farandole.torch as fl
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


def make_step(kind, make, batch):
    """A training step of a model of its own, and that model."""
    torch.manual_seed(0)  # the same parameters everywhere
    model, shape = make()
    inputs = torch.randn(batch, *shape, generator=torch.Generator().manual_seed(farandole.rank()))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    call = model
    if kind == "farandole":
        fl.DistributedOptimizer(optimizer, model.named_parameters())
    elif kind == "gloo":
        call = nn.parallel.DistributedDataParallel(model)

    def step():
        if kind != "alone" or farandole.rank() == 0:
            optimizer.zero_grad()
            call(inputs).square().mean().backward()
            optimizer.step()
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
    parser.add_argument("--model", choices=["mlp", "cnn"], default="mlp")
    parser.add_argument("--batch", type=int, default=32, help="samples of each rank")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--threads", type=int, default=1, help="of torch, on each rank")
    arguments = parser.parse_args()
    farandole.init()
    torch.set_num_threads(arguments.threads)
    peers, missing = bench.connect(["gloo"])
    kinds = ["alone", "bare", *peers]
    steps = {kind: make_step(kind, globals()[arguments.model], arguments.batch) for kind in kinds}
    count = sum(p.numel() for p in steps["bare"][1].parameters())
    case = bench.Case(
        f"{arguments.model}, {count:,} parameters, batches of {arguments.batch}", "allreduce", 4 * count,
        1, lambda: None, {kind: step for kind, (step, _) in steps.items()}, (), {},
    )  # fmt: skip
    rows, _ = bench.measure(case, peers, arguments.rounds)
    check({kind: steps[kind][1] for kind in peers})
    if farandole.rank() == 0:
        print(bench.fingerprint(peers), missing, case.name, sep="\n")
        bare_s = next(row["seconds"][1] for row in rows if row["implementation"] == "bare")
        for row in rows:
            p10, p50, p90 = (1e3 * seconds for seconds in row["seconds"])
            exposed_ms = p50 - 1e3 * bare_s if row["implementation"] in peers else 0
            print(
                f"  {row['implementation']:<10}{p50:8.2f} ms ({p10:.2f}-{p90:.2f}), exposed "
                f"{exposed_ms:.2f} ms, clean {row['clean']}/{row['rounds']}"
            )


if __name__ == "__main__":
    main()
