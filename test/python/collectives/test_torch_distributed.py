"""The backend of torch.distributed, between processes."""

import datetime
import functools
import importlib.util
import os
import queue
import re
import signal
import subprocess
import sys
import textwrap
import types

import pytest
import torch

import distributed_checks
import distributed_job
from distributed_ranks import JOB, PRELUDE, expect_same, run, run_script
from farandole import _torch_trace
from farandole.__main__ import main
from farandole.torch import _calls
from farandole.torch import distributed as backend
from farandole.torch.distributed import _job
from farandole.torch.distributed._work import _AtEnd
from farandole.torch.optimizer._steps import MARK
from ranks import GUARD_S, environment, mpirun

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")


@pytest.mark.parametrize(
    ("size", "work", "results"),
    [(2, "collectives arguments frameworks", ["same"]), (3, "arguments frameworks", ["same", "close"]),
     (4, "collectives", ["same"])],
)  # fmt: skip
def test_all_work_gives_what_gloo_gives(size, work, results):
    """Bitwise; on three ranks floating-point sums are added in another order."""
    expect_same(distributed_job.work_of(work.split()), run(size, [JOB, *work.split()]), results)


def test_three_ranks_sum_in_their_order_and_round_16_bit_floats_once():
    """gloo adds in an order that depends on the place in the tensor, and rounds after each addition."""
    outputs = run_script(3, """
        dist.init_process_group("farandole")
        for count, dtype in [(n, d) for n in (5, 300_001) for d in (torch.float32, torch.float16, torch.bfloat16)]:
            torch.manual_seed(R)
            value, parts = torch.randn(count).to(dtype), [torch.empty(count, dtype=dtype) for _ in range(N)]
            dist.all_gather(parts, value)
            first, second, third = (part.float() for part in parts)
            dist.all_reduce(value)
            tell(torch.equal(value, (first + second + third).to(dtype)))
    """)  # fmt: skip
    assert outputs == ["True\n" * 6] * 3


ON_TWO = """
    reductions_that_gloo_has_not calls_that_are_wrong_are_refused_and_the_next_ones_work
    tensors_of_any_dtype_and_number_of_dimensions_travel
    other_numbers_of_elements_than_expected_are_an_error_though_they_fit_in_all
    a_message_of_another_size_or_dtype_is_an_error_on_both_ranks
    calls_that_differ_are_an_error_on_all_ranks_with_their_lines
    ranks_that_are_late_or_wait_in_another_order_have_not_diverged ranks_that_all_send_first_are_told
    futures_may_wait_for_one_another futures_of_a_group_that_is_aborted_have_its_error_and_may_leave_it
    many_groups_come_and_go groups_work_beside_one_another_in_threads
    ddps_hooks_in_cpp_train_and_their_futures_have_results_and_errors
    ddps_futures_need_no_thread_and_those_of_a_backward_pass_that_fails_end_too
    ddp_trains_over_a_layer_whose_backward_pass_is_inside_another_one
    torch_finds_what_it_asks_a_group_for groups_are_split_in_the_order_of_their_ranks one_tensor_is_gathered
    hooks_see_what_is_called_until_they_are_taken_away
    calls_that_differ_from_all_before_cost_less_than_a_number_and_dropped_works_keep_no_tensor
"""
ON_THREE = """
    groups_are_split_in_the_order_of_their_ranks one_tensor_is_gathered
    hooks_see_what_is_called_until_they_are_taken_away
    reductions_that_gloo_has_not results_are_written_where_they_belong_wherever_inputs_and_outputs_lie
    a_monitored_barrier_names_who_does_not_come_and_the_next_one_works
    more_messages_than_may_be_in_flight_wait_for_the_first_one_of_the_other_rank
    a_message_of_another_size_or_dtype_is_an_error_on_both_ranks
    calls_that_differ_are_an_error_on_all_ranks_with_their_lines
    the_end_of_a_group_leaves_nothing_of_its_messages
    a_group_goes_on_with_other_members_and_each_time_as_a_new_one
    a_reconfiguration_that_cannot_be_says_why_and_the_next_one_works
    a_reconfigured_group_splits_counts_and_calls_hooks_as_a_new_one
    an_abort_hook_may_leave_the_group_while_a_first_message_waits
    processes_that_left_come_again_and_what_they_used_goes
"""
LEFT = "a_rank_that_has_left_ends_the_wait_for_its_first_message_and_no_other"


