"""``farandolerun``, and with ``--horovod`` ``horovodrun``: flags, configuration file, hosts, exit code.

Every flag of horovodrun is here. One that means nothing here is accepted, and a message says why.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import math
import os
import pathlib
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import farandole
from farandole import _flight_folder
from farandole.runner import hosts, mpirun, supervisor
from farandole.runner.job import Job
from farandole.runner.options import Host, Options, UsageError
from farandole.runner.output import Writer

USAGE_ERROR = 2
_SCRIPT_TIMEOUT_S = 60
_HOST = re.compile(
    r"(\w(?:[\w.-]*\w)?|\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\])(?:(?::|\s+slots\s*=\s*)([1-9][0-9]*))?", re.ASCII
)


def _number(
    kind: Callable[[str], float], what: str, least: float = 0, most: float = math.inf
) -> Callable[[str], float]:
    """An argparse type: a number in a range."""

    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            value = kind(text)
            if least <= value <= most and value != math.inf:
                return value
        end = f" to {most:g}" if most < math.inf else ""
        raise argparse.ArgumentTypeError(f'"{text}" is not {what} from {least:g}{end}')

    return parse


_SECONDS = _number(float, "a number of seconds")
_MB = _number(float, "a number of MB")
_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")


def _level(text: str) -> str:
    if text.lower() in _LEVELS:
        return text.lower()
    raise argparse.ArgumentTypeError(f'"{text}" is not one of {", ".join(_LEVELS)}')


# How the values of flags are read, which the tables below call by these names; others are text.
_TYPES: dict[str, Callable[[str], object]] = {
    "RANKS": _number(int, "a whole number of ranks", 1),
    "SLOTS": _number(int, "a whole number of slots", 1),
    "PORT": _number(int, "a whole number", 1, 65535),
    "COUNT": _number(int, "a whole number"),
    "FRACTION": _number(float, "a number", 0, 1),
    "MS": _number(float, "a number of milliseconds"),
    "SECONDS": _SECONDS,
    "MB": lambda text: int(_MB(text) * 2**20),
    "LEVEL": _level,
}
# By group: flags, the field of Options or the variable of the ranks that each sets (to 1 if nothing is said),
# and its help.
_FLAGS: dict[str, list[tuple[str, str, str]]] = {
    "ranks and hosts": [
        ("-np --num-proc RANKS", "np", "the number of ranks; default with hosts: all their slots"),
        ("-H --hosts HOST:SLOTS,...", "-H", "the hosts to run on, filled in this order"),
        ("-hostfile --hostfile FILE", "--hostfile", 'the hosts, as lines of "HOST slots=N"'),
        ("--host-discovery-script FILE", "--host-discovery-script",
         'run every second; it prints the hosts as "HOST:SLOTS"; implies --elastic (once, with --mpi)'),
        ("--slots-per-host SLOTS", "slots_per_host", "slots of a host that is given without a number"),
        ("-p --ssh-port PORT", "ssh_port", "ssh port of the other hosts"),
        ("-i --ssh-identity-file FILE", "ssh_identity_file", "ssh key for the other hosts"),
        ("--network-interfaces --network-interface NAME,...", "network_interfaces", "networks to use, such as eth0"),
    ],
    "a number of ranks that changes": [
        ("--elastic", "is_elastic", "ranks come and go: what ends is started again, hosts are added and dropped"),
        ("--min-np --min-num-proc RANKS", "min_np",
         "with fewer ranks it waits for others; default 1; implies --elastic"),
        ("--max-np --max-num-proc RANKS", "max_np", "start no more ranks than these; implies --elastic"),
        ("--elastic-timeout SECONDS", "--elastic-timeout", "end if there are too few ranks for so long; default 600"),
        ("--reset-limit COUNT", "reset_limit", "start ranks again so often, all together; default: any number"),
        ("--blacklist-cooldown-range SECONDS SECONDS", "--blacklist-cooldown-range",
         "wait so long before a rank is started again: from the first, doubled each time, to the second; default 1 60"),
        ("--job FOLDER", "job", "a later farandolerun --elastic finds the ranks by it, if this one is killed"),
    ],
    "network": [
        ("--gloo", "network=tcp", "start ranks without mpirun, on TCP; the default"),
        ("--mpi", "network=mpi", "start ranks with mpirun, on MPI"),
        ("--tcp", "tcp", "use only TCP"),
        ("--mpi-args WORDS", "--mpi-args", 'flags for mpirun, as in --mpi-args="--map-by node"'),
        ("--binding-args WORDS", "--binding-args", 'flags for mpirun instead of "--bind-to none"'),
    ],
    "settings and time limits": [
        ("--config-file FILE", "--config-file", "flags as YAML; the command line overrides them"),
        ("--start-timeout SECONDS", "FARANDOLE_INIT_TIMEOUT_S",
         "all ranks must have started, and called init, within this; default 60"),
        ("--no-hierarchical-allreduce", "FARANDOLE_HIERARCHICAL_ALLREDUCE=0",
         "use only the network between ranks of several hosts"),
        ("--fusion-threshold-mb MB", "FARANDOLE_FUSION_THRESHOLD",
         "tensors are fused up to this size in MiB; 0: each by itself"),
        ("--autotune", "FARANDOLE_AUTOTUNE", "try sizes of groups of gradients while training, and keep the best"),
        ("--no-autotune", "FARANDOLE_AUTOTUNE=0", "try none, whatever the environment says"),
        ("--autotune-log-file FILE", "FARANDOLE_AUTOTUNE_LOG", "where rank 0 writes what autotuning has found"),
        ("--stall-check-warning-time-seconds SECONDS", "FARANDOLE_STALL_WARNING_S",
         "report a tensor that has waited this long for a rank"),
        ("--stall-check-shutdown-time-seconds SECONDS", "FARANDOLE_STALL_SHUTDOWN_S",
         "end the job by an error on all ranks when a tensor has waited this long; default 0: never"),
        ("--no-stall-check", "FARANDOLE_STALL_CHECK_DISABLE", "neither report stalls nor end the job"),
    ],
    "output and diagnosis": [
        ("--timeline-filename FILE", "FARANDOLE_TIMELINE", "write a timeline for chrome://tracing"),
        ("--timeline-mark-cycles", "FARANDOLE_TIMELINE_MARK_CYCLES", "mark rank 0's decisions in the timeline"),
        ("--log-level LEVEL", "FARANDOLE_LOG_LEVEL", f"least severe message: {', '.join(_LEVELS)}"),
        ("--output-filename DIR", "output_filename", "also write DIR/rank.N/stdout and stderr"),
        ("-prefix-timestamp --prefix-output-with-timestamp", "with_timestamp", "put the time before each line"),
        ("--verbose", "verbose", "print what runs, and which MPI is used"),
        ("--dry-run", "dry_run", "print what would run on each host, or mpirun's command line, and exit"),
        ("-cb --check-build", "check_build", "print what this installation supports, and exit"),
        ("--horovod", "horovod", 'make "import horovod" import Farandole; horovodrun implies it'),
        ("-v --version", "version", "print the version and exit"),
    ],
}  # fmt: skip
# Why flags of horovodrun mean nothing here.
_MEANINGLESS = {
    "srun and mpirun start ranks where there is a scheduler": "--jsrun",
    "there is no cycle; a tensor is sent when all ranks are ready": "--cycle-time-ms=MS",
    "FARANDOLE_ID_TABLE_SIZE is the table of known tensors": "--cache-capacity=COUNT",
    "allgathers go from rank to rank; NCCL chooses for itself":
        "--hierarchical-allgather --torus-allreduce",
    "the steps of autotuning are fixed":
        "--autotune-warmup-samples=COUNT --autotune-steps-per-sample=COUNT "
        "--autotune-bayes-opt-max-samples=COUNT --autotune-gaussian-process-noise=FRACTION",
    "MPI has to allow several threads": "--mpi-threads-disable",
    "there is one stream for each GPU": "--num-nccl-streams=COUNT",
    "the engine's thread is not bound to a core": "--thread-affinity=CORES",
    "there is no Gloo; see --start-timeout": "--gloo-timeout-seconds=SECONDS",
    "messages have no time of their own; use --prefix-output-with-timestamp":
        "--log-with-timestamp --no-log-hide-timestamp",
}  # fmt: skip
# Flags that ask for what is done anyway, and the one before them that each undoes.
_DONE_ANYWAY = {
    "--hierarchical-allreduce": "--no-hierarchical-allreduce",
    "--disable-cache": "--cache-capacity", "--stall-check": "--no-stall-check",
    "--log-without-timestamp": "--log-with-timestamp",
    "--log-hide-timestamp": "--no-log-hide-timestamp",
} | {
    f"--no-{name}": f"--{name}"
    for name in ("hierarchical-allgather", "torus-allreduce", "mpi-threads-disable",
                 "timeline-mark-cycles")
}  # fmt: skip
# Flags that mean something in an elastic job alone, and where their values stand.
_OF_ELASTIC = {
    "--elastic-timeout": "--elastic-timeout", "--reset-limit": "reset_limit", "--job": "job",
    "--blacklist-cooldown-range": "--blacklist-cooldown-range",
}  # fmt: skip
# Sections of the configuration file, and what the flags of their keys begin with.
_SECTIONS = {
    "params": "", "autotune": "autotune_", "timeline": "timeline_", "stall_check": "stall_check_",
    "library_options": "", "logging": "log_",
}  # fmt: skip


_EPILOG = """examples:
  farandolerun -np 4 python train.py                     four ranks on this host
  farandolerun -H a:4,b:4 python train.py                eight on two hosts, over ssh
  farandolerun --elastic -np 4 python train.py           what ends is started again

