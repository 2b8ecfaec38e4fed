"""``farandole COMMAND``, also ``python -m farandole COMMAND``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import farandole
from farandole import doctor
from farandole.runner import cli

USAGE_ERROR = 2
_USAGE = """usage: farandole COMMAND ...

  doctor [--json]   what is installed, whether two ranks work here, and what would help
  run ...           farandolerun: run a program on several ranks
  --version         the version
"""
_COMMANDS = {"doctor": doctor.main, "run": cli.main}


def main(argv: Sequence[str] | None = None) -> int:
    """The console script. Returns the exit code; 2 for wrong use, after one message."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["--version"]:
        print(f"farandole {farandole.__version__}")
        return 0
    if not words or words[0] in ("-h", "--help"):
        print(_USAGE, end="")
        return 0 if words else USAGE_ERROR
    if words[0] not in _COMMANDS:
        known = " or ".join(_COMMANDS)
        print(f'farandole: "{words[0]}" is not a command; it is {known}', file=sys.stderr)
        return USAGE_ERROR
    return _COMMANDS[words[0]](words[1:])


if __name__ == "__main__":
    sys.exit(main())
