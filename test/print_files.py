"""Prints under which torch farandole runs here and the SHA-256 of its compiled files.

    python test/print_files.py FILE    writes the sums to FILE, too, to be compared with another run's
"""

import hashlib
import pathlib
import platform
import sys

import numpy
import torch

import farandole.torch


def main() -> None:
    """Prints to stdout; ``farandole.torch`` has been imported, so that the files do load."""
    folder = pathlib.Path(farandole.__file__).resolve().parent
    lines = [
        f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}"
        for file in sorted(folder.glob("*.so*"))
    ]
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"NumPy {numpy.__version__}, {folder}:"
    )
    print("\n".join(lines))
    if not lines:
        sys.exit(f"{folder} holds no compiled file")
    if len(sys.argv) > 1:
        pathlib.Path(sys.argv[1]).write_text("\n".join(lines) + "\n", encoding="ascii")


if __name__ == "__main__":
    main()
