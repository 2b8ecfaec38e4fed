"""What tensors on a GPU need: CUDA's driver, NCCL, and a Farandole that was built where nvcc is.

Each library is loaded in a child process; none makes a context on a GPU.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterable, Mapping

import farandole
from farandole.doctor.finding import PIP, Finding

PLUGIN_VARIABLE = "FARANDOLE_CUDA_PLUGIN"
NCCL_VARIABLE = "FARANDOLE_NCCL"
OLDEST_NCCL = 21800
NCCL_OF_SHARED_GPUS = 23000
_NCCL = "libnccl.so.2"
_TIMEOUT_S = 60
_NVIDIA = "0x10de"
_DISPLAY_CLASSES = ("0x0300", "0x0302")  # PCI: VGA and 3D controllers

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


def load(what: str, soname: str, names: Iterable[str]) -> dict[str, object]:
    """Loads a library in a child process and lets it say what it is: "cuda", "nccl" or "plugin"."""
    arguments = [sys.executable, "-I", "-S", "-c", _LOAD, what, soname, *names]
    try:
        done = subprocess.run(
            arguments, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return {"error": f"it did not answer within {_TIMEOUT_S} s"}
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


def find_gpu(environment: Mapping[str, str]) -> list[Finding]:
    """CUDA's driver, NCCL and our own CUDA part. Without a GPU none of them is missing."""
    cuda = load("cuda", "libcuda.so", ["libcuda.so.1"])
    devices = count_nvidia_devices()
    has_gpu = devices > 0 or bool(cuda.get("gpus"))
    driver = int(str(cuda.get("number", 0)))
    return [
        _cuda(cuda, devices),
        find_nccl(environment, has_gpu, driver),
        find_plugin(environment, has_gpu),
    ]


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
    gpus = said["gpus"]
    assert isinstance(gpus, list)
    names = ", ".join(sorted({f"{gpus.count(name)} x {name}" for name in gpus}))
    return Finding("CUDA", version, where, names or "no GPUs")


def nccl_files(environment: Mapping[str, str]) -> list[str]:
    """Where the library looks (ops/nccl/find.h) in a process that has torch's NCCL not mapped yet."""
    if environment.get(NCCL_VARIABLE):
        return [environment[NCCL_VARIABLE]]
    folders = [str(pathlib.Path(farandole.__file__).parent.parent)]
    for package in ("torch", "numpy"):
        spec = importlib.util.find_spec(package)
        for place in (spec.submodule_search_locations if spec else None) or []:
            if (folder := str(pathlib.Path(place).parent)) not in folders:
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
    series = "cu12" if 0 < driver < 13000 else "cu13"
    command = f"{PIP} -U nvidia-nccl-{series}"
    if environment.get(NCCL_VARIABLE):
        command = f"unset {NCCL_VARIABLE}"
    slow = "tensors of several GPUs go through host memory, which is slower"
    if "path" not in said:
        if not has_gpu:
            return Finding("NCCL", note="not needed: no NVIDIA GPU was found")
        return Finding("NCCL", note=str(said["error"]), why=slow, command=command)
    number = int(str(said["number"]))
    # 2.8 and older count 2708, newer ones 22708.
    major, rest = divmod(number, 10000 if number >= 10000 else 1000)
    version, where = f"{major}.{rest // 100}.{rest % 100}", str(said["path"])
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
        return Finding(name, farandole.__version__, str(said["path"]), note)
    if not has_gpu:
        return Finding(name, note="a build without CUDA; not needed: no NVIDIA GPU was found")
    why = "tensors on a GPU are refused; it is built where nvcc 12.1 or newer is on the PATH"
    command = f"PATH=/usr/local/cuda/bin:$PATH {PIP} --force-reinstall ."
    if environment.get(PLUGIN_VARIABLE):
        command = f"unset {PLUGIN_VARIABLE}"
    return Finding(name, note=text, why=why, command=command)
