"""The examples for Keras and TensorFlow, and scripts written for Horovod's frontends, on two ranks."""

import os
import re
import subprocess
import sys

import pytest

import framework_ranks
from ranks import GUARD_S, REPOSITORY

SCRIPTS = REPOSITORY / "test" / "python" / "examples" / "horovod_scripts"
JOBS = [
    ("examples/keras_mlp.py", ["torch"], "torch"), ("examples/keras_mlp.py", ["jax"], "jax"),
    ("examples/keras_mlp.py", ["tensorflow"], "tensorflow"), ("examples/tensorflow_mlp.py", ["tensorflow"], ""),
    (SCRIPTS / "tensorflow2_mnist.py", ["tensorflow"], ""),
    (SCRIPTS / "tensorflow2_keras_mnist.py", ["tensorflow"], "tensorflow"),
    (SCRIPTS / "keras_resume.py", ["tensorflow"], "tensorflow"), (SCRIPTS / "keras_resume.py", ["jax"], "jax"),
]  # fmt: skip


@pytest.mark.parametrize("script, needs, backend", JOBS)
def test_a_script_learns(script, needs, backend, tmp_path):
    framework_ranks.skip_without("keras", *needs)
    given = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    given |= {"KERAS_BACKEND": backend} if backend else {}
    given.pop("PYTHONHASHSEED", None)
    command = [sys.executable, "-m", "farandole.runner", "--horovod", "-np", "2", sys.executable, REPOSITORY / script]
    done = subprocess.run(
        [*command, "--smoke"], cwd=tmp_path, env=given, capture_output=True, text=True, timeout=GUARD_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"accuracy=([\d.]+)", done.stdout)
    assert found and float(found[-1]) > 0.85, done.stdout + done.stderr
