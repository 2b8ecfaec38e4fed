"""The NumPy frontend, on ranks that are threads."""

import array
import subprocess
import sys
import time

import numpy as np
import pytest

import farandole as fl
from farandole import basics
from ranks import run_threads


def test_the_default_is_the_average_and_integers_truncate():
    def body(rank):
        assert fl.allreduce(np.float32(3 + rank)) == np.float32(3.5)
        assert fl.allreduce(np.array([3 + rank, -3 - rank])).tolist() == [3, -3]

    run_threads(2, body)


def test_factors_scale_contributions_and_the_result():
    def body(rank):
        mine = np.full(3, 1.0 + rank)
        result = fl.allreduce(mine, op=fl.Sum, prescale_factor=0.5, postscale_factor=4.0)
        assert result.tolist() == [6.0] * 3

    run_threads(2, body)


def test_shapes_survive_also_scalars_and_empty_arrays():
    def body(rank):
        for shape in [(), (0,), (2, 0, 3), (1,), (2, 3, 4)]:
            mine = np.full(shape, float(rank))
            assert fl.allreduce(mine, name=f"{shape}").shape == shape
            assert fl.broadcast(mine, 1, name=f"{shape}").shape == shape

    run_threads(2, body)


def test_strided_inputs_are_copied_and_left_alone():
    def body(rank):
        mine = np.arange(12.0).reshape(3, 4) + rank
        result = fl.allreduce(mine.T, op=fl.Sum)
        np.testing.assert_array_equal(result, (2 * np.arange(12.0).reshape(3, 4) + 1).T)
        np.testing.assert_array_equal(mine, np.arange(12.0).reshape(3, 4) + rank)

    run_threads(2, body)


def test_in_place_gives_the_same_object():
    def body(rank):
        mine = np.full(3, float(rank))
        assert fl.allreduce_(mine, op=fl.Sum) is mine
        assert mine.tolist() == [1.0] * 3
        mine[:] = rank
        assert fl.broadcast_(mine, 1) is mine
        assert mine.tolist() == [1.0] * 3

    run_threads(2, body)


class WithUnit(np.ndarray):
    unit = ""

    def __array_finalize__(self, source):
        self.unit = getattr(source, "unit", "")


def test_a_result_is_of_the_subclass_of_its_array():
    def body(rank):
        mine = np.full((2, 1), rank + 1.0).view(WithUnit)
        mine.unit = "m"
        results = fl.allreduce(mine, op=fl.Sum), fl.allgather(mine)[1:3], fl.broadcast(mine, 1)
        assert all((type(result), result.unit) == (WithUnit, "m") for result in results)
        return [result.tolist() for result in results]

    assert run_threads(2, body) == [[[[3], [3]], [[1], [2]], [[2], [2]]]] * 2


def test_in_place_refuses_memory_it_cannot_write_and_says_why():
    def body(rank):
        frozen = np.zeros(3)
        frozen.flags.writeable = False
        with pytest.raises(ValueError, match=r"shape \(3,\).*writable: False.*allreduce returns"):
            fl.allreduce_(frozen)
        with pytest.raises(ValueError, match=r"strides \(8, 24\).*C-contiguous: False"):
            fl.broadcast_(np.zeros((2, 3)).T.copy(order="F")[:, :].T.T, 0)
        with pytest.raises(TypeError, match="neither the buffer protocol nor DLPack"):
            fl.allreduce([1.0, 2.0])
        with pytest.raises(TypeError, match="would lose its mask"):
            fl.allreduce(np.ma.array([1, 2], mask=[0, 1]))

    run_threads(1, body)


def test_buffers_and_dlpack_tensors_are_reduced_in_their_own_memory():
    torch = pytest.importorskip("torch")

    def body(rank):
        buffer = array.array("d", [rank, 2 * rank])
        assert fl.allreduce_(buffer, op=fl.Sum) is buffer
        assert buffer.tolist() == [1.0, 2.0]
        raw = bytearray([rank, 5])
        fl.broadcast_(raw, 0)
        assert raw == bytearray([0, 5])
        tensor = torch.full((2,), float(rank))
        assert fl.allreduce(tensor, op=fl.Sum).tolist() == [1.0, 1.0]
        fl.allreduce_(tensor, op=fl.Sum)
        assert tensor.tolist() == [1.0, 1.0]

    run_threads(2, body)


