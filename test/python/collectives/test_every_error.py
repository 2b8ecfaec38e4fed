"""Every error of wrong use: its exception and text on every rank, and a working operation after it."""

import itertools
import re
import time
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import farandole as fl
import farandole.torch as flt
from ranks import on_threads, run_threads

pytestmark = pytest.mark.filterwarnings("ignore:average= is deprecated")


class Case(NamedTuple):
    """One mistake.

    Attributes:
        name: Of the mistake.
        call: What a rank does: of (the module, makes an array of a shape, rank, size) and, of mismatches, a name.
        match: In its text.
        expected: The exception.
    """

    name: str
    call: Any
    match: str
    expected: Any = ValueError


#: Of calls that agree where all ranks say that they are rank 0.
MISMATCHES = [
    Case("shapes", lambda o, a, r, n, k: o.allreduce(a(4, 2 + (r > 0)), name=k), r"rank 0 .*\[4,2\].*1.*\[4,3\]"),
    Case("dimensions", lambda o, a, r, n, k: o.allreduce(a(*[2] * (1 + (r > 0))), name=k), "shape"),
    Case("dtypes", lambda o, a, r, n, k: o.allreduce(a(2, dtype="float64" if r else "float32"), name=k),
         "float32.*float64"),
    Case("ops", lambda o, a, r, n, k: o.allreduce(a(2), name=k, op=fl.Sum if r else fl.Max), "op max.*op sum"),
    Case("prescale factors", lambda o, a, r, n, k: o.allreduce(a(2), name=k, prescale_factor=1.0 + r), "factor"),
    Case("postscale factors", lambda o, a, r, n, k: o.allreduce(a(2), name=k, postscale_factor=1.0 + r), "factor"),
    Case("roots", lambda o, a, r, n, k: o.broadcast(a(2), min(r, 1), name=k), "root 0.*root 1"),
    Case("shapes of a broadcast", lambda o, a, r, n, k: o.broadcast(a(2 + r), 0, name=k), "shape"),
    *[Case(f"{what} of rows of {kind}", lambda o, a, r, n, k, call=call, kind=kind: getattr(o, kind)(call(a, r),
       name=k),
           match)
      for kind in ("allgather", "alltoall") for what, call, match in (
          ("dimensions", lambda a, r: a(4, 3 + (r > 0)), r"0 sent float32 \[0,3\].*1.* sent float32 \[0,4\]"),
          ("numbers of dimensions", lambda a, r: a(*[4, 3][: 1 + (r == 0)]),
             r"0 sent float32 \[0,3\].*1.* float32 \[0\]"),
          ("dtypes", lambda a, r: a(4, 3, dtype="float64" if r else "float32"), "0 sent float32.*1.* sent float64"))],
    Case("shapes of a reducescatter", lambda o, a, r, n, k: o.reducescatter(a(4, 2 + (r > 0)), name=k),
         r"\[4,2\].*\[4,3\]"),
    Case("shapes of sparse sums",
         lambda o, a, r, n, k: flt.sparse_allreduce_async(torch.ones(3, 4 + (r > 0)).to_sparse(), name=k)(),
         r'sparse_allreduce_async.*tensor "2".*ranks? 1.* sent .*\[0,3,5\]'),
    Case("rows of a reducescatter", lambda o, a, r, n, k: o.reducescatter(a(4 + (r > 0)), name=k),
         r"32 \[4\].*32 \[5\]"),
    Case("dtypes of a reducescatter",
         lambda o, a, r, n, k: o.reducescatter(a(4, dtype="float64" if r else "float32"), name=k), "float32.*float64"),
    Case("ops of a reducescatter", lambda o, a, r, n, k: o.reducescatter(a(4), name=k, op=fl.Max if r else fl.Sum),
         "op sum.*op max"),
    Case("factors of a reducescatter", lambda o, a, r, n, k: o.reducescatter(a(4), name=k,
         prescale_factor=1.0 + (r > 0)),
         "prescale 1 .*prescale 2 "),
    *[Case(f"lengths of groups of {kind}",
           lambda o, a, r, n, k, kind=kind: getattr(o, f"grouped_{kind}")([a(4)] * (2 + (r > 0)), name=k),
           "rank 0 sent 2 tensors.*1.* sent 3 tensors") for kind in ("allreduce", "allgather", "reducescatter")],
    *[Case(f"shapes in groups of {kind}",
           lambda o, a, r, n, k, kind=kind: getattr(o, f"grouped_{kind}")([a(2, 2), a(2, 2 + (r > 0))], name=k),
           r'tensor "1".*ranks? 1.* sent float32') for kind in ("allreduce", "allgather", "reducescatter")],
]  # fmt: skip


