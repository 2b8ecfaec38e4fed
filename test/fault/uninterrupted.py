"""Disturbs a training at random, and compares its weights with those of an undisturbed one.

    python test/fault/uninterrupted.py --model conv --events 500 --seed 1
    python test/fault/uninterrupted.py --model conv --all-at-once 10

Runs examples/uninterrupted.py alone, and by ``farandolerun --job`` on up to --ranks ranks of this host. Of these it
kills one, rank 0 for certain, two at once, a second one while the others recover, and newcomers that have not joined;
stops one until the others have gone on; has one leave by SIGTERM; changes the number of slots of the host; kills the
launcher and starts it again. --all-at-once kills the launcher and all ranks, so that the training goes on from its
checkpoint, at last on other numbers of ranks. Fails unless all steps and the last state have the same digests, every
event took place, and nobody printed a traceback. With --folder the files, and a job that does not go on, are left.
"""

import argparse
import collections
import contextlib
import json
import math
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Container

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
STEPS_PER_EPOCH = 32
CHECKPOINT_STEPS = 20  # as the example has it
NEWCOMER_S = 3.0  # in which one is killed after its start: it imports torch and joins
STEPS_PER_EVENT = 14
STALL_S = 180  # without a step, or until ranks are there that an event needs
#: How often each kind comes, and how many ranks it needs; half of them wait for one more.
KINDS = {
    "kill": (7, 2), "kill rank 0": (3, 2), "kill two": (2, 3), "kill one more": (3, 3), "kill newcomer": (2, 2),
    "stop": (1, 3), "leave": (3, 2), "slots": (2, 1), "launcher": (1, 1),
}  # fmt: skip


class Training:
    """A disturbed run: its launchers one after the other, and its ranks, which outlive them."""

    def __init__(self, folder: pathlib.Path, script: list[str], ranks: int, pause: float) -> None:
        self.folder, self.most, self.slots = folder, ranks, ranks
        self.output, self.chain = folder / "output", folder / "run" / "chain.jsonl"
        self.step, self.generations = -1, list[tuple[int, int]]()  # the last one; first step and ranks of each
        self.restored = 0  # times that only a checkpoint was left
        self.leaving = set[int]()  # if the others are lost these stop, which is another trial
        self._read = 0
        hosts = folder / "hosts"
        hosts.write_text(f"#!/bin/sh\ncat {folder}/slots\n")
        hosts.chmod(0o755)
        options = ["--job", f"{folder}/job", "--host-discovery-script", str(hosts), f"--max-np={ranks}"]
        options += ["--min-np=1", "--blacklist-cooldown-range", "0.1", "0.5"]
        self.command = [sys.executable, "-m", "farandole.runner", *options, *script, f"--folder={folder}/run"]
        self.command.append(f"--pause={pause}")
        self.set_slots(ranks)
        self.launch()

    def launch(self) -> None:
        with open(self.output, "ab") as output:
            self.launcher = subprocess.Popen(self.command, cwd=EXAMPLES, stdout=output, stderr=subprocess.STDOUT)

    def relaunch(self, after_s: float = 0.0) -> None:
        self.launcher.kill()
        self.launcher.wait()
        time.sleep(after_s)
        self.launch()

    def hurry(self) -> None:
        """Has ranks that don't pause replace those that do, one by one."""
        self.command[-1] = "--pause=0"
        self.set_slots(self.most)
        self.relaunch()
        for rank in self.ranks():
            self.until(lambda: sum(self.ranks().values()) > 1)
            self.leave(rank)

    def leave(self, rank: int) -> bool:
        self.leaving.add(rank)
        return send(rank, signal.SIGTERM)

    def set_slots(self, slots: int) -> None:
        self.slots = slots
        new = self.folder / "slots.new"
        new.write_text(f"localhost:{slots}\n")
        new.replace(self.folder / "slots")

    def ranks(self) -> dict[int, bool]:
        """Process ids, of whichever launcher, and whether each has joined and is not to leave."""
        found = {}
        for path in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (path / "cmdline").read_bytes().split(b"\0")
                if b"uninterrupted.py" in words[1:2] and f"--folder={self.folder}/run".encode() in words:
                    threads = {comm.read_text().strip() for comm in (path / "task").glob("*/comm")}
                    found[int(path.name)] = "farandole-eng" in threads and int(path.name) not in self.leaving
        return found

    def newcomers(self, ranks: Container[int]) -> list[int]:
        """Waits for ranks that are none of these."""
        found = list[int]()
        self.until(lambda: found.extend(self.ranks().keys() - ranks) or bool(found))
        return found

    def rank_0(self, ranks: list[int]) -> int | None:
        """The one that writes the chain."""
        for rank in ranks:
            with contextlib.suppress(OSError):
                if any(os.readlink(file) == str(self.chain) for file in pathlib.Path(f"/proc/{rank}/fd").iterdir()):
                    return rank
        return None

    def follow(self) -> None:
        """Reads what the chain has got since."""
        with contextlib.suppress(OSError), open(self.chain) as chain:
            chain.seek(self._read)
            lines = chain.read().rpartition("\n")[0]
            self._read += len(lines) + bool(lines)
            for text in lines.splitlines():
                with contextlib.suppress(ValueError):  # of a rank that was killed within a line
                    line = json.loads(text)
                    self.step = line.get("step", self.step)
                    if "generation" in line:
                        self.restored += line["next_step"] < self.step  # one step back is that of a loss
                        self.generations.append((line["next_step"], line["generation"]["size"]))

    def until(self, reached, limit_s: float = STALL_S) -> bool:
        """Waits for something, no longer than the training lasts. Returns whether it came."""
        until_s = time.monotonic() + limit_s
        while time.monotonic() < until_s and self.launcher.poll() is None:
            self.follow()
            if reached():
                return True
            time.sleep(0.03)
        return False

    def kill_all(self) -> None:
        """The launcher, its supervisor and all ranks."""
        ranks = list(self.ranks())
        parents = {int(pathlib.Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1]) for rank in ranks}
        for process in [self.launcher.pid, *parents - {1, os.getpid()}, *ranks]:
            send(process, signal.SIGKILL)
        self.launcher.wait()
        while self.ranks():
            time.sleep(0.01)


