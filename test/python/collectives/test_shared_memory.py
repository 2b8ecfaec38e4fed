"""Processes of one host reduce through memory that they share, or over MPI."""

import ast
import os
import textwrap

import pytest

from ranks import mpirun, run_mpi, stopped_in_an_allreduce

pytestmark = pytest.mark.mpi

#: Makes ranks 0 and 2 one host, and ranks 1 and 3 another.
HOST_NAMES = """
import ctypes, os, socket

new_names = 0x04000000  # CLONE_NEWUTS
assert ctypes.CDLL(None).unshare(new_names) == 0
socket.sethostname("abab"[int(os.environ["OMPI_COMM_WORLD_RANK"])])
"""
needs_host_names = pytest.mark.skipif(os.geteuid() != 0, reason="a host name of its own for a rank needs root")

#: Every collective, in sizes of one message, of one chunk and of many; uneven parts; a small set.
EVERYTHING = """
import hashlib
import numpy as np
import farandole as fl

def maps():  # the part of a process set, besides doorbells and mailboxes
    with open("/proc/self/maps") as file:
        return file.read().count("memfd:farandole") > 1

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
        for dtype in ("f2", "f8", "i1"):
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


@pytest.mark.parametrize("size", [3, pytest.param(4, marks=pytest.mark.once)])
def test_results_are_bitwise_those_over_mpi(size):
    shared = [text.splitlines() for text in run_mpi(size, EVERYTHING)]
    told = run_mpi(size, EVERYTHING, FARANDOLE_SHARED_MEMORY="0")
    over_mpi = [text.splitlines() for text in told]
    assert [first for first, _ in shared] == [f"({size}.0, True)"] * size
    assert [first for first, _ in over_mpi] == [f"({size}.0, False)"] * size
    assert [digest for _, digest in shared] == [digest for _, digest in over_mpi]


@needs_host_names
def test_of_two_hosts_only_sets_on_one_of_them_share_memory():
    told = run_mpi(
        4,
        HOST_NAMES
        + textwrap.dedent("""
        import numpy as np
        import farandole as fl

        def add(process_set):
            if not process_set.included():
                return
            x = np.full(100_000, fl.rank() + 1)
            total = int(fl.allreduce(x, op=fl.Sum, process_set=process_set)[-1])
            with open("/proc/self/maps") as file:
                tell((total, file.read().count("memfd:farandole") - 1))

        fl.init()
        assert fl.cross_size() == 2
        add(fl.global_process_set)
        add(fl.add_process_set([0, 1]))
        add(fl.add_process_set([0, 2]))
        fl.barrier()
        """),
        FARANDOLE_HIERARCHICAL_ALLREDUCE="0",
    )
    # Parts of sets that are mapped by then, besides doorbells and mailboxes.
    everywhere, apart, together = "(10, 0)", "(3, 0)", "(4, 1)"
    assert told == [
        f"{everywhere}\n{apart}\n{together}", f"{everywhere}\n{apart}",
        f"{everywhere}\n{together}", everywhere,
    ]  # fmt: skip


@pytest.mark.once
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


def test_after_a_failure_shutdown_gives_shared_memory_back(tmp_path):
    """Each rank fails with slots and a buffer, and waits until the other has looked, too."""
    done = mpirun(
        2,
        ["-c", textwrap.dedent("""
            import gc, os, pathlib, sys, time
            import torch
            import farandole.torch as fl

            def holds_memory():
                with open("/proc/self/maps") as file:
                    links = [os.readlink(e) for e in os.scandir("/proc/self/fd") if e.is_symlink()
                             and os.path.lexists(e)]
                    return any("memfd:farandole" in text for text in [file.read(), *links])

            def train():
                model = torch.nn.Linear(1000, 1000)
                optimizer = fl.DistributedOptimizer(
                    torch.optim.SGD(model.parameters(), lr=0.1), gradient_as_bucket_view=True)
                model(torch.ones(1000)).sum().backward()
                optimizer.step()

            fl.init()
            rank = fl.rank()
            train()
            assert holds_memory()
            try:
                fl.allreduce(torch.ones(1), name=f"of rank {rank}")
                raise AssertionError("no error")
            except fl.MismatchError:  # the ranks wait for different operations
                fl.shutdown()
            gc.collect()  # the model
            folder = pathlib.Path(sys.argv[1])
            (folder / f"{rank}.tmp").write_text(str(holds_memory()))
            (folder / f"{rank}.tmp").rename(folder / str(rank))
            while not (folder / str(1 - rank)).exists():
                time.sleep(0.01)
        """), str(tmp_path)],
    )  # fmt: skip
    held = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert held == {"0": "False", "1": "False"}, done.stdout


@pytest.mark.once
def test_a_stopped_peer_runs_into_the_deadline():
    done = mpirun(
        2, ["-c", stopped_in_an_allreduce(1)], FARANDOLE_PLANE_TIMEOUT_S="1", FARANDOLE_LIVENESS_TIMEOUT_S="0"
    )
    assert "no progress for 1000 ms on the shm plane" in done.stdout, done.stdout


#: Rank {victim} dies or, until the others have ended, is stopped; each writes what it came to, and how long after the
#: death. mpirun is told not to end the others.
END = """
import os, pathlib, signal, subprocess, threading, time
import numpy as np
import farandole as fl

