"""``farandolerun``, and with ``--horovod`` ``horovodrun``: the flags, the configuration file, and the program.

Every flag of horovodrun is here. One that means nothing here is accepted, and a message says why.
"""

from __future__ import annotations

import argparse
import difflib
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import farandole
from farandole.runner import mpirun
from farandole.runner.job import Job
from farandole.runner.mpirun import Host, Options, UsageError
from farandole.runner.output import Writer, binary

USAGE_ERROR = 2
_HOST = re.compile(r"(\w(?:[\w.-]*\w)?)(?:(?::|\s+slots\s*=\s*)([1-9][0-9]*))?", re.ASCII)
_LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")
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


def _seconds(least: float) -> Callable[[str], str]:
    return lambda text: f"{_number(float, least, ' of seconds')(text):g}"


def _bytes_of_mb(text: str) -> str:
    return str(int(_number(float, 0, " of MB")(text) * 2**20))


_COUNT = _number(int, 0)
_SECONDS = _seconds(0)
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
    "--mpi": "--gloo", "--disable-cache": "", "--log-without-timestamp": "--log-with-timestamp",
    "--log-hide-timestamp": "--no-log-hide-timestamp", "--no-mpi-threads-disable": "--mpi-threads-disable",
    "--no-autotune": "--autotune", "--no-hierarchical-allreduce": "--hierarchical-allreduce",
    "--no-hierarchical-allgather": "--hierarchical-allgather", "--no-torus-allreduce": "--torus-allreduce",
}  # fmt: skip
# Sections of the configuration file, and what the flags of their keys begin with.
_SECTIONS = {
    "params": "", "autotune": "autotune_", "timeline": "timeline_", "stall_check": "stall_check_",
    "library_options": "", "logging": "log_",
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
    count = _number(int, 1, " of ranks")
    add("-np", "--num-proc", dest="np", metavar="N", type=count, help="ranks; default with hosts: all slots")
    add("-H", "--hosts", metavar="HOST:SLOTS,...", help="where ranks go, filled in this order")
    add("-hostfile", "--hostfile", metavar="FILE", help='the same as lines of "HOST slots=N"')
    add("--host-discovery-script", metavar="FILE", help='run once; the same as lines of "HOST:SLOTS"')
    add("--slots-per-host", metavar="N", type=_number(int, 1, " of slots"), help="of a host without a number")
    add("-p", "--ssh-port", metavar="PORT", type=_number(int, 1, "", 65535), help="of the other hosts")
    add("-i", "--ssh-identity-file", metavar="FILE", help="key for the other hosts")
    add("--network-interfaces", "--network-interface", metavar="NAME,...", action="append", help="such as eth0")
    add("--tcp", action="store_true", help="use no other network than TCP")
    add("--mpi-args", metavar="WORDS", help='for mpirun, as one string: --mpi-args="--map-by node"')
    add("--binding-args", metavar="WORDS", help='replaces "--bind-to none"')


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """Flags that stand for environment variables of the ranks, named by ``dest``."""
    add = parser.add_argument_group("settings of the ranks").add_argument
    add("--config-file", metavar="FILE", help="flags as YAML, with Horovod's keys; flags given here win")
    add("--start-timeout", dest="FARANDOLE_INIT_TIMEOUT_S", metavar="SECONDS", type=_seconds(1),
        help="all ranks must have started, and called init, within this; default 60")  # fmt: skip
    add("--fusion-threshold-mb", dest="FARANDOLE_FUSION_THRESHOLD", metavar="MB", type=_bytes_of_mb,
        help="tensors are fused up to this size in MiB; 0: each by itself")  # fmt: skip
    add("--stall-check-warning-time-seconds", dest="FARANDOLE_STALL_WARNING_S", metavar="SECONDS",
        type=_SECONDS, help="report a tensor that waits so long for a rank")  # fmt: skip
    add("--stall-check-shutdown-time-seconds", dest="FARANDOLE_STALL_SHUTDOWN_S", metavar="SECONDS", type=_SECONDS,
        help="end the job by an error on all ranks when a tensor waits so long; default 0: never")  # fmt: skip
    for flag, value, text in [("--no-stall-check", "1", "never report, and never end the job"),
                              ("--stall-check", None, "report; the default")]:  # fmt: skip
        add(flag, dest="FARANDOLE_STALL_CHECK_DISABLE", action="store_const", const=value, help=text)
    add("--timeline-filename", dest="FARANDOLE_TIMELINE", metavar="FILE", help="write it for chrome://tracing")
    for flag, value, text in [("--timeline-mark-cycles", "1", "mark rank 0's decisions in it"),
                              ("--no-timeline-mark-cycles", None, "the default")]:  # fmt: skip
        add(flag, dest="FARANDOLE_TIMELINE_MARK_CYCLES", action="store_const", const=value, help=text)
    add("--log-level", dest="FARANDOLE_LOG_LEVEL", choices=_LOG_LEVELS, type=str.lower, help="least severe message")


def _add_output(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("output").add_argument
    add("--output-filename", metavar="DIR", help="also write DIR/rank.N/stdout and stderr")
    timestamp = ("-prefix-timestamp", "--prefix-output-with-timestamp")
    add(*timestamp, dest="with_timestamp", action="store_true", help="put the time before each line")
    add("--verbose", action="store_true", help="say which MPI is used and what is run")
    add("--dry-run", action="store_true", help="print the command line and end")
    add("-cb", "--check-build", action="store_true", help="say what this installation can do, and end")
    add("--horovod", action="store_true", help='what "import horovod" gives is Farandole; horovodrun does so')
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
        kind = types[0] if types else str
        parser.add_argument(flag, action=_Ignore, nargs=len(types), type=kind, help=argparse.SUPPRESS)
    for flag in _DONE_ANYWAY:
        parser.add_argument(flag, action=_Ignore, nargs=0, help=argparse.SUPPRESS)
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="PROGRAM ...", help="what to run")
    return parser


# Hosts


def parse_hosts(items: Iterable[str], where: str, default: int = 1) -> list[Host]:
    """Reads "a:2" or "a slots=2"; without a number a host has ``default`` slots.

    A host that is named again, as in PBS's files with one line per slot, has more slots. "#" starts a comment.

    Raises:
        UsageError: An item is wrong, or there is none; ``where`` says whose.
    """
    slots: dict[str, int] = {}
    for item in items:
        text = item.partition("#")[0].strip()
        found = _HOST.fullmatch(text)
        if found:
            slots[found[1]] = slots.get(found[1], 0) + int(found[2] or default)
        elif text:
            raise UsageError(f'{where}: "{text}" is not a host, "HOST:SLOTS" or "HOST slots=SLOTS"')
    if not slots:
        raise UsageError(f"{where} names no host")
    return [Host(*item) for item in slots.items()]


def _run_script(script: str, where: str) -> list[str]:
    """The lines that a host discovery script prints."""
    try:
        done = subprocess.run(shlex.split(script), capture_output=True, text=True, timeout=_SCRIPT_TIMEOUT_S,
                              stdin=subprocess.DEVNULL, check=False)  # fmt: skip
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{where} cannot be run: {getattr(error, 'strerror', None) or error}") from error
    if done.returncode != 0:
        raise UsageError(f"{where} ended with exit code {done.returncode}")
    return done.stdout.splitlines()


def _read(path: str, flag: str) -> str:
    try:
        return pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", "it is not text")
        raise UsageError(f'{flag} "{path}" cannot be read: {reason}') from error


def _find_hosts(found: argparse.Namespace) -> tuple[int, tuple[Host, ...]]:
    """Ranks and hosts that fit one another."""
    texts = {"-H": found.hosts, "--hostfile": found.hostfile, "--host-discovery-script": found.host_discovery_script}
    given = {flag: text for flag, text in texts.items() if text is not None}
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} both say where ranks go; give one of them")
    hosts: list[Host] = []
    for flag, text in given.items():
        where = f'{flag} "{text}"'
        if flag == "-H":
            items = text.split(",")
        else:
            items = _read(text, flag).splitlines() if flag == "--hostfile" else _run_script(text, where)
        hosts = parse_hosts(items, where, found.slots_per_host or 1)
    slots = sum(host.slots for host in hosts)
    if found.np is None and not hosts:
        raise UsageError("the number of ranks is missing: give -np N")
    if hosts and found.np is not None and found.np > slots:
        raise UsageError(f"-np {found.np} ranks do not fit into the {slots} slots of the hosts given")
    return (slots if found.np is None else found.np), tuple(hosts)


