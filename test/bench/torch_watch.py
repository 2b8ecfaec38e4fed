"""What farandole.torch.watch costs: steps of DistributedDataParallel on gloo, and small all_reduces, with and without.

    farandolerun -np 2 python test/bench/torch_watch.py

Blocks of steps alternate between both. A row says the median time of a step without and with; by how much the
second is longer, as the median over pairs of neighbouring blocks; and the same of the processor time of all
threads of rank 0, which other load on the machine disturbs less.
"""

import argparse
import contextlib
import os
import statistics
import threading
import time

import torch
import torch.distributed as dist
from torch import nn

import farandole.torch as fl
import farandole.torch.distributed  # noqa: F401  (farandole://)
import train_step
from farandole.torch import _watch


class Switch:
    """Takes the watch away and puts it back."""

    def __init__(self):
        self._is_on = threading.Event()
        self._exchange = _watch._Watch._exchange
        _watch._Watch._exchange = lambda watch: self._is_on.wait() and self._exchange(watch)

    @contextlib.contextmanager
    def off(self):
        self._is_on.clear()
        _watch._library.pop()._destroy()
        dist.barrier()
        try:
            yield
        finally:
            _watch._intercept()
            self._is_on.set()

    @contextlib.contextmanager
    def on(self):
        self._is_on.set()
        dist.barrier()
        yield


def ddp_step(name, batch):
    torch.manual_seed(0)
    model, shape = getattr(train_step, name)()
    inputs = torch.randn(batch, *shape, generator=torch.Generator().manual_seed(dist.get_rank()))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    ddp = nn.parallel.DistributedDataParallel(model)

    def step():
        optimizer.zero_grad()
        ddp(inputs).square().mean().backward()
        optimizer.step()

    return step


def small(_, __):
    value = torch.ones(1)
    return lambda: dist.all_reduce(value)


def measure(what, batch, count, rounds, switch):
    step = (ddp_step if hasattr(train_step, what) else small)(what, batch)
    for _ in range(count):
        step()
    blocks = []  # (seconds, processor seconds) of a step
    for index in range(2 * rounds):
        with switch.on() if index % 2 else switch.off():
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            for _ in range(count):
                step()
            blocks.append(((time.perf_counter() - start_s) / count, (time.process_time() - start_cpu_s) / count))
    if dist.get_rank() == 0:
        text = f"{what:<12}"
        for unit, column in (("us", 0), ("us of processor", 1)):
            off, on = ([block[column] * 1e6 for block in blocks[first::2]] for first in (0, 1))
            more = [b - a for a, b in zip(off, on, strict=True)]
            share = 100 * statistics.median(more) / statistics.median(off)
            text += f"{statistics.median(off):11.1f} {statistics.median(on):11.1f} {unit}"
            text += f" (+{statistics.median(more):.1f}, {share:+.2f} %)"
        print(text, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    os.environ["FARANDOLE_STALL_WARNING_S"] = "0"  # the watch stands still while it is off
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="farandole://")
    fl.watch()
    switch = Switch()
    for what, batch, count in (("4 bytes", 0, 500), ("cnn", 32, 100), ("mlp", 32, 5), ("resnet18", 8, 3)):
        measure(what, batch, count, arguments.rounds, switch)
    switch._is_on.set()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
