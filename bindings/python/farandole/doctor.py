"""``farandole doctor``: what is here, from where, whether two ranks work, and what would help.

Nothing here imports torch, MPI or CUDA, which takes seconds: foreign libraries are loaded in child
processes, where they make no context on a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import pathlib
import platform
import runpy
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

import farandole
from farandole.runner import mpirun
from farandole.runner.mpirun import UsageError

PIP = f"{sys.executable} -m pip install"
PLUGIN_VARIABLE = "FARANDOLE_CUDA_PLUGIN"
NCCL_VARIABLE = "FARANDOLE_NCCL"
OLDEST_NCCL = 21800
NCCL_OF_SHARED_GPUS = 23000
SMALL_COUNT, SMALL_TIMES = 1, 300  # float32
LARGE_COUNT, LARGE_TIMES = 16 << 20, 5
_NCCL = "libnccl.so.2"
_NVIDIA = "0x10de"
_DISPLAY_CLASSES = ("0x0300", "0x0302")  # PCI: VGA and 3D controllers
_RANKS_TIMEOUT_S = 120
_START_TIMEOUT_S = 30
_REASON_LINES = 12

# Loads the first library of a list that can be loaded, and prints {"path", "error", what it says}.
_LOAD = """
import ctypes, json, sys
what, soname, *names = sys.argv[1:]
number, text, answer = ctypes.c_int(), ctypes.create_string_buffer(1024), {"error": ""}

def ask_cuda(library):
    answer["code"] = library.cuDriverGetVersion(ctypes.byref(number))
    answer["number"], answer["init"], answer["gpus"] = number.value, library.cuInit(0), []
    library.cuDeviceGetCount(ctypes.byref(number))
    for index in range(number.value if answer["init"] == 0 else 0):
        device = ctypes.c_int()
        library.cuDeviceGet(ctypes.byref(device), index)
        library.cuDeviceGetName(text, len(text), device)
        answer["gpus"].append(text.value.decode())

def ask_nccl(library):
    answer["code"] = library.ncclGetVersion(ctypes.byref(number))
    answer["number"] = number.value

def ask_plugin(library):  # no library is of the build "", so it says what it is, and no more
    size = ctypes.c_size_t(len(text))
    library.farandole_plugin(b"", None, None, text, size)
    answer["said"] = text.value.decode()

for name in names:
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        answer["error"] = answer["error"] or str(error)
        continue
    lines = [line.split(None, 5) for line in open("/proc/self/maps")]
    answer["path"] = next(line[5].strip() for line in lines if len(line) == 6 and soname in line[5])
    {"cuda": ask_cuda, "nccl": ask_nccl, "plugin": ask_plugin}[what](library)
    break
print(json.dumps(answer))
"""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked for."""

    name: str
    version: str = ""  # empty if it was not found
    where: str = ""  # the file or folder it is taken from
    note: str = ""
    why: str = ""  # what is lost without it; empty if it is there, or nobody needs it here
    command: str = ""  # the one that brings it

    @property
    def is_missing(self) -> bool:
        """Whether it would be of use here and is not there."""
        return bool(self.why)


@dataclasses.dataclass(frozen=True)
class TwoRanks:
    """Whether two ranks work here, and how fast: by median times of allreduces of float32."""

    works: bool
    latency_4_bytes_us: float | None = None
    bandwidth_64_mib_gb_per_s: float | None = None  # 10^9 bytes of the tensor per second
    reason: str = ""  # what the launcher said if they do not work


# Python and MPI


def find_python() -> list[Finding]:
    """Farandole itself, Python, NumPy and torch."""
    package = str(pathlib.Path(farandole.__file__).parent)
    return [
        Finding("farandole", farandole.__version__, package),
        Finding("Python", platform.python_version(), sys.executable),
        Finding("NumPy", np.__version__, str(pathlib.Path(np.__file__).parent)),
        find_torch(),
    ]


