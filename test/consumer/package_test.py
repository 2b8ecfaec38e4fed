"""What pip and CMake get: the source distribution, an editable installation, what a machine may lack."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("FARANDOLE_TEST_BUILD_DIR", ROOT / "build" / "release"))
BUILT_FROM = ["CMakeLists.txt", "CMakePresets.json", "bindings", "coordinator", "core", "examples",
              "ops", "pyproject.toml", "setup.py"]  # fmt: skip


def run(*command: object, **options: object) -> tuple[int, str]:
    done = subprocess.run([*map(str, command)], text=True, check=False, timeout=300,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)  # fmt: skip
    return done.returncode, done.stdout


def call_build_backend(hook: str, into: pathlib.Path, source: pathlib.Path) -> pathlib.Path:
    """What pip calls; gives the file made."""
    program = f"from setuptools import build_meta; build_meta.{hook}({str(into)!r})"
    code, output = run(sys.executable, "-c", program, cwd=source,
                       env=os.environ | {"FARANDOLE_BUILD_DIR": str(BUILD)})  # fmt: skip
    assert code == 0, output
    return next(into.glob("farandole-*.*"))


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory) -> pathlib.Path:
    """The source distribution, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(call_build_backend("build_sdist", folder, ROOT)) as archive:
        archive.extractall(folder)
    return next(path for path in folder.iterdir() if path.is_dir())


def test_a_source_distribution_holds_all_that_is_built(unpacked):
    code, output = run("git", "ls-files", "--", *BUILT_FROM, cwd=ROOT)
    if code != 0:
        pytest.skip("not a git checkout")
    assert [name for name in output.split() if not (unpacked / name).exists()] == []
    assert list(unpacked.rglob("*.so")) == []


def test_an_editable_installation_runs_from_the_sources(unpacked, tmp_path):
    if not (BUILD / "build.ninja").exists():
        pytest.skip(f"there is no build in {BUILD} (FARANDOLE_TEST_BUILD_DIR)")
    with zipfile.ZipFile(call_build_backend("build_editable", tmp_path, unpacked)) as wheel:
        pth = next(name for name in wheel.namelist() if name.endswith(".pth"))
        path = wheel.read(pth).decode().strip()
    assert pathlib.Path(path) == unpacked / "bindings" / "python"
    program = "import farandole as f; f.init(); print(f.size(), f._core.__file__)"
    code, output = run(sys.executable, "-c", program, cwd=tmp_path,
                       env=os.environ | {"PYTHONPATH": path})  # fmt: skip
    assert code == 0, output
    assert output.split()[0] == "1" and output.split()[1].startswith(path), output


