"""Documents for beginners: the Python blocks of a page, one after the other, are a script that runs on two ranks."""

import re

import pytest

from ranks import REPOSITORY, mpirun

pytestmark = [pytest.mark.mpi, pytest.mark.once]


def run_on_two_ranks(script, folder, monkeypatch):
    """What a script prints that runs in a folder."""
    (folder / "train.py").write_text(script)
    monkeypatch.chdir(folder)
    done = mpirun(2, ["train.py"])
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize("page", ["docs/guide.md", "docs/training.md", "docs/uninterrupted.md"])
def test_the_code_of_the_page_runs(page, tmp_path, monkeypatch):
    blocks = re.findall(r"^```python\n(.*?)^```", (REPOSITORY / page).read_text(), re.M | re.S)
    run_on_two_ranks("".join(blocks), tmp_path, monkeypatch)


def test_the_script_that_the_readme_changes_prints_what_it_shows(tmp_path, monkeypatch):
    text = (REPOSITORY / "README.md").read_text()
    (diff, shown) = re.search(r"^```diff\n(  import torch\n.*?)^```\n\n```\n(.*?)^```", text, re.M | re.S).groups()
    assert len(re.findall(r"^\+", diff, re.M)) == 5, "the README says five lines"
    script = "".join(f"{line[2:]}\n" for line in diff.splitlines() if not line.startswith("-"))
    printed = run_on_two_ranks(script, tmp_path, monkeypatch)
    pattern = r"loss \d\.\d+, weights (\d\.\d+)"
    for output in (printed, shown):  # the ranks' losses differ, their weights do not
        weights = re.findall(pattern, output)
        assert len(weights) == 2 and len(set(weights)) == 1, output
