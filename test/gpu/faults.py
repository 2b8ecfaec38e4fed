"""What ranks on GPUs do when something fails, and in the long run: `faults.py CHECK [--fake]`.

Starts two or three ranks under farandolerun and prints one JSON object with what was measured; exits 1
if a rank saw something else than it should. They share a GPU where there is one for all of them, and
should go over NCCL then (FARANDOLE_SHARE_GPU=1). With --fake host memory poses as that of a fake GPU
(FARANDOLE_CUDA_PLUGIN, FARANDOLE_NCCL), and a stream that is held stands for a long kernel.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import gc
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

# How long a collective may wait for other ranks' GPUs, which takes in NCCL's start on a real one; and
# how long these are busy: longer than that, and than an error takes to arrive.
TIMEOUT_S = {True: 2.0, False: 8.0}  # by whether the GPU is a fake
BUSY_S = {fake: timeout_s + 4 for fake, timeout_s in TIMEOUT_S.items()}
ERROR_WITHIN_S = 4.0
BATCHES = 1000  # of the soak; beside torch a tenth
END_WITHIN_S = 20.0  # NCCL's abort, and the end of the process


class Gpu:
    """The GPU of this rank, as torch has it."""

    def __init__(self) -> None:
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1000)
        begin.record()
        torch.cuda._sleep(100_000_000)
        end.record()
        end.synchronize()
        self._cycles_per_s = 1e11 / begin.elapsed_time(end)

    def put(self, what: Any) -> Any:
        """The tensor, or model, on the GPU."""
        return what.cuda()

    def occupy(self, seconds: float) -> None:
        """What is put into the current stream from now on waits for a kernel of about so long."""
        torch.cuda._sleep(int(seconds * self._cycles_per_s))

    def is_busy(self) -> bool:
        """Whether the current stream has work left."""
        return not torch.cuda.current_stream().query()

    def synchronize(self) -> None:
        """The host waits for the current stream."""
        torch.cuda.current_stream().synchronize()

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the current stream has in it, in host memory."""
        return tensor.detach().cpu().clone()

    def memory_bytes(self) -> int:
        """In use on the device, by every process."""
        free, total = torch.cuda.mem_get_info()
        return total - free


class FakeGpu:
    """The same over a fake GPU: torch's CPU tensors pose as its own."""

    def __init__(self) -> None:
        import fake_gpu  # of test/python

        fake_gpu.PLUGIN = pathlib.Path(os.environ["FARANDOLE_CUDA_PLUGIN"])
        self.mine = gpu = fake_gpu.FakeGpu(0)
        # Torch's own work does not run in the fake's streams, so the host waits before it.
        self._to_the_end = [
            fake_gpu.reading(lambda tensor: gpu),
            fake_gpu.read_by_the_host(self),
        ]
        self._to_the_end[0].__enter__()

    def read_by_the_host(self) -> None:
        """From now on backward() waits for the stream: what comes after it runs at once."""
        next(self._to_the_end[1])

    def put(self, what: Any) -> Any:
        return what

    def occupy(self, seconds: float) -> None:
        stream = self.mine.stream()

        def release() -> None:
            with self.mine.using(stream):
                self.mine.release()

        self.mine.hold()
        timer = threading.Timer(seconds, release)
        timer.daemon = True
        timer.start()

    def is_busy(self) -> bool:
        return not self.mine.is_idle()

    def synchronize(self) -> None:
        self.mine.synchronize(self.mine.stream())

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.mine.read(tensor.detach())

    def memory_bytes(self) -> int:
        return sum(self.mine.count(what) for what in ("live_blocks", "live_pinned", "live_streams"))


def tick() -> None:
    """One collective in host memory: all ranks are there, and have started what came before."""
    farandole.allreduce(np.ones(1), name="tick")


def wait_for_failure() -> farandole.HorovodInternalError:
    """Calls until the job has failed."""
    try:
        while True:
            tick()
            time.sleep(0.01)
    except farandole.HorovodInternalError as error:
        return error


def check_spoiled(results: list[torch.Tensor]) -> None:
    """A result of an aborted collective is NaN, not what happened to be in its memory."""
    for number, result in enumerate(results):
        assert torch.isnan(result).all(), f"result {number} was aborted and is {result[:4]} ..."


