"""Sums of sparse tensors, on ranks that are threads."""

import pytest
import torch

import farandole.torch as fl
from ranks import run_threads


def sparse(rank, dtype=torch.float64, sparse_dims=1):
    """Of shape [5, 4]: rank r has r elements in rows that others have too, some twice."""
    generator = torch.Generator().manual_seed(rank)
    indices = torch.randint(0, 4, (sparse_dims, 2 * rank), generator=generator)
    shape = (2 * rank,) if sparse_dims == 2 else (2 * rank, 4)
    values = torch.randint(-5, 6, shape, generator=generator).to(dtype)
    return torch.sparse_coo_tensor(indices, values, (5, 4), check_invariants=True)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("sparse_dims", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64], ids=str)
def test_the_sum_and_the_mean_are_those_of_dense_tensors(size, sparse_dims, dtype):
    def body(rank):
        mine = sparse(rank, dtype, sparse_dims)
        handles = [
            fl.sparse_allreduce_async(mine, name="sum", op=fl.Sum),
            fl.sparse_allreduce_async(mine, name="mean"),
        ]
        mean, total = [handle() for handle in handles[::-1]]
        for result, op in ((total, fl.Sum), (mean, fl.Average)):
            expected = fl.allreduce(mine.to_dense(), op=op)
            assert result.is_sparse and result.is_coalesced() and result.dtype == dtype
            assert torch.allclose(result.to_dense().double(), expected.double(), rtol=1e-3)
            assert result.sparse_dim() == sparse_dims

    run_threads(size, body)


def test_nobody_need_have_an_element():
    def body(rank):
        result = fl.sparse_allreduce_async(sparse(0))()
        assert result.shape == (5, 4) and result._nnz() == 0

    run_threads(2, body)


def test_other_shapes_are_a_mismatch_by_name():
    def body(rank):
        mine = torch.ones(3, 4 + rank).to_sparse()
        with pytest.raises(fl.MismatchError, match=r'sparse_allreduce_async "x": tensor "2".*rank 1 sent .*\[0,3,5\]'):
            fl.sparse_allreduce_async(mine, name="x")()
        return fl.sparse_allreduce_async(torch.ones(2).to_sparse(), name="x")().to_dense().tolist()

    assert run_threads(2, body) == [[1, 1]] * 2


def test_what_is_no_sparse_sum_is_refused_at_once():
    def body(rank):
        if rank == 0:
            with pytest.raises(TypeError, match="sparse_coo tensors, not torch.strided"):
                fl.sparse_allreduce_async(torch.ones(2), name="x")
            with pytest.raises(ValueError, match="op must be Average or Sum"):
                fl.sparse_allreduce_async(torch.ones(2).to_sparse(), name="x", op=fl.Max)

    run_threads(2, body)