All FARANDOLE_* variables that are set reach the ranks: docs/settings.md. "farandole ps" shows what running ranks do,
"farandole explain" what those of a job that failed have done. horovodrun's other flags are accepted: docs/horovod.md.
"""


class _Parser(argparse.ArgumentParser):
    """argparse, whose errors are one message."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message[:1].lower() + message[1:])


def _meaningless() -> Iterator[tuple[str, str, str]]:
    """Each flag that means nothing here, the types of its values, and why."""
    for why, flags in _MEANINGLESS.items():
        for flag in flags.split():
            name, _, types = flag.partition("=")
            yield name, types, why


def _add_flags(group: argparse._ArgumentGroup, rows: Sequence[tuple[str, str, str]]) -> None:
    for usage, dest, text in rows:
        flags = [word for word in usage.split() if word.startswith("-")]
        values = tuple(usage.split()[len(flags) :])
        how: dict[str, Any]
        if values:
            how = {"type": _TYPES.get(values[0], str), "dest": dest, "metavar": values[0]}
            how |= {"nargs": len(values), "metavar": values} if len(values) > 1 else {}
        else:
            name, _, value = dest.partition("=")
            how = {"dest": name, "action": "store_const", "const": value or True}
        group.add_argument(*flags, help=text, **how)


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="farandolerun", usage="farandolerun -np N [options] PROGRAM ...", allow_abbrev=False,
        description="Runs a program on several ranks.", epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    for title, flags in _FLAGS.items():
        _add_flags(parser.add_argument_group(title), flags)
    for flag, types, _ in _meaningless():
        how: dict[str, Any] = {"action": "store_const", "const": True}
        if types:
            how = {"type": _TYPES.get(types, str)}
        parser.add_argument(flag, dest=flag, help=argparse.SUPPRESS, **how)
    known = {flag: action.dest for action in parser._actions for flag in action.option_strings}
    for flag, other in _DONE_ANYWAY.items():
        parser.add_argument(flag, dest=known[other], action="store_const", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="PROGRAM ...")
    return parser


