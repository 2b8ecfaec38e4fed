"""Deaths while a job starts, and ranks that are replaced: ``starts.py --deaths 200 --generations 100 --seed random``.

A death: the launcher, or the parent of a ``spawn``, is killed at a random time of the start; nothing of the job may
remain. A generation: ranks are killed at random, before, while or after all have joined; the others must name them, and
meet new processes in the next generation, at one store that gives each generation a prefix. Exit code 0: all is well.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

import inject

PATIENCE_S = 30.0
LOOP = "import numpy, farandole as fl\nfl.init()\nwhile True: fl.allreduce(numpy.ones(1000), name='x')\n"
SPAWN = f"def run(rank):\n    exec({LOOP!r})\nif __name__ == '__main__':\n    fl.spawn(run, nprocs=2)\n"
WAYS = ("farandolerun", "farandolerun of a shell", "spawn")


def start(way: str, folder: pathlib.Path) -> subprocess.Popen[bytes]:
    """A job of two ranks that never ends, in a process group of its own."""
    script = folder / "job.py"
    script.write_text(f"import farandole as fl\n{SPAWN}" if way == "spawn" else LOOP)
    program = [sys.executable, str(script)]
    if way != "spawn":
        shell = ["bash", "-c", '"$@"; true', "bash"] if way.endswith("shell") else []
        program = [sys.executable, "-m", "farandole.runner", "-np", "2", *shell, *program]
    return subprocess.Popen(
        program, env={**os.environ, inject.MARK: str(folder), "TMPDIR": str(folder)}, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def alive(folder: pathlib.Path) -> list[int]:
    """The processes of the job, by their environment."""
    mark = f"{inject.MARK}={folder}".encode()
    return [
        pid for pid in inject._pids()
        if mark in inject._read(pid, "environ").split(b"\0") and inject._state(pid) != "Z"
    ]  # fmt: skip


def die(way: str, seed: int) -> str:
    """Kills what starts a job after up to two seconds. What is wrong afterwards; empty: nothing."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="starts-"))
    after_s = random.Random(seed).uniform(0, 2)
    process = start(way, folder)
    try:
        time.sleep(after_s)
        process.kill()
        process.wait()
        inject._wait(lambda: not alive(folder), PATIENCE_S)
        left = [inject._read(pid, "cmdline").replace(b"\0", b" ").decode()[:80] for pid in alive(folder)]
        return f"{way}, killed after {after_s:.2f} s: {left} remain" if left else ""
    finally:
        for pid in alive(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


class FolderStore:
    """A key-value store of files, with a prefix for each generation."""

    def __init__(self, folder: pathlib.Path, prefix: str) -> None:
        self._folder, self._prefix = folder, prefix

    def _file(self, key: str) -> pathlib.Path:
        return self._folder / f"{self._prefix}{key}".replace("/", "_")

    def set(self, key: str, value: bytes | str) -> None:
        part = self._folder / f".part.{os.getpid()}"
        part.write_bytes(value.encode() if isinstance(value, str) else value)
        part.rename(self._file(key))

    def get(self, key: str) -> bytes:
        return self._file(key).read_bytes()

    def check(self, keys: list[str]) -> bool:
        return all(self._file(key).exists() for key in keys)

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        until_s = time.monotonic() + (timeout.total_seconds() if timeout else 60)
        while not self.check(keys):
            if time.monotonic() > until_s:
                raise TimeoutError(f"nobody has set {keys}")
            time.sleep(0.002)


def be_member(rank: int, size: int, generation: int, folder: pathlib.Path) -> None:
    """One rank: joins generation after generation, and writes down how each one went."""
    import numpy as np

    import farandole as fl

    def note(**what: Any) -> None:
        with (folder / f"{rank}.notes").open("a") as file:
            file.write(json.dumps({"generation": generation, "pid": os.getpid(), **what}) + "\n")

    while True:
        while not (folder / f"begin.{generation}").exists():
            time.sleep(0.002)
        try:
            fl.init(rank=rank, size=size, store=FolderStore(folder, f"g{generation}."))
            note(sum=float(fl.allreduce(np.ones(1), op=fl.Sum, name="first")[0]))
            while True:
                fl.allreduce(np.ones(1000), name="x")
        except Exception as error:
            note(error=str(error), failed=getattr(error, "failed_ranks", None))
        with contextlib.suppress(fl.HorovodInternalError):
            fl.shutdown()
        generation += 1


@dataclasses.dataclass
class Members:
    """The processes of all ranks; a context that ends them."""

    size: int
    folder: pathlib.Path
    processes: dict[int, subprocess.Popen[bytes]] = dataclasses.field(default_factory=dict)

    def start(self, rank: int, generation: int) -> None:
        words = [str(number) for number in (rank, self.size, generation)]
        with (self.folder / "output").open("a") as output:
            self.processes[rank] = subprocess.Popen(
                [sys.executable, __file__, "--member", *words, str(self.folder)], stdout=output, stderr=output,
                env={**os.environ, "FARANDOLE_INIT_TIMEOUT_S": "10", "OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    def notes(self, rank: int, generation: int) -> list[dict[str, Any]]:
        file = self.folder / f"{rank}.notes"
        lines = file.read_text().splitlines() if file.exists() else []
        return [note for note in map(json.loads, lines) if note["generation"] == generation]

    def have(self, what: str, ranks: list[int], generation: int) -> bool:
        """Whether all these ranks have noted ``what``: "sum" or "error"."""
        return all(any(what in note for note in self.notes(rank, generation)) for rank in ranks)

    def __enter__(self) -> Members:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


def run_generation(members: Members, generation: int, choice: random.Random) -> str:
    """Begins a generation, kills one or two ranks in it, and replaces them. What is wrong; empty: nothing."""
    ranks = list(range(members.size))
    victims = sorted(choice.sample(ranks, choice.choice([1, 1, 2])))
    others = [rank for rank in ranks if rank not in victims]
    while_joining = choice.random() < 0.3
    (members.folder / f"begin.{generation}").touch()
    if while_joining:
        time.sleep(choice.uniform(0, 0.1))
    elif not inject._wait(lambda: members.have("sum", ranks, generation), PATIENCE_S):
        return f"generation {generation}: not all have joined: {[members.notes(rank, generation) for rank in ranks]}"
    for rank in victims:
        members.processes[rank].kill()
    for rank in victims:
        members.processes[rank].wait()
    if not inject._wait(lambda: members.have("error", others, generation), PATIENCE_S):
        return f"generation {generation}: ranks {victims} were killed, and not all others know it"
    for rank in victims:
        members.start(rank, generation + 1)
    return "; ".join(filter(None, (wrong(members.notes(rank, generation), victims, members.size) for rank in others)))


def wrong(notes: list[dict[str, Any]], victims: list[int], size: int) -> str:
    """What a rank says that is not so: another sum, or that a rank has failed which was not killed."""
    error = next(note for note in notes if "error" in note)
    sums = [note["sum"] for note in notes if "sum" in note]
    is_named = re.search(rf"\branks? (\d+(, | and ))*({'|'.join(map(str, victims))})\b", error["error"])
    if sums not in ([], [float(size)]) or not is_named or not set(error["failed"] or ()) <= set(victims):
        return f"ranks {victims} were killed; sums {sums}, ranks {error['failed']} failed: {error['error'][:300]}"
    return ""


def run_generations(count: int, size: int, seed: int) -> list[str]:
    """Generations one after the other, until one goes wrong."""
    folder, choice = pathlib.Path(tempfile.mkdtemp(prefix="generations-")), random.Random(seed)
    try:
        with Members(size, folder) as members:
            for rank in range(size):
                members.start(rank, 0)
            for generation in range(count):
                if said := run_generation(members, generation, choice):
                    return [said, (folder / "output").read_text()[-2000:]]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deaths", type=int, default=10)
    parser.add_argument("--generations", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seed", default="random", help="a number, or random")
    parser.add_argument("--member", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.member:
        rank, size, generation = map(int, given.member[:3])
        be_member(rank, size, generation, pathlib.Path(given.member[3]))
    seed = random.SystemRandom().randrange(1 << 30) if given.seed == "random" else int(given.seed)
    print(f"seed {seed}", flush=True)
    said = [text for number in range(given.deaths) if (text := die(WAYS[number % len(WAYS)], seed + number))]
    said += run_generations(given.generations, given.ranks, seed)
    print("\n".join([*said, f"{given.deaths} deaths, {given.generations} generations: {len(said)} wrong"]))
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