def find_torch() -> Finding:
    """PyTorch, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        why = "farandole.torch cannot be imported; NumPy arrays work"
        return Finding("torch", why=why, command=f"{PIP} torch")
    folder = pathlib.Path(next(iter(spec.submodule_search_locations)))
    try:
        said = runpy.run_path(str(folder / "version.py"))
    except (OSError, SyntaxError) as error:
        return Finding("torch", "unknown", str(folder), note=str(error))
    cuda = said.get("cuda")
    note = f"built for CUDA {cuda}" if cuda else "built for the CPU"
    return Finding("torch", str(said.get("__version__", "unknown")), str(folder), note)


def find_mpi(environment: Mapping[str, str]) -> list[Finding]:
    """mpirun and the libmpi that ranks load under it."""
    named = environment.get(mpirun.LIBRARY_VARIABLE, "")
    library = mpirun.library_of_ranks(named, environment)
    if named and not library.path:
        others = {name: value for name, value in environment.items() if name != mpirun.LIBRARY_VARIABLE}
        return [find_mpi(others)[0], _libmpi(library, "", f"unset {mpirun.LIBRARY_VARIABLE}")]
    try:
        pair = mpirun.find_pair(environment)
    except UsageError as error:
        why = "it starts the ranks; without it there is one"
        missing = Finding("mpirun", note=str(error), why=why, command=mpirun.INSTALL_COMMAND)
        return [missing, _libmpi(library, "")]
    loaded = pair.loader_library
    other = f"{loaded.version} ({loaded.path})" if loaded.path else "none that the loader finds"
    note = pair.differ or (f"replaces {other}" if pair.environment() else "")
    found = Finding("mpirun", pair.program.version, pair.program.path, "Open MPI")
    return [found, _libmpi(pair.library, note)]


def _libmpi(library: mpirun.Library, note: str, command: str = "") -> Finding:
    if library.path:
        return Finding("libmpi", library.version, library.path, note)
    rebuild = f"apt-get install -y libopenmpi-dev && {PIP} --force-reinstall ."
    command = command or (rebuild if library.error == mpirun.NO_MPI else mpirun.INSTALL_COMMAND)
    why = "it carries bytes between ranks; without it there is one"
    return Finding("libmpi", note=library.error, why=why, command=command)


# What tensors on a GPU need


def load(what: str, soname: str, names: Iterable[str]) -> dict[str, Any]:
    """Loads a library in a child process and lets it say what it is: "cuda", "nccl" or "plugin"."""
    return mpirun.ask(_LOAD, what, soname, *names)


def count_nvidia_devices(root: str = "/sys/bus/pci/devices") -> int:
    """GPUs of NVIDIA on the PCI bus, with or without a driver."""
    count = 0
    for device in pathlib.Path(root).glob("*"):
        try:
            vendor = (device / "vendor").read_text().strip()
            kind = (device / "class").read_text().strip()
        except OSError:
            continue
        count += vendor == _NVIDIA and kind.startswith(_DISPLAY_CLASSES)
    return count


def find_gpu(environment: Mapping[str, str]) -> list[Finding]:
    """CUDA's driver, NCCL and our own CUDA plug-in. Without a GPU none of them is missing."""
    cuda = load("cuda", "libcuda.so", ["libcuda.so.1"])
    devices = count_nvidia_devices()
    has_gpu = devices > 0 or bool(cuda.get("gpus"))
    nccl = find_nccl(environment, has_gpu, int(cuda.get("number", 0)))
    return [_cuda(cuda, devices), nccl, find_plugin(environment, has_gpu)]


def _cuda(said: Mapping[str, Any], devices: int) -> Finding:
    missing = ("GPUs cannot be used by any program", "apt-get install nvidia-driver")
    if "path" not in said:
        if devices == 0:
            return Finding("CUDA", note="not needed: no NVIDIA GPU was found")
        return Finding("CUDA", "", "", f"{devices} NVIDIA GPUs, but {said['error']}", *missing)
    number = said["number"]
    version, where = f"{number // 1000}.{number % 1000 // 10}", said["path"]
    if said["init"] != 0:
        note = f"the driver does not start: cuInit gives {said['init']}"
        return Finding("CUDA", version, where, note, *(missing if devices else ()))
    gpus = said["gpus"]
    names = ", ".join(sorted({f"{gpus.count(name)} x {name}" for name in gpus}))
    return Finding("CUDA", version, where, names or "no GPUs")


