"""``farandolerun``, also installed as ``horovodrun``: the flags, the configuration file, and the program.

Every flag of horovodrun is here. One that means nothing here is accepted, and a message says why.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import farandole
from farandole.runner import mpirun
from farandole.runner.job import Job
from farandole.runner.mpirun import Host, Options, UsageError
from farandole.runner.output import Writer, binary

USAGE_ERROR = 2
_HOST = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_FILE_LINE = re.compile(r"(?P<name>\S+)(?:\s+slots\s*=\s*(?P<slots>\S+))?")
_LOG_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")
_SCRIPT_TIMEOUT_S = 60


def _number(
    kind: type[int] | type[float], least: float, unit: str = "", most: float = float("inf")
) -> Callable[[str], float]:
    """An argparse type: a number in a range; ``unit`` completes "is not a number of ..."."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = kind(-1)
        if not least <= value <= most or value == float("inf"):
            what = "a whole number" if kind is int else "a number"
            end = f" to {most:g}" if most < float("inf") else ""
            raise argparse.ArgumentTypeError(f'"{text}" is not {what}{unit} from {least:g}{end}')
        return value

    return parse


_COUNT = _number(int, 0)
_SECONDS = _number(float, 0, " of seconds")
_FIXED = "the number of ranks is fixed for a job"
_AUTOTUNE = "there is no autotuning"
_HIERARCHY = "MPI and NCCL choose how ranks of several hosts communicate"
# Flags of horovodrun that mean nothing here: the types of their values, and why.
IGNORED: dict[str, tuple[Sequence[Callable[[str], object]], str]] = {
    "--gloo": ((), "ranks are started by mpirun"),
    "--jsrun": ((), "ranks are started by mpirun"),
    "--cycle-time-ms": ((_number(float, 0, " of milliseconds"),),
                        "there is no cycle; a tensor is sent when all ranks are ready"),
    "--cache-capacity": ((_COUNT,), "FARANDOLE_ID_TABLE_SIZE is the table of known tensors"),
    "--num-nccl-streams": ((_COUNT,), "there is one stream for each GPU"),
    "--thread-affinity": ((str,), "the engine's thread is not bound to a core"),
    "--gloo-timeout-seconds": ((_SECONDS,), "there is no Gloo; see --start-timeout"),
    "--mpi-threads-disable": ((), "MPI has to allow several threads"),
    "--log-with-timestamp": ((), "messages have no time of their own; use --prefix-output-with-timestamp"),
    "--no-log-hide-timestamp": ((), "messages have no time of their own; use --prefix-output-with-timestamp"),
    "--min-np": ((_COUNT,), _FIXED),
    "--min-num-proc": ((_COUNT,), _FIXED),
    "--max-np": ((_COUNT,), _FIXED),
    "--max-num-proc": ((_COUNT,), _FIXED),
    "--elastic-timeout": ((_SECONDS,), _FIXED),
    "--reset-limit": ((_COUNT,), _FIXED),
    "--blacklist-cooldown-range": ((_SECONDS, _SECONDS), _FIXED),
    "--autotune": ((), _AUTOTUNE),
    "--autotune-log-file": ((str,), _AUTOTUNE),
    "--autotune-warmup-samples": ((_COUNT,), _AUTOTUNE),
    "--autotune-steps-per-sample": ((_COUNT,), _AUTOTUNE),
    "--autotune-bayes-opt-max-samples": ((_COUNT,), _AUTOTUNE),
    "--autotune-gaussian-process-noise": ((_number(float, 0, "", 1),), _AUTOTUNE),
    "--hierarchical-allreduce": ((), _HIERARCHY),
    "--hierarchical-allgather": ((), _HIERARCHY),
    "--torus-allreduce": ((), _HIERARCHY),
}  # fmt: skip
# Flags that ask for what is done anyway; one may take back a flag before it, such as the configuration file's.
_DONE_ANYWAY = {
    "--mpi": "--gloo",
    "--disable-cache": None,
    "--log-without-timestamp": "--log-with-timestamp",
    "--log-hide-timestamp": "--no-log-hide-timestamp",
    "--no-mpi-threads-disable": "--mpi-threads-disable",
    "--no-autotune": "--autotune",
    "--no-hierarchical-allreduce": "--hierarchical-allreduce",
    "--no-hierarchical-allgather": "--hierarchical-allgather",
    "--no-torus-allreduce": "--torus-allreduce",
}
# Sections of the configuration file: what flags of their keys begin with, and the known keys.
_SECTIONS = {
    "params": ("", "fusion_threshold_mb cycle_time_ms cache_capacity hierarchical_allreduce "
               "hierarchical_allgather torus_allreduce"),
    "autotune": ("autotune_", "enabled log_file warmup_samples steps_per_sample "
                 "bayes_opt_max_samples gaussian_process_noise"),
    "timeline": ("timeline_", "filename mark_cycles"),
    "stall_check": ("stall_check_", "enabled warning_time_seconds shutdown_time_seconds"),
    "library_options": ("", "mpi_threads_disable num_nccl_streams thread_affinity gloo_timeout_seconds "
                        "ccl_bgt_affinity mlsl_bgt_affinity"),
    "logging": ("log_", "level with_timestamp hide_timestamp"),
}  # fmt: skip


