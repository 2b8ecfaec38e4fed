"""What every test here gets."""

import os
import pathlib
import sys

import pytest

_THIS_DIR = pathlib.Path(__file__).resolve().parent
#: Of tests, which import what others define, here and in the processes that they start.
_FOLDERS = sorted(str(path) for path in _THIS_DIR.iterdir() if path.is_dir() and not path.name.startswith("_"))
sys.path += _FOLDERS
# For processes that tests start: see sitecustomize.py there. What test/consumer runs imports torch as it is.
_SITE = str(_THIS_DIR.parent / "site")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_SITE, *_FOLDERS, os.environ.get("PYTHONPATH")]))
os.environ["FARANDOLE_TEST_QUICK_TORCH"] = "1"
os.environ.setdefault("FARANDOLE_FLIGHT_RECORDER_DIR", "none")  # of jobs that fail on purpose
os.environ.setdefault("OMP_NUM_THREADS", "1")


def _ranks_of(item: pytest.Item) -> int:
    """Of a test that runs on several numbers of ranks, for each of which it is another item."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return int(parameters.get("size") or getattr(parameters.get("job"), "size", 1))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """How a tensor comes in, in which an older torch differs, does not depend on how many ranks there are."""
    if "FARANDOLE_TEST_OLDER_TORCH" in os.environ:
        config.hook.pytest_deselected(items=[item for item in items if _ranks_of(item) > 2])
        items[:] = [item for item in items if _ranks_of(item) <= 2]


_REFUSAL = """#!/bin/sh
echo "a test without the mark mpi starts mpirun: see pyproject.toml" >&2
exit 1
"""


@pytest.fixture(scope="session")
def _folder_without_mpirun(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("without-mpirun")
    (folder / "mpirun").write_text(_REFUSAL)
    (folder / "mpirun").chmod(0o755)
    return folder


@pytest.fixture(autouse=True)
def _mpirun_is_for_marked_tests(request: pytest.FixtureRequest) -> None:
    """Without the mark ``mpi``, by which lanes choose, a test finds an mpirun that fails."""
    if request.node.get_closest_marker("mpi") is None:
        folder = request.getfixturevalue("_folder_without_mpirun")
        monkeypatch = request.getfixturevalue("monkeypatch")
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is as one that no launcher has started."""
    for name in list(os.environ):
        if name.startswith(("OMPI_COMM", "PMIX_", "FARANDOLE_RANK")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