@pytest.mark.parametrize(("size", "checks"), [(2, ON_TWO), (3, ON_THREE), (3, LEFT)])
def test_checks_of_one_process_after_another_pass(size, checks):
    for output in run(size, [distributed_checks.__file__, *checks.split()]):
        assert "all pass" in output


def test_a_group_may_be_bound_to_a_device_and_a_script_may_end_with_a_future_in_flight():
    script = """
        torch.accelerator.current_accelerator = lambda *_, **__: torch.device("cuda")  # as if one were there
        torch.accelerator.device_count = lambda: 1
        dist.init_process_group("farandole", device_id=torch.device("cuda:0"))
        value, store = torch.ones(1), dist.distributed_c10d._get_default_store()
        dist.all_reduce(value)
        dist.all_reduce(value, group=dist.new_group(list(range(N))))
        tell(f"sum: {value.item()}")
        if R == 0:
            pending = dist.all_reduce(torch.ones(2), async_op=True).get_future()
            store.set("pending", "")
        else:
            store.wait(["pending"])
        sys.exit(3)  # without destroy_process_group
    """
    for output in run_script(2, script, codes=[3, 3]):
        assert "sum: 4.0" in output


def test_a_rank_that_dies_ends_its_groups_in_ddp_and_for_messages_and_no_others():
    script = """
        dist.init_process_group("farandole")
        pairs, ways = [dist.new_group([1, 2]), dist.new_group([0, 3])], [dist.new_group(list(range(N))) for _ in "01"]
        mine, store, value = pairs[R in (0, 3)], dist.distributed_c10d._get_default_store(), torch.ones(1)

        def failing(what, call):
            try:
                call()
            except RuntimeError as error:
                ranks = error.failed_ranks if isinstance(error, farandole.PeerLostError) else None
                tell(f"{what}: {ranks} {error}".replace("\\n", " "))

        def train():
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4), process_group=mine)
            for step in range(1000 if mine is pairs[0] else 4):
                loss = model(torch.ones(2, 4)).sum()
                if R == 1 and step == 3:
                    store.wait([f"past {rank}" for rank in range(N)])
                    os.kill(os.getpid(), signal.SIGKILL)
                loss.backward()

        if R == 1:
            dist.send(value, 3, group=ways[1])
        works = []
        if R == 3:
            dist.recv(value, 1, group=ways[1])
            works = [dist.irecv(value, 1, group=way) for way in ways]
        dist.barrier()
        store.set(f"past {R}", "the barrier")
        failing("ddp", train)
        for what, work in zip(("first", "later"), works):
            failing(what, work.wait)
        failing("world", lambda: [dist.all_reduce(value) for _ in iter(int, 1)])
        failing("pair", lambda: dist.all_reduce(value, group=mine))
        if R in (0, 3):  # whoever is gone before the other one has its sum ends the pair
            store.set(f"has {R}", "its sum")
            store.wait(["has 0", "has 3"])
        store.set("3 goes", "now") if R == 3 else R == 0 and store.wait(["3 goes"])
        tell("end")
        os._exit(0)
    """
    outputs = run_script(4, script, codes=[0, -signal.SIGKILL, 0, 0])
    expected = {0: ["world", "end"], 2: ["ddp", "world", "pair", "end"], 3: ["first", "later", "world", "end"]}
    in_pair = {"pair": "of ranks [1, 2], numbered from 0: rank 0 (pid",
               "later": "of ranks [1, 3], numbered from 0: rank 0 (pid"}  # fmt: skip
    for rank, names in expected.items():
        lines = [line for line in outputs[rank].splitlines() if re.match("(ddp|first|later|world|pair|end)\\b", line)]
        assert [line.split(":")[0] for line in lines] == names, outputs[rank]
        for name, line in zip(names[:-1], lines):
            assert (name == "ddp" or f"{name}: (1,) " in line) and "was killed by signal 9" in line, line
            assert in_pair.get(name, "rank 0 (pid" if name == "ddp" else "rank 1 (pid") in line, line


