"""What is installed, from where, in which version; and for what is missing, why it matters."""

from __future__ import annotations

import importlib.util
import pathlib
import platform
import runpy
import sys
from collections.abc import Mapping

import numpy

import farandole
from farandole.doctor.finding import PIP, Finding
from farandole.doctor.gpu import find_gpu
from farandole.run import mpi
from farandole.run.errors import UsageError


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


def find_all(environment: Mapping[str, str]) -> list[Finding]:
    """Everything, in the order of the report."""
    return [*find_python(), *find_mpi(environment), *find_gpu(environment)]
