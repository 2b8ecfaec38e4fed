"""Several torch tensors in one allreduce, on ranks that are threads."""

import pytest
import torch

import farandole.torch as fl
from fake_gpu import needs_fake_gpu, pose
from ranks import run_threads


def later(start):
    """The asynchronous function as a blocking one."""
    return lambda *args, **kwargs: fl.synchronize(start(*args, **kwargs))


OUT_OF_PLACE = {
    "blocking": fl.grouped_allreduce,
    "async": later(fl.grouped_allreduce_async),
}
IN_PLACE = {
    "blocking": fl.grouped_allreduce_,
    "async": later(fl.grouped_allreduce_async_),
}


def tensors_of(rank):
    """Two dtypes, one of them strided, one of them empty."""
    square = torch.arange(6.0).reshape(2, 3) * (rank + 1)
    return [square.t(), torch.full((2,), rank + 1), torch.zeros(0, 3)]


@pytest.mark.parametrize("reduce", OUT_OF_PLACE.values(), ids=OUT_OF_PLACE)
@pytest.mark.parametrize("name", ["group", None])
def test_a_group_of_mixed_tensors_is_reduced_and_left_alone(reduce, name):
    def body(rank):
        mine = tensors_of(rank)
        floats, whole, nothing = reduce(mine, name=name, op=fl.Sum)
        assert torch.equal(floats, torch.arange(6.0).reshape(2, 3).t() * 3)
        assert whole.tolist() == [3, 3] and nothing.shape == (0, 3)
        for given, unchanged in zip(mine, tensors_of(rank), strict=True):
            assert torch.equal(given, unchanged)

    run_threads(2, body)


@pytest.mark.parametrize("reduce", IN_PLACE.values(), ids=IN_PLACE)
def test_a_group_is_reduced_in_place_whatever_its_strides(reduce):
    def body(rank):
        mine = tensors_of(rank)
        versions = [tensor._version for tensor in mine]
        results = reduce(mine, name="group", op=fl.Sum)
        assert all(a is b for a, b in zip(results, mine, strict=True))
        assert torch.equal(mine[0], torch.arange(6.0).reshape(2, 3).t() * 3)
        assert mine[1].tolist() == [3, 3]
        assert all(t._version > v for t, v in zip(mine[:2], versions[:2], strict=True))

    run_threads(2, body)


def test_the_default_is_the_average_and_arguments_are_horovods():
    def body(rank):
        (mean,) = fl.grouped_allreduce([torch.full((2,), 2.0 * rank)])
        (total,) = fl.grouped_allreduce([torch.full((2,), 2.0 * rank)], False, "name")
        third = torch.full((2,), 1 / 3)
        (half,) = fl.grouped_allreduce([third], compression=fl.Compression.fp16, op=fl.Max)
        scaled = fl.grouped_allreduce(
            [torch.tensor([1, 2, 3])], op=fl.Sum, prescale_factor=0.5, postscale_factor=4.0
        )
        return mean.tolist(), total.tolist(), half[0].item() != third[0].item(), scaled[0].tolist()

    with pytest.warns(DeprecationWarning):
        assert run_threads(1, body) == [([0, 0], [0, 0], False, [0, 4, 4])]
        assert run_threads(2, body) == [([1, 1], [2, 2], True, [0, 8, 8])] * 2


def test_the_tensor_that_differs_is_named_and_an_empty_list_refused():
    def body(rank):
        with pytest.raises(fl.MismatchError, match=r'allreduce "pair": tensor "1".*rank 1 sent'):
            fl.grouped_allreduce([torch.ones(2), torch.ones(2 + rank)], name="pair")
        if rank == 0:
            with pytest.raises(ValueError, match="allreduce: there must be at least one tensor"):
                fl.grouped_allreduce([])
        return fl.grouped_allreduce([torch.ones(2)], name="pair")[0].tolist()

    assert run_threads(2, body) == [[1, 1]] * 2


@needs_fake_gpu
@pytest.mark.parametrize("shared", [False, True], ids=["own GPUs", "one GPU"])
def test_what_late_producers_on_a_gpu_write_is_in_the_sums(shared):
    def body(rank):
        gpu = gpus.mine

        def late(value):
            tensor = torch.zeros(3)
            gpu.write(tensor, torch.full((3,), value))
            return tensor

        new = fl.grouped_allreduce([late(rank + 1.0), late(5.0)], op=fl.Sum, name="new")
        in_place = [late(rank + 10.0), late(1.0)]
        fl.grouped_allreduce_(in_place, op=fl.Sum, name="in place")
        return [gpu.read(tensor)[0].item() for tensor in (*new, *in_place)]

    for gpus in pose(shared):
        assert run_threads(2, body) == [[3, 10, 21, 2]] * 2
