"""Every error of wrong use: its exception on every rank, and a working operation after it."""

import re
import threading
from typing import NamedTuple

import numpy as np
import pytest
import torch

import farandole as fl
import farandole.torch as flt
from ranks import run_threads

pytestmark = pytest.mark.filterwarnings("ignore:average= is deprecated")


class Case(NamedTuple):
    """One mistake.

    Attributes:
        name: Of the test.
        expected: The exception on every rank.
        match: In its text.
        call: What each rank does: of (the module, makes an array of a shape, rank, size).
    """

    name: str
    expected: type
    match: str
    call: object


MISMATCHES = [
    Case("shapes", fl.MismatchError, "shape", lambda o, a, r, n: o.allreduce(a(2 + (r == 0)))),
    Case("dimensions", fl.MismatchError, "shape", lambda o, a, r, n: o.allreduce(a(*[2] * (1 + (r > 0))))),
    Case("dtypes", fl.MismatchError, "float64.*float32|float32.*float64",
         lambda o, a, r, n: o.allreduce(a(2, dtype="float64" if r else "float32"))),
    Case("ops", fl.MismatchError, "op", lambda o, a, r, n: o.allreduce(a(2), op=fl.Sum if r else fl.Max)),
    Case("prescale factors", fl.MismatchError, "factor",
         lambda o, a, r, n: o.allreduce(a(2), prescale_factor=1.0 + r)),
    Case("postscale factors", fl.MismatchError, "factor",
         lambda o, a, r, n: o.allreduce(a(2), postscale_factor=1.0 + r)),
    Case("roots", fl.MismatchError, "root", lambda o, a, r, n: o.broadcast(a(2), min(r, 1))),
    Case("shapes of a broadcast", fl.MismatchError, "shape", lambda o, a, r, n: o.broadcast(a(2 + r), 0)),
    Case("rows' shapes", fl.MismatchError, "dimension", lambda o, a, r, n: o.allgather(a(2, 1 + r))),
    Case("rows' dtypes", fl.MismatchError, "dtype|float",
         lambda o, a, r, n: o.allgather(a(2, dtype="float64" if r else "float32"))),
    Case("shapes of an alltoall", fl.MismatchError, "dimension", lambda o, a, r, n: o.alltoall(a(n, 1 + r))),
    Case("shapes of a reducescatter", fl.MismatchError, "shape",
         lambda o, a, r, n: o.reducescatter(a(2 + r))),
    Case("lengths of groups", fl.MismatchError, "sent 3 tensors.*sent 2 tensors",
         lambda o, a, r, n: o.grouped_allreduce([a(2)] * (2 + (r == 0)))),
    Case("shapes in a group", fl.MismatchError, "shape",
         lambda o, a, r, n: o.grouped_allreduce([a(2), a(2 + r)], name="weights")),
]  # fmt: skip

INVALID = [
    Case("an unknown op", ValueError, "op must be", lambda o, a, r, n: o.allreduce(a(2), op=77)),
    Case("a root that is too large", ValueError, r"root rank \d is not in 0\.\.",
         lambda o, a, r, n: o.broadcast(a(2), n)),
    Case("a negative root", ValueError, "root", lambda o, a, r, n: o.broadcast(a(2), -1)),
    Case("a gathered scalar", ValueError, "scalar has no rows", lambda o, a, r, n: o.allgather(a())),
    Case("a scattered scalar", ValueError, "reducescatter does not support scalar",
         lambda o, a, r, n: o.reducescatter(a())),
    Case("an exchanged scalar", ValueError, "alltoall does not support scalar inputs",
         lambda o, a, r, n: o.alltoall(a())),
    Case("too few splits", ValueError, "Number of entries in splits does not equal number of workers",
         lambda o, a, r, n: o.alltoall(a(n), [1] * (n - 1))),
    Case("splits beyond the rows", ValueError, "Sum of splits entries is greater than the first dimension",
         lambda o, a, r, n: o.alltoall(a(n), [2] * n)),
    Case("a negative split", ValueError, "must not be negative", lambda o, a, r, n: o.alltoall(a(n), [-1] * n)),
    Case("splits of two dimensions", ValueError, "expects a 1D splits tensor",
         lambda o, a, r, n: o.alltoall(a(n), np.ones((n, 1), np.int32))),
    Case("splits that are no integers", ValueError, "expects splits to contain integers",
         lambda o, a, r, n: o.alltoall(a(n), [0.5] * n)),
    Case("an empty group", ValueError, "at least one tensor", lambda o, a, r, n: o.grouped_allreduce([])),
    Case("an empty group of rows", ValueError, "at least one tensor", lambda o, a, r, n: o.grouped_allgather([])),
    Case("an empty group to scatter", ValueError, "at least one tensor",
         lambda o, a, r, n: o.grouped_reducescatter([])),
    Case("an unknown op of a reducescatter", ValueError, "op must be", lambda o, a, r, n: o.reducescatter(a(2), op=17)),
    Case("no array", (TypeError, ValueError), "str", lambda o, a, r, n: o.allreduce("text")),
    Case("no handle", (TypeError, ValueError), "[Hh]andle", lambda o, a, r, n: o.synchronize(7)),
    Case("no process set", TypeError, "Process set .* 7$", lambda o, a, r, n: o.allreduce(a(2), process_set=7)),
    Case("no process set of a gather", TypeError, "Process set provided does not exist",
         lambda o, a, r, n: o.allgather(a(2), process_set=object())),
    Case("no process set of a reducescatter", TypeError, "Process set provided does not exist",
         lambda o, a, r, n: o.reducescatter(a(2), process_set=object())),
    Case("a name that is none", TypeError, "name must be a str or None, not 7",
         lambda o, a, r, n: o.allgather(a(2), name=7)),
    Case("a name with a NUL", ValueError, "must not hold NUL", lambda o, a, r, n: o.allgather_async(a(2), name="a\0b")),
    Case("ranks that do not exist", ValueError, "expected distinct ranks from 0",
         lambda o, a, r, n: fl.add_process_set([0, n])),
    Case("a process set of nobody", ValueError, "0 ranks; expected at least 1",
         lambda o, a, r, n: fl.add_process_set([])),
    Case("a process set twice", ValueError, "all ranks are in the global process set",
         lambda o, a, r, n: fl.add_process_set(list(range(n)))),
]  # fmt: skip