def nccl_files(environment: Mapping[str, str]) -> list[str]:
    """Where the library looks (ops/nccl/find.h) in a process that has torch's NCCL not mapped yet."""
    if environment.get(NCCL_VARIABLE):
        return [environment[NCCL_VARIABLE]]
    folders = [str(pathlib.Path(farandole.__file__).parent.parent)]
    for package in ("torch", "numpy"):
        spec = importlib.util.find_spec(package)
        for location in (spec.submodule_search_locations if spec else None) or []:
            if (folder := str(pathlib.Path(location).parent)) not in folders:
                folders.append(folder)
    wheels = [os.path.join(folder, "nvidia", "nccl", "lib", _NCCL) for folder in folders]
    prefixes = [
        os.path.join(os.path.dirname(os.path.dirname(folder)), _NCCL)
        for folder in folders
        if os.path.basename(folder) in ("site-packages", "dist-packages")
    ]
    return [*wheels, *prefixes, f"/usr/local/cuda/lib64/{_NCCL}", _NCCL]


def find_nccl(environment: Mapping[str, str], has_gpu: bool, driver: int = 0) -> Finding:
    """The NCCL that ranks would use, and what it is too old for."""
    said = load("nccl", "libnccl.so", nccl_files(environment))
    command = f"{PIP} -U nvidia-nccl-{'cu12' if 0 < driver < 13000 else 'cu13'}"
    if environment.get(NCCL_VARIABLE):
        command = f"unset {NCCL_VARIABLE}"
    slow = "tensors of several GPUs go through host memory, which is slower"
    if "path" not in said:
        if not has_gpu:
            return Finding("NCCL", note="not needed: no NVIDIA GPU was found")
        return Finding("NCCL", note=said["error"], why=slow, command=command)
    number, where = said["number"], said["path"]
    # 2.8 and older count 2708, newer ones 22708.
    major, rest = divmod(number, 10000 if number >= 10000 else 1000)
    version = f"{major}.{rest // 100}.{rest % 100}"
    if number < OLDEST_NCCL:
        missing = (f"2.18 is the oldest that is used; {slow}", command) if has_gpu else ()
        return Finding("NCCL", version, where, "too old", *missing)
    can_share = number >= NCCL_OF_SHARED_GPUS
    note = "ranks can share a GPU (FARANDOLE_SHARE_GPU)" if can_share else "a GPU per rank"
    return Finding("NCCL", version, where, note)


def find_plugin(environment: Mapping[str, str], has_gpu: bool) -> Finding:
    """libfarandole_cuda.so: the real one, or the stub of a build without nvcc."""
    name = "libfarandole_cuda"
    beside = pathlib.Path(farandole.__file__).parent / f"{name}.so"
    file = environment.get(PLUGIN_VARIABLE) or str(beside)
    said = load("plugin", os.path.basename(file), [file])
    text = str(said.get("said") or said.get("error"))
    if text.startswith("it belongs to build"):
        note = "a fake GPU, for tests" if "fake" in os.path.basename(file) else ""
        return Finding(name, farandole.__version__, said["path"], note)
    if not has_gpu:
        return Finding(name, note="a build without CUDA; not needed: no NVIDIA GPU was found")
    why = "tensors on a GPU are refused; it is built where nvcc 12.1 or newer is on the PATH"
    command = f"PATH=/usr/local/cuda/bin:$PATH {PIP} --force-reinstall ."
    if environment.get(PLUGIN_VARIABLE):
        command = f"unset {PLUGIN_VARIABLE}"
    return Finding(name, note=text, why=why, command=command)


def find_all(environment: Mapping[str, str]) -> list[Finding]:
    """Everything, in the order of the report."""
    return [*find_python(), *find_mpi(environment), *find_gpu(environment)]


# Two ranks


