"""Programs that a rank starts: they inherit the launcher's variables, but are no ranks."""

import os
import re
import subprocess
import sys

import pytest

from ranks import mpirun

pytestmark = [pytest.mark.mpi, pytest.mark.once]

PRELUDE = """
import multiprocessing, os, signal, subprocess, sys, time
import numpy as np
import farandole as fl
"""

# What a rank does after its children have ended; all that was printed must be there.
EPILOGUE = """
    assert fl.allreduce(np.ones(3), op=fl.Sum).tolist() == [2.0] * 3
    print(f"rank {fl.rank()} went on\\n", end="", flush=True)
"""

REFUSAL = "has joined as process"


def run_job(tmp_path, text, size=2, **variables):
    """The output of a job of this script, which must end well."""
    path = tmp_path / "job.py"
    path.write_text(PRELUDE + text)
    done = mpirun(size, [str(path)], **variables)
    assert done.returncode == 0, done.stdout
    return done.stdout


def refusals(output):
    """Each refusal; mpirun may put those of two ranks into one line."""
    start = r"rank \d of this job"
    return re.findall(rf"(?:[\w.]+: )?{start} {REFUSAL}(?:(?!{start}).)*", output)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_worker_that_runs_init_at_the_top_of_the_script_is_refused(tmp_path, method):
    output = run_job(
        tmp_path,
        f"""
fl.init()

def work():
    pass

if __name__ == "__main__":
    process = multiprocessing.get_context("{method}").Process(target=work)
    process.start()
    process.join()
    assert process.exitcode == 1, process.exitcode
{EPILOGUE}""",
    )
    lines = refusals(output)
    assert len(lines) == 2 and all('if __name__ == "__main__":' in line for line in lines), output
    assert all(line.startswith("farandole.exceptions.HorovodInternalError") for line in lines)
    assert "rank 0 went on" in output and "rank 1 went on" in output


@pytest.mark.torch
def test_a_guarded_init_lets_workers_of_a_data_loader_work(tmp_path):
    output = run_job(
        tmp_path,
        f"""
import torch

if __name__ == "__main__":
    fl.init()
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    context = multiprocessing.get_context("forkserver")
    loader = torch.utils.data.DataLoader(data, 4, num_workers=1, multiprocessing_context=context)
    for (part,) in loader:
        print(fl.allreduce(part.numpy().sum(keepdims=True), op=fl.Sum).item(), flush=True)
{EPILOGUE}""",
    )
    assert not refusals(output) and output.count("12.0") == 2 and output.count("44.0") == 2


CHILD = '"import farandole as fl; fl.init(); print(fl.size(), flush=True)"'
FREE = '{k: v for k, v in os.environ.items() if not k.startswith(("OMPI_COMM_", "PMIX_"))}'
#: What each rank does, and how many refusals there are, of both ranks together.
PROGRAMS = {
    "joins as the rank that started it": (f"""
    fl.init()
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", {CHILD}])
        assert done.returncode == 1, done.returncode
        fl.allreduce(np.ones(1))
{EPILOGUE}""", 4),
    "without the launcher's variables is a job of its own": (f"""
    fl.init()
    out = subprocess.run([sys.executable, "-c", {CHILD}], env={FREE}, stdout=subprocess.PIPE)
    assert (out.returncode, out.stdout) == (0, b"1\\n"), out
{EPILOGUE}""", 0),
    "by a launcher of its own": (f"""
    fl.init()
    environment = {{k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_"))}}
    environment |= {{"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}}
    if fl.rank() == 0:
        command = ["mpirun", "--oversubscribe", "-np", "2", sys.executable, "-c", {CHILD}]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE)
        # mpirun may forward the line of one rank in the middle of the other's.
        assert (done.returncode, sorted(done.stdout)) == (0, sorted(b"2\\n2\\n")), done
{EPILOGUE}""", 0),
    "of a rank that leaves and joins again": (f"""
    fl.init()
    fl.shutdown()
    fl.init()
{EPILOGUE}""", 0),
    "forked after shutdown": (f"""
    fl.init()
    fl.shutdown()
    if os.fork() == 0:
        try:
            fl.init()
        except fl.HorovodInternalError as error:
            print(str(error) + "\\n", end="", flush=True)
            os._exit(3)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 3
    fl.init()
{EPILOGUE}""", 2),
}  # fmt: skip


