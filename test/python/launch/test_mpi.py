"""What needs real processes: launching, leaving, forking, failing."""

import ast
import re
import textwrap

import pytest

from ranks import mpirun, run_forked, run_mpi

pytestmark = pytest.mark.mpi

PRELUDE = """
import os, sys, time
import numpy as np
import farandole as fl
"""


def script(text):
    return PRELUDE + textwrap.dedent(text)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_find_each_other_and_leave_without_shutdown(size):
    told = run_mpi(
        size,
        script("""
            fl.init()
            fl.init()
            total = fl.allreduce(np.array([1.0, fl.rank()]), op=fl.Sum)
            root = fl.broadcast(np.array([fl.rank()]), fl.size() - 1).item()
            fl.barrier()
            tell((fl.rank(), fl.size(), fl.local_size(), *total.tolist(), root))
        """),
    )
    total, root = size * (size - 1) / 2, size - 1
    assert told == [str((rank, size, size, float(size), total, root)) for rank in range(size)]


def test_shutdown_ends_it_and_questions_are_then_refused():
    told = run_mpi(
        2,
        script("""
            fl.init()
            fl.allreduce(np.ones(3))
            fl.shutdown()
            fl.shutdown()
            assert not fl.is_initialized()
            try:
                fl.allreduce(np.ones(3))
            except fl.HorovodInternalError as error:
                tell("refused")
        """),
    )
    assert told == ["refused"] * 2


@pytest.mark.once
def test_a_job_that_another_thread_joined_ends_well():
    told = run_mpi(
        2,
        script("""
            import threading
            thread = threading.Thread(target=fl.init)
            thread.start()
            thread.join()
            tell(fl.allreduce(np.ones(1), op=fl.Sum).item())
        """),
    )
    assert told == ["2.0"] * 2


def test_ctrl_c_ends_a_wait_and_the_operation_can_still_finish():
    told = run_mpi(
        2,
        script("""
            import signal
            fl.init()
            x = np.full(3, float(fl.rank()))
            if fl.rank() == 0:
                signal.signal(signal.SIGALRM, signal.default_int_handler)
                handle = fl.allreduce_async(x, name="late", op=fl.Sum)
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.2)
                    fl.synchronize(handle)
                except KeyboardInterrupt:
                    tell("interrupted")
                fl.allreduce(np.ones(1), name="go")
                tell(fl.synchronize(handle).tolist())
            else:
                fl.allreduce(np.ones(1), name="go")
                tell(fl.allreduce(x, name="late", op=fl.Sum).tolist())
        """),
        FARANDOLE_DIVERGENCE_CHECK="0",  # the ranks wait for different operations until the signal
    )
    assert told == ["interrupted\n[1.0, 1.0, 1.0]", "[1.0, 1.0, 1.0]"]


def test_ctrl_c_in_a_blocking_call_leaves_memory_to_the_operation_in_flight():
    told = run_mpi(
        2,
        script("""
            import signal
            fl.init()
            if fl.rank() == 0:
                signal.signal(signal.SIGALRM, signal.default_int_handler)
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.02)
                    fl.allreduce(np.ones(10_000), name="late", op=fl.Sum)
                except KeyboardInterrupt:
                    tell("interrupted")
                mine = [np.full(10_000, 7.0) for _ in range(20)]
                fl.allreduce(np.ones(1), name="go")
                fl.allreduce(np.ones(1), name="went")
                tell(all((array == 7).all() for array in mine))
            else:
                fl.allreduce(np.ones(1), name="go")
                fl.allreduce(np.ones(10_000), name="late", op=fl.Sum)
                fl.allreduce(np.ones(1), name="went")
        """),
        FARANDOLE_DIVERGENCE_CHECK="0",  # the ranks wait for different operations until the signal
    )
    assert told == ["interrupted\nTrue", ""]


