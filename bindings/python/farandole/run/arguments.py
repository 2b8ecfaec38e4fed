"""The command line of ``farandolerun``: Horovod's flags as far as they mean something here."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import shlex
import shutil
from collections.abc import Callable, Sequence
from typing import NoReturn

from farandole.run import hosts as hosts_
from farandole.run.errors import UsageError

_ELASTIC = "the number of ranks is fixed for a job here"
_AUTOTUNE = "there is no autotuning"
_HIERARCHY = "the way over the hosts is not a choice of the user"
# Flags of horovodrun without a meaning here: why. Those with a value swallow it by this entry alone.
REFUSED = {
    "--gloo": "ranks are started by MPI",
    "--jsrun": "ranks are started by mpirun",
    "--config-file": "settings are FARANDOLE_* environment variables",
    "--cycle-time-ms": "there is no cycle; a tensor travels when it is ready everywhere",
    "--cache-capacity": "there is no response cache",
    "--tcp": "MPI and NCCL choose their networks; see --mpi-args and NCCL_IB_DISABLE",
    "--num-nccl-streams": "there is no such setting",
    "--thread-affinity": "the engine's thread is not pinned",
    "--gloo-timeout-seconds": "ranks are started by MPI",
    "--mpi-threads-disable": "MPI must allow several threads",
    "--log-with-timestamp": "use --prefix-output-with-timestamp",
    "--host-discovery-script": _ELASTIC,
    "--min-np": _ELASTIC,
    "--min-num-proc": _ELASTIC,
    "--max-np": _ELASTIC,
    "--max-num-proc": _ELASTIC,
    "--slots-per-host": _ELASTIC,
    "--elastic-timeout": _ELASTIC,
    "--reset-limit": _ELASTIC,
    "--blacklist-cooldown-range": _ELASTIC,
    "--autotune": _AUTOTUNE,
    "--autotune-log-file": _AUTOTUNE,
    "--autotune-warmup-samples": _AUTOTUNE,
    "--autotune-steps-per-sample": _AUTOTUNE,
    "--autotune-bayes-opt-max-samples": _AUTOTUNE,
    "--autotune-gaussian-process-noise": _AUTOTUNE,
    "--hierarchical-allreduce": _HIERARCHY,
    "--hierarchical-allgather": _HIERARCHY,
    "--torus-allreduce": _HIERARCHY,
}
_LOG_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")


@dataclasses.dataclass(frozen=True)
class Options:
    """What was asked for, checked.

    Attributes:
        command: The program and its arguments; empty with ``version`` or ``check_build``.
        np: Ranks.
        hosts: Where; empty: this machine, or what a scheduler allocated.
        settings: Environment variables that flags stand for.
        mpi_args: Words for mpirun, last so that they win.
        binding: Words for mpirun that bind ranks to cores.
        start_timeout_s: All ranks must have started by then.
    """

    command: tuple[str, ...] = ()
    np: int = 1
    hosts: tuple[hosts_.Host, ...] = ()
    settings: dict[str, str] = dataclasses.field(default_factory=dict)
    mpi_args: tuple[str, ...] = ()
    binding: tuple[str, ...] = ("--bind-to", "none")
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    network_interfaces: str | None = None
    output_filename: str | None = None
    with_timestamp: bool = False
    start_timeout_s: float = 60.0
    verbose: bool = False
    dry_run: bool = False
    version: bool = False
    check_build: bool = False

    @property
    def is_local(self) -> bool:
        """Whether all ranks live on this machine (a scheduler's allocation may have others)."""
        if not self.hosts:
            return hosts_.scheduler(os.environ) is None
        return all(hosts_.is_this_machine(host.name) for host in self.hosts)


class _Parser(argparse.ArgumentParser):
    """argparse, whose errors are one sentence."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message[:1].lower() + message[1:])


class _Refuse(argparse.Action):
    """A flag of horovodrun that has no meaning here."""

    def __call__(self, parser, namespace, values, option_string=None) -> NoReturn:  # type: ignore[no-untyped-def]
        name = "--" + (option_string or "").removeprefix("--no-").removeprefix("--")
        raise UsageError(
            f"{option_string} of horovodrun is not supported: {REFUSED[name]}; leave it out"
        )


def _number(kind: type[int] | type[float], least: float, unit: str) -> Callable[[str], float]:
    """An argparse type: a number from ``least``; ``unit`` completes "is not a number of ..."."""

    def parse(text: str) -> float:
        value: float | None
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not least <= value < float("inf"):
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f'"{text}" is not {what}{unit} from {least:g}')
        return value

    return parse


def _add_launching(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("ranks and hosts").add_argument
    add("-np", "--num-proc", dest="np", metavar="N", type=_number(int, 1, " of ranks"),
        help="ranks in all; default with -H or --hostfile: all slots")  # fmt: skip
    add("-H", "--hosts", metavar="HOST:SLOTS,...", help="where ranks go, filled in this order")
    add("-hostfile", "--hostfile", metavar="FILE", help='the same as lines of "HOST slots=N"')
    add("-p", "--ssh-port", metavar="PORT", type=_number(int, 1, ""), help="of the other hosts")
    add("-i", "--ssh-identity-file", metavar="FILE", help="key for the other hosts")
    add("--network-interfaces", "--network-interface", metavar="NAME,...", action="append",
        help="network interfaces MPI may use, such as eth0")  # fmt: skip
    add("--start-timeout", metavar="SECONDS", type=_number(float, 1, " of seconds"),
        help="all ranks must have started, and called init, within this; default 60")  # fmt: skip
    add("--mpi-args", metavar="WORDS", help='for mpirun, as one string: --mpi-args="--map-by node"')
    add("--binding-args", metavar="WORDS", help='in place of "--bind-to none"')
    add("--mpi", action="store_true", help="nothing: there is no other way")
    add("--disable-cache", action="store_true", help="nothing: nothing is cached")


def _add_settings(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("settings of the ranks").add_argument
    add("--fusion-threshold-mb", metavar="MB", type=_number(float, 0, " of MB"),
        help="tensors are fused up to this size in MiB; 0: each by itself")  # fmt: skip
    add("--stall-check-warning-time-seconds", metavar="SECONDS", type=_number(float, 0, " of seconds"),
        help="report a tensor that waits so long for a rank")  # fmt: skip
    add("--stall-check-shutdown-time-seconds", metavar="SECONDS",
        type=_number(float, 0, " of seconds"),
        help="end the job by an error on all ranks when a tensor waits so long; default 0: never")  # fmt: skip
    add("--no-stall-check", action="store_true", help="never report, and never end the job")
    add("--stall-check", action="store_true", help="report; the default")
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
    add(
        "-cb",
        "--check-build",
        action="store_true",
        help="say what this installation can do, and end",
    )
    add("-v", "--version", action="store_true", help="print the version and end")


def make_parser() -> argparse.ArgumentParser:
    """The parser; its ``error`` raises UsageError."""
    parser = _Parser(
        prog="farandolerun",
        description="Runs a program on several ranks.",
        usage="farandolerun -np N [options] PROGRAM ...",
        allow_abbrev=False,
    )
    _add_launching(parser)
    _add_settings(parser)
    _add_output(parser)
    for flag in REFUSED:
        names = [flag, "--no-" + flag.removeprefix("--")]
        parser.add_argument(*names, action=_Refuse, nargs="?", help=argparse.SUPPRESS)
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="PROGRAM ...", help="what to run"
    )
    return parser


def _words(text: str | None, flag: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text or ""))
    except ValueError as error:
        raise UsageError(f"{flag}={text!r} is not a list of words: {str(error).lower()}") from error


def _settings(found: argparse.Namespace) -> dict[str, str]:
    settings = {}
    if found.fusion_threshold_mb is not None:
        settings["FARANDOLE_FUSION_THRESHOLD"] = str(int(found.fusion_threshold_mb * 2**20))
    if found.no_stall_check:
        settings["FARANDOLE_STALL_CHECK_DISABLE"] = "1"
    if found.stall_check_warning_time_seconds is not None:
        settings["FARANDOLE_STALL_WARNING_S"] = f"{found.stall_check_warning_time_seconds:g}"
    if found.stall_check_shutdown_time_seconds is not None:
        settings["FARANDOLE_STALL_SHUTDOWN_S"] = f"{found.stall_check_shutdown_time_seconds:g}"
    if found.timeline_filename is not None:
        settings["FARANDOLE_TIMELINE"] = found.timeline_filename
    if found.timeline_mark_cycles:
        settings["FARANDOLE_TIMELINE_MARK_CYCLES"] = "1"
    if found.log_level is not None:
        settings["FARANDOLE_LOG_LEVEL"] = found.log_level.lower().replace("fatal", "off")
    if found.start_timeout is not None:
        settings["FARANDOLE_INIT_TIMEOUT_S"] = f"{found.start_timeout:g}"
    return settings


def _place(found: argparse.Namespace) -> tuple[int, tuple[hosts_.Host, ...]]:
    """Ranks and hosts that fit one another."""
    if found.hosts is not None and found.hostfile is not None:
        raise UsageError("-H and --hostfile both say where ranks go; give one of them")
    hosts: list[hosts_.Host] = []
    if found.hosts is not None:
        hosts = hosts_.parse_hosts(found.hosts)
    elif found.hostfile is not None:
        hosts = hosts_.read_hostfile(found.hostfile)
    slots = sum(host.slots for host in hosts)
    if found.np is None and not hosts:
        raise UsageError("the number of ranks is missing: give -np N")
    if hosts and found.np is not None and found.np > slots:
        raise UsageError(
            f"-np {found.np} ranks do not fit into the {slots} slots of the hosts given"
        )
    return (slots if found.np is None else found.np), tuple(hosts)


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


def _refuse_unknown(words: Sequence[str], parser: argparse.ArgumentParser) -> None:
    if not words:
        return
    known = [name for action in parser._actions for name in action.option_strings]
    near = difflib.get_close_matches(words[0].partition("=")[0], known, 1)
    hint = f"; did you mean {near[0]}?" if near else "; farandolerun --help lists them"
    raise UsageError(f"{words[0]} is not an option{hint}")


def parse(argv: Sequence[str]) -> Options:
    """Reads a command line.

    Raises:
        UsageError: It is wrong; one sentence says where.
        SystemExit: With code 0, after ``--help``.
    """
    parser = make_parser()
    found, unknown = parser.parse_known_args(list(argv))
    _refuse_unknown(unknown, parser)
    if found.version or found.check_build:
        return Options(version=found.version, check_build=found.check_build)
    command = found.command[1:] if found.command[:1] == ["--"] else found.command
    np, hosts = _place(found)
    if not command:
        raise UsageError("the program to run is missing: farandolerun -np N PROGRAM ...")
    binding = _words(found.binding_args, "--binding-args") or Options.binding
    options = Options(
        command=tuple(command), np=np, hosts=hosts, settings=_settings(found),
        mpi_args=_words(found.mpi_args, "--mpi-args"), binding=binding,
        ssh_port=found.ssh_port, ssh_identity_file=found.ssh_identity_file,
        network_interfaces=",".join(found.network_interfaces) if found.network_interfaces else None,
        output_filename=found.output_filename, with_timestamp=found.with_timestamp,
        start_timeout_s=found.start_timeout or Options.start_timeout_s,
        verbose=found.verbose, dry_run=found.dry_run,
    )  # fmt: skip
    if options.is_local:
        check_command(options.command)
    return options
