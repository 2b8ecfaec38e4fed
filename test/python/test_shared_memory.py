"""Processes of one host reduce through memory that they share, or over MPI."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from ranks import PYTHON_PATH, mpirun, run_mpi

#: Every collective, in sizes of one message, of one chunk and of many; uneven parts; a small set.
EVERYTHING = """
import hashlib
import numpy as np
import farandole as fl

def maps():
    with open("/proc/self/maps") as file:
        return "memfd:farandole" in file.read()

fl.init()
rank, size = fl.rank(), fl.size()
rng = np.random.default_rng(rank)
digest = hashlib.sha256()
tell((fl.allreduce(np.ones(1), op=fl.Sum).item(), maps()))
fl.barrier()
odd = fl.add_process_set(range(1, size, 2)) if size > 2 else None
sets = [fl.global_process_set] + [s for s in [odd] if s is not None and rank % 2]
for at in sets:
    members = size if at is fl.global_process_set else size // 2
    for count in (1, 5_000, 1_000_003):
        for dtype in ("f2", "f4", "f8", "i1", "i8"):
            x = (rng.standard_normal(count) * 50).astype(dtype)
            for op in (fl.Sum, fl.Average, fl.Min, fl.Product):
                digest.update(fl.allreduce(x, op=op, process_set=at))
            digest.update(fl.reducescatter(x, op=fl.Sum, process_set=at))
        root = 1 if at is odd else size - 1
        digest.update(fl.broadcast(x, root, process_set=at))
        digest.update(fl.allgather(x[: count * (rank + 1) // size], process_set=at))
        splits = [count // members] * members
        digest.update(fl.alltoall(x[: sum(splits)], splits, process_set=at)[0])
tell(digest.hexdigest())
"""


@pytest.mark.parametrize("size", [2, 3, 4])
def test_results_are_bitwise_those_over_mpi(size):
    shared = [text.splitlines() for text in run_mpi(size, EVERYTHING)]
    told = run_mpi(size, EVERYTHING, FARANDOLE_SHARED_MEMORY="0")
    over_mpi = [text.splitlines() for text in told]
    assert [first for first, _ in shared] == [f"({size}.0, True)"] * size
    assert [first for first, _ in over_mpi] == [f"({size}.0, False)"] * size
    assert [digest for _, digest in shared] == [digest for _, digest in over_mpi]


@pytest.mark.skipif(os.geteuid() != 0, reason="a host name of its own for a rank needs root")
def test_of_two_hosts_only_sets_on_one_of_them_share_memory():
    told = run_mpi(
        4,
        """
        import ctypes, os, socket
        import numpy as np
        import farandole as fl

        new_names = 0x04000000  # CLONE_NEWUTS
        assert ctypes.CDLL(None).unshare(new_names) == 0
        socket.sethostname("abab"[int(os.environ["OMPI_COMM_WORLD_RANK"])])

        def add(process_set):
            if not process_set.included():
                return
            x = np.full(100_000, fl.rank() + 1)
            total = int(fl.allreduce(x, op=fl.Sum, process_set=process_set)[-1])
            with open("/proc/self/maps") as file:
                tell((total, "memfd:farandole" in file.read()))

        fl.init()
        assert fl.cross_size() == 2
        add(fl.global_process_set)
        add(fl.add_process_set([0, 1]))
        add(fl.add_process_set([0, 2]))
        fl.barrier()
        """,
        FARANDOLE_HIERARCHICAL_ALLREDUCE="0",
    )
    everywhere, apart, together = "(10, False)", "(3, False)", "(4, True)"
    assert told == [
        f"{everywhere}\n{apart}\n{together}", f"{everywhere}\n{apart}",
        f"{everywhere}\n{together}", everywhere,
    ]  # fmt: skip


def test_where_memory_cannot_be_shared_ranks_use_mpi_and_one_line_says_so():
    done = mpirun(
        3,
        ["-c", textwrap.dedent("""
            import resource
            import numpy as np
            import farandole as fl
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, resource.RLIM_INFINITY))
            fl.init()
            assert fl.allreduce(np.ones(100_000), op=fl.Sum)[-1] == 3
            with open("/proc/self/maps") as file:
                assert "memfd:farandole" not in file.read()
        """)],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("no shared memory") == 1, done.stdout
    assert "rank 0: the size of files is limited (ulimit -f)" in done.stdout


def test_a_stopped_peer_runs_into_the_deadline():
    done = mpirun(
        2,
        ["-c", textwrap.dedent('''
            import os, subprocess
            import numpy as np
            import farandole as fl
            fl.init()
            if fl.rank() == 1:  # is stopped, sooner or later, in the middle of an allreduce
                pid = os.getpid()
                subprocess.Popen(["sh", "-c", f"""
                    while kill -STOP {pid}; do sleep 3; kill -CONT {pid}; sleep 0.5; done
                """], stderr=subprocess.DEVNULL)
            try:
                while True:
                    fl.allreduce(np.ones(2_000_000), name="again")
            except fl.HorovodInternalError as error:
                print("rank", fl.rank(), error, flush=True)
        ''')],
        FARANDOLE_PLANE_TIMEOUT_S="1",
    )  # fmt: skip
    assert "no progress for 1000 ms on the shm plane" in done.stdout, done.stdout


def test_killed_ranks_leave_nothing_behind(tmp_path):
    script = f"""
        import os, pathlib
        import numpy as np
        import farandole as fl
        fl.init()
        x = np.ones(1_000_000)
        for i in range(10**6):
            fl.allreduce(x, name="again")
            if i == 3:
                pathlib.Path({str(tmp_path)!r}, str(os.getpid())).touch()
    """
    before = set(os.listdir("/dev/shm"))
    environment = os.environ | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "PYTHONPATH": PYTHON_PATH,
    }
    command = ["mpirun", "--oversubscribe", "-np", "3", sys.executable, "-c"]
    with subprocess.Popen([*command, textwrap.dedent(script)], env=environment) as job:
        until = time.monotonic() + 30
        while len(os.listdir(tmp_path)) < 3 and time.monotonic() < until:
            time.sleep(0.01)
        ranks = [int(name) for name in os.listdir(tmp_path)]
        assert len(ranks) == 3
        for rank in ranks:
            os.kill(rank, signal.SIGKILL)
        assert job.wait(30) != 0
    left = [name for name in set(os.listdir("/dev/shm")) - before if "farandole" in name]
    assert left == []