def _median_s(count: int, times: int, name: str) -> float:
    """The median time of an allreduce of ``count`` float32, in seconds."""
    numbers = np.zeros(count, np.float32)
    taken_s = []
    for _ in range(times + max(2, times // 10)):
        farandole.barrier()
        started_s = time.perf_counter()
        farandole.allreduce_(numbers, op=farandole.Sum, name=name)
        taken_s.append(time.perf_counter() - started_s)
    return statistics.median(taken_s[-times:])


def measure() -> None:
    """What each of the two ranks does: checks a sum, measures; rank 0 prints a line of JSON.

    Raises:
        SystemExit: The sum is wrong.
    """
    farandole.init()
    numbers = np.arange(1000, dtype=np.float32)
    total = farandole.allreduce(numbers * (farandole.rank() + 1), op=farandole.Sum, name="check")
    size = farandole.size()
    if not np.array_equal(total, numbers * (size * (size + 1) // 2)):
        raise SystemExit("the allreduce gave a wrong sum")
    small_s = _median_s(SMALL_COUNT, SMALL_TIMES, "small")
    large_s = _median_s(LARGE_COUNT, LARGE_TIMES, "large")
    if farandole.rank() == 0:
        print(json.dumps([size, round(small_s * 1e6, 1), round(LARGE_COUNT * 4 / large_s / 1e9, 3)]))


def try_two_ranks(environment: Mapping[str, str]) -> TwoRanks:
    """Runs :func:`measure` with ``farandolerun -np 2`` in this environment."""
    command = [
        sys.executable, "-m", "farandole.runner", "-np", "2", "--start-timeout", str(_START_TIMEOUT_S),
        sys.executable, "-c", "from farandole.doctor import measure; measure()",
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, env={"OMP_NUM_THREADS": "1", **environment}, capture_output=True, text=True, check=False,
            timeout=_RANKS_TIMEOUT_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return TwoRanks(False, reason=f"they were not done after {_RANKS_TIMEOUT_S} s")
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()[:_REASON_LINES]
        return TwoRanks(False, reason="\n".join(said) or "nothing was said")
    size, latency_us, gb_per_s = json.loads(done.stdout.splitlines()[-1].removeprefix("[0] "))
    if size != 2:
        return TwoRanks(False, reason=f"a job of 2 ranks became one of {size}")
    return TwoRanks(True, latency_us, gb_per_s)


# The report


def as_dict(findings: Sequence[Finding], two_ranks: TwoRanks, settings: Mapping[str, str]) -> dict[str, Any]:
    """Everything under the names of the report, in lower case."""
    found: dict[str, Any] = {}
    for finding in findings:
        fields = dataclasses.asdict(finding)
        name = fields.pop("name").lower()
        found[name] = {"found": bool(finding.version), "missing": finding.is_missing, **fields}
    return found | {"two_ranks": dataclasses.asdict(two_ranks), "settings": dict(settings)}


def as_text(findings: Sequence[Finding], two_ranks: TwoRanks, settings: Mapping[str, str]) -> str:
    """The report: a line for each thing, the two ranks, the settings, and what would help."""
    lines = []
    for finding in findings:
        what = f"{finding.version}  {finding.where}".strip() or ("missing" * finding.is_missing)
        note = f"  ({finding.note})" if finding.note and what else finding.note
        lines.append(f"{finding.name:<17} {what}{note}")
    lines += [f"setting           {name}={value}" for name, value in settings.items()]
    if two_ranks.works:
        lines += ["", f"Two ranks work here: an allreduce of 4 bytes takes {two_ranks.latency_4_bytes_us} us, "
                  f"one of 64 MiB runs at {two_ranks.bandwidth_64_mib_gb_per_s} GB/s."]  # fmt: skip
    else:
        lines += ["", "Two ranks do not work here:\n  " + two_ranks.reason.replace("\n", "\n  ")]
    for finding in findings:
        if finding.is_missing:
            lines += ["", f"{finding.name} is missing: {finding.why}.", f"  {finding.command}"]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """``farandole doctor``.

    Returns:
        The exit code: 0 if two ranks work here, else 1; 2 for wrong use (by SystemExit).
    """
    parser = argparse.ArgumentParser(
        prog="farandole doctor",
        description="Says what is installed, whether two ranks work here, and what would help.",
        epilog="Exit code 0 if two ranks work here, else 1.",
    )
    parser.add_argument("--json", action="store_true", help="the same as one JSON object")
    options = parser.parse_args(argv)
    findings = find_all(os.environ)
    two_ranks = try_two_ranks(os.environ)
    prefixes = ("FARANDOLE_", "HOROVOD_")
    settings = {name: os.environ[name] for name in sorted(os.environ) if name.startswith(prefixes)}
    if options.json:
        print(json.dumps(as_dict(findings, two_ranks, settings), indent=2))
    else:
        print(as_text(findings, two_ranks, settings))
    return 0 if two_ranks.works else 1
