"""Ranks that wrap different optimizers, or in another order, are told so in the first step."""

import contextvars
import threading

import pytest
import torch

import farandole.torch as fl
from jobs import on_several
from models import parameter
from ranks import run_threads

HINT = "every rank must wrap the same optimizers, with the same parameters, in the same order"


def train_once(optimizer, p):
    """A step; the text of the mismatch that ended it, or ""."""
    try:
        (p * 1).sum().backward()
        optimizer.step()
    except fl.MismatchError as error:
        return str(error)
    return ""


def sgd(job, p, name):
    return job.wrap(torch.optim.SGD([p], lr=1.0), [(name, p)])


def other_order(job, rank):
    weights = {"generator": parameter(1.0), "critic": parameter(1.0)}
    names = list(weights) if rank != 1 else list(reversed(weights))
    optimizers = {name: sgd(job, weights[name], name) for name in names}
    return [train_once(optimizers[name], weights[name]) for name in [*weights] * 2]


def extra_before(job, rank):
    p, extra = parameter(1.0), [sgd(job, parameter(1.0, 2.0), "extra")] if rank == 0 else []
    return [train_once(sgd(job, p, "p"), p), extra][:1]


def extra_after(job, rank):
    optimizer = sgd(job, p := parameter(1.0), "p")
    extra = [sgd(job, parameter(1.0, 2.0), "extra")] if rank == 0 else []
    return [train_once(optimizer, p), extra][:1]


def fewer_parameters(job, rank):
    weights = [parameter(1.0) for _ in range(3 - (rank == 1))]
    return [train_once(job.sgd(*weights), torch.stack(weights))]


DIFFERENCES = {
    other_order: ["wrapped optimizer 1:", 'rank 1 sent tensor "critic float32 [1]"', 'generator float32 [1]"'],
    extra_before: ["rank 0 sent", '"extra float32 [2]"', '"p float32 [1]"'],
    extra_after: ["rank 0 sent", "number of wrapped optimizers", "[0,2]", "[0,1]"],
    fewer_parameters: ["wrapped optimizer 1:", '"3 parameters"', '"2 parameters"'],
}


@on_several
@pytest.mark.parametrize("differ", DIFFERENCES)
def test_ranks_that_wrap_other_optimizers_or_in_another_order_are_a_mismatch_by_name(job, differ):
    for texts in job.run(lambda rank: differ(job, rank)):
        for text in texts:
            assert all(part in text for part in [HINT, *DIFFERENCES[differ]]), text


@on_several
def test_ranks_that_agree_may_wrap_at_different_times_and_never_step(job):
    """Wrapping waits for nobody."""

    def body(rank):
        if rank == 0:
            fl.barrier()
        p = parameter(0.0)
        optimizer, unused = job.sgd(p), job.sgd(parameter(1.0, 2.0))
        if rank != 0:
            fl.barrier()
        assert train_once(optimizer, p) == ""
        del unused
        return p.item()

    assert job.run(body) == [-1.0] * job.size


@pytest.mark.parametrize("case", ["complex64 Adasum", "float8_e4m3fn Average"])
def test_a_dtype_that_cannot_be_reduced_is_refused_at_the_wrap_by_name(case):
    dtype, op = (getattr(where, name) for where, name in zip((torch, fl), case.split(), strict=True))

    def body(rank):
        good = parameter(1.0)
        bad = torch.nn.Parameter(torch.zeros(2).to(dtype))
        named = [("good", good), ("layer.bad", bad)]
        text = rf'"layer.bad" is of dtype {dtype}, which cannot be reduced'
        with pytest.raises(ValueError, match=text):
            fl.DistributedOptimizer(torch.optim.SGD([good, bad], lr=1.0), named, op=op)
        bad.requires_grad_(False)  # frozen, it is left alone
        optimizer = fl.DistributedOptimizer(torch.optim.SGD([good, bad], lr=1.0), named)  # noqa: F841 (is in use)
        (good * rank).sum().backward()
        return good.grad.item()

    assert run_threads(2, body) == [0.5, 0.5]


def test_a_parameter_without_memory_of_ours_is_refused_at_the_wrap_by_name():
    class Sharded(torch.Tensor):
        """As DTensor, whose elements are in another tensor."""

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            if function is torch.ops.aten.detach.default:
                return args[0]
            raise NotImplementedError(f"{function} of a Sharded")

    def body(rank):
        elsewhere = torch.nn.Parameter(torch.zeros(2, device="meta"))
        sharded = torch.nn.Parameter(torch.Tensor._make_wrapper_subclass(Sharded, (2,)))
        for bad, text in ((elsewhere, '"meta"'), (sharded, "has no memory of its own")):
            named = [("good", parameter(1.0)), ("layer.bad", bad)]
            with pytest.raises(ValueError, match=f'"layer.bad".*{text}'):
                fl.DistributedOptimizer(torch.optim.SGD([p for _, p in named], lr=1.0), named)

    run_threads(2, body)


def test_threads_with_an_optimizer_each_begin_at_once():
    """Each first round asks for the checks of all optimizers wrapped before, from its own thread."""

    def body(rank):
        weights = [parameter(1.0) for _ in range(3)]
        optimizers = [
            fl.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [(f"p{i}", p)])
            for i, p in enumerate(weights)
        ]
        errors = []

        def train(optimizer, p):
            try:
                for _ in range(3):
                    optimizer.zero_grad()
                    (p * (rank + 1)).sum().backward()
                    optimizer.step()
            except Exception as error:
                errors.append(error)

        context = contextvars.copy_context()
        threads = [
            threading.Thread(target=context.copy().run, args=(train, o, p))
            for o, p in zip(optimizers, weights, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors
        return [p.item() for p in weights]

    for _ in range(5):
        assert run_threads(2, body) == [[1 - 3 * 1.5] * 3] * 2