def _read_words(words: Sequence[str], found: Options) -> Options:
    """What words say, in addition to what was found before."""
    parser = _make_parser()
    merged, unknown = parser.parse_known_args(words, found)
    if unknown:
        known = [flag for action in parser._actions for flag in action.option_strings]
        hint = _near(unknown[0].partition("=")[0], known) or "; farandolerun --help lists them"
        raise UsageError(f"{unknown[0]} is not an option{hint}")
    return merged


def _near(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, 1)
    return f"; did you mean {near[0]}?" if near else ""


def _read_config(path: str) -> Options:
    """What a configuration file says; its keys are read as flags, and refused as those are."""
    import yaml  # only here: most jobs have no such file

    text = _read_text(path, "--config-file")
    try:
        config = yaml.safe_load(text) or {}
        words = [f"--{config.pop('controller')}".lower()] if "controller" in config else []
        for section, values in config.items():
            if section not in _SECTIONS:
                hint = _near(section, [*_SECTIONS, "controller"])
                raise UsageError(f'"{section}" is not a section{hint}')
            words += [_flag_for(section, key, value) for key, value in (values or {}).items()]
        return _read_words(list(filter(None, words)), Options())
    except (yaml.YAMLError, AttributeError, TypeError, UsageError) as error:
        is_ours = isinstance(error, UsageError)
        why = "" if is_ours else "it is not YAML of sections with keys: "
        raise UsageError(f'--config-file "{path}": {why}{" ".join(str(error).split())}') from error


