"""Type checkers see what users get: the package and a script that uses it under ``mypy --strict``."""

import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("mypy")

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
SOURCES = REPOSITORY / "bindings" / "python"

SCRIPT = """
import torch
import farandole.torch as hvd

hvd.init()
model = torch.nn.Linear(2, 2)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)


def last_window(own: hvd.Distributed, passes: int) -> None:
    own.set_backward_passes_per_step(passes)


def unwrapped(wrapped: hvd.WrappedOptimizer) -> torch.optim.Optimizer:
    last_window(wrapped, 1)
    return hvd.unwrap(wrapped)


with optimizer.no_sync():
    model(torch.ones(2)).sum().backward()
optimizer.set_backward_passes_per_step(2)
optimizer.synchronize()
with optimizer.skip_synchronize():
    optimizer.step()
mean: torch.Tensor = hvd.allreduce(torch.ones(2), name="mean", op=hvd.Sum)
several: list[torch.Tensor] = hvd.grouped_allreduce([mean], op=hvd.Average)
handle: hvd.Handle = hvd.allreduce_async_(mean)
hvd.synchronize(handle)
"""


def errors_of(tmp_path, text, *packages):
    """What mypy says of a script, and of packages."""
    script = tmp_path / "script.py"
    script.write_text(text)
    done = subprocess.run(
        [
            sys.executable, "-m", "mypy", "--strict", "--no-error-summary",
            "--config-file", REPOSITORY / "pyproject.toml", "--cache-dir", tmp_path / "cache",
            script, *packages,
        ],
        capture_output=True, text=True, env=os.environ | {"MYPYPATH": str(SOURCES)},
    )  # fmt: skip
    assert not done.stderr, done.stderr
    return done.stdout


def test_the_package_and_a_script_pass(tmp_path):
    assert errors_of(tmp_path, SCRIPT, SOURCES / "farandole") == ""
    wrong = 'import farandole as fl\n\nfl.allreduce([1.0], nmae="mean")\nfl.rank() + "1"\n'
    assert errors_of(tmp_path, wrong).count("error:") == 2
    wrong = "import torch\nimport farandole.torch as fl\n\nown: fl.Distributed = torch.optim.SGD([], 0.1)\n"
    assert errors_of(tmp_path, wrong).count("error:") == 1
