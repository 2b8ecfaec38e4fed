"""Is the right rank named, for the right cause, and how soon? And nobody in healthy runs?

    python test/fault/late_ranks.py --tries 20 --healthy 200

Two ranks, each on a core of its own, train with steps of about 40 ms. From step 30 on one of them is slower: in its
backward pass, in its loader, by its garbage collector, or by a busy process on its core. Or one of three that sleep
instead waits in an operation with another one, of which that one's own training knows nothing; or has a host of its
own, as they all have, and its link carries a third (for that root's right is needed). Prints for each cause and share
of a step how often the right rank was named for the right cause, how often within 10 steps, and how often anything else
was said. In half of the healthy runs each core has a busy process, too.
"""

import argparse
import contextlib
import gc
import itertools
import os
import pathlib
import re
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter

import torch

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "python"))

from hosts import HostsAtSwitch

BEGIN, STEP_S = 30, 0.04
CAUSES = {
    "backward": "computing", "loader": "input", "collector": "garbage collection", "neighbour": "processor",
    "group": "operations of other groups", "link": "its link carries",
}  # fmt: skip
#: A busy process gets about this share of a core beside a rank.
NICENESS = {0.05: 13, 0.1: 10, 0.3: 5}
LINK_BYTES_S, SLOWER = 1e9 / 8, 3
_ON_HOSTS = ("link", "network")  # whose links are slower, or of which one's is


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
def busy(niceness, processes=1):
    command = ["nice", "-n", str(niceness), sys.executable, "-c", "while True: pass"]
    running = [subprocess.Popen(command) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def limit_link(verb, bytes_s):
    limit = ["rate", f"{8 * bytes_s:.0f}bit", "burst", "32k", "latency", "50ms"]
    subprocess.run(["tc", "qdisc", verb, "dev", "eth0", "root", "tbf", *limit], check=True)


def columns(cause, share):
    """Of a layer whose gradients take half of what is lost once the link is slower; three hosts each send 4/3 of it."""
    return int(share * STEP_S / (SLOWER - 1) * LINK_BYTES_S * 3 / 4 / 16) if cause in _ON_HOSTS else 1


def train(cause, share, steps):
    """What a rank runs. Rank 0 prints in which step somebody was named, and the line."""
    import farandole.torch as hvd

    hvd.init()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[hvd.local_rank() % len(cores)]})
    is_late = hvd.rank() == 1
    pause = time.sleep if cause in ("group", *_ON_HOSTS) else compute
    others = hvd.add_process_set([1, 2]) if cause == "group" else None
    if cause in _ON_HOSTS:
        limit_link("add", LINK_BYTES_S)
    model, samples = torch.nn.Linear(4, columns(cause, share)), Samples()
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
                stack.enter_context(busy(NICENESS[share]))
            if step == BEGIN and (cause == "network" or (is_late and cause == "link")):
                limit_link("change", LINK_BYTES_S / SLOWER)
            if others is not None and hvd.rank() == 1:
                hvd.allreduce(torch.zeros(1), name="others", process_set=others)
            if others is not None and hvd.rank() == 2:
                later = share * STEP_S if step >= BEGIN else 0
                what = {"name": "others", "process_set": others}
                threading.Timer(later, hvd.allreduce, [torch.zeros(1)], what).start()
            if is_late and cause == "collector" and objects is None:
                objects = make_garbage(2 * share * STEP_S)
            if late_s and cause == "collector" and step % 2:
                gc.collect()
            optimizer.zero_grad()
            batch = next(batches).requires_grad_()
            model(Slow.apply(batch, pause, STEP_S + (late_s if cause == "backward" else 0))).sum().backward()
            optimizer.step()
            said.seek(0)
            found = [line for line in said if "makes all wait" in line or "all wait for the network" in line]
            for line in found[lines:] if hvd.rank() == 0 else ():
                print(step - BEGIN, line.strip(), flush=True)
            lines = len(found)


def run_on_hosts(rank, count=3):
    """What rank 0 says, of as many as hosts."""
    with HostsAtSwitch(count) as hosts, contextlib.ExitStack() as stack, tempfile.NamedTemporaryFile() as key:
        key.write(secrets.token_bytes(32))
        key.flush()
        address = f"{hosts.addresses[0]}:29500"
        common = {"FARANDOLE_SIZE": f"{count}", "FARANDOLE_ADDRESS": address, "FARANDOLE_KEY_FILE": key.name}
        common |= {"FARANDOLE_INTERFACE": "eth0", "OMP_NUM_THREADS": "1"}
        processes = []
        for number in range(count):
            variables = os.environ | common | {"FARANDOLE_RANK": str(number)}
            command = [*hosts.enter(number), *rank]
            processes.append(stack.enter_context(
                subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True)))  # fmt: skip
            stack.callback(processes[-1].kill)
        output = processes[0].communicate(timeout=300)[0]
        assert [process.wait(300) for process in processes] == [0] * count
        return output


def command_of(cause, share, steps):
    return [sys.executable, __file__, "--rank", cause, str(share), str(steps)]


def run(cause, share, steps):
    """(step, rank, what) of each line."""
    rank = command_of(cause, share, steps)
    if cause == "link":
        output = run_on_hosts(rank)
    else:
        size = "3" if cause == "group" else "2"
        command = [sys.executable, "-m", "farandole.runner", "-np", size, *rank]
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
    for processes, job in itertools.product((0, os.cpu_count() or 1), (("none", 0, 100), ("link", 0.3, BEGIN))):
        with busy(0, processes):
            healthy = [run(*job) for _ in range(arguments.healthy // 4)]
        what = f"healthy, {'three hosts' if job[0] == 'link' else 'one host'}, {processes} busy processes"
        print(f"{what}: {sum(map(bool, healthy))} of {len(healthy)} with a name", *filter(None, healthy), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        train(sys.argv[2], float(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