def make_training(gpu: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.Tensor]:
    """A small model, alike on all ranks, its optimizer, and this rank's inputs."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    inputs = torch.randn(16, 256) * (1 + hvd.rank())
    model, inputs = gpu.put(model), gpu.put(inputs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters()), inputs


def backward(gpu: Any, options: argparse.Namespace) -> dict[str, float]:
    """A backward pass behind a long kernel: the host goes on while that runs."""
    model, optimizer, inputs = make_training(gpu)
    for _ in range(3):  # the first rounds prepare
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
    gpu.synchronize()
    tick()
    optimizer.zero_grad()
    gpu.occupy(1.0)
    began_s = time.monotonic()
    model(inputs).square().mean().backward()
    took_s = time.monotonic() - began_s
    assert gpu.is_busy(), f"backward() waited for the GPU, {took_s:.2f} s"
    gpu.synchronize()
    tick()
    return {"returned_s": took_s, "gpu_went_on_s": time.monotonic() - began_s - took_s}


def soak(gpu: Any, options: argparse.Namespace) -> dict[str, float]:
    """Many batches leave memory and threads as they were."""
    tensors = [gpu.put(torch.ones(1 << 14)) for _ in range(8)]

    def run(batches: int) -> tuple[int, int, int]:
        for number in range(batches):
            hvd.grouped_allreduce_(tensors, op=hvd.Average, name="soak")
            if number % 50 == 49:
                gpu.synchronize()
        gpu.synchronize()
        tick()
        gc.collect()
        return threads(), resident_bytes(), gpu.memory_bytes()

    before = run(BATCHES // 10)
    after = run(BATCHES)
    until_s = time.monotonic() + 2  # NCCL has a thread for each call
    while after[0] > before[0] and time.monotonic() < until_s:
        time.sleep(0.01)
        after = (threads(), *after[1:])
    tick()
    assert torch.equal(gpu.read(tensors[0]), torch.ones(1 << 14))
    assert after[0] <= before[0], f"{before[0]} threads became {after[0]}"
    grown, on_device = after[1] - before[1], after[2] - before[2]
    assert grown <= 8 << 20, f"{grown} bytes more are resident"
    assert on_device <= (0 if options.fake else 4 << 20), f"{on_device} more on the device"
    return {"batches": BATCHES, "threads": after[0], "grown_bytes": max(0, grown)}


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def resident_bytes() -> int:
    pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def beside_torch(gpu: Any, options: argparse.Namespace) -> dict[str, float]:
    """Collectives of torch.distributed in flight together with ours."""
    dist = torch.distributed
    dist.init_process_group(
        "gloo" if options.fake else "nccl", init_method=f"file://{options.folder}/rendezvous",
        rank=hvd.rank(), world_size=hvd.size(),
    )  # fmt: skip
    first = gpu.put(torch.ones(1))  # connects, one after the other
    dist.all_reduce(first)
    gpu.read(first)
    gpu.read(hvd.allreduce(first, name="first"))
    tick()
    expected = hvd.size() * (hvd.size() + 1) / 2
    for number in range(BATCHES // 10):
        theirs, mine = (gpu.put(torch.full((1 << 16,), hvd.rank() + 1.0)) for _ in range(2))
        ours = hvd.allreduce_async(mine, op=hvd.Sum, name="beside")
        work = dist.all_reduce(theirs, async_op=True)
        if number % 2:
            work.wait()
            result = hvd.synchronize(ours)
        else:
            result = hvd.synchronize(ours)
            work.wait()
        assert (gpu.read(result) == expected).all(), "our sum is wrong"
        assert (gpu.read(theirs) == expected).all(), "torch's sum is wrong"
    dist.destroy_process_group()
    return {"batches": BATCHES // 10}


def parameters(gpu: Any, options: argparse.Namespace) -> dict[str, float]:
    """Failures of one rank's backward pass, then of a collective, and what they leave of the model.

    After an error in backward() parameters are what they were, bit by bit. A step that was enqueued
    behind a collective in flight applies NaN, and nothing else.
    """
    if options.fake:
        gpu.read_by_the_host()
    model, optimizer, inputs = make_training(gpu)

    def step(at: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(at).square().mean().backward()
        optimizer.step()

    def values() -> list[torch.Tensor]:
        return [gpu.read(parameter) for parameter in model.parameters()]

    def fail(gradient: torch.Tensor) -> None:
        if hvd.rank() == 1:
            raise ValueError("a broken batch")

    for _ in range(3):
        step(inputs)
    before = values()
    failing = inputs.clone().requires_grad_() * 1
    failing.register_hook(fail)
    try:
        step(failing)
        raise AssertionError("no error after one in a backward pass")
    except (ValueError, farandole.HorovodInternalError):
        pass
    assert all(map(torch.equal, before, values())), "an error in backward() changed parameters"
    step(inputs)
    before = values()
    tick()
    if hvd.rank() == 1:
        gpu.occupy(BUSY_S[options.fake])
    began_s = time.monotonic()
    try:
        while True:
            step(inputs)
    except farandole.HorovodInternalError:
        error_s = time.monotonic() - began_s
    spoiled = 0
    for was, now in zip(before, values(), strict=True):
        is_nan = bool(torch.isnan(now).all())
        spoiled += is_nan
        assert is_nan or torch.equal(was, now), "parameters were changed by an aborted collective"
    return {"error_s": error_s, "parameters": len(before), "spoiled": spoiled}


def stuck(gpu: Any, options: argparse.Namespace) -> dict[str, float]:
    """Rank 0's collectives wait on the GPU for those of the others, which do not come in time.

    Of two process sets the second collective lies in rank 0's stream behind the first.
    """
    sets = [hvd.global_process_set]
    if hvd.size() > 2:
        sets = [hvd.add_process_set([0, other]) for other in range(1, hvd.size())]
    mine = [one for one in sets if hvd.rank() in one.ranks]
    tensors = [gpu.put(torch.ones(1000)) for _ in mine]

    def begin(name: str) -> list[Any]:
        return [
            hvd.allreduce_async(tensor, op=hvd.Sum, name=name, process_set=one)
            for tensor, one in zip(tensors, mine, strict=True)
        ]

    for handle in begin("first"):
        assert (gpu.read(hvd.synchronize(handle)) == 2).all()
    tick()
    if hvd.rank() != 0:
        gpu.occupy(BUSY_S[options.fake])
    began_s = time.monotonic()
    handles = begin("stuck")
    results = [hvd.synchronize(handle) for handle in handles]
    launched_s = time.monotonic() - began_s
    error = wait_for_failure()
    error_s = time.monotonic() - began_s
    check_spoiled([gpu.read(result) for result in results])
    idle_s = time.monotonic() - began_s
    told = error if hvd.rank() == 0 else error.cause
    limit_s = TIMEOUT_S[options.fake]
    assert launched_s < limit_s, f"synchronize() took {launched_s:.1f} s"
    assert limit_s <= error_s < limit_s + ERROR_WITHIN_S, f"after {error_s:.1f} s: {error}"
    assert "stuck" in str(told) or "FARANDOLE_CUDA_TIMEOUT_S" in str(told), f"told: {error!r}"
    if hvd.rank() == 0:
        assert isinstance(error, farandole.OperationTimeoutError), repr(error)
        assert idle_s < BUSY_S[options.fake], f"rank 0's streams went on after {idle_s:.1f} s only"
    return {"limit_s": limit_s, "error_s": error_s, "idle_s": idle_s}


def kill(gpu: Any, options: argparse.Namespace) -> dict[str, float]:
    """Rank 1 is killed while a collective is in flight on rank 0's GPU."""
    tensor = gpu.put(torch.ones(1000))
    assert (gpu.read(hvd.allreduce(tensor, op=hvd.Sum, name="first")) == 2).all()
    tick()
    if hvd.rank() == 1:
        gpu.occupy(BUSY_S[options.fake])
    result = hvd.synchronize(hvd.allreduce_async(tensor, op=hvd.Sum, name="killed"))
    tick()
    if hvd.rank() == 1:
        time.sleep(0.2)  # for the kernel of rank 0
        write(options.folder / "1.kill", {"at_s": time.monotonic()})
        os.kill(os.getpid(), signal.SIGKILL)
    error = wait_for_failure()
    error_at_s = time.monotonic()
    check_spoiled([gpu.read(result)])
    assert isinstance(error, farandole.PeerLostError), repr(error)
    assert error.failed_ranks == (1,) and "rank 1" in str(error), repr(error)
    return {"error_at_s": error_at_s, "idle_s": time.monotonic() - error_at_s}


