"""``FARANDOLE_RECORD``: what a process leaves in a folder for ``farandole report``.

A file of JSON lines. The first one says what the process is. Then come samples of its metrics: ``{"at_s", "values"}``,
in the order of the first line's ``columns``. One with ``generation``, ``rank`` and ``size`` begins the process's part
in a generation of the job, and one with ``end`` ends it, by an error if that is a text. They are cumulative: so of a
long run every second sample can go.
"""

from __future__ import annotations

import json
import os
import pathlib
import platform
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from farandole import _core
from farandole.exceptions import AbortedError, HorovodInternalError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from farandole.basics import Context

SUFFIX = ".record.jsonl"
MOST_BYTES = 1 << 20
_PERIOD_S = 1
_END_S = 5
#: Who started the process, by a variable of its environment; the first that is there.
_LAUNCHERS = {"FARANDOLE_LOCAL_RANK": "farandolerun", "FARANDOLE_MEMBERS": "farandolerun",
              "TORCHELASTIC_RUN_ID": "torchrun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpiexec",
              "SLURM_PROCID": "srun"}  # fmt: skip
_LIBRARIES = ("numpy", "torch", "jax", "tensorflow", "keras")  # what the program has imported of them

Line = dict[str, Any]


class File:
    """A process's. Before it would be too large every second sample goes, and further ones come half as often.

    Args:
        folder: Is made if it is missing.
        head: The first line.
        most_bytes: That it has at most.
    Raises:
        OSError: It cannot be made.
    """

    def __init__(self, folder: str, head: Line, most_bytes: int = MOST_BYTES) -> None:
        os.makedirs(folder, 0o700, exist_ok=True)
        name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}"
        self.path = pathlib.Path(folder, name.replace("/", "_"))
        self.period_s = _PERIOD_S
        self._most_bytes, self._size_bytes = most_bytes, 0
        self._file = _create(self.path)
        self.append(head)

    def append(self, line: Line) -> None:
        """Writes a line, or closes the file if that is an error, or if it is full of lines that have to stay."""
        if self._file < 0:
            return
        text = (json.dumps(line, separators=(",", ":")) + "\n").encode()
        try:
            if self._size_bytes + len(text) > self._most_bytes:
                self._thin()
            if self._size_bytes + len(text) > self._most_bytes:
                raise OSError(f"{self.path} has {self._size_bytes} bytes")
            self._write(text)
        except OSError:
            self.close()
            raise

    def _thin(self) -> None:
        """By a new file in place of this one, so that who reads it finds all of it."""
        lines, samples = [], 0
        for line in self.path.read_bytes().splitlines(keepends=True):
            samples += (is_sample := json.loads(line).keys() == {"at_s", "values"})
            if not is_sample or samples % 2:
                lines.append(line)
        new = self.path.with_suffix(".new")
        self.close()
        self._file, self._size_bytes = _create(new), 0
        try:
            self._write(b"".join(lines))
            os.replace(new, self.path)
        except OSError:
            new.unlink()
            raise
        self.period_s *= 2

    def _write(self, text: bytes) -> None:
        if os.write(self._file, text) < len(text):
            raise OSError("the disk is full")
        self._size_bytes += len(text)

    def close(self) -> None:
        """Nothing more is written."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _create(path: pathlib.Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)


class Recording:
    """Samples a process's part in one generation, on a thread of its own.

    Args:
        context: Of the generation.
        file: The process's.
        read: The values of now by name, alike each time; None if there are none.
        instead: Of an exception.
    """

    def __init__(
        self, context: Context, file: File, read: Callable[[], Mapping[str, float] | None],
        instead: Callable[[], AbstractContextManager[None]],
    ) -> None:  # fmt: skip
        self._core, self._file, self._read, self._instead = context.core, file, read, instead
        self._latest: Mapping[str, float] = {}
        self._is_ended = threading.Event()
        rank, size, *_ = context.topology
        self._sample({"generation": self._core.generation(), "rank": rank, "size": size})
        self._thread = threading.Thread(target=self._run, name="farandole-record", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_ended.wait(self._file.period_s):
            self._sample({})

    def _sample(self, more: Line) -> None:
        with self._instead():
            self._latest = self._read() or self._latest
            self._file.append({"at_s": round(time.time(), 3), **more, "values": [*map(_short, self._latest.values())]})

    def end(self) -> None:
        """The last sample; to be called before the context closes."""
        with self._instead():
            self._is_ended.set()
            self._thread.join(_END_S)
            if not self._thread.is_alive():
                self._sample({"end": _final_error(self._core)})

    def forget(self) -> None:
        """Whoever owns the file closes it."""


def _short(value: float) -> float:
    return round(value, 6) if isinstance(value, float) else value


def _final_error(core: _core.Context) -> str:
    """Of the job; empty: there is none."""
    try:
        core.raise_if_ended()
    except HorovodInternalError as error:
        if not isinstance(error, AbortedError) or error.failed_ranks:  # else others have only left it
            return str(error)
    return ""


def head(context: Context, columns: list[str]) -> Line:
    """The first line of a process's file."""
    launchers = (name for variable, name in _LAUNCHERS.items() if variable in os.environ)
    found = ((name, getattr(sys.modules.get(name), "__version__", "")) for name in _LIBRARIES)
    versions = {"farandole": _core.version, "Python": platform.python_version()}
    return {
        "host": socket.gethostname(), "pid": os.getpid(), "program": os.path.basename(sys.argv[0]),
        "launcher": next(launchers, "none"),
        "versions": versions | {name: str(version) for name, version in found if version},
        "settings": context.core.settings(), "columns": columns,
    }  # fmt: skip
