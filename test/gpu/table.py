"""Makes one table of a run of run.sh: `table.py RESULTS` reads its notes and logs, prints the table
and writes RESULTS/table.json. Exit status 1 if a line failed.

A line is a step that passed or not, or a target with what was measured. What was not run is "not
measured", with the reason; a line that was run on fakes says FAKE.
"""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable, Iterator

PASS, FAIL, NOT_MEASURED = "pass", "fail", "not measured"

# Name of the step in run.sh -> what it asks.
STEPS = {
    "conformance-solo": "conformance on CUDA, 1 rank",
    "conformance-staged": "conformance on CUDA, 2-4 ranks staged on one GPU",
    "conformance-nccl": "conformance on CUDA, NCCL, a GPU per rank",
    "conformance-nccl-registered": "conformance on CUDA, NCCL, a GPU per rank, registered buffers",
    "nccl-alone": "NCCL, 1 rank",
    "processes-nccl-shared-2": "NCCL, 2 ranks on one GPU, processes",
    "processes-nccl-shared-3": "NCCL, 3 ranks on one GPU, processes",
    "processes-nccl-mps": "NCCL, 2 ranks on one GPU, processes under MPS",
    "processes-staged": "staged, 2 ranks, processes",
    "move-test": "move kernel: as on the host, bit by bit; graph capture; streams",
    "python-tests": "Python CUDA tests",
    "python-two-ranks-staged": "Python, 2 ranks on one GPU, staged",
    "python-two-ranks-nccl": "Python, 2 ranks on one GPU, NCCL",
    "fault-kill": "SIGKILL of a rank in mid-batch: the other names it and ends",
    "fault-stuck": "a stuck collective is aborted",
    "fault-stuck-sets": "stuck collectives of two process sets are aborted",
    "fault-parameters": "parameters after a failure",
    "fault-backward": "backward() returns while the GPU is busy",
    "fault-soak": "memory and threads stay flat",
    "fault-torch": "torch's process group at work beside ours",
    "sanitizer-memcheck": "compute-sanitizer memcheck, move kernel",
    "sanitizer-racecheck": "compute-sanitizer racecheck, move kernel",
    "sanitizer-initcheck": "compute-sanitizer initcheck, move kernel",
    "sanitizer-plane": "compute-sanitizer memcheck, the plane",
}


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of the table: what is wanted, what was measured, and the verdict."""

    target: str
    measured: str
    verdict: str


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run left.

    Attributes:
        steps: Step -> (outcome, reason); the last run of each.
        benches: The objects that benchmarks printed, each with the name of its step.
        is_fake: It ran on fakes.
    """

    steps: dict[str, tuple[str, str]]
    benches: list[dict]
    is_fake: bool


def read_run(folder: pathlib.Path) -> Run:
    """Reads steps.tsv, the logs of benchmarks and the mark of a fake run."""
    steps = {}
    notes = folder / "steps.tsv"
    for line in notes.read_text().splitlines() if notes.exists() else []:
        name, outcome, _seconds, reason = line.split("\t")
        steps[name] = (outcome, reason)
    logs = sorted(log for log in folder.glob("*.log") if log.name.startswith(("bench-", "fault-")))
    benches = [bench | {"step": log.stem} for log in logs for bench in read_log(log)]
    return Run(steps, benches, (folder / "fake").read_text().strip() == "1")


def read_log(log: pathlib.Path) -> Iterator[dict]:
    """The JSON objects among the lines of a log; a launcher may have put a rank before them."""
    for line in log.read_text(errors="replace").splitlines():
        start = line.find('{"bench"')
        if start >= 0:
            try:
                yield json.loads(line[start:])
            except json.JSONDecodeError:
                continue  # cut short when its time was over


def step_lines(run: Run) -> Iterator[Line]:
    """A line for each step that tests."""
    for name, target in STEPS.items():
        outcome, reason = run.steps.get(name, ("skipped", "it was not run"))
        verdict = {"passed": PASS, "failed": FAIL}.get(outcome, NOT_MEASURED)
        told = [bench["measured"] for bench in run.benches if bench["bench"] == name]
        measured = f"passed: {told[-1]}" if told and verdict == PASS else reason or outcome
        yield Line(target, measured, verdict)


