"""Cuts the links between played hosts at random while a Job trains on them, and looks at what becomes of it.

    python test/fault/cut_links.py --hosts 3 --cuts 20 --seed 1

Two ranks of each host train. A cut takes all links of a host, all links, one link, or one direction of one, and heals
before anybody has noticed, before those that are left out give up, or after that. Ranks that end with exit code 75
begin again as newcomers once all links are whole; if none is left, all begin from the checkpoint. Prints what was cut
and what ranks said. Fails unless the weights are those of an undisturbed training of as many steps, each rank that was
left out has said why, and of two parts only one has trained.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import os
import pathlib
import random
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple

TEST = pathlib.Path(__file__).resolve().parents[1]
sys.path.append(str(TEST / "python"))

from hosts import HostsAtSwitch  # noqa: E402

RANKS = 2  # of each host
HALTED = 75
LENGTHS_S = {"short": (0.2, 1.2), "long": (3.0, 9.0), "lasting": (14.0, 18.0)}
WHY = re.compile(
    r"farandole: (\d+ of \d+ ranks (?:is|are) left(?:, \d+ ended)?, (?:and the other \d+ may go on without (?:it|them)"
    r"|but they could not begin a generation)"
    r"|the job has gone on without this process: its generation \d+ of \d+ ranks? began while .*"
    r"|no member of the job can be reached at any of the \d+ addresses .*)"
)
LIMIT_S = 3600.0


def train(folder: pathlib.Path, steps: int) -> None:
    """A rank: trains so many steps, or slowly until it is to stop, and notes each step in a file of all."""
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    import farandole
    import farandole.torch as fl
    import job_training

    folder.mkdir(exist_ok=True)
    torch.manual_seed(5)
    model, generator = job_training.MODELS["conv"](), torch.Generator().manual_seed(7)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    data = TensorDataset(
        torch.randn(640, 1, 6, 6, generator=generator), torch.randint(0, 5, (640,), generator=generator)
    )
    job = fl.Job(
        model, optimizer, data, slots=8, batch_size=4, seed=3, checkpoint=folder / "run", checkpoint_steps=20,
        schedulers=torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.99),
    )  # fmt: skip
    log = os.open(folder / "steps", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    seen = (-1, -1)

    @job.step
    def step(batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        nonlocal seen
        now = (farandole.generation(), job.steps)
        if now != seen:
            if now[0] != seen[0] and (members := farandole.members()):
                (folder / f"members.{os.getpid()}").write_text(members)
                os.replace(folder / f"members.{os.getpid()}", folder / "members")
            seen = now
            line = f"{os.environ.get('BEGAN', 0)} {now[0]} {now[1]} {os.getpid()} {time.monotonic_ns() // 1_000_000}"
            os.write(log, f"{line}\n".encode())
            time.sleep(0 if steps else 0.05)
        if job.steps == steps - 1 or (folder / "stop").exists():
            job.stop()
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        return {"loss": loss}

    for _ in job.epochs(1_000_000):
        pass
    print("weights", job.digest(), "steps", job.steps, flush=True)


class Rank(NamedTuple):
    """A process of a training."""

    host: int
    process: subprocess.Popen[bytes]
    output: pathlib.Path


class Training:
    """Ranks on hosts, which are started again as often as they halt."""

    def __init__(self, folder: pathlib.Path, hosts: HostsAtSwitch, ranks: int = RANKS) -> None:
        self.folder, self.hosts, self.ranks = folder, hosts, ranks
        self.size = ranks * len(hosts.addresses)
        self.running: list[Rank] = []
        self.halted: list[Rank] = []  # and not started again
        self.lines: list[str] = []  # the last ones of those that have ended well
        self.said: collections.Counter[str] = collections.Counter()
        self.began = 0
        self._until_s = time.monotonic() + LIMIT_S
        self._begin()

    def _begin(self) -> None:
        """Starts all as a job of its own."""
        self.began += 1
        key = self.folder / f"key.{self.began}"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(32))
        place = {"FARANDOLE_SIZE": str(self.size), "FARANDOLE_ADDRESS": f"{self.hosts.addresses[0]}:29500"}
        for rank in range(self.size):
            self._start(rank // self.ranks, FARANDOLE_RANK=str(rank), **place)

    def _start(self, host: int, **variables: str) -> None:
        key = str(self.folder / f"key.{self.began}")
        own = {"FARANDOLE_ELASTIC": "1", "FARANDOLE_KEY_FILE": key, "FARANDOLE_INTERFACE": "eth0"}
        command = [*self.hosts.enter(host), sys.executable, __file__, "--train", str(self.folder)]
        output = self.folder / f"output.{secrets.token_hex(4)}"
        environment = os.environ | own | variables | {"BEGAN": str(self.began)}
        with open(output, "w") as file:
            process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
        self.running.append(Rank(host, process, output))

    def take_ends(self) -> None:
        """Notes how ranks have ended."""
        for rank in [one for one in self.running if one.process.poll() is not None]:
            self.running.remove(rank)
            code, text = rank.process.returncode, rank.output.read_text()
            if code == 0:
                self.lines += text.splitlines()[-1:]
                continue
            found = [one for line in text.splitlines() if (one := WHY.fullmatch(line))]
            assert code == HALTED and len(found) == 1, f"code {code} on host {rank.host}: {text}"
            self.said[re.sub(r"\d+", "N", found[0][1])] += 1
            self.halted.append(rank)

    def wait(self, is_over: Callable[[], object], starts: bool = False) -> None:
        """Until that is so. ``starts``: ranks that halt meanwhile are started again."""
        while not is_over():
            assert time.monotonic() < self._until_s, "it does not go on"
            self.take_ends()
            if starts and self.halted:
                self._start_again()
            time.sleep(0.1)

    def stop(self) -> set[str]:
        """Has all stop after the same step. Returns their last lines."""
        (self.folder / "stop").touch()
        self.wait(lambda: not self.running)
        return {*self.lines}

    def undisturbed(self) -> str:
        """What a training of as many steps says that nothing happens to."""
        steps = self.lines[0].split()[-1]
        command = [sys.executable, __file__, "--train", f"{self.folder}/calm", "--steps", steps]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]

    def _start_again(self) -> None:
        halted, self.halted = self.halted, []
        if not self.running:
            return self._begin()
        for rank in halted:
            self._start(rank.host, FARANDOLE_MEMBERS=(self.folder / "members").read_text())

    def steps(self) -> list[list[int]]:
        """Of each step that a rank has begun: which job, generation and step, the rank's pid, and when, in ms."""
        file = self.folder / "steps"
        return [[int(word) for word in line.split()] for line in file.read_text().splitlines()] if file.exists() else []

    def has_all(self) -> bool:
        """Whether all train together."""
        steps = self.steps()
        trains = {pid for *generation, _, pid, _ in steps if generation == steps[-1][:2]}
        return len(self.running) == self.size and trains >= {rank.process.pid for rank in self.running}


