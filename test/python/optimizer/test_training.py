"""N ranks train as one process trains on the concatenated batch."""

import pytest
import torch

import farandole.torch as fl
from jobs import on_several
from models import OPTIMIZERS, Branched, scrambled, train_alone, train_rank
from ranks import run_forked, run_threads

STEPS = 20


def relative(got, expected):
    return max(
        float((g - e).norm() / e.norm().clamp_min(1e-300))
        for g, e in zip(got, expected, strict=True)
    )


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@on_several
def test_float64_training_is_that_of_one_process(name, job):
    alone = train_alone(Branched(), OPTIMIZERS[name], job.size, STEPS)

    def body(rank):
        model = scrambled(Branched(), rank)
        return train_rank(model, OPTIMIZERS[name], rank, STEPS, complete=job.complete)

    for gradients, weights in job.run(body):
        if job.complete == "backward":  # read before step()
            assert relative(gradients, alone[0]) < 1e-12
        assert relative(weights, alone[1]) < 1e-12


def one_rank_skips(rank, step):
    return not (rank == 1 and step % 2)


def ranks_take_turns(rank, step):
    return rank == step % 2


def only_once(rank, step):
    return step == 0


@pytest.mark.parametrize("uses_branch", [one_rank_skips, ranks_take_turns, only_once])
@on_several
def test_a_branch_that_some_ranks_skip_changes_nothing(uses_branch, job):
    make = OPTIMIZERS["SGD"]
    alone = train_alone(Branched(), make, job.size, STEPS, uses_branch)

    def body(rank):
        return train_rank(Branched(), make, rank, STEPS, uses_branch, complete=job.complete)

    for gradients, weights in job.run(body):
        if job.complete == "backward":  # read before step()
            assert [g.shape for g in gradients] == [g.shape for g in alone[0]]
            assert relative(gradients, alone[0]) < 1e-12
        assert relative(weights, alone[1]) < 1e-12


def test_float32_sgd_stays_within_1e_5_of_one_process():
    make = OPTIMIZERS["SGD"]
    _, expected = train_alone(
        Branched(torch.float32), make, 2, STEPS, one_rank_skips, torch.float32
    )

    def body(rank):
        return train_rank(
            Branched(torch.float32), make, rank, STEPS, one_rank_skips, torch.float32
        )[1]

    for weights in run_threads(2, body):
        scale = max(float(w.abs().max()) for w in expected)
        assert (
            max(float((w - e).abs().max()) for w, e in zip(weights, expected, strict=True))
            <= 1e-5 * scale
        )


def test_replicas_are_bitwise_the_same_also_with_a_16_bit_wire():
    for compression in (fl.Compression.fp16, fl.Compression.bf16):

        def body(rank, compression=compression):
            model = Branched(torch.float32)
            make = OPTIMIZERS["SGD"]
            return train_rank(model, make, rank, 5, dtype=torch.float32, compression=compression)[1]

        first, *others = run_threads(3, body)
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_sum_with_a_predivided_rate_equals_average():
    make = OPTIMIZERS["SGD"]

    def body(rank):
        average = train_rank(Branched(), make, rank, 5)[1]
        predivided = train_rank(Branched(), make, rank, 5, gradient_predivide_factor=4.0)[1]
        half = lambda p: torch.optim.SGD(p, lr=0.05)  # noqa: E731
        full = lambda p: torch.optim.SGD(p, lr=0.1)  # noqa: E731
        summed = train_rank(Branched(), half, rank, 5, op=fl.Sum)[1]
        doubled = train_rank(Branched(), full, rank, 5)[1]
        return relative(predivided, average), relative(summed, doubled)

    for differences in run_threads(2, body):
        assert max(differences) < 1e-12


def test_one_rank_is_bit_identical_to_plain_torch_with_any_compression():
    make = OPTIMIZERS["AdamW"]
    alone = train_alone(Branched(torch.float32), make, 1, STEPS, dtype=torch.float32)

    def body(rank):
        return train_rank(
            Branched(torch.float32), make, rank, STEPS, dtype=torch.float32,
            compression=fl.Compression.fp16,
        )  # fmt: skip

    [trained] = run_threads(1, body)
    for got, expected in zip(trained, alone, strict=True):
        assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))


SCRIPT = """
    import torch
    import farandole.torch as fl
    from models import OPTIMIZERS, Branched, scrambled, train_alone, train_rank
    from test_training import one_rank_skips, relative

    torch.set_num_threads(1)
    fl.init()
    for name, make in OPTIMIZERS.items():
        for uses_branch in (lambda rank, step: True, one_rank_skips):
            alone = train_alone(Branched(), make, fl.size(), 20, uses_branch)
            model = scrambled(Branched(), fl.rank())
            got = train_rank(model, make, fl.rank(), 20, uses_branch)
            assert relative(got[0], alone[0]) < 1e-12, name
            assert relative(got[1], alone[1]) < 1e-12, name
    tell(f"rank {fl.rank()} of {fl.size()} agrees")
"""


def test_training_in_processes_is_that_of_one_process():
    told = run_forked(3, SCRIPT, timeout_s=110)
    assert told == [f"rank {rank} of 3 agrees" for rank in range(3)]


@pytest.mark.parametrize("size", [2, 3])
def test_statistics_of_plain_batch_norm_are_each_ranks_own_until_they_are_broadcast(size):
    """What docs/guide.md says of checkpoints."""

    def body(rank):
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        optimizer = fl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        fl.broadcast_parameters(model.state_dict(), root_rank=0)
        inputs = torch.randn(8, 2, generator=torch.Generator().manual_seed(rank))
        model(inputs).square().sum().backward()
        optimizer.step()
        trained = torch.cat([p.detach().flatten() for p in model.parameters()])
        before = model[1].running_mean.clone()
        fl.broadcast_parameters(dict(model.named_buffers()), root_rank=0)
        return trained, before, model[1].running_mean

    (trained, before, after), *others = run_threads(size, body)
    assert all(torch.equal(trained, other[0]) for other in others)
    assert not any(torch.equal(before, other[1]) for other in others)
    assert all(torch.equal(other[2], after) for other in others) and torch.equal(before, after)
