"""``farandolerun``, also installed as ``horovodrun``."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import shlex
import sys
from collections.abc import Mapping, Sequence

import farandole
from farandole.doctor import gpu
from farandole.run import arguments, command_line, job, mpi
from farandole.run.errors import UsageError

USAGE_ERROR = 2


def _check_nesting(environment: Mapping[str, str]) -> None:
    if "OMPI_COMM_WORLD_RANK" in environment:
        raise UsageError(
            "this is a rank of a job already; farandolerun cannot be started under mpirun"
        )


def _check_output(folder: str | None) -> None:
    if folder is None:
        return
    try:
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f'--output-filename "{folder}" cannot be made: {error.strerror}'
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f'--output-filename "{folder}" cannot be written to')


def describe_build() -> str:
    """What this installation can do, in the form of ``horovodrun --check-build``."""
    library = mpi.library_of_ranks(os.environ.get(mpi.LIBRARY_VARIABLE, ""), os.environ)
    has_cuda = bool(gpu.find_plugin(os.environ, has_gpu=False).version)
    has_nccl = bool(gpu.find_nccl(os.environ, has_gpu=False).version)

    def box(is_there: bool, what: str) -> str:
        return f"    [{'X' if is_there else ' '}] {what}"

    return "\n".join([
        f"Farandole v{farandole.__version__}:",
        "",
        "Available Frameworks:",
        box(importlib.util.find_spec("torch") is not None, "PyTorch"),
        box(True, "NumPy"),
        "",
        "Available Controllers:",
        box(library.error != mpi.NO_MPI, "MPI"),
        "",
        "Available Tensor Operations:",
        box(library.error != mpi.NO_MPI, "MPI"),
        box(has_cuda and has_nccl, "NCCL"),
        box(has_cuda, "CUDA (through host memory)"),
    ])  # fmt: skip


def run(argv: Sequence[str]) -> int:
    """Does what the command line says. Returns the exit code.

    Raises:
        UsageError: It cannot be done as it is said.
    """
    options = arguments.parse(argv)
    if options.version or options.check_build:
        print(f"farandolerun {farandole.__version__}" if options.version else describe_build())
        return 0
    _check_nesting(os.environ)
    pair = mpi.find_pair(os.environ)
    environment = command_line.make_environment(options, pair, os.environ)
    command = command_line.make_command(options, pair, environment)
    if pair.differ:
        print(f"farandolerun: {pair.differ}", file=sys.stderr)
    if options.dry_run:
        changed = {
            name: value for name, value in environment.items() if os.environ.get(name) != value
        }
        print(
            shlex.join(["env", *(f"{name}={value}" for name, value in changed.items()), *command])
        )
        return 0
    _check_output(options.output_filename)
    if options.verbose:
        library = f"libmpi {pair.library.version} ({pair.library.path})"
        print(f"farandolerun: mpirun {pair.program.version} ({pair.program.path}), {library}",
              f"farandolerun: {shlex.join(command)}", sep="\n", file=sys.stderr)  # fmt: skip
    return job.run(command, environment, options)


def main(argv: Sequence[str] | None = None) -> int:
    """The console script. Returns the exit code; 2 for wrong use, after one sentence."""
    try:
        return run(sys.argv[1:] if argv is None else argv)
    except UsageError as error:
        print(f"farandolerun: {error}", file=sys.stderr)
        return USAGE_ERROR
