"""Loads a foreign library in a child process and asks what it is: here it would stay, and use a GPU.

The child is this file, run as ``python -I -S _probe.py KIND PART PRELOAD FILE...``.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any

_TIMEOUT_S = 60


def load(
    kind: str, part: str, files: Iterable[str], preload: str = "",
    environment: Mapping[str, str] = os.environ,
) -> dict[str, Any]:  # fmt: skip
    """What a library says of itself, with its "path"; {"error": why} if no file can be loaded.

    The first of ``files`` that can be is loaded, after ``preload``. Asked is, in the way of its ``kind``
    ("cuda", "nccl", "plugin", "mpi"), what then is mapped and has ``part`` in its path.
    """
    command = [sys.executable, "-I", "-S", __file__, kind, part, preload, *files]
    try:
        done = subprocess.run(command, env=dict(environment), capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {"error": f"it did not answer within {_TIMEOUT_S} s"}
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return {"error": lines[-1].removeprefix("OSError: ")}
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _ask(kind: str, library: ctypes.CDLL) -> dict[str, Any]:
    number, text = ctypes.c_int(), ctypes.create_string_buffer(8192)
    if kind == "nccl":
        library.ncclGetVersion(ctypes.byref(number))
        return {"number": number.value}
    if kind == "mpi":
        library.MPI_Get_library_version(text, ctypes.byref(number))
        return {"said": text.value.decode(errors="replace")}
    if kind == "plugin":  # no library is of the build "", so it says what it is, and no more
        library.farandole_plugin(b"", None, None, text, ctypes.c_size_t(len(text)))
        return {"said": text.value.decode()}
    library.cuDriverGetVersion(ctypes.byref(number))
    said = {"number": number.value, "init": library.cuInit(0), "gpus": []}
    library.cuDeviceGetCount(ctypes.byref(number))
    for index in range(number.value if said["init"] == 0 else 0):
        device = ctypes.c_int()
        library.cuDeviceGet(ctypes.byref(device), index)
        library.cuDeviceGetName(text, len(text), device)
        said["gpus"].append(text.value.decode())
    return said


def _main(kind: str, part: str, preload: str, *files: str) -> dict[str, Any]:
    if preload:
        ctypes.CDLL(preload, ctypes.RTLD_GLOBAL)
    errors = []
    for file in files:
        try:
            ctypes.CDLL(file)
        except OSError as error:
            errors.append(str(error))
            continue
        with open("/proc/self/maps", encoding="utf-8") as maps:
            paths = [line.split(None, 5)[5].strip() for line in maps if part in line]
        return {"path": paths[0], **_ask(kind, ctypes.CDLL(paths[0]))} if paths else {}
    return {"error": errors[0]}


if __name__ == "__main__":
    print(json.dumps(_main(*sys.argv[1:])))
