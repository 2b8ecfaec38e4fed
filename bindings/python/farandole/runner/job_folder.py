"""What a launcher of an elastic job keeps for one that is started after it, and how that finds ranks which live."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import re
import socket
import stat
from collections.abc import Mapping
from typing import IO, Any, NamedTuple

from farandole.runner import supervisor
from farandole.runner.job import Malformed, read_json
from farandole.runner.options import UsageError
from farandole.runner.supervisor import start_thread

_PROBE_TIMEOUT_S = 2.0
_ADDRESS = re.compile(r"[^\s,]+:[0-9]{1,5}(,[^\s,]+:[0-9]{1,5})*")  # one rank may have several


class JobFolder:
    """Where a launcher keeps what another needs that is started after it: the key, and where members listen.

    Raises:
        UsageError: Others can write there or read it, or another launcher uses it.
    """

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self._file = pathlib.Path(self.path, "job.json")
        try:
            os.makedirs(self.path, mode=0o700, exist_ok=True)
            found = os.stat(self.path)
            if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
                raise UsageError(f'--job "{path}": the folder must belong to you, with mode 0700')
            self._lock = os.open(os.path.join(self.path, "lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with this process
        except BlockingIOError:
            raise UsageError(f'--job "{path}": another farandolerun runs this job') from None
        except OSError as error:
            raise UsageError(f'--job "{path}" cannot be used: {error.strerror}') from error

    def read(self) -> tuple[str, dict[int, tuple[str, str]]]:
        """The key, and by number the address and host of each member; empty if there are none to be read."""
        try:
            said = read_json(self._file.read_bytes(), key=str, members=dict)
            members = {int(number): (str(one[0]), str(one[1])) for number, one in said["members"].items()}
            return said["key"], members
        except (OSError, Malformed, ValueError, LookupError, TypeError):
            return "", {}

    def write(self, key: str, members: Mapping[int, tuple[str, str]]) -> None:
        """Replaces what is there at once. OSError: it cannot be written."""
        new = self._file.with_suffix(".new")
        with open(os.open(new, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w") as file:
            json.dump({"key": key, "members": members}, file)
        os.replace(new, self._file)

    def read_note(self, number: int) -> _Note | None:
        """What the supervisor of a rank notes of it; None if it has no note here."""
        said: dict[str, Any] = {}
        try:
            with open(supervisor.note_file(self.path, number), "rb") as file:
                is_locked = not _can_lock(file)
                for line in file:
                    with contextlib.suppress(Malformed):
                        said |= read_json(line)
        except OSError:
            return None
        address, code = said.get("member"), said.get("code")
        return _Note(is_locked, str(address) if is_address(address) else "", code if isinstance(code, int) else None)

    def clear(self) -> None:
        """Forgets the job, which is over."""
        for path in [self._file, *pathlib.Path(self.path).glob("rank.*")]:
            with contextlib.suppress(OSError):
                path.unlink()


class _Note(NamedTuple):
    """What a supervisor notes of a rank: where that listens, and the code of its end. It is locked until then."""

    is_locked: bool
    address: str
    code: int | None


def _can_lock(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_address(text: object) -> bool:
    return isinstance(text, str) and _ADDRESS.fullmatch(text) is not None


class Probe(NamedTuple):
    """What was found of a rank: whether it lives, whether that is certain, and where it listens, if it is known."""

    lives: bool
    is_certain: bool
    address: str


def probe(folder: JobFolder | None, ranks: Mapping[int, str]) -> dict[int, Probe]:
    """Finds out which ranks live, by number, of whose ports these are the addresses; asks all at the same time."""
    found: dict[int, Probe] = {}

    def ask(number: int, address: str) -> None:
        note = None if folder is None else folder.read_note(number)
        if note is not None:
            found[number] = Probe(note.is_locked, True, note.address or address)
        else:
            found[number] = Probe(_answers(address), False, address)

    for thread in [start_thread(ask, *rank) for rank in ranks.items()]:
        thread.join()
    return found


def _answers(addresses: str) -> bool:
    """Whether something accepts connections at one of these addresses of a rank."""
    for address in filter(None, addresses.split(",")):
        with contextlib.suppress(OSError, ValueError):
            socket.create_connection(supervisor.split_address(address), _PROBE_TIMEOUT_S).close()
            return True
    return False
