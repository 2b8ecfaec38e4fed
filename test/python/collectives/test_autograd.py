"""Gradients through collectives: Horovod's formulas, and autograd's own where both agree.

``alone`` computes what all ranks compute, in one process: their inputs are leaves of one graph, and
the loss is the sum of the ranks' losses.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import farandole.torch as fl
from models import Halved
from ranks import run_threads

SIZE = 3


def input_of(rank, rows=4):
    """This rank's leaf: [rows, 2] of float64."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(rows, 2, generator=generator, dtype=torch.float64).requires_grad_()


def loss_of(rank, result):
    """A loss that differs between ranks."""
    weights = torch.arange(1.0, result.numel() + 1, dtype=torch.float64).reshape(result.shape)
    return ((rank + 1) * weights * result).sum() + (result**2).sum()


def gradients_of(call, rows=lambda rank: 4):
    """What the ranks' inputs get, by rank."""

    def body(rank):
        mine = input_of(rank, rows(rank))
        loss_of(rank, call(mine, rank)).backward()
        return mine.grad

    return run_threads(SIZE, body)


def gradients_alone(call, rows=lambda rank: 4):
    """The same of one process, where ``call(inputs)`` gives every rank's result."""
    inputs = [input_of(rank, rows(rank)) for rank in range(SIZE)]
    sum(loss_of(rank, result) for rank, result in enumerate(call(inputs))).backward()
    return [mine.grad for mine in inputs]


def own_gradients(results):
    """Of each rank's loss by that rank's result."""
    leaves = [result.detach().clone().requires_grad_() for result in results]
    for rank, leaf in enumerate(leaves):
        loss_of(rank, leaf).backward()
    return [leaf.grad for leaf in leaves]


def check(got, expected):
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", [None, "x"])
def test_of_a_sum_and_a_mean_it_is_the_sum_and_the_mean(name):
    def total(op):
        return lambda mine, _: fl.allreduce(mine, op=op, name=name, prescale_factor=0.5)

    check(gradients_of(total(fl.Sum)), gradients_alone(lambda x: [sum(x) * 0.5] * SIZE))
    check(gradients_of(total(fl.Average)), gradients_alone(lambda x: [sum(x) * 0.5 / SIZE] * SIZE))


def test_of_a_group_it_is_that_of_each_tensor():
    def group(mine, _rank):
        total, whole = fl.grouped_allreduce([mine, torch.tensor([2, 3])], op=fl.Sum)
        assert whole.tolist() == [2 * SIZE, 3 * SIZE] and not whole.requires_grad
        return total

    check(gradients_of(group), gradients_alone(lambda x: [sum(x)] * SIZE))


def test_of_a_maximum_it_is_reduced_likewise():
    """Horovod's convention: the maximum of the gradients, whoever had the largest value."""
    results = [torch.stack([input_of(r) for r in range(SIZE)]).amax(0)] * SIZE
    expected = torch.stack(own_gradients(results)).amax(0)
    check(gradients_of(lambda mine, _: fl.allreduce(mine, op=fl.Max)), [expected] * SIZE)


def test_of_an_allgather_it_is_the_own_rows_of_the_mean():
    """A mean where autograd of one process gives the sum."""
    rows = lambda rank: rank + 1  # noqa: E731
    alone = gradients_alone(lambda x: [torch.cat(x)] * SIZE, rows)
    check(gradients_of(lambda mine, _: fl.allgather(mine), rows), [g / SIZE for g in alone])


def test_of_a_broadcast_the_root_gets_the_mean_and_the_others_zeros():
    alone = gradients_alone(lambda x: [x[1] + 0 * x[r] for r in range(SIZE)])
    check(gradients_of(lambda mine, _: fl.broadcast(mine, 1)), [g / SIZE for g in alone])