@pytest.mark.parametrize("case", PROGRAMS)
def test_a_program_that_a_rank_starts(tmp_path, case):
    text, count = PROGRAMS[case]
    output = run_job(tmp_path, f'if __name__ == "__main__":{text}')
    lines = refusals(output)
    assert len(lines) == count and all(f"rank {rank} went on" in output for rank in (0, 1)), output
    if count == 4:
        assert all("OMPI_COMM_WORLD_RANK" in line for line in lines), output


def test_a_wrapper_that_does_not_join_starts_the_rank(tmp_path):
    output = run_job(tmp_path, f"subprocess.run([sys.executable, '-c', {CHILD}], check=True)")
    assert not refusals(output) and sorted(output) == sorted("2\n2\n"), output


def test_children_of_a_single_process_may_use_it_alone(tmp_path):
    path = tmp_path / "job.py"
    path.write_text(
        PRELUDE
        + f"""
fl.init()

def work():
    assert fl.size() == 1

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=work)
    process.start()
    process.join()
    assert process.exitcode == 0
    subprocess.run([sys.executable, "-c", {CHILD}], check=True)
"""
    )
    alone = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_COMM", "PMIX_"))}
    subprocess.run([sys.executable, str(path)], check=True, timeout=60, env=alone)


def test_a_program_that_replaces_a_rank_is_refused(tmp_path):
    path = tmp_path / "job.py"
    path.write_text(
        PRELUDE
        + """
os.chdir(os.path.dirname(os.path.abspath(sys.argv[0])))
try:
    fl.init()
except fl.HorovodInternalError as error:
    print(error, flush=True)
    me = int(os.environ["OMPI_COMM_WORLD_RANK"])
    open(f"said-{me}", "w").close()
    while not os.path.exists(f"said-{1 - me}"):  # mpirun ends the other once one has left without MPI_Finalize
        time.sleep(0.01)
    os._exit(0)
fl.allreduce(np.ones(1))
os.execv(sys.executable, [sys.executable, *sys.argv, "again"])
"""
    )
    done = mpirun(2, [str(path)])
    assert len(refusals(done.stdout)) == 2, done.stdout


def test_a_forked_child_says_where_its_parent_stands_and_refuses_the_rest(tmp_path):
    output = run_job(
        tmp_path,
        f"""
def text(call):
    try:
        call()
    except (fl.HorovodInternalError, ValueError) as error:
        return str(error)

def place():
    numbers = fl.rank(), fl.size(), fl.local_rank(), fl.local_size(), fl.cross_rank(), fl.cross_size()
    everyone = fl.global_process_set
    sets = everyone.rank(), everyone.size(), everyone.ranks, everyone.included(), own.rank(), own.size(), own.ranks
    return fl.is_initialized(), fl.is_homogeneous(), *numbers, *sets

def child(queue):
    queue.put({{text(call) for call in (fl.init, fl.counters, lambda: fl.allreduce(np.ones(1)))}})
    queue.put(place())

if __name__ == "__main__":
    fl.init()
    own = [fl.add_process_set([rank]) for rank in range(2)][fl.rank()]
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    handle = fl.allreduce_async(np.ones(3), name="before", op=fl.Sum)
    process = context.Process(target=child, args=(queue,))
    process.start()
    (said,) = queue.get()
    assert queue.get() == place()
    process.join()
    assert fl.synchronize(handle).tolist() == [2.0] * 3
    assert "forked" in said and "'spawn'" not in said, said
{EPILOGUE}""",
    )
    assert output.count("went on") == 2
