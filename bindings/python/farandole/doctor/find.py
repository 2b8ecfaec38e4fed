"""What is installed, from where, in which version; and for what is missing, why it matters."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import runpy
import subprocess
import sys
from collections.abc import Iterable, Mapping

import numpy

import farandole
from farandole.run import mpi
from farandole.run.errors import UsageError

PIP = f"{sys.executable} -m pip install"
_TIMEOUT_S = 60
_NVIDIA = "0x10de"
_DISPLAY_CLASSES = ("0x0300", "0x0302")  # PCI: VGA and 3D controllers

# Loads the first library of a list that can be loaded, and prints {"path", "error", what it says}.
_LOAD = """
import ctypes, json, sys
call, soname, *names = sys.argv[1:]
number, answer = ctypes.c_int(), {"error": ""}
for name in names:
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        answer["error"] = answer["error"] or str(error)
        continue
    lines = [line.split(None, 5) for line in open("/proc/self/maps")]
    answer = {"path": next(line[5].strip() for line in lines if len(line) == 6 and soname in line[5])}
    answer["code"] = getattr(library, call)(ctypes.byref(number))
    answer["number"] = number.value
    if call == "cuDriverGetVersion":
        answer["init"] = library.cuInit(0)
        count = ctypes.c_int()
        library.cuDeviceGetCount(ctypes.byref(count))
        answer["count"] = count.value
    break
print(json.dumps(answer))
"""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked for.

    Attributes:
        name: What it is called in the report.
        version: Empty if it was not found.
        where: The file or folder it is taken from; empty if it was not found.
        note: What else there is to say.
        why: What is lost without it; empty if it is there, or nobody needs it here.
        command: The one command that brings it; empty as ``why``.
    """

    name: str
    version: str = ""
    where: str = ""
    note: str = ""
    why: str = ""
    command: str = ""

    @property
    def is_missing(self) -> bool:
        """Whether it would be of use here and is not there."""
        return bool(self.why)


def find_python() -> list[Finding]:
    """Farandole itself, Python, NumPy and torch."""
    package = str(pathlib.Path(farandole.__file__).parent)
    return [
        Finding("farandole", farandole.__version__, package),
        Finding("Python", platform.python_version(), sys.executable),
        Finding("NumPy", numpy.__version__, str(pathlib.Path(numpy.__file__).parent)),
        find_torch(),
    ]


def find_torch() -> Finding:
    """PyTorch, without importing it: that takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return Finding(
            "torch",
            why="farandole.torch, the face for PyTorch, cannot be imported; NumPy arrays work",
            command=f"{PIP} torch",
        )
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
    named = environment.get(mpi.LIBRARY_VARIABLE, "")
    library = mpi.library_of_ranks(named, environment)
    if named and not library.path:
        others = {
            name: value for name, value in environment.items() if name != mpi.LIBRARY_VARIABLE
        }
        return [find_mpi(others)[0], _no_libmpi(library, f"unset {mpi.LIBRARY_VARIABLE}")]
    try:
        pair = mpi.find_pair(environment)
    except UsageError as error:
        why = "it starts the ranks; without it there is one"
        mpirun = Finding("mpirun", note=str(error), why=why, command=mpi.INSTALL_COMMAND)
        return [mpirun, _libmpi(library, "")]
    note = f"in place of {_named(pair.loader_library)}" if pair.environment() else ""
    return [
        Finding("mpirun", pair.program.version, pair.program.path, "Open MPI"),
        _libmpi(pair.library, pair.differ or note),
    ]


def _named(library: mpi.Library) -> str:
    return f"{library.version} ({library.path})" if library.path else "none that the loader finds"


def _libmpi(library: mpi.Library, note: str) -> Finding:
    if library.path:
        return Finding("libmpi", library.version, library.path, note)
    has_plugin = library.error != mpi.NO_MPI
    rebuild = f"apt-get install -y libopenmpi-dev && {PIP} --force-reinstall ."
    return _no_libmpi(library, mpi.INSTALL_COMMAND if has_plugin else rebuild)


def _no_libmpi(library: mpi.Library, command: str) -> Finding:
    why = "it carries bytes between ranks; without it there is one"
    return Finding("libmpi", note=library.error, why=why, command=command)


def _load(call: str, soname: str, names: Iterable[str]) -> dict[str, object]:
    """Loads a library in a child process and lets it say its version."""
    arguments = [sys.executable, "-I", "-S", "-c", _LOAD, call, soname, *names]
    done = subprocess.run(
        arguments, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return {"error": lines[-1]}
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


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


def find_gpu() -> list[Finding]:
    """CUDA's driver and NCCL. Without a GPU neither is missing."""
    cuda = _load("cuDriverGetVersion", "libcuda.so", ["libcuda.so.1"])
    devices = count_nvidia_devices()
    has_gpu = devices > 0 or bool(cuda.get("count"))
    return [_cuda(cuda, devices), _nccl(has_gpu, int(str(cuda.get("number", 0))))]


def _cuda(said: Mapping[str, object], devices: int) -> Finding:
    why = "GPUs cannot be used by any program"
    command = "apt-get install nvidia-driver"
    if "path" not in said:
        if devices == 0:
            return Finding("CUDA", note="not needed: no NVIDIA GPU was found")
        note = f"{devices} NVIDIA GPUs, but {said['error']}"
        return Finding("CUDA", note=note, why=why, command=command)
    number = int(str(said["number"]))
    version, where = f"{number // 1000}.{number % 1000 // 10}", str(said["path"])
    if said["init"] != 0:
        note = f"the driver does not start: cuInit gives {said['init']}"
        return Finding("CUDA", version, where, note, *((why, command) if devices else ()))
    note = f"{said['count']} GPUs; this version of Farandole reduces tensors on the CPU only"
    return Finding("CUDA", version, where, note)


def _nccl_files() -> list[str]:
    """The loader's, then those of the wheels that torch uses."""
    files = ["libnccl.so.2"]
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return files
    for folder in (spec.submodule_search_locations if spec else None) or []:
        files.insert(0, os.path.join(folder, "lib", "libnccl.so.2"))
    return files


def _nccl(has_gpu: bool, driver: int) -> Finding:
    said = _load("ncclGetVersion", "libnccl.so", _nccl_files())
    if "path" in said:
        number = int(str(said["number"]))
        # 2.8 and older count 2708, newer ones 22708.
        major, rest = divmod(number, 10000 if number >= 10000 else 1000)
        version = f"{major}.{rest // 100}.{rest % 100}"
        return Finding("NCCL", version, str(said["path"]), "not used by this version of Farandole")
    if not has_gpu:
        return Finding("NCCL", note="not needed: no NVIDIA GPU was found")
    series = "cu13" if driver >= 13000 else "cu12"
    why = "torch needs it to move tensors between GPUs; this version of Farandole does not use it"
    return Finding("NCCL", note=str(said["error"]), why=why, command=f"{PIP} nvidia-nccl-{series}")


def find_all(environment: Mapping[str, str]) -> list[Finding]:
    """Everything, in the order of the report."""
    return [*find_python(), *find_mpi(environment), *find_gpu()]