def test_of_an_alltoall_it_goes_back_the_same_way():
    def exchange(x):
        return [torch.cat([x[source][to : to + 1] for source in range(SIZE)]) for to in range(SIZE)]

    def split(mine, _rank):
        rows, numbers = fl.alltoall(mine, [1] * SIZE)
        assert numbers.tolist() == [1] * SIZE and not numbers.requires_grad
        return rows

    check(gradients_of(split), gradients_alone(exchange))
    of_three = lambda rank: SIZE  # noqa: E731
    got = gradients_of(lambda mine, _: fl.alltoall(mine, name="x"), of_three)
    check(got, gradients_alone(exchange, of_three))


def parts(whole):
    return list(whole.tensor_split(SIZE))


def test_of_a_reducescatter_it_is_gathered():
    """The mean's as Horovod has it: not divided; a sum's times the number of ranks."""
    alone = gradients_alone(lambda x: parts(sum(x) * 0.5 * 4))
    scatter = lambda op: lambda mine, _: fl.reducescatter(  # noqa: E731
        mine, op=op, prescale_factor=0.5, postscale_factor=4.0
    )
    check(gradients_of(scatter(fl.Sum)), [g * SIZE for g in alone])
    means = parts(sum(input_of(r) for r in range(SIZE)) * 0.5 * 4 / SIZE)
    gathered = torch.cat(own_gradients(means)) * 0.5 * 4
    check(gradients_of(scatter(fl.Average)), [gathered] * SIZE)


def test_of_groups_that_vary_in_rows_it_is_that_of_each_tensor():
    def gathered(mine, _rank):
        first, second = fl.grouped_allgather([mine, mine * 2], name="pair")
        return first + second

    def scattered(mine, _rank):
        first, second = fl.grouped_reducescatter([mine, mine * 2], name="pair", op=fl.Sum)
        return first + second

    alone = gradients_alone(lambda x: [3 * torch.cat(x)] * SIZE)
    check(gradients_of(gathered), [g / SIZE for g in alone])
    alone = gradients_alone(lambda x: parts(3 * sum(x)))
    check(gradients_of(scattered), [g * SIZE for g in alone])


def as_complex(call):
    """The same with each row as a complex number, whose gradient comes lazily conjugated."""

    def converted(mine, rank):
        result = call(torch.view_as_complex(mine), rank).conj()
        return torch.view_as_real(result.resolve_conj())

    return converted


def conjugated(results):
    return [result * torch.tensor([1.0, -1.0], dtype=torch.float64) for result in results]


def test_of_complex_tensors_it_is_complex():
    def in_a_group(mine, _rank):
        gathered, whole = fl.grouped_allgather([mine, torch.view_as_real(mine)], name="pair")
        return gathered + torch.view_as_complex(whole)

    alone = gradients_alone(lambda x: conjugated([torch.cat(x)] * SIZE))
    gather = as_complex(lambda mine, _: fl.allgather(mine))
    check(gradients_of(gather), [g / SIZE for g in alone])
    alone = gradients_alone(lambda x: conjugated([2 * torch.cat(x)] * SIZE))
    check(gradients_of(as_complex(in_a_group)), [g / SIZE for g in alone])
    alone = gradients_alone(lambda x: conjugated([x[1] + 0 * x[r] for r in range(SIZE)]))
    check(gradients_of(as_complex(lambda m, _: fl.broadcast(m, 1))), [g / SIZE for g in alone])
    exchange = as_complex(lambda mine, _: fl.alltoall(mine))
    of_three = lambda rank: SIZE  # noqa: E731
    alone = gradients_alone(
        lambda x: conjugated([torch.stack([x[s][to] for s in range(SIZE)]) for to in range(SIZE)]),
        of_three,
    )
    check(gradients_of(exchange, of_three), alone)


def test_a_gradient_passes_a_users_compression():
    got = gradients_of(lambda mine, _: fl.allreduce(mine, op=fl.Sum, compression=Halved))
    check(got, gradients_alone(lambda x: [sum(x)] * SIZE))


