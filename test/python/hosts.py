"""Hosts played by this machine: each has its own name and network. Two with a link, or several at a switch."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import IO, Any

from ranks import GUARD_S, PYTHON_PATH

_ADDRESSES = ("10.77.0.1", "10.77.0.2")
_IPV6_ADDRESSES = ("2001:db8::1", "2001:db8::2")
FIRST_ADDRESS = _ADDRESSES[0]
_ASK_PORTER = (
    "import json, os, socket, sys; door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); "
    "door.connect(sys.argv[1]); text = json.dumps([sys.argv[2:], dict(os.environ)]).encode(); "
    "socket.send_fds(door, [text], [0, 1, 2]); sys.exit(int(door.recv(9) or 1))"
)


@contextlib.contextmanager
def or_skip(hosts: TwoHosts | HostsAtSwitch) -> Iterator[Any]:
    """The hosts; where this machine does not allow them the test is skipped."""
    import pytest  # not above: test/fault plays hosts, too

    with contextlib.ExitStack() as stack:
        try:
            played = stack.enter_context(hosts)
        except RuntimeError as error:
            pytest.skip(str(error))
        yield played


class TwoHosts:
    """A context: network namespaces with a link ``eth0`` between them, and with other host names.

    Memory, files and processes are those of this machine; Open MPI and Farandole go by host names. Needs the
    right to make namespaces (root), ``ip`` and, for a rate, ``tc``.

    Args:
        folder: For a script that mpirun calls in the place of ssh.
        rate: Of the link in either direction, in the words of ``tc`` ("1gbit"); None: as fast as it is.
        output: Takes what started jobs write; None: a pipe of each.
        is_ipv6: Whether they have no IPv4 addresses but the loopback's.
        has_own_processes: Whether what runs on a host sees that host's processes only. It starts in the folder "/".
    Raises:
        RuntimeError: This machine does not allow it; says why.
    """

    def __init__(
        self, folder: pathlib.Path, rate: str | None = None, output: IO[str] | None = None, is_ipv6: bool = False,
        has_own_processes: bool = False,
    ) -> None:  # fmt: skip
        self._folder = folder
        self._addresses = _IPV6_ADDRESSES if is_ipv6 else _ADDRESSES
        self._output = output
        self._rate = rate
        self._has_own_processes = has_own_processes
        self._keepers: list[subprocess.Popen[str]] = []
        self._door: socket.socket | None = None

    def __enter__(self) -> TwoHosts:
        try:
            for number in (1, 2):
                self._keepers.append(_keep_host(f"played{number}", self._has_own_processes))
            self._link()
        except (OSError, RuntimeError) as error:
            self.__exit__()
            raise RuntimeError(f"no hosts can be played here: {error}") from error
        script = self._folder / "to_second_host"
        enter = " ".join(self._enter(1))
        script.write_text(f'#!/bin/sh\nshift\nexec {enter} sh -c "$*"\n')
        script.chmod(0o755)
        agent = self._folder / "agent"  # HOST COMMAND...
        enter = " ".join(self._enter(1))
        if self._has_own_processes:  # from one host's none of the other can be named
            enter = f"{sys.executable} -c '{_ASK_PORTER}' {self._open_door(self._folder / 'door')}"
        agent.write_text(f'#!/bin/sh\n[ "$1" = {self._addresses[1]} ] || exit 9\nshift\nexec {enter} "$@"\n')
        agent.chmod(0o755)
        return self

    def __exit__(self, *_: object) -> None:
        if self._door is not None:
            self._door.shutdown(socket.SHUT_RDWR)  # wakes its thread
            self._door.close()
        _end_hosts(self._keepers)

    def mpirun(
        self, ranks: int, command: Sequence[str], timeout_s: float = GUARD_S, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs ``command`` on ``ranks`` ranks of each host, the lower ones on the first; stdout holds stderr too."""
        job = self.start(ranks, command, **variables)
        try:
            text, _ = job.communicate(timeout=timeout_s)
        finally:
            job.kill()
        return subprocess.CompletedProcess(job.args, job.returncode, text)

    def start(self, ranks: int, command: Sequence[str], **variables: str) -> subprocess.Popen[str]:
        """As :meth:`mpirun`, without waiting for the end."""
        slots = ",".join(f"{address}:{ranks}" for address in _ADDRESSES)
        words = ["mpirun", "--oversubscribe", "--bind-to", "none", "-H", slots, *_exported(variables)]
        return self._start([*words, "-x", "PYTHONPATH", *command], variables)

    def farandolerun(
        self, ranks: int, command: Sequence[str], network: str = "--gloo", is_reversed: bool = False, **variables: str
    ) -> subprocess.Popen[str]:
        """As :meth:`start`, with Farandole's launcher on the first host, which has the higher ranks if reversed."""
        hosts = [f"[{one}]" if ":" in one else one for one in self._addresses]
        slots = ",".join(f"{host}:{ranks}" for host in (reversed(hosts) if is_reversed else hosts))
        launcher = [sys.executable, "-m", "farandole.runner", "-np", str(2 * ranks), "-H", slots, network]
        return self._start([*launcher, "--network-interfaces", "eth0", *command], variables)

    def start_rank(self, host: int, command: Sequence[str], **variables: str) -> subprocess.Popen[str]:
        """Starts one process on a host, without a launcher; :data:`FIRST_ADDRESS` is that of host 0."""
        return self._start(list(command), variables, host)

    def set_tcp_retries(self, count: int) -> None:
        """How often TCP sends again what is not confirmed, before it gives the connection up (15 by default)."""
        for host in (0, 1):
            _run(*self._enter(host), "sh", "-c", f"echo {count} > /proc/sys/net/ipv4/tcp_retries2")

    def cut(self) -> None:
        """Takes the link away for good: nothing arrives any more, and nobody is told."""
        _run(*self._enter(1), "ip", "link", "set", "eth0", "down")

    def filter_packets(self, ports: str) -> None:
        """From now on connections over the link arrive at these TCP ports alone, "FIRST:LAST"; others get no answer."""
        for host in (0, 1):
            where = [*self._enter(host), "iptables", "-A", "INPUT", "-i", "eth0"]
            _run(*where, "-p", "tcp", "--syn", "!", "--dport", ports, "-j", "DROP")
            _run(*where, "!", "-p", "tcp", "-j", "DROP")

    def kill_second(self) -> None:
        """Ends all processes of the second host, and its network."""
        keeper = self._keepers[1]
        network = os.readlink(f"/proc/{keeper.pid}/ns/net")
        for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
            with contextlib.suppress(OSError):  # it has ended by itself
                if os.readlink(f"/proc/{pid}/ns/net") == network:
                    os.kill(pid, signal.SIGKILL)

    def _start(self, command: list[str], variables: dict[str, str], host: int = 0) -> subprocess.Popen[str]:
        network = f"{_ADDRESSES[0].rpartition('.')[0]}.0/24"
        agent = str(self._folder / "to_second_host")
        environment = os.environ | {
            "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_mpi_yield_when_idle": "1", "OMPI_MCA_rtc_hwloc_vmhole": "none",
            "OMPI_MCA_pml": "ob1", "OMPI_MCA_btl_tcp_if_include": network,
            "OMPI_MCA_plm_rsh_agent": agent, "PRTE_MCA_plm_ssh_agent": agent,  # Open MPI 4 and 5
            "OMPI_MCA_oob_tcp_if_include": network, "PRTE_MCA_prte_if_include": network,
            "PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1", "FARANDOLE_AGENT": str(self._folder / "agent"),
        } | variables  # fmt: skip
        return subprocess.Popen(
            [*self._enter(host), *command], env=environment, text=True,
            stdout=self._output or subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def _enter(self, host: int) -> list[str]:
        keeper = self._keepers[host].pid
        if not self._has_own_processes:
            return ["nsenter", "-t", str(keeper), "-n", "-u"]
        first = pathlib.Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()[0]
        return ["nsenter", "-t", first, "-n", "-u", "-p", "-m"]

    def _open_door(self, path: pathlib.Path) -> pathlib.Path:
        """A socket at which ``_ASK_PORTER`` has commands run on the second host, with its own stdin and so on."""
        door = self._door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        door.bind(str(path))
        door.listen()

        def run(asked: socket.socket) -> None:
            with asked:
                text, files, *_ = socket.recv_fds(asked, 1 << 20, 3)
                words, environment = json.loads(text)
                try:
                    code = subprocess.call(
                        [*self._enter(1), *words], env=environment, stdin=files[0], stdout=files[1], stderr=files[2]
                    )
                finally:
                    for file in files:
                        os.close(file)
                with contextlib.suppress(OSError):  # who asked has been killed
                    asked.send(str(code).encode())

        def listen() -> None:
            with contextlib.suppress(OSError):  # it is closed
                while True:
                    threading.Thread(target=run, args=(door.accept()[0],), daemon=True).start()

        threading.Thread(target=listen, daemon=True).start()
        return path

    def _link(self) -> None:
        first, second = (str(keeper.pid) for keeper in self._keepers)
        _run("ip", "link", "add", "eth0", "netns", first, "type", "veth", "peer", "name", "eth0", "netns", second)
        for host, address in enumerate(self._addresses):
            enter = self._enter(host)
            where = [f"{address}/64", "nodad"] if ":" in address else [f"{address}/24"]
            _run(*enter, "ip", "addr", "add", *where, "dev", "eth0")
            for name in ("lo", "eth0"):
                _run(*enter, "ip", "link", "set", name, "up")
            if self._rate is not None:  # of what goes out; a burst is four of the packets that TCP makes
                limit = ["rate", self._rate, "burst", "256k", "latency", "50ms"]
                _run(*enter, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *limit)


class HostsAtSwitch:
    """A context: network namespaces with an ``eth0`` each, at one switch; nobody notices a cut by itself.

    Needs and shares what :class:`TwoHosts` does.

    Args:
        count: How many, of the addresses 10.78.0.1 and so on.
    Raises:
        RuntimeError: This machine does not allow it; says why.
    """

    def __init__(self, count: int) -> None:
        self.addresses = [f"10.78.0.{number}" for number in range(1, count + 1)]
        self._keepers: list[subprocess.Popen[str]] = []

    def __enter__(self) -> HostsAtSwitch:
        try:
            self._keepers += [_keep_host(f"played{number}") for number in range(1, len(self.addresses) + 1)]
            self._keepers.append(_keep_host("switch"))
            _run(*self.enter(-1), "ip", "link", "add", "switch", "up", "type", "bridge")
            for host in range(len(self.addresses)):
                self._link(host)
        except (OSError, RuntimeError) as error:
            self.__exit__()
            raise RuntimeError(f"no hosts can be played here: {error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        _end_hosts(self._keepers)

    def enter(self, host: int) -> list[str]:
        """Words before a command that is to run on a host."""
        return ["nsenter", "-t", str(self._keepers[host].pid), "-n", "-u"]

    def cut(self, host: int, other: int) -> None:
        """From now on nothing that ``host`` sends arrives at ``other``; what comes back is another link."""
        self._send_to(host, other, 255)

    def heal(self, host: int, other: int) -> None:
        self._send_to(host, other, other)

    def _link(self, host: int) -> None:
        peer = ["peer", "name", f"port{host}", "netns", str(self._keepers[-1].pid)]
        hardware = ["address", f"02:78:00:00:00:{host:02x}"]
        enter = self.enter(host)
        _run(*enter, "ip", "link", "add", "eth0", *hardware, "type", "veth", *peer)
        _run(*enter, "ip", "addr", "add", f"{self.addresses[host]}/24", "dev", "eth0")
        for name in ("lo", "eth0"):
            _run(*enter, "ip", "link", "set", name, "up")
        _run(*self.enter(-1), "ip", "link", "set", f"port{host}", "master", "switch", "up")
        for other in range(len(self.addresses)):
            if other != host:
                self.heal(host, other)

    def _send_to(self, host: int, other: int, card: int) -> None:
        """Frames for a host go to this card; 255 is nobody's."""
        hardware = ["lladdr", f"02:78:00:00:00:{card:02x}", "nud", "permanent"]
        _run(*self.enter(host), "ip", "neigh", "replace", self.addresses[other], "dev", "eth0", *hardware)


def _end_hosts(keepers: Sequence[subprocess.Popen[str]]) -> None:
    for keeper in keepers:  # the namespaces go with their last process, the link with them
        for pid in _processes_beside(keeper.pid):  # and a daemon of mpirun's outlives a cut link
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        keeper.kill()
        keeper.communicate()


def _processes_beside(keeper: int) -> list[int]:
    """The other processes in its network namespace."""
    found = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            is_beside = (process / "ns/net").readlink() == pathlib.Path(f"/proc/{keeper}/ns/net").readlink()
        except OSError:
            continue  # it is gone
        if is_beside and int(process.name) != keeper:
            found.append(int(process.name))
    return found


def _exported(variables: dict[str, str]) -> list[str]:
    return [word for name in variables for word in ("-x", name)]


def _keep_host(name: str, has_own_processes: bool = False) -> subprocess.Popen[str]:
    """A process in new namespaces, which live as long as it does."""
    processes = ["--pid", "--fork", "--kill-child", "--mount-proc"] if has_own_processes else []
    script = f"hostname {name} && echo ready && exec cat"
    keeper = subprocess.Popen(
        ["unshare", "--net", "--uts", *processes, "sh", "-c", script],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert keeper.stdout is not None
    said = keeper.stdout.readline().strip()
    if said != "ready":
        keeper.kill()
        keeper.communicate()
        raise RuntimeError(said or "unshare ended")
    return keeper


def _run(*command: str) -> None:
    done = subprocess.run(command, text=True, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout.strip()}")


def bytes_over_the_link() -> tuple[int, int]:
    """On a rank: bytes that its host has sent so far, and received."""
    for line in pathlib.Path("/proc/self/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == "eth0":
            received, sent = (int(figures.split()[column]) for column in (0, 8))
            return sent, received
    raise RuntimeError("this process is on no played host")


def run_python(hosts: TwoHosts, ranks: int, script: str, *arguments: Any, **variables: str) -> str:
    """The output of a script on ``ranks`` ranks of each host.

    Raises:
        AssertionError: The job failed; with its output.
    """
    done = hosts.mpirun(ranks, [sys.executable, "-c", script, *map(str, arguments)], **variables)
    assert done.returncode == 0, done.stdout
    return done.stdout
