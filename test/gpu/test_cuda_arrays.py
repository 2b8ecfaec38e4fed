"""Arrays on a real GPU without torch's frontend: CuPy's, Numba's, and whatever speaks DLPack."""

import pytest

import farandole
from ranks import run_threads


def test_cupy_arrays_in_and_out_of_place():
    cupy = pytest.importorskip("cupy")

    def body(rank):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            array = cupy.full((1000,), rank + 1.0, dtype=cupy.float32)
            new = farandole.allreduce(array, op=farandole.Sum)
            part = farandole.reducescatter(array, op=farandole.Sum)
            assert part.shape == (500,) and float(part.sum()) == 1500
            farandole.broadcast_(array, 1)
            total = float((new * 2).sum()), float(array.sum())
            stream.synchronize()
        assert isinstance(new, cupy.ndarray)
        return total

    assert run_threads(2, body) == [(6000.0, 2000.0)] * 2


def test_numba_arrays_in_place():
    cuda = pytest.importorskip("numba.cuda")
    if not cuda.is_available():
        pytest.skip("Numba sees no CUDA device")
    import numpy as np

    def body(rank):
        array = cuda.to_device(np.full(10, rank + 1.0))
        farandole.allreduce_(array, op=farandole.Sum)
        return array.copy_to_host().tolist()

    assert run_threads(2, body) == [[3.0] * 10] * 2


class ByDlpackAlone:
    """A torch tensor that shows nothing else."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.shape = tuple(tensor.shape)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, stream=None, max_version=None):
        capsule = self.tensor.__dlpack__(stream=stream, max_version=max_version)
        return capsule


def test_torch_tensors_through_the_face_without_torch():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")

    def body(rank):
        tensor = torch.full((10,), rank + 1.0, device="cuda")
        new = farandole.allreduce(tensor, op=farandole.Sum)
        try:
            farandole.allreduce_(ByDlpackAlone(tensor), op=farandole.Sum, name="dlpack")
        except TypeError as refused:  # this torch exports DLPack 0, which does not tell
            assert "may be changed in place" in str(refused)
            farandole.allreduce_(tensor, op=farandole.Sum, name="dlpack")
        return new.tolist(), tensor.tolist()

    assert run_threads(2, body) == [([3.0] * 10, [3.0] * 10)] * 2