class _Parser(argparse.ArgumentParser):
    """argparse, whose errors are one message."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message[:1].lower() + message[1:])


class _Ignore(argparse.Action):
    """Notes a flag that means nothing here, or that one is taken back; ``const`` says which."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        flag = str(option_string)
        if flag in IGNORED:
            namespace.notes[flag] = f"{flag} means nothing here: {IGNORED[flag][1]}"
        else:
            namespace.notes.pop(_DONE_ANYWAY[flag], None)


def _add_launching(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("ranks and hosts").add_argument
    add("-np", "--num-proc", dest="np", metavar="N", type=_number(int, 1, " of ranks"),
        help="ranks in all; default where hosts are given: all slots")  # fmt: skip
    add("-H", "--hosts", metavar="HOST:SLOTS,...", help="where ranks go, filled in this order")
    add("-hostfile", "--hostfile", metavar="FILE", help='the same as lines of "HOST slots=N"')
    add("--host-discovery-script", metavar="FILE", help='run once; the same as lines of "HOST:SLOTS"')
    add("--slots-per-host", metavar="N", type=_number(int, 1, " of slots"),
        help="of a host that the script names without a number; default 1")  # fmt: skip
    add("-p", "--ssh-port", metavar="PORT", type=_number(int, 1, "", 65535), help="of the other hosts")
    add("-i", "--ssh-identity-file", metavar="FILE", help="key for the other hosts")
    add("--network-interfaces", "--network-interface", metavar="NAME,...", action="append",
        help="network interfaces MPI may use, such as eth0")  # fmt: skip
    add("--tcp", action="store_true", help="use no other network than TCP")
    add("--start-timeout", metavar="SECONDS", type=_number(float, 1, " of seconds"),
        help="all ranks must have started, and called init, within this; default 60")  # fmt: skip
    add("--mpi-args", metavar="WORDS", help='for mpirun, as one string: --mpi-args="--map-by node"')
    add("--binding-args", metavar="WORDS", help='replaces "--bind-to none"')


def _add_settings(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("settings of the ranks").add_argument
    add("--config-file", metavar="FILE", help="flags as YAML, with Horovod's keys; flags given here win")
    add("--fusion-threshold-mb", metavar="MB", type=_number(float, 0, " of MB"),
        help="tensors are fused up to this size in MiB; 0: each by itself")  # fmt: skip
    add("--stall-check-warning-time-seconds", metavar="SECONDS", type=_SECONDS,
        help="report a tensor that waits so long for a rank")  # fmt: skip
    add("--stall-check-shutdown-time-seconds", metavar="SECONDS", type=_SECONDS,
        help="end the job by an error on all ranks when a tensor waits so long; default 0: never")  # fmt: skip
    add("--no-stall-check", action="store_true", help="never report, and never end the job")
    add("--stall-check", action="store_false", dest="no_stall_check", help="report; the default")
    add("--timeline-filename", metavar="FILE", help="write what happens when, for chrome://tracing")
    add("--timeline-mark-cycles", action="store_true", help="mark rank 0's decisions in it")
    add("--no-timeline-mark-cycles", action="store_false", dest="timeline_mark_cycles",
        help="the default")  # fmt: skip
    add("--log-level", choices=_LOG_LEVELS, type=str.upper, help="least severe message")


def _add_output(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("output").add_argument
    add("--output-filename", metavar="DIR", help="also write DIR/rank.N/stdout and stderr")
    add("-prefix-timestamp", "--prefix-output-with-timestamp", dest="with_timestamp",
        action="store_true", help="put the time before each line")  # fmt: skip
    add("--verbose", action="store_true", help="say which MPI is used and what is run")
    add("--dry-run", action="store_true", help="print the command line and end")
    add("-cb", "--check-build", action="store_true", help="say what this installation can do, and end")
    add("-v", "--version", action="store_true", help="print the version and end")


def make_parser() -> argparse.ArgumentParser:
    """The parser; its ``error`` raises UsageError."""
    parser = _Parser(
        prog="farandolerun",
        description="Runs a program on several ranks.",
        usage="farandolerun -np N [options] PROGRAM ...",
        epilog="horovodrun's other flags are accepted; docs/migrating.md lists them.",
        allow_abbrev=False,
    )
    _add_launching(parser)
    _add_settings(parser)
    _add_output(parser)
    for flag, (types, _) in IGNORED.items():
        kind = types[0] if types else None
        parser.add_argument(flag, action=_Ignore, nargs=len(types), type=kind, help=argparse.SUPPRESS)
    for flag in _DONE_ANYWAY:
        parser.add_argument(flag, action=_Ignore, nargs=0, help=argparse.SUPPRESS)
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="PROGRAM ...", help="what to run")
    return parser


# Hosts


def _host(name: str, slots: str | None, where: str, default: int = 1) -> Host:
    if not _HOST.fullmatch(name):
        raise UsageError(f'{where}: "{name}" is not the name of a host')
    if slots is None:
        return Host(name, default)
    if not slots.isascii() or not slots.isdigit() or int(slots) < 1:
        raise UsageError(f'{where}: the slots "{slots}" are not a whole number from 1')
    return Host(name, int(slots))


def _merged(hosts: Iterator[Host]) -> list[Host]:
    """A host that is named again, as in PBS's files with one line per slot, has more slots."""
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return [Host(*item) for item in slots.items()]


def parse_hosts(items: Sequence[str], where: str, default: int = 1) -> list[Host]:
    """Reads "a:2", "b:4"; without a number a host has ``default`` slots.

    Raises:
        UsageError: An item is wrong; ``where`` says whose.
    """
    words = [item.strip().partition(":") for item in items]
    return _merged(_host(name, slots if colon else None, where, default) for name, colon, slots in words)


def read_hostfile(path: str) -> list[Host]:
    """Reads lines of "name slots=N"; "#" starts a comment, and without a number a host has one slot.

    Raises:
        UsageError: The file cannot be read, or a line is wrong; names the line.
    """
    hosts = []
    for number, line in enumerate(_read(path, "--hostfile").splitlines(), 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        where = f'--hostfile "{path}", line {number}'
        found = _FILE_LINE.fullmatch(text)
        if not found:
            raise UsageError(f'{where}: "{text}" is not "host slots=N"')
        hosts.append(_host(found["name"], found["slots"], where))
    if not hosts:
        raise UsageError(f'--hostfile "{path}" names no host')
    return _merged(iter(hosts))


def discover_hosts(script: str, slots_per_host: int) -> list[Host]:
    """Runs a script that prints a line of "host" or "host:slots" for each host.

    Raises:
        UsageError: It fails, names no host, or a line is wrong.
    """
    where = f'--host-discovery-script "{script}"'
    try:
        done = subprocess.run(shlex.split(script), capture_output=True, text=True, timeout=_SCRIPT_TIMEOUT_S,
                              stdin=subprocess.DEVNULL, check=False)  # fmt: skip
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{where} cannot be run: {getattr(error, 'strerror', None) or error}") from error
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    if done.returncode != 0 or not lines:
        what = f"ended with exit code {done.returncode}" if done.returncode else "names no host"
        raise UsageError(f"{where} {what}")
    return parse_hosts(lines, where, slots_per_host)


def _read(path: str, flag: str) -> str:
    try:
        return pathlib.Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f'{flag} "{path}" cannot be read: {error.strerror}') from error
    except UnicodeDecodeError as error:
        raise UsageError(f'{flag} "{path}" cannot be read: it is not text') from error


def _find_hosts(found: argparse.Namespace) -> tuple[int, tuple[Host, ...]]:
    """Ranks and hosts that fit one another."""
    given = [name for name in ("hosts", "hostfile", "host_discovery_script") if getattr(found, name) is not None]
    if len(given) > 1:
        flags = " and ".join("-H" if name == "hosts" else "--" + name.replace("_", "-") for name in given)
        raise UsageError(f"{flags} both say where ranks go; give one of them")
    hosts: list[Host] = []
    if found.hosts is not None:
        hosts = parse_hosts(found.hosts.split(","), f'-H "{found.hosts}"')
    elif found.hostfile is not None:
        hosts = read_hostfile(found.hostfile)
    elif found.host_discovery_script is not None:
        hosts = discover_hosts(found.host_discovery_script, found.slots_per_host or 1)
    slots = sum(host.slots for host in hosts)
    if found.np is None and not hosts:
        raise UsageError("the number of ranks is missing: give -np N")
    if hosts and found.np is not None and found.np > slots:
        raise UsageError(f"-np {found.np} ranks do not fit into the {slots} slots of the hosts given")
    return (slots if found.np is None else found.np), tuple(hosts)


# The configuration file


def _config_words(path: str) -> list[str]:
    """The flags that a configuration file stands for.

    Raises:
        UsageError: It cannot be read, or has an unknown key.
    """
    import yaml  # only here: most jobs have no such file

    where = f'--config-file "{path}"'
    try:
        config = yaml.safe_load(_read(path, "--config-file"))
    except yaml.YAMLError as error:
        raise UsageError(f"{where} is not YAML: {' '.join(str(error).split())}") from error
    if config is None:
        return []
    if not isinstance(config, dict):
        raise UsageError(f"{where} is not a mapping of sections")
    words = []
    for section, values in config.items():
        if section == "controller":
            words += _controller_words(str(values).lower(), where)
            continue
        prefix, keys = _SECTIONS.get(section, ("", ""))
        if not keys:
            raise UsageError(f'{where}: "{section}" is not a section{_near(section, [*_SECTIONS, "controller"])}')
        if not isinstance(values, dict | None):
            raise UsageError(f'{where}: "{section}" is not a mapping')
        for key, value in (values or {}).items():
            if key not in keys.split():
                raise UsageError(f'{where}: "{key}" is not a key of "{section}"{_near(key, keys.split())}')
            name = prefix.rstrip("_") if key == "enabled" else prefix + key
            words += _flag_words(name.replace("ccl_bgt", "thread").replace("mlsl_bgt", "thread"), value)
    return words


def _flag_words(name: str, value: object) -> list[str]:
    flag = name.replace("_", "-")
    if value is None:
        return []
    if value is False:
        if name == "log_with_timestamp":
            return ["--log-without-timestamp"]
        return [f"--no-{flag}"]
    return [f"--{flag}"] if value is True else [f"--{flag}={value}"]


def _controller_words(name: str, where: str) -> list[str]:
    if name not in ("gloo", "mpi"):
        raise UsageError(f'{where}: the controller "{name}" is not mpi or gloo')
    return [f"--{name}"]


# The command line


def _words(text: str | None, flag: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text or ""))
    except ValueError as error:
        raise UsageError(f"{flag}={text!r} is not a list of words: {str(error).lower()}") from error


def _settings(found: argparse.Namespace) -> dict[str, str]:
    threshold_mb = found.fusion_threshold_mb
    settings = {
        "FARANDOLE_FUSION_THRESHOLD": None if threshold_mb is None else str(int(threshold_mb * 2**20)),
        "FARANDOLE_STALL_CHECK_DISABLE": "1" if found.no_stall_check else None,
        "FARANDOLE_STALL_WARNING_S": _seconds(found.stall_check_warning_time_seconds),
        "FARANDOLE_STALL_SHUTDOWN_S": _seconds(found.stall_check_shutdown_time_seconds),
        "FARANDOLE_TIMELINE": found.timeline_filename,
        "FARANDOLE_TIMELINE_MARK_CYCLES": "1" if found.timeline_mark_cycles else None,
        "FARANDOLE_LOG_LEVEL": found.log_level and found.log_level.lower().replace("fatal", "off"),
        "FARANDOLE_INIT_TIMEOUT_S": _seconds(found.start_timeout),
    }
    return {name: value for name, value in settings.items() if value is not None}


def _seconds(value: float | None) -> str | None:
    return None if value is None else f"{value:g}"


def _start_timeout(found: argparse.Namespace) -> float:
    for name in ("FARANDOLE_INIT_TIMEOUT_S", "HOROVOD_START_TIMEOUT"):
        if found.start_timeout is None and os.environ.get(name):
            try:
                return _number(float, 0.001, " of seconds")(os.environ[name])
            except argparse.ArgumentTypeError as error:
                raise UsageError(f"{name}: {error}") from error
    return found.start_timeout or Options.start_timeout_s


def check_command(command: Sequence[str]) -> None:
    """Says why a program cannot be started on this machine.

    Raises:
        UsageError: It is not there, or cannot be executed.
    """
    program = command[0]
    if shutil.which(program) is not None:
        return
    if not os.path.exists(program):
        raise UsageError(f'the program "{program}" was not found')
    if os.path.isdir(program):
        raise UsageError(f'the program "{program}" is a directory')
    python = "; put python before it" if program.endswith(".py") else ""
    path = program if "/" in program else f"./{program}"
    if os.access(program, os.X_OK):
        raise UsageError(f'the program "{program}" is not on the PATH; write {path}')
    raise UsageError(f'the program "{program}" cannot be executed{python}')


def _near(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, 1)
    return f"; did you mean {near[0]}?" if near else ""


def parse(argv: Sequence[str]) -> Options:
    """Reads a command line, and the configuration file that it names.

    Raises:
        UsageError: It is wrong; one message says where.
        SystemExit: With code 0, after ``--help``.
    """
    parser = make_parser()

    def read(words: Sequence[str]) -> argparse.Namespace:
        found, unknown = parser.parse_known_args(words, argparse.Namespace(notes={}))
        if unknown:
            known = [name for action in parser._actions for name in action.option_strings]
            hint = _near(unknown[0].partition("=")[0], known) or "; farandolerun --help lists them"
            raise UsageError(f"{unknown[0]} is not an option{hint}")
        return found

    found = read(argv)
    if found.config_file is not None:
        words = _config_words(found.config_file)
        try:
            read(words)
        except UsageError as error:
            raise UsageError(f'--config-file "{found.config_file}": {error}') from error
        found = read([*words, *argv])
    if found.version or found.check_build:
        return Options(version=found.version, check_build=found.check_build)
    command = found.command[1:] if found.command[:1] == ["--"] else found.command
    np, hosts = _find_hosts(found)
    if not command:
        raise UsageError("the program to run is missing: farandolerun -np N PROGRAM ...")
    options = Options(
        command=tuple(command), np=np, hosts=hosts, settings=_settings(found),
        mpi_args=_words(found.mpi_args, "--mpi-args"), tcp=found.tcp,
        binding=_words(found.binding_args, "--binding-args") or Options.binding,
        ssh_port=found.ssh_port, ssh_identity_file=found.ssh_identity_file,
        network_interfaces=",".join(found.network_interfaces) if found.network_interfaces else None,
        output_filename=found.output_filename, with_timestamp=found.with_timestamp,
        start_timeout_s=_start_timeout(found), notes=tuple(found.notes.values()),
        verbose=found.verbose, dry_run=found.dry_run,
    )  # fmt: skip
    if options.is_local:
        check_command(options.command)
    return options


# The program


def _check_output(folder: str | None) -> None:
    if folder is None:
        return
    try:
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f'--output-filename "{folder}" cannot be made: {error.strerror}') from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f'--output-filename "{folder}" cannot be written to')


