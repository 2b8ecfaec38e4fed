"""Every operation with every dtype and reduce op on one to four ranks, of NumPy and of torch."""

import itertools

import numpy as np
import pytest
import torch

import farandole as fl
import farandole.torch as flt
from ranks import run_threads

MOVED = "bool uint8 int8 int16 int32 int64 float16 float32 float64 uint16 uint32 uint64 complex64 complex128"
REDUCED = MOVED.split()[:9]
PAIRS = ["complex64", "complex128"]  # as which they are summed
TORCH_ONLY = ["bfloat16", "float8_e4m3fn", "float8_e5m2"]

#: op -> what it makes of [size, ...] contributions; integers, so every dtype gives them exactly.
OPS = {
    fl.Average: lambda all_ranks: all_ranks.sum(0) // len(all_ranks),
    fl.Sum: lambda all_ranks: all_ranks.sum(0),
    fl.Min: lambda all_ranks: all_ranks.min(0),
    fl.Max: lambda all_ranks: all_ranks.max(0),
    fl.Product: lambda all_ranks: all_ranks.prod(0),
}
OF_BOOL = {fl.Min: np.all, fl.Max: np.any, fl.Product: np.all}


class Numpy:
    ops = fl
    dtypes = MOVED.split()

    def make(self, values, dtype):
        return np.asarray(values).astype(dtype)

    def values(self, array, dtype):
        assert isinstance(array, np.ndarray) and array.dtype == dtype
        return array.tolist()


class Torch:
    ops = flt
    dtypes = [name for name in MOVED.split() + TORCH_ONLY if hasattr(torch, name)]

    def make(self, values, dtype):
        return torch.from_numpy(np.array(values)).to(getattr(torch, dtype))

    def values(self, tensor, dtype):
        assert isinstance(tensor, torch.Tensor) and tensor.dtype == getattr(torch, dtype)
        return (tensor.to(torch.float64) if "float8" in dtype else tensor).tolist()


def contributions(size, op):
    """[size, rows, 2] small integers; those of an average divide by every size."""
    values = np.arange(size * 10).reshape(size, 5, 2) % 3 + 1
    return 12 * values if op == fl.Average else values


def reduced_in_every_way(kind, rank, size, dtype, op, mine):
    """The results of every function that reduces ``mine``, each of shape [5, 2]."""
    ops, name = kind.ops, f"{dtype} {op}"
    in_place, in_place_async = (kind.make(mine, dtype) for _ in range(2))
    results = [
        ops.allreduce(kind.make(mine, dtype), name=name, op=op),
        ops.synchronize(ops.allreduce_async(kind.make(mine, dtype), name=name, op=op)),
        ops.allreduce_(in_place, name=name, op=op),
        ops.synchronize(ops.allreduce_async_(in_place_async, name=name, op=op)),
        *ops.grouped_allreduce([kind.make(mine, dtype)] * 2, name=name, op=op),
        ops.allgather(ops.reducescatter(kind.make(mine, dtype), name=name, op=op)),
        ops.allgather(ops.grouped_reducescatter([kind.make(mine, dtype)], name=name, op=op)[0]),
    ]
    assert results[2] is in_place and results[3] is in_place_async
    return results


