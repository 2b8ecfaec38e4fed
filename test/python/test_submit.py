"""Context.submit and Work.wait, which are called for each tensor, and what they leave behind."""

import gc
import sys

import pytest
import torch

import farandole.torch as fl
from farandole import _core, basics, ops
from ranks import run_threads

PLAIN = ops.options(ops.ALLREDUCE)


def alone(body):
    run_threads(1, lambda _rank: body())


@pytest.mark.parametrize(
    "by_position, by_name",
    [
        ((PLAIN,), {}),
        ((PLAIN, torch.ones(1)), {"nam": "x"}),
        ((PLAIN, torch.ones(1), "x"), {"name": "x"}),
        ((PLAIN, torch.ones(1), "x", 0, None, None, None, None, None, None, None), {}),
        ((PLAIN, torch.ones(1), "x", "in place"), {}),
        (("allreduce", torch.ones(1), "x"), {}),
    ],
)
def test_what_is_no_call_is_a_type_error(by_position, by_name):
    def body():
        with pytest.raises((TypeError, RuntimeError)):
            basics.current().core.submit(*by_position, **by_name)

    alone(body)


def test_arguments_by_name_are_those_by_position():
    def body():
        submit = basics.current().core.submit
        tensor = torch.ones(2)
        assert submit(PLAIN, tensor, name="x", how=ops.IN_PLACE | ops.BLOCKS) is tensor
        assert submit(PLAIN, tensor, "x", ops.BLOCKS, finish=lambda made: made + 1).tolist() == [2, 2]
        assert submit(name="x", tensors=tensor, options=PLAIN).wait().tolist() == [1, 1]

    alone(body)


def test_objects_that_were_not_made_are_refused():
    for call in (lambda made: made.submit(PLAIN, torch.ones(1), "x"), lambda made: made.is_open):
        with pytest.raises(TypeError):
            call(_core.Context.__new__(_core.Context))
    for call in (_core.Work.wait, _core.Work.poll):
        with pytest.raises(TypeError):
            call(_core.Work.__new__(_core.Work))
        with pytest.raises(TypeError):
            call(object())


def test_autograd_sees_each_write_in_place_once():
    def body():
        tensor, parameter = torch.ones(2), torch.nn.Parameter(torch.ones(2))
        for count in range(1, 3):
            fl.allreduce_(tensor, name="x")
            assert tensor._version == count
        fl.synchronize(fl.grouped_allreduce_async_([tensor, parameter], name="y"))
        assert (tensor._version, parameter._version) == (3, 1)
        fl.allreduce(tensor, name="x")
        assert tensor._version == 3

    alone(body)


def test_what_was_copied_is_written_and_inference_tensors_have_no_version():
    def body():
        rows = torch.ones(2, 3)
        column = rows[:, 0]
        fl.allreduce_(column, name="x", op=fl.Sum, postscale_factor=2.0)
        assert rows.tolist() == [[2, 1, 1]] * 2 and rows._version == 1
        with torch.inference_mode():
            inferred = torch.ones(2)
        fl.synchronize(fl.grouped_allreduce_async_([inferred, column.clone()], name="y"))
        assert inferred.tolist() == [1, 1]

    alone(body)


def test_calls_keep_no_reference():
    def body():
        submit = basics.current().core.submit
        kept = [ops.options(ops.ALLREDUCE, 0, 3.0), torch.ones(2), "name of its own", lambda made: made]
        options, tensor, name, finish = kept
        before = [sys.getrefcount(one) for one in kept]
        for _ in range(10):
            submit(options, tensor, name, ops.IN_PLACE, finish).wait()
            submit(options, tensors=tensor, name=name, finish=finish).wait()
            for wrong in ({"tensors": tensor}, {"how": finish}, {"of no argument": None}):
                with pytest.raises((TypeError, RuntimeError)):
                    submit(options, tensor, name, **wrong)
        basics.current().core.release_completed()
        assert [sys.getrefcount(one) for one in kept] == before

    alone(body)


def test_works_give_the_garbage_collector_nothing_to_do():
    def body():
        tensors = [torch.ones(64) for _ in range(200)]
        names = [f"tensor {i}" for i in range(200)]
        for _ in range(3):
            handles = [fl.allreduce_async_(tensor, name=name) for tensor, name in zip(tensors, names, strict=True)]
            gc.collect()
            before = len(gc.get_objects())
            more = [fl.allreduce_async_(tensor, name=name + "'") for tensor, name in zip(tensors, names, strict=True)]
            assert len(gc.get_objects()) - before < 100
            for handle in handles + more:
                fl.synchronize(handle)

    alone(body)
