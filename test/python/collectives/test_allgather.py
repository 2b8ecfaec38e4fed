"""Allgather for arrays and tensors, on ranks that are threads."""

import threading
import time

import numpy as np
import pytest
import torch

import farandole as fl
import farandole.torch as flt
from farandole import _libraries, basics, ops
from ranks import run_mpi, run_threads

NUMPY_DTYPES = "bool uint8 int8 int16 int32 int64 float16 float32 float64".split()
TORCH_DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
]  # fmt: skip


def rows_of(rank, size):
    """Rank r has size - 1 - r rows, so the last one has none."""
    return [[10 * rank + row, rank] for row in range(size - 1 - rank)]


def all_rows(size):
    return [row for rank in range(size) for row in rows_of(rank, size)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_with_different_numbers_of_rows_of_every_dtype_are_joined_in_rank_order(size):
    def body(rank):
        for dtype in NUMPY_DTYPES:
            mine = np.array(rows_of(rank, size), dtype).reshape(-1, 2)
            result = fl.allgather(mine, name=dtype)
            expected = np.array(all_rows(size), dtype).reshape(-1, 2)
            np.testing.assert_array_equal(result, expected)
            assert result.dtype == dtype
        for dtype in TORCH_DTYPES:
            mine = torch.tensor(rows_of(rank, size)).to(dtype).reshape(-1, 2)
            result = flt.allgather(mine, name=str(dtype))
            expected = torch.tensor(all_rows(size)).to(dtype).reshape(-1, 2)
            assert result.dtype == dtype and torch.equal(result, expected)

    run_threads(size, body)


def test_a_name_may_come_again_with_other_rows():
    def body(rank):
        results = []
        for rows in ([1, 2], [2, 1], [0, 3], [1, 2]):
            results.append(fl.allgather(np.full(rows[rank], rank), name="x").tolist())
        return results

    assert run_threads(2, body) == [[[0, 1, 1], [0, 0, 1], [1, 1, 1], [0, 1, 1]]] * 2


def test_shapes_survive_when_nobody_has_rows_or_rows_have_no_elements():
    def body(rank):
        assert flt.allgather(torch.empty(0, 3, 2)).shape == (0, 3, 2)
        assert fl.allgather(np.empty((2, 0, 5))).shape == (4, 0, 5)
        assert fl.allgather(np.full(1, rank)).tolist() == [0, 1]

    run_threads(2, body)


def test_strided_inputs_are_gathered_by_value():
    def body(rank):
        square = torch.arange(6.0).reshape(2, 3).requires_grad_()
        result = flt.allgather(square.T[rank : rank + 1])
        assert result.tolist() == [[0, 3], [1, 4]] and result.requires_grad
        columns = np.arange(6).reshape(2, 3)[:, rank : rank + 1]
        assert fl.allgather(columns).ravel().tolist() == [0, 3, 1, 4]

    run_threads(2, body)


OTHERS = {
    "dimension": (
        np.ones((2, 4), "f4"),
        ["rank 0 sent float32 [0,3]", "rank 1 sent float32 [0,4]"],
    ),
    "rank": (np.ones(3, "f4"), ["rank 0 sent float32 [0,3]", "rank 1 sent float32 [0]"]),
    "dtype": (np.ones((2, 3), "f8"), ["rank 0 sent float32", "rank 1 sent float64"]),
}


@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize("frontend", [fl.allgather, flt.allgather], ids=["numpy", "torch"])
def test_other_dimensions_or_dtypes_are_a_mismatch_on_all_ranks(what, frontend):
    other, parts = OTHERS[what]
    make = np.asarray if frontend is fl.allgather else torch.from_numpy

    def body(rank):
        for name in ("rows", None):
            with pytest.raises(fl.MismatchError) as raised:
                frontend(make(np.ones((5, 3), "f4") if rank == 0 else other), name=name)
        with pytest.raises(fl.MismatchError) as raised:
            frontend(make(np.ones((5, 3), "f4") if rank == 0 else other), name="rows")
        assert len(frontend(make(np.ones((5 + rank, 3), "f4")), name="rows")) == 11
        return str(raised.value)

    first, second = run_threads(2, body)
    assert first == second and first.startswith('allgather "rows": ')
    for part in parts:
        assert part in first, first


def test_handles_may_be_synchronized_in_any_order_and_do_not_hold_others_up():
    def body(rank):
        names = [f"{i}" for i in range(8)]
        started = names if rank == 0 else names[::-1]
        handles = {n: fl.allgather_async(np.full(rank + 1, int(n)), name=n) for n in started}
        unnamed = [flt.allgather_async(torch.tensor([rank, i])) for i in range(4)]
        if rank == 0:  # rank 1 waits for this allreduce before it asks for any result
            assert fl.synchronize(handles["3"]).tolist() == [3, 3, 3]
        total = fl.allreduce(np.ones(1), op=fl.Sum, name="between").item()
        results = {n: fl.synchronize(handles[n]) for n in started if rank == 1 or n != "3"}
        assert all(result.tolist() == [int(n)] * 3 for n, result in results.items())
        for i in range(4):
            assert flt.synchronize(unnamed[i]).tolist() == [0, i, 1, i]
        return total

    assert run_threads(2, body) == [2, 2]


def test_a_handle_is_polled_once_synchronized_it_is_spent():
    late = threading.Event()

    def body(rank):
        if rank == 1:
            late.wait(60)
        handle = fl.allgather_async(np.ones(1))
        if rank == 0:
            assert not fl.poll(handle)
            late.set()
        assert fl.synchronize(handle).tolist() == [1, 1]
        with pytest.raises(ValueError, match="has been cleared"):
            fl.poll(handle)

    run_threads(2, body)


def test_a_name_in_flight_is_refused_and_free_again_afterwards():
    late = threading.Event()

    def body(rank):
        if rank == 1:
            late.wait(60)
        handle = fl.allgather_async(np.full(2, rank), name="x")
        if rank == 0:
            with pytest.raises(ValueError, match='allgather "x" is already in flight on rank 0'):
                fl.allgather(np.full(2, rank), name="x")
            with pytest.raises(ValueError, match='allgather "x" is in flight with another shape'):
                fl.allgather(np.zeros(3), name="x")
            late.set()
        assert fl.synchronize(handle).tolist() == [0, 0, 1, 1]
        assert fl.allgather(np.full(1, rank), name="x").tolist() == [0, 1]

    run_threads(2, body)


def test_more_unnamed_gathers_than_slots_are_possible():
    def body(rank):
        handles = [fl.allgather_async(np.array([i])) for i in range(300)]
        return [fl.synchronize(handle).tolist() for handle in handles]

    assert run_threads(2, body) == [[[i, i] for i in range(300)]] * 2


def test_groups_are_gathered_together_with_rows_of_their_own():
    def body(rank):
        tensors = [torch.full((rank, 2), 1.0), torch.full((3 - rank,), rank)]
        for gather in (
            flt.grouped_allgather,
            lambda *args: flt.synchronize(flt.grouped_allgather_async(*args)),
        ):
            floats, whole = gather(tensors, "pair")
            assert torch.equal(floats, torch.ones(3, 2))
            assert whole.tolist() == [0, 0, 0, 1, 1, 2]

    run_threads(3, body)


def test_groups_of_unlike_lengths_are_counted_as_the_user_counts():
    def body(rank):
        with pytest.raises(fl.MismatchError, match="rank 0 sent 1 tensors, rank 1 sent 2 tensors"):
            flt.grouped_allgather([torch.ones(1)] * (rank + 1), name="group")

    run_threads(2, body)


@pytest.mark.parametrize("tensors", [torch.ones(2), (torch.ones(1) for _ in range(2))], ids=type)
def test_a_group_is_a_list(tensors):
    def body(_rank):
        for function in (flt.grouped_allgather, flt.grouped_reducescatter, flt.grouped_allreduce_):
            with pytest.raises(TypeError, match="expected a list of tensors, got a"):
                function(tensors)

    run_threads(1, body)


def test_an_asynchronous_gather_needs_no_thread():
    def body(rank):
        fl.barrier()
        before = threading.active_count()
        calls = (fl.allgather_async, flt.allgather_async, fl.alltoall_async, flt.alltoall_async)
        makes = (np.full, torch.full) * 2
        handles = [c(m((2,), rank), name=str(i)) for i, (c, m) in enumerate(zip(calls, makes))]
        during = threading.active_count()
        fl.barrier()
        for handle in handles:
            fl.synchronize(handle)
        fl.barrier()
        return during - before

    assert run_threads(2, body) == [0, 0]


def messages_of(call, count):
    """Control messages that ``count`` calls and a barrier take on this rank, after a few others."""
    for i in range(3):
        call(i)
    before = sent_until_a_barrier()
    for i in range(count):
        call(i)
    after = sent_until_a_barrier()
    return {name: after[name] - before[name] for name in after}


def sent_until_a_barrier():
    """What this rank has sent, the messages of a barrier included.

    A call may return before the engine has sent what the same step decided, so the counters are read
    until they stand still.
    """
    fl.barrier()
    names = ("messages_up", "messages_down", "control_bytes_sent")
    sent, times_alike = {}, 0
    while times_alike < 5:  # a starved engine stands still as well, for a moment
        time.sleep(0.05)
        counters = basics.current().core.counters()
        now = {name: counters[name] for name in names}
        times_alike = times_alike + 1 if now == sent else 0
        sent = now
    return sent


def test_a_steady_gather_takes_as_many_messages_as_an_allreduce(monkeypatch):
    monkeypatch.setenv("FARANDOLE_DIVERGENCE_CHECK", "0")  # which asks ranks that wait for a starved one
    counted_by_all = threading.Barrier(3)  # a rank that leaves is a message more

    def body(rank):
        rows, full = np.full((rank + 1, 2), rank), np.ones(4)
        gathers = messages_of(lambda i: fl.allgather(rows, name="gather"), 50)
        counted_by_all.wait(30)
        reductions = messages_of(lambda i: fl.allreduce(full, name="reduce"), 50)
        counted_by_all.wait(30)
        return gathers, reductions

    for rank, counted in enumerate(run_threads(3, body)):
        for sent in counted:
            assert sent["messages_up"] == (0 if rank == 0 else 51)
            assert sent["messages_down"] == (2 * 51 if rank == 0 else 0)
        gathers, reductions = (sent["control_bytes_sent"] for sent in counted)
        assert gathers == reductions


def test_results_outlive_the_context():
    def body(rank):
        return (
            fl.allgather(np.full(rank + 1, rank)),
            flt.allgather(torch.full((rank + 1,), rank, dtype=torch.bfloat16)),
            *fl.alltoall(np.full(2, rank), [1, 1]),
        )

    for rank, (array, tensor, exchanged, splits) in enumerate(run_threads(2, body)):
        assert array.tolist() == tensor.tolist() == [0, 1, 1], rank
        array += 1
        tensor += 1
        assert array.tolist() == tensor.tolist() == [1, 2, 2]
        assert exchanged.tolist() == [0, 1] and splits.tolist() == [1, 1]


def test_a_joined_rank_has_no_rows():
    def body(rank):
        if rank == 0:
            result = fl.allgather(np.array([[1, 2]]), name="x").tolist()
        else:
            result = None
        fl.join()
        return result

    assert run_threads(2, body)[0] == [[1, 2]]


def test_ranks_that_joined_early_count_unnamed_calls_like_the_others_afterwards():
    def body(rank):
        if rank == 0:
            fl.allgather(np.ones(2))
        fl.join()
        return fl.allgather(np.full(2, rank)).tolist()

    assert run_threads(2, body) == [[0, 0, 1, 1]] * 2


def test_a_gather_that_was_started_before_the_join_has_its_rows():
    def body(rank):
        if rank == 0:
            handle = fl.allgather_async(np.ones(2), name="x")
        else:
            assert fl.allreduce(np.ones(1), name="y", op=fl.Sum).item() == 1  # rank 0 has joined
            assert fl.allgather(np.zeros(1), name="x").tolist() == [1, 1, 0]
        fl.join()
        if rank == 0:
            assert fl.synchronize(handle).tolist() == [1, 1, 0]
        return fl.allgather(np.full(1, rank), name="x").tolist()

    assert run_threads(2, body) == [[0, 1]] * 2


WITHOUT_MEMORY = """
import resource
import numpy as np
import farandole as fl

fl.init()
rank, size = fl.rank(), fl.size()
call = lambda rows: fl.{call}(rows, name="x")
assert len(call(np.ones((size, 1)))) > 0
rows = np.ones((size * 32, 1 << 17))  # 64 MiB
limit = resource.getrlimit(resource.RLIMIT_AS)
if rank == 1:
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), limit[1]))
try:
    result = call(rows)
    tell(result.sum() == result.size)
except fl.HorovodInternalError as error:
    resource.setrlimit(resource.RLIMIT_AS, limit)
    tell(error)
result = call(rows)
tell(result.sum() == result.size)
"""


@pytest.mark.mpi
@pytest.mark.parametrize("call", ["allgather", "alltoall"])
def test_a_rank_without_memory_for_its_result_fails_alone(call):
    fine, short = run_mpi(2, WITHOUT_MEMORY.replace("{call}", call))
    assert fine == "True\nTrue"
    error, again = short.splitlines()
    assert error.startswith(f'{call} "x": no memory for a result of ') and again == "True", short


class Exported:
    """An array of a library that is asked to make results of its own."""

    def __init__(self, values):
        self.__dlpack__, self.__dlpack_device__ = values.__dlpack__, values.__dlpack_device__


def test_an_interrupted_gather_goes_on_without_its_caller(monkeypatch):
    plain = _libraries.Foreign.result

    def interrupted(*arguments):
        if threading.current_thread().name == "rank to interrupt":
            threading.current_thread().name = "was interrupted"
            raise KeyboardInterrupt
        return plain(*arguments)

    def body(rank):
        if rank == 1:
            result = fl.allgather(Exported(np.full(2, rank)), name="x").tolist()
            fl.barrier()
            return result
        threading.current_thread().name = "rank to interrupt"
        with pytest.raises(KeyboardInterrupt):
            fl.allgather(Exported(np.full(2, rank)), name="x")
        fl.barrier()
        return fl.synchronize(fl.interrupted("x")).tolist()

    monkeypatch.setattr(_libraries.Foreign, "result", interrupted)
    assert run_threads(2, body) == [[0, 0, 1, 1]] * 2


def test_shutting_down_ends_gathers_in_flight():
    def body(rank):
        if rank == 0:
            handle = fl.allgather_async(np.ones(3), name="never")
            fl.basics.current().close()
            with pytest.raises(fl.HorovodInternalError, match="has been shut down"):
                fl.synchronize(handle)
            return "ended"
        return None

    assert run_threads(2, body)[0] == "ended"


@pytest.mark.parametrize(("tensors", "expected"), [(1, 2), (2, 4)])
def test_the_core_takes_a_split_per_tensor_and_rank(tensors, expected):
    def body(_rank):
        submit = fl.basics.current().core.submit
        arrays = [np.ones(8, int)] * tensors
        with pytest.raises(ValueError, match=f"splits: expected {expected} numbers, got 3"):
            submit(ops.options(ops.ALLTOALL), arrays, "x", ops.GROUP, splits=(1, 1, 1))
        with pytest.raises(ValueError, match="allgather takes no farandole_params.splits"):
            submit(ops.options(ops.ALLGATHER), arrays, "x", ops.GROUP, splits=(1, 1) * tensors)

    run_threads(2, body)
