"""The wrapped optimizer as an object: it stays what it was, whatever happens to its parameters."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch

import farandole.torch as fl
from jobs import on_all, on_all_at_backward, on_several
from models import Branched, batch, loss_of, parameter, wrapped
from ranks import run_threads

pytestmark = pytest.mark.filterwarnings("ignore:optimizer.step.. called without")


@on_all
def test_the_optimizer_stays_the_same_object_of_the_same_class(job):
    def body(rank):
        model = Branched()
        adam = torch.optim.Adam(model.parameters(), lr=0.1)
        optimizer = job.wrap(adam, model.named_parameters())
        assert optimizer is adam and type(optimizer) is torch.optim.Adam
        assert isinstance(optimizer, torch.optim.Optimizer)
        loss_of(model, batch(rank, 0)).backward()
        optimizer.step()
        assert set(optimizer.state_dict()) == {"state", "param_groups"}
        for twin in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
            assert type(twin) is torch.optim.Adam
            for name in ("_farandole", "zero_grad", "step", "no_sync", "_parameter_names"):
                assert name not in twin.__dict__
            twin.zero_grad()
            twin.step()  # alone: it exchanges nothing
        torch.save(optimizer.state_dict(), io.BytesIO())
        torch.save(optimizer, io.BytesIO())
        torch.save(model.state_dict(), io.BytesIO())
        copy.deepcopy(model)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    job.run(body)


@on_all
def test_schedulers_made_before_and_after_wrapping_act(job):
    def body(rank):
        p = parameter(1.0)
        plain = torch.optim.SGD([p], lr=0.1)
        before = torch.optim.lr_scheduler.StepLR(plain, 1)
        optimizer = job.wrap(plain, [("p", p)])
        after = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for _ in range(2):
            optimizer.zero_grad()
            (p * rank).sum().backward()
            optimizer.step()
            before.step()
            after.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.05**2)
        return p.item()

    expected = 1 - job.mean_rank * (0.1 + 0.005)
    assert job.run(body) == pytest.approx([expected] * job.size)


@on_all
def test_a_scheduler_sees_that_step_was_called(job, recwarn):
    def body(rank):
        p = parameter(1.0)
        optimizer = job.sgd(p)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        (p * rank).sum().backward()
        optimizer.step()
        scheduler.step()

    job.run(body)
    assert not [w for w in recwarn if "lr_scheduler.step" in str(w.message)]


@on_all
def test_a_subclass_whose_step_calls_the_base_runs_one_round(job):
    class Twice(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    def body(rank):
        p = parameter(1.0)
        optimizer = job.wrap(Twice([p], lr=1.0), [("p", p)])
        for _ in range(3):
            optimizer.zero_grad()
            (p * rank).sum().backward()
            optimizer.step()
        if job.size > 1:
            assert optimizer.synchronize.__self__.own.rounds == 3
        return p.item()

    assert job.run(body) == [1 - 3 * job.mean_rank] * job.size


@on_all
def test_unfrozen_parameters_are_exchanged(job):
    def body(rank):
        p, q = parameter(1.0), parameter(1.0)
        q.requires_grad_(False)
        optimizer = job.sgd(p, q)
        for step in range(5):
            q.requires_grad_(step >= 2)
            optimizer.zero_grad()
            (p + q * rank).sum().backward()
            job.finish(optimizer)
            assert (q.grad.item() if step >= 2 else q.grad) == (job.mean_rank if step >= 2 else None)
            optimizer.step()

    job.run(body)


@on_all
def test_an_added_group_is_exchanged(job):
    def body(rank):
        p, q, r = parameter(0.0), parameter(0.0), parameter(0.0)
        optimizer = job.sgd(p)
        for step in range(6):
            if step == 2:
                optimizer.add_param_group({"params": [q], "lr": 2.0})
            if step == 4:  # behind the optimizer's back: at the latest in step()
                optimizer.param_groups[0]["params"].append(r)
            optimizer.zero_grad()
            ((p + q + r) * rank).sum().backward()
            optimizer.step()
        return p.item(), q.item(), r.item()

    mean = job.mean_rank
    assert job.run(body) == [(-6 * mean, -8 * mean, -2 * mean)] * job.size


@on_all
def test_two_backward_passes_after_a_group_was_added(job):
    def body(rank):
        p, q, r = parameter(0.0), parameter(0.0), parameter(0.0)
        optimizer = job.sgd(p, q)
        ((p + q) * rank).sum().backward()
        optimizer.step()
        optimizer.add_param_group({"params": [r]})
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(2):
                ((p + q + r) * rank).sum().backward()
            optimizer.step()
        return p.item(), q.item(), r.item()

    mean = job.mean_rank
    assert job.run(body) == [(-5 * mean, -5 * mean, -4 * mean)] * job.size


@on_all
def test_a_group_added_between_backward_and_step_is_exchanged(job):
    def body(rank):
        p, q = parameter(0.0), parameter(0.0)
        optimizer = job.sgd(p)
        ((p + q) * rank).sum().backward()
        optimizer.add_param_group({"params": [q]})
        optimizer.step()
        return p.item(), q.item()

    assert job.run(body) == [(-job.mean_rank, -job.mean_rank)] * job.size


@on_all
@pytest.mark.parametrize("op", [fl.Average, fl.Sum])
def test_a_model_converted_after_wrapping_is_reduced_in_its_new_dtype(job, op):
    def body(rank):
        model = torch.nn.Linear(2, 1, bias=False)
        optimizer = job.wrap(torch.optim.SGD(model.parameters(), lr=0.0), op=op)
        for dtype in (torch.float32, torch.float64, torch.float64):
            model.to(dtype)
            optimizer.zero_grad()
            x = torch.full((1, 2), 1 + 1e-9 * rank, dtype=dtype)
            model(x).sum().backward()
            job.finish(optimizer)
            optimizer.step()
        return model.weight.grad[0, 0].item() / (job.size if op == fl.Sum else 1) - 1

    for difference in job.run(body):
        assert difference == pytest.approx(1e-9 * job.mean_rank, rel=1e-6)


@on_all
def test_a_dropped_optimizer_takes_its_hooks_along(job):
    def body(rank):
        p = parameter(1.0)
        optimizer = job.sgd(p)
        (p * rank).sum().backward()
        job.finish(optimizer)
        dropped = weakref.ref(optimizer)
        del optimizer
        assert dropped() is None
        p.grad = None
        (p * (rank + 1)).sum().backward()
        assert p.grad.item() == rank + 1
        optimizer = job.sgd(p)
        p.grad = None
        (p * (rank + 1)).sum().backward()
        job.finish(optimizer)
        assert p.grad.item() == job.mean_rank + 1
        del optimizer

    gc.disable()
    try:
        job.run(body)
    finally:
        gc.enable()


@on_all_at_backward
def test_one_rank_has_no_hooks_and_several_have(job):
    def body(rank):
        p = parameter(1.0)
        optimizer = job.sgd(p, op=fl.Sum)
        (p * 1).sum().backward()
        has_hooks = bool(getattr(p, "_post_accumulate_grad_hooks", p._backward_hooks))
        del optimizer
        return has_hooks

    assert job.run(body) == [job.size > 1] * job.size


def test_groups_are_accepted_and_change_no_value():
    def body(rank):
        results = []
        for make in (
            lambda ps: {"groups": 2},
            lambda ps: {"groups": [[ps[0], ps[2]], [ps[1]]]},
            lambda ps: {"groups": 0},
        ):
            ps = [torch.nn.Parameter(torch.ones(100)) for _ in range(5)]
            optimizer = wrapped(*ps, **make(ps))
            for _ in range(3):
                optimizer.zero_grad()
                sum((p * rank).sum() for p in ps).backward()
                optimizer.step()
            gradients = optimizer.synchronize.__self__.own.gradients
            results.append((ps[0][0].item(), gradients.groups))
        return results

    for by_number, by_lists, by_size in run_threads(2, body):
        assert by_number[0] == by_lists[0] == by_size[0] == -0.5
        assert by_number[1] > by_lists[1] == by_size[1]  # and the tail, kept small


def test_wrong_groups_are_refused():
    p = parameter(1.0)

    def wrap(**arguments):
        fl.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), **arguments)

    with pytest.raises(ValueError, match="groups should be a non-negative integer or a list"):
        wrap(groups=-1)
    with pytest.raises(ValueError, match="groups should be a non-negative integer or a list"):
        wrap(groups=[p])
    with pytest.raises(ValueError, match="in more than one group"):
        wrap(groups=[[p], [p]])
    with pytest.warns(DeprecationWarning, match="num_groups"), pytest.raises(ValueError):
        wrap(num_groups=2)


def test_wrong_arguments_are_refused_before_anything_is_sent():
    p, q = parameter(1.0), parameter(1.0)
    optimizer = torch.optim.SGD([p, q], lr=1.0)
    for arguments, text in (
        ({"named_parameters": [("w", p), ("w", q)]}, "used twice: w"),
        ({"named_parameters": [("w", p)]}, "not in it"),
        ({"named_parameters": [p, q]}, "tuples"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step must be > 0, not 0"),
        ({"op": fl.Min}, "op must be Average, Sum or Adasum"),
        ({"op": fl.Sum, "gradient_predivide_factor": 2.0}, "gradient_predivide_factor"),
        ({"complete": "later"}, 'complete must be "backward" or "step", not \'later\''),
        ({"compression": "fp16"}, "compression must have compress.*'fp16' has no compress"),
        ({}, "not been initialized"),
    ):
        with pytest.raises(ValueError, match=text):
            fl.DistributedOptimizer(optimizer, **arguments)


@on_several
def test_names_may_come_from_a_generator_and_are_told_in_messages(job):
    def body(rank):
        layer = torch.nn.Linear(2 + rank, 1, bias=False)
        optimizer = job.wrap(torch.optim.SGD(layer.parameters(), lr=1.0), layer.named_parameters())
        assert optimizer._parameter_names == {layer.weight: "weight"}
        with pytest.raises(fl.MismatchError, match="weight"):
            layer(torch.ones(1, 2 + rank)).sum().backward()
            optimizer.step()

    job.run(body)


@on_all_at_backward
def test_wrapping_twice_is_refused(job):
    def body(rank):
        optimizer = job.sgd(parameter(1.0))
        with pytest.raises(ValueError, match="wrapped already"):
            fl.DistributedOptimizer(optimizer)

    job.run(body)


@pytest.fixture
def process_group(tmp_path):
    """torch.distributed with one process."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def refused(module, text):
    """Whether wrapping an optimizer of the module is refused, and one of another is not."""

    def body(rank):
        with pytest.raises(ValueError, match=text):
            fl.DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=1.0))
        other = torch.nn.Linear(2, 1)
        fl.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=1.0))
        return True

    return run_threads(1, body) == [True]


def test_parameters_that_ddp_reduces_are_refused(process_group):
    module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    assert refused(module, "belong to a DistributedDataParallel module")
    assert refused(module.module, "belong to a DistributedDataParallel module")


def test_parameters_that_fsdp_shards_are_refused(process_group):
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        pytest.skip("this torch has no fully_shard")
    module = torch.nn.Linear(2, 1)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    fully_shard(module, mesh=mesh)
    assert refused(module, "belong to a FSDP module")
