"""``farandole doctor``: what is here, from where, whether two ranks work, and what would help.

Nothing here imports torch, MPI or CUDA, which takes seconds: see ``_probe.py``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pathlib
import platform
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from farandole import _core
from farandole._probe import load
from farandole.runner import mpirun
from farandole.runner.options import UsageError

PIP = f"{sys.executable} -m pip install"
PLUGIN_VARIABLE = "FARANDOLE_CUDA_PLUGIN"
NCCL_VARIABLE = "FARANDOLE_NCCL"
OLDEST_NCCL = 22700
NCCL_OF_SHARED_GPUS = 23000
_HERE = pathlib.Path(__file__).parent
_DRIVER = "/dev/nvidiactl"  # where NVIDIA's kernel driver is loaded
_NOT_NEEDED = "not needed: no NVIDIA GPU was found"
_RANKS_TIMEOUT_S = 120
_REASON_LINES = 12


class Finding(NamedTuple):
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


class TwoRanks(NamedTuple):
    """Whether two ranks work here, and how fast: by median times of allreduces of float32."""

    works: bool
    latency_4_bytes_us: float | None = None
    bandwidth_64_mib_gb_per_s: float | None = None  # 10^9 bytes of the tensor per second
    reason: str = ""  # what the launcher said if they do not work


def find_torch() -> Finding:
    """PyTorch, without importing it."""
    folders = _folders_of("torch")
    if not folders:
        why = "farandole.torch cannot be imported; NumPy arrays work"
        return Finding("torch", why=why, command=f"{PIP} torch")
    try:
        said = runpy.run_path(os.path.join(folders[0], "version.py"))
    except (OSError, SyntaxError) as error:
        return Finding("torch", "unknown", folders[0], note=str(error))
    cuda = said.get("cuda")
    note = f"built for CUDA {cuda}" if cuda else "built for the CPU"
    return Finding("torch", str(said.get("__version__", "unknown")), folders[0], note)


def _folders_of(package: str) -> list[str]:
    spec = importlib.util.find_spec(package)
    return list(spec.submodule_search_locations or []) if spec else []


def find_mpi(environment: Mapping[str, str]) -> list[Finding]:
    """mpirun and the libmpi that ranks load under it."""
    named = environment.get(mpirun.LIBRARY_VARIABLE)
    library, note = mpirun.library_of_ranks(named or "", environment), ""
    is_wrong = named and not library.path
    others = {key: environment[key] for key in environment if key != mpirun.LIBRARY_VARIABLE}
    try:
        pair = mpirun.find_pair(others if is_wrong else environment)
    except UsageError as error:
        why = "it starts the ranks of farandolerun --mpi"
        program = Finding("mpirun", note=str(error), why=why, command=mpirun.INSTALL_COMMAND)
    else:
        program = Finding("mpirun", pair.program.version, pair.program.path, "Open MPI")
        if not is_wrong:
            library, note = pair.library, pair.differ
            if other := pair.instead_of:
                note = f"replaces {other.version} ({other.path})"
                note = note if other.path else "replaces none that the loader finds"
    if library.path:
        return [program, Finding("libmpi", library.version, library.path, note)]
    command = f"unset {mpirun.LIBRARY_VARIABLE}" if is_wrong else mpirun.INSTALL_COMMAND
    if library.error == mpirun.NO_MPI:
        command = f"apt-get install -y libopenmpi-dev && {PIP} --force-reinstall ."
    why = "it carries bytes between ranks of mpirun and --mpi"
    return [program, Finding("libmpi", note=library.error, why=why, command=command)]


def find_gpu(environment: Mapping[str, str]) -> list[Finding]:
    """CUDA's driver, NCCL and our own CUDA plug-in. Without a GPU none of them is missing."""
    cuda = load("cuda", "libcuda.so", ["libcuda.so.1"])
    has_gpu = os.path.exists(_DRIVER) or bool(cuda.get("gpus"))
    nccl = find_nccl(environment, has_gpu, int(cuda.get("number", 0)))
    return [_find_cuda(cuda, has_gpu), nccl, find_plugin(environment, has_gpu)]


def _find_cuda(said: Mapping[str, Any], has_gpu: bool) -> Finding:
    missing = ("GPUs cannot be used by any program", "apt-get install nvidia-driver") if has_gpu else ()
    if "path" not in said:
        return Finding("CUDA", "", "", f"an NVIDIA GPU, but {said['error']}" if has_gpu else _NOT_NEEDED, *missing)
    number, gpus = said["number"], said.get("gpus", [])
    version, where = f"{number // 1000}.{number % 1000 // 10}", said["path"]
    if said["init"] != 0:
        return Finding("CUDA", version, where, f"the driver does not start: cuInit gives {said['init']}", *missing)
    names = ", ".join(sorted({f"{gpus.count(name)} x {name}" for name in gpus}))
    return Finding("CUDA", version, where, names or "no GPUs")


def nccl_files(environment: Mapping[str, str]) -> list[str]:
    """Where the library looks (ops/gpu/nccl/library.h) in a process that has not mapped torch's NCCL yet."""
    if environment.get(NCCL_VARIABLE):
        return [environment[NCCL_VARIABLE]]
    packages = [str(_HERE), *_folders_of("torch"), *_folders_of("numpy")]
    folders = dict.fromkeys(map(os.path.dirname, packages))
    soname = "libnccl.so.2"
    wheels = [f"{folder}/nvidia/nccl/lib/{soname}" for folder in folders]
    conda = [f"{folder}/../../{soname}" for folder in folders if folder.endswith(("/site-packages", "/dist-packages"))]
    return [*wheels, *conda, f"/usr/local/cuda/lib64/{soname}", soname]


