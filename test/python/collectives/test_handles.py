"""Operations in flight: in which order they end, what keeps their memory, and what ends them."""

import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

import farandole as fl
import farandole.torch as flt
from farandole import _libraries, basics
from ranks import on_threads, run_threads

KINDS = {  # by kind: a call whose result on 2 ranks is that of the function that follows, of (a number, rank)
    "allreduce": (lambda o, x, k: o.allreduce_async(x, name=k), lambda i, r: [i, i]),
    "broadcast": (lambda o, x, k: o.broadcast_async(x, 1, name=k), lambda i, r: [i, i]),
    "allgather": (lambda o, x, k: o.allgather_async(x, name=k), lambda i, r: [i] * 4),
    "reducescatter": (lambda o, x, k: o.reducescatter_async(x, name=k), lambda i, r: [i]),
    "alltoall": (lambda o, x, k: o.alltoall_async(x, name=k), lambda i, r: [i, i]),
}
FRONTENDS = {"numpy": (fl, np.full), "torch": (flt, torch.full)}
kinds = pytest.mark.parametrize("kind", KINDS)


def values_of(kind, handle):
    result = fl.synchronize(handle)
    if kind == "alltoall":
        result, splits = result
        assert splits.tolist() == [1, 1]
    return result.tolist()


@kinds
@pytest.mark.parametrize("frontend", FRONTENDS)
def test_handles_are_synchronized_in_any_order_do_not_hold_others_up_and_are_then_spent(frontend, kind):
    (ops, full), (start, wanted) = FRONTENDS[frontend], KINDS[kind]

    def body(rank):
        started = [str(i) for i in range(8)][:: -1 if rank else 1]
        handles = {n: start(ops, full((2,), int(n)), n) for n in started}
        unnamed = [start(ops, full((2,), i), None) for i in range(4)]
        if rank == 0:  # rank 1 waits for this allreduce before it asks for any result
            assert values_of(kind, handles["3"]) == wanted(3, rank)
        assert fl.allreduce(np.ones(1), op=fl.Sum, name="between").item() == 2
        for name in started:
            if rank == 1 or name != "3":
                assert values_of(kind, handles[name]) == wanted(int(name), rank)
        for i, handle in enumerate(unnamed):
            assert values_of(kind, handle) == wanted(i, rank)
        for use in (ops.poll, ops.synchronize):
            with pytest.raises(ValueError, match="was not created or has been cleared"):
                use(unnamed[0])

    run_threads(2, body)


@kinds
def test_a_handle_that_is_polled_tells_whether_its_operation_is_done(kind):
    late = threading.Event()

    def body(rank):
        if rank == 1:
            late.wait(60)
        handle = KINDS[kind][0](fl, np.full(2, 1), "x")
        if rank == 0:
            assert not fl.poll(handle)
            late.set()
        while not fl.poll(handle):
            time.sleep(0.001)
        assert values_of(kind, handle) == KINDS[kind][1](1, rank)

    run_threads(2, body)


@kinds
@on_threads(2)
def test_more_unnamed_operations_in_flight_than_there_are_slots(rank, kind):
    handles = [KINDS[kind][0](fl, np.full(2, i), None) for i in range(600)]
    assert [values_of(kind, handle) for handle in handles] == [KINDS[kind][1](i, rank) for i in range(600)]


@on_threads(2)
def test_many_operations_of_all_sizes_are_started_in_another_order_on_each_rank(rank):
    order = np.random.default_rng(rank).permutation(200).tolist()
    handles = {i: fl.allreduce_async(np.full(i, float(rank + i)), name=f"x{i}", op=fl.Sum) for i in order}
    for i in reversed(range(200)):
        assert fl.synchronize(handles[i]).tolist() == [2.0 * i + 1] * i


