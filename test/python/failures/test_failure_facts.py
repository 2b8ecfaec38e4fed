"""What errors know besides their text: the ranks that failed, the cause, the tensor."""

import io
import pickle
import sys

import numpy as np
import pytest
import torch

import farandole as fl
import farandole.torch as flt
from farandole import basics, objects
from ranks import run_threads


def facts(error):
    return error.failed_ranks, error.cause, error.tensor


def caught(call, *arguments, **options):
    with pytest.raises(fl.HorovodInternalError) as raised:
        call(*arguments, **options)
    return type(raised.value), facts(raised.value)


@pytest.mark.parametrize("kind", [fl.HorovodInternalError, fl.MismatchError, fl.PeerLostError, fl.AbortedError])
def test_nothing_is_known_of_an_error_that_does_not_say_it(kind):
    assert facts(kind("why")) == ((), None, None)


def test_a_mismatch_names_the_tensor_and_no_rank():
    def body(rank):
        single = caught(fl.allreduce, np.ones(2 + rank), name="loss")
        handle = fl.allgather_async(np.ones((2, 2 + rank)), name="rows")
        return single, caught(fl.synchronize, handle)

    expected = [(fl.MismatchError, ((), None, name)) for name in ("loss", "rows")]
    assert run_threads(2, body) == [tuple(expected)] * 2


def test_in_a_group_of_named_tensors_it_names_the_one_that_differs():
    def body(rank):
        mine = {"a": torch.ones(2), "b": torch.ones(2 + rank)}
        unnamed = [np.ones(2), np.ones(2 + rank)]
        return (caught(flt.broadcast_parameters, mine, 0)[1], caught(fl.grouped_allreduce, unnamed, name="pair")[1])

    assert run_threads(2, body) == [(((), None, "b"), ((), None, "1"))] * 2


def test_a_rank_that_fails_is_named_with_the_cause():
    def body(rank):
        def make():
            raise ValueError("bad batch 17")

        return caught(objects.broadcast_made, make, 0, "batch")

    facts_everywhere = (fl.AbortedError, ((0,), "ValueError: bad batch 17", "batch"))
    assert run_threads(3, body) == [facts_everywhere] * 3


def test_a_rank_that_left_did_not_fail():
    def body(rank):
        return caught(fl.allreduce, np.ones(1), name="never") if rank == 0 else None

    assert run_threads(2, body)[0] == (fl.AbortedError, ((), None, "never"))


def test_what_begins_after_a_rank_has_left_names_its_tensor():
    def body(rank):
        if rank == 1:
            return None
        caught(fl.allreduce, np.ones(1), name="never")
        return caught(fl.allreduce, np.ones(1), name="later")

    assert run_threads(2, body)[0] == (fl.AbortedError, ((), None, "later"))


def test_what_is_known_is_pickled():
    def body(rank):
        with pytest.raises(fl.MismatchError) as raised:
            fl.allreduce(np.ones(2 + rank), name="loss")
        return raised.value

    for error in run_threads(2, body):
        again = pickle.loads(pickle.dumps(error))
        assert facts(again) == facts(error) == ((), None, "loss") and str(again) == str(error)


def test_an_uncaught_error_is_shown_by_pythons_hook_unless_frames_are_left_out(monkeypatch):
    shown = []

    def hook(kind, error, trace):
        shown.append(kind)

    monkeypatch.setattr(sys, "__excepthook__", hook)
    monkeypatch.setattr(basics._Process, "show_uncaught", staticmethod(hook))
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    basics._report_uncaught(KeyError, KeyError("x"), None)
    basics._report_uncaught(fl.MismatchError, fl.MismatchError("x"), None)  # nor fails where nobody can be told
    assert shown == [KeyError]
