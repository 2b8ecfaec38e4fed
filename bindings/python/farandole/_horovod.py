"""Horovod's environment variables: what the library reads under names of its own."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import sys
from collections.abc import Iterator

from farandole import _flight_folder

_HOROVOD, _FARANDOLE = "HOROVOD_", "FARANDOLE_"
_SETTINGS = {  # in Horovod's words: in ours, if they differ
    "FUSION_THRESHOLD": "",
    "AUTOTUNE": "",
    "AUTOTUNE_LOG": "",
    "STALL_CHECK_TIME_SECONDS": "STALL_WARNING_S",
    "STALL_SHUTDOWN_TIME_SECONDS": "STALL_SHUTDOWN_S",
    "STALL_CHECK_DISABLE": "",
    "START_TIMEOUT": "INIT_TIMEOUT_S",
    "HIERARCHICAL_ALLREDUCE": "",
    "LOG_LEVEL": "",
    "TIMELINE": "",
    "TIMELINE_MARK_CYCLES": "",
    "GLOO_IFACE": "INTERFACE",
}
_SWITCHES = ("AUTOTUNE", "STALL_CHECK_DISABLE", "HIERARCHICAL_ALLREDUCE", "TIMELINE_MARK_CYCLES")
# Read by core/launcher.cc, or true anyway: process sets are dynamic, and messages have no time.
_SILENT = re.compile("(LOCAL_|CROSS_)?(RANK|SIZE)|HOSTNAME|DYNAMIC_PROCESS_SETS|LOG_HIDE_TIME")
# Without a meaning here: of Horovod's core, launchers and build.
_IGNORED = re.compile(
    "ADASUM_MPI_CHUNK_SIZE|ALLOW_MIXED_GPU_IMPL|BATCH_D2D_MEMCOPIES|CACHE_CAPACITY|"
    "CCL_CACHE|CMAKE|CONTROLLER|CPU_OPERATIONS|CYCLE_TIME|DEBUG|DISABLE_GROUP_FUSION|"
    "DISABLE_NVTX_RANGES|ELASTIC|ENABLE_ASYNC_COMPLETION|ENABLE_XLA_OPS|GPU|"
    "HIERARCHICAL_ALLGATHER|LOCAL_VERSION|MIXED_INSTALL|MPI_THREADS_DISABLE|NUM_NCCL_STREAMS|"
    "NVTX_INCLUDE|SECRET_KEY|SKIP_COMPILE|THREAD_AFFINITY|TORUS_ALLREDUCE|"
    "(AUTOTUNE|BUILD|CUDA|ELASTIC|GLOO|GPU|NCCL|ROCM|SPARK|TEST|WITH|WITHOUT)_.*"
)
_is_reported = False


@contextlib.contextmanager
def settings() -> Iterator[None]:
    """Within it, what is set under Horovod's names alone is set under ours, and the folder of the job's files.

    An error that the library raises there names the variable that the user has set.
    """
    translated = {}
    if folder := _flight_folder.for_rank():
        os.environ[_flight_folder.VARIABLE] = folder
    for name, ours in _SETTINGS.items():
        ours = _FARANDOLE + (ours or name)
        value = os.environ.get(_HOROVOD + name)
        if not value or os.environ.get(ours) or os.environ.get(_FARANDOLE + name):
            continue
        if name in _SWITCHES:  # as Horovod reads them: "true" and "yes" are 0
            number = re.match(r"\s*[+-]?\d+", value)
            value = "1" if number and int(number[0]) > 0 else "0"
        translated[ours] = _HOROVOD + name
        os.environ[ours] = value
    try:
        yield
    except ValueError as error:
        ours, junk, rest = str(error).partition('="')
        if junk and ours in translated:
            raise ValueError(translated[ours] + junk + rest) from None
        raise
    finally:
        for ours in [*translated, *([_flight_folder.VARIABLE] if folder else [])]:
            os.environ.pop(ours, None)


def report(rank: int, size: int) -> None:
    """Warns about the variables that mean nothing here: on rank 0, once per process."""
    global _is_reported
    level = os.environ.get("FARANDOLE_LOG_LEVEL") or os.environ.get("HOROVOD_LOG_LEVEL") or ""
    if rank != 0 or _is_reported:
        return
    _is_reported = True
    lines, ignored = [], []
    for name in sorted(one[len(_HOROVOD) :] for one in os.environ if one.startswith(_HOROVOD)):
        if name in _SETTINGS or _SILENT.fullmatch(name):
            continue
        if _IGNORED.fullmatch(name):
            ignored.append(_HOROVOD + name)
            continue
        # A slip of the keys, or a part of a name.
        part = [s for s in _SETTINGS if len(name) > 4 and (s.startswith(name) or name.startswith(s))]
        near = part or difflib.get_close_matches(name, _SETTINGS, 1, 0.8)
        uses = ", ".join(_HOROVOD + one for one in _SETTINGS)
        hint = f"did you mean {_HOROVOD}{near[0]}?" if near else f"of Horovod's it uses {uses}"
        lines.append(f"{_HOROVOD}{name} is not a setting that Farandole uses; {hint}")
    if ignored:
        lines.append("ignored, without a meaning here: " + ", ".join(ignored))
    if level.lower() not in ("error", "off", "fatal"):
        for line in lines:
            print(f"[farandole {rank}/{size}] warning: {line}", file=sys.stderr, flush=True)
