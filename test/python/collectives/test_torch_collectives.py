"""Collectives on torch tensors, on ranks that are threads."""

import contextlib
import warnings

import pytest
import torch

import farandole
import farandole.torch as fl
from farandole import _core
from farandole.torch.optimizer import _codecs
from ranks import run_threads


def test_ranks_may_hold_the_same_tensor_in_different_layouts():
    def body(rank):
        values = torch.arange(120.0).reshape(2, 3, 4, 5) + rank
        layouts = [
            values,
            values.contiguous(memory_format=torch.channels_last),
            values.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
        ]
        mine = layouts[rank]
        expected = 3 * torch.arange(120.0).reshape(2, 3, 4, 5) + 3
        assert torch.equal(fl.allreduce(mine, op=fl.Sum), expected)
        assert fl.allreduce_(mine, op=fl.Sum) is mine
        assert torch.equal(mine, expected)
        rows = torch.zeros(4, 3)
        fl.broadcast_(rows[:, 1].fill_(rank), 2)
        assert rows.sum(0).tolist() == [0, 8, 0]

    run_threads(3, body)


@pytest.mark.parametrize("of_a_pair", [False, True])
def test_factors_given_as_tensors_are_read_at_the_call(of_a_pair):
    def body(rank):
        group = fl.add_process_set([0, 1]) if of_a_pair else fl.global_process_set
        if of_a_pair and rank == 2:
            return
        factor, one = torch.tensor(2.0), torch.ones(1)
        for expected in (2, 4, 8):
            for factors in ({"prescale_factor": factor}, {"postscale_factor": factor}):
                assert fl.allreduce(one, process_set=group, **factors).item() == expected
                assert farandole.allreduce(one, process_set=group, **factors).item() == expected
                mine = fl.reducescatter(torch.ones(3), process_set=group, **factors)
                assert set(mine.tolist()) == {expected}
            factor.mul_(2)

    run_threads(3, body)


class Sharded(torch.Tensor):
    """As DTensor: it says a shape, and its elements are in another tensor."""

    @staticmethod
    def __new__(cls, local):
        shape = (2 * len(local), *local.shape[1:])
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(f"{function} of a Sharded")


@pytest.mark.parametrize("call", [
    lambda x: fl.allreduce(x),
    lambda x: fl.allreduce_(x),
    lambda x: fl.grouped_allreduce([torch.ones(2), x]),
    lambda x: fl.allgather(x),
    lambda x: fl.broadcast_(x, 1),
    lambda x: fl.reducescatter(x),
    lambda x: farandole.allreduce(x),
])  # fmt: skip
def test_a_tensor_without_memory_of_its_own_is_refused_by_its_type(call):
    def body(rank):
        with pytest.raises(TypeError, match=r"Sharded of shape \[4, 3\] has no memory of its own"):
            call(Sharded(torch.ones(2, 3)))
        assert fl.allreduce(torch.ones(1)).item() == 1.0

    run_threads(2, body)


def test_in_place_results_are_seen_by_autograd():
    def body(rank):
        x = torch.ones(3, requires_grad=True)
        y = x * 2
        loss = (y * y).sum()
        before = y._version
        with torch.no_grad():
            fl.allreduce_(y)
        assert y._version > before
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        weight = torch.nn.Parameter(torch.full((2,), float(rank)))
        assert fl.broadcast_(weight, 1) is weight and weight.tolist() == [1, 1]

    run_threads(2, body)


def test_results_of_inputs_that_require_a_gradient_are_differentiable():
    def body(rank):
        loss = (torch.ones(2, requires_grad=True) * rank).sum()
        mean = fl.allreduce(loss, name="barrier")
        assert mean.item() == 1.0 and mean.requires_grad and mean.shape == ()
        assert not fl.synchronize(fl.allreduce_async(loss)).requires_grad
        assert loss.item() == 2.0 * rank

    run_threads(2, body)


def test_asynchronous_handles_give_tensors():
    def body(rank):
        first = torch.full((3,), float(rank))
        second = first.clone()
        handles = [
            fl.allreduce_async(first, name="a", op=fl.Sum),
            fl.allreduce_async_(second, name="b"),
            fl.broadcast_async(first, 1, name="c"),
        ]
        a, b, c = [fl.synchronize(handle) for handle in handles]
        assert a.tolist() == [1.0] * 3 and b is second and c.tolist() == [1.0] * 3
        assert second.tolist() == [0.5] * 3 and first.tolist() == [float(rank)] * 3

    run_threads(2, body)


def test_average_is_deprecated_and_excludes_op():
    def body(rank):
        with pytest.raises(ValueError, match="supersedes"):
            fl.allreduce(torch.ones(1), average=True, op=fl.Sum)

    run_threads(2, body)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = run_threads(2, lambda rank: fl.allreduce(torch.ones(1), average=False).item())
    assert results == [2.0, 2.0]
    assert {w.category for w in caught} == {DeprecationWarning}
    assert {w.filename for w in caught} == {__file__}


