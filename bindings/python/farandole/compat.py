"""usage: python -m farandole.compat SCRIPT [ARGUMENT ...]
       python -m farandole.compat -m MODULE [ARGUMENT ...]
       python -m farandole.compat --path

Runs a script that imports horovod.torch, horovod.tensorflow or horovod.keras on Farandole. The package
horovod lies in a folder of its own and is never installed at top level; --path prints that folder, for
PYTHONPATH. horovodrun and farandolerun --horovod set it for all ranks. docs/horovod.md lists where the
package behaves as Horovod and farandole.torch does not.
"""

from __future__ import annotations

import os
import pathlib
import runpy
import sys
from collections.abc import MutableMapping


def path() -> str:
    """The folder to put on ``PYTHONPATH``, which holds nothing but the package ``horovod``."""
    return str(pathlib.Path(__file__).parent / "site")


def add_to(environment: MutableMapping[str, str]) -> None:
    """Puts the folder first on the ``PYTHONPATH`` of an environment."""
    inherited = environment.get("PYTHONPATH", "")
    if path() not in inherited.split(os.pathsep):
        environment["PYTHONPATH"] = path() + (os.pathsep + inherited if inherited else "")


def main(arguments: list[str]) -> int:
    """Runs what the command line names; its exit status where that ends without one."""
    if arguments == ["--path"]:
        print(path())
        return 0
    is_module = arguments[:1] == ["-m"]
    target = arguments[is_module : is_module + 1]
    if not target or target[0].startswith("-"):
        is_asked = arguments in (["-h"], ["--help"])
        print(__doc__, file=sys.stdout if is_asked else sys.stderr)
        return 0 if is_asked else 2
    if not is_module and not os.path.exists(target[0]):
        print(f"python -m farandole.compat: there is no file {target[0]!r}", file=sys.stderr)
        return 2
    add_to(os.environ)
    folder = os.getcwd() if is_module else os.path.dirname(os.path.abspath(target[0]))
    sys.path[:0] = [folder, path()]
    sys.argv = arguments[is_module:]
    if is_module:
        runpy.run_module(target[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(target[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
