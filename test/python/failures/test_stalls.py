"""Reports of stalls on all ranks, in the names of users, and the shutdown that a stall can cause."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

import ranks

PRELUDE = """
import threading, time
import numpy as np
import ranks
import farandole as fl
"""


def run(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A process whose ranks are threads."""
    environment = os.environ | {"PYTHONPATH": ranks.PYTHON_PATH} | variables
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + script], env=environment, timeout=60, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


def warnings(text: str, rank: int = 0) -> list[str]:
    """Of one rank."""
    return [line for line in text.splitlines() if "stalled for" in line and f"[farandole {rank}/" in line]


MANY_PARAMETERS = """
import torch
import farandole.torch as fl

def body(rank):
    model = torch.nn.ParameterDict({f"p{i}": torch.zeros(2) for i in range(500)})
    optimizer = fl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1), model.named_parameters())
    time.sleep(3.5 if rank == 3 else 0)
    sum(p.sum() for p in model.values()).backward()
    optimizer.step()
    return float(model["p7"][0])

assert ranks.run_threads(4, body) == [-1.0] * 4
"""


def test_every_rank_reports_the_gradients_of_many_parameters_in_one_line():
    said = run(MANY_PARAMETERS, FARANDOLE_STALL_WARNING_S="1").stderr
    lines = warnings(said)
    for rank in range(1, 4):
        told = [line.replace(f"[farandole {rank}/4]", "[farandole 0/4]") for line in warnings(said, rank)]
        assert told == lines, said
    assert 1 <= len(lines) <= 3, f"{len(lines)} lines; the first is {lines[:1]}"
    for line in lines:
        assert line.startswith("[farandole 0/4] warning: stalled for "), line
        assert 'gradients of optimizer 1 (backward()/step()) of "p' in line
        assert "(500 parameters)" in line
        assert "ranks 0, 1, 2 wait" in line
        assert "missing: rank 3" in line
        assert "gradients.0" not in line and "group " not in line


CALLS = """
def body(rank):
    time.sleep(2.5 if rank == 1 else 0)
    handles = [
        fl.allreduce_async(np.ones(2), name="loss"),
        fl.allgather_async(np.ones(2), name="k"),
        fl.alltoall_async(np.ones(2), name="t"),
        fl.allreduce_async(np.ones(2)),
    ]
    return [fl.synchronize(handle) is not None for handle in handles]

assert ranks.run_threads(2, body) == [[True] * 4] * 2
"""


def test_a_report_names_the_calls_of_the_program():
    lines = warnings(run(CALLS, FARANDOLE_STALL_WARNING_S="0.5").stderr)
    assert 1 <= len(lines) <= 4, lines
    text = "\n".join(lines)
    for call in ['allreduce "loss"', 'allgather "k"', 'alltoall "t"', "allreduce without a name"]:
        assert call in text
    for inner in ["rows of", "splits of", "noname"]:
        assert inner not in text
    assert "missing: rank 1 (has submitted nothing yet)" in lines[0]


def test_the_timeline_and_the_debug_log_have_every_stalled_tensor(tmp_path):
    path = tmp_path / "timeline.json"
    said = run(
        CALLS, FARANDOLE_STALL_WARNING_S="0.5", FARANDOLE_LOG_LEVEL="debug",
        FARANDOLE_TIMELINE=str(path),
    ).stderr  # fmt: skip
    tensors = {line.split(": ")[2] for line in warnings(said) if " debug: " in line}
    assert len(tensors) == 4, tensors
    spans = json.loads(path.read_text())
    notes = {span["args"]["note"].split(": ")[1] for span in spans if span["name"] == "STALL"}
    assert notes == tensors


STALLED_FOR_EVER = """
errors = [None] * 3

def body(rank):
    fl.barrier()  # both wait for as long
    try:
        fl.allreduce(np.ones(2), name="other" if rank == 2 else "loss")
    except fl.HorovodInternalError as error:
        errors[rank] = str(error)
    try:
        fl.allreduce(np.ones(2), name="later")
    except fl.HorovodInternalError as error:
        assert str(error) == errors[rank]
    else:
        raise AssertionError("the error is not final")

job = threading.Thread(target=ranks.run_threads, args=(3, body), daemon=True)
job.start()
job.join(20)
for rank, error in enumerate(errors):
    assert error is not None, f"rank {rank} still waits"
    assert 'allreduce "loss"' in error and "missing: rank 2" in error, error
    assert 'allreduce "other"' in error and "missing: rank 0" in error, error
    assert "STALL_SHUTDOWN" in error and "rank 0 failed" not in error, error
"""


