"""Sphinx: these documents as one static site, with the reference of C and C++ by Doxygen. `bash docs/build.sh`."""

import pathlib
import re
from typing import Any

import tomllib

DOCS = pathlib.Path(__file__).resolve().parent

project = "Farandole"
release = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]["version"]
extensions = ["myst_parser", "breathe"]
html_theme = "furo"
html_title = f"Farandole {release}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_show_copyright = False

myst_heading_anchors = 4  # as forges make them
breathe_default_project = "farandole"
breathe_show_include = False
breathe_domain_by_file_pattern = {"*/farandole.h": "c"}
# Headers share a namespace; C has a name for an enum and one for its type.
suppress_warnings = ["duplicate_declaration.c", "duplicate_declaration.cpp"]


def name_files_of_the_repository(app: Any, page: str, source: list[str]) -> None:
    """Links out of this folder lead into the repository, which the site does not hold."""
    source[0] = re.sub(r"\[`?([^\]]*?)`?\]\(\.\./([^)#]*)[^)]*\)", r"`\2`", source[0])


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", name_files_of_the_repository)
