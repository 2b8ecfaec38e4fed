"""Runs scripts that were written for Horovod, unchanged.

``horovod`` is a package in a folder of its own, which is never installed at top level. Three ways put
that folder first on the path of Python's modules:

    python -m farandole.compat train.py --epochs 3
    python -m farandole.compat -m my.training --epochs 3
    PYTHONPATH=$(python -m farandole.compat --path):$PYTHONPATH python train.py

and ``horovodrun``, or ``farandolerun --horovod``, does so for all ranks. Where Horovod and ``farandole.torch`` answer
differently, the package ``horovod`` answers as Horovod; docs/migrating.md has the list.
"""

from __future__ import annotations

import os
import pathlib
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


def activate() -> None:
    """Makes ``import horovod`` give the package here, in this process and in those it starts."""
    if path() not in sys.path:
        sys.path.insert(0, path())
    add_to(os.environ)