@pytest.mark.parametrize("name", ["FARANDOLE_STALL_SHUTDOWN_TIME_SECONDS", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"])
def test_a_stall_ends_the_job_by_an_error_on_all_ranks(name):
    run(STALLED_FOR_EVER, FARANDOLE_DIVERGENCE_CHECK="0", **{name: "1"})


def test_without_a_stall_check_no_stall_ends_the_job():
    done = run(
        CALLS, HOROVOD_STALL_CHECK_DISABLE="1", HOROVOD_STALL_CHECK_TIME_SECONDS="0.1",
        HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="0.2",
    )  # fmt: skip
    assert warnings(done.stderr) == []


@pytest.mark.mpi
@pytest.mark.once
def test_a_rank_that_rank_0_does_not_hear_ends_by_itself(tmp_path):
    script = """
import os, pathlib, signal, sys
import numpy as np
import farandole as fl
fl.init()
fl.allreduce(np.ones(2), name="first")
if fl.rank() == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    fl.allreduce(np.ones(2), name="loss")
except fl.HorovodInternalError as error:
    pathlib.Path(sys.argv[1], str(fl.rank())).write_text(str(error))
os._exit(1)  # the launcher ends rank 0
"""
    variables = {
        "FARANDOLE_STALL_WARNING_S": "1", "FARANDOLE_STALL_SHUTDOWN_S": "8", "FARANDOLE_LIVENESS_TIMEOUT_S": "0"
    }  # fmt: skip
    said = ranks.mpirun(2, ["-c", script, str(tmp_path)], **variables).stdout
    silence = 'allreduce "loss": rank 1 waits; no answer from rank 0, which would report who is missing'
    assert said.count(silence) == 1 and re.search(r"warning: stalled for 6(\.\d+)? s", said), said
    assert silence in (tmp_path / "1").read_text()


def test_unknown_and_ignored_names_of_horovod_are_reported_once():
    script = "ranks.run_threads(2, lambda rank: None); ranks.run_threads(2, lambda rank: None)"
    variables = {
        "HOROVOD_FUSION_TRESHOLD": "1",
        "HOROVOD_XYZ": "1",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "30",
        "HOROVOD_CYCLE_TIME": "1",
        "HOROVOD_FUSION_THRESHOLD": "1024",
    }
    text = run(script, **variables).stderr
    assert text.count("did you mean HOROVOD_FUSION_THRESHOLD?") == 1
    assert text.count("HOROVOD_XYZ") == 1
    ignored = [line for line in text.splitlines() if "HOROVOD_CYCLE_TIME" in line]
    assert len(ignored) == 1 and "HOROVOD_GLOO_TIMEOUT_SECONDS" in ignored[0], text
    assert "HOROVOD" not in run(script, FARANDOLE_LOG_LEVEL="error", **variables).stderr


MISSING = """
import ctypes, os, pathlib, sys, threading, time
import numpy as np
import farandole as fl

def load_batch():
    {work}

def train(rank):
    fl.allreduce(np.ones(2), name="first")
    if rank == 1:
        load_batch()
    fl.allreduce(np.ones(2), name="loss")
"""
PROCESSES = (
    MISSING
    + """
fl.init()
try:
    train(fl.rank())
except fl.HorovodInternalError as error:
    facts = [error.failed_ranks, error.kind, error.tensor]
    pathlib.Path(sys.argv[1], str(fl.rank())).write_text(f"{{facts}} {{error}}")
    raise
"""
)
SLEEP = "time.sleep(60)"
WITH_THE_LOCK = "ctypes.PyDLL(None).sleep({})"
LOOP = "while True: pass"


def run_processes(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Three ranks."""
    command = [sys.executable, "-m", "farandole.runner", "-np", "3", sys.executable, "-c", script, *arguments]
    return subprocess.run(
        command, env=os.environ | variables, timeout=60, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def ranks_of(line):
    """Of the mark of a line of farandolerun's, such as "[0-2,4] "."""
    parts = [part.split("-") for part in line[1 : line.index("]")].split(",")]
    return [rank for part in parts for rank in range(int(part[0]), int(part[-1]) + 1)]


@pytest.mark.parametrize(
    ("work", "kind", "doing"),
    [
        pytest.param(SLEEP, "blocked in python", "in Python code: ", id="sleeps"),
        pytest.param(LOOP, "blocked in python", "in Python code: ", id="loops"),
        pytest.param(
            WITH_THE_LOCK.format(60), "blocked in c",
            "inside C code that holds the interpreter's lock; its main thread sleeps", id="with_the_lock",
        ),
    ],
)  # fmt: skip
def test_a_stall_says_what_the_missing_rank_does(tmp_path, work, kind, doing):
    done = run_processes(
        PROCESSES.format(work=work), str(tmp_path), FARANDOLE_STALL_WARNING_S="1", FARANDOLE_STALL_SHUTDOWN_S="3"
    )
    frames = ":7 in load_batch, called at " if kind == "blocked in python" else ""
    warned = [line for line in done.stdout.splitlines() if "stalled for 1" in line]
    for line in warned:
        assert f" is {doing}" in line and frames in line, done.stdout
    assert sorted(rank for line in warned for rank in ranks_of(line)) == [0, 1, 2], done.stdout
    for rank in (0, 2):
        text = (tmp_path / str(rank)).read_text()
        assert text.startswith(f"[(1,), '{kind}', 'loss'] "), text
        assert f" is {doing}" in text and frames in text, text
    assert f"farandolerun: rank 1 failed first: {doing}" in done.stdout, done.stdout


def test_of_ranks_in_one_process_the_thread_of_the_missing_one_is_told():
    script = MISSING.format(work="time.sleep(2)") + "import ranks; ranks.run_threads(2, train)"
    lines = warnings(run(script, FARANDOLE_STALL_WARNING_S="0.5").stderr)
    assert lines and "rank 1 (last: allreduce" in lines[0], lines
    assert "in load_batch, called at" in lines[0] and "in train, called at" in lines[0], lines
    assert "thread " not in lines[0], lines


def test_a_rank_that_waits_for_another_operation_is_not_called_blocked():
    script = MISSING.format(work='fl.allreduce(np.ones(2), name="other")') + "import ranks; ranks.run_threads(2, train)"
    caught = "except fl.HorovodInternalError as error:\n    print(error.kind, error.failed_ranks)"
    said = run(
        f"try:\n    exec({script!r})\n{caught}",
        FARANDOLE_DIVERGENCE_CHECK="0", FARANDOLE_STALL_WARNING_S="0.5", FARANDOLE_STALL_SHUTDOWN_S="1",
    )  # fmt: skip
    assert "missing: rank 1 (last: " in said.stderr and "Python code" not in said.stderr, said.stderr
    assert said.stdout == "None ()\n", said.stdout


ENDS = (
    MISSING
    + """
fl.init()
try:
    train(fl.rank())
except fl.HorovodInternalError as error:
    assert "has left" in str(error) or "has been shut down" in str(error), error
"""
)


@pytest.mark.parametrize(
    "end",
    ["sys.exit(0)", "threading.Thread(target=time.sleep, args=(0.5,)).start(); sys.exit(0)"],
    ids=["exits", "another_thread_ends_later"],
)
def test_the_interpreter_ends_while_it_is_asked_what_it_does(end):
    """The question waits for the lock, which the rank keeps until it ends."""
    work = f"{WITH_THE_LOCK.format(3)}; {end}"
    done = run_processes(ENDS.format(work=work), FARANDOLE_STALL_WARNING_S="0.5")
    assert done.returncode == 0, done.stdout
    assert "is inside C code" in done.stdout, done.stdout


def test_a_child_that_is_forked_while_its_parent_is_asked_ends_as_ever():
    """In the child nobody answers the question that the parent's thread had."""
    work = f"""{WITH_THE_LOCK.format(3)}
    child = os.fork()
    if child == 0:
        sys.exit(7)
    end = time.monotonic() + 20
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid != 0 or time.monotonic() > end:
            break
    print("the child's code:", os.waitstatus_to_exitcode(status) if pid else "none: it hangs")
    os._exit(0)"""
    done = run_processes(ENDS.format(work=work), FARANDOLE_STALL_WARNING_S="0.5")
    assert "the child's code: 7" in done.stdout, done.stdout
    assert "is inside C code" in done.stdout, done.stdout
