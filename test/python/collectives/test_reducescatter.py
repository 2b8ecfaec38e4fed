"""Reducescatter for arrays and tensors, on ranks that are threads."""

import numpy as np
import pytest
import torch

import farandole as fl
import farandole.torch as flt
from models import Halved
from ranks import run_threads

NUMBERS = "uint8 int8 int16 int32 int64 float16 float32 float64".split()
REDUCTIONS = [fl.Average, fl.Sum, fl.Min, fl.Max, fl.Product]


def values(rank, dtype, shape):
    """Small integers, exact in every dtype."""
    return np.random.default_rng(rank).integers(0, 4, shape).astype(dtype)


def part(whole, rank, size):
    """What a reducescatter of ``whole`` leaves to a rank."""
    few, left_over = divmod(len(whole), size)
    begin = rank * few + min(rank, left_over)
    return whole[begin : begin + few + (rank < left_over)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [0, 1, 5, 8])
def test_every_rank_gets_its_rows_of_what_an_allreduce_gives(size, rows):
    def body(rank):
        for dtype in NUMBERS:
            for op in REDUCTIONS:
                mine = values(rank, dtype, (rows, 3))
                whole = fl.allreduce(mine, name=f"{dtype} {op}", op=op)
                result = fl.reducescatter(mine, name=f"{dtype} {op}", op=op)
                np.testing.assert_array_equal(result, part(whole, rank, size))
                assert result.dtype == dtype and result.shape[1:] == (3,)

    run_threads(size, body)


def test_the_default_is_the_average_and_factors_multiply():
    def body(rank):
        mine = np.array([1.0, 2.0, 3.0, 4.0], np.float32) * (rank + 1)
        assert fl.reducescatter(mine).tolist() == [[1.5, 3.0], [4.5, 6.0]][rank]
        assert flt.reducescatter(torch.from_numpy(mine)).tolist() == [[1.5, 3.0], [4.5, 6.0]][rank]
        whole = np.array([1, 2, 3, 4])  # halves are cut off
        factors = {"op": fl.Sum, "prescale_factor": 0.5, "postscale_factor": 4.0}
        for scatter, tensor in (
            (fl.reducescatter, whole),
            (flt.reducescatter, torch.from_numpy(whole)),
            (lambda *a, **k: fl.synchronize(fl.reducescatter_async(*a, **k)), whole),
            (
                lambda *a, **k: fl.synchronize(flt.reducescatter_async(*a, **k)),
                torch.from_numpy(whole),
            ),
        ):
            assert scatter(tensor, **factors).tolist() == [[0, 8], [8, 16]][rank]

    run_threads(2, body)


def test_strided_inputs_are_taken_by_value_and_left_alone():
    def body(rank):
        square = torch.arange(6.0).reshape(2, 3).requires_grad_()
        result = flt.reducescatter(square.T, op=fl.Sum)
        assert result.tolist() == [[[0, 6], [2, 8]], [[4, 10]]][rank]
        assert result.requires_grad and square.tolist() == [[0, 1, 2], [3, 4, 5]]
        columns = np.arange(6).reshape(2, 3)[:, 1:]
        assert fl.reducescatter(columns, op=fl.Sum).tolist() == [[[2, 4]], [[8, 10]]][rank]

    run_threads(2, body)


def test_compression_rounds_to_the_wire_or_calls_the_users_class():
    def body(rank):
        third = torch.full((4,), 1 / 3)
        halves = flt.reducescatter(third, compression=flt.Compression.fp16, op=fl.Sum)
        whole = flt.allreduce(third, compression=flt.Compression.fp16, op=fl.Sum)
        assert halves.dtype == torch.float32 and torch.equal(halves, part(whole, rank, 2))
        assert halves[0] != 2 / 3
        assert flt.reducescatter(torch.ones(2), compression=Halved, op=fl.Sum).tolist() == [2]
        with pytest.raises(ValueError, match="compression must have"):
            flt.reducescatter(third, compression=object())

    run_threads(2, body)


def test_groups_are_scattered_together_each_by_its_own_rows():
    def body(rank):
        tensors = [torch.full((4, 2), 1.0), torch.arange(5), torch.zeros(0, 7)]
        for scatter in (
            flt.grouped_reducescatter,
            lambda *args, **kwargs: flt.synchronize(
                flt.grouped_reducescatter_async(*args, **kwargs)
            ),
        ):
            floats, whole, nothing = scatter(tensors, "three", op=fl.Sum)
            assert torch.equal(floats, torch.full((2 - (rank > 0), 2), 3.0))
            assert whole.tolist() == [[0, 3], [6, 9], [12]][rank]
            assert nothing.shape == (0, 7)

    run_threads(3, body)


def test_handles_may_be_synchronized_in_any_order_and_are_then_spent():
    def body(rank):
        names = [str(i) for i in range(6)]
        started = names if rank == 0 else names[::-1]
        handles = {n: fl.reducescatter_async(np.full(2, int(n)), name=n) for n in started}
        unnamed = [flt.reducescatter_async(torch.full((2,), i), op=fl.Sum) for i in range(3)]
        for name in names[::-1] if rank == 0 else names:
            assert fl.synchronize(handles[name]).tolist() == [int(name)]
        assert [flt.synchronize(handle).tolist() for handle in unnamed] == [[0], [2], [4]]
        with pytest.raises(ValueError, match="has been cleared"):
            fl.poll(unnamed[0])

    run_threads(2, body)


BAD = {
    "shape": (lambda rank: {"tensor": np.ones((4, 2 + rank))}, ["[4,2]", "[4,3]"]),
    "rows": (lambda rank: {"tensor": np.ones(4 + rank)}, ["float64 [4]", "float64 [5]"]),
    "dtype": (lambda rank: {"tensor": np.ones(4, ["f4", "f8"][rank])}, ["float32", "float64"]),
    "op": (lambda rank: {"tensor": np.ones(4), "op": [fl.Sum, fl.Max][rank]}, ["op sum", "op max"]),
    "factor": (
        lambda rank: {"tensor": np.ones(4), "prescale_factor": 1.0 + rank},
        ["prescale 1 ", "prescale 2 "],
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_a_disagreement_is_refused_on_all_ranks_by_name(what):
    arguments, parts = BAD[what]

    def body(rank):
        with pytest.raises(fl.MismatchError) as raised:
            fl.reducescatter(name="x", **arguments(rank))
        assert fl.reducescatter(np.ones(2), name="x").tolist() == [1]
        return str(raised.value)

    first, second = run_threads(2, body)
    assert first == second and first.startswith('reducescatter "x": ')
    for text in ("rank 0", "rank 1", *parts):
        assert text in first, first


def test_the_tensor_of_a_group_that_differs_is_named():
    def body(rank):
        with pytest.raises(fl.MismatchError, match=r'tensor "1".*rank 1 sent float32 \[3\]'):
            flt.grouped_reducescatter([torch.ones(2), torch.ones(2 + rank)], "pair")
        with pytest.raises(fl.MismatchError, match="2 tensors"):
            flt.grouped_reducescatter([torch.ones(2)] * (1 + rank), "pair")

    run_threads(2, body)


def test_a_joined_rank_contributes_nothing_to_what_the_others_get():
    def body(rank):
        results = []
        if rank == 0:
            mine = np.array([2.0, 4.0, 6.0])
            for op in (fl.Sum, fl.Average, fl.Max, fl.Product):
                results.append(fl.reducescatter(mine, name=str(op), op=op).tolist())
        fl.join()
        return results

    assert run_threads(2, body)[0] == [[2, 4], [1, 2], [2, 4], [2, 4]]
