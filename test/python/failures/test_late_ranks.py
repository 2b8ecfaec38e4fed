"""A rank that makes the others wait, step after step, is named with what takes longer on it."""

import gc
import itertools
import os
import re
import sys
import time

import pytest
import torch
import torch.distributed.fsdp

import farandole.torch as hvd
import farandole.torch.distributed  # noqa: F401  (its backend)
import ranks
from farandole import flight, ps

sys.path.append(str(ranks.REPOSITORY / "test" / "fault"))

import late_ranks

STEP_S, LATE_S, STEPS = 0.01, 0.02, 60


class Samples(torch.utils.data.Dataset):
    def __init__(self, seconds):
        self.seconds = seconds

    def __len__(self):
        return STEPS

    def __getitem__(self, _):
        time.sleep(self.seconds)
        return torch.zeros(4)


def train(cause, trainer):
    """What each rank runs; the last one is late."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    is_late = rank == size - 1
    late_s = {name: LATE_S if is_late and cause == name else 0 for name in ("computing", "input")}
    garbage = [[i] for i in range(400_000)] if is_late and cause == "garbage collection" else []
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if trainer == "DDP":
        torch.distributed.init_process_group("farandole")
        model = torch.nn.parallel.DistributedDataParallel(model)
    elif trainer == "FSDP2":
        torch.distributed.init_process_group("farandole")
        torch.distributed.fsdp.fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    else:
        hvd.init()
        if trainer == "both":
            hvd.join()  # steps are counted anew
    if trainer in ("optimizer", "both"):
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    for batch in torch.utils.data.DataLoader(Samples(late_s["input"])):
        optimizer.zero_grad()
        model(late_ranks.Slow.apply(batch.requires_grad_(), time.sleep, STEP_S + late_s["computing"])).sum().backward()
        optimizer.step()
        if trainer in ("own", "both"):
            hvd.allreduce(model.weight.grad, name="gradient")
            hvd.end_step()
        if garbage:
            gc.collect()
    if rank == 0:
        (flights,) = (one for one in flight.running() if len(one) == size and one[0].pid == os.getpid())
        assert flights[0].steps.steps == (2 if trainer == "both" else 1) * STEPS - 1
        print("\n".join(ps._late(flights)))


def said_of(cause, size=2, trainer="optimizer"):
    return ranks.communicate(ranks.start_forked(size, [__file__, cause, trainer]))[0]


@pytest.mark.parametrize(
    "trainer, size, cause",
    [
        *itertools.product(["optimizer"], [2, 3], ["computing", "input", "garbage collection"]),
        *itertools.product(["DDP"], [3], ["computing", "input", "garbage collection"]),
        ("FSDP2", 3, "computing"),
        ("own", 2, "computing"),
        ("both", 2, "garbage collection"),
    ],
)
def test_a_late_rank_is_named_with_the_cause(trainer, size, cause):
    if trainer == "FSDP2" and not hasattr(torch.distributed.fsdp, "fully_shard"):
        pytest.skip("this torch has no fully_shard")
    said = said_of(cause, size, trainer)
    named = re.findall(r"warning: rank (\d+) \(host \S+\) makes all wait [\d.]+ ms of [\d.]+ in each step: (.*)", said)
    assert [rank for rank, _ in named] == [str(size - 1)] * len(named) and named, said
    assert any(text.startswith(f"its {cause} takes ") for _, text in named), said
    assert re.search(rf"^Rank {size - 1} has made the others wait [\d.]+ ms of [\d.]+ in each of ", said, re.M), said


def on_hosts(run, *arguments):
    try:
        return run(*arguments)
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("cause", ["group", "link"])
def test_a_rank_is_named_that_is_in_another_group_or_behind_a_slow_link(cause):
    lines = on_hosts(late_ranks.run, cause, 1.0, late_ranks.BEGIN + 40)
    assert {rank for _, rank, _ in lines} == {1}, lines
    assert late_ranks.CAUSES[cause] in lines[0][2], lines


def test_of_two_hosts_the_network_is_named_if_all_wait_for_it(monkeypatch):
    monkeypatch.setenv("FARANDOLE_LOG_LEVEL", "info")
    said = on_hosts(late_ranks.run_on_hosts, late_ranks.command_of("network", 3, late_ranks.BEGIN + 20), 2)
    assert re.search(
        r"info: all wait for the network for [\d.]+ ms of \d+ in each step: a connection carries ", said
    ), said


def test_nobody_is_named_where_all_take_equally_long():
    assert "makes all wait" not in said_of("nothing")


if __name__ == "__main__":
    train(*sys.argv[1:])
