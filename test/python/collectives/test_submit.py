"""Context.submit and Work.wait, which are called for each tensor, and what they leave behind."""

import ctypes
import gc
import sys
import tracemalloc
import weakref

import numpy as np
import pytest
import torch

import farandole.torch as fl
from farandole import _core, basics, ops
from ranks import on_threads, run_threads

PLAIN = ops.options(ops.ALLREDUCE)


@pytest.mark.parametrize("op", [-1, 77, 2**70, -(2**70)])
@on_threads(1)
def test_what_is_no_op_is_named(_rank, op):
    with pytest.raises(ValueError, match="op must be"):
        fl.allreduce_async_(torch.ones(1), op=op)


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
@on_threads(1)
def test_what_is_no_call_is_a_type_error(_rank, by_position, by_name):
    with pytest.raises((TypeError, RuntimeError)):
        basics.current().core.submit(*by_position, **by_name)


@on_threads(1)
def test_arguments_by_name_are_those_by_position(_rank):
    submit = basics.current().core.submit
    tensor = torch.ones(2)
    assert submit(PLAIN, tensor, name="x", how=ops.IN_PLACE | ops.BLOCKS) is tensor
    assert submit(PLAIN, tensor, "x", ops.BLOCKS, finish=lambda made: made + 1).tolist() == [2, 2]
    assert submit(name="x", tensors=tensor, options=PLAIN).wait().tolist() == [1, 1]


def test_objects_that_were_not_made_are_refused():
    for call in (lambda made: made.submit(PLAIN, torch.ones(1), "x"), lambda made: made.is_open):
        with pytest.raises(TypeError):
            call(_core.Context.__new__(_core.Context))
    for call in (_core.Work.wait, _core.Work.poll):
        with pytest.raises(TypeError):
            call(_core.Work.__new__(_core.Work))
        with pytest.raises(TypeError):
            call(object())


@on_threads(1)
def test_autograd_sees_each_write_in_place_once(_rank):
    tensor, parameter = torch.ones(2), torch.nn.Parameter(torch.ones(2))
    for count in range(1, 3):
        fl.allreduce_(tensor, name="x")
        assert tensor._version == count
    fl.synchronize(fl.grouped_allreduce_async_([tensor, parameter], name="y"))
    assert (tensor._version, parameter._version) == (3, 1)
    fl.allreduce(tensor, name="x")
    assert tensor._version == 3


@on_threads(1)
def test_what_was_copied_is_written_and_inference_tensors_have_no_version(_rank):
    rows = torch.ones(2, 3)
    column = rows[:, 0]
    fl.allreduce_(column, name="x", op=fl.Sum, postscale_factor=2.0)
    assert rows.tolist() == [[2, 1, 1]] * 2 and rows._version == 1
    with torch.inference_mode():
        inferred = torch.ones(2)
    fl.synchronize(fl.grouped_allreduce_async_([inferred, column.clone()], name="y"))
    assert inferred.tolist() == [1, 1]


@on_threads(1)
def test_calls_keep_no_reference(_rank):
    submit = basics.current().core.submit
    kept = [ops.options(ops.ALLREDUCE, 0, 3.0), torch.ones(2), "name of its own", lambda made: made]
    options, tensor, name, finish = kept
    submit(options, tensor, name).wait()  # the name is kept with what was prepared for it
    before = [sys.getrefcount(one) for one in kept]
    for _ in range(10):
        submit(options, tensor, name, ops.IN_PLACE, finish).wait()
        submit(options, tensors=tensor, name=name, finish=finish).wait()
        for wrong in ({"tensors": tensor}, {"how": finish}, {"of no argument": None}):
            with pytest.raises((TypeError, RuntimeError)):
                submit(options, tensor, name, **wrong)
    basics.current().core.release_completed()
    assert [sys.getrefcount(one) for one in kept] == before


class HeapInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
                     "keepcost")
    ]  # fmt: skip


def heap_bytes():
    """In use of C's heap; 0 where the C library does not tell."""
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return 0
    ask.restype = HeapInfo
    return ask().uordblks


@on_threads(1)
def test_a_start_allocates_its_handle_only(_rank):
    count = 1000
    tensors = [torch.ones(64) for _ in range(10)]
    names = [f"tensor {i}" for i in range(count)]
    handles = [None] * count

    def start():
        for i, name in enumerate(names):
            handles[i] = fl.allreduce_async_(tensors[i % 10], name=name, op=fl.Sum)

    def finish():
        for handle in handles:
            fl.synchronize(handle)

    for _ in range(3):
        start()
        finish()
    handles[:] = [None] * count
    before, heap_before = sys.getallocatedblocks(), heap_bytes()
    start()
    assert sys.getallocatedblocks() - before < 1.1 * count
    assert heap_bytes() - heap_before < 200 * count  # 48 each, the library's handle; 620 if works were not pooled
    finish()
    handles[:] = [None] * count
    assert sys.getallocatedblocks() - before < 0.1 * count

    tracemalloc.start()
    try:
        start()
        finish()
        tracemalloc.reset_peak()
        held, _ = tracemalloc.get_traced_memory()
        handles[0] = fl.allreduce_async_(tensors[0], name=names[0], op=fl.Sum)
        fl.synchronize(handles[0])
        assert tracemalloc.get_traced_memory()[1] - held < 400  # at any time, the handle and a tuple
    finally:
        tracemalloc.stop()


