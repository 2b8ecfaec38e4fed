"""Gradients that live in memory of the ranks together and are reduced there without a copy."""

import copy

import pytest
import torch
from torch import nn

import farandole
import farandole.torch as fl
from jobs import on_several
from models import OPTIMIZERS, Branched, parameter, train_alone
from ranks import run_forked, run_threads

pytestmark = [
    pytest.mark.skipif(
        not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="views need torch 2.10"
    ),
    pytest.mark.filterwarnings("ignore:optimizer.step.. called without"),
]

LARGE = 100_000  # elements: too many for a reduction of small messages


def ones(count=LARGE):
    """A weight whose gradients are large."""
    return nn.Parameter(torch.ones(count))


def in_place_bytes():
    """Bytes of gradients that this rank has seen reduced without a copy."""
    return farandole.counters()["in_place_bytes"]


@on_several
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_gives_the_weights_of_one_process(job, name, set_to_none):
    make, model = OPTIMIZERS[name], Branched()
    _, expected = train_alone(copy.deepcopy(model), make, job.size, steps=4)

    for weights in job.train(make, model, lambda _step: set_to_none, gradient_as_bucket_view=True):
        torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-12)


@on_several
@pytest.mark.parametrize("set_to_none", [True, False])
def test_large_gradients_are_reduced_without_a_copy_in_the_same_memory(job, set_to_none):
    def body(rank):
        p, q = ones(), ones(LARGE // 2)
        optimizer = job.sgd(p, q, gradient_as_bucket_view=True)
        addresses = set()
        for step in range(3):
            optimizer.zero_grad(set_to_none=set_to_none)
            (p.sum() * (rank + step) + q.sum()).backward()
            job.finish(optimizer)
            assert p.grad[-1] == job.mean_rank + step
            assert q.grad[0] == 1
            addresses.add((p.grad.data_ptr(), q.grad.data_ptr()))
            optimizer.step()
        farandole.barrier()
        return len(addresses), in_place_bytes()

    assert job.run(body) == [(1, 3 * 4 * LARGE * 3 // 2)] * job.size


@on_several
@pytest.mark.parametrize("op", [fl.Average, fl.Sum], ids=["Average", "Sum"])
def test_who_has_no_gradient_receives_the_result_in_the_view(job, op):
    def body(rank):
        p, unused = ones(), ones()
        optimizer = job.sgd(p, unused, op=op, gradient_as_bucket_view=True)
        for _ in range(3):
            optimizer.zero_grad()
            if rank == 0:
                (p.sum() * 6).backward()
            optimizer.step()
            assert p.grad[-1] == (6 if op is fl.Sum else 6 / job.size)
            assert unused.grad is None
        return in_place_bytes()

    assert job.run(body) == [3 * 4 * LARGE] * job.size


@on_several
def test_a_gradient_that_was_assigned_is_copied_into_the_view(job):
    def body(rank):
        p = ones()
        optimizer = job.sgd(p, gradient_as_bucket_view=True)
        for step in range(3):
            mine = torch.full((LARGE,), float(rank + step))
            p.grad = mine
            optimizer.step()
            assert p.grad is not mine
            assert p.grad[0] == job.mean_rank + step
            assert mine[0] == rank + step
        p.grad.mul_(rank)
        optimizer.step()
        expected = sum(r * (job.mean_rank + 2) for r in range(job.size)) / job.size
        assert p.grad[-1] == pytest.approx(expected)
        return in_place_bytes()

    assert job.run(body) == [4 * 4 * LARGE] * job.size


@on_several
def test_ranks_may_differ_in_it(job):
    def body(rank):
        p = ones()
        optimizer = job.sgd(p, gradient_as_bucket_view=rank == 0)
        for step in range(3):
            optimizer.zero_grad()
            (p.sum() * (rank + step)).backward()
            optimizer.step()
            assert p.grad[-1] == job.mean_rank + step
        return in_place_bytes()

    assert job.run(body) == [0] * job.size


@on_several
@pytest.mark.parametrize("compression", [fl.Compression.fp16, fl.Compression.bf16])
def test_a_wire_dtype_rounds_as_without_views(job, compression):
    def body(rank, are_views):
        p = ones()
        optimizer = job.sgd(p, compression=compression, gradient_as_bucket_view=are_views)
        (p * torch.linspace(-1, 1, LARGE) * (rank + 0.3)).sum().backward()
        optimizer.step()
        return p.detach().clone(), in_place_bytes()

    plain = job.run(lambda rank: body(rank, False))
    views = job.run(lambda rank: body(rank, True))
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(plain, views, strict=True))
    assert [count for _, count in views] == [4 * LARGE] * job.size


@on_several
def test_passes_accumulate_in_the_view(job):
    def body(rank):
        p = ones()
        optimizer = job.sgd(p, gradient_as_bucket_view=True, backward_passes_per_step=2)
        for _ in range(2):
            optimizer.zero_grad()
            for weight in (1, 10):
                (p.sum() * weight * (rank + 1)).backward()
            job.finish(optimizer)
            assert p.grad[-1] == 11 * (job.mean_rank + 1)
            optimizer.step()
        optimizer.set_backward_passes_per_step(1)
        optimizer.zero_grad()
        with optimizer.no_sync():
            p.sum().backward()
        (p.sum() * rank).backward()
        job.finish(optimizer)
        assert p.grad[0] == 1 + job.mean_rank
        optimizer.step()
        return in_place_bytes()

    assert job.run(body) == [3 * 4 * LARGE] * job.size


@on_several
def test_gradients_that_share_memory_get_views_of_their_own(job):
    def body(rank):
        p, q = ones(), ones()
        optimizer = job.sgd(p, q, gradient_as_bucket_view=True)
        for _ in range(2):
            optimizer.zero_grad()
            ((p.view(-1) + q.view(-1)) * (rank + 1)).sum().backward()
            optimizer.step()
            assert p.grad[0] == q.grad[-1] == job.mean_rank + 1
            assert p.grad.data_ptr() != q.grad.data_ptr()

    job.run(body)


@on_several
def test_gradients_without_a_view_are_reduced_as_well(job):
    def body(rank):
        table = nn.Embedding(50_000, 2, sparse=True)
        empty, frozen, plain = parameter(), ones(), ones()
        frozen.requires_grad_(False)
        several = (table.weight, empty, frozen, plain)
        optimizer = job.sgd(*several, gradient_as_bucket_view=True)
        for step in range(3):
            optimizer.zero_grad()
            frozen.requires_grad_(step > 0)
            loss = table(torch.tensor([rank])).sum() + plain.sum() * rank + empty.sum()
            (loss + frozen.sum() * rank).backward()
            optimizer.step()
            assert table.weight.grad.is_sparse
            for p in (plain, *([frozen] if step > 0 else [])):
                assert torch.equal(p.grad, torch.full_like(p, job.mean_rank))
        return in_place_bytes()

    # Of the flag that tells of sparse gradients, too.
    assert [count // (4 * LARGE) for count in job.run(body)] == [5] * job.size


@on_several
def test_gradients_in_another_memory_order_are_copied(job):
    def body(rank):
        image = nn.Parameter(torch.ones(4, 8, 50, 40).to(memory_format=torch.channels_last))
        turned = nn.Parameter(torch.ones(300, 200).t())
        optimizer = job.sgd(image, turned, gradient_as_bucket_view=True)
        for _ in range(3):
            optimizer.zero_grad()
            ((image.sum() + turned.sum()) * rank).backward()
            optimizer.step()
            for p in (image, turned):
                assert torch.equal(p.grad, torch.full_like(p, job.mean_rank))
                assert p.grad.stride() == p.stride()
        return in_place_bytes()

    assert job.run(body) == [0] * job.size


@on_several
def test_another_dtype_gets_other_views(job):
    def body(rank):
        model = nn.Linear(400, 300)
        optimizer = job.wrap(
            torch.optim.SGD(model.parameters(), lr=0.1), gradient_as_bucket_view=True
        )
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            model.to(dtype)
            for _ in range(2):
                optimizer.zero_grad()
                (model(torch.ones(1, 400, dtype=dtype)).sum() * rank).backward()
                optimizer.step()
                assert model.weight.grad.dtype is dtype
                assert model.weight.grad[-1, -1] == job.mean_rank
        return in_place_bytes()

    first, *others = job.run(body)
    assert first >= 2 * 400 * 300 * (4 + 8 + 2)
    assert others == [first] * (job.size - 1)


@on_several
def test_clipping_scaling_and_a_failed_pass(job):
    def body(rank):
        p, q = ones(), ones()
        optimizer = job.sgd(p, q, gradient_as_bucket_view=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(p.sum() * (rank + 1)).backward()
        job.finish(optimizer)
        scaler.unscale_(optimizer)
        assert p.grad[0] == job.mean_rank + 1
        nn.utils.clip_grad_norm_([p], 1.0)
        scaler.step(optimizer)
        scaler.update()
        torch.testing.assert_close(p.detach(), torch.full((LARGE,), 1 - LARGE**-0.5))

        def fail(_):
            raise ArithmeticError("on purpose")

        optimizer.zero_grad()
        loss = p * rank
        if rank == 0:
            loss.register_hook(fail)
        with pytest.raises((ArithmeticError, fl.HorovodInternalError)):
            (loss.sum() + q.sum()).backward()  # that of q comes first
            optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        (p.sum() * rank).backward()
        optimizer.step()
        assert p.grad[-1] == job.mean_rank

    job.run(body)


def test_gradients_stay_when_optimizer_and_context_are_gone():
    def body(rank):
        p = ones()
        optimizer = fl.DistributedOptimizer(
            torch.optim.SGD([p], lr=1.0), gradient_as_bucket_view=True
        )
        (p.sum() * rank).backward()
        optimizer.step()
        state = copy.deepcopy(optimizer.state_dict())
        fl.unwrap(optimizer)
        optimizer.load_state_dict(state)
        return p

    for p in run_threads(2, body):
        assert p.grad[-1] == 0.5
        p.grad.zero_()


def test_adasum_is_refused():
    def body(rank):
        p = ones(4)
        with pytest.raises(ValueError, match="gradient_as_bucket_view=True is for gradients"):
            fl.DistributedOptimizer(
                torch.optim.SGD([p], lr=1.0), op=fl.Adasum, gradient_as_bucket_view=True
            )

    run_threads(2, body)


SCRIPT = """
import torch
import farandole
import farandole.torch as fl

fl.init()
p = torch.nn.Parameter(torch.ones(1000, 500))
optimizer = fl.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), gradient_as_bucket_view=True)
for step in range(4):
    optimizer.zero_grad(set_to_none=step % 2 == 0)
    (p.sum() * (fl.rank() + step)).backward()
    optimizer.step()
    assert torch.equal(p.grad, torch.full_like(p, (fl.size() - 1) / 2 + step))
tell(farandole.counters()["in_place_bytes"])
fl.shutdown()
p.grad.zero_()
"""


@pytest.mark.parametrize("shares", [True, False], ids=["shared", "network"])
def test_processes_of_a_host_reduce_in_place_and_over_a_network_they_copy(shares):
    told = run_forked(3, SCRIPT, FARANDOLE_SHARED_MEMORY=str(int(shares)))
    assert told == [str(4 * 4 * 500_000 if shares else 0)] * 3


def test_where_addresses_are_limited_gradients_are_copied_and_a_line_says_so():
    limited = "import resource; resource.setrlimit(resource.RLIMIT_AS, (40 << 30, -1))\n"
    assert run_forked(2, limited + SCRIPT) == ["0", "0"]