@pytest.mark.torch
def test_ctrl_c_inside_backward_leaves_a_round_that_zero_grad_settles():
    told = run_forked(
        2,
        script("""
            import signal, torch
            import farandole.torch as ft
            ft.init()
            p = torch.nn.Parameter(torch.ones(2))
            optimizer = ft.DistributedOptimizer(torch.optim.SGD([p], lr=1.0))
            if ft.rank() == 0:
                signal.signal(signal.SIGALRM, signal.default_int_handler)
                try:
                    signal.setitimer(signal.ITIMER_REAL, 5.0)  # well after it waits
                    (p * 2).sum().backward()
                except KeyboardInterrupt:
                    tell("interrupted")
                try:
                    optimizer.step()
                except ft.HorovodInternalError as error:
                    tell("interrupted" in str(error))
                ft.allreduce(torch.ones(1), name="go")
            else:
                ft.allreduce(torch.ones(1), name="go")
                (p * 4).sum().backward()
                tell(p.grad.tolist())
            optimizer.zero_grad()
            (p * ft.rank()).sum().backward()
            tell(p.grad.tolist())
        """),
        FARANDOLE_DIVERGENCE_CHECK="0",  # the ranks wait for different operations until the signal
    )
    assert told == ["interrupted\nTrue\n[0.5, 0.5]", "[3.0, 3.0]\n[0.5, 0.5]"]


@pytest.mark.once
def test_junk_in_a_setting_is_a_value_error_that_names_it():
    done = mpirun(1, ["-c", script("fl.init()")], FARANDOLE_FUSION_THRESHOLD="lots")
    assert done.returncode != 0
    assert re.search("ValueError.*FARANDOLE_FUSION_THRESHOLD", done.stdout), done.stdout


@pytest.mark.torch
def test_data_loader_workers_may_fork():
    told = run_forked(
        2,
        """
        import torch
        import farandole.torch as fl
        fl.init()
        class Shard(torch.utils.data.IterableDataset):  # as it may be written for Horovod
            def __iter__(self):
                worker = torch.utils.data.get_worker_info()
                first = fl.rank() * worker.num_workers + worker.id
                yield from torch.arange(16.0)[first :: fl.size() * worker.num_workers]
        loader = torch.utils.data.DataLoader(Shard(), batch_size=4, num_workers=2, multiprocessing_context="fork")
        for part in loader:
            tell(part.tolist())
            tell(fl.allreduce(part.sum(), op=fl.Sum).item())
        """,
    )
    assert told == [
        "[0.0, 4.0, 8.0, 12.0]\n56.0\n[1.0, 5.0, 9.0, 13.0]\n64.0",
        "[2.0, 6.0, 10.0, 14.0]\n56.0\n[3.0, 7.0, 11.0, 15.0]\n64.0",
    ]


@pytest.mark.once
def test_a_short_wait_after_an_idle_time_is_no_stall():
    """Real time must pass: what was wrong is what an idle engine does with its clock."""
    done = mpirun(
        2,
        ["-c", script("""
            fl.init()
            fl.barrier()
            time.sleep(2.5)
            if fl.rank() == 1:
                time.sleep(0.4)
            fl.allreduce(np.ones(3))
        """)],
        FARANDOLE_STALL_WARNING_S="1",
    )  # fmt: skip
    assert done.returncode == 0 and "stall" not in done.stdout, done.stdout


@pytest.mark.once
def test_known_operations_fault_no_pages_and_travel_together():
    told = run_mpi(
        2,
        """
        import resource
        import numpy as np
        import farandole as fl

        def submit():
            works = [fl.allreduce_async_(x, name=name, op=fl.Sum) for name, x in tensors]
            for work in works:
                fl.synchronize(work)

        fl.init()
        tensors = [(f"gradient {i}", np.zeros(64, np.float32)) for i in range(200)]
        for _ in range(20):
            submit()
        fl.barrier()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        before = fl.counters()
        for _ in range(50):
            submit()
        after = fl.counters()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
        tell([faults, after["batches"] - before["batches"], after["submissions"] - before["submissions"]])
        """,
    )
    for faults, batches, submissions in map(ast.literal_eval, told):
        assert submissions == 50 * 200
        assert faults < 100, told  # of 10,000 submissions; some are the interpreter's
        assert batches < 50 * 40, told  # 1 to 3 for 200 where nothing else runs


def test_a_rank_with_nothing_to_do_uses_next_to_no_processor():
    told = run_mpi(
        2,
        """
        import resource, time
        import numpy as np
        import farandole as fl

        def used():
            usage = resource.getrusage(resource.RUSAGE_SELF)
            return usage.ru_utime + usage.ru_stime

        fl.init()
        fl.allreduce(np.ones(4), name="warm-up")
        before = used()
        time.sleep(5)
        tell((used() - before) / 5)
        """,
    )
    assert max(float(share) for share in told) < 0.05, told  # 0.01 when measured; polling is 1
