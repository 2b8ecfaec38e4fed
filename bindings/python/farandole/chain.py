"""The chain of hashes of a job: a line per step, by which two runs are compared. ``farandole verify A B``.

A chain is a file of JSON lines. The first says whose it is and names the tensors; a line ``{"step", "gradients",
"tensors"}`` has the digest of a step's reduced gradients, 64 bits, and 16 bits of each tensor's; a line ``{"state",
"sha256", "tensors"}`` has hashes of the state after so many steps. A step that ran again has a line more. Other
lines tell of generations, and of ranks whose results differed.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import pathlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

FILE_NAME = "chain.jsonl"
_TAIL_BYTES = 1 << 16  # of the file, in which a new writer looks for the last step
_KEPT = 256  # lines that a rank keeps for the time when it is to write them
_SAME, _DIFFERENT, _USAGE = 0, 1, 2

Line = dict[str, Any]


class Chain:
    """Writes the chain. Every rank gives it every line; the rank that writes appends those that the file lacks.

    So another rank can go on when the one that wrote is lost.

    Args:
        path: Of the file; a folder: ``chain.jsonl`` in it; None: nothing is written.
        header: The first line.
    """

    def __init__(self, path: str | os.PathLike[str] | None, header: Line) -> None:
        self._path = None if path is None else _file_of(pathlib.Path(path))
        self._header = header
        self._latest: collections.deque[tuple[int, Callable[[], Line]]] = collections.deque(maxlen=_KEPT)
        self._file = -1

    def start(self, writes: bool, step: int, facts: Line) -> None:
        """In a new generation, which begins with a step: whether this rank writes now."""
        self.close()
        if not writes or self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            size = os.fstat(self._file).st_size
            tail = os.pread(self._file, _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        except OSError as error:
            return self._give_up(error)
        if tail and not tail.endswith(b"\n"):  # of a writer that was killed
            self._write(b"\n")
        if not tail:
            self.write(self._header)
        last = [line["step"] for line in _lines(tail.decode(errors="replace")) if "step" in line]
        for number, make in self._latest:
            if (not last or last[-1] < number) and number < step:
                self.write(make())
        self.write({"generation": facts, "next_step": step})

    def append(self, step: int, make: Callable[[], Line]) -> None:
        """The line of a step that was applied."""
        self._latest.append((step, make))
        if self._file >= 0:
            self.write(make())

    def write(self, line: Line) -> None:
        """Any line, on the rank that writes; none after one that could not be written, of which it has warned.

        Thread safety: from any thread.
        """
        if self._file >= 0 and self._path is not None:
            self._write((json.dumps(line) + "\n").encode())

    def _write(self, data: bytes) -> None:
        try:
            os.write(self._file, data)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Warns that no line is written any more: for want of one no training ends."""
        path, self._path = self._path, None
        warnings.warn(f"the chain of hashes {path} is not written any more: {error}", RuntimeWarning, stacklevel=3)

    def close(self) -> None:
        """Until :meth:`start`."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def read(path: pathlib.Path) -> Iterator[Line]:
    """The lines of a chain; nothing where there is no file. Lines that a killed writer left incomplete are skipped."""
    return _lines(path.read_text() if path.exists() else "")


def _lines(content: str) -> Iterator[Line]:
    for text in content.splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            yield line


@dataclasses.dataclass
class Run:
    """What a chain says."""

    path: pathlib.Path
    tensors: list[str] = dataclasses.field(default_factory=list)
    settings: Line = dataclasses.field(default_factory=dict)
    steps: dict[int, Line] = dataclasses.field(default_factory=dict)
    states: dict[int, Line] = dataclasses.field(default_factory=dict)
    faults: list[str] = dataclasses.field(default_factory=list)  # within the run

    @classmethod
    def read(cls, path: pathlib.Path) -> Run:
        """From a file, or the one in a folder.

        Raises:
            ValueError: There is no chain.
        """
        run = cls(_file_of(path))
        for line in read(run.path):
            if "chain" in line:
                run.tensors, run.settings = line["tensors"], line["settings"]
            elif "step" in line:
                run._add(run.steps, line["step"], line)
            elif "state" in line:
                run._add(run.states, line["state"], line)
            elif "differs" in line:
                run.faults.append(str(line["differs"]))
        if not run.steps and not run.states:
            raise ValueError(f"{path} holds no chain of hashes ({run.path})")
        return run

    def _add(self, known: dict[int, Line], number: int, line: Line) -> None:
        earlier = known.setdefault(number, line)
        difference = _difference(earlier, line, self.tensors)
        if difference:
            self.faults.append(f"step {number} ran twice, with different results: {difference}")


def compare(one: Run, other: Run) -> str | None:
    """The first step that differs, and what of it; None: none does."""
    if one.settings != other.settings:
        keys = [key for key in {**one.settings, **other.settings} if one.settings.get(key) != other.settings.get(key)]
        named = ", ".join(f"{key}: {one.settings.get(key)} and {other.settings.get(key)}" for key in keys)
        return f"the jobs have different settings: {named}"
    # The state "after n steps" is older than step n, which is numbered from 0.
    for number in sorted(one.steps.keys() & other.steps.keys() | one.states.keys() & other.states.keys()):
        for what, mine, theirs in (
            (f"the state before step {number} differs", one.states, other.states),
            (f"the gradients of step {number} differ", one.steps, other.steps),
        ):
            if number in mine and number in theirs:
                difference = _difference(mine[number], theirs[number], one.tensors)
                if difference:
                    return f"{what}: {difference}"
    return None


def _difference(one: Line, other: Line, tensors: Sequence[str]) -> str:
    """Which tensor is the first whose hash differs; empty: all are alike."""
    if "gradients" in one:
        if one["gradients"] == other["gradients"]:
            return ""
        pairs = zip(tensors, _chunks(one["tensors"]), _chunks(other["tensors"]), strict=False)
        differing = [name for name, mine, theirs in pairs if mine != theirs]
    else:
        if one["sha256"] == other["sha256"]:
            return ""
        mine, theirs = one["tensors"], other["tensors"]
        differing = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
    if not differing:
        return "of values that are no tensor's"
    return f'first tensor "{differing[0]}"' + (f", and {len(differing) - 1} more" if differing[1:] else "")


def _chunks(text: str) -> list[str]:
    return [text[at : at + 4] for at in range(0, len(text), 4)]


def _file_of(path: pathlib.Path) -> pathlib.Path:
    return path if path.suffix == ".jsonl" else path / FILE_NAME


def main_verify(words: Sequence[str]) -> int:
    """``farandole verify A B``. Returns 0: the same; 1: something differs; 2: there is nothing to compare."""
    if len(words) != 2 or words[0].startswith("-"):
        print("usage: farandole verify A B   (folders of two jobs, or their chain.jsonl)", file=sys.stderr)
        return _USAGE
    try:
        one, other = (Run.read(pathlib.Path(word)) for word in words)
    except (OSError, ValueError) as error:
        print(f"farandole verify: {error}", file=sys.stderr)
        return _USAGE
    common = one.steps.keys() & other.steps.keys()
    if not common:
        print("farandole verify: the two chains have no step in common", file=sys.stderr)
        return _USAGE
    for run in (one, other):
        for fault in run.faults:
            print(f"{run.path}: {fault}")
    difference = compare(one, other)
    print(difference or f"the same: {len(common)} steps, {min(common)} to {max(common)}")
    return _DIFFERENT if difference or one.faults or other.faults else _SAME


def settings_line(settings: Mapping[str, Any], tensors: Sequence[str]) -> Line:
    """The first line of a chain."""
    return {"chain": 1, "settings": dict(settings), "tensors": list(tensors)}
