"""Runs ranks of one host for the launcher: carries their output and input, and reports how they ended.

``python -I -S supervisor.py`` starts the ranks of its host: a child of the launcher on its own host, of ssh,
srun or an agent on another. mpirun starts one for each rank, as ``supervisor.py PROGRAM ARGUMENTS...``. One file:
it imports no package, so that a rank starts 30 ms later and not 200. Under mpirun without
:data:`VARIABLE` in the environment (somebody typed what ``--dry-run`` printed) it becomes the program.

Everything goes over one channel to the launcher: stdin and stdout, or a connection, as mpirun forwards output in blocks
of 4 KiB that mix between ranks. A supervisor sends HELLO (JSON), READY (JSON: rank 0's address and the port for torch's
store there, before it starts ranks of a host) and of each rank OUT, ERR, RESULT and REPORT (bytes the program wrote),
WANT (the program can take input) and EXIT (JSON). The launcher sends CONNECT and START (JSON, see :func:`run_host`),
INPUT (at most INPUT_BYTES for each WANT; empty: the end), SIGNAL (SIGTERM or SIGKILL for the programs) and, to a
supervisor of mpirun's after EXIT, GO: it may end. After a bad end mpirun ends the other ranks then. When the channel
breaks, the programs are ended; when a supervisor is killed, the kernel kills its programs, and :class:`Guard` what
these have started.

Of an elastic job START comes again for each rank that is started later, and a host's supervisor stays, without programs
too, until GO. When the channel breaks its programs go on: what they write is dropped. Their reports and ends are also
in the job's folder, for a launcher that is started again. SIGTERM means that the host will go: the programs get it as
well, and the launcher is told by LEAVE.

On a connection both ends first prove the token of the job, which does not travel there:

  supervisor -> launcher  hello      32 bytes: MAGIC, nonce
  launcher -> supervisor  challenge  64 bytes: nonce, MAC
  supervisor -> launcher  proof      32 bytes: MAC
  launcher -> supervisor  welcome    32 bytes: MAC

Each MAC is an HMAC-SHA-256 under the token over its own name and both nonces. This stays as it is when PROTOCOL, the
version of the messages that follow, becomes another. ``acceptor.py`` is the launcher's end.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import json
import os
import queue
import re
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple, NoReturn

PROTOCOL = 4  # grows when messages change: launcher and supervisor must have the same
# JSON, for supervisors under mpirun: what :func:`join_launcher` needs, whether each rank runs a function that it reads
# from its stdin, and variables that mpirun does not forward to other hosts.
VARIABLE = "_FARANDOLE_RUN"
# Files that the program opens to write: a function's result; lines of JSON that say why the rank fails.
RESULT_VARIABLE, REPORT_VARIABLE = "_FARANDOLE_RESULT", "_FARANDOLE_REPORT"
HEADER = struct.Struct("!BidI")  # kind, rank or -1, seconds since the epoch by the sender's clock, payload's bytes
_GROUP = struct.Struct("=i")  # to a guard: a process group to watch; negative: to forget
HELLO, OUT, ERR, EXIT, RESULT, REPORT, WANT, GO, SIGNAL, INPUT, READY, CONNECT, START, LEAVE = range(14)
CHUNK_BYTES = 65536
INPUT_BYTES = 32768  # fits into a connection's buffers, so that sending it waits for nobody
MAX_PAYLOAD_BYTES = 1 << 22
MAGIC, PROOF_BYTES = b"FDRL", 32
CONNECT_TIMEOUT_S = 5.0
_WELCOME_TIMEOUT_S = 60.0  # with our proof on its way; the launcher may be busy
_RETRY_S = 20.0  # a launcher that is beset by others drops connections
# Seconds of silence, between probes, and probes without an answer until the other host is gone: 25 s.
# By the names of Open MPI's parameters, which its daemons have, too.
KEEPALIVE = {"time": 5, "intvl": 5, "probes": 4}
KILL_AFTER_S = 5.0  # from SIGTERM to SIGKILL, when the launcher is gone
CANNOT_START = 127
THREADS = "OMP_NUM_THREADS"
_PR_SET_PDEATHSIG = 1
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)  # by the launcher to the programs
# mpirun signals the whole process group of a rank, Slurm all of a step: the program has had these as well.
_SURVIVED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")


class Message(NamedTuple):
    """One message of either end."""

    kind: int
    payload: bytes
    time_s: float
    rank: int = -1


class Channel:
    """Messages over a connection, or two pipes. Thread safety: one thread receives and closes; any sends.

    Attributes:
        host: The host of the other end, as far as it is known: a name, an address, or empty.
    """

    def __init__(
        self, source: IO[bytes], sink: IO[bytes], connection: socket.socket | None = None, host: str = ""
    ) -> None:  # fmt: skip
        self._source, self._sink, self._connection = source, sink, connection
        self.host = host or self.peer_host
        self._lock = threading.Lock()

    @classmethod
    def over(cls, connection: socket.socket, host: str = "") -> Channel:
        """A channel that owns ``connection``. OSError: that has ended."""
        connection.settimeout(None)
        # The kernel notices that the other host is gone without a word: by probes of an idle
        # connection, and by the age of what has been sent and not been confirmed.
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            silence_ms = 1000 * (KEEPALIVE["time"] + KEEPALIVE["probes"] * KEEPALIVE["intvl"])
            options = {
                "NODELAY": 1, "USER_TIMEOUT": silence_ms, "KEEPIDLE": KEEPALIVE["time"],
                "KEEPINTVL": KEEPALIVE["intvl"], "KEEPCNT": KEEPALIVE["probes"],
            }  # fmt: skip
            for name, value in options.items():
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"), value)
        return cls(connection.makefile("rb"), connection.makefile("wb"), connection, host)

    @property
    def peer_host(self) -> str:
        """The address of the other end's host; empty without a network."""
        if self._connection is None or self._connection.family == socket.AF_UNIX:
            return ""
        try:
            return plain_host(self._connection.getpeername()[0])
        except OSError:  # it has ended
            return ""

    def send(self, kind: int, payload: bytes = b"", rank: int = -1) -> None:
        """Sends a message; that the other end has gone is noticed by :meth:`receive`."""
        with contextlib.suppress(OSError, ValueError), self._lock:
            self._sink.write(HEADER.pack(kind, rank, time.time(), len(payload)) + payload)
            self._sink.flush()

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """Waits for a message. None: the connection has ended, or what came is none."""
        try:
            if self._connection is not None:
                self._connection.settimeout(timeout_s)
            kind, rank, time_s, length = HEADER.unpack(self._source.read(HEADER.size))
            payload = self._source.read(length) if length <= MAX_PAYLOAD_BYTES else b""
        except (OSError, ValueError, struct.error):
            return None
        return Message(kind, payload, time_s, rank) if len(payload) == length else None

    def close(self) -> None:
        """Ends the connection, also for the thread that receives."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            for one in (self._source, self._sink, self._connection):
                with contextlib.suppress(OSError):
                    one.close()


def plain_host(address: str) -> str:
    """An address of a socket, without what maps IPv4 into IPv6."""
    return address.removeprefix("::ffff:") if "." in address else address


def join_address(host: str, port: int) -> str:
    """ "a:5678", "1.2.3.4:5678", "[fd00::1]:5678"."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def allowed_ports() -> Sequence[int]:
    """Those of FARANDOLE_PORTS; 0 alone where the system chooses. ValueError: it is no range, also for the library."""
    text = os.environ.get("FARANDOLE_PORTS", "")
    found = re.fullmatch("([0-9]+)-([0-9]+)", text)
    first, last = map(int, found.groups()) if found else (0, 0)
    if text and not 1 <= first <= last <= 65535:
        raise ValueError(f'FARANDOLE_PORTS="{text}" is not FIRST-LAST, ports from 1 to 65535, as 50000-50100')
    return range(first, last + 1)