def _spent(ops, array, rank, size):
    handle = ops.allreduce_async(array(2))
    ops.synchronize(handle)
    return ops.synchronize(handle)


OF_ALL = [  # every number of rows divides by 1 rank
    Case("rows that do not divide", ValueError, "not an even multiple of the number of workers",
         lambda o, a, r, n: o.alltoall(a(n + 1, 2))),
    Case("a spent handle", ValueError, "Handle of allreduce was not created", _spent),
]  # fmt: skip

OF_TORCH = [
    Case("average and op", ValueError, "op", lambda o, a, r, n: o.allreduce(a(2), average=True, op=fl.Sum)),
    Case("a name in the place of average", TypeError, "average.*'loss'.*name=",
         lambda o, a, r, n: o.allreduce(a(2), "loss")),
    Case("a name in the place of a factor", TypeError, "factor.*'7'",
         lambda o, a, r, n: o.reducescatter(a(n), op=fl.Sum, postscale_factor="7")),
    Case("a compression that is none", ValueError, "compress",
         lambda o, a, r, n: o.allreduce(a(2), compression=object())),
    Case("parameters that are none", ValueError, "invalid params of type",
         lambda o, a, r, n: o.broadcast_parameters(7)),
    Case("an optimizer that is none", ValueError, "optimizer",
         lambda o, a, r, n: o.broadcast_optimizer_state(7, 0)),
    Case("Adasum of a reducescatter", ValueError, "adasum", lambda o, a, r, n: o.reducescatter(a(2), op=fl.Adasum)),
    Case("a reduced sparse tensor", TypeError, "sparse_coo", lambda o, a, r, n: o.allreduce(a(2, 2).to_sparse())),
    Case("a list", TypeError, "torch.Tensor", lambda o, a, r, n: o.allreduce([1.0])),
    Case("a gathered sparse tensor", TypeError, "sparse_coo", lambda o, a, r, n: o.allgather(a(2, 2).to_sparse())),
    Case("a reduced sparse minimum", ValueError, "Average or Sum",
         lambda o, a, r, n: o.sparse_allreduce_async(a(2).to_sparse(), op=fl.Min)),
    Case("no passes", ValueError, "backward_passes_per_step", lambda o, a, r, n: o.DistributedOptimizer(
        torch.optim.SGD([torch.nn.Parameter(a(2))], lr=1.0), backward_passes_per_step=0)),
    Case("a predivided sum", ValueError, "gradient_predivide_factor", lambda o, a, r, n: o.DistributedOptimizer(
        torch.optim.SGD([torch.nn.Parameter(a(2))], lr=1.0), op=fl.Sum, gradient_predivide_factor=2.0)),
    Case("names that are no pairs", ValueError, "tuples", lambda o, a, r, n: o.DistributedOptimizer(
        torch.optim.SGD([torch.nn.Parameter(a(2))], lr=1.0), named_parameters=["weight"])),
]  # fmt: skip


def _numpy_array(*shape, dtype="float32"):
    return np.ones(shape, dtype)


def _tensor(*shape, dtype="float32"):
    return torch.ones(shape, dtype=getattr(torch, dtype))


FRONTENDS = {"numpy": (fl, _numpy_array), "torch": (flt, _tensor)}


