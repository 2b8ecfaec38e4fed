"""Kills a rank of a job at a random moment, again and again, and looks for what is left behind.

Run as: ``python test/bench/kill_ranks.py [KILLS]``. Exits 1 if anything is.
"""

from __future__ import annotations

import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

RANKS = 3
SCRIPT = """
import os, pathlib, sys
folder = pathlib.Path(sys.argv[1])
(folder / str(os.getpid())).touch()
import numpy as np
import farandole as fl
fl.init()
small, large = np.ones(1), np.ones(300_000)
while True:
    fl.allreduce(small, name="small")
    fl.allreduce(large, name="large")
"""


def left_by(job: str) -> set[str]:
    """Processes of the job, which may have its memory, and names in /dev/shm.

    A folder of farandolerun belongs to another job: none is started here.
    """
    found = {
        name
        for name in os.listdir("/dev/shm")
        if "farandole" in name and not name.startswith("farandolerun.")
    }
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if job.encode() in (process / "environ").read_bytes():
                found.add(f"process {process.name}")
        except OSError:
            continue  # it is gone, or another user's
    return found


def kill_one(moment_s: float, victim: int) -> set[str]:
    """Starts a job, kills a rank of it ``moment_s`` after all processes have started.

    Returns:
        What is left when mpirun has ended. The memory has no name, so who has it is a process.
    """
    mark = f"KILL_RANKS={os.getpid()}-{time.monotonic_ns()}"
    environment = os.environ | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMP_NUM_THREADS": "1",
        "KILL_RANKS": mark.partition("=")[2],
    }
    command = ["mpirun", "--oversubscribe", "-np", str(RANKS), sys.executable, "-c", SCRIPT]
    with tempfile.TemporaryDirectory() as folder:
        job = subprocess.Popen(
            [*command, folder], env=environment, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        until = time.monotonic() + 60
        while len(os.listdir(folder)) < RANKS and time.monotonic() < until:
            time.sleep(0.001)
        ranks = sorted(int(name) for name in os.listdir(folder))
        assert len(ranks) == RANKS, f"only {len(ranks)} ranks have started"
        assert len(left_by(mark)) > RANKS, "the processes of a job are not found"
        time.sleep(moment_s)
        os.kill(ranks[victim], signal.SIGKILL)
        job.wait(60)
    until = time.monotonic() + 2  # for the system to end what mpirun has killed
    while left_by(mark) and time.monotonic() < until:
        time.sleep(0.01)
    return left_by(mark)


def main(kills: int, seed: int = 0) -> int:
    """Prints what each kill leaves behind. Returns how many left something."""
    chance = random.Random(seed)
    bad = 0
    for number in range(kills):
        moment_s, victim = chance.uniform(0, 1.5), chance.randrange(RANKS)
        left = kill_one(moment_s, victim)
        bad += bool(left)
        if left:
            print(f"kill {number} (process {victim} after {moment_s:.3f} s) left", *sorted(left))
    print(f"{kills} kills, {bad} left something behind (seed {seed})")
    return bad


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 100) > 0)
