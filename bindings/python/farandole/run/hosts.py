"""Where ranks go: ``-H host:slots``, ``--hostfile``, and what the machine says about itself."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from typing import NamedTuple

from farandole.run.errors import UsageError

_HOST = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_FILE_LINE = re.compile(r"(?P<name>\S+)(?:\s+slots\s*=\s*(?P<slots>\S+))?")
# Schedulers whose nodes mpirun takes by itself.
_SCHEDULERS = {"SLURM_JOB_ID": "Slurm", "PBS_NODEFILE": "PBS", "LSB_HOSTS": "LSF"}


class Host(NamedTuple):
    """A machine and how many ranks it takes."""

    name: str
    slots: int


def _slots(text: str, where: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise UsageError(f'{where}: the slots "{text}" are not a whole number from 1')
    return int(text)


def _named(name: str, where: str) -> str:
    if not _HOST.fullmatch(name):
        raise UsageError(f'{where}: "{name}" is not the name of a host')
    return name


def parse_hosts(text: str) -> list[Host]:
    """Reads "a:2,b:4"; without a number a host has one slot.

    Raises:
        UsageError: It is not such a list; names the part that is wrong.
    """
    hosts = []
    for item in text.split(","):
        name, colon, slots = item.strip().partition(":")
        where = f'-H "{text}"'
        hosts.append(Host(_named(name, where), _slots(slots, where) if colon else 1))
    return _merged(hosts)


def read_hostfile(path: str) -> list[Host]:
    """Reads lines of "name slots=N"; "#" starts a comment, and without a number a host has one slot.

    Raises:
        UsageError: The file cannot be read, or a line is wrong; names the line.
    """
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f'--hostfile "{path}" cannot be read: {_reason(error)}') from error
    hosts = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        where = f'--hostfile "{path}", line {number}'
        found = _FILE_LINE.fullmatch(text)
        if not found:
            raise UsageError(f'{where}: "{text}" is not "host slots=N"')
        slots = found["slots"]
        hosts.append(Host(_named(found["name"], where), _slots(slots, where) if slots else 1))
    if not hosts:
        raise UsageError(f'--hostfile "{path}" names no host')
    return _merged(hosts)


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else "it is not text"


def _merged(hosts: list[Host]) -> list[Host]:
    """A host that is named again, as in PBS's files with one line per slot, has more slots."""
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return [Host(*item) for item in slots.items()]


def is_this_machine(name: str) -> bool:
    """Whether a name of a host means the machine we are on."""
    own = socket.gethostname()
    return name in ("localhost", "127.0.0.1", own, own.partition(".")[0], socket.getfqdn())


def scheduler(environment: Mapping[str, str]) -> str | None:
    """The scheduler whose allocation mpirun will use when no hosts are named, if there is one."""
    return next((name for variable, name in _SCHEDULERS.items() if environment.get(variable)), None)


def core_count() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def address_towards(name: str) -> str | None:
    """The IPv4 address of this machine that another host sees it by; None if its name is not known."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting it sends nothing
        try:
            probe.connect((name, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])