@on_threads(1)
def test_a_handle_stays_that_of_its_operation(_rank):
    tensors = [torch.full((2,), float(i)) for i in range(50)]
    spent = [fl.allreduce_async(tensor, name=f"old {i}", op=fl.Sum) for i, tensor in enumerate(tensors)]
    results = [fl.synchronize(handle) for handle in spent]
    dropped = weakref.ref(fl.allreduce_async_(torch.ones(2), name="dropped"))
    assert dropped() is None
    new = [fl.allreduce_async(tensor + 100, name=f"new {i}", op=fl.Sum) for i, tensor in enumerate(tensors)]
    assert not set(map(id, spent)) & set(map(id, new))
    for i, handle in enumerate(spent):
        for call in (fl.poll, fl.synchronize):
            with pytest.raises(ValueError, match=f'Handle of allreduce "old {i}" was not created or has been'):
                call(handle)
    assert [fl.synchronize(handle)[0].item() for handle in new] == [i + 100 for i in range(50)]
    assert [result[0].item() for result in results] == list(range(50))
    assert dropped() is None


class Odd(str):
    """A name that claims to equal all others."""

    def __eq__(self, other):
        return True

    __hash__ = str.__hash__


@on_threads(1)
def test_operations_are_found_by_the_text_of_their_names(_rank):
    both = ("".join(["a ", "name"]), "".join(["a", " name"]), Odd("a name"))  # three objects
    results = [fl.synchronize(fl.allreduce_async_(torch.ones(i + 1), name=name)) for i, name in enumerate(both)]
    assert [len(result) for result in results] == [1, 2, 3]
    for wrong in (7, b"name", "a\0b", "\udc80"):
        for call in (fl.allreduce_async_, fl.allreduce_async, fl.allreduce_):
            with pytest.raises((TypeError, ValueError), match="name"):
                call(torch.ones(1), name=wrong)


@pytest.mark.parametrize("call", [fl.allreduce_async_, fl.allreduce_async, fl.allreduce_])
def test_plain_calls_and_others_give_the_same(call):
    def body():
        def run(tensor, **how):
            result = call(tensor, **how)
            return result if isinstance(result, torch.Tensor) else fl.synchronize(result)

        for number, how in enumerate(
            [{}, {"op": fl.Sum}, {"op": fl.Max}, {"prescale_factor": 1}, {"process_set": None}, {"op": True}]
        ):
            for kind in (torch.ones, lambda n: torch.nn.Parameter(torch.ones(n))):
                assert run(kind(3), name=f"x {number}", **how).tolist() == [1, 1, 1]
        assert run(torch.ones(3), name="y", postscale_factor=2.0).tolist() == [2, 2, 2]
        for wrong, error in (({"op": 99}, ValueError), ({"op": "sum"}, ValueError), ({"average": 1}, TypeError)):
            with pytest.raises(error):
                call(torch.ones(3), name="z", **wrong)
        for given in ([1.0], None, torch.ones(3).to_sparse()):
            with pytest.raises(TypeError, match="expected a "):
                call(given, name="z")

    run_threads(1, lambda _rank: body())
    with pytest.raises(fl.HorovodInternalError, match="init"):
        call(torch.ones(3), name="x")


@on_threads(1)
def test_works_give_the_garbage_collector_nothing_to_do(_rank):
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


@pytest.mark.parametrize(("tensors", "expected"), [(1, 2), (2, 4)])
@on_threads(2)
def test_the_core_takes_a_split_per_tensor_and_rank(_rank, tensors, expected):
    submit = basics.current().core.submit
    arrays = [np.ones(8, int)] * tensors
    with pytest.raises(ValueError, match=f"splits: expected {expected} numbers, got 3"):
        submit(ops.options(ops.ALLTOALL), arrays, "x", ops.GROUP, splits=(1, 1, 1))
    with pytest.raises(ValueError, match="allgather takes no farandole_params.splits"):
        submit(ops.options(ops.ALLGATHER), arrays, "x", ops.GROUP, splits=(1, 1) * tensors)


@on_threads(2)
def test_numbers_of_rows_that_were_not_expected_are_an_error_though_they_fit_in_all(rank):
    core, out = basics.current().core, np.zeros((8, 2), np.float32)
    how, mine = ops.gather_options(fl.global_process_set), np.full((3 + 2 * rank, 2), rank + 1, np.float32)
    core.submit(how, mine, "right", ops.BLOCKS, out=out, rows=[3, 5])
    np.testing.assert_array_equal(out[:, 0], [1] * 3 + [2] * 5)
    with pytest.raises(fl.MismatchError, match=r"expects rows \[4,4\] from the ranks; \[3,5\] came"):
        core.submit(how, mine, "wrong", ops.BLOCKS, out=np.zeros((8, 2), np.float32), rows=[4, 4])
    with pytest.raises(ValueError, match="rows has 1 numbers; expected 2"):
        core.submit(how, mine, "wrong", ops.BLOCKS, out=out, rows=[8])


@on_threads(2)
def test_reductions_and_groups_take_out_as_well(rank):
    core = basics.current().core
    for kind, expected in ((ops.ALLREDUCE, 3.0), (ops.BROADCAST, 2.0)):
        options = _core.Options(kind, root=1 if kind == ops.BROADCAST else -1)
        places = [np.zeros(3), np.zeros(2)]
        given = [np.full(3, rank + 1.0), np.full(2, rank + 1.0)]
        results = core.submit(options, given, f"group {kind}", ops.GROUP | ops.BLOCKS, out=places)
        assert all(result is place for result, place in zip(results, places, strict=True))
        assert [place.tolist() for place in places] == [[expected] * 3, [expected] * 2]
        with pytest.raises(ValueError, match="1 arrays as out for 2 tensors"):
            core.submit(options, given, "group", ops.GROUP | ops.BLOCKS, out=places[:1])