@dataclasses.dataclass(frozen=True)
class Check:
    """What ranks run, and what is told of rank 0's figures."""

    body: Callable[[Any, argparse.Namespace], dict[str, float]]
    text: str
    ranks: int = 2
    killed: int | None = None
    times_out: bool = False


FAILED = (
    "error after {error_s:.1f} s (limit {limit_s:.0f} s), streams free after {idle_s:.1f} s, "
    "end {end_s:.1f} s later"
)
CHECKS = {
    "backward": Check(backward, "backward() took {returned_s:.3f} s; the GPU, {gpu_went_on_s:.1f} s more"),
    "soak": Check(soak, "{batches} batches; {threads} threads; {grown_bytes} bytes more are resident"),
    "torch": Check(beside_torch, "{batches} collectives of each"),
    "parameters": Check(parameters, "unchanged by an error in backward(); of {parameters} behind an "
                        "aborted collective {spoiled} are NaN, the others unchanged", times_out=True),
    "stuck": Check(stuck, FAILED, times_out=True),
    "stuck-sets": Check(stuck, FAILED, ranks=3, times_out=True),
    "kill": Check(kill, "error {error_s:.2f} s after the kill, streams free {idle_s:.1f} s later, "
                  "end {end_s:.1f} s after the kill", killed=1),
}  # fmt: skip


