"""Every operation with every dtype, reduce op and form on one to four ranks, of NumPy and torch: see operations.py."""

import array
import contextlib
import itertools
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch

import farandole as fl
import farandole.torch as flt
from models import Halved
from operations import MOVED, PAIRS, REDUCED, Numpy, Torch, check
from ranks import on_threads, run_threads

LIBRARIES = pytest.mark.parametrize("library", [Numpy(), Torch()], ids=["numpy", "torch"])


@LIBRARIES
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_case_gives_what_numpy_makes_of_all_inputs(size, library):
    run_threads(size, lambda rank: check(library, rank, size))


@LIBRARIES
@on_threads(4)
def test_every_case_in_a_process_set_is_that_of_its_members_alone(rank, library):
    sets = [fl.add_process_set([0, 2]), fl.add_process_set(fl.ProcessSet([3, 1]))]
    check(library, rank // 2, 2, dtypes=["float64"], members=sets[rank % 2])
    fl.barrier(process_set=sets[rank % 2])
    assert fl.allreduce(np.array([rank]), op=fl.Sum).item() == 6


@LIBRARIES
def test_dtypes_that_cannot_be_reduced_are_refused_by_name_with_those_that_can(library):
    listed = ".*".join([*MOVED[:7], "bfloat16", *MOVED[7:9], *PAIRS])

    def body(rank):
        for dtype in [d for d in library.dtypes if d not in ("bool", *REDUCED)]:
            for function in (library.ops.allreduce, library.ops.reducescatter):
                with pytest.raises((TypeError, ValueError), match=f"{dtype}.*{listed}"):
                    function(library.make([[1, 2]], dtype))
        for dtype, op in itertools.product(PAIRS, (fl.Min, fl.Max, fl.Product)):
            with pytest.raises(ValueError, match=f"{dtype} is reduced by Sum and by Average only"):
                library.ops.allreduce(library.make([1, 2], dtype), op=op)
        for op in (fl.Average, fl.Sum):
            with pytest.raises((TypeError, ValueError), match="bool"):
                library.ops.allreduce(library.make([True, False], "bool"), op=op)
        assert library.ops.allreduce(library.make([rank], "int64"), op=fl.Max).tolist() == [1]

    run_threads(2, body)


@on_threads(2)
def test_dtypes_that_travel_alike_are_told_apart(rank):
    with pytest.raises(fl.MismatchError, match="complex64"):
        fl.broadcast([np.ones(2, "c8"), np.ones((2, 2), "f4")][rank], 0, name="x")
    with pytest.raises(fl.MismatchError, match="uint16"):
        fl.allgather(np.ones(2, ["u2", "i2"][rank]), name="x")
    assert fl.allgather(np.ones(1, "c8"), name="x").tolist() == [1, 1]


def test_no_dtype_of_torch_arrives_as_another_and_all_that_the_core_knows_are_moved():
    def body(rank):
        moved = set()
        for name, dtype in vars(torch).items():
            if not isinstance(dtype, torch.dtype):
                continue
            with contextlib.suppress(RuntimeError, NotImplementedError):  # of torch: there is no such tensor
                mine = torch.zeros(16, dtype=torch.uint8).view(dtype)
                try:
                    assert flt.broadcast(mine, 0).dtype is dtype
                    moved.add(str(dtype).removeprefix("torch."))
                except ValueError as error:
                    assert f"{dtype} is not supported" in str(error), name
        return moved

    assert run_threads(2, body)[0] == set(fl._core.dtypes)


@on_threads(2)
def test_averages_of_integers_truncate_toward_zero(rank):
    assert fl.allreduce(np.float32(3 + rank)) == np.float32(3.5)
    assert fl.allreduce(np.array([3 + rank, -3 - rank])).tolist() == [3, -3]


def test_a_name_may_come_again_with_other_numbers_of_rows():
    def body(rank):
        gathered = [fl.allgather(np.full(rows[rank], rank), name="x").tolist()
                    for rows in ([1, 2], [2, 1], [0, 3], [1, 2])]  # fmt: skip
        exchanged = [fl.alltoall(np.arange(3), splits, name="x")[0].tolist()
                     for splits in ([1, 2], [2, 1], [0, 2], [1, 2])]  # fmt: skip
        return gathered, exchanged

    gathered = [[0, 1, 1], [0, 0, 1], [1, 1, 1], [0, 1, 1]]
    exchanged = [[[0, 0], [0, 1, 0, 1], [], [0, 0]], [[1, 2, 1, 2], [2, 2], [0, 1, 0, 1], [1, 2, 1, 2]]]
    assert run_threads(2, body) == [(gathered, exchanged[0]), (gathered, exchanged[1])]


@pytest.mark.parametrize("make", [tuple, np.array, torch.tensor, np.uint8], ids=lambda m: m.__name__)
def test_splits_may_be_any_integers_and_those_that_came_send_it_back(make):
    def body(rank):
        mine = torch.arange(5) + 10 * rank
        there, counts = flt.alltoall(mine, make([2 - rank, 3 + rank]), name="there")
        back, splits = flt.alltoall(there, counts, name="back")
        assert torch.equal(back, mine) and splits.tolist() == [2 - rank, 3 + rank]
        assert counts.dtype == torch.int32
        return fl.alltoall(np.arange(3), make([1, 2]))[0].tolist()

    assert run_threads(2, body) == [[0, 0], [1, 2, 1, 2]]


def _later(call):
    """An asynchronous function as a blocking one."""
    return lambda *args, **kwargs: flt.synchronize(call(*args, **kwargs))


#: Of a group of the tensors 2 x 3 transposed, integers and none: (function, whether in place, each result on 2 ranks).
GROUPS = {
    "allreduce": (False, lambda x, _: [3 * x.t(), torch.tensor([3, 3]), torch.zeros(0, 3)]),
    "allreduce_": (True, lambda x, _: [3 * x.t(), torch.tensor([3, 3]), torch.zeros(0, 3)]),
    "allgather": (False, lambda x, _: [torch.cat([x.t(), 2 * x.t()]), torch.tensor([1, 2, 2]), torch.zeros(0, 3)]),
    "reducescatter": (False, lambda x, r: [(3 * x.t()).tensor_split(2)[r], torch.tensor([3]), torch.zeros(0, 3)]),
}


@pytest.mark.parametrize("name", ["group", None])
@pytest.mark.parametrize("kind", GROUPS)
def test_tensors_of_a_group_may_differ_in_dtype_rows_and_strides(kind, name):
    is_in_place, wanted = GROUPS[kind]
    start = getattr(flt, f"grouped_{kind.removesuffix('_')}_async{'_' * is_in_place}")

    def body(rank):
        x = torch.arange(6.0).reshape(2, 3)
        for call in (getattr(flt, f"grouped_{kind}"), _later(start)):
            mine = [(x * (rank + 1)).t(), torch.full((2,), rank + 1), torch.zeros(0, 3)]
            if kind == "allgather":
                mine[1] = mine[1][: rank + 1]
            before, versions = [one.clone() for one in mine], [one._version for one in mine]
            got = call(mine, name=name, **({} if kind == "allgather" else {"op": fl.Sum}))
            for one, other in zip(got, wanted(x, rank), strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=0)
            if is_in_place:
                assert all(one is other for one, other in zip(got, mine, strict=True))
                assert all(t._version > v for t, v in zip(mine[:2], versions[:2], strict=True))
            else:
                assert all(map(torch.equal, mine, before))

    run_threads(2, body)


def test_arguments_of_a_group_are_horovods():
    def body(rank):
        (total,) = flt.grouped_allreduce([torch.full((2,), 2.0 * rank)], False, "name")
        third = torch.full((2,), 1 / 3)
        (half,) = flt.grouped_allreduce([third], compression=flt.Compression.fp16, op=fl.Max)
        return total.tolist(), half[0].item() != third[0].item()

    with pytest.warns(DeprecationWarning):
        assert run_threads(1, body) == [([0, 0], False)]
        assert run_threads(2, body) == [([2, 2], True)] * 2


def test_average_is_deprecated_in_the_callers_line():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = run_threads(2, lambda rank: flt.allreduce(torch.ones(1), average=False).item())
    assert results == [2.0, 2.0]
    assert {(w.category, w.filename) for w in caught} == {(DeprecationWarning, __file__)}


def test_compression_rounds_to_the_wire_leaves_other_dtypes_alone_or_calls_the_users_class():
    value, third = 1 + 2**-9, torch.full((4,), 1 / 3)

    def body(rank):
        mine = torch.full((3,), value)
        assert flt.allreduce(mine, compression=flt.Compression.fp16).tolist() == [value] * 3
        assert flt.allreduce(mine, compression=flt.Compression.bf16).tolist() == [1.0] * 3
        large = torch.tensor([2**40 + 1])
        assert flt.allreduce(large, compression=flt.Compression.fp16).item() == 2**40 + 1
        whole = flt.allreduce(third, compression=flt.Compression.fp16, op=fl.Sum)
        halves = flt.reducescatter(third, compression=flt.Compression.fp16, op=fl.Sum)
        assert halves.dtype == torch.float32 and torch.equal(halves, whole[:2]) and halves[0] != 2 / 3
        assert flt.reducescatter(torch.ones(2), compression=Halved, op=fl.Sum).tolist() == [2]

    run_threads(2, body)
    mine = torch.tensor([1e30, 1 + 2**-20])  # one rank is exact
    alone = run_threads(1, lambda _: flt.allreduce(mine, compression=flt.Compression.fp16))
    assert torch.equal(alone[0], mine)


@pytest.mark.parametrize("of_a_pair", [False, True])
@on_threads(3)
def test_factors_given_as_tensors_are_read_at_the_call(rank, of_a_pair):
    group = fl.add_process_set([0, 1]) if of_a_pair else fl.global_process_set
    if of_a_pair and rank == 2:
        return
    factor, one = torch.tensor(2.0), torch.ones(1)
    for expected in (2, 4, 8):
        for factors in ({"prescale_factor": factor}, {"postscale_factor": factor}):
            for call in (flt.allreduce, fl.allreduce):
                assert call(one, process_set=group, **factors).item() == expected
            assert set(flt.reducescatter(torch.ones(3), process_set=group, **factors).tolist()) == {expected}
        factor.mul_(2)


# Tensors of a layout of their own.


@on_threads(3)
def test_ranks_may_hold_the_same_tensor_in_different_layouts(rank):
    values = torch.arange(120.0).reshape(2, 3, 4, 5) + rank
    of_last = values.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    mine = [values, values.contiguous(memory_format=torch.channels_last), of_last][rank]
    expected = 3 * torch.arange(120.0).reshape(2, 3, 4, 5) + 3
    assert torch.equal(flt.allreduce(mine, op=fl.Sum), expected)
    assert flt.allreduce_(mine, op=fl.Sum) is mine and torch.equal(mine, expected)
    rows = torch.zeros(4, 3)
    flt.broadcast_(rows[:, 1].fill_(rank), 2)
    assert rows.sum(0).tolist() == [0, 8, 0]


@on_threads(2)
def test_lazily_conjugated_tensors_travel_by_value(rank):
    mine = torch.tensor([1 + 2j, 3 - 1j]).conj()
    assert flt.broadcast(mine, 0).tolist() == [1 - 2j, 3 + 1j]
    flt.broadcast_(mine, 0)
    assert mine.tolist() == [1 - 2j, 3 + 1j] and mine.is_conj()
    assert flt.allreduce(torch.tensor([1 + 2j]).conj().imag, op=fl.Sum).tolist() == [-4.0]


def test_an_expanded_tensor_gets_a_result_that_fits_in_its_memory():
    def body(rank):
        small = torch.full((1, 2), float(rank))
        flt.broadcast_parameters({"weight": torch.ones(2), "expanded": small.expand(3, 2)}, 1)
        assert small.tolist() == [[1, 1]]
        mine = torch.full((1,), float(rank)).expand(2)
        assert flt.allreduce_(mine, op=fl.Sum) is mine and mine.tolist() == [1, 1]
        other = torch.tensor([1.0, 2.0]) if rank == 0 else torch.zeros(1).expand(2)
        if rank == 0:
            return flt.broadcast_(other, 0).tolist()
        with pytest.raises(ValueError, match=r"shape \[2\] and strides \[0\].*share memory"):
            flt.broadcast_(other, 0)
        return other.tolist()

    assert run_threads(2, body) == [[1, 2], [0, 0]]


class Sharded(torch.Tensor):
    """As DTensor: it says a shape, and its elements are in another tensor."""

    @staticmethod
    def __new__(cls, local):
        return torch.Tensor._make_wrapper_subclass(cls, (2 * len(local), *local.shape[1:]), dtype=local.dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(f"{function} of a Sharded")


@pytest.mark.parametrize("call", [
    flt.allreduce, flt.allreduce_, lambda x: flt.grouped_allreduce([torch.ones(2), x]), flt.allgather,
    lambda x: flt.broadcast_(x, 1), flt.reducescatter, fl.allreduce,
])  # fmt: skip
@on_threads(2)
def test_a_tensor_without_memory_of_its_own_is_refused_by_its_type(rank, call):
    with pytest.raises(TypeError, match=r"Sharded of shape \[4, 3\] has no memory of its own"):
        call(Sharded(torch.ones(2, 3)))
    assert flt.allreduce(torch.ones(1)).item() == 1.0


# Arrays of NumPy and of whatever has memory.


class WithUnit(np.ndarray):
    unit = ""

    def __array_finalize__(self, source):
        self.unit = getattr(source, "unit", "")


@on_threads(2)
def test_a_result_is_of_the_subclass_of_its_array(rank):
    mine = np.full((2, 1), rank + 1.0).view(WithUnit)
    mine.unit = "m"
    results = fl.allreduce(mine, op=fl.Sum), fl.allgather(mine)[1:3], fl.broadcast(mine, 1)
    assert all((type(result), result.unit) == (WithUnit, "m") for result in results)
    assert [result.tolist() for result in results] == [[[3], [3]], [[1], [2]], [[2], [2]]]


@on_threads(1)
def test_in_place_refuses_memory_it_cannot_write_and_says_why(rank):
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match=r"shape \(3,\).*writable: False.*allreduce returns"):
        fl.allreduce_(frozen)
    with pytest.raises(ValueError, match=r"strides \(8, 24\).*C-contiguous: False"):
        fl.broadcast_(np.zeros((2, 3)).T.copy(order="F")[:, :].T.T, 0)


@on_threads(2)
def test_buffers_and_dlpack_tensors_are_reduced_in_their_own_memory(rank):
    buffer, raw = array.array("d", [rank, 2 * rank]), bytearray([rank, 5])
    assert fl.allreduce_(buffer, op=fl.Sum) is buffer and buffer.tolist() == [1.0, 2.0]
    fl.broadcast_(raw, 0)
    assert raw == bytearray([0, 5])
    place = array.array("f", [0.0] * 2)
    fl.allgather(array.array("f", [rank + 1.0]), out=place)
    assert place.tolist() == [1.0, 2.0]
    tensor = torch.full((2,), float(rank))
    assert fl.allreduce(tensor, op=fl.Sum).tolist() == [1.0, 1.0]
    fl.allreduce_(tensor, op=fl.Sum)
    assert tensor.tolist() == [1.0, 1.0]


def test_importing_the_package_imports_no_framework():
    script = "import farandole, sys; sys.exit(bool({'torch', 'cupy', 'jax'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


# Models.


@on_threads(2)
def test_broadcast_parameters_takes_state_dicts_pairs_and_lists(rank):
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3))
    model.to(memory_format=torch.channels_last)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(rank + 1)
    flt.broadcast_parameters(model.state_dict(), root_rank=1)
    assert {float(v) for t in model.state_dict().values() for v in t.flatten()} == {2.0}
    with torch.no_grad():
        model[0].weight.fill_(rank)
    flt.broadcast_parameters(model.named_parameters())
    assert model[0].weight.unique().tolist() == [0.0]
    tensors = [torch.full((2,), rank), torch.tensor(rank), torch.empty(0)]
    flt.broadcast_parameters(tensors, 1)
    assert tensors[0].tolist() == [1, 1] and tensors[1].item() == 1


