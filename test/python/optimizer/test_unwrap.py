"""What becomes of wrapped optimizers after shutdown(), beside the contract."""

import pytest
import torch

import farandole.torch as fl
from farandole import _core, basics
from models import parameter
from ranks import run_threads

pytestmark = pytest.mark.filterwarnings("ignore:optimizer.step.. called without")


def step(optimizer, p, rank):
    optimizer.zero_grad()
    (p * rank).sum().backward()
    optimizer.step()
    return p.grad.item()


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


def in_two_jobs(body, size=2):
    """Calls ``body(rank)``, a generator, on the ranks of a job, and from its second ``yield`` on of another job.

    Between the two yields there is none.
    """
    jobs = [_core.Context.in_process(size) for _ in range(2)]

    def run(rank):
        parts = body(rank)
        with basics.using(basics.Context(jobs[0][rank])) as first:
            next(parts)
            fl.barrier()
            first.close()
        next(parts)
        with basics.using(basics.Context(jobs[1][rank])) as second:
            next(parts, None)
            fl.barrier()
            second.close()

    run_threads(size, run)


def test_parameters_that_come_between_two_jobs_are_reduced_in_the_second():
    def body(rank):
        p, q = parameter(1.0), parameter(1.0)
        optimizer = fl.DistributedOptimizer(torch.optim.SGD([p], lr=0.0))
        assert step(optimizer, p, rank) == 0.5
        yield
        optimizer.add_param_group({"params": [q]})
        yield
        (p * rank + q * rank).backward()
        optimizer.step()
        assert q.grad.item() == 0.5

    in_two_jobs(body)


def test_a_process_set_that_is_not_added_to_the_second_job_keeps_its_own_optimizer_only():
    def body(rank):
        p, q = parameter(1.0), parameter(1.0)
        some = fl.add_process_set([0, 1])
        of_some = fl.DistributedOptimizer(torch.optim.SGD([p], lr=0.0), process_set=some)
        of_all = fl.DistributedOptimizer(torch.optim.SGD([q], lr=0.0))
        yield
        yield
        assert step(of_all, q, rank) == 1
        if rank < 2:
            with pytest.raises(TypeError, match="has not been registered"):
                (p * rank).backward()
        fl.add_process_set(some)
        assert step(of_some, p, rank) == (0.5 if rank < 2 else 2)
        assert step(of_all, q, rank) == 1

    in_two_jobs(body, 3)


def test_a_step_of_adasum_that_fails_in_a_second_job_fails_on_all_its_ranks():
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            if fails:
                raise RuntimeError("no step")
            super().step(closure)

    fails = []

    def body(rank):
        p = parameter(1.0)
        optimizer = fl.DistributedOptimizer((Failing if rank == 0 else torch.optim.SGD)([p], lr=0.1), op=fl.Adasum)
        step(optimizer, p, rank)
        yield
        yield
        if rank == 0:
            fails.append(True)
        with pytest.raises(RuntimeError, match="no step" if rank == 0 else "rank 0 failed: step"):
            step(optimizer, p, rank)

    in_two_jobs(body)
