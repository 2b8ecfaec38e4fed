"""Where ranks leave the files of their flight recorders if the user has not said where: in a folder of the job's own.

The library makes it with the first file, so a job that nothing happens to leaves none. Folders of old jobs go when a
later one leaves its own. Large jobs have none: a file takes up to 0.6 MB of what may be a quota. Of a path in the
variable the library makes what comes after "/./", here all below the user's directory; of any other only the last part.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import time

VARIABLE = "FARANDOLE_FLIGHT_RECORDER_DIR"
_RECORD = "FARANDOLE_RECORD"  # the library leaves them there then
_MOST_JOBS = 10
_MOST_S = 30 * 86400.0
_LEAST_S = 3600.0  # its job may still run, on another host, or be one of many that were started together
_OTHER_CLOCKS_S = 60.0  # by which that of a file server may be behind
_MOST_RANKS = 64  # of a job that has a folder without asking
_FILES = "farandole-*.json*"  # those that were not finished, too
_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")

_chosen = ""  # by this process, a rank of another launcher's


def folder_of_jobs() -> pathlib.Path | None:
    """The folder of all jobs' folders; None if nobody knows where the user's are."""
    state = pathlib.Path(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state"))
    return state / "farandole" if state.is_absolute() else None


def for_launcher(np: int) -> str:
    """The folder of the job of so many ranks that this process will start; empty if it needs none."""
    return _choose(f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}", np)


def for_hosts(folder: str) -> str:
    """The launcher's folder as its supervisors get it: "~/./..." where it can be, for each host's own user."""
    own = os.path.expanduser("~")
    return f"~/.{folder.removeprefix(own)}" if folder.startswith(own + "/") else f"/.{folder}"


def for_rank() -> str:
    """The folder of this rank's job if another launcher than Farandole's has started it with others, else empty."""
    global _chosen
    sizes = [os.environ.get(name, "") for name in _SIZES]
    size = max((int(size) for size in sizes if size.isdecimal()), default=1)
    if size == 1:
        return ""
    _chosen = _choose(_name_of_job(), size) or _chosen
    return _chosen and f"/.{_chosen}"


def _name_of_job() -> str:
    """What the ranks of a host, and where the launcher gives jobs a name all ranks, have in common; empty: nothing.

    Without a name it is their parent, whose number is another's later, but then with another start.
    """
    get = os.environ.get
    names = [get("TORCHELASTIC_RUN_ID", ""), get("PMIX_NAMESPACE", "")]
    if get("SLURM_STEP_NUM_TASKS", "1") != "1":  # not of a shell that starts many
        names.append(f"{get('SLURM_JOB_ID', '')}.{get('SLURM_STEP_ID', '')}")
    for name in names:
        if name not in ("", "none", "."):
            return re.sub(r"[^\w-]", "_", name)
    with contextlib.suppress(OSError, IndexError), open(f"/proc/{os.getppid()}/stat") as file:
        return f"{os.getppid()}-{file.read().rpartition(')')[2].split()[19]}"  # field 22 of proc_pid_stat(5)
    return ""


def _choose(name: str, size: int) -> str:
    parent = folder_of_jobs()
    is_chosen = VARIABLE in os.environ or os.environ.get(_RECORD)
    return "" if parent is None or is_chosen or not name or size > _MOST_RANKS else str(parent / name)


def chosen_by_user() -> str:
    """Where they go if the user has said where; empty: nowhere, or where this module says."""
    folder = os.environ.get(VARIABLE) or os.environ.get(_RECORD, "")
    return "" if folder == "none" else folder


def left_by_rank() -> str:
    """The folder that :func:`for_rank` gave, if there are files in it."""
    return _chosen if has_files(_chosen) else ""


def has_files(folder: str, since_s: float = 0.0) -> bool:
    """Whether ranks have left files there since about a time of day; makes room for those of later jobs then."""
    if not folder:
        return False
    found = pathlib.Path(folder)
    try:
        is_any = any(path.stat().st_mtime >= since_s - _OTHER_CLOCKS_S for path in found.glob(_FILES))
    except OSError:
        return False
    if is_any and found.parent == folder_of_jobs():
        _tidy(found.parent)
    return is_any


def _tidy(parent: pathlib.Path) -> None:
    """Removes what is older than a month, and all but the newest folders, of jobs that are over."""
    with contextlib.suppress(OSError):  # another process does the same
        for number, (changed_s, folder) in enumerate(_newest_first(parent)):
            age_s = time.time() - changed_s
            if age_s > _LEAST_S and (number >= _MOST_JOBS or age_s > _MOST_S):
                for file in folder.glob(_FILES):
                    file.unlink()
                with contextlib.suppress(OSError):  # it has files of somebody else's
                    folder.rmdir()


def _newest_first(parent: pathlib.Path) -> list[tuple[float, pathlib.Path]]:
    """The folders there, with the time of day when each was changed."""
    found = []
    for entry in os.scandir(parent):
        with contextlib.suppress(OSError):  # another process has removed it
            if entry.is_dir(follow_symlinks=False):
                found.append((entry.stat(follow_symlinks=False).st_mtime, pathlib.Path(entry)))
    return sorted(found, reverse=True)


def newest() -> pathlib.Path | None:
    """The folder that the last job has left."""
    with contextlib.suppress(OSError):
        return next((folder for _, folder in _newest_first(folder_of_jobs() or pathlib.Path())), None)
    return None
