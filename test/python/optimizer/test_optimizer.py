"""The wrapped optimizer as an object: it stays what it was, whatever happens to its parameters."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch

import farandole.torch as fl
from jobs import on_all, on_all_at_backward
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