def run_rank(options: argparse.Namespace) -> None:
    """Runs the check in a child: mpirun, which would end the other ranks, does not see it killed.

    Nothing of torch, MPI or CUDA is in this process before that.
    """
    rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMIX_RANK"]
    child = os.fork()
    if child == 0:
        return run_child(options, rank)
    _, status = os.waitpid(child, 0)
    write(options.folder / f"{rank}.end", {"at_s": time.monotonic(), "status": status})
    until_s = time.monotonic() + 60
    while len(list(options.folder.glob("*.end"))) < CHECKS[options.check].ranks:
        if time.monotonic() > until_s:
            break
        time.sleep(0.01)
    os._exit(0)


def run_child(options: argparse.Namespace, rank: str) -> None:
    """One rank; its end is that of this process."""
    global farandole, hvd, np, torch  # here only: see run_rank
    import numpy as np
    import torch

    import farandole
    import farandole.torch as hvd

    faulthandler.dump_traceback_later(50)  # before run.sh ends what hangs
    hvd.init()
    found = CHECKS[options.check].body(FakeGpu() if options.fake else Gpu(), options)
    write(options.folder / f"{rank}.found", found | {"at_s": time.monotonic()})


def write(path: pathlib.Path, what: dict[str, Any]) -> None:
    """Whole or not at all."""
    path.with_suffix(".part").write_text(json.dumps(what))
    path.with_suffix(".part").rename(path)


def judge(check: Check, folder: pathlib.Path) -> dict[str, Any]:
    """Rank 0's figures, once all ranks were seen to end as they should."""
    ends, found = {}, {}
    for rank in range(check.ranks):
        end = folder / f"{rank}.end"
        if not end.exists():
            raise SystemExit(f"rank {rank} did not end")
        ends[rank] = json.loads(end.read_text())
        if rank == check.killed:
            if ends[rank]["status"] != signal.SIGKILL:
                raise SystemExit(f"rank {rank} was to be killed; its status is {ends[rank]['status']}")
            continue
        file = folder / f"{rank}.found"
        if not file.exists() or ends[rank]["status"] != 0:
            raise SystemExit(f"rank {rank} failed; wait status {ends[rank]['status']}")
        found[rank] = json.loads(file.read_text())
        end_s = ends[rank]["at_s"] - found[rank]["at_s"]
        if end_s > END_WITHIN_S:
            raise SystemExit(f"rank {rank} took {end_s:.1f} s to end")
    figures = found[0] | {"end_s": ends[0]["at_s"] - found[0]["at_s"]}
    if check.killed is not None:
        killed_s = json.loads((folder / f"{check.killed}.kill").read_text())["at_s"]
        figures |= {"error_s": found[0]["error_at_s"] - killed_s, "end_s": ends[0]["at_s"] - killed_s}
        if figures["error_s"] > ERROR_WITHIN_S or figures["end_s"] > END_WITHIN_S:
            raise SystemExit(f"it took too long: {figures}")
    return figures


def run_job(options: argparse.Namespace) -> None:
    """Starts the ranks, and prints what they found."""
    check = CHECKS[options.check]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "farandole.runner", "-np", str(check.ranks), sys.executable,
                   __file__, options.check, "--folder", folder, *(["--fake"] if options.fake else [])]  # fmt: skip
        environment = dict(os.environ)
        if check.times_out:
            environment["FARANDOLE_CUDA_TIMEOUT_S"] = str(TIMEOUT_S[options.fake])
        subprocess.run(command, env=environment, check=False)  # the files say how it was
        figures = judge(check, pathlib.Path(folder))
    text = check.text.format(**figures)
    print(json.dumps({"bench": f"fault-{options.check}", "measured": text, **figures}))


def main() -> None:
    """Without --folder it is the one who starts the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("check", choices=CHECKS)
    parser.add_argument("--fake", action="store_true")
    parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    (run_job if options.folder is None else run_rank)(options)


if __name__ == "__main__":
    main()