_turn = itertools.count(os.getpid())  # differs between processes, so that few ask for a port that another has


def open_listener(host: str = "") -> socket.socket:
    """Listens at a port of :func:`allowed_ports`; without a host for IPv4 and, where there is that, IPv6.
    OSError: it cannot; a range that is used up is named."""
    named, others = _share_out(allowed_ports())
    return _take_first(host, itertools.chain(others, named), lambda port: _listen_at(host, port))


def _share_out(ports: Sequence[int]) -> tuple[Iterator[int], Iterator[int]]:
    """Ports for those that are named before somebody listens there, and the others, as core/net/address.h has it; each
    from where this process stopped."""
    named = len(ports) // 4
    return _in_turn(ports[:named]), _in_turn(ports[named:])


def _in_turn(ports: Sequence[int]) -> Iterator[int]:
    return (ports[next(_turn) % len(ports)] for _ in ports)


def _take_first(host: str, ports: Iterable[int], take: Callable[[int], socket.socket]) -> socket.socket:
    for port in ports:
        try:
            return take(port)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES) or port == 0:  # EACCES: one below 1024
                raise
            failed = error
    if failed.errno == errno.EACCES:
        raise failed
    used = f"all ports of FARANDOLE_PORTS={os.environ['FARANDOLE_PORTS']} are in use"
    raise OSError(f"cannot listen at {host or 'any address'}: {used}")