def _flag_for(section: str, key: str, value: object) -> str:
    name = section if key == "enabled" else _SECTIONS[section] + key
    flag = re.sub("^(ccl|mlsl)_bgt_", "thread_", name).replace("_", "-")  # older names
    if value is False:
        return "--log-without-timestamp" if flag == "log-with-timestamp" else f"--no-{flag}"
    return "" if value is None else f"--{flag}" if value is True else f"--{flag}={value}"


def _read_text(path: str, flag: str) -> str:
    try:
        return pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", "it is not text")
        raise UsageError(f'{flag} "{path}" cannot be read: {reason}') from error


def parse(argv: Sequence[str], is_fixed: bool = False) -> Options:
    """Reads a command line, and the configuration file that it names.

    Args:
        is_fixed: The number of ranks cannot change: a discovery script runs once.

    Raises:
        UsageError: It is wrong; one message says where.
        SystemExit: With code 0, after ``--help``.
    """
    options = _read_words(argv, Options())
    if path := vars(options)["--config-file"]:
        options = _read_words(argv, _read_config(path))
    if options.version or options.check_build:
        return options
    found = vars(options)
    options.hosts = tuple(_find_hosts(found))
    options.network = _choose_network(found)
    if options.network == "tcp" and not options.hosts:
        options.hosts = tuple(hosts.slurm_hosts(os.environ))
        options.is_slurm = bool(options.hosts)
    options.is_elastic = not is_fixed and _is_elastic(found, options.network)
    if options.is_elastic:
        _set_elastic(options, found)
    slots = sum(host.slots for host in options.hosts)
    options.np = options.np or int(min(slots, options.most_np))
    if options.np == 0:
        raise UsageError("the number of ranks is missing: give -np N")
    if options.hosts and options.np > slots and not options.is_elastic:
        raise UsageError(f"-np {options.np} ranks do not fit into the {slots} slots of the hosts given")
    options.command = tuple(options.command[options.command[:1] == ["--"] :])
    if not options.command:
        raise UsageError("the program to run is missing: farandolerun -np N PROGRAM ...")
    options.settings = {
        name: f"{value:g}" if isinstance(value, bool | float) else str(value)
        for name, value in found.items() if name.startswith("FARANDOLE_") and value is not None
    }  # fmt: skip
    if found.get("network") and os.environ.get("FARANDOLE_NETWORK"):
        options.settings["FARANDOLE_NETWORK"] = options.network  # the flag wins
    options.start_timeout_s = _start_timeout_s(options.settings)
    options.settings |= {"FARANDOLE_ELASTIC": "1"} if options.is_elastic else {}
    options.notes = tuple(
        f"{flag} means nothing here: {why}" for flag, _, why in _meaningless() if found[flag] is not None
    ) + tuple(
        f"{flag} means nothing here: the number of ranks is fixed without --elastic"
        for flag, name in _OF_ELASTIC.items() if found.get(name) is not None and not options.is_elastic
    )  # fmt: skip
    options.mpi_args, binding = _split(found, "--mpi-args"), _split(found, "--binding-args")
    options.binding = binding or options.binding
    if options.is_local:
        _check_program(options.command[0])
    return options