def _no_set(kind):
    return lambda o, a, r, n: getattr(o, kind)(a(n), process_set=object())


_OUTS = [
    (lambda: np.zeros((2, 3), "f4"), r"float32 array of shape \[rows, 2\] .* got float32 of shape \[2, 3\]"),
    (lambda: np.zeros((2, 2)), "got float64"), (lambda: np.zeros(4, "f4"), r"shape \[4\]"),
    (lambda: np.zeros((2, 4), "f4")[:, ::2], "not contiguous"), (lambda: np.zeros((2, 2), "f4").T[:, :1], r"\[2, 1\]"),
    (lambda: np.broadcast_to(np.float32(0), (2, 2)), "not contiguous|not writable"),
    (lambda: np.frombuffer(bytes(16), "f4").reshape(2, 2), "not writable"), (lambda: bytes(16), "got uint8"),
    (lambda: [0.0], "out cannot be used"),
]  # fmt: skip
INVALID = [
    Case("an unknown op", lambda o, a, r, n: o.allreduce(a(2), op=77), "op must be"),
    Case("a root that is too large", lambda o, a, r, n: o.broadcast(a(2), n), r"root rank \d is not in 0\.\."),
    Case("a negative root", lambda o, a, r, n: o.broadcast(a(2), -1), "root"),
    Case("a gathered scalar", lambda o, a, r, n: o.allgather(a()), "scalar has no rows"),
    Case("a scattered scalar", lambda o, a, r, n: o.reducescatter(a()), "reducescatter does not support scalar"),
    Case("an exchanged scalar", lambda o, a, r, n: o.alltoall(a()), "alltoall does not support scalar inputs"),
    Case("too few splits", lambda o, a, r, n: o.alltoall(a(n), [1] * (n - 1)),
         "Number of entries in splits does not equal number of workers"),
    Case("splits beyond the rows", lambda o, a, r, n: o.alltoall(a(n), [2] * n),
         "Sum of splits entries is greater than the first dimension"),
    Case("a negative split", lambda o, a, r, n: o.alltoall(a(n), [-1] * n), "must not be negative"),
    Case("splits of two dimensions", lambda o, a, r, n: o.alltoall(a(n), np.ones((n, 1), np.int32)),
         "a 1D splits tensor"),
    Case("splits that are no integers", lambda o, a, r, n: o.alltoall(a(n), [0.5] * n), "splits to contain integers"),
    *[Case(f"splits that are no numbers: {splits}", lambda o, a, r, n, splits=splits: o.alltoall(a(n), splits),
           "a sequence or an array of integers, one per rank") for splits in ("12", {0: 1}, iter([1, 1]), [[1], [1,
              2]])],
    *[Case(f"an empty group of {kind}", lambda o, a, r, n, kind=kind: getattr(o, f"grouped_{kind}")([]),
           f"{kind}.*at least one tensor") for kind in ("allreduce", "allgather", "reducescatter")],
    Case("an unknown op of a reducescatter", lambda o, a, r, n: o.reducescatter(a(2), op=17), "op must be"),
    Case("no array", lambda o, a, r, n: o.allreduce("text"), "str", (TypeError, ValueError)),
    Case("no handle", lambda o, a, r, n: o.synchronize(7), "[Hh]andle", (TypeError, ValueError)),
    *[Case(f"a handle of nothing: {call}", lambda o, a, r, n, call=call: getattr(fl, call)(12345),
           "was not created or has been cleared") for call in ("poll", "synchronize")],
    Case("no process set", lambda o, a, r, n: o.allreduce(a(2), process_set=7), "Process set .* 7$", TypeError),
    *[Case(f"no process set of {kind}", _no_set(kind), "Process set provided does not exist", TypeError)
      for kind in ("allgather", "reducescatter", "alltoall")],
    *[Case(f"a name that is {name!r}", lambda o, a, r, n, name=name, kind=kind: getattr(o, kind)(a(2), name=name),
       *match)
      for kind in ("allgather", "allreduce", "allgather_async") for name, *match in (
          (7, "name must be a str or None, not 7$", TypeError), (b"x", "name must be a str or None, not b'x'$",
             TypeError),
          ("a\0b", "^[^\n]*must not hold NUL[^\n]*$"), ("\ud800", "^[^\n]*lone surrogates[^\n]*$"))],
    Case("ranks that do not exist", lambda o, a, r, n: fl.add_process_set([0, n]), "expected distinct ranks from 0"),
    Case("a rank twice", lambda o, a, r, n: fl.add_process_set([0, 0]), "expected distinct ranks from 0"),
    Case("a process set of nobody", lambda o, a, r, n: fl.add_process_set([]), "0 ranks; expected at least 1"),
    Case("a process set of all", lambda o, a, r, n: fl.add_process_set(list(range(n))),
         "all ranks are in the global process"),
    *[Case(f"ranks that are no integers: {ranks}", lambda o, a, r, n, ranks=ranks: fl.ProcessSet(ranks),
           "ranks, which are integers") for ranks in (["0"], [0.5], [True], [None])],
]  # fmt: skip


