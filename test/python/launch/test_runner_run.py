"""farandole.runner.run: a function on several ranks, and what it gives back."""

import inspect
import os
import signal
import subprocess
import sys

import pytest

from farandole.runner import run
from farandole.runner.mpirun import UsageError

pytestmark = [pytest.mark.mpi, pytest.mark.once, pytest.mark.usefixtures("no_launcher")]

# Of horovod.run, in their order.
PARAMETERS = """func args kwargs num_proc min_num_proc max_num_proc slots reset_limit cooldown_range hosts hostfile
host_discovery_script start_timeout ssh_port ssh_identity_file disable_cache output_filename verbose use_gloo
use_mpi mpi_args network_interface network_interfaces executable np min_np max_np""".split()


def total(*numbers, scale=1):
    """A function of this module, which ranks import by its name."""
    import numpy as np

    import farandole

    farandole.init()
    rank = farandole.rank()
    ours = farandole.allreduce(np.full(1, float(rank)), op=farandole.Sum, name="x")
    print(f"rank {rank} was here")
    return rank, farandole.size(), float(ours[0]), sum(numbers) * scale


def test_the_parameters_are_horovods():
    parameters = inspect.signature(run).parameters
    assert list(parameters) == PARAMETERS
    assert parameters["args"].default == () and parameters["num_proc"].default == 1
    others = set(PARAMETERS) - {"func", "args", "num_proc"}
    assert all(parameters[name].default is None for name in others)


def test_results_come_in_rank_order_and_lines_are_marked(capfd):
    assert run(total, args=(1, 2), kwargs={"scale": 5}, np=3) == [(rank, 3, 3.0, 15) for rank in range(3)]
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == [f"[{rank}] rank {rank} was here" for rank in range(3)]
    assert err == ""


def test_a_closure_and_a_large_result_travel():
    size = 5_000_000  # more than any buffer takes
    results = run(lambda text: (text * size, bytes(size)), args=("ab",), num_proc=2)
    assert results == [("ab" * size, bytes(size))] * 2


def test_a_failing_rank_is_named_with_its_traceback():
    def fail():
        import os

        if os.environ["FARANDOLE_RANK"] == "1":
            raise KeyError("broken")

    with pytest.raises(RuntimeError) as raised:
        run(fail, np=2)
    lines = str(raised.value).splitlines()
    assert lines[0] == "rank 1 failed first, with exit code 1"
    assert lines[1] == "Traceback (most recent call last):" and lines[-1] == "KeyError: 'broken'"
    assert run(os.getpid, np=1) != [os.getpid()]  # and the next one works


@pytest.mark.parametrize("name, value", [
    ("min_np", 1), ("max_np", 3), ("min_num_proc", 1), ("max_num_proc", 2), ("reset_limit", 4),
    ("cooldown_range", (1, 2)),
])  # fmt: skip
def test_what_has_no_meaning_here_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}=.* has no meaning here: the number of ranks is fixed"):
        run(total, np=2, **{name: value})


def test_wrong_arguments_are_value_errors():
    assert issubclass(UsageError, ValueError)
    with pytest.raises(ValueError, match='"0" is not a whole number of ranks from 1'):
        run(total, np=0)
    with pytest.raises(ValueError, match='the program "/no/python" was not found'):
        run(total, executable="/no/python")


def test_a_site_without_pickles_runs_no_function(monkeypatch):
    monkeypatch.setenv("FARANDOLE_ALLOW_PICKLE", "0")
    with pytest.raises(ValueError, match="a function travels as a pickle"):
        run(os.getpid, np=2)


@pytest.mark.parametrize("how, is_under_mpirun", [("use_gloo", False), ("use_mpi", True)])
def test_gloo_and_mpi_choose_what_starts_the_ranks(how, is_under_mpirun):
    environments = run(lambda: dict(os.environ), np=1, disable_cache=True, **{how: True})
    assert ["OMPI_COMM_WORLD_RANK" in one for one in environments] == [is_under_mpirun]


def test_ctrl_c_ends_the_job_and_leaves_the_signals_as_they_were():
    script = """
import signal
from farandole.runner import run
before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
try:
    run(lambda: (print("up", flush=True), __import__("time").sleep(600)), np=2)
except KeyboardInterrupt:
    print("interrupted", (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before)
"""
    job = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert [job.stdout.readline()[4:] for _ in range(2)] == ["up\n"] * 2
        job.send_signal(signal.SIGINT)
        out, err = job.communicate(timeout=60)
    finally:
        job.kill()
    assert out.splitlines()[-1] == "interrupted True", out + err


def test_jobs_leave_no_descriptors_behind():
    def count():
        return len(os.listdir("/proc/self/fd"))

    run(os.getpid, np=1)
    before = count()
    for _ in range(3):
        run(os.getpid, np=2)
    assert count() == before


def test_a_thread_can_run_a_job_with_classes_of_the_script_and_a_text_stream_gets_its_lines():
    script = """
import io, sys, threading
from farandole.runner import run
sys.stdout = io.StringIO()
class Result: pass
results = []
thread = threading.Thread(target=lambda: results.extend(run(lambda: print("hello") or Result(), np=2)))
thread.start()
thread.join()
print([type(result) is Result for result in results], sorted(sys.stdout.getvalue().splitlines()), file=sys.__stdout__)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[True, True] ['[0] hello', '[1] hello']\n", done.stderr
