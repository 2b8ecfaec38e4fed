"""Ranks on two hosts: what crosses the link between them, and what happens when a peer stops."""

import functools
import pathlib
import re
import sys
import time

import pytest

from hosts import FIRST_ADDRESS, HostsAtSwitch, TwoHosts, or_skip, run_python
from ranks import REPOSITORY, stopped_in_an_allreduce

sys.path.append(str(REPOSITORY / "test" / "fault"))

import cut_links

pytestmark = pytest.mark.mpi

RANKS = 2  # of each host


def play(folder):
    with or_skip(TwoHosts(folder)) as played:
        yield played


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    yield from play(tmp_path_factory.mktemp("hosts"))


@pytest.fixture
def own_hosts(tmp_path):
    """For a test that changes their network."""
    yield from play(tmp_path)


#: Prints for each operation of argv how many times 16 MiB, the size of the tensor, cross the link.
OVER_THE_LINK = """
import sys
import numpy as np
import farandole as fl
from hosts import bytes_over_the_link

fl.init()
count = 16 << 18
x = np.random.default_rng(fl.rank()).integers(-99, 99, count).astype(np.float32)
total = sum(
    np.random.default_rng(r).integers(-99, 99, count).astype(np.float32) for r in range(fl.size())
)
expected = {
    "sum": total, "average": total / 4, "fp16": total,
    "broadcast": np.random.default_rng(3).integers(-99, 99, count),
}

def run(what):
    if what == "broadcast":
        return fl.broadcast(x, 3)
    if what == "fp16":  # which the collectives of arrays do not offer
        import torch
        from farandole.torch import Compression, allreduce
        return allreduce(torch.from_numpy(x), op=fl.Sum, compression=Compression.fp16).numpy()
    return fl.allreduce(x, op=fl.Average if what == "average" else fl.Sum)

for what in sys.argv[1:]:
    run(what)
    fl.barrier()
    before = bytes_over_the_link()
    result = run(what)
    fl.barrier()
    moved = [(now - then) / (16 << 20) for now, then in zip(bytes_over_the_link(), before)]
    assert np.array_equal(result, expected[what]), np.flatnonzero(result != expected[what])[:9]
    if fl.rank() == 0:
        print(f"{what}: sent {moved[0]:.3f}, received {moved[1]:.3f}", flush=True)
fl.shutdown()
"""


def moved_by(hosts, *what, **variables):
    """What the first host has sent and received, by operation."""
    output = run_python(hosts, RANKS, OVER_THE_LINK, *what, **variables)
    found = re.findall(r"(\w+): sent ([0-9.]+), received ([0-9.]+)", output)
    assert [one for one, *_ in found] == list(what), output
    return {one: (float(sent), float(received)) for one, sent, received in found}


# An allreduce of N bytes among H hosts sends at least 2 (H-1)/H N from each host and as much to it: a host
# has to receive the others' sums, and they its, of all N/H shards but its own, and likewise the results
# (Patarasuk and Yuan, doi:10.1016/j.jpdc.2008.09.002). With H = 2 that is N.
def test_an_allreduce_sends_the_least_over_the_link_and_a_broadcast_crosses_it_once(hosts):
    moved = moved_by(hosts, "sum", "average", "fp16", "broadcast")
    sent, received = moved.pop("broadcast")  # from a rank of the other host
    assert sent <= 0.05 and 1 <= received <= 1.05, moved
    for what, both in moved.items():
        least = 0.5 if what == "fp16" else 1.0
        assert all(least <= one <= 1.05 * least for one in both), moved


@pytest.mark.once
def test_without_hosts_each_rank_sends_its_own(hosts):
    """By Horovod's name of the setting, which stands for Farandole's."""
    sent, received = moved_by(hosts, "sum", HOROVOD_HIERARCHICAL_ALLREDUCE="0")["sum"]
    assert 1.9 <= sent <= 2.1 and 1.9 <= received <= 2.1


@pytest.mark.once
def test_a_peer_that_stops_runs_into_the_deadline(hosts):
    script = stopped_in_an_allreduce(3)
    limits = {"FARANDOLE_PLANE_TIMEOUT_S": "1", "FARANDOLE_LIVENESS_TIMEOUT_S": "0"}
    done = hosts.mpirun(RANKS, [sys.executable, "-c", script], **limits)
    assert "no progress for 1000 ms on the hierarchical plane" in done.stdout, done.stdout


