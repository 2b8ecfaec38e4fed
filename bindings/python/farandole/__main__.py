"""``farandole COMMAND``, also ``python -m farandole COMMAND``."""

from __future__ import annotations

import importlib
import os
import platform
import select
import signal
import sys
from collections.abc import Sequence

from farandole import doctor
from farandole.runner.cli import USAGE_ERROR

#: The module and function that run a command, how it is called, and what it gives.
_COMMANDS = {
    "bench": ("bench:main", "bench ...", "how fast collectives are here, beside other libraries; started on all ranks"),
    "doctor": ("doctor:main", "doctor [--json]", "what is installed, whether two ranks work here, what would help"),
    "explain": ("explain:main", "explain [DIR]", "who failed and who waits for whom, from what a job's ranks left"),
    "ps": ("ps:main", "ps [--json]", "the running ranks of this host, and what they do"),
    "report": ("report:main", "report DIR", "a page about a run, from what it left in FARANDOLE_RECORD"),
    "run": ("runner.cli:main", "run ...", "farandolerun: run a program on several ranks"),
    "top": ("top:main", "top [-H A,B]", "what all ranks of a job do, again and again: who is late, who waits"),
    "trace": ("trace:main", "trace DIR", "one trace of all ranks for ui.perfetto.dev, and who was last"),
    "verify": ("chain:main_verify", "verify A B", "the first step in which two runs of a farandole.torch.Job differ"),
}


def _usage() -> str:
    rows = [row[1:] for row in _COMMANDS.values()] + [("--version", "the version, and what was found with it")]
    return "\n".join(["usage: farandole COMMAND ...", "", *(f"  {usage:16}  {what}" for usage, what in rows)])


def _describe() -> str:
    """The version, a line by itself; what it was built for and where it is; what it finds, and what it does without."""
    own, *others = doctor.find_all(os.environ)
    found = ", ".join(f"{one.name} {one.version}" for one in others if one.version)
    without = ", ".join(one.name for one in others if not one.version)
    build = f"built for {platform.machine()}, in {own.where}"
    return "\n".join([f"farandole {own.version}", build, f"found: {found}", f"not found: {without or 'nothing'}"])


def main(argv: Sequence[str] | None = None) -> int:
    """The console script. Returns the exit code; 2 for wrong use, after one message."""
    try:
        code = _run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # as of "| head": who reads has enough
        output = select.poll()
        output.register(sys.stdout, 0)  # which still tells of errors
        if not output.poll(0):  # it is of another pipe
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python still writes at exit
        return 128 + signal.SIGPIPE


def _run(argv: Sequence[str]) -> int:
    command, *words = argv or [""]
    if command in _COMMANDS:
        module, function = _COMMANDS[command][0].split(":")
        return int(getattr(importlib.import_module(f"farandole.{module}"), function)(words))
    if command == "--version":
        print(_describe())
    elif command in ("", "-h", "--help"):
        print(_usage() if command else f"{_usage()}\n\n{_describe()}")
    else:
        *others, last = _COMMANDS
        commands = f"{', '.join(others)} or {last}"
        print(f'farandole: "{command}" is not a command; it is {commands}', file=sys.stderr)
    return 0 if command in ("--version", "-h", "--help") else USAGE_ERROR


if __name__ == "__main__":
    sys.exit(main())