def test_dropped_handles_keep_their_memory_until_the_operation_is_done_and_then_let_it_go():
    def body(rank):
        for i in range(300):
            fl.allreduce_async(np.full(1000, float(rank)), name=f"dropped {i}")
        for i in range(3):  # a barrier would overtake them: it moves no data
            assert fl.allreduce(np.full(1000, rank), name=f"later {i}", op=fl.Sum)[0] == 1
        return basics.current().core.in_flight

    assert max(run_threads(2, body)) < 40


def test_results_outlive_the_context():
    def body(rank):
        return (
            fl.allgather(np.full(rank + 1, rank)), flt.allgather(torch.full((rank + 1,), rank, dtype=torch.bfloat16)),
            *fl.alltoall(np.full(2, rank), [1, 1]),
        )  # fmt: skip

    for array, tensor, exchanged, splits in run_threads(2, body):
        assert array.tolist() == tensor.tolist() == [0, 1, 1]
        array += 1
        tensor += 1
        assert array.tolist() == tensor.tolist() == [1, 2, 2]
        assert exchanged.tolist() == [0, 1] and splits.tolist() == [1, 1]


def test_topology_and_counters_describe_the_rank():
    def body(rank):
        fl.allreduce(np.ones(1))
        assert fl.is_initialized() and fl.counters()["batches"] > 0
        return fl.rank(), fl.size(), fl.local_size(), fl.cross_rank(), fl.cross_size()

    assert run_threads(2, body) == [(0, 2, 2, 0, 1), (1, 2, 2, 0, 1)]


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_before_init_operations_and_questions_are_refused(frontend):
    ops, full = FRONTENDS[frontend]
    assert not fl.is_initialized()
    with pytest.raises(ValueError, match=r"not been initialized; use farandole.init\(\)"):
        fl.rank()
    with pytest.raises(fl.HorovodInternalError, match="not been initialized"):
        ops.allreduce(full((2,), 1.0))
    fl.shutdown()


# What others do meanwhile.


@on_threads(2)
def test_after_a_rank_has_left_the_others_are_told_which(rank):
    for _ in range(0 if rank == 1 else 2):
        with pytest.raises(fl.AbortedError, match="rank 1"):
            fl.allreduce(np.ones(2))


@kinds
def test_shutting_down_ends_what_is_in_flight(kind):
    submitted = threading.Event()

    def body(rank):
        if rank == 1:
            return submitted.wait(30)
        handle = KINDS[kind][0](fl, np.ones(2), "never")
        submitted.set()
        basics.current().close()
        with pytest.raises(fl.HorovodInternalError, match="has been shut down"):
            fl.synchronize(handle)
        return True

    assert run_threads(2, body) == [True, True]


