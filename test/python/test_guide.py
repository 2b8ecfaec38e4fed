"""Documents for beginners: the Python blocks of a page, one after the other, are a script that runs on two ranks."""

import re

import pytest

from ranks import REPOSITORY, mpirun

pytestmark = [pytest.mark.mpi, pytest.mark.once]


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/guide.md"])
def test_the_code_of_the_page_runs(page, tmp_path, monkeypatch):
    blocks = re.findall(r"^```python\n(.*?)^```", (REPOSITORY / page).read_text(), re.M | re.S)
    script = tmp_path / "train.py"
    script.write_text("".join(blocks))
    monkeypatch.chdir(tmp_path)
    done = mpirun(2, [str(script)])
    assert done.returncode == 0, done.stdout
