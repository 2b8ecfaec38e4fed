"""Alltoall for arrays and tensors, on ranks that are threads."""

import threading

import numpy as np
import pytest
import torch

import farandole as fl
import farandole.torch as flt
from ranks import run_threads

NUMPY_DTYPES = "bool uint8 int8 int16 int32 int64 float16 float32 float64".split()
TORCH_DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
]  # fmt: skip


def splits_of(rank, size):
    """Rank r sends (r + to) % size rows, so some pairs exchange nothing."""
    return [(rank + to) % size for to in range(size)]


def rows_for(rank, to, size):
    return [[rank, 10 * to + row] for row in range((rank + to) % size)]


def sent(rank, size):
    return [row for to in range(size) for row in rows_for(rank, to, size)]


def expected(rank, size):
    return [row for source in range(size) for row in rows_for(source, rank, size)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_rows_of_every_dtype_go_where_the_splits_say(size):
    def body(rank):
        splits, received = splits_of(rank, size), [(r + rank) % size for r in range(size)]
        for dtype in NUMPY_DTYPES:
            mine = np.array(sent(rank, size), dtype).reshape(-1, 2)
            result, counts = fl.alltoall(mine, splits, name=dtype)
            whole = np.array(expected(rank, size), dtype).reshape(-1, 2)
            np.testing.assert_array_equal(result, whole)
            assert result.dtype == dtype and counts.tolist() == received
        for dtype in TORCH_DTYPES:
            mine = torch.tensor(sent(rank, size)).to(dtype).reshape(-1, 2)
            result, counts = flt.alltoall(mine, torch.tensor(splits), name=str(dtype))
            whole = torch.tensor(expected(rank, size)).to(dtype).reshape(-1, 2)
            assert result.dtype == dtype and torch.equal(result, whole)
            assert counts.dtype == torch.int32 and counts.tolist() == received

    run_threads(size, body)


def test_without_splits_every_rank_gets_the_same_share():
    def body(rank):
        result = fl.alltoall(np.arange(6) + 10 * rank)
        tensor = flt.alltoall(torch.arange(6).reshape(6, 1) + 10 * rank)
        return result.tolist(), tensor.ravel().tolist()

    shares = [
        [10 * source + 2 * rank + row for source in range(3) for row in range(2)]
        for rank in range(3)
    ]
    assert run_threads(3, body) == [(share, share) for share in shares]


def test_ranks_may_have_different_numbers_of_rows_without_splits_too():
    def body(rank):
        return fl.alltoall(np.full(2 * (rank + 1), rank)).tolist()

    assert run_threads(2, body) == [[0, 1, 1]] * 2


def test_rows_that_no_split_claims_go_nowhere():
    def body(rank):
        result, counts = fl.alltoall(np.arange(9), [1, 2])
        return result.tolist(), counts.tolist()

    assert run_threads(2, body) == [([0, 0], [1, 1]), ([1, 2, 1, 2], [2, 2])]


def test_a_name_may_come_again_with_other_splits():
    def body(rank):
        results = []
        for splits in ([1, 2], [2, 1], [0, 2], [1, 2]):
            results.append(fl.alltoall(np.arange(3), splits, name="x")[0].tolist())
        return results

    assert run_threads(2, body) == [
        [[0, 0], [0, 1, 0, 1], [], [0, 0]],
        [[1, 2, 1, 2], [2, 2], [0, 1, 0, 1], [1, 2, 1, 2]],
    ]


def test_shapes_survive_when_nothing_is_sent_or_rows_have_no_elements():
    def body(rank):
        result, counts = flt.alltoall(torch.empty(3, 4, 2), [0, 0])
        assert result.shape == (0, 4, 2) and counts.tolist() == [0, 0]
        assert fl.alltoall(np.empty((2, 0, 5))).shape == (2, 0, 5)
        assert fl.alltoall(np.empty((0, 3))).shape == (0, 3)
        result, counts = fl.alltoall(np.ones((4, 2)), [0, 4 * rank])
        assert result.shape == ([0, 4][rank], 2) and counts.tolist() == [0, 4 * rank]

    run_threads(2, body)


def test_strided_inputs_are_sent_by_value():
    def body(rank):
        square = torch.arange(4.0).reshape(2, 2).requires_grad_()
        result = flt.alltoall(square.T)
        assert result.tolist() == [[[0, 2]] * 2, [[1, 3]] * 2][rank]
        assert result.requires_grad
        assert fl.alltoall(np.arange(8)[::2]).tolist() == [[0, 2, 0, 2], [4, 6, 4, 6]][rank]

    run_threads(2, body)


def test_what_came_may_be_sent_back_by_the_splits_that_came():
    def body(rank):
        mine = torch.arange(5) + 10 * rank
        there, counts = flt.alltoall(mine, [2 - rank, 3 + rank], name="there")
        back, splits = flt.alltoall(there, counts, name="back")
        assert torch.equal(back, mine) and splits.tolist() == [2 - rank, 3 + rank]

    run_threads(2, body)


@pytest.mark.parametrize(
    "make", [tuple, np.array, torch.tensor, np.uint8], ids=lambda m: m.__name__
)
def test_splits_may_be_any_integers(make):
    def body(rank):
        return fl.alltoall(np.arange(3), make([1, 2]))[0].tolist()

    assert run_threads(2, body) == [[0, 0], [1, 2, 1, 2]]


def test_handles_give_rows_and_splits_and_may_be_synchronized_in_any_order():
    def body(rank):
        names = [str(i) for i in range(8)]
        started = names if rank == 0 else names[::-1]
        handles = {n: fl.alltoall_async(np.full(2, int(n)), name=n) for n in started}
        unnamed = [flt.alltoall_async(torch.tensor([rank, i]), [1, 1]) for i in range(4)]
        if rank == 0:  # rank 1 waits for this allreduce before it asks for any result
            assert fl.synchronize(handles["3"])[0].tolist() == [3, 3]
        total = fl.allreduce(np.ones(1), op=fl.Sum, name="between").item()
        for name in started:
            if rank == 1 or name != "3":
                rows, splits = fl.synchronize(handles[name])
                assert rows.tolist() == [int(name)] * 2 and splits.tolist() == [1, 1]
        for i, handle in enumerate(unnamed):
            rows, splits = flt.synchronize(handle)
            assert rows.tolist() == [[0, 1], [i, i]][rank] and splits.tolist() == [1, 1]
        return total

    assert run_threads(2, body) == [2, 2]


def test_a_name_in_flight_is_refused():
    late = threading.Event()

    def body(rank):
        if rank == 1:
            late.wait(60)
        handle = fl.alltoall_async(np.full(2, rank), name="x")
        if rank == 0:
            assert not fl.poll(handle)
            with pytest.raises(ValueError, match='alltoall "x" is already in flight on rank 0'):
                fl.alltoall(np.full(2, rank), name="x")
            late.set()
        assert fl.synchronize(handle)[0].tolist() == [0, 1]
        assert fl.alltoall(np.full(2, rank), name="x").tolist() == [0, 1]
        with pytest.raises(ValueError, match="has been cleared"):
            fl.synchronize(handle)

    run_threads(2, body)


OTHERS = {
    "dimension": (
        np.ones((2, 4), "f4"),
        ["rank 0 sent float32 [0,3]", "rank 1 sent float32 [0,4]"],
    ),
    "rank": (np.ones(2, "f4"), ["rank 0 sent float32 [0,3]", "rank 1 sent float32 [0]"]),
    "dtype": (np.ones((2, 3), "f8"), ["rank 0 sent float32", "rank 1 sent float64"]),
}


@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize("frontend", [fl.alltoall, flt.alltoall], ids=["numpy", "torch"])
def test_other_dimensions_or_dtypes_are_a_mismatch_on_all_ranks(what, frontend):
    other, parts = OTHERS[what]
    make = np.asarray if frontend is fl.alltoall else torch.from_numpy

    def body(rank):
        for name in (None, "rows"):
            with pytest.raises(fl.MismatchError) as raised:
                frontend(make(np.ones((4, 3), "f4") if rank == 0 else other), name=name)
        assert len(frontend(make(np.ones((2, 3), "f4")), name="rows")) == 2
        return str(raised.value)

    first, second = run_threads(2, body)
    assert first == second and first.startswith('alltoall "rows": ')
    for text in parts:
        assert text in first, first


def test_it_is_refused_by_name_while_a_rank_has_joined():
    def body(rank):
        if rank == 0:
            with pytest.raises(fl.HorovodInternalError) as raised:
                fl.alltoall(np.ones(2), name="x")
            text = str(raised.value)
            assert text.startswith('alltoall "x"') and "joined" in text, text
        fl.join()
        return fl.alltoall(np.full(2, rank), name="x").tolist()

    assert run_threads(2, body) == [[0, 1]] * 2


def test_shutting_down_ends_what_is_in_flight():
    submitted = threading.Event()

    def body(rank):
        if rank == 0:
            handle = fl.alltoall_async(np.ones(2), name="never")
            submitted.set()
            fl.basics.current().close()
            with pytest.raises(fl.HorovodInternalError, match="has been shut down"):
                fl.synchronize(handle)
            return "ended"
        submitted.wait(30)
        return None

    assert run_threads(2, body)[0] == "ended"


@pytest.mark.parametrize("splits", ["12", {0: 1}, (n for n in (1, 1)), [[1], [1, 2]]], ids=type)
def test_splits_that_are_no_sequence_of_numbers_are_refused(splits):
    def body(_rank):
        with pytest.raises(ValueError, match="a sequence or an array of integers, one per rank"):
            fl.alltoall(np.ones(2), splits)

    run_threads(2, body)
