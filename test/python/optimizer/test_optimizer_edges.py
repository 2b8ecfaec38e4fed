"""What users do around a wrapped optimizer that is easily lost: their own methods, hooks, conversions."""

import pytest
import torch

import farandole.torch as fl
from jobs import Job, on_several
from models import parameter
from ranks import run_threads

pytestmark = pytest.mark.filterwarnings("ignore:optimizer.step.. called without")


@on_several
def test_a_closure_after_a_backward_pass_finds_its_round_complete(job):
    """Sharpness-aware minimisation: the first gradient is used inside step(closure)."""

    def body(rank):
        mine = []
        p = parameter(1.0)
        optimizer = job.wrap(Recording([p], mine), [("p", p)], reduce_loss=False)
        for _ in range(3):
            optimizer.zero_grad()
            (p * rank).sum().backward()

            def closure():
                optimizer.zero_grad()
                loss = (p * (2 * rank)).sum()
                loss.backward()
                return loss

            optimizer.step(closure)
            assert mine[-1] == job.mean_rank
            assert p.grad.item() == 2 * job.mean_rank
        return p.item()

    class Recording(torch.optim.SGD):
        def __init__(self, parameters, seen):
            super().__init__(parameters, lr=0.1)
            self.seen = seen

        def step(self, closure=None):
            self.seen.append(self.param_groups[0]["params"][0].grad.item())
            with torch.enable_grad():
                loss = closure()
            for p in self.param_groups[0]["params"]:
                p.data.sub_(p.grad, alpha=0.1)
            return loss

    results = job.run(body)
    assert results == [results[0]] * job.size


@pytest.mark.parametrize("size", [2, 3])
def test_step_and_zero_grad_in_a_hook_after_each_gradient(size):
    """An optimizer for each parameter, stepped as soon as its gradient is there."""

    def body(rank):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(0.1)
        optimizers = {
            p: fl.DistributedOptimizer(torch.optim.SGD([p], lr=0.1), [(name, p)])
            for name, p in model.named_parameters()
        }

        def step(p):
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        for _ in range(4):
            model(torch.ones(3, 4) * (rank + 1)).square().sum().backward()
            assert all(p.grad is None for p in model.parameters())
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    first, *others = run_threads(size, body)
    assert not first.eq(0.1).any()
    assert all(other.equal(first) for other in others)


@pytest.mark.skipif(
    not hasattr(torch.__future__, "set_swap_module_params_on_conversion"),
    reason="this torch swaps no parameters",
)
@pytest.mark.parametrize("size", [2, 3])
def test_parameters_that_a_conversion_swaps_are_still_reduced(size):
    def body(rank):
        model = torch.nn.Linear(3, 1)
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(1.0)
        optimizer = fl.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
        )
        for step in range(4):
            if step == 2:
                model.double()  # with the gradients of the last step
            optimizer.zero_grad()
            dtype = model.weight.dtype
            (model(torch.ones(2, 3, dtype=dtype)) * (rank + 1)).sum().backward()
            assert model.weight.grad.eq(size + 1).all()
            optimizer.step()

    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        run_threads(size, body)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_lazy_parameters_are_refused_at_the_wrap():
    def body(rank):
        model = torch.nn.LazyLinear(3)
        with pytest.raises(ValueError, match='parameter "weight" is lazy'):
            Job(2).wrap(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())

    run_threads(2, body)
