"""Drives CMake, so that `pip install .` builds libfarandole.so and what goes with it.

Metadata stands in pyproject.toml. The libraries are installed side by side inside the package; they
find one another by their own directory.

FARANDOLE_BUILD_DIR names a configured build directory to take the libraries from (the scripts of this
repository share one); without it a fresh one is configured, with what CMAKE_ARGS adds, for example
-DFARANDOLE_CUDA=OFF. `pip install -e .` puts the libraries beside the package's sources and keeps its build
directory, build/editable, so that the next time takes seconds.
"""

import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import sysconfig

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

SOURCE_DIR = pathlib.Path(__file__).resolve().parent
TARGETS = ["farandole", "farandole_mpi_plugin", "farandole_cuda_plugin", "_core", "farandole_xla"]


def run_cmake(*arguments: object) -> None:
    """Runs cmake and raises CalledProcessError when it fails."""
    subprocess.run(["cmake", *map(str, arguments)], check=True)


def find_jaxlib() -> list[str]:
    """Where jaxlib's header for farandole.jax is, for cmake; none: it is left out.

    An isolated build does not import what is installed beside its interpreter, but can read it. jaxlib is not
    required for a build: with what it needs it is a download of 140 MB.
    """
    folders = [pathlib.Path(sysconfig.get_path(name), "jaxlib", "include") for name in ("platlib", "purelib")]
    found = [path for path in folders if (path / "xla" / "ffi" / "api" / "c_api.h").exists()]
    return [f"-DFARANDOLE_XLA_INCLUDE={path}" for path in found[:1]]


class CMakeBuild(build_ext):
    """Builds the one extension: configures, builds and installs with CMake."""

    def build_extension(self, ext: Extension) -> None:
        """Puts the libraries of the install component `python` into the package."""
        package_dir = pathlib.Path(self.get_ext_fullpath(ext.name)).resolve().parent
        own_dir = self.build_temp
        if self.editable_mode:
            package_dir = SOURCE_DIR / "bindings" / "python" / "farandole"
            own_dir = SOURCE_DIR / "build" / "editable"
        shared_dir = os.environ.get("FARANDOLE_BUILD_DIR")
        build_dir = pathlib.Path(shared_dir or own_dir).resolve()
        if not shared_dir:
            generator = ["-G", "Ninja"] if shutil.which("ninja") else []
            run_cmake("-S", SOURCE_DIR, "-B", build_dir, *generator, "-DFARANDOLE_TESTS=OFF", *find_jaxlib(),
                      f"-DPython_EXECUTABLE={sys.executable}", *shlex.split(os.environ.get("CMAKE_ARGS", "")))
        run_cmake("--build", build_dir, "--parallel", os.cpu_count() or 1, "--target", *TARGETS)
        run_cmake("--install", build_dir, "--component", "python", "--prefix", package_dir, "--strip")

    def copy_extensions_to_source(self) -> None:
        """An editable installation: build_extension has put all there."""


setup(
    package_dir={"": "bindings/python"},
    packages=find_packages("bindings/python", include=["farandole*"]),
    package_data={"farandole": ["*.pyi", "py.typed", "site/horovod/*.py"]},
    ext_modules=[Extension("farandole._core", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
    # Taken from the machine where it has them, else from PyPI, into the isolated build environment.
    setup_requires=[need for tool, need in [("cmake", "cmake>=3.25"), ("ninja", "ninja")]
                    if not shutil.which(tool)],
)