@pytest.mark.parametrize("kind", [Numpy(), Torch()], ids=["numpy", "torch"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_reductions(size, kind):
    def body(rank):
        for dtype in [d for d in kind.dtypes if d in (*REDUCED[1:], "bfloat16")]:
            for op, combine in OPS.items():
                values = contributions(size, op)
                for result in reduced_in_every_way(kind, rank, size, dtype, op, values[rank]):
                    assert kind.values(result, dtype) == combine(values).tolist(), (dtype, op)
        for dtype, op in itertools.product(PAIRS, (fl.Average, fl.Sum)):
            values = contributions(size, op)
            values = values + (1 - 2j) * values[:, ::-1]
            expected = values.sum(0) / (size if op == fl.Average else 1)
            for result in reduced_in_every_way(kind, rank, size, dtype, op, values[rank]):
                assert kind.values(result, dtype) == expected.tolist(), (dtype, op)
        for op, combine in OF_BOOL.items():
            values = contributions(size, op) % 2 == 0
            for result in reduced_in_every_way(kind, rank, size, "bool", op, values[rank]):
                assert kind.values(result, "bool") == combine(values, axis=0).tolist(), op

    run_threads(size, body)


@pytest.mark.parametrize("kind", [Numpy(), Torch()], ids=["numpy", "torch"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_moves(size, kind):
    def body(rank):
        ops = kind.ops
        for dtype in kind.dtypes:
            values = np.arange(size * 2 * size).reshape(size, size, 2) % (2 if dtype == "bool" else 9)
            values = values * (1 - 2j) if "complex" in dtype else values

            def given(r, values=values, dtype=dtype):
                return kind.make(values[r], dtype)

            def same(result, expected, dtype=dtype):
                assert kind.values(result, dtype) == kind.values(kind.make(expected, dtype), dtype)

            for root in range(size):
                same(ops.broadcast(given(rank), root), values[root])
                same(ops.synchronize(ops.broadcast_async_(given(rank), root)), values[root])
            everything = values.reshape(-1, 2)
            same(ops.allgather(given(rank)), everything)
            same(ops.grouped_allgather([given(rank)] * 2)[1], everything)
            same(ops.alltoall(given(rank)), values[:, rank])
            rows, counts = ops.alltoall(given(rank), splits=[1] * size)
            same(rows, values[:, rank])
            assert counts.tolist() == [1] * size

    run_threads(size, body)


@pytest.mark.parametrize("kind", [Numpy(), Torch()], ids=["numpy", "torch"])
def test_dtypes_that_cannot_be_reduced_are_refused_by_name_with_those_that_can(kind):
    listed = ".*".join([*REDUCED[:7], "bfloat16", *REDUCED[7:], *PAIRS])

    def body(rank):
        for dtype in [d for d in kind.dtypes if d not in (*REDUCED, *PAIRS, "bfloat16")]:
            for function in (kind.ops.allreduce, kind.ops.reducescatter):
                with pytest.raises((TypeError, ValueError), match=f"{dtype}.*{listed}"):
                    function(kind.make([[1, 2]], dtype))
        for dtype, op in itertools.product(PAIRS, (fl.Min, fl.Max, fl.Product)):
            with pytest.raises(ValueError, match=f"{dtype} is reduced by Sum and by Average only"):
                kind.ops.allreduce(kind.make([1, 2], dtype), op=op)
        for op in (fl.Average, fl.Sum):
            with pytest.raises((TypeError, ValueError), match="bool"):
                kind.ops.allreduce(kind.make([True, False], "bool"), op=op)
        assert kind.ops.allreduce(kind.make([rank], "int64"), op=fl.Max).tolist() == [1]

    run_threads(2, body)


@pytest.mark.parametrize("kind", [Numpy(), Torch()], ids=["numpy", "torch"])
@pytest.mark.parametrize("size", [1, 3])
def test_scalars_and_empty_and_strided_arrays(size, kind):
    def body(rank):
        ops = kind.ops
        assert ops.allreduce(kind.make(1.0, "float32"), op=fl.Sum).tolist() == size
        assert tuple(ops.allreduce(kind.make(np.ones((0, 3)), "float64")).shape) == (0, 3)
        assert tuple(ops.allgather(kind.make(np.ones((0, 3)), "float64")).shape) == (0, 3)
        strided = kind.make(np.arange(12).reshape(3, 4), "int32")[:, ::2]
        assert ops.allreduce(strided, op=fl.Max).tolist() == [[0, 2], [4, 6], [8, 10]]
        assert ops.allgather(strided).tolist() == [[0, 2], [4, 6], [8, 10]] * size

    run_threads(size, body)


def test_lazily_conjugated_tensors_travel_by_value():
    def body(rank):
        mine = torch.tensor([1 + 2j, 3 - 1j]).conj()
        assert flt.broadcast(mine, 0).tolist() == [1 - 2j, 3 + 1j]
        flt.broadcast_(mine, 0)
        assert mine.tolist() == [1 - 2j, 3 + 1j] and mine.is_conj()
        negated = torch.tensor([1 + 2j]).conj().imag
        assert flt.allreduce(negated, op=fl.Sum).tolist() == [-4.0]

    run_threads(2, body)


def test_dtypes_that_travel_alike_are_told_apart():
    def body(rank):
        pair = [np.ones(2, "c8"), np.ones((2, 2), "f4")][rank]
        with pytest.raises(fl.MismatchError, match="complex64"):
            fl.broadcast(pair, 0, name="x")
        with pytest.raises(fl.MismatchError, match="uint16"):
            fl.allgather(np.ones(2, ["u2", "i2"][rank]), name="x")
        return fl.allgather(np.ones(1, "c8"), name="x").tolist()

    assert run_threads(2, body) == [[1, 1]] * 2


def test_what_cannot_be_moved_is_refused():
    def body(_rank):
        for values in (np.array(["a"]), np.array([None]), np.ones(1, ">f4"), np.ones(1, "M8[s]")):
            with pytest.raises(TypeError, match="dtype .* is not supported"):
                fl.broadcast(values, 0)

    run_threads(1, body)
