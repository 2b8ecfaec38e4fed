"""Gradient rounds that fail, here and on every rank, and what works afterwards."""

import contextlib
import gc
import threading
import typing

import pytest
import torch

import farandole.torch as fl
from farandole import basics
from jobs import on_several
from models import parameter, wrapped
from ranks import run_threads

pytestmark = pytest.mark.filterwarnings("ignore:optimizer.step.. called without")


class RaiseOn(torch.autograd.Function):
    """Identity whose backward raises on one rank."""

    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        if ctx.fails:
            raise ValueError("bad batch 17")
        return grad, None


@on_several
@pytest.mark.parametrize("rounds_before", [0, 1, 3])
def test_an_exception_in_one_backward_fails_the_round_on_every_rank(job, rounds_before):
    def body(rank):
        p, q = parameter(1.0), parameter(1.0)
        optimizer = job.sgd(p, q)
        for _ in range(rounds_before):
            optimizer.zero_grad()
            (p * q).sum().backward()
            optimizer.step()
        optimizer.zero_grad()
        # q fires before the function of p's branch raises.
        loss = (RaiseOn.apply(p * 1, rank == 1) * q).sum()
        with pytest.raises((ValueError, fl.AbortedError)) as raised:
            loss.backward()
            job.finish(optimizer)
        with pytest.raises(fl.HorovodInternalError, match="step.. after a failed backward"):
            optimizer.step()
        optimizer.zero_grad()
        (p * (1 + rank)).sum().backward()
        job.finish(optimizer)
        assert p.grad.item() == 1 + job.mean_rank
        optimizer.step()
        return str(raised.value)

    told = job.run(body)
    assert told.pop(1) == "bad batch 17"
    for peer in told:
        assert "rank 1" in peer and "ValueError: bad batch 17" in peer


@on_several
def test_a_backward_right_after_a_failed_one_works_without_zero_grad(job):
    def body(rank):
        p, q = parameter(1.0), parameter(1.0)
        optimizer = job.sgd(p, q)
        with pytest.raises((ValueError, fl.AbortedError)):
            (RaiseOn.apply(p * 1, rank == 0) * q).sum().backward()
            job.finish(optimizer)
        p.grad = q.grad = None
        (p * rank + q).sum().backward()
        job.finish(optimizer)
        return p.grad.item(), q.grad.item()

    assert job.run(body) == [(job.mean_rank, 1.0)] * job.size


def test_interrupting_the_wait_leaves_a_round_that_the_next_backward_settles():
    """A signal's exception leaves backward(); the peers get their result."""
    interrupted = threading.Event()

    class Interrupted(BaseException):
        pass

    def body(rank):
        p = parameter(1.0)
        optimizer = wrapped(p)
        (p * rank).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        reducer = optimizer.synchronize.__self__.own

        def cut_off():
            """As a signal would do it to the first wait."""
            del reducer._results
            interrupted.set()
            raise Interrupted

        if rank == 0:
            reducer._results = cut_off
        else:
            interrupted.wait(10)
        expected = pytest.raises(Interrupted) if rank == 0 else contextlib.nullcontext()
        with expected:
            (p * (1 + rank)).sum().backward()
        optimizer.zero_grad()
        (p * (3 + rank)).sum().backward()
        return p.grad.item()

    assert run_threads(2, body) == [3.5, 3.5]


class RaisingCompression:
    """Raises on the threads that are named."""

    raising: typing.ClassVar[set[int]] = set()

    @classmethod
    def compress(cls, tensor):
        if threading.get_ident() in cls.raising:
            raise KeyError("no compressor")
        return tensor.clone(), None

    @staticmethod
    def decompress(tensor, context):
        return tensor


@on_several
@pytest.mark.parametrize("rounds_before", [0, 1, 3])
def test_an_exception_in_compress_fails_the_round_on_every_rank(job, rounds_before):
    def body(rank):
        p, me = parameter(1.0), threading.get_ident()
        optimizer = job.sgd(p, compression=RaisingCompression)
        for _ in range(rounds_before):
            optimizer.zero_grad()
            p.sum().backward()
            optimizer.step()
        optimizer.zero_grad()
        if rank == 1:
            RaisingCompression.raising.add(me)
        try:
            with pytest.raises((KeyError, fl.AbortedError)) as raised:
                p.sum().backward()
                job.finish(optimizer)
        finally:
            RaisingCompression.raising.discard(me)
        with pytest.raises(fl.HorovodInternalError, match="step.. after a failed backward"):
            optimizer.step()
        for _ in range(3):
            optimizer.zero_grad()
            (p * (1 + rank)).sum().backward()
            job.finish(optimizer)
            assert p.grad.item() == 1 + job.mean_rank
            optimizer.step()
        return str(raised.value)

    told = job.run(body)
    assert "no compressor" in told.pop(1)
    for peer in told:
        assert "rank 1" in peer and "KeyError: 'no compressor'" in peer


@pytest.mark.parametrize("where", ["compress", "decompress"])
def test_shutdown_from_a_users_code_in_mid_round_is_an_error(where):
    class Leaving:
        leaves = False

        @classmethod
        def compress(cls, tensor):
            if cls.leaves and where == "compress":
                basics.current().close()
            return tensor.clone(), None

        @classmethod
        def decompress(cls, tensor, context):
            if cls.leaves and where == "decompress":
                basics.current().close()
            return tensor

    def body(rank):
        p, q = parameter(1.0), parameter(1.0)
        optimizer = wrapped(p, q, compression=Leaving, overlap=False)
        (p * q).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        fl.barrier()
        Leaving.leaves = True
        with pytest.raises(fl.HorovodInternalError):
            (p * q).sum().backward()

    run_threads(2, body)


@pytest.mark.parametrize("ending", ["interrupted", "failed"])
def test_a_dropped_optimizer_leaves_the_memory_of_its_round_alone(ending):
    """The other rank's part comes when model and optimizer are gone and their memory is in use."""
    gone, peer_done = threading.Event(), threading.Event()

    def train(rank):
        p, q = (torch.nn.Parameter(torch.ones(300, 300)) for _ in range(2))
        optimizer = wrapped(p, q)
        for step in range(3):
            optimizer.zero_grad()
            if step == 2 and rank == 1:
                assert gone.wait(30)
            if step == 2 and rank == 0 and ending == "interrupted":
                (reducer,) = basics.current().reducers
                reducer._results = _interrupt
            fails = step == 2 and rank == 0 and ending == "failed"
            (RaiseOn.apply(p * 1, fails) * q).sum().backward()

    def body(rank):
        with contextlib.suppress(KeyboardInterrupt, ValueError, fl.AbortedError):
            train(rank)
        gc.collect()
        if rank == 1:
            peer_done.set()
            return True
        mine = [torch.full((300, 300), 7.0) for _ in range(12)]
        gone.set()
        assert peer_done.wait(30)
        return all(bool((tensor == 7).all()) for tensor in mine)

    assert run_threads(2, body) == [True, True]


def _interrupt():
    raise KeyboardInterrupt
