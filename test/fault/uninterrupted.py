"""Disturbs a training at random until it ends, and compares its weights with those of an undisturbed one.

    python test/fault/uninterrupted.py --ranks 4 --epochs 40 --every 15 --seed 1

Runs examples/uninterrupted.py alone, and by ``farandolerun --elastic --job`` on up to --ranks ranks of this host, of
which it kills one or two, stops one until the others have gone on, or kills the launcher and starts it again, every
--every steps on average. Prints how often what was done, and fails unless all steps and digests are the same. For a
rank that is to be killed while the others recover, two deaths follow one another within 50 ms.
"""

import argparse
import collections
import contextlib
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
FROZEN_S = 3.5  # the others have left a stopped rank out by then
LIMIT_S = 3600


class Training:
    """A disturbed run: its launchers one after the other, and its ranks, which outlive them."""

    def __init__(self, folder: pathlib.Path, given: argparse.Namespace) -> None:
        self.folder = folder
        script = [sys.executable, "uninterrupted.py", f"--folder={folder}/run", f"--epochs={given.epochs}"]
        options = [f"-np={given.ranks}", "--elastic", f"--job={folder}/job", "--blacklist-cooldown-range", "1", "2"]
        self.command = [sys.executable, "-m", "farandole.runner", *options, *script]
        self.launcher = self._launch()

    def _launch(self) -> subprocess.Popen[bytes]:
        with open(self.folder / "output", "ab") as output:
            return subprocess.Popen(self.command, cwd=EXAMPLES, stdout=output, stderr=subprocess.STDOUT)

    def ranks(self) -> list[int]:
        """Process ids, of whichever launcher."""
        found = []
        for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = path.read_bytes().split(b"\0")
                if b"uninterrupted.py" in words[1:2] and f"--folder={self.folder}/run".encode() in words:
                    found.append(int(path.parent.name))
        return found

    def steps(self) -> int:
        """How many have been taken, those that a restart from a checkpoint has repeated as well."""
        with contextlib.suppress(OSError):
            return (self.folder / "run" / "chain.jsonl").read_text().count('"step"')
        return 0

    def relaunch(self) -> None:
        self.launcher.kill()
        self.launcher.wait()
        time.sleep(0.5)
        self.launcher = self._launch()


def disturb(training: Training, draw: random.Random) -> str:
    """Does one thing to the training. Returns what."""
    kind = draw.choices(["kill", "kill two", "kill again", "stop", "launcher"], [10, 2, 3, 2, 1])[0]
    ranks = training.ranks()
    draw.shuffle(ranks)
    if kind == "launcher":
        training.relaunch()
        return kind
    if len(ranks) < 3:  # a job that nobody is left of starts anew, which is another trial
        return "nothing"
    with contextlib.suppress(ProcessLookupError):
        if kind == "stop":
            os.kill(ranks[0], signal.SIGSTOP)
            time.sleep(FROZEN_S)
            os.kill(ranks[0], signal.SIGCONT)
            return kind
        os.kill(ranks[0], signal.SIGKILL)
        if kind != "kill":
            time.sleep(0.0 if kind == "kill two" else draw.uniform(0.0, 0.05))
            os.kill(ranks[1], signal.SIGKILL)
    return kind


def digests(text: str) -> set[str]:
    return set(re.findall(r"weights ([0-9a-f]{64})", text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--every", type=float, default=15, help="steps")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, draw = pathlib.Path(name), random.Random(given.seed)
        calm = [sys.executable, "uninterrupted.py", f"--folder={folder}/calm", f"--epochs={given.epochs}"]
        wanted = digests(subprocess.run(calm, cwd=EXAMPLES, capture_output=True, text=True, check=True).stdout)
        training, done, due = Training(folder, given), collections.Counter[str](), given.every
        until_s = time.monotonic() + LIMIT_S
        while training.launcher.poll() is None:
            assert time.monotonic() < until_s, (folder / "output").read_text(errors="replace")[-4000:]
            if training.steps() >= due:
                done[disturb(training, draw)] += 1
                due = training.steps() + draw.expovariate(1 / given.every)
            time.sleep(0.02)
        while left := training.ranks():
            assert time.monotonic() < until_s, f"left behind: {left}"
            time.sleep(0.1)
        verify = [sys.executable, "-m", "farandole", "verify", f"{folder}/run", f"{folder}/calm"]
        said = subprocess.run(verify, capture_output=True, text=True, check=False)
        found = digests((folder / "output").read_text(errors="replace"))  # none of ranks whose launcher was killed
        print(f"{sum(done.values()) - done['nothing']} disturbances: {dict(done)}")
        print(f"exit code {training.launcher.returncode}; digests {found or 'not shown'}, undisturbed {wanted}")
        print(said.stdout, end="")
        sys.exit(said.returncode != 0 or not found <= wanted)


if __name__ == "__main__":
    main()
