"""Lines of ranks: put together from pieces, marked with the rank, written to the screen and to files."""

from __future__ import annotations

import contextlib
import datetime
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import BinaryIO, NamedTuple

_MAX_BYTES = 1 << 16  # a longer line is printed in parts


class Line(NamedTuple):
    """A line of a rank, or of mpirun when there is no rank.

    Attributes:
        time_s: When it was written, seconds since the epoch, by the launcher's clock.
        text: With its end.
    """

    time_s: float
    rank: int | None
    is_error: bool
    text: bytes


class Pieces:
    """Cuts one stream into lines."""

    def __init__(self) -> None:
        self._rest = b""

    def add(self, data: bytes) -> Iterator[bytes]:
        """Yields the lines that are complete now."""
        for text in (self._rest + data).splitlines(
            keepends=True
        ):  # at \n, \r\n, and a progress bar's \r
            if text.endswith((b"\n", b"\r")):
                yield text
            else:
                self._rest = text
                break
        else:
            self._rest = b""
        if len(self._rest) > _MAX_BYTES:
            yield from self.end()

    def end(self) -> Iterator[bytes]:
        """Yields what has no end of line."""
        rest, self._rest = self._rest, b""
        if rest:
            yield rest + b"\n"


class Writer:
    """Writes lines where they belong.

    Attributes:
        is_broken: Somebody closed the other end of ``out`` or ``err``; what is written there is lost.

    Args:
        out, err: The launcher's own streams.
        folder: Also write ``rank.N/stdout`` and ``rank.N/stderr`` there; None: do not.
        with_timestamp: Put the time before each line on the screen.
    """

    def __init__(
        self, out: BinaryIO, err: BinaryIO, folder: str | None, with_timestamp: bool
    ) -> None:
        self._out = out
        self._err = err
        self._folder = folder
        self._with_timestamp = with_timestamp
        self._files: dict[tuple[int, bool], BinaryIO] = {}
        self._stack = contextlib.ExitStack()
        self.is_broken = False

    def keep(self, rank: int, is_error: bool, data: bytes) -> None:
        """Adds what a rank wrote to its file, as it is."""
        if self._folder is None:
            return
        file = self._files.get((rank, is_error))
        if file is None:
            path = pathlib.Path(self._folder, f"rank.{rank}", "stderr" if is_error else "stdout")
            path.parent.mkdir(parents=True, exist_ok=True)
            file = self._files[rank, is_error] = self._stack.enter_context(
                path.open("wb", buffering=0)
            )
        file.write(data)

    def show(self, line: Line) -> None:
        """Writes a line to the screen, with its rank."""
        if line.text == b"\r":
            return
        mark = b"[mpirun] " if line.rank is None else b"[%d] " % line.rank
        if self._with_timestamp:
            time = datetime.datetime.fromtimestamp(line.time_s)
            mark = f"{time.isoformat(' ', 'milliseconds')} ".encode() + mark
        self._write(self._err if line.is_error else self._out, mark + line.text)

    def say(self, sentence: str) -> None:
        """Writes a sentence of the launcher's own."""
        self._write(self._err, f"farandolerun: {sentence}\n".encode())

    def flush(self) -> None:
        """Lets out what was written; called once for many lines, which may be short."""
        self._guard(self._out, self._out.flush)
        self._guard(self._err, self._err.flush)

    def close(self) -> None:
        """Lets out what was written and closes the files."""
        self.flush()
        self._stack.close()

    def _write(self, stream: BinaryIO, data: bytes) -> None:
        if not self.is_broken:
            self._guard(stream, lambda: stream.write(data))

    def _guard(self, stream: BinaryIO, call: Callable[[], object]) -> None:
        try:
            call()
        except BrokenPipeError:
            self.is_broken = True
            with open(os.devnull, "wb") as sink:  # where the rest goes, and Python's flush at exit
                os.dup2(sink.fileno(), stream.fileno())
