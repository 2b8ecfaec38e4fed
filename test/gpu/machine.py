"""What the machine has, as one JSON object: GPUs, driver, torch, NCCL, tools. Creates no context."""

import ctypes
import glob
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig

SHARING_NCCL = 23000  # from 2.30 on ranks may share a GPU
NO_TORCH = {"torch": "", "torch_nccl": 0, "why_no_torch": "there is no GPU"}


def gpus() -> dict:
    """How many GPUs the CUDA driver has, and their names; or why it has none."""
    found = {"gpu_count": 0, "gpus": [], "driver": 0, "why_no_gpu": ""}
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return found | {"why_no_gpu": f"there is no CUDA driver ({error})"}
    number, count = ctypes.c_int(), ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(number))
    found["driver"] = number.value
    code = cuda.cuInit(0)
    if code != 0:
        return found | {"why_no_gpu": f"the CUDA driver does not start: cuInit gives {code}"}
    cuda.cuDeviceGetCount(ctypes.byref(count))
    for index in range(count.value):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
        cuda.cuDeviceGet(ctypes.byref(device), index)
        cuda.cuDeviceGetName(name, 256, device)
        found["gpus"].append(name.value.decode())
    why = "" if count.value else "the CUDA driver has no GPU"
    return found | {"gpu_count": count.value, "why_no_gpu": why}


def torch() -> dict:
    """The version of torch and of its NCCL, if it sees a GPU; asked in a process of its own."""
    ask = (
        "import torch; sees = torch.cuda.is_available();"
        "print(torch.__version__, torch.version.cuda, sees, *torch.cuda.nccl.version() if sees else ())"
    )
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return NO_TORCH | {"why_no_torch": (done.stderr.strip().splitlines() or ["?"])[-1]}
    version, cuda, sees, *numbers = done.stdout.split()
    if sees != "True":
        return NO_TORCH | {"why_no_torch": f"torch {version} (CUDA {cuda}) sees no GPU"}
    major, minor, patch = map(int, numbers[:3])
    return {"torch": version, "torch_nccl": 10000 * major + 100 * minor + patch, "why_no_torch": ""}


def nccl_in(files: list[str]) -> dict:
    """The first of the files that can be loaded, and its version; or why none can."""
    errors = []
    for file in files:
        try:
            library = ctypes.CDLL(file)
        except OSError as error:
            errors.append(str(error))
            continue
        number = ctypes.c_int()
        library.ncclGetVersion(ctypes.byref(number))
        return {"nccl_version": number.value, "nccl_file": file, "why_no_nccl": ""}
    return {"nccl_version": 0, "nccl_file": "", "why_no_nccl": "; ".join(errors)}


def nccl(kits: str) -> dict:
    """FARANDOLE_NCCL's, else that of this interpreter's wheel, else the loader's, else the kit's.

    And the one for ranks that share a GPU: the same if it can do that, else the kit's.
    """
    wheel = os.path.join(sysconfig.get_path("purelib"), "nvidia", "nccl", "lib", "libnccl.so.2")
    named = os.environ.get("FARANDOLE_NCCL")
    found = nccl_in([named] if named else [wheel, "libnccl.so.2", kits])
    shared = found
    if not named and found["nccl_version"] < SHARING_NCCL:
        shared = nccl_in([kits])
    return found | {"shared_" + key: shared[key] for key in ("nccl_version", "nccl_file")}


def sanitizer() -> str:
    """The path of compute-sanitizer, or nothing."""
    places = [*sorted(glob.glob("/usr/local/cuda*/bin/compute-sanitizer"), reverse=True)]
    return shutil.which("compute-sanitizer") or (places[0] if places else "")


def main() -> None:
    """Prints everything; torch, which takes seconds, is asked only where there is a GPU.

    The argument is the kit's libnccl, which need not be there.
    """
    found = {"python": platform.python_version(), "compute_sanitizer": sanitizer()} | gpus()
    has_gpu = found["gpu_count"] > 0
    found |= torch() if has_gpu else NO_TORCH
    print(json.dumps(found | nccl(sys.argv[1])))


if __name__ == "__main__":
    main()
