"""Parameters and gradients whose shape changes through ``.data``: redefined or refused by name."""

import contextlib

import pytest
import torch

import farandole.torch as fl
from jobs import Job, on_all, on_several
from models import parameter
from ranks import run_forked

pytestmark = pytest.mark.filterwarnings("ignore:optimizer.step.. called without")
BIG, SMALL = 4096, 16


def weights(rows=BIG):
    return torch.nn.Parameter(torch.ones(rows, 8))


def resize(p, rows):
    """Structured pruning, or growing."""
    p.data = p.data[:1].expand(rows, -1).clone()


class Twice:
    """Compresses to doubles of the shape it was given."""

    @staticmethod
    def compress(tensor):
        return tensor.double(), tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return tensor.to(ctx)


FORMS = pytest.mark.parametrize(
    "arguments",
    [{}, {"op": fl.Sum}, {"compression": Twice}, {"compression": fl.Compression.bf16}],
    ids=["Average", "Sum", "compressed", "bf16"],
)


@on_all
@FORMS
@pytest.mark.parametrize("rows", [SMALL, 2 * BIG], ids=["shrunk", "grown"])
@pytest.mark.parametrize("is_used", [True, False], ids=["used", "unused"])
def test_training_goes_on_when_all_ranks_change_a_parameter_alike(job, rows, is_used, arguments):
    """``unused``: most ranks have no gradient for it and receive the mean."""

    def body(rank):
        p, q = weights(), parameter(1.0)
        optimizer = job.sgd(p, q, **arguments)
        for step in range(6):
            optimizer.zero_grad()
            if step in (1, 3):
                resize(p, rows if step == 1 else BIG // 2)
            loss = q.sum()
            if is_used or rank == step % job.size:
                loss = loss + p.sum() * 12
            loss.backward()
            job.finish(optimizer)
            contributors = job.size if is_used else 1
            expected = 12 * contributors / (1 if arguments.get("op") is fl.Sum else job.size)
            assert torch.equal(p.grad, torch.full_like(p, expected))
            optimizer.step()

    job.run(body)


@on_several
@pytest.mark.parametrize("rounds_before", [0, 1, 3])
def test_a_parameter_changed_on_one_rank_is_named_on_all(job, rounds_before):
    def body(rank):
        p, q = weights(), parameter(1.0)
        optimizer = job.sgd(p, q)

        def run():
            optimizer.zero_grad()
            (p.sum() + q.sum()).backward()
            job.finish(optimizer)

        for _ in range(rounds_before):
            run()
        if rank == 1:
            resize(p, SMALL)
        for _ in range(2):
            with pytest.raises(fl.MismatchError, match=r'p0.*\[(4096|16),8\].*\[(4096|16),8\]'):
                run()
        resize(p, SMALL)
        run()
        assert torch.equal(p.grad, torch.ones(SMALL, 8))

    job.run(body)


@on_several
def test_a_gradient_left_in_the_old_shape_is_refused_by_name(job):
    def body(rank):
        p = weights()
        optimizer = job.sgd(p)
        p.sum().backward()
        optimizer.step()
        resize(p, SMALL)
        with pytest.raises((ValueError, fl.AbortedError), match=r'"p0".*\[4096, 8\].*\[16, 8\]'):
            optimizer.step()
        optimizer.zero_grad()
        p.sum().backward()
        optimizer.step()
        assert p.grad.shape == (SMALL, 8)

    job.run(body)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("rounds_before", [0, 2])
@pytest.mark.parametrize("with_gradient", [True, False])
@pytest.mark.parametrize("ranks", [{0}, {0, 1, 2}], ids=["one rank", "all ranks"])
def test_a_parameter_changed_before_step_is_refused_by_name(
    size, rounds_before, with_gradient, ranks
):
    """All ranks, together with its gradient, and before anything is sent: then it is right."""
    job = Job(size, "step")
    is_refused = not (len(ranks) == 3 and with_gradient and rounds_before == 0)

    def body(rank):
        p, q = weights(), parameter(1.0)
        optimizer = job.sgd(p, q)

        def run():
            optimizer.zero_grad()
            (p * q).sum().backward()

        for _ in range(rounds_before):
            run()
            optimizer.step()
        run()
        if rank in ranks:
            resize(p, SMALL)
            if with_gradient:
                p.grad = p.grad[:SMALL].clone()
        error = pytest.raises((ValueError, fl.HorovodInternalError), match="p0")
        with error if is_refused else contextlib.nullcontext():
            optimizer.step()
        if rank not in ranks:
            resize(p, SMALL)
        run()
        optimizer.step()
        assert p.grad.shape == (SMALL, 8)

    job.run(body)


@pytest.mark.parametrize("job", [Job(size, "step") for size in (2, 3, 4)], ids=lambda job: f"{job.size} ranks")
def test_a_gradient_replaced_while_it_is_in_flight_is_refused_by_name(job):
    def body(rank):
        p, q = weights(), parameter(1.0)
        optimizer = job.sgd(p, q)
        for _ in range(2):
            optimizer.zero_grad()
            (p * q).sum().backward()
            optimizer.step()
        optimizer.zero_grad()
        (p * q).sum().backward()
        q.grad = q.grad.clone()
        p.grad = p.grad.clone()
        with pytest.raises((ValueError, fl.AbortedError), match='"p[01]".*synchronize'):
            optimizer.step()

    job.run(body)


@on_several
@pytest.mark.parametrize("sparse_as_dense", [False, True])
def test_sparse_tables_may_change_their_size(job, sparse_as_dense):
    def body(rank):
        table = torch.nn.Embedding(64, 2, sparse=True)
        optimizer = job.sgd(table.weight, sparse_as_dense=sparse_as_dense)
        for rows in (64, 8, 256, 256):
            optimizer.zero_grad()
            table.weight.data = torch.ones(rows, 2)
            (table(torch.tensor([rank, rows - 1])).sum() * 12).backward()
            job.finish(optimizer)
            assert table.weight.grad.shape == (rows, 2)
            assert table.weight.grad.to_dense()[rows - 1].tolist() == [12, 12]
            optimizer.step()
        table.weight.data = torch.ones(8, 2)  # its gradient has 256 rows
        if rank == 0:
            table.weight.grad = None
        with pytest.raises((ValueError, fl.AbortedError), match=r'"p0".*\[256, 2\].*\[8, 2\]'):
            optimizer.step()

    job.run(body)


@on_all
def test_a_change_of_the_memory_order_goes_on(job):
    def body(rank):
        conv = torch.nn.Conv2d(3, 4, 2, bias=False)
        optimizer = job.sgd(conv.weight)
        scale = torch.arange(48.0).reshape(4, 3, 2, 2)
        for order in (torch.contiguous_format, torch.channels_last, torch.contiguous_format):
            optimizer.zero_grad()
            conv.weight.data = conv.weight.data.contiguous(memory_format=order)
            (conv.weight * scale).sum().backward()
            job.finish(optimizer)
            assert torch.equal(conv.weight.grad, scale)

    job.run(body)


def test_pruning_goes_on_in_processes():
    told = run_forked(
        2,
        """
        import torch
        import farandole.torch as fl

        fl.init()
        model = torch.nn.Linear(8, 4096, bias=False)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = fl.DistributedOptimizer(sgd, model.named_parameters())
        for step in range(6):
            optimizer.zero_grad()
            model.weight.data = model.weight.data[: 4096 - 500 * step].clone()
            (model(torch.ones(1, 8)) * (1 + fl.rank())).sum().backward()
            optimizer.step()
            assert torch.equal(model.weight.grad, torch.full_like(model.weight, 1.5))
        model.weight.data = model.weight.data[: 8 + 8 * fl.rank()].clone()
        optimizer.zero_grad()
        try:
            model(torch.ones(1, 8)).sum().backward()
        except fl.MismatchError as error:
            tell("weight" in str(error))
        """,
    )
    assert told == ["True", "True"]


@on_several
def test_a_gradient_without_elements_that_one_rank_lacks_is_received(job):
    def body(rank):
        p, q = torch.nn.Parameter(torch.ones(0, 3)), parameter(1.0)
        optimizer = job.sgd(p, q)
        for _ in range(3):
            optimizer.zero_grad()
            (q.sum() + (p.sum() if rank == 0 else 0)).backward()
            job.finish(optimizer)
            assert p.grad.shape == (0, 3)
            optimizer.step()

    job.run(body)