def _is_elastic(found: Mapping[str, Any], network: str) -> bool:
    """Whether ranks come and go: as with Horovod where their numbers or a script are given."""
    names = {"--elastic": "is_elastic", "--min-np": "min_np", "--max-np": "max_np"}
    given = [flag for flag, name in names.items() if found.get(name)]
    if given and network == "mpi":
        raise UsageError(f"{given[0]} needs TCP, as MPI ends all ranks with the first; leave --mpi out")
    return bool(given) or (found["--host-discovery-script"] is not None and network == "tcp")


def _set_elastic(options: Options, found: Mapping[str, Any]) -> None:
    """The numbers of an elastic job: from --min-np to --max-np ranks, -np of them at the beginning."""
    if options.max_np is None and found["--host-discovery-script"] is None and options.np:
        options.max_np = options.np
    if options.most_np < options.min_np:
        raise UsageError(f"--max-np {options.max_np} is less than --min-np {options.min_np}")
    if options.np and not options.min_np <= options.np <= options.most_np:
        raise UsageError(f"-np {options.np} is not between --min-np {options.min_np} and --max-np {options.max_np}")
    if not options.hosts:
        options.hosts = (Host("localhost", options.max_np),) if options.max_np else ()
    if found["--elastic-timeout"] is not None:
        options.elastic_timeout_s = found["--elastic-timeout"]
    least_s, most_s = found["--blacklist-cooldown-range"] or options.cooldown_s
    if least_s > most_s:
        raise UsageError(f"--blacklist-cooldown-range {least_s:g} {most_s:g}: the first is the least")
    options.cooldown_s = (least_s, most_s)


def _choose_network(found: Mapping[str, Any]) -> str:
    """Whether mpirun starts the ranks ("mpi"): where it is asked for, or a flag or a scheduler needs it."""
    variable = os.environ.get("FARANDOLE_NETWORK", "")
    chosen = found.get("network") or (variable if variable in ("mpi", "tcp") else "")
    needs = [flag for flag in ("--mpi-args", "--binding-args") if found[flag] is not None]
    if chosen == "tcp" and needs:
        raise UsageError(f"{needs[0]} is for mpirun, which --gloo does without; give one of them")
    has_hosts = found["hosts"] or not any(os.environ.get(name) for name in ("PBS_NODEFILE", "LSB_HOSTS"))
    return chosen or ("mpi" if needs or not has_hosts else "tcp")


def _split(found: Mapping[str, Any], flag: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(found[flag] or ""))
    except ValueError as error:
        why = str(error).lower()
        raise UsageError(f"{flag}={found[flag]!r} is not a list of words: {why}") from error


def _start_timeout_s(settings: Mapping[str, str]) -> float:
    """The time limit of init() is the launcher's too."""
    name = "FARANDOLE_INIT_TIMEOUT_S"
    text = settings.get(name) or os.environ.get(name) or os.environ.get("HOROVOD_START_TIMEOUT")
    try:
        return _SECONDS(text) if text else Options.start_timeout_s
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"{name}: {error}") from error


def _check_program(program: str) -> None:
    """Says why a program cannot be started on this machine."""
    if shutil.which(program) is not None:
        return
    if not os.path.exists(program):
        why = "was not found"
    elif os.access(program, os.X_OK) and not os.path.isdir(program):
        why = f"is not on the PATH; write ./{program}"
    else:
        why = "cannot be executed" + ("; put python before it" if program.endswith(".py") else "")
    raise UsageError(f'the program "{program}" {why}')


def _find_hosts(found: Mapping[str, Any]) -> list[Host]:
    readers = {"-H": _split_list, "--hostfile": _read_text, "--host-discovery-script": _run_script}
    given = [flag for flag in readers if found[flag] is not None]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} both say where ranks go; give one of them")
    for flag in given:
        text = found[flag]
        lines = readers[flag](text, flag).splitlines()
        return parse_hosts(lines, f'{flag} "{text}"', found["slots_per_host"] or 1)
    return []


def _split_list(text: str, _: str) -> str:
    return text.replace(",", "\n")


