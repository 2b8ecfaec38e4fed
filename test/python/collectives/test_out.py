"""Results in memory of the caller: ``out=`` of allgather, alltoall and reducescatter, on ranks that are threads."""

import array

import numpy as np
import pytest
import torch

import farandole as fl
import farandole.torch as flt
from fake_gpu import needs_fake_gpu, pose
from farandole import _core, basics
from farandole.ops import ALLREDUCE, BLOCKS, BROADCAST, GROUP, gather_options
from ranks import run_threads


def rows_of(rank, count, dtype=np.float32):
    return np.full((count, 2), rank + 1, dtype)


@pytest.mark.parametrize("module", [fl, flt], ids=["arrays", "tensors"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_results_are_written_where_the_caller_wants_them(module, size):
    like = torch.from_numpy if module is flt else np.asarray

    def body(rank):
        def out(rows):
            return like(np.full((rows, 2), -1, np.float32))

        everything = np.concatenate([rows_of(r, r + 1) for r in range(size)])
        calls = {
            "allgather": ((rows_of(rank, rank + 1),), len(everything), everything),
            "reducescatter": ((rows_of(rank, size),), 1, rows_of(size * (size + 1) // 2 - 1, 1)),
            "alltoall": ((rows_of(rank, size),), size, np.concatenate([rows_of(r, 1) for r in range(size)])),
        }
        for name, (arguments, rows, expected) in calls.items():
            options = {"op": fl.Sum} if name == "reducescatter" else {}
            given = [like(argument) for argument in arguments]
            place = out(rows)
            assert getattr(module, name)(*given, out=place, **options) is place
            np.testing.assert_array_equal(place, expected)
            place = out(rows)
            result = fl.synchronize(getattr(module, f"{name}_async")(*given, out=place, **options))
            assert (result[0] if name == "alltoall" else result) is place
            np.testing.assert_array_equal(place, expected)

    run_threads(size, body)


def test_alltoall_with_splits_says_what_came_too():
    def body(rank):
        place = torch.empty(2 * (rank + 1))
        result, numbers = flt.alltoall(torch.full((3,), float(rank)), [1, 2], out=place)
        assert result is place and numbers.tolist() == [rank + 1, rank + 1]
        assert place.tolist() == [0.0] * (rank + 1) + [1.0] * (rank + 1)

    run_threads(2, body)


def test_other_rows_than_out_has_are_an_error_on_that_rank_alone():
    def body(rank):
        memory = np.full((7, 2), -1, np.float32)
        for rows, is_right in ((5, True), (4, False), (6, False), (0, False)):
            out = memory[:rows] if rank == 0 else None
            if rank == 1 or is_right:
                assert len(fl.allgather(rows_of(rank, 2 + rank), "rows", out=out)) == 5
                memory[:] = -1
                continue
            text = rf'allgather "rows": .*shape \[{rows},2\]; rows \[2,3\] came .* are of shape \[5,2\]'
            with pytest.raises(fl.MismatchError, match=text):
                fl.allgather(rows_of(0, 2), "rows", out=out)
            assert (memory == -1).all()
        return fl.allreduce(np.ones(1), op=fl.Sum).item()

    assert run_threads(2, body) == [2, 2]


def test_numbers_of_rows_that_were_not_expected_are_an_error_though_they_fit_in_all():
    def body(rank):
        core, out = basics.current().core, np.zeros((8, 2), np.float32)
        how, mine = gather_options(fl.global_process_set), rows_of(rank, 3 if rank == 0 else 5)
        core.submit(how, mine, "right", BLOCKS, out=out, rows=[3, 5])
        np.testing.assert_array_equal(out[:, 0], [1] * 3 + [2] * 5)
        with pytest.raises(fl.MismatchError, match=r"expects rows \[4,4\] from the ranks; \[3,5\] came"):
            core.submit(how, mine, "wrong", BLOCKS, out=np.zeros((8, 2), np.float32), rows=[4, 4])
        with pytest.raises(ValueError, match="rows has 1 numbers; expected 2"):
            core.submit(how, mine, "wrong", BLOCKS, out=out, rows=[8])

    run_threads(2, body)


def test_what_cannot_hold_the_result_is_refused():
    def body(rank):
        given, read_only = np.ones((2, 2), np.float32), np.zeros((2, 2), np.float32)
        read_only.flags.writeable = False
        for out, why in (
            (np.zeros((2, 3), np.float32), r"float32 array of shape \[rows, 2\] .* got float32 of shape \[2, 3\]"),
            (np.zeros((2, 2)), "got float64"),
            (np.zeros(4, np.float32), r"shape \[4\]"),
            (np.zeros((2, 4), np.float32)[:, ::2], "not contiguous"),
            (np.zeros((2, 2), np.float32).T[:, :1], r"shape \[2, 1\]"),
            (read_only, "not writable"),
            (bytes(16), "got uint8"),
            ([0.0], "out cannot be used"),
        ):
            with pytest.raises(ValueError, match=why):
                fl.allgather(given, "x", out=out)
        with pytest.raises(ValueError, match="is in the memory of its input"):
            fl.alltoall(given, out=given)
        with pytest.raises(ValueError, match="is in the memory of its input"):
            fl.reducescatter(given, out=given)
        with pytest.raises(ValueError, match=r"shape \[2, 2\] where the tensor is, got float32 of shape \[1, 2\]"):
            fl.reducescatter(given, out=given[:1])

    run_threads(1, body)


def test_tensors_that_need_gradients_are_refused_as_by_torch():
    def body(rank):
        weight, out = torch.ones(2, 2, requires_grad=True), torch.empty(2, 2)
        for call in (flt.allgather, flt.reducescatter, flt.alltoall):
            with pytest.raises(RuntimeError, match="no gradient flows through out="):
                call(weight, out=out)
            with torch.no_grad():
                assert call(weight, out=out) is out
        before = out._version
        flt.allgather(torch.ones(2, 2), out=out)
        assert out._version > before  # autograd notices the write

    run_threads(1, body)


def test_reductions_and_groups_take_out_as_well():
    def body(rank):
        core = basics.current().core
        for kind, expected in ((ALLREDUCE, 3.0), (BROADCAST, 2.0)):
            options = _core.Options(kind, root=1 if kind == BROADCAST else -1)
            places = [np.zeros(3), np.zeros(2)]
            given = [np.full(3, rank + 1.0), np.full(2, rank + 1.0)]
            results = core.submit(options, given, f"group {kind}", GROUP | BLOCKS, out=places)
            assert all(result is place for result, place in zip(results, places, strict=True))
            assert [place.tolist() for place in places] == [[expected] * 3, [expected] * 2]
            with pytest.raises(ValueError, match="1 arrays as out for 2 tensors"):
                core.submit(options, given, "group", GROUP | BLOCKS, out=places[:1])
        buffer = array.array("f", [0.0] * 2)
        fl.allgather(array.array("f", [rank + 1.0]), out=buffer)
        assert buffer.tolist() == [1.0, 2.0]

    run_threads(2, body)


@pytest.fixture(params=[False, True], ids=["own GPUs", "one GPU"])
def gpus(request):
    yield from pose(shared=request.param)


@needs_fake_gpu
def test_on_a_gpu_out_is_written_after_what_its_stream_holds(gpus):
    def body(rank):
        gpu = gpus.mine
        mine, place = torch.zeros(rank + 1), torch.zeros(3)
        gpu.write(mine, torch.full((rank + 1,), rank + 1.0))
        gpu.write(place, torch.full((3,), -1.0))  # late, but before the result
        assert flt.allgather(mine, out=place) is place
        assert gpu.read(place).tolist() == [1, 2, 2]
        part, back = torch.zeros(1), torch.zeros(2)
        flt.reducescatter(torch.full((2,), rank + 1.0), op=fl.Sum, out=part)
        flt.alltoall(torch.full((2,), float(rank)), out=back)
        assert gpu.read(part).tolist() == [3] and gpu.read(back).tolist() == [0, 1]
        if rank == 0:
            with pytest.raises(fl.MismatchError, match=r"shape \[4\]; rows \[1,2\] came"):
                flt.allgather(mine, "late", out=torch.zeros(4))
        else:
            flt.allgather(mine, "late")

    run_threads(2, body)