@pytest.mark.parametrize("other", [{"w": torch.ones(3)}, {"v": torch.ones(2)}, {"w": torch.ones(2).double()}])
def test_different_models_are_a_mismatch_that_names_the_tensor(other):
    def body(rank):
        params = {"w": torch.ones(2)} if rank == 0 else other
        with pytest.raises(fl.MismatchError) as raised:
            flt.broadcast_parameters(params, 0)
        flt.broadcast_parameters({"w": torch.ones(2)}, 0)
        return str(raised.value)

    first, second = run_threads(2, body)
    assert first == second and "w" in first


# Sums of sparse tensors.


def sparse(rank, dtype=torch.float64, sparse_dims=1):
    """Of shape [5, 4]: rank r has r elements in rows that others have too, some twice."""
    generator = torch.Generator().manual_seed(rank)
    indices = torch.randint(0, 4, (sparse_dims, 2 * rank), generator=generator)
    shape = (2 * rank,) if sparse_dims == 2 else (2 * rank, 4)
    values = torch.randint(-5, 6, shape, generator=generator).to(dtype)
    return torch.sparse_coo_tensor(indices, values, (5, 4), check_invariants=True)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sums_and_means_of_sparse_tensors_are_those_of_dense_ones(size):
    def body(rank):
        for sparse_dims, dtype in itertools.product((1, 2), (torch.float64, torch.float16, torch.int64)):
            mine = sparse(rank, dtype, sparse_dims)
            handles = [flt.sparse_allreduce_async(mine, name="sum", op=fl.Sum),
                       flt.sparse_allreduce_async(mine, name="mean")]  # fmt: skip
            mean, total = [handle() for handle in handles[::-1]]
            for result, op in ((total, fl.Sum), (mean, fl.Average)):
                wanted = flt.allreduce(mine.to_dense(), op=op)
                assert result.is_sparse and result.is_coalesced() and result.dtype == dtype
                assert torch.allclose(result.to_dense().double(), wanted.double(), rtol=1e-3), (sparse_dims, dtype)
                assert result.sparse_dim() == sparse_dims
        nothing = flt.sparse_allreduce_async(sparse(0))()
        assert nothing.shape == (5, 4) and nothing._nnz() == 0

    run_threads(size, body)