def test_compression_rounds_to_the_wire_and_leaves_other_dtypes_alone():
    value = 1 + 2**-9

    def body(rank):
        mine = torch.full((3,), value)
        assert fl.allreduce(mine, compression=fl.Compression.fp16).tolist() == [value] * 3
        assert fl.allreduce(mine, compression=fl.Compression.bf16).tolist() == [1.0] * 3
        large = torch.tensor([2**40 + 1])
        assert fl.allreduce(large, compression=fl.Compression.fp16).item() == 2**40 + 1

    run_threads(2, body)


def test_one_rank_is_exact_with_any_compression():
    def body(rank):
        mine = torch.tensor([1e30, 1 + 2**-20])
        assert torch.equal(fl.allreduce(mine, compression=fl.Compression.fp16), mine)

    run_threads(1, body)


def test_broadcast_parameters_takes_state_dicts_pairs_and_lists():
    def body(rank):
        model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3))
        model.to(memory_format=torch.channels_last)
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.fill_(rank + 1)
        fl.broadcast_parameters(model.state_dict(), root_rank=1)
        assert {float(v) for t in model.state_dict().values() for v in t.flatten()} == {2.0}
        with torch.no_grad():
            model[0].weight.fill_(rank)
        fl.broadcast_parameters(model.named_parameters(), 0)
        assert model[0].weight.unique().tolist() == [0.0]
        tensors = [torch.full((2,), rank), torch.tensor(rank), torch.empty(0)]
        fl.broadcast_parameters(tensors, 1)
        assert tensors[0].tolist() == [1, 1] and tensors[1].item() == 1

    run_threads(2, body)


def test_an_expanded_tensor_gets_a_result_that_fits_in_its_memory():
    def body(rank):
        small = torch.full((1, 2), float(rank))
        fl.broadcast_parameters({"weight": torch.ones(2), "expanded": small.expand(3, 2)}, 1)
        assert small.tolist() == [[1, 1]]
        mine = torch.full((1,), float(rank)).expand(2)
        assert fl.allreduce_(mine, op=fl.Sum) is mine and mine.tolist() == [1, 1]
        other = torch.tensor([1.0, 2.0]) if rank == 0 else torch.zeros(1).expand(2)
        if rank == 0:
            return fl.broadcast_(other, 0).tolist()
        with pytest.raises(ValueError, match=r"shape \[2\] and strides \[0\].*share memory"):
            fl.broadcast_(other, 0)
        return other.tolist()

    assert run_threads(2, body) == [[1, 2], [0, 0]]


def test_no_dtype_of_torch_arrives_as_another():
    def body(rank):
        moved = set()
        for name, dtype in vars(torch).items():
            if not isinstance(dtype, torch.dtype):
                continue
            with contextlib.suppress(RuntimeError, NotImplementedError):  # of torch: there is no such tensor
                mine = torch.zeros(16, dtype=torch.uint8).view(dtype)
                try:
                    assert fl.broadcast(mine, 0).dtype is dtype
                    moved.add(str(dtype).removeprefix("torch."))
                except ValueError as error:
                    assert f"{dtype} is not supported" in str(error), name
        return moved

    assert run_threads(2, body)[0] == set(_core.dtypes)


def test_broadcast_parameters_refuses_what_is_not_a_model():
    def body(rank):
        for params in (torch.ones(2), 17, ["name"], [("a", "b")]):
            with pytest.raises(ValueError, match="params"):
                fl.broadcast_parameters(params, 0)

    run_threads(1, body)


@pytest.mark.parametrize(
    "other", [{"w": torch.ones(3)}, {"v": torch.ones(2)}, {"w": torch.ones(2).double()}]
)
def test_different_models_are_a_mismatch_that_names_the_tensor(other):
    def body(rank):
        params = {"w": torch.ones(2)} if rank == 0 else other
        with pytest.raises(fl.MismatchError) as raised:
            fl.broadcast_parameters(params, 0)
        fl.broadcast_parameters({"w": torch.ones(2)}, 0)
        return str(raised.value)

    first, second = run_threads(2, body)
    assert first == second and "w" in first


def test_torchs_stream_0_is_the_default_one_and_never_one_of_its_pool(monkeypatch):
    made = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(
        torch.cuda, "stream", lambda stream: contextlib.nullcontext(made.append(stream))
    )
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: ("default", device))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: (handle, device))
    for stream in ((1, 0), (1, 7)):
        with _codecs.CudaContext(1).using(stream):
            pass
    assert made == [("default", 1), (7, 1)]
