"""Documents for beginners: the Python blocks of a page, one after the other, are a script that runs on two ranks."""

import os
import re
import subprocess
import sys

import pytest

from ranks import GUARD_S, REPOSITORY, free_port, mpirun

pytestmark = [pytest.mark.mpi, pytest.mark.once]


def diff_of(page, beginning):
    """The diff of a page whose text begins so, and what stands in the block after it, if there is one."""
    pattern = rf"^```diff\n({re.escape(beginning)}.*?)^```\n(?:\n```\n(.*?)^```)?"
    return re.search(pattern, (REPOSITORY / page).read_text(), re.M | re.S).groups()


def without(mark, diff):
    """The script after a diff, whose lines with a minus are left out, or that before it."""
    return "".join(f"{line[2:]}\n" for line in diff.splitlines() if not line.startswith(mark))


def torchrun(script, folder):
    """What a script prints on two ranks that run in a folder, with the variables of torchrun."""
    (folder / "train.py").write_text(script)
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "train.py"], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=os.environ | job | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        return "".join(rank.communicate(timeout=GUARD_S)[0] for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()


def run_on_two_ranks(script, folder, monkeypatch):
    """What a script prints that runs in a folder."""
    (folder / "train.py").write_text(script)
    monkeypatch.chdir(folder)
    done = mpirun(2, ["train.py"])
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize("page", ["docs/guide.md", "docs/recipes.md", "docs/training.md", "docs/uninterrupted.md"])
def test_the_code_of_the_page_runs(page, tmp_path, monkeypatch):
    blocks = re.findall(r"^```python\n(.*?)^```", (REPOSITORY / page).read_text(), re.M | re.S)
    run_on_two_ranks("".join(blocks), tmp_path, monkeypatch)


def test_the_script_that_the_readme_changes_prints_what_it_shows(tmp_path, monkeypatch):
    diff, shown = diff_of("README.md", "  import torch\n  from torch.utils")
    assert len(re.findall(r"^\+", diff, re.M)) == 5, "the README says five lines"
    printed = run_on_two_ranks(without("-", diff), tmp_path, monkeypatch)
    pattern = r"loss \d\.\d+, weights (\d\.\d+)"
    for output in (printed, shown):  # the ranks' losses differ, their weights do not
        weights = re.findall(pattern, output)
        assert len(weights) == 2 and len(set(weights)) == 1, output


@pytest.mark.parametrize("added", ["import farandole.torch\n", "import farandole.torch.distributed\n"])
def test_a_mistake_in_a_script_with_ddp_is_named_as_the_readme_shows(added, tmp_path):
    diff, shown = diff_of("README.md", f"  import torch\n  import torch.distributed as dist\n+ {added}")
    printed = torchrun(without("-", diff), tmp_path)
    _, *messages = re.split(r"\n(?! )", shown.rstrip())  # after the command
    assert messages
    assert [one for one in messages if " ".join(one.split()) not in printed] == [], printed


def test_a_script_with_ddp_prints_the_same_digits_after_the_change_and_after_a_resume(tmp_path):
    diff, _ = diff_of("docs/from-ddp.md", "  import contextlib\n")
    printed = []
    for mark, name in (("+", "before"), ("-", "after")):
        (tmp_path / name).mkdir()
        output = "".join(torchrun(without(mark, diff), tmp_path / name) for _ in range(2))
        printed.append(re.findall(r"epoch \d: loss \d\.\d{8}", output))
        assert len(printed[-1]) == 4, output
    assert printed[0] == printed[1]