def target_lines(run: Run) -> Iterator[Line]:
    """A line for each target, in the order in which they were set."""
    every = [bench for bench in run.benches if bench["bench"] == "move"]
    moves = [bench for bench in every if not bench["way"].endswith("pinned flag")]  # for comparison
    device = next((bench["device"] for bench in run.benches if bench["bench"] == "copy"), "")
    large = [bench for bench in moves if bench["set"].endswith(("1024 KiB", "4096 KiB"))]
    resnet = [bench for bench in moves if bench["set"] == "ResNet-50"]
    bert = [bench for bench in moves if bench["set"] == "BERT-large"]
    half = [bench for bench in resnet if bench["way"] == "pack float32 -> float16"]
    share = "pack/cast/unpack >= {} % of the device copy, {}"
    why = reason_of(run, "bench-move")
    yield share_line(share.format("85", "tensors >= 1 MiB (goal 93 %)"), large, 0.85, why)
    yield share_line(share.format("70", "ResNet-50 set"), resnet, 0.70, why)
    yield share_line(share.format("85", "BERT-large set"), bert, 0.85, why)
    yield figure_line(
        "ResNet-50 fp32 -> fp16 pack <= 60 us on H100", half, "kernel_us", lambda us: us <= 60,
        f"us on {device}", why,
    )  # fmt: skip
    faster = [{"times": bench["copy_per_tensor_us"] / bench["kernel_us"]} for bench in half]
    yield figure_line(
        "ResNet-50 fp32 -> fp16 pack >= 6 x faster than per-tensor copies", faster, "times",
        lambda times: times >= 6, "x", why,
    )  # fmt: skip
    flagged = {b["way"]: b["kernel_us"] for b in every if b["set"] == "ResNet-50" and b["way"].endswith("flag")}
    pinned, on_device = (flagged.get(f"unpack float32, {where}") for where in ("pinned flag", "flag"))
    yield figure_line(
        "ResNet-50 unpack: the poison flag by a kernel in device memory, not slower than read in pinned memory",
        [{"times": pinned / on_device}] if pinned and on_device else [], "times", lambda times: times >= 1, "x", why,
    )  # fmt: skip
    yield from plane_lines(run)
    yield from training_lines(run)


def plane_lines(run: Run) -> Iterator[Line]:
    """Time to launch, and the launches, of a batch; staged batches cost what the CPU plane does."""
    planes = [bench for bench in run.benches if bench["bench"] == "plane"]
    why = reason_of(run, "bench-plane")
    on_device = [bench for bench in planes if bench["way"] != "staged"]
    yield figure_line(
        "start to launch of a batch <= 300 us", on_device, "host_us",
        lambda us: us <= 300, "us wall, worst batch, without negotiation", why,
    )  # fmt: skip
    yield figure_line(
        "<= 3 launches of ours per batch", on_device, "launches_per_batch",
        lambda launches: launches <= 3, "launches, worst batch", why,
    )  # fmt: skip
    # Ranks that take turns on a GPU stand still meanwhile; under MPS they run side by side.
    buses = [bench for bench in run.benches if bench["bench"] == "bus"]
    by_mps = [bench for bench in buses if bench["step"] == "bench-plane-mps"]
    buses, how = (by_mps, "under MPS") if by_mps else (buses, "in time slices")
    why = reason_of(run, "bench-plane-nccl")
    small = [bench for bench in buses if bench["bytes"] <= 1 << 20]
    buses = [bench for bench in buses if bench["bytes"] > 20e6]
    shares, small_shares = (
        [{"percent": 100 * one["busbw_gb_per_s"] / one["bare_busbw_gb_per_s"]} for one in benches]
        for benches in (buses, small)
    )
    yield figure_line(
        "batches per second >= 50 % of a bare ncclAllReduce loop's, 4 B to 1 MiB", small_shares,
        "percent", lambda percent: percent >= 50, f"%, worst batch, {how}", why, worst=min,
    )  # fmt: skip
    yield figure_line(
        "bus bandwidth >= 90 % of a bare ncclAllReduce loop's, batches of 25 MiB", shares, "percent",
        lambda percent: percent >= 90, f"%, worst batch, {how}", why, worst=min,
    )  # fmt: skip
    yield figure_line(
        "gap between batches of 25 MiB on the GPU <= 50 us", buses, "gap_us",
        lambda us: us <= 50, f"us, median, worst batch, {how}", why,
    )  # fmt: skip