def _listen_at(host: str, port: int) -> socket.socket:
    if not host and socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
    return socket.create_server((host, port), backlog=4096)


def reserve_port() -> socket.socket:
    """Keeps a port of :func:`allowed_ports` for a listener in another process: the kernel gives it to nobody who asks
    for any, and whoever names it can listen there if he reuses addresses, as torch's store does. OSError: as of
    :func:`open_listener`."""

    def bind(port: int, shares: bool) -> socket.socket:
        reserved = socket.socket()
        try:
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, shares)
            reserved.bind(("", port))
        except OSError:
            reserved.close()
            raise
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, True)
        return reserved

    def take(shares: bool) -> socket.socket:
        return _take_first("", itertools.chain(*_share_out(allowed_ports())), lambda port: bind(port, shares))

    try:
        return take(shares=False)
    except OSError:  # each is reserved by another, or connections there have just ended: then one without a listener
        return take(shares=True)


def variables_of_torchrun(
    rank: int, size: int, local_rank: int, local_size: int, node: int, master_host: str, master_port: int
) -> dict[str, str]:
    """What torchrun sets for a rank, as far as frameworks look for it: for "env://", Lightning, Accelerate, Composer.

    The user's own MASTER_ADDR and MASTER_PORT count if both are set. A run id has Lightning ask torchrun's variables
    before Slurm's.
    """
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not address or not port:
        address, port = master_host, str(master_port)
    numbers = {
        "RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size,
        "GROUP_RANK": node, "NODE_RANK": node,
    }  # fmt: skip
    return {name: str(number) for name, number in numbers.items()} | {
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": f"farandole-{master_host}-{master_port}",
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 has the store
    }


def machine() -> str:
    """Names the running system, the same in all its containers; empty where it has no name."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def _is_own(address: str) -> bool:
    host = split_address(address)[0]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return True
    return False


def leave_out_own(addresses: Sequence[str], launchers_machine: str) -> Sequence[str]:
    """The launcher's addresses but those that this host has, too, as containers' bridges are the same everywhere."""
    if launchers_machine == machine():
        return addresses
    return [address for address in addresses if not _is_own(address)] or addresses


def proof(token: str, name: str, hello: bytes, nonce: bytes) -> bytes:
    import hmac  # only here: 3 ms that ranks of one host save

    return hmac.digest(token.encode(), name.encode() + hello + nonce, "sha256")


def is_proof(said: bytes, token: str, name: str, hello: bytes, nonce: bytes) -> bool:
    import hmac

    return hmac.compare_digest(said, proof(token, name, hello, nonce))


def _prove(connection: socket.socket, token: str) -> None:
    """The supervisor's end of the proof. OSError: the other end is not the launcher, or has dropped the connection."""
    hello = MAGIC + os.urandom(PROOF_BYTES - len(MAGIC))
    connection.sendall(hello)
    challenge = _read(connection, 2 * PROOF_BYTES, CONNECT_TIMEOUT_S)
    nonce = challenge[:PROOF_BYTES]
    if not is_proof(challenge[PROOF_BYTES:], token, "challenge", hello, nonce):
        raise PermissionError("what listens there does not know the token of this job")
    connection.sendall(proof(token, "proof", hello, nonce))
    if not is_proof(_read(connection, PROOF_BYTES, _WELCOME_TIMEOUT_S), token, "welcome", hello, nonce):
        raise PermissionError("what listens there does not know the token of this job")


def _read(connection: socket.socket, count: int, timeout_s: float) -> bytes:
    """So many bytes, all of them in time."""
    data, end_s = b"", time.monotonic() + timeout_s
    while len(data) < count:
        connection.settimeout(max(end_s - time.monotonic(), 0.001))
        more = connection.recv(count - len(data))
        if not more:
            raise ConnectionResetError("the connection was closed before it was welcomed")
        data += more
    return data


