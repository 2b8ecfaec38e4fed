"""What is run to start the ranks: mpirun's command line and the environment."""

from __future__ import annotations

import os
import pathlib
import re
import sys
from collections.abc import Mapping

from farandole.run import supervise
from farandole.run.arguments import Options
from farandole.run.hosts import scheduler
from farandole.run.mpi import Pair

_YIELD = "mpi_yield_when_idle"
# What belongs to one host or one session stays there; everything else reaches ranks on other hosts.
_STAYS = re.compile(
    r"_|HOME|USER|LOGNAME|SHELL|MAIL|PWD|OLDPWD|SHLVL|HOST|HOSTNAME|TMPDIR|TMP|TEMP|TERM.*|LS_COLORS"
    r"|DISPLAY|WAYLAND_.*|XAUTHORITY|XDG_.*|DBUS_.*|SSH_.*|GPG_.*|SUDO_.*|WINDOWID"
    r"|OMPI_.*|OPAL_.*|ORTE_.*|PMIX_.*|PMI_.*|PRTE_.*|SLURM_.*|SBATCH_.*|PBS_.*|LSB_.*"
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def travels(name: str, value: str) -> bool:
    """Whether a variable is handed to ranks on other hosts."""
    return bool(_NAME.fullmatch(name)) and not _STAYS.fullmatch(name) and "\n" not in value


def make_environment(options: Options, pair: Pair, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of mpirun, which ranks on this machine inherit.

    Python's output is unbuffered, so that it comes when it is written; torch's threads are left alone.
    """
    environment = dict(base) | pair.environment() | options.settings
    environment.setdefault("PYTHONUNBUFFERED", "1")
    if options.network_interfaces:
        environment.setdefault("NCCL_SOCKET_IFNAME", options.network_interfaces)
    return environment


def _placing(options: Options, environment: Mapping[str, str]) -> list[str]:
    words = ["-np", str(options.np)]
    if options.hosts:
        return [*words, "-H", ",".join(f"{host.name}:{host.slots}" for host in options.hosts)]
    if scheduler(environment):
        return words
    return [*words, "--oversubscribe"]  # else mpirun takes no more ranks than there are cores


def _network(options: Options, pair: Pair) -> list[str]:
    """How other hosts are reached; Open MPI 5 has other names for it."""
    is_old = pair.program.series < 5
    words, daemon = [], "--mca" if is_old else "--prtemca"
    ssh = []
    if options.ssh_port:
        ssh += ["-p", str(options.ssh_port)]
    if options.ssh_identity_file:
        ssh += ["-i", options.ssh_identity_file]
    if ssh:
        words += [daemon, "plm_rsh_args" if is_old else "plm_ssh_args", " ".join(ssh)]
    if options.network_interfaces:
        names = options.network_interfaces
        words += ["--mca", "btl_tcp_if_include", names]
        words += [daemon, "oob_tcp_if_include" if is_old else "prte_if_include", names]
    return words


def make_command(options: Options, pair: Pair, environment: Mapping[str, str]) -> list[str]:
    """mpirun and its arguments.

    Args:
        environment: As :func:`make_environment` gives it; on other hosts the ranks get those of its
            variables that travel.
    """
    command = [pair.program.path]
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")  # containers
    command += _placing(options, environment)
    command += options.binding
    if f"OMPI_MCA_{_YIELD}" not in environment:
        # With more ranks than cores one that spins keeps the one it waits for from running.
        command += ["--mca", _YIELD, "1"]
    if not options.is_local:
        command += ["--prefix", str(pathlib.Path(pair.program.path).parent.parent)]
        command += _network(options, pair)
        names = [name for name, value in environment.items() if travels(name, value)]
        command += [word for name in sorted({*names, supervise.VARIABLE}) for word in ("-x", name)]
    command += options.mpi_args
    return [*command, sys.executable, "-I", "-S", supervise.__file__, *options.command]
