"""Memory that a gradient shares with something else is not written when the gradient is reduced.

Autograd gives ``.grad`` views: of what later nodes of the same pass read, of gradients of other tensors,
of what the user passed to ``backward()`` or a hook has kept.
"""

import time

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import farandole.torch as fl
from jobs import Job, on_several

pytestmark = pytest.mark.filterwarnings("ignore:optimizer.step.. called without")

COUNT = 4096
VIEWS = {"groups": 1000, "gradient_as_bucket_view": True}
#: How an optimizer may be wrapped; "groups" makes each gradient travel by itself, during the pass.
ARGUMENTS = [
    {"groups": 1000},
    VIEWS,
    {"overlap": False},
    {"groups": 1000, "compression": fl.Compression.bf16},
]
with_arguments = pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)


def leaf(*shape):
    return torch.nn.Parameter(torch.ones(*shape))


def wait_for_the_others(gradient):
    """In a tensor's hook: what was sent before has time to be reduced, and written."""
    time.sleep(0.05)


@on_several
@with_arguments
def test_a_gradient_that_later_nodes_read_is_reduced_in_memory_of_its_own(job, arguments):
    """A residual stream with a positional embedding and a batch of one."""

    def body(rank):
        a, b, r1, r2 = (leaf(COUNT) for _ in range(4))
        p = leaf(1, COUNT)
        optimizer = job.sgd(a, b, r1, r2, p, op=fl.Sum, **arguments)
        for step in range(4):
            optimizer.zero_grad()
            u = a * b
            u.register_hook(wait_for_the_others)
            y = u + r2 * 3 + r1 * 2 + p.view(-1)
            (y * (1.0 + rank)).sum().backward()
            job.finish(optimizer)
            for factor, each in zip((1, 1, 2, 3, 1), (a, b, r1, r2, p), strict=True):
                assert each.grad.eq(job.size * (1 + job.mean_rank) * factor).all(), step

    job.run(body)


def input_leaf(p):
    """The gradient of an input, as for saliency maps; gives what must stay and what it must be."""
    x = torch.ones(COUNT, requires_grad=True)
    return (x + p.view(-1)), lambda: x.grad


def parameter_that_is_not_wrapped(p):
    other = leaf(1, COUNT)
    return (other.view(-1) + p.view(-1)), lambda: other.grad.view(-1)


def gradient_that_a_hook_keeps(p):
    y = p.view(-1) * 1
    kept = []
    z = y.view(1, -1)
    z.register_hook(kept.append)
    return z.view(-1), lambda: kept[-1].view(-1)


def gradient_that_a_hook_keeps_of_a_sum(p):
    kept = []
    y = p.view(-1) + torch.ones(COUNT)
    y.register_hook(kept.append)
    return y, lambda: kept[-1]


@on_several
@with_arguments
@pytest.mark.parametrize(
    "make",
    [input_leaf, parameter_that_is_not_wrapped, gradient_that_a_hook_keeps,
     gradient_that_a_hook_keeps_of_a_sum],
)  # fmt: skip
def test_gradients_of_other_tensors_stay_what_they_are(job, make, arguments):
    def body(rank):
        p, r = leaf(1, COUNT), leaf(COUNT)
        optimizer = job.sgd(p, r, **arguments)
        for _ in range(3):
            optimizer.zero_grad()
            y, other = make(p)
            ((y + r * 2) * (1.0 + rank)).sum().backward()
            job.finish(optimizer)
            assert p.grad.eq(1 + job.mean_rank).all()
            assert r.grad.eq(2 + 2 * job.mean_rank).all()
            assert other().eq(1.0 + rank).all()

    job.run(body)


@on_several
@with_arguments
def test_the_gradient_that_backward_was_given_is_not_written(job, arguments):
    def body(rank):
        p = leaf(1, COUNT)
        optimizer = job.sgd(p, **arguments)
        for _ in range(3):
            optimizer.zero_grad()
            given = torch.full((COUNT,), 1.0 + rank)
            p.view(-1).backward(given)
            job.finish(optimizer)
            assert p.grad.eq(1 + job.mean_rank).all()
            assert given.eq(1.0 + rank).all()

    job.run(body)


class GivesItsInput(torch.autograd.Function):
    """A function whose gradient is a view of the batch."""

    @staticmethod
    def forward(ctx, parameter, batch):
        ctx.save_for_backward(batch)
        return (parameter * batch).sum()

    @staticmethod
    def backward(ctx, gradient):
        (batch,) = ctx.saved_tensors
        return batch.view(1, -1), None


@on_several
@with_arguments
def test_a_batch_of_which_a_function_gives_a_view_is_not_written(job, arguments):
    def body(rank):
        p = leaf(1, COUNT)
        optimizer = job.sgd(p, **arguments)
        batch = torch.full((COUNT,), 1.0 + rank)
        for _ in range(3):
            optimizer.zero_grad()
            GivesItsInput.apply(p, batch).backward()
            job.finish(optimizer)
            assert p.grad.eq(1 + job.mean_rank).all()
            assert batch.eq(1.0 + rank).all()

    job.run(body)


