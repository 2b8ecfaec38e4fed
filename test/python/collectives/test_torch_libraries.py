"""Libraries that are built on torch.distributed train over Farandole what they train over gloo."""

import importlib.util
import pathlib

import pytest
import torch

import library_job
from distributed_job import compare
from ranks import free_port
from test_torch_distributed import run

JOB = pathlib.Path(library_job.__file__)


BACKENDS = ("gloo", "farandole")


@pytest.mark.parametrize("size", [2, 3])
def test_lightning_and_accelerate_train_as_over_gloo(size, tmp_path):
    expect_same(size, ["lightning", "accelerate"], tmp_path)


def test_the_trainer_of_transformers_and_ignite_train_as_over_gloo(tmp_path):
    expect_same(2, ["transformers", "ignite"], tmp_path)


@pytest.mark.parametrize("size", [2, 4])
def test_deepspeed_trains_as_over_gloo(size, tmp_path):
    expect_same(size, ["deepspeed"], tmp_path)


def expect_same(size, libraries, folder):
    """Bitwise on two ranks; on more sums are added in another order."""
    if missing := [name for name in libraries if importlib.util.find_spec(name) is None]:
        pytest.skip(f"not installed: {' and '.join(missing)}")
    jobs = [f"{library}:{backend}:{free_port()}" for library in libraries for backend in BACKENDS]
    run(size, [JOB, folder, *jobs], timeout_s=280)
    for library in libraries:
        for rank in range(size):
            theirs, ours = (torch.load(folder / f"{library}-{backend}-{rank}") for backend in BACKENDS)
            assert compare(theirs, ours) in (("same",) if size == 2 else ("same", "close"))