@pytest.mark.parametrize("size", [3, 4])
def test_ddp_goes_on_without_a_rank_that_dies_and_with_one_that_comes(size):
    """From size - 1 ranks to size - 2, without rank 0 and its store, and back; the last process joins. No step is lost
    or done twice: all weights are those of one process, whose batch all ranks have."""
    script = """
        import copy
        from distributed_checks import reconfiguring
        from torch.distributed import TCPStore
        from torch.nn.parallel import DistributedDataParallel

        torch.manual_seed(1)
        alone, batches = torch.nn.Linear(4, 4), torch.randn(15, 8, 4)
        model, step, generation = copy.deepcopy(alone), 0, 0
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (alone, model)]

        def train(step, model, optimizer):
            optimizer.zero_grad()
            loss = model(batches[step]).square().mean()
            if R == 0 and step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            optimizer.step()

        def go_on(handles):
            global step, generation, ddp
            generation += 1
            reconfiguring(group, generation, handles)
            steps = [None] * dist.get_world_size()
            dist.all_gather_object(steps, step)
            state = [step, model.state_dict(), optimizers[1].state_dict()]
            dist.broadcast_object_list(state, steps.index(max(steps)))
            step = state[0]
            model.load_state_dict(state[1])
            optimizers[1].load_state_dict(state[2])
            ddp = DistributedDataParallel(model)

        def lost_ranks():
            try:
                dist.barrier()
            except farandole.HorovodInternalError as error:
                return error.failed_ranks

        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        common = TCPStore(address, port, is_master=R == N - 1, wait_for_workers=False)
        if R == N - 1:  # comes later
            deferred = {"enable_reconfigure": True} if hasattr(dist, "_reconfigure") else {}  # since torch 2.14
            dist.init_process_group("farandole", store=dist.HashStore(), rank=0, world_size=1, **deferred)
            group = dist.group.WORLD
            common.set("newcomer", group.get_reconfigure_handle())
            generation = 1
        else:
            if R == 0:
                own = TCPStore(address, 0, is_master=True, wait_for_workers=False)
                common.set("port of rank 0", str(own.port))
            store = TCPStore(address, int(common.get("port of rank 0")), is_master=False, wait_for_workers=False)
            dist.init_process_group("farandole", store=store, rank=R, world_size=N - 1)
            group, handles = dist.group.WORLD, [None] * (N - 1)
            dist.all_gather_object(handles, group.get_reconfigure_handle())
            ddp = DistributedDataParallel(model)
            while step < 10:
                try:
                    train(step, ddp, optimizers[1])
                    step += 1
                except RuntimeError:
                    lost = lost_ranks()
                    tell(f"lost: {lost}")
                    handles = [handle for rank, handle in enumerate(handles) if rank not in lost]
                    go_on(handles)
            common.set("handles", " ".join(handles))
        go_on([*common.get("handles").decode().split(), common.get("newcomer").decode()])
        while step < 15:
            train(step, ddp, optimizers[1])
            step += 1
        for number in range(15):
            train(number, alone, optimizers[0])
        assert torch.allclose(model.weight, alone.weight, atol=1e-6), (model.weight, alone.weight)
        tell(f"rank {dist.get_rank()} of {dist.get_world_size()} after {generation} generations")
        dist.destroy_process_group()
    """
    outputs = run_script(size, script, codes=[-signal.SIGKILL, *[0] * (size - 1)])
    for rank in range(1, size):
        assert f"rank {rank - 1} of {size - 1} after 2 generations" in outputs[rank]
        assert rank == size - 1 or outputs[rank].count("lost: (0,)") == 1


def test_a_rank_that_does_not_come_in_time_ends_its_group_and_no_others():
    script = """
        import datetime, warnings
        warnings.simplefilter("always")
        dist.init_process_group("farandole")
        group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=2))
        store = dist.distributed_c10d._get_default_store()
        if R == 0:
            start_s = time.monotonic()
            try:
                dist.barrier(group)
            except farandole.exceptions.OperationTimeoutError as error:
                tell(f"{time.monotonic() - start_s >= 2}: {error}")
        if R == 0:
            try:
                dist.barrier(timeout=datetime.timedelta(seconds=0.2))
            except TimeoutError:
                tell("alone for 0.2 s")
                store.set("alone", "")
        else:
            store.wait(["alone"])
            dist.barrier()
        value = torch.ones(1)
        dist.all_reduce(value)
        tell(f"world: {value.item()}")
        dist.barrier()
        dist.destroy_process_group()
        tell("end")
    """
    first, second = run_script(2, script)
    assert "True: the job ends, as a tensor waits for longer than 2 s (the timeout of the group)" in first
    assert "missing: rank 1" in first and "alone for 0.2 s" in first
    assert "RuntimeWarning: farandole: the job ends" in second and "RuntimeWarning" not in first
    for output in (first, second):
        assert "world: 2.0" in output and "end" in output