@on_several
@with_arguments
def test_two_optimizers_whose_gradients_share_memory_reduce_each_once(job, arguments):
    def body(rank):
        p, q = leaf(1, COUNT), leaf(1, COUNT)
        first, second = (job.sgd(each, op=fl.Sum, **arguments) for each in (p, q))
        for step in range(4):
            first.zero_grad()
            second.zero_grad()
            ((p.view(-1) + q.view(-1)) * (1.0 + rank)).sum().backward()
            job.finish(first)
            job.finish(second)
            for each in (p, q):
                assert each.grad.eq(job.size * (1 + job.mean_rank)).all(), step
            first.step()
            second.step()

    job.run(body)


@on_several
def test_a_rank_outside_of_a_set_keeps_its_gradient(job):
    def body(rank):
        inside = fl.add_process_set(range(job.size - 1) if job.size > 2 else [0])
        p, q = leaf(1, COUNT), leaf(1, COUNT)
        first, second = job.sgd(p), job.sgd(q, process_set=inside)
        for _ in range(3):
            first.zero_grad()
            second.zero_grad()
            ((p.view(-1) + q.view(-1)) * (1.0 + rank)).sum().backward()
            job.finish(first)
            job.finish(second)
            assert p.grad.eq(1 + job.mean_rank).all()
            members = inside.size() if inside.included() else 1
            mean = 1 + (members - 1) / 2 if inside.included() else 1.0 + rank
            assert q.grad.eq(mean).all()

    job.run(body)


@on_several
@with_arguments
def test_gradients_that_overlap_in_part_are_reduced_once_each(job, arguments):
    def body(rank):
        r, p, q = leaf(COUNT), leaf(COUNT // 2), leaf(COUNT // 2)
        optimizer = job.sgd(r, p, q, op=fl.Sum, **arguments)
        for step in range(4):
            optimizer.zero_grad()
            ((r.view(-1) + torch.cat([p, q])) * (1.0 + rank)).sum().backward()
            job.finish(optimizer)
            for each in (r, p, q):
                assert each.grad.eq(job.size * (1 + job.mean_rank)).all(), step

    job.run(body)


@on_several
@with_arguments
def test_sharing_that_begins_in_a_later_step_is_handled(job, arguments):
    def body(rank):
        p, q, r = (leaf(COUNT) for _ in range(3))
        optimizer = job.sgd(p, q, r, op=fl.Sum, **arguments)
        for step in range(5):
            optimizer.zero_grad()
            if step < 2:
                loss = p * 1 + r * 1 + q * 1
            else:  # autograd comes last to what was made first: q is sent when r follows, then p
                loss = p.view(-1) + r * 1 + q.view(-1)
            loss.backward(torch.ones(COUNT))
            optimizer.step()
            for each in (p, q, r):
                assert each.grad.eq(job.size).all()

    job.run(body)


@on_several
@pytest.mark.parametrize("arguments", [each for each in ARGUMENTS if each != VIEWS], ids=str)
def test_a_flat_buffer_of_the_users_keeps_the_gradients(job, arguments):
    """As of optimizers that step over one tensor: gradients are views that the user placed."""

    def body(rank):
        p, q = leaf(COUNT), leaf(COUNT)
        flat = torch.zeros(2 * COUNT)
        p.grad, q.grad = flat[:COUNT], flat[COUNT:]
        optimizer = job.sgd(p, q, **arguments)
        for _ in range(3):
            flat.zero_()
            optimizer.zero_grad(set_to_none=False)
            ((p + q * 2) * (1.0 + rank)).sum().backward()
            job.finish(optimizer)
            assert flat[:COUNT].eq(1 + job.mean_rank).all()
            assert flat[COUNT:].eq(2 + 2 * job.mean_rank).all()

    job.run(body)


@pytest.mark.parametrize("size", [2, 3])
def test_a_gradient_that_has_left_a_flat_buffer_has_a_version_of_its_own(size):
    """Additions to the views that are left are none to it, which is in flight meanwhile."""
    job = Job(size)

    def body(rank):
        layers = [torch.nn.Parameter(torch.ones(COUNT)) for _ in range(4)]
        for layer, view in zip(layers, torch.zeros(4, COUNT), strict=True):
            layer.grad = view
        optimizer = job.sgd(*layers, groups=1000)
        for step in range(5):
            optimizer.zero_grad(set_to_none=False)
            if step >= 2:
                layers[3].grad = None
            x = torch.ones(COUNT) * (1.0 + rank)
            for layer in layers:
                x = x * layer
            x.sum().backward()
            optimizer.step()

    job.run(body)


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
from test_gradient_memory import copies_of_a_pass, ordinary_model
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
    from ranks import run_forked

    assert run_forked(2, code) == ["0", "0"]
