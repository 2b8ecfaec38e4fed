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
