"""The installed package is what it says: dependencies, exports, version."""

import importlib.metadata
import importlib.util
import os
import pathlib
import re
import struct
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Found without importing, so that nothing is loaded that a test then finds loaded.
SPEC = importlib.util.find_spec("farandole")
PACKAGE = pathlib.Path(SPEC.origin).parent if SPEC and SPEC.origin else None
LIBRARY = "libfarandole.so.1"  # with the number of its ABI


def output(*command: object) -> str:
    return subprocess.run([*map(str, command)], check=True, capture_output=True, text=True).stdout


def needed(library: str) -> list[str]:
    return re.findall(r"NEEDED.*\[(.*)\]", output("readelf", "-d", PACKAGE / library))


def exported(library: str) -> list[str]:
    lines = output("nm", "-D", "--defined-only", PACKAGE / library).splitlines()
    return [name.split("@")[0] for name in (line.split()[-1] for line in lines)
            if name != "FARANDOLE_1"]


def gpu_code(library: str) -> tuple[set[int], set[int]]:
    """What GPUs a library has code for, by architecture: as machine code, and as PTX.

    Reads nvcc's containers, whose layout is that of ``fatBinaryHeader_t`` in the toolkit's
    fatbinary_section.h and, for the entries, what cuobjdump shows.
    """
    data = (PACKAGE / library).read_bytes()
    found: dict[int, set[int]] = {1: set(), 2: set()}  # kind: 1 is PTX, 2 machine code
    for start in (match.start() for match in re.finditer(rb"\x50\xed\x55\xba", data)):
        _, header, size = struct.unpack_from("<HHQ", data, start + 4)
        at, end = start + header, start + header + size
        while at < end:
            kind, _, header, size = struct.unpack_from("<HHIQ", data, at)
            found[kind].add(struct.unpack_from("<I", data, at + 28)[0])
            at += header + size
    return found[2], found[1]


def test_the_package_is_installed_in_this_interpreter():
    assert PACKAGE is not None and PACKAGE != ROOT / "bindings/python/farandole"


def test_the_library_needs_no_python_mpi_or_cuda():
    assert [name for name in needed(LIBRARY)
            if re.search(r"python|mpi|cuda|nccl|torch", name)] == []


def test_the_library_is_named_after_its_abi():
    header = (PACKAGE / "include/farandole/farandole.h").read_text()
    abi = re.search(r"define FARANDOLE_ABI_VERSION (\d+)", header)[1]
    assert f"libfarandole.so.{abi}" == LIBRARY
    assert re.findall(r"SONAME.*\[(.*)\]", output("readelf", "-d", PACKAGE / LIBRARY)) == [LIBRARY]
    assert LIBRARY in needed(next(path.name for path in PACKAGE.glob("_core.*.so")))
    assert not (PACKAGE / "libfarandole.so").exists()  # a wheel would hold it twice


def test_the_library_exports_its_c_abi_and_nothing_else():
    names = exported(LIBRARY)
    assert "farandole_last_error" in names
    assert [name for name in names if not name.startswith("farandole_")] == []


def test_the_library_exports_every_function_its_header_declares():
    header = (PACKAGE / "include/farandole/farandole.h").read_text()
    without_comments = re.sub(r"/\*.*?\*/", "", header, flags=re.S)
    declared = set(re.findall(r"FARANDOLE_API[^;]*?\b(farandole_\w+)\s*\(", without_comments))
    assert declared and declared <= set(exported(LIBRARY))


@pytest.mark.parametrize("library", ["libfarandole_mpi.so", "libfarandole_cuda.so"])
def test_a_plug_in_exports_its_entry_and_nothing_else(library):
    assert exported(library) == ["farandole_plugin"]


def test_the_plug_in_needs_the_c_interface_of_mpi_only():
    assert [name for name in needed("libfarandole_mpi.so") if "mpi" in name] in ([], ["libmpi.so.40"])


def test_the_cuda_plug_in_needs_no_library_of_nvidia():
    assert [name for name in needed("libfarandole_cuda.so")
            if re.search(r"cuda|nccl|nvidia|nvrtc", name)] == []


def test_the_cuda_plug_in_has_code_for_ampere_and_hopper_and_ptx_for_what_comes():
    machine, ptx = gpu_code("libfarandole_cuda.so")
    if not machine:
        assert b"built without CUDA" in (PACKAGE / "libfarandole_cuda.so").read_bytes()
        pytest.skip("built without nvcc: the plug-in is a stub")
    release = re.search(r"release (\d+)\.(\d+)", output("nvcc", "--version"))
    blackwell = (int(release[1]), int(release[2])) >= (12, 8)
    assert machine == ({80, 90, 100} if blackwell else {80, 90})
    assert ptx == {max(machine)}


def test_the_handlers_for_xla_are_there_and_need_no_framework():
    build = pathlib.Path(os.environ.get("FARANDOLE_TEST_BUILD_DIR", "nowhere")) / "CMakeCache.txt"
    cache = build.read_text() if build.exists() else ""
    if not re.search("^FARANDOLE_XLA_INCLUDE:[A-Z]+=/", cache, re.M):
        pytest.skip("built without jaxlib's header")
    names = exported("libfarandole_xla.so")
    assert "farandole_xla_collective" in names and all(name.startswith("farandole_xla_") for name in names)
    assert [name for name in needed("libfarandole_xla.so") if re.search("python|jax|xla|pjrt|cuda|mpi", name)] == []


def test_each_framework_is_an_extra_and_none_is_required():
    required = importlib.metadata.requires("farandole") or []
    always = [re.match(r"[\w-]+", one)[0] for one in required if "extra ==" not in one]
    assert sorted(always) == ["cloudpickle", "numpy", "pyyaml"]
    extras = {*re.findall(r'extra == .(\w+)', " ".join(required))}
    assert {"torch", "jax", "keras", "tensorflow", "ray"} <= extras


def test_importing_the_package_and_its_launcher_imports_no_framework():
    frameworks = "torch jax jaxlib optax keras tensorflow mlx paddle cupy tinygrad ml_dtypes ray".split()
    script = f"import sys, farandole, farandole.runner.cli; print([n for n in {frameworks} if n in sys.modules])"
    assert output(sys.executable, "-c", script) == "[]\n"


def test_the_version_is_that_of_the_project_file():
    text = (ROOT / "pyproject.toml").read_text()
    assert importlib.metadata.version("farandole") == re.search(r'^version = "(.*)"', text, re.M)[1]


def test_the_backend_of_torch_distributed_is_found_by_its_name():
    # As torch 2.14 looks for it.
    script = ("import importlib.metadata, torch.distributed;"
              "[entry] = importlib.metadata.entry_points(group='torch.distributed.backends', name='farandole');"
              "entry.load()(); print('FARANDOLE' in torch.distributed.Backend._plugins)")
    assert output(sys.executable, "-c", script).split() == ["True"]


@pytest.mark.parametrize("library", [LIBRARY, "libfarandole_mpi.so",
                                     "libfarandole_cuda.so"])
def test_a_library_finds_the_others_beside_itself(library):
    dynamic = output("readelf", "-d", PACKAGE / library)
    paths = re.findall(r"R(?:UN)?PATH.*\[(.*)\]", dynamic)
    assert all(path.startswith("$ORIGIN") for entry in paths for path in entry.split(":"))
