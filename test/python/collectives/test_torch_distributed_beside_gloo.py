"""What a backend of torch.distributed must not do otherwise than torch's own, and what its classes may be called."""

import re

import pytest
import torch

import distributed_job
from distributed_ranks import JOB, expect_same, run, run_script
from farandole.torch import _calls
from farandole.torch import distributed as backend

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed"),
]


@pytest.mark.parametrize("size", [2, 3])
def test_arguments_are_treated_as_gloo_treats_them_whatever_their_shapes(size):
    expect_same(distributed_job.ARGUMENTS, run(size, [JOB, "arguments"]), ("same", "close")[: size - 1])


#: Of torch's classes, of whatever version, that ours override.
OVERRIDES = {
    "Work": """
        exception get_future is_completed is_success result synchronize wait _source_rank
    """,
    "ProcessGroup": """
        abort all_gather_single all_gather_single_coalesced all_to_all_single allgather allgather_coalesced
        allgather_into_tensor_coalesced allreduce allreduce_coalesced alltoall alltoall_base barrier broadcast gather
        getBackendName getGroupDesc getGroupName group_desc group_name name recv recv_anysource reduce reduce_scatter
        reduce_scatter_single reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced scatter send
        setGroupDesc setGroupName set_timeout shutdown supports_splitting _allgather_base _device_types _get_backend
        _reduce_scatter_base _set_group_desc _set_group_name
    """,
}


def test_no_attribute_of_ours_can_be_one_of_a_later_torch():
    group = backend.ProcessGroup(torch.distributed.HashStore(), 0, 1)
    for one in (group, backend.Work(group.fl_job, [], [])):
        kind = type(one)
        names = {name for name in vars(kind).keys() | vars(one).keys() if not name.startswith("__")}
        ours = {name for name in names if name.startswith("fl_")}
        assert names - ours == set(OVERRIDES[kind.__name__].split())
        assert ours.isdisjoint(dir(kind.__mro__[1])) and ours >= vars(one).keys()
    group.shutdown()


def test_a_group_beside_other_backends_is_refused():
    for mixed in ("cpu:gloo,cuda:farandole", "cpu:farandole,cuda:gloo"):
        store = torch.distributed.HashStore()
        with pytest.raises(ValueError, match=f'backend "{mixed}" is not supported'):
            torch.distributed.init_process_group(mixed, store=store, rank=0, world_size=1)
        assert not torch.distributed.is_initialized()


def test_ddps_hooks_in_cpp_train_and_their_futures_have_results_and_errors():
    script = """
        dist.init_process_group("farandole")
        gradients = []
        for hook in (None, dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):
            torch.manual_seed(0)
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
            if hook is not None:
                model._register_builtin_comm_hook(hook)
            model(torch.arange(8.0).view(2, 4) * (R + 1)).sum().backward()
            gradients.append(model.module.weight.grad)
        assert torch.equal(gradients[0], gradients[1]) and torch.equal(gradients[0], gradients[2]), gradients
        half, group = torch.ones(2, dtype=torch.float16), dist.new_group([0, 1])
        doubled = dist.all_reduce(half, async_op=True).get_future().then(lambda future: future.value()[0] * 2)
        tell(f"half: {doubled.wait().tolist()}")
        future = (dist.all_reduce if R else dist.broadcast)(
            half, **({} if R else {"src": 0}), group=group, async_op=True
        ).get_future()
        try:
            future.wait()
        except RuntimeError as error:
            tell("error: " + str(error).replace("\\n", " "))
        dist.destroy_process_group()
    """
    for output in run_script(2, script):
        assert "half: [4.0, 4.0]" in output and "MismatchError: ranks wait for different" in output, output


def test_calls_of_any_number_of_kinds_take_bounded_memory_and_have_the_same_names_on_all_ranks():
    ranks, texts = [_calls.Calls(), _calls.Calls()], [f"allreduce of float32[{n % 3000}]" for n in range(9000)]
    for number, text in enumerate(texts):
        keys = text, (text, number)  # of a rank that has a factor of its own at each call
        first, second = (calls.add(key, None, text).name() for calls, key in zip(ranks, keys, strict=True))
        assert first == second
    assert all(len(calls._counts) <= 1024 >= len(calls._kinds) for calls in ranks)


def test_calls_that_differ_from_all_before_cost_less_than_a_number_and_dropped_works_keep_no_tensor():
    script = """
        import tracemalloc, weakref
        dist.init_process_group("farandole")
        whole = torch.ones(4000, dtype=torch.uint8)

        def measure(call, count):
            call(1)
            tracemalloc.start()
            for number in range(2, 2 + count):
                call(number)
            grown = sum(one.size_diff for one in tracemalloc.take_snapshot().compare_to(empty, "filename"))
            tracemalloc.stop()
            return grown // count

        tracemalloc.start()
        empty = tracemalloc.take_snapshot()
        tracemalloc.stop()
        tell(f"{measure(lambda number: dist.all_reduce(whole[:number]), 3000)} bytes for each shape")
        message = lambda number: (dist.recv if R else dist.send)(whole[:1], 1 - R, tag=number)
        tell(f"{measure(message, 3000)} bytes for each tag")
        sent = [torch.ones(1) for _ in range(20)]
        for one in sent:
            dist.isend(one, 1) if R == 0 else dist.recv(one, 0)
        dist.all_reduce(one)
        seen = [weakref.ref(one) for one in sent]
        del sent, one
        dist.barrier()
        tell(f"kept: {sum(one() is not None for one in seen)}")
        dist.destroy_process_group()
    """
    for output in run_script(2, script):
        shapes, tags = (int(number) for number in re.findall(r"(\d+) bytes for each", output))
        assert shapes < 1000 and tags < 500 and "kept: 0" in output, output