def test_a_time_out_that_is_set_counts_for_what_is_called_from_then_on():
    script = """
        import datetime
        dist.init_process_group("farandole")
        value, store = torch.ones(1), dist.distributed_c10d._get_default_store()
        groups = [dist.new_group(list(range(N))) for _ in range(N)]
        for late, group in enumerate(groups):
            set_timeout = getattr(dist, "set_timeout", lambda limit, group: group.set_timeout(limit))
            dist.all_reduce(value, group=group)
            set_timeout(datetime.timedelta(seconds=1), group)
            if R == late:
                store.wait([f"without {late}"])
                continue
            called = []
            group.register_abort_hook(7, lambda: called.append("hook"))
            try:
                dist.all_reduce(value, group=group)
            except farandole.exceptions.OperationTimeoutError as error:
                tell(f"{late} is late, {called}: {error}")
            store.set(f"without {late}", "")
        dist.barrier()
        try:
            dist.group.WORLD.set_timeout(datetime.timedelta(seconds=-1))
        except ValueError as error:
            tell(error)
    """
    for rank, output in enumerate(run_script(2, script)):
        text = "is late, ['hook']: the job ends, as a tensor waits for longer than 1 s (the timeout of the group)"
        assert f"{1 - rank} {text}" in output and f"missing: rank {1 - rank}" in output, output
        assert "set_timeout: timeout_s is -1.000000; expected 0 to" in output, output


def test_a_bad_time_out_changes_nothing_and_one_that_is_set_while_a_pair_joins_is_the_pairs():
    group = backend.ProcessGroup(torch.distributed.HashStore(), 0, 1, timeout_s=5)
    with pytest.raises(ValueError, match="expected 0 to"):
        group.set_timeout(datetime.timedelta(seconds=-1))
    assert group.fl_job.timeout_s == group.fl_timeout_s == 5
    group.shutdown()
    job = types.SimpleNamespace(size=3, rank=0, ranks=[0, 1, 2], name="", context=None, timeout_s=5)
    limits = queue.Queue()

    class Joining(backend.Pair):
        def _rendezvous(self):
            job.timeout_s = 7
            self.set_timeout(7)
            return types.SimpleNamespace(core=types.SimpleNamespace(set_timeout=limits.put))

    Joining(job, 1)
    assert limits.get(timeout=GUARD_S) == 7


@pytest.mark.parametrize(("ranks", "steps"), [([0, 1, 2], 1), ([1, 0, 2], 0)])
def test_the_last_work_of_a_pass_ends_the_step_where_ranks_are_numbered_as_in_the_job(ranks, steps):
    job, ended = backend.Job(None, 0, 3, ranks, 0, "no members"), []
    job.completer = types.SimpleNamespace(add=lambda _: None)
    work = types.SimpleNamespace(fl_job=job, fl_end=lambda: None)
    _AtEnd(work)()  # the core refuses: not an error of autograd
    job.context = types.SimpleNamespace(core=types.SimpleNamespace(end_step=lambda: ended.append(1)))
    left, last = _AtEnd(work), _AtEnd(work)
    left.leave()
    last()
    assert len(ended) == steps


def test_an_optimizer_ends_a_step_where_neither_a_pass_nor_a_wrapped_optimizer_does():
    group, ended = backend.Job(None, 0, 3, [], 0, "no members"), []
    group.context = types.SimpleNamespace(core=types.SimpleNamespace(end_step=lambda: ended.append(1)))
    _job._of_all_ranks.add(group)
    _job._watch_optimizers()
    _job._watch_optimizers()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    group.has_started = True
    optimizer.step()
    assert len(ended) == 1
    group.has_started = True
    vars(optimizer)[MARK] = object()
    optimizer.step()
    assert len(ended) == 1
    del vars(optimizer)[MARK]
    _AtEnd(types.SimpleNamespace(fl_job=group, fl_end=lambda: None))()
    group.has_started = True  # such as the sum of a loss
    optimizer.step()
    assert len(ended) == 2
    optimizer.step()  # of training that goes on without DDP
    assert len(ended) == 3


