"""Optimizers that are unwrapped, and what becomes of wrapped ones after shutdown()."""

import copy
import gc

import pytest
import torch

import farandole.torch as fl
from farandole import _core, basics
from jobs import Job, on_all, on_all_at_backward, on_several
from models import parameter
from ranks import run_forked, run_threads

pytestmark = pytest.mark.filterwarnings("ignore:optimizer.step.. called without")


def step(optimizer, p, rank):
    optimizer.zero_grad()
    (p * rank).sum().backward()
    optimizer.step()
    return p.grad.item()


@on_all
def test_an_unwrapped_optimizer_is_a_plain_one_and_can_be_wrapped_again(job):
    def body(rank):
        p = parameter(1.0)
        plain = torch.optim.SGD([p], lr=0.0)
        before = set(plain.__dict__)
        optimizer = job.wrap(plain, [("p", p)])
        for _ in range(3):
            assert step(optimizer, p, rank) == job.mean_rank
            optimizer.zero_grad()
            assert fl.unwrap(optimizer) is plain
            assert set(plain.__dict__) == before
            assert not getattr(p, "_post_accumulate_grad_hooks", None) and not p._backward_hooks
            assert step(plain, p, rank) == rank
            with pytest.raises(ValueError, match="is not wrapped"):
                fl.unwrap(plain)
            optimizer = job.wrap(plain, [("p", p)])
        assert step(optimizer, p, rank) == job.mean_rank

    gc.disable()
    try:
        job.run(body)
    finally:
        gc.enable()


@on_all
def test_a_scheduler_made_before_the_wrap_acts_after_unwrapping(job):
    def body(rank):
        p = parameter(1.0)
        plain = torch.optim.SGD([p], lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(plain, 0.5)
        optimizer = job.wrap(plain, [("p", p)])
        step(optimizer, p, rank)
        scheduler.step()
        fl.unwrap(optimizer)
        step(plain, p, rank)
        scheduler.step()
        return p.item(), plain.param_groups[0]["lr"]

    for rank, told in enumerate(job.run(body)):
        assert told == (1 - job.mean_rank - 0.5 * rank, 0.25)


@on_several
def test_unwrapping_the_second_of_two_that_share_a_parameter_leaves_the_first(job):
    def body(rank):
        shared, q = parameter(0.0), parameter(0.0)
        first, second = job.sgd(shared), job.sgd(shared, q)
        fl.unwrap(second)
        assert step(first, shared, rank) == job.mean_rank
        (q * rank).sum().backward()
        assert q.grad.item() == rank

    job.run(body)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("arguments", [{}, {"backward_passes_per_step": 2}], ids=["sent", "window"])
def test_unwrapping_with_gradients_on_their_way_is_refused(size, arguments):
    job = Job(size, "step")

    def body(rank):
        p = parameter(1.0)
        optimizer = job.sgd(p, **arguments)
        (p * rank).sum().backward()
        with pytest.raises(ValueError, match=r"call step\(\), synchronize\(\) or"):
            fl.unwrap(optimizer)
        optimizer.step()
        fl.unwrap(optimizer)
        return p.item()

    assert job.run(body) == [1 - job.mean_rank] * size


@on_all_at_backward
def test_copies_of_a_wrapped_optimizer_are_not_wrapped(job):
    def body(rank):
        copied = copy.deepcopy(job.sgd(parameter(1.0)))
        with pytest.raises(ValueError, match="is not wrapped"):
            fl.unwrap(copied)

    job.run(body)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("complete", ["backward", "step"])
@pytest.mark.parametrize("is_in_flight", [False, True])
def test_after_shutdown_and_init_the_model_can_be_wrapped_again(size, complete, is_in_flight):
    """Every rank: one job, its end, another job; the first job's optimizer still lives."""
    jobs = [_core.Context.in_process(size) for _ in range(2)]

    def body(rank):
        p = parameter(1.0)

        def wrap():
            plain = torch.optim.SGD([p], lr=0.0)
            return fl.DistributedOptimizer(plain, [("p", p)], complete=complete)

        first = basics.Context(jobs[0][rank])
        with basics.using(first):
            old = wrap()
            assert step(old, p, rank) == (size - 1) / 2
            if is_in_flight and complete == "step":
                (p * rank).sum().backward()
            fl.barrier()
            first.close()
        with basics.using(basics.Context(jobs[1][rank])) as second:
            new = wrap()
            assert step(new, p, rank) == (size - 1) / 2
            for use in (old.step, old.synchronize) if size > 1 else ():
                text = r"wrapped before shutdown\(\).*wrap it again .*farandole.torch.unwrap"
                with pytest.raises(fl.HorovodInternalError, match=text):
                    use()
            old.zero_grad()
            fl.unwrap(new)
            again = fl.DistributedOptimizer(old, [("p", p)], complete=complete)
            assert again is old and step(old, p, rank) == (size - 1) / 2
            second.close()
        assert step(fl.unwrap(old), p, rank) == rank

    run_threads(size, body)


@pytest.mark.once
def test_wrapping_in_another_order_and_again_after_shutdown_in_processes():
    told = run_forked(
        2,
        """
        import torch
        import farandole.torch as fl
        from models import parameter

        model = torch.nn.Linear(1, 1, bias=False)

        def reduced_by(optimizer):
            optimizer.zero_grad()
            model(torch.full((1, 1), float(fl.rank()))).sum().backward()
            optimizer.step()
            return model.weight.grad.item()

        def wrap():
            return fl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))

        fl.init()
        p, q = parameter(1.0), parameter(2.0)
        order = [("p", p), ("q", q)] if fl.rank() == 0 else [("q", q), ("p", p)]
        wrapped = [fl.DistributedOptimizer(torch.optim.SGD([w], lr=1.0), [(n, w)]) for n, w in order]
        try:
            (p * 1).sum().backward()
        except fl.MismatchError as error:
            tell("p float32 [1]" in str(error).split("rank 1")[0])
        fl.shutdown()
        fl.init()
        old = wrap()
        tell(reduced_by(old))
        fl.shutdown()
        fl.init()
        new = wrap()
        tell(reduced_by(new))
        try:
            old.step()
        except fl.HorovodInternalError as error:
            tell("unwrap(optimizer)" in str(error))
        fl.unwrap(new)
        tell(reduced_by(fl.DistributedOptimizer(old)))
        """,
    )
    assert [text.split() for text in told] == [["True", "0.5", "0.5", "True", "0.5"]] * 2
