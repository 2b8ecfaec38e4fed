"""Gradient rounds that fail, here and on every rank, and what works afterwards."""

import contextlib
import gc
import threading

import pytest
import torch

import farandole.torch as fl
from contract import calling, fail
from farandole import basics
from models import parameter, wrapped
from ranks import run_threads

pytestmark = pytest.mark.filterwarnings("ignore:optimizer.step.. called without")


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
            (calling(p * 1, lambda fails=fails: fails and fail()) * q).sum().backward()

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
