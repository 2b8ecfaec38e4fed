"""Which mpirun is used, and which libmpi goes with it; with made-up installations."""

import os
import pathlib
import subprocess
import sys

import pytest

from farandole.runner import mpirun
from farandole.runner.mpirun import UsageError

pytestmark = pytest.mark.mpi

LIBMPI_4 = mpirun.Found("/no/such/prefix/lib/libmpi.so.40", "4.1.4")
LIBMPI_5 = "lib/libmpi.so.40"


def make_mpirun(prefix, text):
    """Writes an mpirun that says ``text``, and a file where its libmpi would be."""
    path = prefix / "bin" / "mpirun"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\necho '{text}'\n")
    path.chmod(0o755)
    library = prefix / LIBMPI_5
    library.parent.mkdir()
    library.write_text("")
    return str(path)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with folders for a Python environment and for a PATH, and a loader whose answers are given."""
    loads = {"": LIBMPI_4}

    def load(library, environment):
        return loads.get(library, mpirun.Found(error="no such file"))

    monkeypatch.setattr(mpirun, "library_of_ranks", load)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    return tmp_path, loads


def environment_of(folder):
    return {"PATH": f"{folder}/bin:/bin"}


@pytest.mark.parametrize("text, version", [
    ("mpirun (Open MPI) 4.1.4\n\nReport bugs", "4.1.4"),
    ("Open MPI v5.0.11, package: Open MPI user@host", "5.0.11"),
    ("mpirun (Open MPI) 5.1.0a1", "5.1.0a1"),
    ("HYDRA build details:\n Version: 4.2", ""),
])  # fmt: skip
def test_versions_are_read(text, version):
    assert mpirun.version_in(text) == version


def test_an_mpirun_that_matches_what_is_loaded_changes_nothing(machine):
    folder, _ = machine
    path = make_mpirun(folder / "sys", "mpirun (Open MPI) 4.1.4")
    pair = mpirun.find_pair(environment_of(folder / "sys"))
    assert (pair.program, pair.library, pair.differ) == (mpirun.Found(path, "4.1.4"), LIBMPI_4, "")
    assert pair.environment() == {}


def test_the_python_environments_mpirun_comes_first_and_brings_its_library(machine, monkeypatch):
    folder, loads = machine
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    make_mpirun(folder / "sys", "mpirun (Open MPI) 4.1.4")
    make_mpirun(folder / "venv", "mpirun (Open MPI) 5.0.11")
    library = str(folder / "venv" / LIBMPI_5)
    loads[library] = mpirun.Found(library, "5.0.11")
    pair = mpirun.find_pair(environment_of(folder / "sys"))
    assert (pair.program.version, pair.library.path, pair.differ) == ("5.0.11", library, "")
    assert pair.environment() == {
        "FARANDOLE_MPI_LIBRARY": library,
        "LD_LIBRARY_PATH": str(pathlib.Path(library).parent),
    }


def test_an_mpirun_whose_library_cannot_be_loaded_is_said_to_differ(machine):
    folder, _ = machine
    path = make_mpirun(folder / "sys", "mpirun (Open MPI) 5.0.11")
    assert mpirun.find_pair(environment_of(folder / "sys")).differ == (
        f"mpirun is Open MPI 5.0.11 ({path}), "
        "but the ranks load Open MPI 4.1.4 (/no/such/prefix/lib/libmpi.so.40)"
    )


def test_a_library_that_was_named_is_kept_and_brings_its_mpirun(machine):
    folder, loads = machine
    make_mpirun(folder / "sys", "mpirun (Open MPI) 4.1.4")
    make_mpirun(folder / "opt", "mpirun (Open MPI) 5.0.11")
    library = str(folder / "opt" / LIBMPI_5)
    loads[library] = mpirun.Found(library, "5.0.11")
    environment = environment_of(folder / "sys") | {"FARANDOLE_MPI_LIBRARY": library}
    pair = mpirun.find_pair(environment)
    assert pair.program.path == str(folder / "opt" / "bin" / "mpirun")
    assert pair.differ == "" and pair.environment() == {}


def test_a_named_library_that_cannot_be_loaded_is_refused(machine):
    folder, _ = machine
    with pytest.raises(
        UsageError, match='FARANDOLE_MPI_LIBRARY="/x" cannot be loaded: no such file'
    ):
        mpirun.find_pair(environment_of(folder) | {"FARANDOLE_MPI_LIBRARY": "/x"})


def test_another_mpis_mpirun_is_no_mpirun(machine):
    folder, _ = machine
    path = make_mpirun(folder / "sys", "HYDRA build details")
    with pytest.raises(
        UsageError,
        match=f"no mpirun of Open MPI was found .{path} is another MPI's.; install one: ",
    ):
        mpirun.find_pair(environment_of(folder / "sys"))


def test_an_mpirun_in_a_folder_that_is_a_link_is_used_where_it_is(machine):
    folder, _ = machine
    path = make_mpirun(folder / "root" / "usr", "mpirun (Open MPI) 4.1.4")
    (folder / "root" / "bin").symlink_to("usr/bin")
    pair = mpirun.find_pair({"PATH": str(folder / "root" / "bin")})
    assert pair.program.path == path


def test_this_machines_ranks_load_the_libmpi_that_is_named_here():
    pair = mpirun.find_pair(os.environ)
    assert pair.differ == ""
    script = "import farandole, numpy; farandole.init(); print(open('/proc/self/maps').read())"
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("OMPI_")
    }
    done = subprocess.run(
        [sys.executable, "-m", "farandole.runner", "--mpi", "-np", "2", sys.executable, "-c", script],
        capture_output=True, text=True, timeout=60, env=environment,
    )  # fmt: skip
    mapped = {line.split()[-1] for line in done.stdout.splitlines() if "/libmpi.so" in line}
    assert mapped == {os.path.realpath(pair.library.path)}