def find_nccl(environment: Mapping[str, str], has_gpu: bool, driver: int = 0) -> Finding:
    """The NCCL that ranks would use, and what it is too old for."""
    said = load("nccl", "libnccl.so", nccl_files(environment))
    command = f"{PIP} -U nvidia-nccl-{'cu12' if 0 < driver < 13000 else 'cu13'}"
    if environment.get(NCCL_VARIABLE):
        command = f"unset {NCCL_VARIABLE}"
    slow = "tensors of several GPUs go through host memory, which is slower"
    if "path" not in said:
        return Finding("NCCL", "", "", said["error"], slow, command) if has_gpu else Finding("NCCL", note=_NOT_NEEDED)
    number, where = said["number"], said["path"]
    # 2.8 and older count 2708, newer ones 22708.
    major, rest = divmod(number, 10000 if number >= 10000 else 1000)
    version = f"{major}.{rest // 100}.{rest % 100}"
    if number < OLDEST_NCCL:
        missing = (f"2.27 is the oldest that is used; {slow}", command) if has_gpu else ()
        return Finding("NCCL", version, where, "too old", *missing)
    can_share = number >= NCCL_OF_SHARED_GPUS
    note = "ranks can share a GPU (FARANDOLE_SHARE_GPU)" if can_share else "a GPU per rank"
    return Finding("NCCL", version, where, note if has_gpu else _NOT_NEEDED)


def find_plugin(environment: Mapping[str, str], has_gpu: bool) -> Finding:
    """libfarandole_cuda.so: the real one, or the stub of a build without nvcc."""
    name = "libfarandole_cuda"
    named = environment.get(PLUGIN_VARIABLE)
    file = named or str(_HERE / f"{name}.so")
    said = load("plugin", os.path.basename(file), [file])
    text = str(said.get("said") or said.get("error"))
    if text.startswith("it belongs to build"):
        note = "a fake GPU, for tests" if "fake" in os.path.basename(file) else ""
        return Finding(name, _core.version, said["path"], note)
    if not has_gpu:
        return Finding(name, note=f"a build without CUDA; {_NOT_NEEDED}")
    why = "tensors on a GPU are refused; it is built where nvcc 12.1 or newer is on the PATH"
    build = f"PATH=/usr/local/cuda/bin:$PATH {PIP} --force-reinstall ."
    command = f"unset {PLUGIN_VARIABLE}" if named else build
    return Finding(name, note=text, why=why, command=command)


def find_all(environment: Mapping[str, str]) -> list[Finding]:
    """Everything, in the order of the report."""
    return [
        Finding("farandole", _core.version, str(_HERE)),
        Finding("Python", platform.python_version(), sys.executable),
        Finding("NumPy", np.__version__, os.path.dirname(np.__file__)),
        find_torch(), *find_mpi(environment), *find_gpu(environment),
    ]  # fmt: skip


def try_two_ranks(environment: Mapping[str, str]) -> TwoRanks:
    """Runs ``_two_ranks.py`` with ``farandolerun -np 2`` in this environment."""
    launcher = [sys.executable, "-m", "farandole.runner", "-np", "2", "--start-timeout", "30"]
    try:
        done = subprocess.run(
            [*launcher, sys.executable, "-m", "farandole._two_ranks"], env={"OMP_NUM_THREADS": "1", **environment},
            capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=_RANKS_TIMEOUT_S,
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


def as_dict(findings: Sequence[Finding], two_ranks: TwoRanks, settings: Mapping[str, str]) -> dict[str, Any]:
    """Everything under the names of the report, in lower case."""
    report: dict[str, Any] = {}
    for one in findings:
        fields = one._asdict()
        name = fields.pop("name").lower()
        report[name] = {"found": bool(one.version), "missing": one.is_missing, **fields}
    return report | {"two_ranks": two_ranks._asdict(), "settings": dict(settings)}


def as_text(findings: Sequence[Finding], two_ranks: TwoRanks, settings: Mapping[str, str]) -> str:
    """The report: a line for each thing, the two ranks, the settings, and what would help."""
    lines = []
    for one in findings:
        what = f"{one.version}  {one.where}".strip() or ("missing" * one.is_missing)
        note = f"  ({one.note})" if one.note and what else one.note
        lines.append(f"{one.name:<17} {what}{note}")
    lines += [f"{'setting':<17} {name}={value}" for name, value in settings.items()]
    if two_ranks.works:
        latency, speed = two_ranks.latency_4_bytes_us, two_ranks.bandwidth_64_mib_gb_per_s
        figures = f"an allreduce of 4 bytes takes {latency} us, one of 64 MiB runs at {speed} GB/s"
        lines += ["", f"Two ranks work here: {figures}."]
    else:
        lines += ["", "Two ranks do not work here:\n  " + two_ranks.reason.replace("\n", "\n  ")]
    for one in filter(lambda one: one.is_missing, findings):
        lines += ["", f"{one.name} is missing: {one.why}.", f"  {one.command}"]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """``farandole doctor``. Returns the exit code: 0 if two ranks work here, else 1."""
    parser = argparse.ArgumentParser(
        prog="farandole doctor",
        description="Says what is installed, whether two ranks work here, and what would help.",
        epilog="Exit code 0 if two ranks work here, else 1.",
    )
    parser.add_argument("--json", action="store_true", help="the same as one JSON object")
    is_json = parser.parse_args(argv).json
    names = [name for name in sorted(os.environ) if name.startswith(("FARANDOLE_", "HOROVOD_"))]
    report = (find_all(os.environ), try_two_ranks(os.environ), {name: os.environ[name] for name in names})
    print(json.dumps(as_dict(*report), indent=2) if is_json else as_text(*report))
    return 0 if report[1].works else 1
