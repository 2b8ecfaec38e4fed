"""Collectives as data: cases, the forms of each call, and what NumPy makes of the inputs of all ranks.

A library makes arrays of numbers, reads them and says in ``kind_of`` what a result has in common with its input.
`check` runs cases in all forms on a rank; a failure names the case, the dtype and the form.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

import farandole as fl
import farandole.torch as flt

MOVED = "bool uint8 int8 int16 int32 int64 float16 float32 float64 uint16 uint32 uint64 complex64 complex128".split()
PAIRS = MOVED[-2:]  # as which they are summed
REDUCED = [*MOVED[1:9], "bfloat16", *PAIRS]
OPS = {"Average": fl.Average, "Sum": fl.Sum, "Min": fl.Min, "Max": fl.Max, "Product": fl.Product}
IN_PLACE = ("allreduce", "broadcast")
GROUPED = ("allreduce", "allgather", "reducescatter")
WITH_OUT = ("allgather", "reducescatter", "alltoall")


class Numpy:
    """NumPy's arrays; others override what differs."""

    ops: Any = fl
    dtypes: Sequence[str] = MOVED
    forms = ("blocking", "async", "in place", "grouped", "out")
    takes_strides = False  # in place

    def make(self, values: Any, dtype: str) -> Any:
        return np.array(values).astype(dtype)

    def transposed(self, array: Any) -> Any:
        return array.T

    def numbers(self, array: Any) -> Any:
        return array.tolist()

    def kind_of(self, array: Any) -> Any:
        return type(array), str(array.dtype)


class Torch(Numpy):
    ops = flt
    dtypes = [d for d in [*MOVED, "bfloat16", "float8_e4m3fn", "float8_e5m2"] if hasattr(torch, d)]
    takes_strides = True

    def make(self, values: Any, dtype: str) -> Any:
        return torch.from_numpy(np.array(values)).to(getattr(torch, dtype))

    def transposed(self, array: Any) -> Any:
        return array.permute(*reversed(range(array.dim())))

    def numbers(self, array: Any) -> Any:
        return (array.to(torch.float64) if "float8" in str(array.dtype) else array).tolist()


class Case(NamedTuple):
    """A call of every rank.

    Attributes:
        name: Of the case.
        kind: Of collective.
        shape: Of a rank's input, of (rank, size).
        options: Of a rank's call, likewise.
        dtypes: Two are enough for what concerns shapes; None: all that the operation takes.
        is_strided: The input is a transpose.
    """

    name: str
    kind: str
    shape: Callable[[int, int], tuple[int, ...]] = lambda rank, size: (5, 2)
    options: Callable[[int, int], dict[str, Any]] = lambda rank, size: {}
    dtypes: Sequence[str] | None = ("float64", "int64")
    is_strided: bool = False


def always(value: Any) -> Any:
    return lambda rank, size: value


