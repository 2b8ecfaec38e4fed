"""What a wrapped optimizer costs per parameter: Python calls, memory, waits for the device."""

import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import farandole.torch as fl
from jobs import Job, on_all_at_backward, on_several
from models import parameter, wrapped
from ranks import count_events, run_threads

pytestmark = [
    pytest.mark.filterwarnings("ignore:optimizer.step.. called without"),
    pytest.mark.filterwarnings("ignore:.torch.distributed.reduce_op. is deprecated"),
]


class Still(torch.optim.Optimizer):
    """An optimizer whose own step() costs nothing."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        pass


def calls(function):
    """How many functions, of Python and of C, ``function`` calls on this thread."""
    return count_events(function, lambda _frame, event: event in ("call", "c_call"))


def costs(parameter_count):
    """Calls per phase of a step on rank 0: of step() and zero_grad() beyond torch's, of backward()."""

    def body(rank):
        weights = [parameter(1.0) for _ in range(parameter_count)]
        optimizer = fl.DistributedOptimizer(Still(weights))
        loss = torch.stack(weights).sum()
        for _ in range(3):
            backward = calls(lambda: loss.backward(retain_graph=True))
            step = calls(optimizer.step) - calls(lambda: Still.step(optimizer))
            plain = calls(lambda: torch.optim.Optimizer.zero_grad(optimizer, set_to_none=False))
            zero = calls(lambda: optimizer.zero_grad(set_to_none=False)) - plain
        return step, zero, backward

    return run_threads(2, body)[0]


def test_step_and_zero_grad_call_as_many_functions_for_any_number_of_parameters():
    few, many = costs(100), costs(1000)
    assert many[0] == few[0] < 100  # step()
    assert many[1] == few[1] < 50  # zero_grad()


def test_backward_calls_a_bounded_number_of_functions_per_parameter():
    few, many = costs(100), costs(1000)
    in_cpp = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
    assert (many[2] - few[2]) / 900 < (0.01 if in_cpp else 60)


def test_a_parameter_that_replaces_another_in_its_group_is_reduced():
    """step() looks at which parameters there are, not only at how many."""

    def body(rank):
        p, q = parameter(0.0), parameter(0.0)
        optimizer = wrapped(p)
        (p * rank).sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["params"][0] = q
        (q * rank).sum().backward()
        optimizer.step()
        return q.item()

    assert run_threads(2, body) == [-0.5, -0.5]


