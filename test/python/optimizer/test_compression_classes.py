"""Compression classes of the user's own, in the optimizer and in allreduce()."""

import pytest
import torch

import farandole.torch as fl
from farandole.torch.compression import native_wire
from jobs import on_all, on_several
from models import OPTIMIZERS, Branched, Halved, parameter, train_alone, train_rank
from ranks import run_threads


class FirstColumn:
    """Sends the first column only; the others become zero."""

    def compress(self, tensor):
        return tensor.reshape(tensor.shape[0], -1)[:, 0], tensor.shape

    def decompress(self, tensor, ctx):
        full = torch.zeros(ctx).reshape(ctx[0], -1)
        full[:, 0] = tensor
        return full.reshape(ctx)


class Unchanged(fl.Compression.none):
    """Overrides one method, so it must be called."""

    calls = 0

    @staticmethod
    def decompress(tensor, ctx):
        Unchanged.calls += 1
        return tensor


class Growing:
    """Makes something else of ones than of zeros."""

    @staticmethod
    def compress(tensor):
        return tensor.repeat(2 if tensor.any() else 1), None

    @staticmethod
    def decompress(tensor, ctx):
        return tensor


@on_all
def test_a_class_with_static_methods_is_used_by_the_optimizer(job):
    make = OPTIMIZERS["SGD"]
    alone = train_alone(Branched(torch.float32), make, job.size, 8, dtype=torch.float32)[1]

    def body(rank):
        return train_rank(
            Branched(torch.float32), make, rank, 8, dtype=torch.float32,
            compression=Halved, complete=job.complete,
        )[1]  # fmt: skip

    for weights in job.run(body):
        for got, want in zip(weights, alone, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@on_several
def test_an_object_may_change_the_shape_that_travels(job):
    def body(rank):
        p = torch.nn.Parameter(torch.ones(3, 2, 2))
        optimizer = job.sgd(p, compression=FirstColumn())
        for step in range(4):
            optimizer.zero_grad()
            if rank != step % job.size:  # the rank without a gradient decompresses too
                (p * 12).sum().backward()
            optimizer.step()
            expected = torch.zeros(3, 4)
            expected[:, 0] = 12 * (job.size - 1) / job.size
            torch.testing.assert_close(p.grad.reshape(3, 4), expected)

    job.run(body)


@on_several
def test_a_subclass_that_overrides_one_method_is_called(job):
    def body(rank):
        p = parameter(1.0)
        optimizer = job.sgd(p, compression=Unchanged)
        calls = Unchanged.calls
        (p * rank).sum().backward()
        optimizer.step()
        assert Unchanged.calls > calls
        return p.grad.item()

    assert native_wire(Unchanged) is None
    assert job.run(body) == [job.mean_rank] * job.size


def test_the_classes_of_the_library_are_part_of_the_reduction():
    class Renamed(fl.Compression.bf16):
        pass

    choices = [fl.Compression.none, fl.Compression.fp16, fl.Compression.bf16, Renamed]
    assert [native_wire(choice) for choice in choices] == [0, 1, 2, 2]


@on_several
def test_a_shape_that_depends_on_the_values_is_refused_by_name(job):
    def body(rank):
        p = parameter(1.0)
        optimizer = job.sgd(p, compression=Growing)
        with pytest.raises((ValueError, fl.AbortedError), match=r'"p0"; expected torch.float32 \[1\]'):
            (p * 2).sum().backward()
            optimizer.step()

    job.run(body)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("compression", [Halved, FirstColumn(), Unchanged])
def test_allreduce_takes_a_class_of_the_users_own(size, compression):
    def body(rank):
        tensor = torch.full((2, 3), float(rank))
        return fl.allreduce(tensor, name="x", op=fl.Sum, compression=compression)

    expected = torch.full((2, 3), size * (size - 1) / 2)
    if isinstance(compression, FirstColumn):
        expected[:, 1:] = 0
    for result in run_threads(size, body):
        assert torch.equal(result, expected)


def test_what_has_no_compress_is_refused():
    def body(rank):
        with pytest.raises(ValueError, match=r"compression must have compress\(tensor\)"):
            fl.allreduce(torch.ones(1), compression="fp16")

    run_threads(1, body)