def send(process: int, number: signal.Signals) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)
        return True
    return False


def draw_kind(draw: random.Random, training: Training) -> tuple[str, int]:
    """And how many ranks are to be there."""
    kind = draw.choices([*KINDS], [weight for weight, _ in KINDS.values()])[0]
    least = KINDS[kind][1]
    return (kind, min(least + draw.randint(0, 1), training.slots)) if least <= training.slots else ("slots", 1)


def disturb(training: Training, kind: str, least: int, draw: random.Random) -> bool:
    """Does one thing to the training. Returns whether there was somebody to do it to."""
    ranks = training.ranks()
    members = [rank for rank, has_joined in ranks.items() if has_joined]
    draw.shuffle(members)
    if kind == "launcher":
        training.relaunch(draw.uniform(0.0, 0.5))
        return True
    if kind == "slots":
        training.set_slots(draw.choice([n for n in range(1, training.most + 1) if n != training.slots]))
        return True
    if len(members) < least:
        return False
    first = training.rank_0(members) if kind == "kill rank 0" else members[0]
    if first is None:
        return False
    if kind == "stop":
        return stop(training, first)
    if kind == "leave":
        return training.leave(first)
    if not send(first, signal.SIGKILL):
        return False
    if kind == "kill one more":
        time.sleep(draw.uniform(0.0, 0.1))
    if kind == "kill newcomer":
        members[1:] = training.newcomers(ranks)
        time.sleep(draw.uniform(0.0, NEWCOMER_S))
    others = members[1:2] if kind in ("kill two", "kill one more", "kill newcomer") else []
    return all(send(rank, signal.SIGKILL) for rank in others)


def stop(training: Training, rank: int) -> bool:
    """Stops a rank until the others have gone on."""
    before = len(training.generations)
    if not send(rank, signal.SIGSTOP):
        return False
    has_gone_on = training.until(lambda: any(first < training.step for first, _ in training.generations[before:]))
    return send(rank, signal.SIGCONT) and has_gone_on


def disturb_often(training: Training, given: argparse.Namespace, draw: random.Random) -> str:
    """Until there were --events; then waits for the end. Returns what was done."""
    done = collections.Counter[str]()
    while sum(done.values()) < given.events:
        kind, least = draw_kind(draw, training)
        if not training.until(lambda least=least: sum(training.ranks().values()) >= least):
            print(f'not {least} ranks for "{kind}"', flush=True)
            break
        due = training.step + draw.expovariate(1 / given.every)  # at once is while newcomers get the state
        training.until(lambda due=due: training.step >= due)
        if not disturb(training, kind, least, draw):
            continue
        done[kind] += 1
        print(f"{time.strftime('%H:%M:%S')} {sum(done.values())} {kind}, step {training.step}", flush=True)
    training.hurry()
    joins = sum(size > before for (_, size), (_, before) in zip(training.generations[1:], training.generations))
    return f"{sum(done.values())} events: {dict(done)}; {joins} times more ranks"