def storage_bytes():
    """Bytes of the memory of all tensors in this process."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            if thing.is_leaf and thing.grad is not None:
                storages[thing.grad.data_ptr()] = thing.grad.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("complete", ["backward", "step"])
def test_parameters_without_a_gradient_keep_no_memory(complete):
    """A frozen base model, as with LoRA, and a live weight that no rank uses."""
    job = Job(2, complete)

    def body(rank):
        base = torch.nn.Parameter(torch.ones(1000, 1000), requires_grad=False)
        unused, adapter = torch.nn.Parameter(torch.ones(500, 1000)), parameter(1.0)
        optimizer = job.sgd(base, unused, adapter)
        fl.barrier()
        before = storage_bytes() if rank == 0 else 0
        fl.barrier()
        for _ in range(3):
            optimizer.zero_grad()
            (adapter * base[0, 0]).sum().backward()
            optimizer.step()
        fl.barrier()
        after = storage_bytes() if rank == 0 else 0
        fl.barrier()
        return after - before

    assert job.run(body)[0] < 100_000


@on_several
@pytest.mark.parametrize("how", ["requires_grad_", "grad"])
def test_a_parameter_unfrozen_on_some_ranks_only_is_reduced_on_all(job, how):
    def body(rank):
        p, q, r = parameter(0.0), parameter(0.0), parameter(0.0)
        q.requires_grad_(False)
        r.requires_grad_(False)
        optimizer = job.sgd(p, q, r)
        for step in range(5):
            optimizer.zero_grad()
            loss = p * rank
            if step >= 2 and rank == 1:
                if how == "grad":
                    r.grad = torch.ones(1)
                else:
                    r.requires_grad_(True)
                    loss = loss + r
            loss.sum().backward()
            optimizer.step()
        assert q.grad is None
        return p.item(), r.item()

    assert job.run(body) == [(-5 * job.mean_rank, -3 / job.size)] * job.size


@on_several
def test_a_pass_that_reaches_unfrozen_parameters_only_is_a_round(job):
    def body(rank):
        p, q = parameter(1.0), parameter(1.0)
        q.requires_grad_(False)
        optimizer = job.sgd(p, q)
        for step in range(4):
            p.requires_grad_(step < 2)
            q.requires_grad_(step >= 2)
            optimizer.zero_grad()
            ((p if step < 2 else q) * rank).sum().backward()
            job.finish(optimizer)
            assert (p if step < 2 else q).grad.item() == job.mean_rank
            optimizer.step()

    job.run(body)


@on_several
def test_parameters_frozen_on_some_ranks_only_are_a_mismatch_by_name(job):
    def body(rank):
        p, q = parameter(1.0), parameter(1.0)
        q.requires_grad_(rank != 1)
        optimizer = job.sgd(p, q)
        with pytest.raises(fl.MismatchError, match='"p1') as raised:
            (p * 1).sum().backward()
            optimizer.step()
        return str(raised.value)

    for text in job.run(body):
        assert "requires no gradient" in text and "rank 1" in text


@on_several
def test_a_group_added_on_some_ranks_only_is_a_mismatch_by_name(job):
    def body(rank):
        p, q = parameter(1.0), parameter(1.0)
        optimizer = job.sgd(p)
        for step in range(3):
            if step == 2 and rank == 0:
                optimizer.add_param_group({"params": [q]})
            expected = pytest.raises(fl.MismatchError, match="noname.1.0") if step == 2 else None
            optimizer.zero_grad()
            if expected is None:
                (p * 1).sum().backward()
                optimizer.step()
                continue
            with expected:
                (p * 1).sum().backward()
                optimizer.step()

    job.run(body)


class CountReads(TorchDispatchMode):
    """Counts how often the host asks for a tensor's value, for which it waits for a GPU."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@on_several
def test_with_sum_the_host_reads_at_most_one_value_per_pass(job):
    """Whether a gradient that was reduced has been zeroed is asked for all of them at once."""

    def body(rank):
        weights = [parameter(0.0) for _ in range(20)]
        optimizer = job.sgd(*weights, op=fl.Sum)
        reads = []
        for step in range(4):
            loss = torch.stack(weights).sum()
            with CountReads() as mode:
                loss.backward()
            reads.append(mode.count)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step < 2)
        assert reads[:3] == [0, 0, 0] and reads[3] <= 1
        return weights[0].item()

    assert job.run(body) == [-4.0 * job.size] * job.size


@on_all_at_backward
def test_with_sum_a_reduced_gradient_on_which_no_sync_accumulates_is_refused(job):
    def body(rank):
        p = parameter(0.0)
        optimizer = job.sgd(p, op=fl.Sum)
        (p * 1).sum().backward()
        if job.size == 1:
            return
        with optimizer.no_sync(), pytest.raises(RuntimeError, match="already holds a reduced value"):
            (p * 1).sum().backward()
            optimizer.step()

    job.run(body)


@on_several
def test_a_clean_sparse_gradient_is_released_after_its_round(job):
    def body(rank):
        table, p = torch.nn.Embedding(6, 2, sparse=True), parameter(1.0)
        optimizer = job.sgd(table.weight, p, op=fl.Sum)
        (table(torch.tensor([rank])).sum() + p.sum()).backward()
        job.finish(optimizer)
        clean = weakref.ref(table.weight.grad)
        p.grad = None
        p.sum().backward()
        job.finish(optimizer)
        table.weight.grad = None
        return clean() is None

    assert job.run(body) == [True] * job.size