def training_lines(run: Run) -> Iterator[Line]:
    """Steps of training against plain torch and DDP."""
    steps = [bench for bench in run.benches if bench["bench"] == "step"]
    alone = next((bench for bench in steps if bench["ranks"] == 1), None)
    target = "world-1 step overhead <= DDP's"
    if alone is None:
        yield Line(target, reason_of(run, "bench-step"), NOT_MEASURED)
    else:
        ours, theirs = alone["overhead_percent"], alone["ddp_overhead_percent"]
        text = f"{ours:.2f} % against {theirs:.2f} % of {alone['plain_ms']:.2f} ms"
        yield Line(target, text, PASS if ours <= theirs else FAIL)
    together = [bench for bench in steps if bench["ranks"] > 1 and "hidden" in bench]
    target = "step <= DDP's with gradient_as_bucket_view=True, 2 ranks"
    if not together:
        yield Line(target, reason_of(run, "bench-step-2"), NOT_MEASURED)
    for bench in together:
        ours, theirs = bench["farandole_ms"], bench["ddp_ms"]
        text = f"{ours:.2f} ms against {theirs:.2f} ms over {bench['ddp_backend']}"
        verdict = PASS if ours <= theirs else FAIL
        # Over gloo DDP goes through host memory, which says nothing about NCCL.
        yield Line(target, text, verdict if bench["ddp_backend"] == "nccl" else NOT_MEASURED)
    hidden = [bench for bench in together if bench["hidden"] is not None]
    shares = [{"percent": 100 * bench["hidden"]} for bench in hidden]
    why = reason_of(run, "bench-step-2")
    if together and not hidden:
        why = "ranks share a GPU: what takes turns has nothing to hide behind"
    yield figure_line(
        ">= 90 % of communication hidden where there is something to hide", shares, "percent",
        lambda percent: percent >= 90, "%", why, worst=min,
    )  # fmt: skip
    yield window_line(run, [bench for bench in steps if bench.get("window")])


def window_line(run: Run, benches: list[dict]) -> Line:
    """What more batches in flight than by default would bring."""
    target = "a window of 2 batches costs <= 5 % of a step against 8 and 64"
    times = {bench["window"]: bench["farandole_ms"] for bench in benches}
    if set(times) != {2, 8, 64}:
        return Line(target, reason_of(run, "bench-window-2"), NOT_MEASURED)
    text = ", ".join(f"{window}: {ms:.2f} ms" for window, ms in sorted(times.items()))
    return Line(target, text, PASS if times[2] <= 1.05 * min(times.values()) else FAIL)


def reason_of(run: Run, step: str) -> str:
    """Why a step gave no figures."""
    return run.steps.get(step, ("", ""))[1] or "it was not run"


def share_line(target: str, benches: list[dict], least: float, why: str) -> Line:
    """The worst share of the copy's rate over all ways of moving."""
    if not benches:
        return Line(target, why, NOT_MEASURED)
    worst = min(benches, key=lambda bench: bench["share_of_copy"])
    text = f"{100 * worst['share_of_copy']:.1f} % at worst ({worst['way']}, {worst['set']})"
    return Line(target, text, PASS if worst["share_of_copy"] >= least else FAIL)


def figure_line(
    target: str, benches: list[dict], key: str, is_met: Callable[[float], bool], unit: str,
    why: str, worst: Callable = max,
) -> Line:  # fmt: skip
    """The worst figure of several, which a smaller (or greater) one beats."""
    if not benches:
        return Line(target, why, NOT_MEASURED)
    value = worst(bench[key] for bench in benches)
    return Line(target, f"{value:.2f} {unit}", PASS if is_met(value) else FAIL)


def lines_of(run: Run) -> list[Line]:
    """All lines. A figure measured on fakes says nothing about a target, and gets no verdict."""
    steps, targets = list(step_lines(run)), list(target_lines(run))
    if not run.is_fake:
        return steps + targets
    steps = [
        line if line.verdict == NOT_MEASURED else
        dataclasses.replace(line, measured=f"FAKE: {line.measured}") for line in steps
    ]  # fmt: skip
    targets = [
        line if line.verdict == NOT_MEASURED else
        Line(line.target, f"FAKE: {line.measured}", NOT_MEASURED) for line in targets
    ]  # fmt: skip
    return steps + targets


def as_text(lines: list[Line]) -> str:
    """The table in Markdown."""
    rows = [("target", "measured", "verdict"), ("---", "---", "---")]
    rows += [(line.target, line.measured, line.verdict) for line in lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(argv: list[str]) -> int:
    """Prints the table and writes it. Returns the exit status."""
    folder = pathlib.Path(argv[0])
    run = read_run(folder)
    lines = lines_of(run)
    machine = json.loads((folder / "machine.json").read_text())
    title = "FAKE GPU: nothing here is proven on a GPU" if run.is_fake else (
        f"{', '.join(machine['gpus'])}; CUDA driver {machine['driver']}; "
        f"NCCL {machine['nccl_version']}; torch {machine['torch'] or 'none'}"
    )  # fmt: skip
    print(f"{title}\n\n{as_text(lines)}")
    about = {
        "fake": run.is_fake, "machine": machine, "benches": run.benches,
        "lines": [dataclasses.asdict(line) for line in lines],
    }  # fmt: skip
    (folder / "table.json").write_text(json.dumps(about, indent=1) + "\n")
    print(f"\nas JSON: {folder / 'table.json'}", file=sys.stderr)
    return 1 if any(line.verdict == FAIL for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