def kill_all_often(training: Training, given: argparse.Namespace, draw: random.Random) -> str:
    """Kills all, first with the same number of ranks, then with others."""
    again, killed = [], training.step
    for number in range(2 * given.all_at_once):
        due = killed + draw.uniform(0.5, 1.5) * 2 * CHECKPOINT_STEPS
        if not training.until(lambda due=due: training.step >= due):
            break
        training.kill_all()
        training.follow()
        killed, before = training.step, len(training.generations)
        if number >= given.all_at_once:
            training.set_slots(draw.choice([n for n in range(1, training.most + 1) if n != training.slots]))
        training.launch()
        if not training.until(lambda before=before: len(training.generations) > before):
            break
        first, ranks = training.generations[before]
        again.append(killed + 1 - first)
        print(f"killed after step {killed}, goes on with step {first} on {ranks} ranks", flush=True)
    return f"{len(again)} times all at once; steps that ran again: {again}"


def states(folder: pathlib.Path) -> tuple[int, str]:
    """After how many steps the last state was, and its digest."""
    lines = [json.loads(text) for text in (folder / "chain.jsonl").read_text().splitlines() if '"state"' in text]
    return max((line["state"], line["sha256"]) for line in lines)


def judge(training: Training, calm: pathlib.Path, events: int, done: str, took_s: float) -> bool:
    """Prints what came of it. Returns whether it is as it should be."""
    is_stalled = training.launcher.poll() is None
    output = training.output.read_text(errors="replace")
    verify = [sys.executable, "-m", "farandole", "verify", str(training.chain.parent), str(calm)]
    said = subprocess.run(verify, capture_output=True, text=True, check=False)
    wanted, found = states(calm), states(training.chain.parent)
    weights = set(re.findall(r"weights ([0-9a-f]{64})", output))
    sizes = collections.Counter(size for _, size in training.generations)
    tracebacks, halted = output.count("Traceback"), output.count("has halted")
    code = None if is_stalled else training.launcher.returncode
    left = [] if is_stalled else [*training.ranks()]
    print(f"{done}; {len(training.generations)} generations, by ranks {dict(sizes)}", end="; ")
    print(f"{halted} ranks halted; {training.restored} times only a checkpoint was left; {took_s:.0f} s")
    print(f"exit code {code}, tracebacks {tracebacks}, ranks left behind {left}; {said.stdout}{said.stderr}", end="")
    print(f"steps and state: {found}, undisturbed {wanted}; weights {weights or 'not shown'}", flush=True)
    is_whole = int(done.partition(" ")[0]) == events
    return is_whole and said.returncode == 0 and wanted == found and code == 0 and not tracebacks and not left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="conv", choices=("conv", "mlp", "transformer"))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--events", type=int, default=20)
    parser.add_argument("--all-at-once", type=int, default=0, help="times, with as many ranks, and again with others")
    parser.add_argument("--every", type=float, default=2, help="steps from one event to the next, on average")
    parser.add_argument("--pause", type=float, default=0.08, help="seconds of a disturbed batch")
    parser.add_argument("--seed", type=int, default=1, help="of the training and the events")
    parser.add_argument("--folder", type=pathlib.Path)
    given = parser.parse_args()
    # Ranks start in half of the time without torch's compiler, which they don't use: see sitecustomize.py there.
    os.environ["FARANDOLE_TEST_QUICK_TORCH"] = "1"
    os.environ["PYTHONPATH"] = f"{EXAMPLES.parent}/test/site:{os.environ.get('PYTHONPATH', '')}"
    events = 2 * given.all_at_once or given.events
    steps = events * (3 * CHECKPOINT_STEPS if given.all_at_once else STEPS_PER_EVENT) + 100
    epochs, start_s = math.ceil(steps / STEPS_PER_EPOCH), time.monotonic()
    with contextlib.nullcontext(given.folder) if given.folder else tempfile.TemporaryDirectory() as name:
        folder, draw = pathlib.Path(name).resolve(), random.Random(given.seed)
        folder.mkdir(parents=True, exist_ok=True)
        script = [sys.executable, "uninterrupted.py", f"--model={given.model}", f"--seed={given.seed}"]
        script += ["--batch-size=4", f"--images={8 * 4 * STEPS_PER_EPOCH}", f"--epochs={epochs}"]
        print(f"{given}: {epochs * STEPS_PER_EPOCH} steps", flush=True)
        alone = [*script, f"--folder={folder}/calm"]
        calm = subprocess.Popen(alone, cwd=EXAMPLES, stdout=subprocess.DEVNULL)
        training = Training(folder, script, given.ranks, given.pause)
        done = (kill_all_often if given.all_at_once else disturb_often)(training, given, draw)
        last = -1
        while training.step > last:  # as long as it goes on
            last = training.step
            training.until(lambda last=last: training.step >= last + 100)
        took_s = time.monotonic() - start_s
        is_good = calm.wait() == 0 and judge(training, folder / "calm", events, done, took_s)
        if not given.folder:
            training.kill_all()
    sys.exit(not is_good)


if __name__ == "__main__":
    main()
