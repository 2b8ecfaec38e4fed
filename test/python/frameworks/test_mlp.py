"""The same network on two ranks in each framework, against one process alone, to 1e-6."""

import pytest

import framework_ranks
import mlp_checks

JOBS = {
    "torch": ({}, "torch"), "jax": ({}, "jax", "optax"), "flax_nnx": ({}, "flax", "optax"),
    "tensorflow": ({}, "tensorflow"), "keras on torch": ({"KERAS_BACKEND": "torch"}, "keras", "torch"),
    "keras on jax": ({"KERAS_BACKEND": "jax"}, "keras", "jax"),
    "keras on tensorflow": ({"KERAS_BACKEND": "tensorflow"}, "keras", "tensorflow"),
}  # fmt: skip


@pytest.mark.parametrize("job", JOBS)
def test_trains_as_one_process(job):
    variables, *needed = JOBS[job]
    framework_ranks.skip_without(*needed)
    name = f"check_{job.partition(' ')[0]}"
    assert framework_ranks.run(2, mlp_checks, name, **variables)[name] == ["", ""]


def test_a_killed_rank_is_named():
    framework_ranks.skip_without("flax", "optax")
    name = "check_a_killed_rank_is_named_in_nnx"
    survivor, _ = framework_ranks.run(2, mlp_checks, name)[name]
    assert survivor == ""
