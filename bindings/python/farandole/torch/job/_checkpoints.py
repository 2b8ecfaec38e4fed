"""Checkpoints of a job: written beside the training, found again by their hash."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import pathlib
import pickle
import re
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

_NAME = re.compile(r"step-(\d{12})-([0-9a-f]{64})\.pt")


class Checkpoints:
    """The files ``step-000000000120-SHA256.pt`` of a folder, each with a state after a step.

    A file is written under another name, flushed to the disk and renamed, so a name stands for a whole file; its hash
    is that of the content. ``torch.load`` reads it.

    Thread safety: one thread calls; :attr:`last_step` is written by the one that writes.

    Attributes:
        last_step: The step of the last file that was written or read; -1: none.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int) -> None:
        self.last_step = -1
        self._folder = pathlib.Path(folder)
        self._keep = keep
        self._writer: threading.Thread | None = None
        self._is_readable = False  # as was tried with the first one
        self._error: ValueError | None = None
        self._failure = ""  # why the last file could not be written

    def write(self, step: int, tree: Any, then: Callable[[], None]) -> None:
        """Begins to write a state that nobody changes; waits for the file before. Then calls ``then``.

        A file that cannot be written is a warning, and further ones for the same reason none: the training goes on.
        """
        self.wait()
        self._writer = threading.Thread(target=self._write, args=(step, tree, then), name="farandole checkpoint")
        self._writer.start()

    def wait(self) -> None:
        """Until the file is there.

        Raises:
            ValueError: ``torch.load(weights_only=True)`` does not read the first one that was written.
        """
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._error is not None:
            raise self._error

    def newest(self) -> Any:
        """The newest state whose file is as it was written; None: there is none. Warns of files that are not."""
        for step, digest, path in self._files():
            try:
                content = path.read_bytes()
            except OSError as error:
                warnings.warn(f"checkpoint {path} cannot be read: {error}", RuntimeWarning, stacklevel=2)
                continue
            if hashlib.sha256(content).hexdigest() == digest:
                self.last_step = step
                return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            warnings.warn(
                f"checkpoint {path} is damaged: its SHA-256 is not the one in its name; looking for an earlier one",
                RuntimeWarning,
                stacklevel=2,
            )
        return None

    def _try_to_read(self, buffer: io.BytesIO) -> None:
        """So that it does not turn out when all ranks are lost."""
        buffer.seek(0)
        try:
            torch.load(buffer, weights_only=True)
            self._is_readable = True
        except pickle.UnpicklingError as error:
            self._error = ValueError(f"a checkpoint of this optimizer's or scheduler's state cannot be read: {error}")

    def _files(self) -> list[tuple[int, str, pathlib.Path]]:
        """The latest first."""
        if not self._folder.is_dir():
            return []
        found = ((_NAME.fullmatch(path.name), path) for path in self._folder.iterdir())
        return sorted(((int(name[1]), name[2], path) for name, path in found if name), reverse=True)

    def _write(self, step: int, tree: Any, then: Callable[[], None]) -> None:
        try:
            buffer = io.BytesIO()
            torch.save(tree, buffer)
            if not self._is_readable:
                self._try_to_read(buffer)
            content = buffer.getbuffer()
            name = f"step-{step:012}-{hashlib.sha256(content).hexdigest()}.pt"
            self._folder.mkdir(parents=True, exist_ok=True)
            _write_whole(self._folder / name, content)
            self.last_step, self._failure = step, ""
            for _, _, path in self._files()[self._keep :]:
                path.unlink(missing_ok=True)
            then()
        except OSError as error:
            before, self._failure = self._failure, str(error.strerror)
            if before != self._failure:
                text = f"checkpoint of step {step} was not written: {error}; those that fail alike are not reported"
                warnings.warn(text, RuntimeWarning, stacklevel=2)


def _write_whole(path: pathlib.Path, content: memoryview) -> None:
    """Writes a file that is there with all of its content or not at all."""
    for left in path.parent.glob(".step-*.writing"):  # by a writer that was killed: one rank of a job writes
        left.unlink(missing_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.writing")
    try:
        with open(draft, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
