"""``python -m farandole.compat script.py [args]``: see :mod:`farandole.compat`."""

from __future__ import annotations

import os
import runpy
import sys

from farandole import compat

_USAGE = """usage: python -m farandole.compat SCRIPT [ARGUMENT ...]
       python -m farandole.compat -m MODULE [ARGUMENT ...]
       python -m farandole.compat --path

Runs a script that imports horovod.torch on Farandole. --path prints the folder to put on PYTHONPATH."""


def main(arguments: list[str]) -> int:
    """Runs what the command line names; its exit status where that ends without one."""
    if arguments == ["--path"]:
        print(compat.path())
        return 0
    is_module = arguments[:1] == ["-m"]
    target = arguments[is_module : is_module + 1]
    if not target or target[0].startswith("-"):
        is_asked = arguments in (["-h"], ["--help"])
        print(_USAGE, file=sys.stdout if is_asked else sys.stderr)
        return 0 if is_asked else 2
    compat.activate()
    sys.argv = arguments[is_module:]
    if is_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(target[0], run_name="__main__", alter_sys=True)
        return 0
    if not os.path.exists(target[0]):
        print(f"python -m farandole.compat: there is no file {target[0]!r}", file=sys.stderr)
        return 2
    sys.path.insert(0, os.path.dirname(os.path.abspath(target[0])))
    runpy.run_path(target[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