def _run_script(script: str, flag: str) -> str:
    """What a host discovery script prints."""
    try:
        done = subprocess.run(
            shlex.split(script), capture_output=True, text=True, timeout=_SCRIPT_TIMEOUT_S, stdin=subprocess.DEVNULL,
            check=True,
        )  # fmt: skip
    except subprocess.CalledProcessError as error:
        said = f": {error.stderr.strip()}" if error.stderr.strip() else ""
        raise UsageError(f'{flag} "{script}" ended with exit code {error.returncode}{said}') from error
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f'{flag} "{script}" cannot be run: {reason}') from error
    return done.stdout


def parse_hosts(items: Iterable[str], where: str, default: int = 1) -> list[Host]:
    """Reads "a:2" or "a slots=2"; without a number a host has ``default`` slots. "#" starts a comment.

    An IPv6 address stands in brackets, "[fd00::1]:2", which the name of a Host has not. A host that is named again, as
    in PBS's files with one line per slot, has more slots.

    Raises:
        UsageError: An item is wrong, or there is none; ``where`` says whose.
    """
    slots: dict[str, int] = {}
    for item in items:
        text = item.partition("#")[0].strip()
        found = _HOST.fullmatch(text)
        name = _host_name(found[1]) if found else ""
        if found and name:
            slots[name] = slots.get(name, 0) + int(found[2] or default)
        elif text:
            hint = "; an IPv6 address stands in brackets" * (text.count(":") > 1)
            raise UsageError(f'{where}: "{text}" is not a host, "HOST:SLOTS" or "HOST slots=SLOTS"{hint}')
    if not slots:
        raise UsageError(f"{where} names no host")
    return [Host(*item) for item in slots.items()]


def _host_name(text: str) -> str:
    """A name as it is; an address without its brackets, in its shortest form; empty if it is none."""
    if not text.startswith("["):
        return text
    address, percent, scope = text[1:-1].partition("%")
    try:
        return socket.inet_ntop(socket.AF_INET6, socket.inet_pton(socket.AF_INET6, address)) + percent + scope
    except OSError:
        return ""


def describe_build() -> str:
    """What this installation can do, in the form of ``horovodrun --check-build``."""
    from farandole import doctor

    found = {one.name: one.version for one in doctor.find_all(os.environ)}
    has_cuda = bool(found["libfarandole_cuda"])
    rows = [
        ("\nAvailable Frameworks:", None), ("PyTorch", found["torch"]), ("NumPy", True),
        ("\nAvailable Controllers:", None), ("TCP", True), ("MPI", found["libmpi"]),
        ("\nAvailable Tensor Operations:", None), ("TCP", True), ("MPI", found["libmpi"]),
        ("NCCL", has_cuda and found["NCCL"]), ("CUDA (through host memory)", has_cuda),
    ]  # fmt: skip
    marked = [name if has is None else f"    [{'X' if has else ' '}] {name}" for name, has in rows]
    return "\n".join([f"Farandole v{farandole.__version__}:", *marked])


def launch(options: Options, function: bytes | None = None) -> Job | None:
    """Runs a job; None if it only printed its command line.

    Args:
        function: Each rank reads it from its stdin; see :class:`Job`.

    Raises:
        UsageError: It cannot be started as it is said.
    """
    for variable in ("OMPI_COMM_WORLD_RANK", "FARANDOLE_RANK", "FARANDOLE_MEMBERS", "TORCHELASTIC_RUN_ID"):
        if variable in os.environ:
            where = f"this is a rank of a job already ({variable} is set)"
            raise UsageError(f"{where}; farandolerun cannot be started by a rank")
    try:
        supervisor.allowed_ports()
    except ValueError as error:
        raise UsageError(str(error)) from error
    folder = _flight_folder.chosen_by_user()
    if default := "" if options.dry_run else _flight_folder.for_launcher(options.np):
        folder = default
        options.settings = {**options.settings, _flight_folder.VARIABLE: _flight_folder.for_hosts(folder)}
    started_s = time.time()
    screen = Writer(sys.stdout, sys.stderr, options.output_filename, options.with_timestamp)
    with contextlib.closing(screen) as writer:
        for note in options.notes:
            writer.say(note)
        job = (_prepare_mpirun if options.network == "mpi" else _prepare_hosts)(options, writer, function)
        if job is not None:
            _make_folder(options.output_filename)
            writer.flush()
            job.run()
            is_here = _flight_folder.has_files(folder, started_s)
            may_be_elsewhere = default and not options.is_local and job.failure.rank is not None
            if job.code and (is_here or may_be_elsewhere):
                where = "" if is_here else ", on the hosts where they have left files"
                writer.say(f"what the ranks did last: farandole explain {shlex.quote(folder)}{where}")
    return job