SUM = always({"op": fl.Sum})
_SHAPES = [(), (0,), (2, 0, 3), (1,), (2, 3, 4)]
_FACTORS = always({"op": fl.Sum, "prescale_factor": 0.5, "postscale_factor": 4.0})
CASES = [
    *[Case(f"{kind} by {name}", kind, options=always({"op": op}), dtypes=None)
      for kind in ("allreduce", "reducescatter") for name, op in OPS.items()],
    *[Case(f"{kind} by default", kind) for kind in ("allreduce", "reducescatter")],
    *[Case(f"{kind} with factors, between which integers truncate", kind, options=_FACTORS, dtypes=REDUCED[:7])
      for kind in ("allreduce", "reducescatter")],
    *[Case(f"allreduce of shape {shape}", "allreduce", always(shape), SUM) for shape in _SHAPES],
    *[Case(f"reducescatter of {rows} rows", "reducescatter", always((rows, 3)), SUM) for rows in (0, 1, 8)],
    *[Case(f"broadcast from rank {root}", "broadcast", options=lambda r, n, root=root: {"root_rank": root % n},
           dtypes=None) for root in range(4)],
    *[Case(f"broadcast of shape {shape}", "broadcast", always(shape), always({"root_rank": 0})) for shape in _SHAPES],
    Case("allgather of as many rows from each rank", "allgather", dtypes=None),
    Case("allgather of fewer rows from each rank and none from the last", "allgather", lambda r, n: (n - 1 - r, 2),
         dtypes=None),
    Case("allgather where no rank has rows", "allgather", always((0, 3, 2))),
    Case("allgather of rows without elements", "allgather", always((2, 0, 5))),
    Case("alltoall of the same number of rows to each rank", "alltoall", lambda r, n: (2 * n, 2), dtypes=None),
    Case("alltoall of other numbers of rows from each rank", "alltoall", lambda r, n: (n * (r + 1), 1)),
    Case("alltoall of no rows", "alltoall", always((0, 3))),
    Case("alltoall of rows without elements", "alltoall", lambda r, n: (n, 0, 5)),
    Case("alltoall by splits, some of which are 0", "alltoall", lambda r, n: (n * (n - 1) // 2, 2),
         lambda r, n: {"splits": [(r + to) % n for to in range(n)]}, None),
    Case("alltoall of rows of which no split is left over", "alltoall", lambda r, n: (2 * n + 3, 2),
         lambda r, n: {"splits": [1 + (to == r) for to in range(n)]}),
    Case("alltoall of which one rank alone sends", "alltoall", always((4, 2)),
         lambda r, n: {"splits": [0] * (n - 1) + [4 * (r == n - 1)]}),
    *[Case(f"{kind} of a transpose", kind, lambda r, n: (2, 3, 2 * n), always(options), is_strided=True)
      for kind, options in {"allreduce": {"op": fl.Sum}, "reducescatter": {"op": fl.Sum}, "allgather": {},
                            "alltoall": {}, "broadcast": {"root_rank": 0}}.items()],
]  # fmt: skip


def dtypes_of(case: Case, known: Sequence[str]) -> list[str]:
    """Of the known ones, those that the operation of a case takes."""
    op = case.options(0, 1).get("op", fl.Average)
    if case.kind not in ("allreduce", "reducescatter"):
        taken: Sequence[str] = known
    elif op in (fl.Sum, fl.Average):
        taken = REDUCED
    else:
        taken = ["bool", *REDUCED[:9]]
    return [d for d in known if d in taken and (case.dtypes is None or d in case.dtypes)]


def input_of(case: Case, rank: int, size: int, dtype: str) -> Any:
    """Small numbers of which each dtype gives every result exactly: those that are averaged divide by 12."""
    shape = case.shape(rank, size)
    values = (np.arange(np.prod(shape, dtype=int)).reshape(shape) + rank) % 3 + 1
    if case.kind in ("allreduce", "reducescatter") and case.options(rank, size).get("op", fl.Average) == fl.Average:
        values = 12 * values
    values = values % 2 == 0 if dtype == "bool" else values * (1 - 2j if dtype in PAIRS else 1)
    values = values.astype(float) if "float" in dtype else values
    return values.T if case.is_strided else values


def _reduced(
    inputs: list[Any], op: int = fl.Average, prescale_factor: float = 1.0, postscale_factor: float = 1.0
) -> Any:
    stack = np.stack([(prescale_factor * each).astype(each.dtype) for each in inputs])
    reduce = {fl.Min: stack.min, fl.Max: stack.max, fl.Product: stack.prod}.get(op, stack.sum)
    result = reduce(axis=0) * postscale_factor / (len(inputs) if op == fl.Average else 1)
    return result.astype(stack.dtype)


def expected(case: Case, inputs: list[Any], rank: int) -> Any:
    """What a rank gets, by the inputs of all."""
    size = len(inputs)
    options = case.options(rank, size)
    if case.kind == "broadcast":
        return inputs[options["root_rank"]]
    if case.kind == "allgather":
        return np.concatenate(inputs)
    if case.kind == "alltoall":
        return np.concatenate([np.split(x, np.cumsum(splits_of(case, r, size, x)))[rank] for r, x in enumerate(inputs)])
    whole = _reduced(inputs, **options)
    return whole if case.kind == "allreduce" else np.array_split(whole, size)[rank]


def splits_of(case: Case, rank: int, size: int, values: Any) -> list[int]:
    return list(case.options(rank, size).get("splits", [len(values) // size] * size))


def _made(library: Any, values: Any, dtype: str, is_strided: bool) -> Any:
    return library.transposed(library.make(values.T, dtype)) if is_strided else library.make(values, dtype)


def results(
    library: Any, case: Case, mine: Any, dtype: str, options: dict[str, Any], wanted: Any
) -> Iterator[tuple[str, Any]]:
    """The form and the result of each call; an alltoall's is what it returns."""
    ops, kind = library.ops, case.kind

    def given() -> Any:
        return _made(library, mine, dtype, case.is_strided)

    def started(suffix: str) -> Callable[..., Any]:
        name = suffix.format(kind)
        return lambda *given, **more: ops.synchronize(getattr(ops, name)(*given, **options, **more))

    def blocking(suffix: str) -> Callable[..., Any]:
        return lambda *given, **more: getattr(ops, suffix.format(kind))(*given, **options, **more)

    array = given()
    yield "blocking", blocking("{}")(array)
    assert library.numbers(array) == library.numbers(given()), "the input is left alone"
    if "async" in library.forms:
        yield "async", started("{}_async")(given(), name="x")
    if "in place" in library.forms and kind in IN_PLACE and (library.takes_strides or not case.is_strided):
        for form, call in {"in place": blocking("{}_"), "in place, async": started("{}_async_")}.items():
            array = given()
            assert call(array) is array
            yield form, array
        if kind == "allreduce":
            for form, call in {"grouped": blocking("grouped_{}_"), "async": started("grouped_{}_async_")}.items():
                group = [given(), given()]
                assert all(one is other for one, other in zip(call(group, name="g"), group, strict=True))
                yield from [(f"in place, {form}", array) for array in group]
    if "grouped" in library.forms and kind in GROUPED:
        yield from [("grouped", array) for array in blocking("grouped_{}")([given(), given()])]
        yield from [("grouped, async", array) for array in started("grouped_{}_async")([given()] * 2, name="g")]
    if "out" in library.forms and kind in WITH_OUT:
        for form, call in {"out": blocking("{}"), "out, async": started("{}_async")}.items():
            place = library.make(np.zeros(wanted.shape), dtype)
            result = call(given(), out=place)
            assert (result[0] if isinstance(result, tuple) else result) is place, form
            yield form, result


def check(
    library: Any, rank: int, size: int, cases: Sequence[Case] = CASES, dtypes: Sequence[str] | None = None,
    members: fl.ProcessSet | None = None,
) -> None:  # fmt: skip
    """Runs cases on the rank with a number among ``size``, which are the ``members`` of a process set."""
    for case in cases:
        for dtype in dtypes_of(case, dtypes or library.dtypes):
            inputs = [input_of(case, r, size, dtype) for r in range(size)]
            wanted = expected(case, inputs, rank)
            options = case.options(rank, size) | ({} if members is None else {"process_set": members})
            if members is not None and "root_rank" in options:
                options["root_rank"] = members.ranks[options["root_rank"]]
            like = library.kind_of(library.make(inputs[rank], dtype))
            numbers = library.numbers(library.make(wanted, dtype))
            for form, result in results(library, case, inputs[rank], dtype, options, wanted):
                what = f"{case.name}, {dtype}, {form}, rank {rank} of {size}"
                if isinstance(result, tuple):
                    result, counts = result
                    assert counts.tolist() == [splits_of(case, r, size, x)[rank] for r, x in enumerate(inputs)], what
                assert library.kind_of(result) == like, what
                assert tuple(result.shape) == wanted.shape, what
                assert library.numbers(result) == numbers, what


def named(cases: Sequence[Case], *names: str) -> list[Case]:
    """The cases whose names begin so."""
    return [case for case, name in itertools.product(cases, names) if case.name.startswith(name)]