def describe_build() -> str:
    """What this installation can do, in the form of ``horovodrun --check-build``."""
    from farandole import doctor

    library = mpirun.library_of_ranks(os.environ.get(mpirun.LIBRARY_VARIABLE, ""), os.environ)
    has_mpi = library.error != mpirun.NO_MPI
    has_cuda = bool(doctor.find_plugin(os.environ, has_gpu=False).version)
    has_nccl = bool(doctor.find_nccl(os.environ, has_gpu=False).version)

    def box(is_there: bool, what: str) -> str:
        return f"    [{'X' if is_there else ' '}] {what}"

    return "\n".join([
        f"Farandole v{farandole.__version__}:", "",
        "Available Frameworks:", box(importlib.util.find_spec("torch") is not None, "PyTorch"), box(True, "NumPy"), "",
        "Available Controllers:", box(has_mpi, "MPI"), "",
        "Available Tensor Operations:", box(has_mpi, "MPI"), box(has_cuda and has_nccl, "NCCL"),
        box(has_cuda, "CUDA (through host memory)"),
    ])  # fmt: skip


def _dry_run(command: Sequence[str], environment: Mapping[str, str]) -> str:
    changed = [f"{name}={value}" for name, value in environment.items() if os.environ.get(name) != value]
    return shlex.join(["env", *changed, *command])


