"""Names that are never used again, and optimizers that are wrapped again and again, leave nothing behind."""

import gc
import pathlib

import numpy as np
import torch

import farandole as fd
import farandole.torch as fl
from models import parameter
from ranks import run_threads

KEPT_NAMES, NAMES, IN_FLIGHT = 30_000, 40_000, 50
KEPT_WRAPS, WRAPS = 25, 50
PARAMETERS = 40


def resident_mib():
    gc.collect()
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / (1 << 20)


def use_names(first, count):
    """Each three times, so that it gets an id and is used by it; many are in flight at once."""
    tensors = [np.empty(4, np.float32) for _ in range(IN_FLIGHT)]
    for i in range(first, first + count, IN_FLIGHT):
        for _ in range(3):
            handles = []
            for k, tensor in enumerate(tensors):
                tensor[:] = 1.0
                handles.append(fd.allreduce_async_(tensor, op=fd.Sum, name=f"name {i + k}"))
            for handle in handles:
                assert fd.synchronize(handle)[0] == fd.size()


def wrap_again(count):
    parameters = [parameter(1.0) for _ in range(PARAMETERS)]
    plain = torch.optim.SGD(parameters, lr=0.0)
    for _ in range(count):
        named = [(f"layer.{i}.weight", p) for i, p in enumerate(parameters)]
        optimizer = fl.DistributedOptimizer(plain, named_parameters=named)
        for _ in range(4):
            optimizer.zero_grad()
            sum(p * (fd.rank() + 1) for p in parameters).sum().backward()
            optimizer.step()
        assert parameters[0].grad.item() == (fd.size() + 1) / 2
        fl.unwrap(optimizer)


def growth(rank):
    """MiB that names take, and wraps, once as many have been used as stay in tables for a while."""
    del rank
    use_names(0, KEPT_NAMES)
    before = resident_mib()
    use_names(KEPT_NAMES, NAMES)
    names = resident_mib() - before
    wrap_again(KEPT_WRAPS)
    before = resident_mib()
    wrap_again(WRAPS)
    return names, resident_mib() - before


def test_names_and_wraps_that_are_over_take_no_memory():
    for names, wraps in run_threads(2, growth, timeout_s=300):
        assert names < 4  # 100 bytes for each
        assert wraps < 2  # 1 KiB for each parameter