def test_of_several_optimizers_those_end_a_step_that_follow_a_collective():
    group = backend.ProcessGroup(torch.distributed.HashStore(), 0, 1, timeout_s=5)
    first, second = (torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1) for _ in range(2))
    for _ in range(3):
        group.allreduce([torch.zeros(1)]).wait()
        first.step()
        second.step()
    assert group.fl_core.counters()["steps"] == 2  # the first one has no beginning
    group.shutdown()


def test_metrics_follow_a_group_of_all_ranks_only(tmp_path):
    script = """
        os.environ["FARANDOLE_METRICS"] = f"file:{PATH}/{R}.prom"
        dist.init_process_group("gloo")
        followed = farandole._metrics._Process.source
        for ranks in ([R], [0, 1]):
            group = dist.new_group(ranks, backend="farandole", use_local_synchronization=True)
            tell(f"{ranks} of {N}: {followed.is_of(group.fl_job.context)}")
    """
    for output in run_script(2, script.replace("{PATH}", str(tmp_path))):
        assert [line.split(": ")[1] for line in output.splitlines() if " of 2: " in line] == ["False", "True"]


@pytest.mark.parametrize("dies", [True, False])
def test_a_monitored_barrier_names_a_rank_0_that_dies_and_passes_if_it_goes_at_once(dies):
    """With the store, at which the others wait."""
    script = """
        dist.init_process_group("farandole")
        dist.barrier()
        if R == 0:
            time.sleep(0.5)
            dies and os.kill(os.getpid(), signal.SIGKILL)
        try:
            dist.monitored_barrier()
            tell("passed")
        except farandole.HorovodInternalError as error:
            tell(f"ranks {error.failed_ranks}: {error}")
        os._exit(0)
    """
    _, *others = run_script(3, f"dies = {dies}\n" + textwrap.dedent(script), codes=[-signal.SIGKILL * dies, 0, 0])
    for output in others:
        assert ("ranks (0,): rank 0 (pid" if dies else "passed") in output, output


def test_torchs_nan_check_and_flight_recorder_see_a_group_if_they_are_asked_for(monkeypatch):
    variables = {"TORCH_DIST_NAN_CHECK": "1", "TORCH_FR_BUFFER_SIZE": "100", "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
                 "TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1"}  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    script = """
        import json
        dist.init_process_group("farandole")
        value = torch.ones(1)
        dist.all_reduce(value)
        try:
            dist.all_reduce(value / 0 - value / 0)
        except RuntimeError as error:
            tell(error)
        else:
            tell("passed")
        dist.barrier()
        if hasattr(torch._C._distributed_c10d, "HealthCheckHook"):
            record = json.loads(torch._C._distributed_c10d._dump_fr_trace_json(True, False, "farandole"))
            tell([entry["profiling_name"] for entry in record["entries"]])
        tell(value.item())
        dist.destroy_process_group()
    """
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    for output in run_script(2, script):
        assert ("NaN found" if version >= (2, 14) else "passed") in output and "2.0" in output, output
        assert version < (2, 15) or "['farandole:all_reduce', 'farandole:all_reduce', 'farandole:barrier']" in output


def test_torchs_analyser_reads_a_job(tmp_path, monkeypatch):
    (tmp_path / "ours").mkdir()
    monkeypatch.setenv("FARANDOLE_FLIGHT_RECORDER_DIR", str(tmp_path / "ours"))
    script = """
        dist.init_process_group("farandole")
        uneven = [torch.empty(rank + 1) for rank in range(N)]
        for _ in range(2):
            dist.all_reduce(torch.ones(2))
            dist.all_gather(uneven, torch.ones(R + 1))
            dist.barrier()
        try:
            dist.all_reduce(torch.ones(3 + R))
        except farandole.MismatchError:
            tell("differ")
    """
    assert all("differ" in output for output in run_script(2, script))
    assert main(["explain", str(tmp_path / "ours"), "--torch", str(tmp_path / "torch")]) == 0
    analyse = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", tmp_path / "torch"]
    run_it = functools.partial(subprocess.run, analyse, text=True, timeout=GUARD_S, check=False, capture_output=True)
    verdict = run_it().stderr
    assert "number: 7 has errors" in verdict and verdict.count("sequence number") == 1, verdict
    assert re.search(r"Expected input sizes: .\[\[[34]]]. does not match found input sizes: .\[\[[34]]]", verdict)
    (tmp_path / "torch" / "farandole_0").unlink()
    assert "Missing dump files from ranks {0}" in run_it().stderr


