"""Ranks of NumPy, JAX, PyTorch, TensorFlow and Keras in one job give the same bits, and hear of one that is killed."""

import subprocess
import sys

import numpy as np
import pytest

import framework_ranks
import mixed_job
from mixed_job import DTYPES, FRAMEWORKS, SIZES
from ranks import communicate, environment, free_port

if missing := framework_ranks.missing("jax", "torch", "tensorflow", "keras"):
    pytest.skip(f"not installed: {missing}", allow_module_level=True)


def run(folder, kinds, killed=None):
    """Runs a job of these frameworks, one a rank, and gives what each rank got."""
    given = environment(
        FARANDOLE_SIZE=str(len(kinds)), FARANDOLE_ADDRESS=f"127.0.0.1:{free_port()}", CUDA_VISIBLE_DEVICES="",
        FARANDOLE_STALL_SHUTDOWN_S="120", FARANDOLE_INIT_TIMEOUT_S="240",
        JAX_PLATFORMS="cpu", KERAS_BACKEND="torch", TF_CPP_MIN_LOG_LEVEL="2",
    )  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, mixed_job.__file__, kind, str(folder), *([] if killed is None else [str(killed)])],
            env=given | {"FARANDOLE_RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank, kind in enumerate(kinds)
    ]  # fmt: skip
    communicate(ranks, None if killed is None else [-9 if rank == killed else 0 for rank in range(len(kinds))])
    return [dict(np.load(folder / f"{rank}.npz")) for rank in range(len(kinds))]


@pytest.mark.parametrize(
    "kinds", [FRAMEWORKS, FRAMEWORKS[1:4], ("tensorflow", "jax"), ("keras", "numpy")], ids="-".join
)
def test_ranks_of_several_frameworks_get_the_same_bits(kinds, tmp_path):
    told, size = run(tmp_path, kinds), len(kinds)
    rows = [mixed_job.values_of(rank, "float32", 12 * size).reshape(-1, 4) for rank in range(size)]
    whole = np.concatenate([mixed_job.batch(rank) for rank in range(size)])
    wanted = {"allgather": np.concatenate(rows), "broadcast": rows[-1], "group 0": np.mean(rows, axis=0)}
    wanted["group 1"] = wanted["group 0"][:2]
    for name, gradient in mixed_job.OfNumpy().gradients(mixed_job.network(1), whole).items():
        wanted[f"gradient {name}"] = gradient
    for count in SIZES:
        for dtype in DTYPES:
            values = [mixed_job.values_of(rank, dtype, count) for rank in range(size)]
            total = np.sum(values, axis=0, dtype=dtype if dtype == "uint8" else complex)  # which overflows
            wanted[f"{dtype} {count} sum"] = total
    for turn in range(2):
        parts = [one.pop(f"{turn} reducescatter") for one in told]
        np.testing.assert_allclose(np.concatenate(parts), np.mean(rows, axis=0), 1e-6)
        for rank, one in enumerate(told):
            exchanged = np.concatenate([each[3 * rank : 3 * rank + 3] for each in rows])
            assert np.array_equal(one.pop(f"{turn} alltoall"), exchanged)
        for name, values in wanted.items():
            tolerance = 2e-2 if "bfloat16" in name else 2e-3 if "float16" in name else 1e-6
            np.testing.assert_allclose(told[0][f"{turn} {name}"], values, tolerance, 1e-6, err_msg=name)
    for name in told[0]:
        assert len({(one[name].dtype.str, one[name].shape, one[name].tobytes()) for one in told}) == 1, name


def test_a_rank_that_is_killed_is_named_on_all(tmp_path):
    run(tmp_path, FRAMEWORKS, killed=2)
    for rank in (0, 1, 3, 4):
        assert "rank 2" in (tmp_path / f"{rank}.txt").read_text()
