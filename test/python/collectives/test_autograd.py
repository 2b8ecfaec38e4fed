"""Gradients through collectives: Horovod's formulas, and autograd's own where both agree.

A row says what one process computes of the inputs of all ranks, which are leaves of one graph; the loss is the sum
of the ranks' losses. Horovod's gradients are those times a factor.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch

import farandole.torch as fl
from models import Halved
from ranks import on_threads, run_threads

SIZE = 3


def input_of(rank, rows=6):
    """This rank's leaf: [rows, 2] of float64."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(rows, 2, generator=generator, dtype=torch.float64).requires_grad_()


def loss_of(rank, result):
    """A loss that differs between ranks."""
    weights = torch.arange(1.0, result.numel() + 1, dtype=torch.float64).reshape(result.shape)
    return ((rank + 1) * weights * result).sum() + (result**2).sum()


class Row(NamedTuple):
    """A collective of a rank's input, with options, and all its results, of all inputs."""

    call: Callable[[Any, dict[str, Any]], Any]
    alone: Callable[[list[Any]], list[Any]]
    factor: Callable[[int], float] = lambda size: 1.0
    rows: Callable[[int], int] = lambda rank: 6


def parts(whole, size):
    return list(whole.tensor_split(size))


def exchanged(x):
    return [torch.cat([each.tensor_split(len(x))[to] for each in x]) for to in range(len(x))]


def size_of(options):
    return options["process_set"].size() if options else SIZE


def by_splits(x, options):
    size = size_of(options)
    rows, numbers = fl.alltoall(x, [1] * size, **options)
    assert numbers.tolist() == [1] * size and not numbers.requires_grad
    return rows


def with_integers(x, options):
    total, whole = fl.grouped_allreduce([x, torch.tensor([2, 3])], op=fl.Sum, **options)
    assert whole.tolist() == [2 * size_of(options), 3 * size_of(options)] and not whole.requires_grad
    return total


def pair_of(call, **more):
    """Of a group of two, which vary in rows."""
    return lambda x, options: sum(call([x, x * 2], name="pair", **more, **options))


def as_complex(call):
    """The same with each row as a complex number, whose gradient comes lazily conjugated."""
    return lambda x, o: torch.view_as_real(call(torch.view_as_complex(x), o).conj().resolve_conj())


def conjugated(alone):
    return lambda x: [result * torch.tensor([1.0, -1.0], dtype=torch.float64) for result in alone(x)]


def in_a_complex_group(x, options):
    gathered, whole = fl.grouped_allgather([x, torch.view_as_real(x)], name="pair", **options)
    return gathered + torch.view_as_complex(whole)


def joined(x):
    return [torch.cat(x)] * len(x)


def of_the_last(x):
    return [x[-1] + 0 * each for each in x]


FACTORS = {"prescale_factor": 0.5, "postscale_factor": 4.0}
# Of what is gathered Horovod's is the mean where autograd's is the sum; of what is scattered it is not divided, and a
# sum's is multiplied.
ROWS = {
    "a sum": Row(lambda x, o: fl.allreduce(x, op=fl.Sum, prescale_factor=0.5, **o), lambda x: [sum(x) * 0.5] * len(x)),
    "a mean": Row(lambda x, o: fl.allreduce(x, name="x", prescale_factor=0.5, **o),
                  lambda x: [sum(x) * 0.5 / len(x)] * len(x)),
    "a sum in a group": Row(with_integers, lambda x: [sum(x)] * len(x)),
    "a sum with a user's compression": Row(lambda x, o: fl.allreduce(x, op=fl.Sum, compression=Halved, **o),
                                           lambda x: [sum(x)] * len(x)),
    "an allgather": Row(lambda x, o: fl.allgather(x, **o), joined, lambda n: 1 / n, lambda rank: rank + 1),
    "a broadcast": Row(lambda x, o: fl.broadcast(x, 2, **o), of_the_last, lambda n: 1 / n),
    "an alltoall by splits": Row(by_splits, lambda x: exchanged([each[: len(x)] for each in x])),
    "an alltoall": Row(lambda x, o: fl.alltoall(x, name="x", **o), exchanged),
    "a scattered sum": Row(lambda x, o: fl.reducescatter(x, op=fl.Sum, **FACTORS, **o),
                           lambda x: parts(sum(x) * 2, len(x)), lambda n: n),
    "a scattered mean": Row(lambda x, o: fl.reducescatter(x, **FACTORS, **o),
                            lambda x: parts(sum(x) * 2 / len(x), len(x)), lambda n: n),
    "a gathered group": Row(pair_of(fl.grouped_allgather), lambda x: [3 * torch.cat(x)] * len(x), lambda n: 1 / n),
    "a scattered group": Row(pair_of(fl.grouped_reducescatter, op=fl.Sum), lambda x: parts(3 * sum(x), len(x)),
                             lambda n: n),
    "a complex allgather": Row(as_complex(lambda x, o: fl.allgather(x, **o)), conjugated(joined), lambda n: 1 / n),
    "a complex group": Row(as_complex(in_a_complex_group), conjugated(lambda x: joined([2 * each for each in x])),
                           lambda n: 1 / n),
    "a complex broadcast": Row(as_complex(lambda x, o: fl.broadcast(x, 2, **o)), conjugated(of_the_last),
                               lambda n: 1 / n),
    "a complex alltoall": Row(as_complex(lambda x, o: fl.alltoall(x, **o)), conjugated(exchanged)),
}  # fmt: skip