def test_a_gradient_of_a_gradient_is_a_collective_too():
    def body(rank):
        mine = input_of(rank)
        (first,) = torch.autograd.grad(
            (fl.allreduce(mine, op=fl.Sum, name="x") ** 3).sum(), mine, create_graph=True
        )
        first.sum().backward()
        return mine.grad

    def alone():
        inputs = [input_of(rank) for rank in range(SIZE)]
        total = sum((sum(inputs) ** 3).sum() for _ in range(SIZE))
        firsts = torch.autograd.grad(total, inputs, create_graph=True)
        sum(first.sum() for first in firsts).backward()
        return [mine.grad for mine in inputs]

    check(run_threads(SIZE, body), alone())


def test_within_a_process_set_the_members_alone_share_gradients():
    def body(rank):
        pair = fl.add_process_set([0, 2])
        if rank == 1:
            return None
        mine = input_of(rank)
        got = []
        for call in (
            lambda: fl.allreduce(mine, op=fl.Sum, process_set=pair),
            lambda: fl.allgather(mine, process_set=pair),
            lambda: fl.broadcast(mine, 2, process_set=pair),
            lambda: fl.reducescatter(mine, op=fl.Sum, process_set=pair),
            lambda: fl.alltoall(mine, process_set=pair),
        ):
            mine.grad = None
            call().sum().backward()
            got.append(mine.grad.unique().tolist())
        return got

    first, _, second = run_threads(SIZE, body)
    assert first == [[2], [1], [0], [2], [1]] and second == [[2], [1], [1], [2], [1]]


def test_without_a_graph_nothing_is_recorded():
    def body(rank):
        mine = input_of(rank)
        with torch.no_grad():
            assert not fl.allreduce(mine).requires_grad
        assert not fl.allgather(mine.detach()).requires_grad
        assert not fl.synchronize(fl.broadcast_async(mine, 0)).requires_grad

    run_threads(2, body)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: fl.allreduce(x, op=fl.Sum),
        lambda x: fl.grouped_allreduce([x, x], op=fl.Sum)[1],
        lambda x: fl.allgather(x),
        lambda x: fl.broadcast(x, 0),
        lambda x: fl.reducescatter(x),
        lambda x: fl.alltoall(x),
    ],
    ids=["allreduce", "group", "allgather", "broadcast", "reducescatter", "alltoall"],
)
def test_a_thread_that_runs_backward_works_for_the_rank_of_the_forward_pass(call):
    """As autograd's own thread of each GPU does, which knows nothing of ranks that are threads."""

    def body(rank):
        with ThreadPoolExecutor(1) as other:
            return other.submit(gradient, rank, call(mine := input_of(rank, SIZE)), mine).result()

    def gradient(rank, result, mine):
        loss_of(rank, result).backward()
        return mine.grad

    check(run_threads(SIZE, body), gradients_of(lambda mine, _: call(mine), lambda rank: SIZE))


def test_in_place_results_are_seen_by_autograd():
    def body(rank):
        x = torch.ones(3, requires_grad=True)
        y = x * 2
        loss = (y * y).sum()
        before = y._version
        with torch.no_grad():
            fl.allreduce_(y)
        assert y._version > before
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        weight = torch.nn.Parameter(torch.full((2,), float(rank)))
        assert fl.broadcast_(weight, 1) is weight and weight.tolist() == [1, 1]

    run_threads(2, body)


def test_results_of_inputs_that_require_a_gradient_are_differentiable():
    def body(rank):
        loss = (torch.ones(2, requires_grad=True) * rank).sum()
        mean = fl.allreduce(loss, name="barrier")
        assert mean.item() == 1.0 and mean.requires_grad and mean.shape == ()
        assert not fl.synchronize(fl.allreduce_async(loss)).requires_grad
        assert loss.item() == 2.0 * rank

    run_threads(2, body)