# Results in memory of the caller.



def test_other_rows_than_out_has_are_an_error_on_that_rank_alone():
    def body(rank):
        memory = np.full((7, 2), -1, np.float32)
        for rows, is_right in ((5, True), (4, False), (6, False), (0, False)):
            out = memory[:rows] if rank == 0 else None
            if rank == 1 or is_right:
                assert len(fl.allgather(np.full((2 + rank, 2), rank, np.float32), "rows", out=out)) == 5
                memory[:] = -1
                continue
            text = rf'allgather "rows": .*shape \[{rows},2\]; rows \[2,3\] came .* are of shape \[5,2\]'
            with pytest.raises(fl.MismatchError, match=text):
                fl.allgather(np.zeros((2, 2), np.float32), "rows", out=out)
            assert (memory == -1).all()
        return fl.allreduce(np.ones(1), op=fl.Sum).item()

    assert run_threads(2, body) == [2, 2]


@on_threads(1)
def test_out_is_written_as_autograd_notices_also_where_gradients_are_off(rank):
    weight, out = torch.ones(2, 2, requires_grad=True), torch.empty(2, 2)
    for call in (flt.allgather, flt.reducescatter, flt.alltoall):
        with torch.no_grad():
            assert call(weight, out=out) is out
    before = out._version
    flt.allgather(torch.ones(2, 2), out=out)
    assert out._version > before