def test_shutdown_while_other_threads_reduce_ends_their_calls():
    script = """
import threading, numpy as np, farandole as fl
for _ in range(20):
    fl.init()
    started = threading.Barrier(5)
    def reduce(i):
        started.wait()
        try:
            while True:
                fl.allreduce(np.ones(4), name=f"t{i}")
        except fl.HorovodInternalError:
            pass
    threads = [threading.Thread(target=reduce, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    started.wait()
    fl.shutdown()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_joined_ranks_count_as_zero_have_no_rows_and_take_no_part_in_an_alltoall():
    """Afterwards unnamed calls are counted alike on all ranks."""

    def body(rank):
        results = [fl.allreduce(np.ones(1)).item()]
        if rank == 1:  # rank 0 has joined or will
            mine = np.array([2.0, 4.0, 6.0])
            results += [fl.allreduce(np.ones(1)).item(), fl.allgather(np.array([[1, 2]]), name="x").tolist()]
            results += [fl.reducescatter(mine, name=str(op), op=op).tolist()
                        for op in (fl.Sum, fl.Average, fl.Max, fl.Product)]  # fmt: skip
            with pytest.raises(fl.HorovodInternalError, match='^alltoall "x".*rank 0.*joined'):
                fl.alltoall(np.ones(2), name="x")
            assert fl.allreduce(np.ones(2), op=fl.Sum).tolist() == [1, 1]
        last = fl.join()
        assert fl.allgather(np.full(2, rank)).tolist() == [0, 0, 1, 1]
        assert fl.alltoall(np.full(2, rank), name="x").tolist() == [0, 1]
        return results, last

    (first, last_of_first), (second, last_of_second) = run_threads(2, body)
    assert first == [1.0] and second == [1.0, 0.5, [[1, 2]], [6], [3], [6], [6]]
    assert last_of_first == last_of_second == 1


@on_threads(2)
def test_a_gather_that_was_started_before_the_join_has_its_rows(rank):
    if rank == 0:
        handle = fl.allgather_async(np.ones(2), name="x")
    else:
        assert fl.allreduce(np.ones(1), name="y", op=fl.Sum).item() == 1  # rank 0 has joined
        assert fl.allgather(np.zeros(1), name="x").tolist() == [1, 1, 0]
    fl.join()
    if rank == 0:
        assert fl.synchronize(handle).tolist() == [1, 1, 0]
    assert fl.allgather(np.full(1, rank), name="x").tolist() == [0, 1]


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


# What operations cost.


def test_an_asynchronous_operation_needs_no_thread():
    def body(rank):
        fl.barrier()
        before = threading.active_count()
        handles = [start(ops, full((2,), rank), f"{kind} {frontend}")
                   for kind, (start, _) in KINDS.items() for frontend, (ops, full) in FRONTENDS.items()]  # fmt: skip
        during = threading.active_count()
        fl.barrier()
        for handle in handles:
            fl.synchronize(handle)
        fl.barrier()
        return during - before

    assert run_threads(2, body) == [0, 0]


def sent_until_a_barrier():
    """What this rank has sent, the messages of a barrier included.

    A call may return before the engine has sent what the same step decided, so the counters are read until they
    stand still.
    """
    fl.barrier()
    sent, times_alike = {}, 0
    while times_alike < 5:  # a starved engine stands still as well, for a moment
        time.sleep(0.05)
        counters = basics.current().core.counters()
        now = {name: counters[name] for name in ("messages_up", "messages_down", "control_bytes_sent")}
        times_alike, sent = times_alike + 1 if now == sent else 0, now
    return sent


def test_a_steady_gather_takes_as_many_messages_as_an_allreduce(monkeypatch):
    monkeypatch.setenv("FARANDOLE_DIVERGENCE_CHECK", "0")  # which asks ranks that wait for a starved one
    counted_by_all = threading.Barrier(3)  # a rank that leaves is a message more

    def messages_of(call):
        """Of 50 calls, for which all vote, and a barrier, after a few others."""
        for _ in range(3):
            call()
        before = sent_until_a_barrier()
        for _ in range(50):
            call()
        after = sent_until_a_barrier()
        counted_by_all.wait(30)
        return {name: after[name] - before[name] for name in after}

    def body(rank):
        rows, full = np.full((rank + 1, 2), rank), np.ones(4)
        gathers = messages_of(lambda: fl.synchronize(fl.allgather_async(rows, name="gather")))
        return gathers, messages_of(lambda: fl.synchronize(fl.allreduce_async(full, name="reduce")))

    for rank, (gathers, reductions) in enumerate(run_threads(3, body)):
        for sent in (gathers, reductions):
            assert sent["messages_up"] == (0 if rank == 0 else 51)
            assert sent["messages_down"] == (2 * 51 if rank == 0 else 0)
        assert gathers["control_bytes_sent"] == reductions["control_bytes_sent"]


@on_threads(2)
def test_zero_grad_with_gradients_in_flight_is_an_assertion_and_step_works_after_it(rank):
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = flt.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), complete="step")
    (p * rank).sum().backward()
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    optimizer.step()
    assert p.tolist() == [0.5, 0.5]