def connect(addresses: Sequence[str], token: str) -> Channel:
    """A channel to the first of the launcher's addresses where both ends prove the token.

    Tries them again for _RETRY_S where that may help. Raises OSError if none answers, with the reason of each.
    """
    give_up_s = time.monotonic() + _RETRY_S
    while True:
        reasons, is_final = [], True
        for address in addresses:
            try:
                return _connect_to(address, token)
            except OSError as error:
                reasons.append(f"{address}: {error}")
                is_dropped = isinstance(error, ConnectionError) and not isinstance(error, ConnectionRefusedError)
                is_final = is_final and not is_dropped and not isinstance(error, TimeoutError)
        if is_final or time.monotonic() > give_up_s:
            raise OSError("; ".join(reasons))
        time.sleep(0.1)


def _connect_to(address: str, token: str) -> Channel:
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.create_connection(split_address(address), CONNECT_TIMEOUT_S))
        _prove(connection, token)
        stack.pop_all()
    return Channel.over(connection)


def limit_threads(ranks: int, whose: str = "") -> str:
    """Divides the host's cores among its ranks unless the user has set OMP_NUM_THREADS. Says how, and ``whose``."""
    if ranks == 1 or os.environ.get(THREADS):
        return ""
    cores = os.sched_getaffinity(0)
    is_bound = cores != os.sched_getaffinity(os.getppid())  # by mpirun: to cores of its own
    threads = len(cores) if is_bound else max(1, len(cores) // ranks)
    os.environ[THREADS] = str(threads)
    return f"{THREADS}={threads} on each of {ranks} ranks{whose}; set it to choose another number"


def restore_tmpdir(mpiruns: str | None, own: str | None) -> None:
    """Gives the program the TMPDIR that the launcher had, where it is on the launcher's host."""
    if mpiruns is not None and os.environ.get("TMPDIR") == mpiruns:
        del os.environ["TMPDIR"]
        os.environ.update({} if own is None else {"TMPDIR": own})


class Guard:
    """A process that kills the programs' process groups if the supervisor is killed, which can do so no more.

    The kernel kills each program then, but not what it has started, as a shell does. The guard sees that the pipe ends
    of which the supervisor has the only other end. It must be made before there are threads, as it is a fork.
    """

    def __init__(self) -> None:
        theirs, self._pipe = os.pipe()
        if os.fork() == 0:
            _guard(theirs)
        os.close(theirs)

    def watch(self, group: int) -> None:
        self._send(group)

    def forget(self, group: int) -> None:
        """To be called while the group's number cannot be another's yet."""
        self._send(-group)

    def _send(self, number: int) -> None:
        with contextlib.suppress(BrokenPipeError):  # somebody has killed it
            os.write(self._pipe, _GROUP.pack(number))


def _guard(pipe: int) -> NoReturn:
    os.setsid()  # what ends the supervisor's group is not to end this
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor != pipe:  # the channel among them: it ends with the supervisor
            with contextlib.suppress(OSError):
                os.close(descriptor)
    groups: set[int] = set()
    while data := os.read(pipe, _GROUP.size):
        (number,) = _GROUP.unpack(data)
        (groups.add if number > 0 else groups.discard)(abs(number))
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    os._exit(0)


class Program:
    """One rank's program, started by the main thread, which the kernel kills it with.

    Args:
        variables: Of this rank, beside those of the supervisor.
        descriptors: That the program inherits.
        leads_group: Whether it gets a session of its own; under mpirun the supervisor leads the group.
        has_input: Whether it is given input; else its stdin is empty.
    Raises:
        OSError: It cannot be started.
    """

    def __init__(
        self, rank: int, command: Sequence[str], variables: Mapping[str, str], has_input: bool,
        descriptors: Sequence[int] = (), leads_group: bool = False,
    ) -> None:  # fmt: skip
        self.rank = rank
        self.inputs: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.is_stopping = self.has_ended = False
        self._leads_group = leads_group
        self._ending = threading.Lock()
        self.kinds: dict[int, int] = {}  # descriptors to read -> kinds of message
        self._named: list[int] = []  # pipes opened by name, so that programs on the way need not keep a descriptor
        environment = {**os.environ, **variables}
        for variable, kind in {RESULT_VARIABLE: RESULT, REPORT_VARIABLE: REPORT}.items():
            pipe, theirs = os.pipe()
            self.kinds[pipe], environment[variable] = kind, f"/proc/{os.getpid()}/fd/{theirs}"
            self._named += pipe, theirs
        prctl, supervisor = ctypes.CDLL(None).prctl, os.getpid()

        def end_with_supervisor() -> None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != supervisor:  # it was killed before
                signal.raise_signal(signal.SIGKILL)

        try:
            self.child = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE if has_input else subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=descriptors, start_new_session=leads_group,
                preexec_fn=end_with_supervisor,
            )  # fmt: skip
        except OSError:
            self._close_named()
            raise
        assert self.child.stdout is not None and self.child.stderr is not None
        self.kinds |= {self.child.stdout.fileno(): OUT, self.child.stderr.fileno(): ERR}

    @property
    def group(self) -> int | None:
        """The process group of the program and of what it starts; None if others are in it."""
        if self._leads_group:
            return self.child.pid
        return os.getpgrp() if _leads_own_group() else None

    @property
    def is_alive(self) -> bool:
        return os.waitid(os.P_PID, self.child.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None

    def read(self, pipe: int) -> bytes:
        """What there is to read of a pipe; none at its end, when it is not read any more."""
        data = os.read(pipe, CHUNK_BYTES)
        if not data:
            del self.kinds[pipe]
        return data

    def stop(self, number: int) -> None:
        """Ends the program, with SIGTERM once: a second one would end a Python that is on its way out."""
        is_again, self.is_stopping = self.is_stopping, True
        if not is_again or number != signal.SIGTERM:
            self.send_signal(number)

    def send_signal(self, number: int) -> None:
        with self._ending:  # until then nobody takes the child's end, as Popen.send_signal would
            if not self.has_ended:
                os.kill(self.child.pid, number)

    def finish(self) -> int:
        """Takes the end, with all that the program started if it is a bad one. Returns its code."""
        with self._ending:
            self.has_ended = True
        how = os.waitid(os.P_PID, self.child.pid, os.WEXITED | os.WNOWAIT)  # its group is not anybody else's yet
        if self._leads_group and (self.is_stopping or (how is not None and how.si_status != 0)):
            with contextlib.suppress(OSError):
                os.killpg(self.child.pid, signal.SIGKILL)
        for stream in (self.child.stdout, self.child.stderr):
            if stream is not None:
                stream.close()
        self._close_named()
        return self.child.wait()

    def _close_named(self) -> None:
        for descriptor in self._named:
            os.close(descriptor)


class Supervisor:
    """Programs and one channel. The main thread carries output; one takes messages, one is for each input.

    Args:
        outlives: Of an elastic job: it goes on without a launcher as long as there are programs.
    """

    def __init__(self, channel: Channel, outlives: bool = False) -> None:
        self._channel, self._outlives = channel, outlives
        self._programs: dict[int, Program] = {}
        self._running: list[Program] = []
        self._starts: queue.SimpleQueue[bytes] = queue.SimpleQueue()  # of ranks to start later
        self._is_alone = not outlives  # it ends with its programs
        self._is_leaving = self._has_left = False  # the host
        self._notes: dict[int, int] = {}  # descriptors of files, by rank
        self.reserved: socket.socket | None = None  # the port of rank 0's store of torch.distributed
        self.keys: dict[int, int] = {}  # by rank: pipes with the job's key until a rank that joins reads it
        self._may_leave = threading.Event()
        self.has_mpiruns_signal = False
        self._guard = Guard()
        # Has something to read after a signal, as when a program ends; a pidfd of each would need Linux 5.3.
        self._signals, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def start(self, rank: int, command: Sequence[str], variables: Mapping[str, str], **how: Any) -> int:
        """Starts a rank's program. Returns CANNOT_START if that cannot be, else 0."""
        try:
            program = self._programs[rank] = Program(rank, command, variables, **how)
        except OSError as error:
            where = f'"{command[0]}" on {socket.gethostname()}'
            text = f"farandolerun: cannot start {where}: {error.strerror}\n"
            self._channel.send(ERR, text.encode(), rank)
            self.report_end(rank, CANNOT_START)
            return CANNOT_START
        self._running.append(program)
        if program.group is not None:
            self._guard.watch(program.group)
        return 0

    def note(self, rank: int, path: str) -> None:
        """Notes in a file from now on what a rank reports and the code of its end, as lines of JSON.

        The file is locked as long as the rank runs and this supervisor lives, whatever has become of the launcher.
        """
        with contextlib.suppress(OSError):  # a host need not have the folder
            self._notes[rank] = note = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
            fcntl.flock(note, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(note, 0)

    def _write_note(self, note: int, data: bytes) -> None:
        with contextlib.suppress(OSError):  # the disk is full
            os.write(note, data)

    def run(self, start_ranks: Callable[[Supervisor, bytes], None] | None = None) -> int:
        """Until all programs have ended, and the launcher of an elastic job has gone or sent GO.

        Args:
            start_ranks: Takes the payload of START, on this thread, with which programs die.

        Returns:
            The code of the last program, negative for a signal.
        """
        code = 0
        for program in self._running:
            self._give_input(program)
        start_thread(self._obey)
        while self._running or not self._is_alone:
            ready = _find_readable([self._signals, *(pipe for one in self._running for pipe in one.kinds)])
            if self._signals in ready:
                os.read(self._signals, CHUNK_BYTES)
            while start_ranks is not None and not self._starts.empty():
                before = len(self._running)
                start_ranks(self, self._starts.get())
                for program in self._running[before:]:
                    self._give_input(program)
            if self._is_leaving and not self._has_left:
                self._has_left = True
                self._channel.send(LEAVE)
                if "SLURM_STEP_ID" not in os.environ:  # Slurm has signalled all of the step
                    self._stop(signal.SIGTERM)
            for program in [*self._running]:
                self._forward(program, ready)
                if self._signals in ready and not program.is_alive:
                    self._drain(program)
                    self._running.remove(program)
                    code = self._finish(program)
        return code

    def note_leaving(self, *_: object) -> None:
        """Takes SIGTERM: the host will go, and its ranks leave with notice."""
        self._is_leaving = True

    def _give_input(self, program: Program) -> None:
        if program.child.stdin is not None:
            start_thread(self._write_input, program, program.child.stdin)

    def _finish(self, program: Program) -> int:
        if program.group is not None:
            self._guard.forget(program.group)
        code = program.finish()
        self.report_end(program.rank, code)
        return code

    def _forward(self, program: Program, ready: set[int]) -> bool:
        """Sends what the program has written into its pipes. Returns whether that is anything."""
        pipes = [pipe for pipe in program.kinds if pipe in ready]
        for pipe in pipes:
            kind = program.kinds[pipe]
            if data := program.read(pipe):
                self._channel.send(kind, data, program.rank)
                if kind == REPORT and program.rank in self._notes:
                    self._write_note(self._notes[program.rank], data)
        return bool(pipes)

    def _drain(self, program: Program) -> None:
        """Sends what a program left in its pipes; what its own children write later goes nowhere."""
        while self._forward(program, _find_readable(program.kinds, 0)):
            pass

    def _write_input(self, program: Program, stdin: IO[bytes]) -> None:
        with contextlib.suppress(OSError), stdin:  # the program may close its stdin
            self._channel.send(WANT, rank=program.rank)
            while data := program.inputs.get():
                stdin.write(data)
                stdin.flush()
                self._channel.send(WANT, rank=program.rank)

    def _obey(self) -> None:
        """Does what the launcher says; without it the programs are to end."""
        while message := self._channel.receive():
            if message.kind == INPUT:
                self._programs[message.rank].inputs.put(message.payload)
            elif message.kind == SIGNAL:
                number = message.payload[0]
                self._pass_on(number) if number in PASSED_ON else self._stop(number, message.rank)
            elif message.kind == START:
                self._starts.put(message.payload)
                self._wake_main_thread()
            elif message.kind == GO:
                self._may_leave.set()
                return self._go_on_alone()
        if self._outlives:
            return self._go_on_alone()
        self._stop(signal.SIGTERM)
        time.sleep(KILL_AFTER_S)
        self._stop(signal.SIGKILL)

    def _go_on_alone(self) -> None:
        self._is_alone = True
        for program in self._programs.values():
            program.inputs.put(b"")
        self._wake_main_thread()

    def _wake_main_thread(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it is full, so that the thread wakes
            os.write(self._wake, b"\0")

    def _stop(self, number: int, rank: int = -1) -> None:
        """Signals one rank's program, or with -1 all."""
        self._may_leave.set()
        for program in self._programs.values():
            if rank in (-1, program.rank):
                program.stop(number)

    def _pass_on(self, number: int) -> None:
        for program in self._programs.values():
            program.send_signal(number)

    def report_end(self, rank: int, code: int) -> None:
        key = self.keys.pop(rank, None)
        has_joined = key is None or not os.read(key, 1)  # by nobody yet
        if key is not None:
            os.close(key)
        end = {"code": code, "by_mpirun": self.has_mpiruns_signal, "has_joined": has_joined}
        self._channel.send(EXIT, json.dumps(end).encode(), rank)
        if (note := self._notes.pop(rank, None)) is not None:
            self._write_note(note, json.dumps({"code": code}).encode() + b"\n")
            os.close(note)

    def leave(self, code: int) -> NoReturn:
        """Waits until the launcher has read the end of mpirun's rank, and ends the same way.

        Leaving earlier could lose what it has not read yet: the kernel gives a connection without
        owner up after some seconds. After a bad end it also decides when mpirun may know.
        """
        self._may_leave.wait()
        if _leads_own_group() and any(program.is_stopping for program in self._programs.values()):
            os.kill(0, signal.SIGKILL)  # with all that the program started
        if code < 0:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the program left its own, if any
            if -code != signal.SIGKILL:
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code if code >= 0 else 128 - code)


def note_file(folder: str, rank: int) -> str:
    return os.path.join(folder, f"rank.{rank}")


def _find_readable(descriptors: Iterable[int], timeout_ms: int | None = None) -> set[int]:
    poll = select.poll()  # unlike select() for any number of them
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(timeout_ms)}


def start_thread(function: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread


def _leads_own_group() -> bool:
    """Whether this process's group is its own, as mpirun gives one to each rank."""
    return os.getpgrp() == os.getpid()


def _survive(handler: Callable[..., None]) -> None:
    for name in _SURVIVED:  # not SIG_IGN, which the program would inherit
        signal.signal(signal.Signals[name], handler)


def take_variables(environment: Mapping[str, str]) -> None:
    """Those that the launcher gives its ranks; the folder of their flight recorders may be below this host's "~"."""
    os.environ.update(environment)
    folder = os.environ.get("FARANDOLE_FLIGHT_RECORDER_DIR", "")
    if folder.startswith("~/./"):
        os.environ["FARANDOLE_FLIGHT_RECORDER_DIR"] = os.path.expanduser(folder)


def run_one(job: dict[str, Any], command: Sequence[str]) -> NoReturn:
    """A supervisor of mpirun's: runs the program of one rank."""
    check_version(job)
    restore_tmpdir(*job["tmpdirs"])
    take_variables(job["environment"])
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMIX_RANK"])
    local_size = int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or 1)
    threads = limit_threads(local_size)
    variables = {}
    if job["master_port"]:
        place = (rank, job["size"], int(os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK") or rank), local_size, 0)
        variables = variables_of_torchrun(*place, "127.0.0.1", job["master_port"])
    channel = join_launcher(job)
    say_hello(channel, rank=rank, threads=threads)
    supervisor = Supervisor(channel)

    def note_signal(*_: object) -> None:
        supervisor.has_mpiruns_signal = True

    _survive(note_signal)
    code = supervisor.start(rank, command, variables, has_input=job["runs_function"] or rank == 0)
    supervisor.leave(supervisor.run() or code)


def run_host() -> None:
    """A supervisor of a host: runs its ranks.

    CONNECT, on stdin, has "version", "id" of the host, "key", the job's in hexadecimal digits, and "addresses": empty
    if stdin and stdout are the channel, else with "token" and "machine" as :func:`join_launcher` has them. START has
    "ranks", "size", "command", "folder", "environment" (None: this one's), "runs_function", "address" of rank 0,
    "listen": where this host, which has rank 0, listens for it, and else "master_port", that for torch's store there.
    Of an elastic job, whose CONNECT has "is_elastic", it has "slots", the most ranks of this host, "members", the
    addresses that newcomers ask (empty: these are none), "job_folder", and "job_key", which counts instead of "key":
    ranks that are started anew have another one.
    """
    _survive(lambda *_: None)
    channel = Channel(sys.stdin.buffer, sys.stdout.buffer)
    message = channel.receive()
    job = json.loads(message.payload) if message else sys.exit("farandolerun: the launcher has gone")
    check_version(job)
    if job["addresses"]:
        channel = join_launcher(job)
    say_hello(channel, id=job["id"])
    key = bytes.fromhex(job["key"])
    if job.get("is_elastic"):
        host = Supervisor(channel, outlives=True)
        signal.signal(signal.SIGTERM, host.note_leaving)
        host.run(lambda host, payload: _start_ranks(host, channel, key, **json.loads(payload)))
    elif (start := channel.receive()) is not None and start.kind == START:
        host = Supervisor(channel)
        _start_ranks(host, channel, key, node=job["id"], **json.loads(start.payload))
        host.run()
    os._exit(0)  # the thread that reads stdin holds its lock


def _start_ranks(
    supervisor: Supervisor, channel: Channel, key: bytes, ranks: Sequence[int], size: int, command: Sequence[str],
    folder: str, environment: Mapping[str, str] | None, runs_function: bool, address: str, listen: str | None,
    master_port: int = 0, node: int = 0, slots: int = 0, members: str = "", job_folder: str = "", job_key: str = "",
) -> None:  # fmt: skip
    with contextlib.suppress(OSError):  # a host need not have it
        os.chdir(folder)
    take_variables(environment or {})
    whose = "" if len(ranks) == size else f" of {socket.gethostname()}"
    if slots > len(ranks):
        whose = f" that {socket.gethostname()} has room for"
    threads = limit_threads(slots or len(ranks), whose)
    listener = None
    if listen is not None:
        try:
            listener = open_listener(listen)
            if not slots:  # the ranks of an elastic job change their numbers
                supervisor.reserved = reserve_port()
                master_port = supervisor.reserved.getsockname()[1]
        except (OSError, ValueError) as error:
            sys.exit(f"farandolerun: rank 0: {error}")
        address = join_address(address, listener.getsockname()[1])
    if not members:
        ready = {"address": address, "threads": threads, "master_port": master_port}
        channel.send(READY, json.dumps(ready).encode())
    for local_rank, rank in enumerate(ranks):
        variables = {
            "FARANDOLE_RANK": rank, "FARANDOLE_SIZE": size, "FARANDOLE_LOCAL_RANK": local_rank,
            "FARANDOLE_LOCAL_SIZE": len(ranks), "FARANDOLE_ADDRESS": address,
        } if not members else {"FARANDOLE_MEMBERS": members}  # fmt: skip
        key_reader, key_writer = os.pipe()
        os.write(key_writer, bytes.fromhex(job_key) or key)
        os.close(key_writer)
        descriptors = {"FARANDOLE_KEY_FD": key_reader}
        if listener is not None and rank == 0:
            descriptors["FARANDOLE_LISTEN_FD"] = listener.fileno()
        texts = {name: str(value) for name, value in (variables | descriptors).items()}
        if master_port:
            place = (rank, size, local_rank, len(ranks), node)
            texts |= variables_of_torchrun(*place, split_address(address)[0], master_port)
        supervisor.keys[rank] = key_reader
        if job_folder:
            supervisor.note(rank, note_file(job_folder, rank))
        supervisor.start(
            rank, command, texts, has_input=runs_function or (rank == 0 and not members),
            descriptors=[*descriptors.values()], leads_group=True,
        )  # fmt: skip
    if listener is not None:
        listener.close()


def check_version(job: Mapping[str, Any]) -> None:
    if job.get("version") != PROTOCOL:
        sys.exit(f"farandolerun: {socket.gethostname()} has another version of Farandole than the launcher")


def join_launcher(job: Mapping[str, Any]) -> Channel:
    """Connects to the launcher: "addresses" and "machine" are its own, "token" is the job's."""
    try:
        return connect(leave_out_own(job["addresses"], job["machine"]), job["token"])
    except OSError as error:
        sys.exit(f"farandolerun: {socket.gethostname()} cannot reach the launcher at {error}")


def say_hello(channel: Channel, **said: Any) -> None:
    hello = {"version": PROTOCOL, "host": socket.gethostname(), **said}
    channel.send(HELLO, json.dumps(hello).encode())


def main(command: Sequence[str]) -> None:
    job = json.loads(os.environ.pop(VARIABLE, "{}"))
    if not command:
        run_host()
    elif job:
        run_one(job, command)
    else:
        limit_threads(int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or 1))
        os.execvp(command[0], [*command])


if __name__ == "__main__":
    main(sys.argv[1:])
