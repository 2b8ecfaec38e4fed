"""Ranks as processes, each with a fake GPU of its own or all with one: over a fake NCCL, or staged."""

import pytest
import torch

from fake_gpu import VARIABLES, needs_fake_gpu
from models import OPTIMIZERS, Branched, train_alone
from ranks import run_mpi

pytestmark = [pytest.mark.mpi, needs_fake_gpu]

STEPS = 4


@pytest.mark.parametrize("shared", [False, True], ids=["own GPUs", "one GPU"])
def test_processes_train_as_one(shared):
    script = f"""
        import farandole.torch as fl
        from fake_gpu import pose, read_by_the_host
        from models import OPTIMIZERS, Branched, scrambled, train_rank

        fl.init()
        for gpus in pose({shared}):
            for gpus in read_by_the_host(gpus):
                model = scrambled(Branched(), fl.rank())
                uses = lambda rank, step: step % 2 == 0 or rank == 0
                _, weights = train_rank(model, OPTIMIZERS["AdamW"], fl.rank(), {STEPS}, uses)
                tell((gpus.mine.count("launches") > 0, gpus.mine.count("copies") > 0))
                tell([weight.tolist() for weight in weights])
    """
    told = run_mpi(2, script, 90, FARANDOLE_TEST_CUDA_DEVICES="1" if shared else "8", **VARIABLES)
    _, expected = train_alone(
        Branched(), OPTIMIZERS["AdamW"], 2, STEPS, lambda rank, step: step % 2 == 0 or rank == 0
    )
    for text in told:
        ways, weights = map(eval, text.splitlines())
        assert ways == (True, shared)  # (our kernels, the host's memory) were used
        for ours, theirs in zip(weights, expected, strict=True):
            torch.testing.assert_close(torch.tensor(ours, dtype=torch.float64), theirs)
    assert told[0] == told[1]
