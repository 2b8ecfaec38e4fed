"""Where this installation's C++ parts are: ``python -m farandole.config --cmake-prefix``.

For building C and C++ programs against the package that pip installed. Loads no library.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence

#: The prefix under which ``include`` and ``lib/cmake/Farandole`` stand; beside this file.
PREFIX = pathlib.Path(__file__).resolve().parent


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the one path that was asked for; a wrong question ends with exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m farandole.config", description=__doc__)
    group = parser.add_mutually_exclusive_group(required=True)
    for name, path, purpose in [
        ("cmake-prefix", PREFIX, "for CMAKE_PREFIX_PATH: find_package(Farandole)"),
        ("pkg-config-path", PREFIX / "lib" / "pkgconfig", "for PKG_CONFIG_PATH"),
        ("include", PREFIX / "include", "the headers' directory: #include <farandole/context.h>"),
        ("library", PREFIX / "libfarandole.so.1", "the library itself"),
    ]:
        group.add_argument(f"--{name}", dest="path", action="store_const", const=path, help=purpose)
    print(parser.parse_args(arguments).path)


if __name__ == "__main__":
    main()