def _spent(ops, array, rank, size):
    handle = ops.allreduce_async(array(2))
    ops.synchronize(handle)
    return ops.synchronize(handle)


OF_TWO = [  # every number of rows divides by 1 rank
    Case("rows that do not divide", lambda o, a, r, n: o.alltoall(a(n + 1, 2)),
         "not an even multiple of the number of workers"),
    Case("a spent handle", _spent, "Handle of allreduce was not created"),
]  # fmt: skip


def _wrap(**arguments):
    def call(ops, array, rank, size):
        return ops.DistributedOptimizer(torch.optim.SGD([torch.nn.Parameter(array(2))], lr=1.0), **arguments)

    return call


OF_NUMPY = [
    *[Case(f"out number {i}", lambda o, a, r, n, out=out: o.allgather(a(2, 2), out=out()), match)
      for i, (out, match) in enumerate(_OUTS)],
    *[Case(f"{kind} into its input", lambda o, a, r, n, kind=kind, few=few: getattr(o, kind)(x := a(n, 2), out=x[:few]),
           "is in the memory of its input") for kind, few in (("alltoall", None), ("reducescatter", 1))],
    Case("a reducescatter into too few rows", lambda o, a, r, n: o.reducescatter(a(2 * n, 2), out=np.zeros((1, 2),
         "f4")),
         r"shape \[2, 2\] where the tensor is, got float32 of shape \[1, 2\]"),
    *[Case(f"dtype {values.dtype}", lambda o, a, r, n, values=values: o.broadcast(values, 0),
       "dtype .* is not supported",
           TypeError) for values in (np.array(["a"]), np.array([None]), np.ones(1, ">f4"), np.ones(1, "M8[s]"))],
    Case("a list", lambda o, a, r, n: o.allreduce([1.0, 2.0]), "neither the buffer protocol nor DLPack", TypeError),
    Case("a masked array", lambda o, a, r, n: o.allreduce(np.ma.array([1, 2], mask=[0, 1])), "would lose its mask",
         TypeError),
    Case("Adasum of integers", lambda o, a, r, n: o.allreduce(np.ones(2, np.int32), op=fl.Adasum), "adasum"),
]  # fmt: skip
OF_TORCH = [
    Case("average and op", lambda o, a, r, n: o.allreduce(a(2), average=True, op=fl.Sum), "supersedes"),
    *[Case(f"a name in the place of average of {kind}",
           lambda o, a, r, n, kind=kind: getattr(o, kind)([a(2)] if "grouped" in kind else a(2), "loss"),
           "average must be True, False or None, got 'loss'; pass a name as name=", TypeError)
      for kind in ("allreduce", "allreduce_", "allreduce_async", "grouped_allreduce")],
    Case("a name in the place of a factor", lambda o, a, r, n: o.reducescatter(a(n), op=fl.Sum, postscale_factor="7"),
         "factor.*'7'", TypeError),
    *[Case(f"a compression of {kind} that is none", lambda o, a, r, n, kind=kind: getattr(o, kind)(a(2),
       compression=object()),
           "compression must have") for kind in ("allreduce", "reducescatter")],
    Case("parameters that are none", lambda o, a, r, n: o.broadcast_parameters(7), "invalid params of type"),
    *[Case(f"parameters in a {type(params).__name__}", lambda o, a, r, n,
       params=params: o.broadcast_parameters(params, 0),
           "params") for params in (torch.ones(2), ["name"], [("a", "b")])],
    Case("an optimizer that is none", lambda o, a, r, n: o.broadcast_optimizer_state(7, 0), "optimizer"),
    Case("Adasum of a reducescatter", lambda o, a, r, n: o.reducescatter(a(2), op=fl.Adasum), "adasum"),
    Case("a reduced sparse tensor", lambda o, a, r, n: o.allreduce(a(2, 2).to_sparse()), "sparse_coo", TypeError),
    Case("a list", lambda o, a, r, n: o.allreduce([1.0]), "torch.Tensor", TypeError),
    Case("a gathered sparse tensor", lambda o, a, r, n: o.allgather(a(2, 2).to_sparse()), "sparse_coo", TypeError),
    Case("a reduced sparse minimum", lambda o, a, r, n: o.sparse_allreduce_async(a(2).to_sparse(), op=fl.Min),
         "op must be Average or Sum"),
    Case("a sparse sum of what is dense", lambda o, a, r, n: o.sparse_allreduce_async(a(2), name="x"),
         "sparse_coo tensors, not torch.strided", TypeError),
    *[Case(f"a group of {kind} that is no list", lambda o, a, r, n, kind=kind, group=group: getattr(o, kind)(group(a)),
           "expected a list of tensors, got a", TypeError)
      for kind in ("grouped_allgather", "grouped_reducescatter", "grouped_allreduce_")
      for group in (lambda a: a(2), lambda a: (a(1) for _ in range(2)))],
    *[Case(f"out= of {kind} of what needs a gradient",
           lambda o, a, r, n, kind=kind: getattr(o, kind)(a(n, 2).requires_grad_(), out=a(n, 2)),
           "no gradient flows through out=", RuntimeError) for kind in ("allgather", "reducescatter", "alltoall")],
    Case("a tensor on meta", lambda o, a, r, n: o.allreduce(torch.ones(2, device="meta")),
         r'a tensor of shape \[2\] is on "meta"; .*tensor.cpu'),
    Case("tensors on two devices", lambda o, a, r, n: o.grouped_allgather([a(1), torch.ones(1, device="meta")]),
         "tensors on cpu and on meta; those of one call"),
    Case("no passes", _wrap(backward_passes_per_step=0), "backward_passes_per_step"),
    Case("a predivided sum", _wrap(op=fl.Sum, gradient_predivide_factor=2.0), "gradient_predivide_factor"),
    Case("names that are no pairs", _wrap(named_parameters=["weight"]), "tuples"),
]  # fmt: skip