def links_of_cut(kind: str, count: int, draw: random.Random) -> list[tuple[int, int]]:
    """Which directions of links between so many hosts are cut."""
    both = [*itertools.permutations(range(count), 2)]
    one, other = draw.choice(both)
    return {
        "all": both,
        "host": [link for link in both if one in link],
        "link": [(one, other), (other, one)],
        "direction": [(one, other)],
    }[kind]


def beside(steps: list[list[int]]) -> int:
    """How many steps ranks have begun in a generation when a newer one had begun one: each may one that it loses."""
    newest, late = [0, 0], collections.Counter[int]()
    for *generation, _, pid, _ in steps:
        newest = max(newest, generation)
        late[pid] += generation < newest
    return sum(count - 1 for count in late.values() if count > 1)


def disturb(training: Training, given: argparse.Namespace) -> collections.Counter[str]:
    """Cuts links so often. Returns what was done."""
    draw, done = random.Random(given.seed), collections.Counter[str]()

    def pause(length_s: float, starts: bool) -> None:
        end_s = time.monotonic() + length_s
        training.wait(lambda: time.monotonic() >= end_s, starts)

    training.wait(training.has_all)
    for _ in range(given.cuts):
        if draw.random() < 0.8:  # else also while they recover
            training.wait(training.has_all, True)
        pause(draw.uniform(0, 3), True)
        kind, length = draw.choice(["all", "host", "link", "direction"]), draw.choice([*LENGTHS_S])
        links = links_of_cut(kind, given.hosts, draw)
        cut_ms = time.monotonic_ns() // 1_000_000
        for link in links:
            training.hosts.cut(*link)
        pause(draw.uniform(*LENGTHS_S[length]), False)
        for link in links:
            training.hosts.heal(*link)
        done[f"{kind}, {length}"] += 1
        steps = training.steps()
        times = [cut_ms, *sorted(at_ms for *_, at_ms in steps if at_ms > cut_ms), time.monotonic_ns() // 1_000_000]
        longest_ms = max(then - now for now, then in itertools.pairwise(times))
        trains = len({pid for *step, pid, _ in steps if step == steps[-1][:3]})
        print(f"{kind}, {length}: {links}; {trains} train in {steps[-1][:2]}, after {longest_ms} ms", flush=True)
    training.wait(training.has_all, True)
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--cuts", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--train", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        return train(given.train, given.steps)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        with HostsAtSwitch(given.hosts) as hosts:
            training = Training(folder, hosts)
            done = disturb(training, given)
            found = training.stop()
        wanted = training.undisturbed()
        print(f"{sum(done.values())} cuts: {dict(done)}; {training.began - 1} times all began again")
        for said, count in training.said.items():
            print(f"{count} ranks: {said}")
        print(f"{len(training.lines)} ranks ended with {found}; undisturbed: {wanted}")
        print(f"steps of two generations beside one another: {beside(training.steps())}")
        sys.exit(found != {wanted} or beside(training.steps()) > 0)


if __name__ == "__main__":
    main()