def test_a_wheel_in_an_environment_of_its_own_runs_the_five_lines_of_the_readme(unpacked, tmp_path):
    """What the wheel requires, and torch, are those of this interpreter: nothing is fetched."""
    if not (BUILD / "build.ninja").exists():
        pytest.skip(f"there is no build in {BUILD} (FARANDOLE_TEST_BUILD_DIR)")
    wheel, bin = call_build_backend("build_wheel", tmp_path, unpacked), tmp_path / "venv" / "bin"
    run(sys.executable, "-m", "venv", bin.parent)
    path = pathlib.Path(run(bin / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")[1].strip())
    (path / "others.pth").write_text("".join(f"{one}\n" for one in sys.path if one.endswith("site-packages")))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    code, output = run(bin / "pip", "install", "--no-index", "--no-deps", "--ignore-installed", wheel, env=environment)
    assert code == 0, output
    diffs = re.findall(r"^```diff\n(  import torch\n.*?)^```", (unpacked / "README.md").read_text(), re.M | re.S)
    [diff] = [one for one in diffs if "+ import farandole.torch as hvd\n" in one]
    lines = [line[2:] for line in diff.splitlines() if not line.startswith("-")]
    (tmp_path / "train.py").write_text("\n".join(["import farandole", "print(farandole.__file__)", *lines]))
    code, output = run(bin / "farandolerun", "-np", "2", bin / "python", "train.py", cwd=tmp_path, env=environment)
    assert code == 0 and output.count(f"{path}/farandole/__init__.py") == 2, output
    weights = re.findall(r"loss [\d.]+, weights ([\d.]+)", output)
    assert len(weights) == 2 and len({*weights}) == 1, output


@pytest.mark.parametrize("has_jaxlib", [True, False])
def test_a_build_reads_jaxlibs_header_where_its_interpreter_has_it(has_jaxlib, unpacked, tmp_path):
    """An isolated one, which imports nothing that is installed there, but what pip puts on its path."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path)
    python, cmake = tmp_path / "bin" / "python", tmp_path / "bin" / "cmake"
    include = pathlib.Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")[1].strip())
    header = include / "jaxlib" / "include" / "xla" / "ffi" / "api" / "c_api.h"
    if has_jaxlib:
        header.parent.mkdir(parents=True)
        header.touch()
    cmake.write_text(f'#!/bin/sh\necho "$*" >>{tmp_path}/calls\n')
    cmake.chmod(0o755)
    site = next(path for path in sys.path if (pathlib.Path(path) / "setuptools").is_dir())
    environment = {name: value for name, value in os.environ.items() if name != "FARANDOLE_BUILD_DIR"}
    code, output = run(python, "-c", f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})",
                       cwd=unpacked, env=environment | {
                           "PYTHONPATH": site, "PATH": f"{cmake.parent}:{os.environ['PATH']}"})  # fmt: skip
    assert code == 0, output
    configure, build, install = (tmp_path / "calls").read_text().splitlines()
    assert (f"-DFARANDOLE_XLA_INCLUDE={header.parents[3]}" in configure) == has_jaxlib
    assert "farandole_xla" in build and "--component python" in install


def test_what_an_installation_leaves_in_the_sources_is_no_reason_for_another(unpacked, tmp_path):
    shutil.copytree(unpacked, tmp_path / "copy")
    module = tmp_path / "copy" / "bindings" / "python" / "farandole" / "basics.py"

    def digest() -> str:
        code, output = run("bash", "-c", "source examples/setup_env.sh && package_digest", cwd=tmp_path / "copy")
        assert code == 0, output
        return output

    at_first = digest()
    made = [module.parents[1] / "farandole.egg-info" / "SOURCES.txt", module.parent / "__pycache__" / "basics.pyc",
            module.parent / "libfarandole.so.1"]  # fmt: skip
    for file in made:
        file.parent.mkdir(exist_ok=True)
        file.write_text(file.name)
    assert digest() == at_first
    module.write_text(module.read_text() + "# changed")
    assert digest() != at_first


@pytest.mark.parametrize(
    ("package", "named", "command"),
    [
        ("hwy", "Highway", "apt install libhwy-dev"),
        ("Protobuf", "the library of Protocol Buffers", "apt install libprotobuf-dev"),
        ("pybind11", "pybind11 3", "-m pip install 'pybind11>=3'"),
        ("GTest", "GoogleTest", "apt install libgtest-dev"),
    ],
)
def test_a_missing_dependency_is_named_with_its_remedy(package, named, command, tmp_path):
    code, output = run("cmake", "-S", ROOT, "-B", tmp_path, "-G", "Ninja", "-DFARANDOLE_MPI=OFF",
                       "-DFARANDOLE_CUDA=OFF", f"-DPython_EXECUTABLE={sys.executable}",
                       f"-DCMAKE_DISABLE_FIND_PACKAGE_{package}=ON")  # fmt: skip
    said = " ".join(output.split())
    assert code != 0 and f"Farandole needs {named}" in said, output
    assert command.replace(" ", "") in said.replace(" ", ""), output  # CMake breaks lines anywhere


def test_a_build_folder_outlives_pips_environment(tmp_path):
    """pip makes a new one, elsewhere, for each build; those of a checkout share their build folder."""
    for name in ("first", "second"):
        header = tmp_path / name / "tvm_ffi" / "include" / "dlpack" / "dlpack.h"
        header.parent.mkdir(parents=True)
        header.touch()
        (tmp_path / name / "tvm_ffi" / "__init__.py").touch()
        code, output = run("cmake", "-S", ROOT, "-B", tmp_path / "build", "-G", "Ninja", "-DFARANDOLE_MPI=OFF",
                           "-DFARANDOLE_CUDA=OFF", "-DFARANDOLE_TESTS=OFF", f"-DPython_EXECUTABLE={sys.executable}",
                           env=os.environ | {"PYTHONPATH": str(tmp_path / name)})  # fmt: skip
        assert code == 0, output
        shutil.rmtree(tmp_path / name)
    rules = (tmp_path / "build" / "build.ninja").read_text()
    assert str(tmp_path / "second") in rules and str(tmp_path / "first") not in rules


def test_ctest_fails_where_programs_are_not_built(tmp_path):
    code, output = run("cmake", "-S", ROOT, "-B", tmp_path, "-G", "Ninja", "-DFARANDOLE_MPI=OFF",
                       "-DFARANDOLE_CUDA=OFF", "-DFARANDOLE_PYTHON=OFF")  # fmt: skip
    assert code == 0, output
    for label in ("unit", "simulation", "conformance", "integration"):
        code, output = run("ctest", "--test-dir", tmp_path, "-L", label)
        assert code != 0 and ".is_built" in output, output
