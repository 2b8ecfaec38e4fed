"""Sparse gradients: gathered row by row, or sent as dense ones."""

import pytest
import torch

from jobs import on_all, on_several
from models import parameter

pytestmark = pytest.mark.filterwarnings("ignore:optimizer.step.. called without")


def table_of(rows=6, columns=2, sparse=True):
    """An embedding of ones."""
    table = torch.nn.Embedding(rows, columns, sparse=sparse)
    with torch.no_grad():
        table.weight.fill_(1.0)
    return table


def rows_of(rank, step):
    """Rows that a rank looks up, some of them twice."""
    return torch.tensor([rank, 4, 4, (rank + step) % 6])


def mean_of(size, step):
    """The mean of all ranks' gradients of the sum of the looked-up rows."""
    total = torch.zeros(6, 2)
    for rank in range(size):
        for row in rows_of(rank, step):
            total[row] += 12.0
    return total / size


@on_all
@pytest.mark.parametrize("sparse_as_dense", [False, True])
def test_sparse_gradients_become_the_mean_and_stay_sparse(job, sparse_as_dense):
    def body(rank):
        table, p = table_of(), parameter(1.0)
        optimizer = job.sgd(table.weight, p, sparse_as_dense=sparse_as_dense)
        for step in range(4):
            optimizer.zero_grad()
            (table(rows_of(rank, step)).sum() * 12 + p.sum() * rank).backward()
            job.finish(optimizer)
            assert table.weight.grad.is_sparse and p.grad.item() == job.mean_rank
            torch.testing.assert_close(table.weight.grad.to_dense(), mean_of(job.size, step))
            optimizer.step()
        return table.weight.detach()

    first, *others = job.run(body)
    assert all(torch.equal(first, other) for other in others)


@on_all
def test_a_rank_without_a_sparse_gradient_receives_one(job):
    def body(rank):
        table, p = table_of(), parameter(1.0)
        optimizer = job.sgd(table.weight, p)
        for step in range(4):
            optimizer.zero_grad()
            loss = p.sum()
            if rank == step % job.size:
                loss = loss + table(torch.tensor([3])).sum() * 12
            loss.backward()
            job.finish(optimizer)
            assert table.weight.grad.is_sparse
            assert table.weight.grad.to_dense()[:, 0].tolist() == [0, 0, 0, 12 / job.size, 0, 0]
            optimizer.step()

    job.run(body)


@on_all
def test_a_rank_may_contribute_no_rows(job):
    def body(rank):
        table = table_of()
        optimizer = job.sgd(table.weight)
        rows = torch.tensor([2] if rank == 0 else [], dtype=torch.int64)
        (table(rows).sum() * 12).backward()
        job.finish(optimizer)
        assert table.weight.grad.to_dense()[2].tolist() == [12 / job.size] * 2

    job.run(body)


@on_several
def test_sparse_on_one_rank_and_dense_on_others_gives_the_dense_mean(job):
    """As of a table that is also the output layer, which not every batch uses."""

    def body(rank):
        table = table_of()
        optimizer = job.sgd(table.weight)
        for _ in range(3):
            optimizer.zero_grad()
            loss = table(torch.tensor([1])).sum() * 12 if rank == 0 else table.weight.sum() * 12
            loss.backward()
            job.finish(optimizer)
            dense = torch.full((6, 2), 12 * (job.size - 1) / job.size)
            dense[1] += 12 / job.size
            torch.testing.assert_close(table.weight.grad, dense)

    job.run(body)


@on_several
def test_a_sparse_gradient_that_did_not_fire_again_is_clean(job):
    def body(rank):
        table, p = table_of(), parameter(1.0)
        optimizer = job.sgd(table.weight, p)
        (table(torch.tensor([rank])).sum() * 12 + p.sum()).backward()
        job.finish(optimizer)
        clean = table.weight.grad
        (p * 1).sum().backward()
        job.finish(optimizer)
        assert table.weight.grad is clean
        # One rank adds to it, once sparse and once dense: the clean ones count as what they are.
        (p.sum() + (table(torch.tensor([5])).sum() * 12 if rank == 0 else 0)).backward()
        job.finish(optimizer)
        expected = torch.zeros(6, 2)
        expected[: job.size] += 12 / job.size
        expected[5] += 12 / job.size
        torch.testing.assert_close(table.weight.grad.to_dense(), expected)
        (p.sum() + (table.weight.sum() * 12 if rank == 0 else 0)).backward()
        job.finish(optimizer)
        torch.testing.assert_close(table.weight.grad, expected + 12 / job.size)

    job.run(body)


@on_all
def test_rows_may_be_added_to_a_sparse_gradient_without_any(job):
    def body(rank):
        table = table_of()
        optimizer = job.sgd(table.weight)
        for rows in ([], [rank, 5]):
            table(torch.tensor(rows, dtype=torch.int64)).sum().backward()
            job.finish(optimizer)
        expected = torch.zeros(6, 2)
        expected[: job.size] += 1 / job.size
        expected[5] += 1
        torch.testing.assert_close(table.weight.grad.to_dense(), expected)

    job.run(body)


@on_all
def test_sparse_adam_trains_like_one_process(job):
    def train(table, optimizer, ranks):
        for step in range(5):
            optimizer.zero_grad()
            for rank in ranks:
                values = table(rows_of(rank, step)) * torch.arange(1.0, 3.0)
                (values.square().sum() / len(ranks)).backward()
            optimizer.step()
        return table.weight.detach()

    alone = table_of()
    expected = train(alone, torch.optim.SparseAdam(alone.parameters(), lr=0.1), range(job.size))

    def body(rank):
        table = table_of()
        adam = torch.optim.SparseAdam(list(table.parameters()), lr=0.1)
        return train(table, job.wrap(adam, table.named_parameters()), [rank])

    for weights in job.run(body):
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


@on_several
def test_several_sparse_tables_of_any_dtype_travel_together(job):
    def body(rank):
        tables = [table_of(6, 3).to(dtype) for dtype in (torch.float64, torch.bfloat16)]
        optimizer = job.sgd(*(table.weight for table in tables))
        sum(table(torch.tensor([rank, 5])).sum() * 12 for table in tables).backward()
        job.finish(optimizer)
        for table in tables:
            assert table.weight.grad.dtype == table.weight.dtype
            assert table.weight.grad.to_dense()[5, 2].item() == 12
            assert table.weight.grad.to_dense()[rank, 0].item() == 12 / job.size

    job.run(body)