def _numpy_array(*shape, dtype="float32"):
    return np.ones(shape, dtype)


def _tensor(*shape, dtype="float32"):
    return torch.ones(shape, dtype=getattr(torch, dtype))


FRONTENDS = {"numpy": (fl, _numpy_array), "torch": (flt, _tensor)}
frontends = pytest.mark.parametrize("frontend", FRONTENDS)


def raised_by(case, *arguments):
    """The text of the error of the case, which is of its kind."""
    try:
        result = case.call(*arguments)
    except case.expected as error:
        assert re.search(case.match, str(error), re.S), f"{case.name}: {error}"
        return str(error)
    except Exception as error:
        raise AssertionError(f"{case.name}: expected {case.expected}") from error
    raise AssertionError(f"{case.name}: gave {result}")


@frontends
@pytest.mark.parametrize("size", [2, 4])
def test_a_mismatch_is_the_same_error_on_every_rank_at_once_whether_names_are_new_or_known(size, frontend):
    ops, array = FRONTENDS[frontend]

    def body(rank):
        texts = []
        for case in (case._replace(expected=fl.MismatchError) for case in MISMATCHES):
            for name, times in ((None, 0), ("new", 0), ("known", 5)):
                for _ in range(times):
                    case.call(ops, array, 0, size, name)
                fl.barrier()
                begin_s = time.monotonic()
                texts.append((case.name, name, raised_by(case, ops, array, rank, size, name)))
                assert time.monotonic() - begin_s < 5, f"{case.name}: no deadline ends it"
                for _ in range(3):
                    case.call(ops, array, 0, size, name)
                assert ops.allreduce(array(3), op=fl.Sum).tolist() == [size] * 3, case.name
        return texts

    first, *others = run_threads(size, body)
    assert all(texts == first for texts in others)
    for what, name, text in first:
        assert re.search(r"rank 0.*ranks? 1", text) and (name is None or f' "{name}": ' in text), (what, text)


