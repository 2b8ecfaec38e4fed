"""What a run is made of: mpi_built() and the like say what is true of this one."""

import pytest

import farandole as fl
import farandole.torch as flt
from fake_gpu import NCCL, VARIABLES, needs_fake_gpu
from ranks import run_mpi, run_threads

NEVER = "gloo_built gloo_enabled ddl_built ccl_built rocm_built".split()


@pytest.mark.parametrize("name", NEVER)
def test_what_farandole_never_uses_is_not_there(name):
    assert getattr(fl, name)() is False and getattr(flt, name) is getattr(fl, name)


def test_threads_of_one_process_use_no_mpi():
    def body(_rank):
        with pytest.raises(ValueError, match="does not use MPI"):
            fl.mpi_threads_supported()
        return fl.mpi_enabled(), fl.mpi_built(), fl.is_homogeneous()

    assert run_threads(2, body) == [(False, True, True)] * 2


def test_before_init_mpi_is_built_and_not_enabled():
    assert fl.mpi_built() and not fl.mpi_enabled()
    for question in (fl.mpi_threads_supported, fl.is_homogeneous):
        with pytest.raises(ValueError):
            question()


@pytest.mark.mpi
def test_ranks_under_mpirun_use_mpi():
    told = run_mpi(
        2,
        """
        import farandole as fl
        fl.init()
        tell((fl.mpi_enabled(), fl.mpi_threads_supported(), fl.is_homogeneous()))
        """,
    )
    assert told == ["(True, True, True)"] * 2


def test_without_a_cuda_part_nccl_is_not_used(monkeypatch):
    monkeypatch.delenv("FARANDOLE_CUDA_PLUGIN", raising=False)
    if not fl.cuda_built():
        assert fl.nccl_built() == 0


@needs_fake_gpu
def test_with_a_cuda_part_nccls_version_is_told(monkeypatch):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    assert NCCL.exists() and fl.cuda_built() is True
    assert fl.nccl_built() >= 22700