def test_many_operations_in_flight_finish_in_any_order():
    def body(rank):
        order = np.random.default_rng(rank).permutation(200)
        handles = {}
        for i in order.tolist():
            handles[i] = fl.allreduce_async(np.full(i, float(rank + i)), name=f"x{i}", op=fl.Sum)
        for i in reversed(range(200)):
            assert fl.synchronize(handles[i]).tolist() == [2.0 * i + 1] * i

    run_threads(2, body)


def test_a_handle_can_be_polled_and_is_spent_after_synchronize():
    def body(rank):
        handle = fl.broadcast_async_(np.zeros(2), 0)
        deadline = time.monotonic() + 30
        while not fl.poll(handle):
            assert time.monotonic() < deadline
        fl.synchronize(handle)
        for use in (fl.poll, fl.synchronize):
            with pytest.raises(ValueError, match="was not created or has been cleared"):
                use(handle)
            with pytest.raises(ValueError, match="was not created or has been cleared"):
                use(12345)

    run_threads(2, body)


def test_a_dropped_handle_keeps_its_memory_until_the_operation_is_done():
    def body(rank):
        for i in range(300):
            fl.allreduce_async(np.full(1000, float(rank)), name=f"dropped{i}")
        return fl.allreduce(np.ones(1), op=fl.Sum).item()

    assert run_threads(2, body) == [2, 2]


def test_more_unnamed_operations_in_flight_than_there_are_slots():
    def body(rank):
        handles = [fl.allreduce_async(np.full(2, float(i)), op=fl.Sum) for i in range(600)]
        for i, handle in enumerate(handles):
            assert fl.synchronize(handle).tolist() == [2.0 * i] * 2

    run_threads(2, body)


def test_join_gives_the_last_rank_and_joined_ranks_count_as_zero():
    def body(rank):
        results = [fl.allreduce(np.ones(1)).item() for _ in range(rank + 1)]
        return results, fl.join()

    (first, last_of_first), (second, last_of_second) = run_threads(2, body)
    assert first == [1.0] and second == [1.0, 0.5]
    assert last_of_first == last_of_second == 1


def test_topology_and_counters_describe_the_rank():
    def body(rank):
        fl.allreduce(np.ones(1))
        assert fl.is_initialized()
        assert fl.counters()["batches"] > 0
        return fl.rank(), fl.size(), fl.local_size(), fl.cross_rank(), fl.cross_size()

    assert run_threads(2, body) == [(0, 2, 2, 0, 1), (1, 2, 2, 0, 1)]


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        (5, TypeError, "name must be a str or None, not 5"),
        (b"x", TypeError, "name must be a str or None, not b'x'"),
        ("a\0b", ValueError, "must not hold NUL"),
        ("\ud800", ValueError, "lone surrogates"),
    ],
)
def test_names_that_cannot_travel_are_refused_in_one_sentence(name, error, text):
    def body(rank):
        with pytest.raises(error, match=text) as raised:
            fl.allreduce(np.ones(1), name=name)
        assert "\n" not in str(raised.value)
        return fl.allreduce(np.ones(1), name="größe\n", op=fl.Sum).item()

    assert run_threads(2, body) == [2.0, 2.0]


def test_dropped_handles_let_their_memory_go_with_the_next_call():
    def body(rank):
        for i in range(40):
            fl.allreduce_async(np.ones(1000), name=f"dropped {i}")
        for i in range(3):  # a barrier would overtake them: it moves no data
            fl.allreduce(np.ones(1000), name=f"later {i}")
        return basics.current().core.in_flight

    assert max(run_threads(2, body)) < 40


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


def test_importing_the_package_imports_no_framework():
    script = "import farandole, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