# The configuration file


def _config_words(text: str) -> list[str]:
    """The flags that a configuration stands for; a wrong key becomes a flag that is refused.

    Raises:
        UsageError: A section is wrong.
    """
    import yaml  # only here: most jobs have no such file

    try:
        config = yaml.safe_load(text) or {}
        sections = {key: config[key] or {} for key in config if key != "controller"}
        values = {(section, key): value for section in sections for key, value in sections[section].items()}
    except (yaml.YAMLError, AttributeError, TypeError) as error:
        raise UsageError(f"it is not YAML of sections with keys: {' '.join(str(error).split())}") from error
    words = [f"--{config['controller']}".lower()] if "controller" in config else []
    for (section, key), value in values.items():
        if section not in _SECTIONS:
            raise UsageError(f'"{section}" is not a section{_near(section, [*_SECTIONS, "controller"])}')
        name = section if key == "enabled" else _SECTIONS[section] + key
        flag = re.sub("^(ccl|mlsl)_bgt_", "thread_", name).replace("_", "-")  # older names
        if value is False:
            words.append("--no-" + flag if flag != "log-with-timestamp" else "--log-without-timestamp")
        elif value is not None:
            words.append(f"--{flag}" if value is True else f"--{flag}={value}")
    return words


# The command line


def _words(text: str | None, flag: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text or ""))
    except ValueError as error:
        raise UsageError(f"{flag}={text!r} is not a list of words: {str(error).lower()}") from error