{before}
folder, victim, blocked, is_killed = pathlib.Path({folder!r}), {victim}, "{blocked}", {is_killed}

def die():
    time.sleep(0.3)
    (folder / "end").write_text(f"{{os.getpid()}} {{time.monotonic()}}")
    os.kill(os.getpid(), signal.SIGKILL)

fl.init()
rank = fl.rank()
fl.barrier()
if rank == victim and is_killed:
    threading.Thread(target=die).start()
elif rank == victim:
    others = " ".join(str(folder / str(r)) for r in range(fl.size()) if r != victim)
    (folder / "end").write_text(f"{{os.getpid()}} {{time.monotonic()}}")
    subprocess.Popen(["sh", "-c", f"kill -STOP {{os.getpid()}}; for file in {{others}}; do "
                      f"until [ -e $file ]; do sleep 0.1; done; done; kill -CONT {{os.getpid()}}"])
try:
    if blocked == "negotiation" and rank == victim:
        time.sleep(60 if is_killed else 3)
    while True:
        fl.allreduce(np.ones(3_000_000 if blocked == "data" else 1), name="again")
except fl.HorovodInternalError as error:
    began = float((folder / "end").read_text().split()[1])
    told = (time.monotonic() - began, type(error).__name__, error.failed_ranks, error.cause, str(error), vars(error))
    (folder / f"{{rank}}.tmp").write_text(repr(told))
    (folder / f"{{rank}}.tmp").rename(folder / str(rank))
os._exit(0)
"""


def errors_of_ranks(folder, size, victim, blocked, is_killed, before=""):
    """By rank what it came to, of all that live; and the process id of the victim."""
    script = END.format(folder=str(folder), victim=victim, blocked=blocked, is_killed=is_killed, before=before)
    done = mpirun(size, ["-c", script], OMPI_MCA_orte_enable_recovery="1")
    files = {rank: folder / str(rank) for rank in range(size) if rank != victim or not is_killed}
    silent = [rank for rank, file in files.items() if not file.exists()]
    assert not silent, f"ranks {silent} have noticed nothing\n{done.stdout}"
    told = {rank: ast.literal_eval(file.read_text()) for rank, file in files.items()}
    return told, int((folder / "end").read_text().split()[0])


# Open MPI 5's mpirun knows no recovery: it ends the other ranks, perhaps before they have told.
@pytest.mark.once
@pytest.mark.parametrize(
    ("size", "victim", "blocked", "before"),
    [(3, 0, "data", ""), (3, 1, "data", ""),
     pytest.param(4, 3, "negotiation", HOST_NAMES, marks=needs_host_names, id="of another host")],
)  # fmt: skip
def test_a_rank_that_dies_ends_the_waits_of_all_others_at_once(tmp_path, size, victim, blocked, before):
    """All raise an error that names it, well before any deadline."""
    told, pid = errors_of_ranks(tmp_path, size, victim, blocked, True, before)
    for late, kind, ranks, cause, text, facts in told.values():
        assert (kind, ranks) == ("PeerLostError", (victim,)), text
        assert text.startswith(f"rank {victim} (pid {pid} on host "), text
        assert ") was killed by signal 9 (Killed)" in text and cause == text
        assert (facts["kind"], facts["signal"], facts["exit_code"], facts["pid"]) == ("killed", 9, None, pid)
        assert facts["host"] in text
        assert late < 2, late


@pytest.mark.once
@pytest.mark.parametrize(("victim", "blocked"), [(0, "negotiation"), (1, "data")])
def test_a_rank_that_is_stopped_is_named_on_all_others_and_learns_of_it_later(tmp_path, victim, blocked):
    told, pid = errors_of_ranks(tmp_path, 3, victim, blocked, False)
    for rank, (_, kind, ranks, _, text, _) in told.items():
        assert victim in ranks or rank == victim, text
        if rank != victim:
            assert kind == "PeerLostError", text
            assert f"rank {victim} (pid {pid} on host " in text, text
            assert "is stopped (SIGSTOP or Ctrl-Z); it has not run for " in text, text


@pytest.mark.once
def test_who_is_stopped_is_waited_for_where_there_is_no_limit(tmp_path):
    script = """
    import os, subprocess
    import numpy as np
    import farandole as fl
    fl.init()
    if fl.rank() == 1:
        subprocess.Popen(["sh", "-c", f"kill -STOP {os.getpid()}; sleep 4; kill -CONT {os.getpid()}"])
    tell([fl.allreduce(np.ones(1), op=fl.Sum).item() for _ in range(20_000)][-1])
    """
    assert run_mpi(2, script, FARANDOLE_LIVENESS_TIMEOUT_S="0") == ["2.0", "2.0"]