#: Reduces for ever, and writes to stdout also while it waits, as a bar of progress does.
FOR_EVER = """
import os, pathlib, sys, threading, time
import numpy as np
import farandole as fl

fl.init()
fl.barrier()
pathlib.Path(sys.argv[1], str(fl.rank())).write_text(str(os.getpid()))

def write():
    while True:
        print("...", flush=True)
        time.sleep(0.1)

threading.Thread(target=write, daemon=True).start()
while True:
    fl.allreduce(np.ones(1000), name="x")
"""


def wait_until(is_so, timeout_s):
    end_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.1)


def alive(pids):
    return [pid for pid in pids if pathlib.Path(f"/proc/{pid}").exists()]


def end_of_a_job_that_is_cut(hosts, folder, start, **variables):
    """Starts ranks, cuts the link, waits until all have ended; returns the job's exit code and output."""
    files = [folder / str(rank) for rank in range(2 * RANKS)]
    job = start(RANKS, [sys.executable, "-c", FOR_EVER, str(folder)], **variables)
    try:
        wait_until(lambda: all(file.exists() and file.read_text() for file in files), 60)
        pids = [int(file.read_text()) for file in files]
        hosts.cut()
        wait_until(lambda: not alive(pids), 60)
        output, _ = job.communicate(timeout=60)
    finally:
        job.kill()
    return job.returncode, output


@pytest.mark.once
def test_the_launcher_ends_both_sides_of_a_cut_link(own_hosts, tmp_path):
    start = functools.partial(own_hosts.farandolerun, network="--mpi")
    code, said = end_of_a_job_that_is_cut(own_hosts, tmp_path, start, FARANDOLE_LIVENESS_TIMEOUT_S="0")
    assert code == 1 and re.search("rank [23] was lost first: played2 does not report it any more", said), said


@pytest.mark.once  # the settings that docs/troubleshooting.md names
def test_mpirun_ends_both_sides_of_a_cut_link(own_hosts, tmp_path):
    settings = {
        f"{prefix}_MCA_oob_tcp_keepalive_{name}": "1"
        for prefix in ("OMPI", "PRTE")
        for name in ("time", "intvl", "probes")
    }
    own_hosts.set_tcp_retries(3)
    settings["FARANDOLE_LIVENESS_TIMEOUT_S"] = "0"
    _, said = end_of_a_job_that_is_cut(own_hosts, tmp_path, own_hosts.start, **settings)
    assert "lost communication with a remote daemon" in said, said


#: Goes on as long as it may, and says in which generation.
ELASTIC = """
import pathlib, sys
import numpy as np
import farandole as fl

fl.init(elastic=True)
file, steps = pathlib.Path(sys.argv[1]) / str(fl.rank()), 0
while fl.generation() == 1 or steps < 10:
    try:
        fl.allreduce(np.ones(3), name="step")
        file.write_text("x")
        steps += fl.generation() > 1
    except fl.HorovodInternalError:
        fl.reinit()
print(fl.size(), "go on")
"""


@pytest.mark.once
def test_of_two_halves_of_an_elastic_job_that_is_cut_one_goes_on(own_hosts, tmp_path):
    place = {"FARANDOLE_SIZE": str(2 * RANKS), "FARANDOLE_ADDRESS": f"{FIRST_ADDRESS}:29500"}
    command = [sys.executable, "-c", ELASTIC, str(tmp_path)]
    ranks = [own_hosts.start_rank(r // RANKS, command, FARANDOLE_RANK=str(r), **place) for r in range(2 * RANKS)]
    wait_until(lambda: all((tmp_path / str(rank)).exists() for rank in range(2 * RANKS)), 60)
    own_hosts.cut()
    said = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 75, 75], said
    assert said[:2] == ["2 go on\n"] * 2
    # The first of the two halves' ranks that halts is an ended one to the second.
    halted = "farandole: (2 of 4 ranks are left|1 of 4 ranks is left(, 1 ended)?), and the other . may go on .*\n"
    assert all(re.fullmatch(halted, one) for one in said[2:]), said


@pytest.fixture
def three_hosts():
    with or_skip(HostsAtSwitch(3)) as played:
        yield played


@pytest.mark.once
def test_a_job_whose_link_between_two_of_three_hosts_is_cut_has_the_bits_of_an_undisturbed_one(three_hosts, tmp_path):
    training = cut_links.Training(tmp_path, three_hosts, ranks=1)
    training.wait(training.has_all)
    for link in [(1, 2), (2, 1)]:
        three_hosts.cut(*link)
    training.wait(lambda: training.halted)
    for link in [(1, 2), (2, 1)]:
        three_hosts.heal(*link)
    training.wait(training.has_all, starts=True)
    assert training.stop() == {training.undisturbed()}
    (said,) = training.said
    assert said.startswith("the job has gone on without this process"), said
    assert cut_links.beside(training.steps()) == 0