@frontends
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_wrong_argument_is_refused_where_it_is_given_and_concerns_nobody_else(size, frontend):
    ops, array = FRONTENDS[frontend]

    def body(rank):
        for case in INVALID + (OF_NUMPY if frontend == "numpy" else OF_TORCH):
            if rank == 0:
                raised_by(case, ops, array, rank, size)
            assert ops.allreduce(array(3), op=fl.Sum, name="größe\n").tolist() == [size] * 3, case.name

    run_threads(size, body)


@frontends
def test_a_wrong_argument_of_all_ranks_is_refused(frontend):
    ops, array = FRONTENDS[frontend]

    def body(rank):
        for case in INVALID + OF_TWO + (OF_NUMPY if frontend == "numpy" else OF_TORCH):
            raised_by(case, ops, array, rank, 2)
            assert ops.allreduce(array(3), op=fl.Sum).tolist() == [2] * 3, case.name

    run_threads(2, body)


# One name for different collectives: refused on all ranks where ranks disagree; one after the other is fine.

ARRAY, TENSOR = np.ones((4, 2), np.float32), torch.ones(4, 2)
CALLS = {
    "allreduce": lambda name: fl.allreduce(ARRAY, name=name),
    "broadcast": lambda name: fl.broadcast(ARRAY, 0, name=name),
    "allgather": lambda name: fl.allgather(ARRAY, name=name),
    "reducescatter": lambda name: fl.reducescatter(ARRAY, name=name),
    "alltoall": lambda name: fl.alltoall(ARRAY, name=name),
    "broadcast_object": lambda name: fl.broadcast_object({}, 0, name=name),
    "allgather_object": lambda name: fl.allgather_object({}, name=name),
    "sparse_allreduce_async": lambda name: flt.sparse_allreduce_async(torch.eye(3).to_sparse(), name=name)(),
}
FORMS = {  # of the same, by the names that texts say
    "allreduce": lambda name: flt.allreduce(TENSOR, name=name),
    "broadcast": lambda name: flt.broadcast(TENSOR, 0, name=name),
    "allgather": lambda name: flt.allgather(TENSOR, name=name),
    "reducescatter": lambda name: flt.reducescatter(TENSOR, name=name),
    "alltoall": lambda name: flt.alltoall(TENSOR, name=name),
    "allreduce of a group": lambda name: flt.grouped_allreduce([TENSOR] * 2, name=name),
    "allgather of a group": lambda name: flt.grouped_allgather([TENSOR] * 2, name),
    "reducescatter of a group": lambda name: flt.grouped_reducescatter([TENSOR] * 2, name),
    "allgather by a handle": lambda name: flt.synchronize(flt.allgather_async(TENSOR, name=name)),
}
PAIRS = [
    *[((first, CALLS[first]), (second, CALLS[second])) for first, second in itertools.permutations(CALLS, 2)],
    *[((first, CALLS[first]), (second, FORMS[second])) for first, second in itertools.product(CALLS, FORMS)
      if first != second.split()[0]],
]  # fmt: skip


