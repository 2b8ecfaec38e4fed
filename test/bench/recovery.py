"""How long a training stands still when a rank is lost: farandole.torch.Job beside torchrun, and what that leaves.

    python test/bench/recovery.py --events 100           # of each kind
    python test/bench/recovery.py --generations 500      # memory, descriptors, threads, files of those that stay

Four ranks of this host train one network. farandolerun --elastic: a random rank is killed, told to leave (SIGTERM), or
stopped (SIGSTOP), and the launcher starts another. "the next step" is from that to the first step that all others have
applied without it; "a newcomer joins" from the last step without it to the first with it, on all; a newcomer's own time
begins with its process. torchrun --max-restarts, the same script: a random rank is killed, all begin again from the
last checkpoint. For many generations ranks are forked by a process that has imported torch. Times are in ms.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import os
import pathlib
import random
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator

RANKS, SLOTS, BATCH = 4, 8, 16
LIMIT_S = 300.0
ENDS = {"killed": signal.SIGKILL, "left with notice": signal.SIGTERM, "stopped": signal.SIGSTOP}


def now_ms() -> float:
    """Since the machine started, as process starts are given."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) * 1000


class Notes:
    """A file of what all ranks do: when, which process, what, in which generation; and what was read of it.

    Attributes:
        first: By generation and pid, when a process applied its first step there; ``last``: when any did its last.
        when: By pid and what else it did, when it did so first.
        generation: The newest that :meth:`steps` has given.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self._file = os.open(folder / "notes", os.O_CREAT | os.O_APPEND | os.O_RDWR)
        self._text, self._at, self.generation = "", 0, 0
        self.first: dict[int, dict[int, float]] = collections.defaultdict(dict)
        self.last: dict[int, float] = {}
        self.when: dict[int, dict[str, float]] = collections.defaultdict(dict)

    def add(self, what: str, generation: int = 0, at_ms: float | None = None) -> None:
        os.write(self._file, f"{at_ms or now_ms():.1f} {os.getpid()} {what} {generation}\n".encode())

    def add_start(self) -> None:
        ticks = int(pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        self.add("start", at_ms=ticks * 1000 / os.sysconf("SC_CLK_TCK"))

    def read(self) -> None:
        new = os.pread(self._file, 1 << 30, self._at)
        self._at += len(new)
        *lines, self._text = (self._text + new.decode()).split("\n")
        for at, pid, what, generation in map(str.split, lines):
            self.when[int(pid)].setdefault(what, float(at))
            if what == "step":
                self.first[int(generation)].setdefault(int(pid), float(at))
                self.last[int(generation)] = float(at)

    def steps(self, ranks: int = RANKS, without: int = 0) -> dict[int, float]:
        """Waits until so many ranks have applied a step in a newer generation; gives when, by pid."""
        until_s = time.monotonic() + LIMIT_S
        while time.monotonic() < until_s:
            self.read()
            for generation in sorted(number for number in self.first if number > self.generation):
                if len(self.first[generation]) == ranks and without not in self.first[generation]:
                    self.generation = generation
                    return self.first[generation]
            time.sleep(0.02)
        raise TimeoutError(f"no step of {ranks} ranks after generation {self.generation} within {LIMIT_S:g} s")


def train(folder: pathlib.Path) -> None:
    """A rank."""
    notes = Notes(folder)
    notes.add_start()
    import torch
    from torch import nn

    notes.add("torch")
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 36, 10)
    )
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    notes.add("optimizer")
    images, labels = torch.randn(SLOTS * BATCH * 10, 1, 14, 14), torch.randint(0, 10, (SLOTS * BATCH * 10,))
    data = torch.utils.data.TensorDataset(images, labels)
    import farandole
    import farandole.torch as fl

    notes.add("farandole")
    job = fl.Job(model, optimizer, data, slots=SLOTS, batch_size=BATCH, checkpoint=folder / "run", checkpoint_steps=50)
    notes.add("init")
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    optimizer.register_step_post_hook(lambda *_: notes.add("step", farandole.generation() + restarts))
    is_first = True

    @job.step
    def step(batch: list[torch.Tensor]) -> None:
        nonlocal is_first
        if is_first:
            notes.add("state")
            (folder / f"members.{os.getpid()}").write_text(farandole.members())
            os.replace(folder / f"members.{os.getpid()}", folder / "members")
        is_first = False
        if (folder / "stop").exists():
            job.stop()
        torch.nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()

    for _ in job.epochs(1_000_000):
        pass


Times = collections.defaultdict[str, list[float]]


def measure_job(folder: pathlib.Path, events: int, times: Times) -> None:
    """Disturbs a training under farandolerun."""
    notes, draw = Notes(folder), random.Random(1)
    words = ["-m", "farandole.runner", "-np", str(RANKS), "--elastic", "--blacklist-cooldown-range", "1", "1"]
    with running(folder, [*words, sys.executable, __file__, "--train", "--folder", str(folder)]):
        ranks = notes.steps()
        for kind in draw.sample([*ENDS] * events, events * len(ENDS)):
            time.sleep(draw.uniform(0.3, 1))
            lost, at_ms = draw.choice([*ranks]), now_ms()
            os.kill(lost, ENDS[kind])
            left = notes.steps(RANKS - 1, lost)
            times[f"{kind}: the next step"].append(max(left.values()) - at_ms)
            if kind == "stopped":
                os.kill(lost, signal.SIGCONT)
            ranks = notes.steps()
            old = [at_ms for number, at_ms in notes.last.items() if number < notes.generation]
            times["a newcomer joins"].append(max(ranks.values()) - max(old))
            for new in ranks.keys() - left.keys():
                note_newcomer(notes.when[new], times)


def note_newcomer(when: dict[str, float], times: Times) -> None:
    """What its time was spent with."""
    times["newcomer: first step"].append(when["step"] - when["start"])
    for before, what in itertools.pairwise(when):
        times[f"    {before} to {what}"].append(when[what] - when[before])


def measure_torchrun(folder: pathlib.Path, events: int, times: Times) -> None:
    """The same script; each time all ranks begin again from the last checkpoint."""
    notes, draw = Notes(folder), random.Random(1)
    words = ["-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--max-restarts", str(events)]
    with running(folder, [*words, "--standalone", __file__, "--train", "--folder", str(folder)]):
        ranks = notes.steps()
        for _ in range(events):
            time.sleep(draw.uniform(0.3, 1))
            at_ms = now_ms()
            os.kill(draw.choice([*ranks]), signal.SIGKILL)
            ranks = notes.steps()
            times["torchrun, killed: the next step"].append(max(ranks.values()) - at_ms)


@contextlib.contextmanager
def running(folder: pathlib.Path, words: list[str]) -> Iterator[None]:
    """A launcher, which ends by itself when the training is told to stop."""
    with open(folder / "output", "w") as output:
        launcher = subprocess.Popen([sys.executable, *words], stdout=output, stderr=subprocess.STDOUT)
    try:
        yield
        (folder / "stop").touch()
        launcher.wait(LIMIT_S)
    except (TimeoutError, OSError) as error:
        raise RuntimeError((folder / "output").read_text()[-4000:]) from error
    finally:
        launcher.terminate()
        launcher.wait()


def use_of(pid: int) -> str:
    """What a process has."""
    process = pathlib.Path(f"/proc/{pid}")
    rollup = dict(line.split()[:2] for line in (process / "smaps_rollup").read_text().splitlines()[1:])
    status = dict(line.split()[:2] for line in (process / "status").read_text().splitlines() if line[-1:].strip())
    return (
        f"RSS {rollup['Rss:']} KiB, PSS {rollup['Pss:']} KiB, {len(os.listdir(process / 'fd'))} descriptors, "
        f"{status['Threads:']} threads"
    )


def measure_generations(folder: pathlib.Path, count: int) -> None:
    """One of the ranks is killed and another forked until there were so many generations; the others stay."""
    import torch
    import torch._dynamo  # noqa: F401  which an optimizer imports

    notes, before = Notes(folder), sorted(os.listdir("/dev/shm"))
    (folder / "key").touch(mode=0o600)
    (folder / "key").write_bytes(secrets.token_bytes(32))
    os.environ |= {"FARANDOLE_ELASTIC": "1", "FARANDOLE_KEY_FILE": str(folder / "key")}

    def fork(**variables: str) -> int:
        if (pid := os.fork()) == 0:
            os.environ.update(variables)
            try:
                train(folder)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        return pid

    with socket.create_server(("127.0.0.1", 0)) as free:
        place = {"FARANDOLE_SIZE": "3", "FARANDOLE_ADDRESS": f"127.0.0.1:{free.getsockname()[1]}"}
    pids = [fork(FARANDOLE_RANK=str(rank), **place) for rank in range(3)]
    notes.steps(3)
    begin_s, next_print = time.monotonic(), 1
    while notes.generation < count:
        os.kill(pids[2], signal.SIGKILL)
        os.waitpid(pids[2], 0)
        notes.steps(2, pids[2])
        pids[2] = fork(FARANDOLE_MEMBERS=(folder / "members").read_text())
        notes.steps(3)
        if notes.generation >= next_print:
            next_print += 100
            shared = len(os.listdir("/dev/shm"))
            print(f"generation {notes.generation}, {time.monotonic() - begin_s:.0f} s, {shared} files in /dev/shm")
            for rank, pid in enumerate(pids[:2]):
                print(f"  rank {rank}: {use_of(pid)}", flush=True)
    (folder / "stop").touch()
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    print(f"exit codes {codes}; left in /dev/shm: {sorted({*os.listdir('/dev/shm')} - {*before}) or 'nothing'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--events", type=int, default=20)
    parser.add_argument("--generations", type=int, default=0, help="instead: so many, of which the use is shown")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        return train(given.folder)
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        print(f"load {os.getloadavg()}, {os.cpu_count()} cores", flush=True)
        if given.generations:
            return measure_generations(pathlib.Path(one), given.generations)
        times: Times = collections.defaultdict(list)
        measure_job(pathlib.Path(one), given.events, times)
        measure_torchrun(pathlib.Path(other), given.events, times)
    print(f"{'':50} {'count':>6} {'p50':>8} {'p99':>8} {'max':>8}")
    for what, all_ms in times.items():
        by_size = sorted(all_ms)
        p50, p99 = by_size[len(by_size) // 2], by_size[len(by_size) * 99 // 100]
        print(f"{what:50} {len(by_size):6} {p50:8.0f} {p99:8.0f} {by_size[-1]:8.0f}")
    print(f"load {os.getloadavg()}")


if __name__ == "__main__":
    main()
