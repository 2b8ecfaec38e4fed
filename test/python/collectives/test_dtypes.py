"""Every dtype that a library has: what moves any bytes moves it, what reduces refuses it by name."""

import numpy as np
import pytest
import torch

import farandole as fl
import farandole.torch as flt
from ranks import run_threads

NUMPY = "uint16 uint32 uint64 complex64 complex128".split()
TORCH = [
    getattr(torch, name)
    for name in "complex64 complex128 float8_e4m3fn float8_e5m2 uint16 uint32 uint64".split()
    if hasattr(torch, name)
]


def numpy_rows(rank, dtype, count):
    values = np.arange(2 * count).reshape(count, 2) + 10 * rank + 1
    return (values * (1 - 2j) if dtype.startswith("complex") else values).astype(dtype)


def torch_rows(rank, dtype, count):
    """Any bits, as those of a float8 cannot be computed with."""
    bits = torch.arange(2 * count * dtype.itemsize, dtype=torch.uint8) + 100 * rank
    return bits.view(dtype).reshape(count, 2)


def bits_of(tensor):
    return tensor.contiguous().view(torch.uint8).tolist()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_numpys_dtypes_are_broadcast_gathered_and_exchanged(size):
    def body(rank):
        for dtype in NUMPY:
            rows = [numpy_rows(r, dtype, r + 1) for r in range(size)]
            got = fl.allgather(rows[rank], name=f"gather {dtype}")
            np.testing.assert_array_equal(got, np.concatenate(rows))
            assert got.dtype == dtype
            root = fl.broadcast(numpy_rows(rank, dtype, 3), size - 1, name=f"new {dtype}")
            np.testing.assert_array_equal(root, numpy_rows(size - 1, dtype, 3))
            mine = numpy_rows(rank, dtype, 3)
            assert fl.broadcast_(mine, 0) is mine
            np.testing.assert_array_equal(mine, numpy_rows(0, dtype, 3))
            mixed = fl.alltoall(numpy_rows(rank, dtype, size))
            expected = [numpy_rows(r, dtype, size)[rank] for r in range(size)]
            np.testing.assert_array_equal(mixed, np.stack(expected))
            scalar = fl.broadcast(numpy_rows(rank, dtype, 1)[0, 0], 0)
            assert scalar.shape == () and scalar == numpy_rows(0, dtype, 1)[0, 0]

    run_threads(size, body)


@pytest.mark.parametrize("dtype", TORCH, ids=str)
def test_torchs_dtypes_are_broadcast_gathered_and_exchanged(dtype):
    def body(rank):
        rows = [torch_rows(r, dtype, r + 1) for r in range(2)]
        got = flt.allgather(rows[rank])
        assert got.dtype == dtype and bits_of(got) == bits_of(rows[0]) + bits_of(rows[1])
        root = flt.broadcast(torch_rows(rank, dtype, 3), 1)
        assert root.dtype == dtype and bits_of(root) == bits_of(torch_rows(1, dtype, 3))
        mine = torch_rows(rank, dtype, 3)
        assert flt.broadcast_(mine, 0) is mine and bits_of(mine) == bits_of(torch_rows(0, dtype, 3))
        mixed = flt.alltoall(torch_rows(rank, dtype, 2))
        expected = [bits_of(torch_rows(r, dtype, 2)[rank : rank + 1])[0] for r in range(2)]
        assert bits_of(mixed) == expected
        assert flt.allgather(torch_rows(rank, dtype, 0)).shape == (0, 2)

    run_threads(2, body)


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


@pytest.mark.parametrize("dtype", ["complex64", "uint32"])
def test_what_cannot_be_reduced_is_refused_with_the_dtypes_that_can(dtype):
    def body(_rank):
        listed = "bool.*uint8.*int8.*int16.*int32.*int64.*float16.*bfloat16.*float32.*float64"
        for call in (fl.allreduce, fl.allreduce_, fl.reducescatter):
            with pytest.raises(TypeError, match=f"{dtype}.*{listed}"):
                call(np.ones(2, dtype))
        if hasattr(torch, dtype):
            for call in (flt.allreduce, flt.allreduce_, flt.reducescatter):
                with pytest.raises(ValueError, match=f"{dtype} is not supported.*{listed}"):
                    call(torch.ones(2).to(getattr(torch, dtype)))
        return fl.allreduce(np.ones(1)).item()

    assert run_threads(2, body) == [1, 1]


def test_what_cannot_be_moved_is_refused():
    def body(_rank):
        for values in (np.array(["a"]), np.array([None]), np.ones(1, ">f4"), np.ones(1, "M8[s]")):
            with pytest.raises(TypeError, match="dtype .* is not supported"):
                fl.broadcast(values, 0)

    run_threads(1, body)
