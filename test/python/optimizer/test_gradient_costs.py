"""What a wrapped optimizer costs per parameter: Python calls, memory, waits for the device."""

import gc
import weakref

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import farandole.torch as fl
from jobs import Job, on_several
from models import parameter
from ranks import count_events, run_forked, run_threads

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


@pytest.mark.parametrize("compression", [fl.Compression.none, fl.PowerSGD(1)], ids=["none", "PowerSGD"])
@pytest.mark.parametrize("complete", ["backward", "step"])
def test_parameters_without_a_gradient_keep_no_memory(complete, compression):
    """A frozen base model, as with LoRA, and a live weight that no rank uses."""
    job = Job(2, complete)

    def body(rank):
        base = torch.nn.Parameter(torch.ones(1000, 1000), requires_grad=False)
        unused, adapter = torch.nn.Parameter(torch.ones(500, 1000)), parameter(1.0)
        optimizer = job.sgd(base, unused, adapter, compression=compression)
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


def ordinary_model():
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten(),
        torch.nn.Linear(4 * 36, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 8),
        torch.nn.Unflatten(1, (2, 4)), torch.nn.LSTM(4, 4),
    )  # fmt: skip


def copies_of_a_pass(model, optimizer, data):
    """How often ``backward()`` copies a tensor, after the order of gradients is known."""
    for _ in range(3):
        optimizer.zero_grad()
        model(data)[0].square().sum().backward()
    optimizer.zero_grad()
    loss = model(data)[0].square().sum()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        loss.backward()
    return sum(e.count for e in profiler.key_averages() if e.key in ("aten::clone", "aten::copy_"))


def test_an_ordinary_model_pays_no_copy():
    """In one process: the profiler is one for all threads."""
    code = """
import sys, torch
import farandole.torch as fl
from test_gradient_costs import copies_of_a_pass, ordinary_model
fl.init()
counts = []
for wraps in (False, True):
    model = ordinary_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if wraps:
        optimizer = fl.DistributedOptimizer(optimizer, model.named_parameters())
    counts.append(copies_of_a_pass(model, optimizer, torch.ones(3, 1, 8, 8)))
tell(counts[1] - counts[0])
"""
    assert run_forked(2, code) == ["0", "0"]