def here(backward):
    backward()


def on_another_thread(backward):
    """As autograd's own thread of each GPU runs it, which knows nothing of ranks that are threads."""
    with ThreadPoolExecutor(1) as other:
        other.submit(backward).result()


@pytest.mark.parametrize("run", [here, on_another_thread])
@pytest.mark.parametrize("members", [[0, 1, 2], [0, 2]], ids=["all", "process set"])
@pytest.mark.parametrize("what", ROWS)
def test_of_each_collective_it_is_horovods(what, members, run):
    row = ROWS[what]
    inputs = [input_of(rank, row.rows(rank)) for rank in members]
    sum(loss_of(rank, result) for rank, result in zip(members, row.alone(inputs), strict=True)).backward()

    def body(rank):
        options = {} if len(members) == SIZE else {"process_set": fl.add_process_set(members)}
        if rank in members:
            mine = input_of(rank, row.rows(rank))
            run(loss_of(rank, row.call(mine, options)).backward)
            expected = inputs[members.index(rank)].grad * row.factor(len(members))
            torch.testing.assert_close(mine.grad, expected)

    run_threads(SIZE, body)


def test_of_a_maximum_it_is_reduced_likewise():
    """Horovod's convention: the maximum of the gradients, whoever had the largest value."""
    leaves = [torch.stack([input_of(r) for r in range(SIZE)]).amax(0).detach().requires_grad_() for _ in range(SIZE)]
    for rank, leaf in enumerate(leaves):
        loss_of(rank, leaf).backward()

    def body(rank):
        mine = input_of(rank)
        loss_of(rank, fl.allreduce(mine, op=fl.Max)).backward()
        torch.testing.assert_close(mine.grad, torch.stack([leaf.grad for leaf in leaves]).amax(0))

    run_threads(SIZE, body)


def test_a_gradient_of_a_gradient_is_a_collective_too():
    inputs = [input_of(rank) for rank in range(SIZE)]
    firsts = torch.autograd.grad(SIZE * (sum(inputs) ** 3).sum(), inputs, create_graph=True)
    sum(first.sum() for first in firsts).backward()

    def body(rank):
        mine = input_of(rank)
        loss = (fl.allreduce(mine, op=fl.Sum, name="x") ** 3).sum()
        torch.autograd.grad(loss, mine, create_graph=True)[0].sum().backward()
        torch.testing.assert_close(mine.grad, inputs[rank].grad)

    run_threads(SIZE, body)


@on_threads(2)
def test_results_have_a_graph_where_blocking_inputs_do_and_in_place_writes_are_seen(rank):
    mine = input_of(rank)
    with torch.no_grad():
        assert not fl.allreduce(mine).requires_grad
    assert not fl.allgather(mine.detach()).requires_grad
    assert not fl.synchronize(fl.broadcast_async(mine, 0)).requires_grad
    loss = (torch.ones(2, requires_grad=True) * rank).sum()
    mean = fl.allreduce(loss, name="barrier")
    assert mean.item() == 1.0 and mean.requires_grad and mean.shape == ()
    assert not fl.synchronize(fl.allreduce_async(loss)).requires_grad
    assert loss.item() == 2.0 * rank
    y = torch.ones(3, requires_grad=True) * 2
    loss, before = (y * y).sum(), y._version
    with torch.no_grad():
        fl.allreduce_(y)
    assert y._version > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    weight = torch.nn.Parameter(torch.full((2,), float(rank)))
    assert fl.broadcast_(weight, 1) is weight and weight.tolist() == [1, 1]