def _start_timeout_s(settings: Mapping[str, str]) -> float:
    """The time limit of init() is the launcher's too."""
    name = "FARANDOLE_INIT_TIMEOUT_S"
    text = settings.get(name) or os.environ.get(name) or os.environ.get("HOROVOD_START_TIMEOUT")
    try:
        return _number(float, 0.001, " of seconds")(text) if text else Options.start_timeout_s
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"{name}: {error}") from error


def check_command(program: str) -> None:
    """Says why a program cannot be started on this machine.

    Raises:
        UsageError: It is not there, or cannot be executed.
    """
    if shutil.which(program) is not None:
        return
    if not os.path.exists(program):
        why = "was not found"
    elif os.path.isdir(program):
        why = "is a directory"
    elif os.access(program, os.X_OK):
        why = f"is not on the PATH; write ./{program}"
    else:
        why = "cannot be executed" + ("; put python before it" if program.endswith(".py") else "")
    raise UsageError(f'the program "{program}" {why}')


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
        text = _read(found.config_file, "--config-file")
        try:
            words = _config_words(text)
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
    settings = {name: value for name, value in vars(found).items() if name.startswith("FARANDOLE_") and value}
    options = Options(
        command=tuple(command), np=np, hosts=hosts, settings=settings,
        mpi_args=_words(found.mpi_args, "--mpi-args"), tcp=found.tcp,
        binding=_words(found.binding_args, "--binding-args") or Options.binding,
        ssh_port=found.ssh_port, ssh_identity_file=found.ssh_identity_file,
        network_interfaces=",".join(found.network_interfaces) if found.network_interfaces else None,
        output_filename=found.output_filename, with_timestamp=found.with_timestamp, horovod=found.horovod,
        start_timeout_s=_start_timeout_s(settings), notes=tuple(found.notes.values()),
        verbose=found.verbose, dry_run=found.dry_run,
    )  # fmt: skip
    if options.is_local:
        check_command(options.command[0])
    return options


# The program


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
        "Available Frameworks:", box(bool(doctor.find_torch().version), "PyTorch"), box(True, "NumPy"), "",
        "Available Controllers:", box(has_mpi, "MPI"), "",
        "Available Tensor Operations:", box(has_mpi, "MPI"), box(has_cuda and has_nccl, "NCCL"),
        box(has_cuda, "CUDA (through host memory)"),
    ])  # fmt: skip


def launch(options: Options, writer: Writer, function: bytes | None = None) -> tuple[int, Job | None]:
    """Runs a job, or prints its command line. Returns its exit code and what is known of it.

    Args:
        function: Each rank reads it from its stdin; see :class:`Job`.

    Raises:
        UsageError: It cannot be started as it is said.
    """
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        raise UsageError("this is a rank of a job already; farandolerun cannot be started under mpirun")
    pair = mpirun.find_pair(os.environ)
    environment = mpirun.make_environment(options, pair, os.environ)
    command = mpirun.make_command(options, pair, environment)
    for note in [*options.notes, *([pair.differ] if pair.differ else [])]:
        writer.say(note)
    if options.dry_run:
        changed = [f"{name}={value}" for name, value in environment.items() if os.environ.get(name) != value]
        print(shlex.join(["env", *changed, *command]))
        return 0, None
    if options.output_filename is not None:
        try:
            pathlib.Path(options.output_filename, "rank.0").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = f"cannot be made: {error.strerror}"
            raise UsageError(f'--output-filename "{options.output_filename}" {reason}') from error
    if options.verbose:
        program, library = pair.program, pair.library
        writer.say(f"mpirun {program.version} ({program.path}), libmpi {library.version} ({library.path})")
        writer.say(shlex.join(command))
    writer.flush()
    job = Job(command, environment, options, writer, function)
    return job.run(), job


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


def horovodrun() -> int:
    """The console script of that name, for scripts written for Horovod. Returns as :func:`main`."""
    return main(["--horovod", *sys.argv[1:]])