def launch(options: Options, writer: Writer, function: bytes | None = None) -> tuple[int, Job]:
    """Runs a job. Returns its exit code and what is known of it.

    Args:
        function: Each rank reads it from its stdin; see :class:`Job`.

    Raises:
        UsageError: It cannot be started as it is said.
    """
    pair = _prepare(writer)
    environment = mpirun.make_environment(options, pair, os.environ)
    command = mpirun.make_command(options, pair, environment)
    _check_output(options.output_filename)
    for note in options.notes:
        writer.say(note)
    if options.verbose:
        program, library = pair.program, pair.library
        writer.say(f"mpirun {program.version} ({program.path}), libmpi {library.version} ({library.path})")
        writer.say(shlex.join(command))
    writer.flush()
    job = Job(command, environment, options, writer, function)
    return job.run(), job


def _prepare(writer: Writer) -> mpirun.Pair:
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        raise UsageError("this is a rank of a job already; farandolerun cannot be started under mpirun")
    pair = mpirun.find_pair(os.environ)
    if pair.differ:
        writer.say(pair.differ)
    return pair


def run(argv: Sequence[str]) -> int:
    """Does what the command line says. Returns the exit code.

    Raises:
        UsageError: It cannot be done as it is said.
    """
    options = parse(argv)
    if options.version or options.check_build:
        print(f"farandolerun {farandole.__version__}" if options.version else describe_build())
        return 0
    writer = Writer(binary(sys.stdout), binary(sys.stderr), options.output_filename, options.with_timestamp)
    try:
        if options.dry_run:
            pair = _prepare(writer)
            environment = mpirun.make_environment(options, pair, os.environ)
            print(_dry_run(mpirun.make_command(options, pair, environment), environment))
            return 0
        return launch(options, writer)[0]
    finally:
        writer.close()


def main(argv: Sequence[str] | None = None) -> int:
    """The console script. Returns the exit code; 2 for wrong use, after one message."""
    try:
        return run(sys.argv[1:] if argv is None else argv)
    except UsageError as error:
        print(f"farandolerun: {error}", file=sys.stderr)
        return USAGE_ERROR
