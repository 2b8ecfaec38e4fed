"""``farandole COMMAND``, also ``python -m farandole COMMAND``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import farandole
from farandole import chain, doctor, explain, ps
from farandole.runner import cli

_USAGE = """usage: farandole COMMAND ...

  doctor [--json]   what is installed, whether two ranks work here, and what would help
  explain DIR       who failed and who waits for whom, from the files of a job's flight recorders
  ps                the running ranks of this host, and what they do
  run ...           farandolerun: run a program on several ranks
  verify A B        the first step in which two runs of a farandole.torch.Job differ
  --version         the version"""


def main(argv: Sequence[str] | None = None) -> int:
    """The console script. Returns the exit code; 2 for wrong use, after one message."""
    command, *words = (sys.argv[1:] if argv is None else argv) or [""]
    if command == "doctor":
        return doctor.main(words)
    if command == "explain":
        return explain.main(words)
    if command == "ps":
        return ps.main(words)
    if command == "run":
        return cli.main(words)
    if command == "verify":
        return chain.main_verify(words)
    if command == "--version":
        print(f"farandole {farandole.__version__}")
    elif command in ("", "-h", "--help"):
        print(_USAGE)
    else:
        print(f'farandole: "{command}" is not a command; it is doctor, explain, ps, run or verify', file=sys.stderr)
    return 0 if command in ("--version", "-h", "--help") else cli.USAGE_ERROR


if __name__ == "__main__":
    sys.exit(main())
