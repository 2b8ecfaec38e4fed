"""Starts ranks without mpirun: a supervisor on each host, as a child of ours, over ssh, by srun or by an agent.

The job's key goes to supervisors on their stdin, and from them to each rank through a pipe. Rank 0's host opens
the socket on which that rank listens, so its port is nobody else's, and tells its address before other hosts start.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from farandole.runner import supervisor
from farandole.runner.job import Job, Malformed, find_addresses
from farandole.runner.options import Host, Options, UsageError, is_this_host, travelling
from farandole.runner.output import Writer
from farandole.runner.supervisor import Channel

HERE = "localhost"
AGENT_VARIABLE = "FARANDOLE_AGENT"  # words that run a command on a host: AGENT HOST COMMAND...
_TIMEOUT_S = 60
# ssh fails where it would ask, and notices within 25 s that the other host is gone.
_SSH = ["ssh", "-T", "-o", "BatchMode=yes"] + [
    word for setting in ("ConnectTimeout=20", "ServerAliveInterval=5", "ServerAliveCountMax=5")
    for word in ("-o", setting)
]  # fmt: skip
_SRUN = "srun --quiet --nodes=1 --ntasks=1 --overlap --mpi=none --cpu-bind=none --export=ALL".split()
# Of the allocation, and not of a step with one task.
_OF_THE_ALLOCATION = re.compile(r"SLURM_(NTASKS.*|NPROCS|NNODES|TASKS_PER_NODE|DISTRIBUTION|CPU_BIND.*|CPUS_PER_TASK)")


class Placed(NamedTuple):
    """A host with its ranks, and what starts its supervisor."""

    name: str
    ranks: range
    is_here: bool
    command: list[str]


def slurm_hosts(environment: Mapping[str, str]) -> list[Host]:
    """The nodes of a Slurm allocation with their tasks; none outside one.

    Raises:
        UsageError: Slurm's commands do not say which nodes they are.
    """
    nodes = environment.get("SLURM_JOB_NODELIST", "")
    if not nodes or "SLURM_JOB_ID" not in environment:
        return []
    try:
        command = ["scontrol", "show", "hostnames", nodes]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        why = getattr(error, "stderr", None) or str(error)  # what it has said, if it ran
        raise UsageError(f'SLURM_JOB_NODELIST="{nodes}" cannot be read: {why.strip()}') from error
    counts: list[int] = []  # of "4(x3),2": 4 tasks on each of three nodes, 2 on the next
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_TASKS_PER_NODE", "")):
        counts += [int(count)] * int(times or 1)
    names = done.stdout.split()
    if len(counts) != len(names):
        raise UsageError(f"Slurm says {len(names)} nodes, but tasks of {len(counts)} in SLURM_TASKS_PER_NODE")
    return [Host(*one) for one in zip(names, counts)]


def place(options: Options, environment: Mapping[str, str]) -> list[Placed]:
    """Fills the hosts with ranks, in their order; those that mean this one are one.

    Raises:
        UsageError: What would start ranks on other hosts is not installed.
    """
    placed, first = [], 0
    for name, count in slots_by_name(options.hosts or [Host("localhost", options.np)]).items():
        ranks = range(first, min(first + count, options.np))
        if ranks:
            is_here = name == HERE
            placed.append(Placed(name, ranks, is_here, make_command(name, is_here, options, environment)))
        first = ranks.stop
    return placed


def slots_by_name(given: Iterable[Host]) -> dict[str, int]:
    """The slots of each host, HERE for all that mean this one."""
    slots: dict[str, int] = {}
    for host in given:
        name = HERE if is_this_host(host.name) else host.name
        slots[name] = slots.get(name, 0) + host.slots
    return slots


def make_command(name: str, is_here: bool, options: Options, environment: Mapping[str, str]) -> list[str]:
    stub = [sys.executable, "-I", "-S", supervisor.__file__]
    return stub if is_here else reach(name, stub, options, environment)


def reach(name: str, command: Sequence[str], options: Options, environment: Mapping[str, str]) -> list[str]:
    """The words that run a command on another host.

    Raises:
        UsageError: What would run it is not installed.
    """
    flags = {"-p": options.ssh_port, "-i": options.ssh_identity_file}
    if agent := environment.get(AGENT_VARIABLE):
        words = [*shlex.split(agent), name, *command]
    elif options.is_slurm:
        words = [*_SRUN, f"--nodelist={name}", *command]
    else:  # which passes the words to a shell
        given = [word for flag, value in flags.items() if value for word in (flag, str(value))]
        words = [*_SSH, *given, name, shlex.join(command)]
    if shutil.which(words[0], path=environment.get("PATH")) is None:
        raise UsageError(f'"{words[0]}", which starts the ranks on {name}, was not found')
    return words


class HostsJob(Job):
    """A job with a supervisor on each host, which runs the ranks there."""

    def __init__(
        self, options: Options, writer: Writer, hosts: list[Placed], environment: dict[str, str],
        function: bytes | None = None,
    ) -> None:  # fmt: skip
        super().__init__(options, writer, function)
        self.hosts, self._environment = dict(enumerate(hosts)), environment  # by number
        self._folder = ""  # where the ranks start, if they can; empty: where their supervisor does
        self.key = secrets.token_hex(32)
        self.address, self._master_port = "", 0  # of rank 0, and for its torch.distributed, once its host has said it
        self.supervisors: dict[int, Channel] = {}  # by the number of the host
        self._listeners: dict[int, threading.Thread] = {}
        self._listening: dict[str, Any] = {"addresses": []}
        self._is_killing = False

    def start(self, stack: contextlib.ExitStack) -> None:
        try:
            self._folder = os.getcwd()
        except OSError as error:
            self.writer.say(f"the working directory on {socket.gethostname()} cannot be read: {error.strerror}")
        if self.options.is_slurm:  # what srun does with its tasks' output is not made for binary messages
            self._listening = self.open_listener(False)
        for number in self.hosts:
            self.start_supervisor(number)

    def start_supervisor(self, number: int, **said: Any) -> None:
        """Starts that of a host, and tells it what CONNECT has, ``said`` among it."""
        host = self.hosts[number]
        ours, theirs = socket.socketpair()
        with theirs:
            environment = self._environment
            if host.command[0] == "srun":
                environment = {n: v for n, v in environment.items() if not _OF_THE_ALLOCATION.fullmatch(n)}
            self.run_starter(host.name, host.command, environment, theirs.fileno(), theirs.fileno())
        channel = Channel.over(ours, host.name)
        reached = self._listening if host.command[0] == "srun" else {"addresses": []}
        said |= {"version": supervisor.PROTOCOL, "key": self.key, "id": number} | reached
        channel.send(supervisor.CONNECT, json.dumps(said).encode())
        self._listeners[number] = self.listen(channel)

    def greeted(self, channel: Channel, hello: dict[str, Any]) -> None:
        number: Any = hello.get("id")
        if not isinstance(number, int) or number not in self.hosts or number in self.supervisors:
            raise Malformed(f"it says number {number!r} of {len(self.hosts)} hosts")
        if self.is_stopping:
            channel.close()
            return
        self.supervisors[number] = channel
        self.host_is_up(number)

    def host_is_up(self, number: int) -> None:
        """Takes it that the supervisor of a host can start ranks."""
        if number == 0 or self.address:
            self.start_ranks(number, self.hosts[number].ranks, number == 0)

    def has_all_supervisors(self) -> bool:
        return len(self.supervisors) == len(self.hosts)

    def start_ranks(self, number: int, ranks: Iterable[int], has_rank_0: bool, **said: Any) -> None:
        """Has a host start ranks. ``said`` counts instead of, or beside, what START has by itself."""
        host = self.hosts[number]
        has_own = host.is_here or host.command[0] == "srun"  # which passes all on but what Slurm sets for the node
        start = {
            "ranks": [*ranks], "size": self.options.np, "command": self.options.command, "folder": self._folder,
            "environment": None if has_own else travelling(self._environment),
            "runs_function": self.function is not None,
            "listen": ("127.0.0.1" if self.has_loopback_only() else "") if has_rank_0 else None,
            "address": self._host_of_rank_0(number) if has_rank_0 else self.address,
            "master_port": self._master_port,
        } | said  # fmt: skip
        self.supervisors[number].send(supervisor.START, json.dumps(start).encode())

    def has_loopback_only(self) -> bool:
        """Whether no rank is on another host."""
        return all(one.is_here for one in self.hosts.values())

    def _host_of_rank_0(self, number: int) -> str:
        """By which name or address the ranks reach the host with that number, which has rank 0."""
        others = [host.name for host in self.hosts.values() if not host.is_here]
        if not self.hosts[number].is_here:  # where its supervisor connects from, if that does
            return self.supervisors[number].peer_host or self.hosts[number].name
        if self.has_loopback_only():
            return "127.0.0.1"
        if names := self.options.network_interfaces:
            return next(iter(find_addresses(names)), socket.gethostname())
        if not others:  # there may be some later
            return next(iter(find_addresses()), socket.gethostname())
        with contextlib.suppress(OSError):
            for family, kind, _, _, address in socket.getaddrinfo(others[0], 9, type=socket.SOCK_DGRAM):
                # From where the system would send to another host.
                with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                    probe.connect(address)
                    return str(probe.getsockname()[0])
        return socket.gethostname()

    def ready(self, channel: Channel, said: dict[str, Any]) -> None:
        number = self.number_of(channel)
        self.add_ranks(self.hosts[number].ranks, channel, channel.host, said["threads"])
        if number == 0:
            self.address, self._master_port = said["address"], said["master_port"]
            for other in self.supervisors:
                if other != 0:
                    self.host_is_up(other)

    def number_of(self, channel: Channel) -> int:
        """The host's whose supervisor is at the other end. Raises Malformed."""
        number = next((number for number, one in self.supervisors.items() if one is channel), None)
        if number is None:
            raise Malformed("it has not said which host it is")
        return number

    def find_unstarted(self) -> str:
        for number, host in self.hosts.items():
            if host.ranks[0] not in self.peers and (why := self.why_unstarted(number)):
                return why
        return ""

    def why_unstarted(self, number: int) -> str:
        """Why a host's supervisor, which has not come yet, will not come any more; empty if it may."""
        host = self.hosts[number]
        code = self.starters[host.name].poll()
        if code is None or self._listeners[number].is_alive() or self.has_messages:
            return ""
        return f"{host.name} could not be started: {host.command[0]} ended with exit code {code}"

    def signal_ranks(self, number: int) -> None:
        is_again, self._is_killing = self._is_killing, number == signal.SIGKILL
        for channel in self.supervisors.values():
            channel.send(supervisor.SIGNAL, bytes([number]))
        for place, host in self.hosts.items():
            starter = self.starters[host.name]
            if starter.poll() is None and (place not in self.supervisors or is_again):
                os.killpg(starter.pid, signal.SIGKILL)

    def describe_end(self, has_all: bool) -> tuple[int, str]:
        return int(not has_all), ""
