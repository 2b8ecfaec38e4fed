"""Several wrapped optimizers: GANs, shared parameters, different orders on different ranks."""

import pytest
import torch

import farandole.torch as fl
from jobs import Job, on_all, on_all_at_backward, on_several
from models import parameter

pytestmark = pytest.mark.filterwarnings("ignore:optimizer.step.. called without")


def play(g, d, make, ranks, freezes=False):
    """Six rounds of a game whose second pass fires the first player's parameter too."""
    opt_g, opt_d = make(g), make(d)
    for step in range(6):
        data = [torch.tensor([1.0 + rank + step]) for rank in ranks]
        opt_d.zero_grad()
        for x in data:
            loss = (d * x - 1) ** 2 + (d * (g * x).detach()) ** 2
            (loss.sum() / len(ranks)).backward()
        opt_d.step()
        opt_g.zero_grad()
        d.requires_grad_(not freezes)
        for x in data:
            (((d * g * x - 1) ** 2).sum() / len(ranks)).backward()
        d.requires_grad_(True)
        opt_g.step()
    return g.item(), d.item()


def plain(p):
    return torch.optim.SGD([p], lr=0.001)


@on_all_at_backward
def test_two_optimizers_of_a_gan_do_not_disturb_each_other(job):
    expected = play(parameter(0.5), parameter(0.3), plain, range(job.size))

    def body(rank):
        def make(p):
            return job.wrap(plain(p), [("p", p)])

        return play(parameter(0.5), parameter(0.3), make, [rank])

    for got in job.run(body):
        assert got == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_with_complete_step_a_gan_works_when_the_other_player_is_frozen(size):
    job = Job(size, "step")
    expected = play(parameter(0.5), parameter(0.3), plain, range(size))

    def body(rank):
        def make(p):
            return job.wrap(plain(p), [("p", p)])

        return play(parameter(0.5), parameter(0.3), make, [rank], freezes=True)

    for got in job.run(body):
        assert got == pytest.approx(expected, rel=1e-5)


@on_several
def test_ranks_may_come_to_two_optimizers_in_different_orders(job):
    """A rank that waited for one before it has sent the other would wait for ever."""

    def body(rank):
        table = torch.nn.Embedding(3, 1, sparse=True)
        p, q = parameter(1.0), parameter(1.0)
        first, second = job.sgd(p, table.weight), job.sgd(q)
        for _ in range(3):
            first.zero_grad()
            second.zero_grad()
            if rank % 2:  # autograd runs what was made last first
                mine = (p * 2).sum() + table(torch.tensor([0])).sum()
                other = (q * 3).sum()
            else:
                other = (q * 3).sum()
                mine = (p * 2).sum() + table(torch.tensor([0])).sum()
            (mine + other).backward()
            job.finish(first)
            job.finish(second)
            assert (p.grad.item(), q.grad.item()) == (2.0, 3.0)
            first.step()
            second.step()

    job.run(body)


@on_all
def test_a_shared_parameter_is_reduced_once_for_both_optimizers(job):
    def body(rank):
        shared, p, q = parameter(0.0), parameter(0.0), parameter(0.0)
        first, second = job.sgd(shared, p), job.sgd(q, shared)
        for _ in range(3):
            first.zero_grad()
            second.zero_grad()
            (shared * rank + p * rank + q * rank).sum().backward()
            second.step()
            assert shared.grad.item() == job.mean_rank
            first.step()
        return shared.item(), p.item(), q.item()

    mean = job.mean_rank
    assert job.run(body) == [(-6 * mean, -3 * mean, -3 * mean)] * job.size


@on_all
def test_step_of_the_second_optimizer_takes_part_for_a_shared_parameter(job):
    def body(rank):
        shared = parameter(0.0)
        first, second = job.sgd(shared), job.sgd(parameter(0.0), shared)
        for step in range(4):
            if rank != step % job.size:
                (shared * 12).sum().backward()
            second.step()
            second.zero_grad()
        del first
        return shared.item()

    assert job.run(body) == [-4 * 12 * (job.size - 1) / job.size] * job.size


@on_several
def test_a_shared_parameter_stays_reduced_when_the_first_optimizer_goes(job):
    def body(rank):
        shared = parameter(0.0)
        first = job.sgd(shared)
        second = job.sgd(parameter(0.0), shared)
        del first
        (shared * rank).sum().backward()
        second.step()
        return shared.item()

    assert job.run(body) == [-job.mean_rank] * job.size


@on_several
@pytest.mark.parametrize(
    "different, what",
    [
        ({"op": fl.Sum}, "op"),
        ({"gradient_predivide_factor": 2.0}, "gradient_predivide_factor"),
        ({"compression": fl.Compression.fp16}, "compression"),
        ({"backward_passes_per_step": 2}, "backward_passes_per_step"),
        ({"sparse_as_dense": True}, "sparse_as_dense"),
    ],
)
def test_optimizers_that_share_a_parameter_must_agree(job, different, what):
    def body(rank):
        shared = parameter(0.0)
        first = job.sgd(shared)
        text = f'"p0" belongs to another wrapped optimizer already.* another .*{what}'
        with pytest.raises(ValueError, match=text):
            job.sgd(shared, **different)
        del first

    job.run(body)
