"""docs/troubleshooting.md: each message that it shows is one that the code or the command above it prints."""

import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from ranks import REPOSITORY

pytestmark = [pytest.mark.mpi, pytest.mark.once]

PAGE = (REPOSITORY / "docs" / "troubleshooting.md").read_text()
SHOWN = re.compile(r"<!-- runs: ?(.*?) ?-->\n(?:```python\n(.*?)```\n)?```\n(.*?)```", re.S)
ARRAYS, MODEL = re.findall(r"```python\n(.*?)```", PAGE, re.S)[:2]
FILES = {
    "hello.py": "import farandole as hvd\nhvd.init()\nprint(hvd.rank(), 'of', hvd.size())\n",
    "never.py": (
        "import os, time\nimport farandole as hvd\n"
        "rank = os.environ.get('FARANDOLE_RANK') or os.environ['OMPI_COMM_WORLD_RANK']\n"
        "time.sleep(60) if rank == '1' else hvd.init()\n"
    ),
    "bin/mpirun": "#!/bin/sh\necho 'mpirun (Open MPI) 5.0.11'\n",
}
#: What differs between machines and runs, as between those in which rank 1 fails before rank 0 calls and those in which
#: it fails, or has left, afterwards.
VARYING = {
    r"(rank 1) \(pid \d+ on host [^\s)]+\) has left after it failed": r"\1 failed",
    r'AbortedError: allreduce "[^"]+": (?=rank 1)': "AbortedError: ",
    r"Open MPI v\d.*? \(/\S+\)": "the Open MPI that was loaded",
    r"\b\d+(\.\d+)?(e[-+]\d+)? s\b": "T s",
    r"127\.0\.0\.1:\d+": "ADDRESS",
    r"\(/\S+\)": "(PATH)",
    r"\d+\.\d+\.\d+": "VERSION",
    r"THREADS=\d+": "THREADS=N",
    r"pid \d+ on host [^\s)]+": "PID",
    r"\[farandole \d+/\d+\]": "[farandole]",  # as in a line of several ranks
}


def normalized(text):
    """One line, without what differs between machines and runs."""
    line = " ".join(text.split())
    for pattern, word in VARYING.items():
        line = re.sub(pattern, word, line)
    return line


def messages(block):
    """The messages of a block; a line that begins with blanks goes on with the one before."""
    return [normalized(message) for message in re.split(r"\n(?! )", block.strip("\n"))]


def by_rank(line):
    """A line of several ranks, "[0-1] ...", as a line of each; they need not have come at the same time."""
    found = re.match(r"\[(\d+)-(\d+)\] (.*)", line)
    return [line] if found is None else [f"[{rank}] {found[3]}" for rank in range(int(found[1]), int(found[2]) + 1)]


def output_of(command, snippet, folder):
    prelude = "import os, signal, time\n" + (MODEL if "model" in snippet else ARRAYS)
    for name, text in (FILES | {"train.py": prelude + snippet}).items():
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
    path = [str(pathlib.Path(sys.executable).parent), os.environ["PATH"]]
    if command == "other-mpirun":
        command, path = "farandolerun --mpi -np 2 true", [str(folder / "bin"), *path]
    words = shlex.split(command)
    count = next((i for i, word in enumerate(words) if "=" not in word), len(words))
    variables = dict(word.split("=", 1) for word in words[:count])
    words = words[count:] or ["farandolerun", "-np", "2", "python", "train.py"]
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | variables
    done = subprocess.run(
        words, cwd=folder, env=environment | {"PATH": os.pathsep.join(path)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=90,
    )  # fmt: skip
    return done.stdout


def heading_of(shown):
    return re.findall(r"^##+ (.*)", PAGE[: shown.start()], re.M)[-1]


@pytest.mark.parametrize("shown", list(SHOWN.finditer(PAGE)), ids=heading_of)
def test_a_message_of_the_page_is_printed(shown, tmp_path):
    command, snippet, block = (text or "" for text in shown.groups())
    said = output_of(command, snippet, tmp_path)
    lines = [line for each in said.splitlines() for line in by_rank(normalized(each))]
    wanted = [one for each in messages(block) for one in by_rank(each)]
    missing = [one for one in wanted if not any(one in line for line in lines)]
    assert missing == [], said


def test_every_message_of_the_page_is_run_or_in_the_sources():
    others = re.findall(r"^```(\w*)\n(.*?)^```\n", SHOWN.sub("", PAGE), re.S | re.M)
    texts = [block for language, block in others if not language]
    assert [text.split()[0] for text in texts] == ["farandolerun"]  # a command
    sources = " ".join(path.read_text() for path in REPOSITORY.rglob("*.cc") if "build" not in path.parts)
    for text in (
        "has submitted nothing yet",
        "go through host memory, which is slower than NCCL",
        "go over NCCL",
        "no shared memory on some host",
    ):
        assert text in " ".join(PAGE.split()) and text in sources, text


def test_the_messages_of_the_readme_are_on_the_page():
    readme = (REPOSITORY / "README.md").read_text()
    blocks = re.findall(r"^```\n(\[0-1\] \[?farandole.*?)^```", readme, re.M | re.S)
    assert len(blocks) == 2
    assert [block for block in blocks if block not in PAGE] == []