def _prepare_hosts(options: Options, writer: Writer, function: bytes | None) -> Job | None:
    placed = hosts.place(options, os.environ)
    environment = options.environment(os.environ)
    changed = dict(environment.items() - os.environ.items())
    lines = [shlex.join(["env", *(f"{name}={changed[name]}" for name in changed), *options.command])]
    lines += [f"ranks {one.ranks[0]} to {one.ranks[-1]} on {one.name}: {shlex.join(one.command)}" for one in placed]
    if options.is_elastic:
        lines.append(_describe_elastic(options))
    if options.dry_run:
        print("\n".join(lines))
        return None
    for line in lines if options.verbose else ():
        writer.say(line)
    if options.is_elastic:
        from farandole.runner import elastic  # not above: others start without it, and so sooner

        return elastic.ElasticJob(options, writer, environment, _make_discoverer(options))
    return hosts.HostsJob(options, writer, placed, environment, function)


def _describe_elastic(options: Options) -> str:
    most = f"to {options.max_np} ranks" if options.max_np else "ranks or more"
    limit = "any number of times" if options.reset_limit is None else f"at most {options.reset_limit} times"
    least_s, most_s = options.cooldown_s
    return (
        f"elastic: {options.min_np} {most}; started again {limit}, after {least_s:g} to {most_s:g} s; "
        f"with fewer ranks than {options.min_np} it ends after {options.elastic_timeout_s:g} s"
    )


def _make_discoverer(options: Options) -> Callable[[], list[Host]] | None:
    """Runs the discovery script once more."""
    flag, found = "--host-discovery-script", vars(options)
    script = found[flag]

    def discover() -> list[Host]:
        return parse_hosts(_run_script(script, flag).splitlines(), f'{flag} "{script}"', found["slots_per_host"] or 1)

    return None if script is None else discover


def _prepare_mpirun(options: Options, writer: Writer, function: bytes | None) -> Job | None:
    pair = mpirun.find_pair(os.environ)
    environment = mpirun.make_environment(options, pair, os.environ)
    command = mpirun.make_command(options, pair, environment)
    if pair.differ:
        writer.say(pair.differ)
    if options.dry_run:
        changed = dict(environment.items() - os.environ.items())
        print(shlex.join(["env", *(f"{name}={changed[name]}" for name in changed), *command]))
        return None
    mpirun.check_open_files(options)
    if options.verbose:
        mpi = f"mpirun {pair.program.version} ({pair.program.path})"
        writer.say(f"{mpi}, libmpi {pair.library.version} ({pair.library.path})")
        writer.say(shlex.join(command))
    return mpirun.MpirunJob(options, writer, command, environment, function)


def _make_folder(folder: str | None) -> None:
    if folder is not None:
        try:
            pathlib.Path(folder, "rank.0").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = f"cannot be made: {error.strerror}"
            raise UsageError(f'--output-filename "{folder}" {reason}') from error


def main(argv: Sequence[str] | None = None) -> int:
    """The console script. Returns the exit code; 2 for wrong use, after one message."""
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
        if options.version or options.check_build:
            print(f"farandolerun {farandole.__version__}" if options.version else describe_build())
            return 0
        job = launch(options)
        return job.code if job else 0
    except UsageError as error:
        print(f"farandolerun: {error}", file=sys.stderr)
        return USAGE_ERROR


def horovodrun() -> int:
    """The console script of that name, for scripts written for Horovod. Returns as :func:`main`."""
    return main(["--horovod", *sys.argv[1:]])