def test_torchs_analyser_has_the_numbers_of_elements_of_each_dtype():
    counts = {"float8_e5m2": 16, "bool": 16, "uint8": 16, "bfloat16": 8, "int32": 4, "float64": 2, "complex128": 1}
    events = [types.SimpleNamespace(kind="allreduce", dtype=dtype, bytes=16) for dtype in counts]
    assert [_torch_trace._sizes(event) for event in events] == [[[count]] for count in counts.values()]


#: Of torch's classes, of whatever version, that ours override.
OVERRIDES = {
    "Work": """
        exception get_future is_completed is_success result synchronize wait _source_rank
    """,
    "ProcessGroup": """
        abort all_gather_single all_gather_single_coalesced all_to_all_single allgather allgather_coalesced
        allgather_into_tensor_coalesced allreduce allreduce_coalesced alltoall alltoall_base barrier broadcast gather
        get_error get_reconfigure_handle getBackendName getGroupDesc getGroupName getRank getSize group_desc group_name
        monitored_barrier name rank reconfigure recv recv_anysource reduce reduce_scatter reduce_scatter_single
        reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced scatter send set_timeout setGroupDesc
        setGroupName shutdown size supports_reconfigure supports_splitting _allgather_base _device_types _get_backend
        _reduce_scatter_base _set_group_desc _set_group_name
        eager_connect_single_device gather_into_tensor gather_single get_backend get_group_store merge_remote_group
        options
        register_abort_hook register_post_hook register_pre_hook split_group supports_abort_hooks supports_coalescing
        supports_completion_hooks supports_shrinking supports_tensor_alloc supports_time_estimate supports_window
        unregister_abort_hook unregister_post_hook unregister_pre_hook _get_sequence_number_for_group
        _set_sequence_number_for_group _supports_time_estimate
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


def test_calls_of_any_number_of_kinds_take_bounded_memory_and_have_the_same_names_on_all_ranks():
    ranks, texts = [_calls.Calls(), _calls.Calls()], [f"allreduce of float32[{n % 3000}]" for n in range(9000)]
    for number, text in enumerate(texts):
        keys = text, (text, number)  # of a rank that has a factor of its own at each call
        first, second = (calls.add(key, None, text).name() for calls, key in zip(ranks, keys, strict=True))
        assert first == second
    assert all(len(calls._counts) <= 1024 >= len(calls._kinds) for calls in ranks)


@pytest.mark.skipif(not importlib.util.find_spec("expecttest"), reason="not installed: expecttest")
def test_torchs_own_tests_pass():
    """One in four, as the seed has it."""
    share = 1 if os.environ.get("FARANDOLE_TEST_FULL") == "1" else 4
    which = int(os.environ.get("FARANDOLE_TEST_SEED", "1")) % share
    driver = JOB.parents[1] / "torch_suite" / "run.py"
    options = ["--backends", "farandole", "--share", f"{which}/{share}"]
    done = subprocess.run(
        [sys.executable, driver, *options], env=environment(),
        text=True, timeout=600, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    passed = int(re.search(r"farandole, 2 ranks: (\d+) passed", done.stdout)[1])
    assert passed >= (90 if share == 1 else 10), done.stdout  # and not skipped


SUM = PRELUDE + textwrap.dedent(
    """
    dist.init_process_group(sys.argv[1], init_method=sys.argv[2] or None)
    value = torch.ones(2)
    dist.all_reduce(value)
    tell(f"rank {dist.get_rank()} of {dist.get_world_size()}: {value.tolist()}")
    dist.destroy_process_group()
    """
)


def expect_sum(done):
    assert done.returncode == 0, done.stdout
    for rank in range(2):
        assert f"rank {rank} of 2: [2.0, 2.0]" in done.stdout


@pytest.mark.parametrize("how", [("farandole", "farandole://"), ("farandole", ""), ("gloo", "")], ids="_".join)
def test_under_farandolerun_a_group_needs_no_more_than_under_torchrun(how):
    command = [sys.executable, "-m", "farandole.runner", "-np", "2", sys.executable, "-c", SUM, *how]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": GUARD_S}
    expect_sum(subprocess.run(command, env=environment(), check=False, **options))


@pytest.mark.mpi
@pytest.mark.once
def test_mpirun_needs_no_variables():
    expect_sum(mpirun(2, ["-c", SUM, "farandole", "farandole://"]))
