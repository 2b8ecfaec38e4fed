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
from collections.abc import Mapping
from typing import Any, NamedTuple

from farandole.runner import supervisor
from farandole.runner.job import Job, Malformed, find_addresses
from farandole.runner.options import Host, Options, UsageError, is_this_host, travelling
from farandole.runner.output import Writer
from farandole.runner.supervisor import Channel

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


class _Placed(NamedTuple):
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


def place(options: Options, environment: Mapping[str, str]) -> list[_Placed]:
    """Fills the hosts with ranks, in their order; those that mean this one are one.

    Raises:
        UsageError: What would start ranks on other hosts is not installed.
    """
    slots: dict[str, int] = {}
    for host in options.hosts or [Host("localhost", options.np)]:
        name = "localhost" if is_this_host(host.name) else host.name
        slots[name] = slots.get(name, 0) + host.slots
    placed, first = [], 0
    for name, count in slots.items():
        ranks = range(first, min(first + count, options.np))
        if ranks:
            is_here = name == "localhost"
            placed.append(_Placed(name, ranks, is_here, _make_command(name, is_here, options, environment)))
        first = ranks.stop
    return placed


def _make_command(name: str, is_here: bool, options: Options, environment: Mapping[str, str]) -> list[str]:
    stub = [sys.executable, "-I", "-S", supervisor.__file__]
    if is_here:
        return stub
    flags = {"-p": options.ssh_port, "-i": options.ssh_identity_file}
    if agent := environment.get(AGENT_VARIABLE):
        command = [*shlex.split(agent), name, *stub]
    elif options.is_slurm:
        command = [*_SRUN, f"--nodelist={name}", *stub]
    else:  # which passes the words to a shell
        words = [word for flag, value in flags.items() if value for word in (flag, str(value))]
        command = [*_SSH, *words, name, shlex.join(stub)]
    if shutil.which(command[0], path=environment.get("PATH")) is None:
        raise UsageError(f'"{command[0]}", which starts the ranks on {name}, was not found')
    return command


class HostsJob(Job):
    """A job with a supervisor on each host, which runs the ranks there."""

    def __init__(
        self, options: Options, writer: Writer, hosts: list[_Placed], environment: dict[str, str],
        function: bytes | None = None,
    ) -> None:  # fmt: skip
        super().__init__(options, writer, function)
        self._hosts, self._environment = hosts, environment
        self._folder = ""  # where the ranks start, if they can; empty: where their supervisor does
        self._key = secrets.token_hex(32)
        self._address = ""  # of rank 0, once its host has said it
        self._supervisors: dict[int, Channel] = {}  # by the number of the host
        self._listeners: dict[int, threading.Thread] = {}
        self._is_killing = False

    def start(self, stack: contextlib.ExitStack) -> None:
        try:
            self._folder = os.getcwd()
        except OSError as error:
            self.writer.say(f"the working directory on {socket.gethostname()} cannot be read: {error.strerror}")
        # What srun does with its tasks' output is not made for binary messages.
        listening = self.open_listener(False) if self.options.is_slurm else {"addresses": []}
        for number, host in enumerate(self._hosts):
            ours, theirs = socket.socketpair()
            with theirs:
                environment = self._environment
                if host.command[0] == "srun":
                    environment = {n: v for n, v in environment.items() if not _OF_THE_ALLOCATION.fullmatch(n)}
                self.run_starter(host.name, host.command, environment, theirs.fileno(), theirs.fileno())
            channel = Channel.over(ours, host.name)
            reached = listening if host.command[0] == "srun" else {"addresses": []}
            said = {"version": supervisor.PROTOCOL, "key": self._key, "id": number} | reached
            channel.send(supervisor.CONNECT, json.dumps(said).encode())
            self._listeners[number] = self.listen(channel)

    def greeted(self, channel: Channel, hello: dict[str, Any]) -> None:
        number: Any = hello.get("id")
        if number not in range(len(self._hosts)) or number in self._supervisors:
            raise Malformed(f"it says number {number!r} of {len(self._hosts)} hosts")
        if self.is_stopping:
            channel.close()
            return
        self._supervisors[number] = channel
        if number == 0 or self._address:
            self._start_ranks(number)

    def has_all_supervisors(self) -> bool:
        return len(self._supervisors) == len(self._hosts)

    def _start_ranks(self, number: int) -> None:
        host = self._hosts[number]
        has_own = host.is_here or host.command[0] == "srun"  # which passes all on but what Slurm sets for the node
        listen = None
        if number == 0:
            listen = "127.0.0.1" if all(one.is_here for one in self._hosts) else ""
        start = {
            "ranks": [*host.ranks], "size": self.options.np, "command": self.options.command, "folder": self._folder,
            "environment": None if has_own else travelling(self._environment),
            "runs_function": self.function is not None, "listen": listen,
            "address": self._host_of_rank_0() if number == 0 else self._address,
        }  # fmt: skip
        self._supervisors[number].send(supervisor.START, json.dumps(start).encode())

    def _host_of_rank_0(self) -> str:
        """By which name or address the ranks reach the first host."""
        others = [host.name for host in self._hosts if not host.is_here]
        if not self._hosts[0].is_here:  # where its supervisor connects from, if that does
            return self._supervisors[0].peer_host or self._hosts[0].name
        if not others:
            return "127.0.0.1"
        if names := self.options.network_interfaces:
            return next(iter(find_addresses(names)), socket.gethostname())
        with contextlib.suppress(OSError):
            for family, kind, _, _, address in socket.getaddrinfo(others[0], 9, type=socket.SOCK_DGRAM):
                # From where the system would send to another host.
                with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                    probe.connect(address)
                    return str(probe.getsockname()[0])
        return socket.gethostname()

    def ready(self, channel: Channel, said: dict[str, Any]) -> None:
        number = next((number for number, one in self._supervisors.items() if one is channel), None)
        if number is None:
            raise Malformed("it has not said which host it is")
        self.add_ranks(self._hosts[number].ranks, channel, channel.host, said["threads"])
        if number == 0:
            self._address = said["address"]
            for other in self._supervisors:
                if other != 0:
                    self._start_ranks(other)

    def find_unstarted(self) -> str:
        for number, host in enumerate(self._hosts):
            code = self.starters[host.name].poll()
            is_read = not self._listeners[number].is_alive() and not self.has_messages
            if code is not None and is_read and host.ranks[0] not in self.peers:
                return f"{host.name} could not be started: {host.command[0]} ended with exit code {code}"
        return ""

    def signal_ranks(self, number: int) -> None:
        is_again, self._is_killing = self._is_killing, number == signal.SIGKILL
        for channel in self._supervisors.values():
            channel.send(supervisor.SIGNAL, bytes([number]))
        for place, host in enumerate(self._hosts):
            starter = self.starters[host.name]
            if starter.poll() is None and (place not in self._supervisors or is_again):
                os.killpg(starter.pid, signal.SIGKILL)

    def describe_end(self, has_all: bool) -> tuple[int, str]:
        return int(not has_all), ""
