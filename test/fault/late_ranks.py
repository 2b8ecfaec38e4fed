"""Is the right rank named, for the right cause, and how soon? And nobody in healthy runs?

    python test/fault/late_ranks.py --tries 20 --healthy 200

Two ranks, each on a core of its own, train with steps of about 40 ms. From step 30 on one of them is slower: in its
backward pass, in its loader, by its garbage collector, or by a busy process on its core. Prints for each cause and
share of a step how often the right rank was named for the right cause, how often within 10 steps, and how often
anything else was said.
"""

import argparse
import contextlib
import gc
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter

import torch

BEGIN, STEP_S = 30, 0.04
CAUSES = {"backward": "computing", "loader": "input", "collector": "garbage collection", "neighbour": "processor"}
#: A busy process gets about this share of a core beside a rank.
NICENESS = {0.05: 14, 0.1: 10, 0.3: 5}


def compute(seconds):
    """For so much of this thread's own time: a process beside it makes that last longer."""
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


class Slow(torch.autograd.Function):
    """A layer whose backward pass takes long: it makes the call ``pause(seconds)``."""

    @staticmethod
    def forward(ctx, x, pause, seconds):
        ctx.pause, ctx.seconds = pause, seconds
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.pause(ctx.seconds)
        return gradient, None, None


class Samples(torch.utils.data.IterableDataset):
    seconds = 0.0

    def __iter__(self):
        while True:
            compute(self.seconds)
            yield torch.zeros(4)


def make_garbage(seconds):
    """As many objects as the collector needs so long for."""
    objects, took_s = [], 0.0
    while took_s < seconds:
        objects += [[i] for i in range(20_000)]
        began_s = time.perf_counter()
        gc.collect()
        took_s = time.perf_counter() - began_s
    return objects


@contextlib.contextmanager
def neighbour(share):
    code = "while True: pass"
    process = subprocess.Popen(["nice", "-n", str(NICENESS[share]), sys.executable, "-c", code])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def train(cause, share, steps):
    """What a rank runs. Rank 0 prints in which step somebody was named, and the line."""
    import farandole.torch as hvd

    hvd.init()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[hvd.local_rank() % len(cores)]})
    is_late = hvd.rank() == 1
    model, samples = torch.nn.Linear(4, 1), Samples()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
    batches = iter(torch.utils.data.DataLoader(samples))
    lines, objects = 0, None
    gc.disable()
    with tempfile.TemporaryFile("w+") as said, contextlib.ExitStack() as stack:
        os.dup2(said.fileno(), 2)
        for step in range(steps):
            late_s = share * STEP_S if is_late and step >= BEGIN else 0
            samples.seconds = late_s if cause == "loader" else 0
            if late_s and cause == "neighbour" and step == BEGIN:
                stack.enter_context(neighbour(share))
            if is_late and cause == "collector" and objects is None:
                objects = make_garbage(2 * share * STEP_S)
            if late_s and cause == "collector" and step % 2:
                gc.collect()
            optimizer.zero_grad()
            batch = next(batches).requires_grad_()
            model(Slow.apply(batch, compute, STEP_S + (late_s if cause == "backward" else 0))).sum().backward()
            optimizer.step()
            said.seek(0)
            found = [line for line in said if "makes all wait" in line]
            for line in found[lines:] if hvd.rank() == 0 else ():
                print(step - BEGIN, line.strip(), flush=True)
            lines = len(found)


def run(cause, share, steps):
    """(step, rank, what) of each line."""
    rank = [sys.executable, __file__, "--rank", cause, str(share), str(steps)]
    command = [sys.executable, "-m", "farandole.runner", "-np", "2", *rank]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    found = re.findall(r"(-?\d+) \S+ \S+ warning: rank (\d) .* in each step: (.*)", output)
    return [(int(step), int(rank), what) for step, rank, what in found]


def judge(lines, cause):
    right = [step for step, rank, what in lines if rank == 1 and CAUSES[cause] in what and step >= 0]
    wrong = [line for line in lines if line[0] < 0 or line[1] != 1 or CAUSES[cause] not in line[2]]
    return {"named": bool(right), "within 10 steps": bool(right) and min(right) <= 10, "something else": bool(wrong)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--healthy", type=int, default=200)
    parser.add_argument("--causes", nargs="*", default=list(CAUSES))
    parser.add_argument("--shares", nargs="*", type=float, default=list(NICENESS))
    arguments = parser.parse_args()
    for cause in arguments.causes:
        for share in arguments.shares:
            counts = Counter()
            for _ in range(arguments.tries):
                lines = run(cause, share, BEGIN + 30)
                found = judge(lines, cause)
                counts.update(key for key, is_so in found.items() if is_so)
                if found["something else"] or not found["named"]:
                    print("   ", cause, share, lines, flush=True)
            print(f"{cause} {share:.0%}: {dict(counts)} of {arguments.tries}", flush=True)
    healthy = [run("none", 0, 100) for _ in range(arguments.healthy)]
    print(f"healthy: {sum(map(bool, healthy))} of {len(healthy)} with a name", *[one for one in healthy if one])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        train(sys.argv[2], float(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