def run(case, frontend, size, is_wrong=lambda rank: True):
    """The texts of the ranks that make the mistake; an operation of all works afterwards."""
    ops, array = FRONTENDS[frontend]

    def body(rank):
        if not is_wrong(rank):
            return ops.allreduce(array(3), op=fl.Sum).tolist() == [size] * 3
        with pytest.raises(case.expected, match=case.match) as raised:
            case.call(ops, array, rank, size)
        assert ops.allreduce(array(3), op=fl.Sum).tolist() == [size] * 3
        return str(raised.value)

    return run_threads(size, body)


def all_of(cases):
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("size", [2, 4])
@all_of(MISMATCHES)
def test_a_mismatch_is_the_same_error_on_every_rank(case, size, frontend):
    texts = run(case, frontend, size)
    assert len(set(texts)) == 1 and re.search(r"rank 0.*ranks? 1", texts[0]), texts


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("size", [1, 2, 3])
@all_of(INVALID)
def test_a_wrong_argument_is_refused_where_it_is_given_and_concerns_nobody_else(case, size, frontend):
    assert run(case, frontend, size, lambda rank: rank == 0)[1:] == [True] * (size - 1)


@pytest.mark.parametrize("frontend", FRONTENDS)
@all_of(OF_ALL)
def test_a_mistake_of_all_ranks_is_refused(case, frontend):
    run(case, frontend, 2)


@pytest.mark.parametrize("size", [1, 2])
@all_of(OF_TORCH)
def test_a_wrong_argument_of_torchs_functions_is_refused(case, size):
    run(case, "torch", size)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_name_in_flight_is_refused_and_the_first_operation_goes_on(frontend):
    ops, array = FRONTENDS[frontend]
    refused = threading.Event()

    def body(rank):
        if rank == 0:
            refused.wait(10)  # until then the others' operation is in flight
            return ops.allreduce(array(2), name="twice", op=fl.Sum).tolist()
        first = ops.allreduce_async(array(2), name="twice", op=fl.Sum)
        with pytest.raises(ValueError, match="twice"):
            ops.allreduce_async(array(2), name="twice", op=fl.Sum)
        refused.set()
        return ops.synchronize(first).tolist()

    assert run_threads(2, body) == [[2, 2]] * 2


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_call_on_a_set_without_this_rank_is_refused_and_the_set_goes_on(frontend):
    ops, array = FRONTENDS[frontend]

    def body(rank):
        pair = fl.add_process_set([0, 1])
        if rank == 2:
            with pytest.raises(ValueError, match="not a member|no member|member"):
                ops.allreduce(array(2), process_set=pair)
        else:
            assert ops.allreduce(array(2), op=fl.Sum, process_set=pair).tolist() == [2, 2]
        assert ops.allreduce(array(2), op=fl.Sum).tolist() == [3, 3]
        assert fl.remove_process_set(pair) and not fl.remove_process_set(pair)
        assert not fl.remove_process_set(fl.global_process_set)
        with pytest.raises((ValueError, TypeError)):
            ops.allreduce(array(2), process_set=pair)
        assert ops.allreduce(array(2), op=fl.Sum).tolist() == [3, 3]

    run_threads(3, body)


def test_an_alltoall_while_a_rank_has_joined_fails_on_every_rank_and_other_operations_work():
    def body(rank):
        if rank == 1:
            return fl.join()
        with pytest.raises(fl.HorovodInternalError, match="rank 1"):
            fl.alltoall(np.ones(2))
        assert fl.allreduce(np.ones(2), op=fl.Sum).tolist() == [1, 1]
        return fl.join()

    assert run_threads(2, body) == [0, 0]


def test_after_a_rank_has_left_the_others_are_told_which():
    def body(rank):
        if rank == 1:
            return
        with pytest.raises(fl.AbortedError, match="rank 1"):
            fl.allreduce(np.ones(2))
        with pytest.raises(fl.AbortedError, match="rank 1"):
            fl.allreduce(np.ones(2))

    run_threads(2, body)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_before_init_operations_and_questions_are_refused(frontend):
    ops, array = FRONTENDS[frontend]
    assert not fl.is_initialized()
    with pytest.raises(ValueError, match=r"not been initialized; use farandole.init\(\)"):
        fl.rank()
    with pytest.raises(fl.HorovodInternalError, match="not been initialized"):
        ops.allreduce(array(2))
    fl.shutdown()


def test_zero_grad_with_gradients_in_flight_is_an_assertion_and_step_works_after_it():
    def body(rank):
        p = torch.nn.Parameter(torch.ones(2))
        optimizer = flt.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), complete="step")
        (p * rank).sum().backward()
        with pytest.raises(AssertionError, match="zero_grad"):
            optimizer.zero_grad()
        optimizer.step()
        assert p.tolist() == [0.5, 0.5]

    run_threads(2, body)
