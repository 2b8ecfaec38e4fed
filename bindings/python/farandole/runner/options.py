"""What was asked for: a job's command, its hosts, and how its ranks are started."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import socket
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from farandole import compat

# Of Slurm, PBS and LSF: mpirun takes the nodes they allocated by itself.
SCHEDULERS = ("SLURM_JOB_ID", "PBS_NODEFILE", "LSB_HOSTS")
# What belongs to one host or one session stays there; everything else reaches ranks on other hosts.
_STAYS = re.compile(
    r"_|HOME|USER|LOGNAME|SHELL|MAIL|PWD|OLDPWD|SHLVL|HOST|HOSTNAME|TMPDIR|TMP|TEMP|TERM.*|LS_COLORS"
    r"|DISPLAY|WAYLAND_.*|XAUTHORITY|XDG_.*|DBUS_.*|SSH_.*|GPG_.*|SUDO_.*|WINDOWID"
    r"|OMPI_.*|OPAL_.*|ORTE_.*|PMIX_.*|PMI_.*|PRTE_.*|SLURMD?_.*|SBATCH_.*|PBS_.*|LSB_.*"
)


class UsageError(ValueError):
    """Wrong use or a setting that cannot work: one message for the user; exit code 2."""


class Host(NamedTuple):
    """A machine and how many ranks it takes."""

    name: str
    slots: int


class Options(argparse.Namespace):
    """What was asked for, checked: what flags set by these names, and what follows from it."""

    command: Sequence[str] = ()  # the program and its arguments
    np: int = 0
    hosts: tuple[Host, ...] = ()  # empty: this machine, or what a scheduler allocated
    settings: Mapping[str, str] = {}  # variables for the ranks
    mpi_args: tuple[str, ...] = ()  # words for mpirun, last so that they win
    binding: tuple[str, ...] = ("--bind-to", "none")  # words for mpirun, too
    network: str = ""  # "tcp": no mpirun; "mpi": by mpirun; empty: the former unless flags are mpirun's
    is_slurm: bool = False  # the hosts are those of a Slurm allocation
    tcp: bool = False  # ranks of several hosts communicate over TCP alone
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    network_interfaces: str | None = None
    output_filename: str | None = None
    with_timestamp: bool = False
    horovod: bool = False  # ``import horovod`` gives the ranks Farandole
    start_timeout_s: float = 60.0  # all ranks must have started by then
    is_elastic: bool = False  # ranks come and go; what follows is of such a job
    min_np: int = 1  # with fewer ranks than this it waits for others, for elastic_timeout_s
    max_np: int | None = None
    elastic_timeout_s: float = 600.0
    reset_limit: int | None = None  # how often ranks are started again, all together
    cooldown_s: tuple[float, float] = (1.0, 60.0)  # the least and the most wait before a rank is started again
    job: str | None = None  # folder by which a later launcher finds the ranks of this one
    notes: tuple[str, ...] = ()  # messages about flags that mean nothing here
    verbose: bool = False
    dry_run: bool = False
    version: bool = False
    check_build: bool = False

    @property
    def is_local(self) -> bool:
        """Whether all ranks live on this machine (a scheduler's allocation may have others)."""
        if self.hosts:
            return all(is_this_host(host.name) for host in self.hosts)
        return not any(map(os.environ.get, SCHEDULERS))

    @property
    def most_np(self) -> float:
        """The most ranks of an elastic job."""
        return math.inf if self.max_np is None else self.max_np

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """The environment of the ranks, whatever starts them; Python's output is unbuffered."""
        environment = {**base, **self.settings}
        environment.setdefault("PYTHONUNBUFFERED", "1")
        if self.network_interfaces:
            environment.setdefault("NCCL_SOCKET_IFNAME", self.network_interfaces)
            environment.setdefault("FARANDOLE_INTERFACE", self.network_interfaces)
        if self.tcp:
            environment["NCCL_IB_DISABLE"] = "1"
        if self.horovod:
            compat.add_to(environment)
        return environment


def is_this_host(name: str) -> bool:
    own = socket.gethostname()
    if name in {"localhost", "127.0.0.1", own, own.partition(".")[0]}:
        return True
    with contextlib.suppress(OSError):  # an address that is none of ours cannot be bound
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)
        family, kind, _, _, address = found[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
            return True
    return name == socket.getfqdn()


def travelling(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that ranks on other hosts get."""
    return {name: value for name, value in environment.items() if not _STAYS.fullmatch(name)}