def test_another_collective_of_the_same_name_is_refused_on_all_ranks_in_every_form():
    def body(rank):
        texts = []
        for pair in PAIRS:
            with pytest.raises(fl.MismatchError) as raised:
                pair[rank][1]("k")
            texts.append(str(raised.value))
            np.testing.assert_array_equal(fl.allreduce(ARRAY, name="k"), ARRAY)
        return texts

    first, second = run_threads(2, body)
    assert first == second
    for text, ((one, _), (other, _)) in zip(first, PAIRS, strict=True):
        assert '"k"' in text and f"rank 0 called {one}" in text and f"rank 1 called {other.split()[0]}" in text, text


def test_of_three_ranks_the_odd_one_is_told():
    def body(rank):
        with pytest.raises(fl.MismatchError) as raised:
            CALLS["allgather" if rank == 2 else "allreduce"]("k")
        return str(raised.value)

    texts = run_threads(3, body)
    assert len(set(texts)) == 1 and "ranks 0, 1 called allreduce, rank 2 called allgather" in texts[0], texts


@on_threads(2)
def test_a_name_serves_one_collective_after_another(rank):
    for _, call in itertools.product(range(4), [*CALLS.values(), *FORMS.values()]):
        call("k")


def test_a_name_in_flight_is_refused_on_its_rank_for_any_collective_and_the_first_goes_on():
    first_calls = {
        "allreduce": lambda: fl.allreduce_async(ARRAY, name="k"), "broadcast": lambda: fl.broadcast_async(ARRAY, 0,
           name="k"),
        "allgather": lambda: fl.allgather_async(ARRAY, name="k"), "alltoall": lambda: fl.alltoall_async(ARRAY,
           name="k"),
        "reducescatter": lambda: fl.reducescatter_async(ARRAY, name="k"),
        "sparse_allreduce_async": lambda: flt.sparse_allreduce_async(torch.eye(3).to_sparse(), name="k"),
    }  # fmt: skip

    def body(rank):
        for kind, start in first_calls.items():
            if rank == 0:
                handle = start()
                for other, call in CALLS.items():
                    text = '"k" is already in flight on rank 0' + (f", as {kind}" if other != kind else "")
                    with pytest.raises(ValueError, match=text):
                        call("k")
                if kind in ("allgather", "allreduce"):
                    with pytest.raises(ValueError, match=f'{kind} "k" is in flight with another shape'):
                        getattr(fl, kind)(np.zeros((3, 1)), name="k")
                fl.barrier()
                handle() if callable(handle) else fl.synchronize(handle)
            else:
                fl.barrier()
                CALLS[kind]("k")
        handle = fl.allreduce_async(ARRAY, name="barrier.noname.0")
        fl.barrier()  # which does not meet the names of users
        return float(fl.synchronize(handle).sum())

    assert run_threads(2, body) == [8.0, 8.0]
