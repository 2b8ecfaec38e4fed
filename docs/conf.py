"""Sphinx: these documents as one site; the references are by autodoc and Doxygen. `bash docs/build.sh`."""

import pathlib
import re
from typing import Any

import tomllib

DOCS = pathlib.Path(__file__).resolve().parent

project = "Farandole"
release = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]["version"]
extensions = ["myst_parser", "breathe", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"Farandole {release}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_show_copyright = False

highlight_language = "none"  # of code blocks that name no language
myst_heading_anchors = 4  # as forges make them
autodoc_default_options = {"show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_use_rtype = False
breathe_default_project = "farandole"
breathe_show_include = False
breathe_domain_by_file_pattern = {"*/farandole.h": "c"}
# Headers share a namespace; C has a name for an enum and one for its type.
suppress_warnings = ["duplicate_declaration.c", "duplicate_declaration.cpp"]


def adapt_links(app: Any, page: str, source: list[str]) -> None:
    """Links out of this folder become names of files; those with a document's name as text get its title."""
    source[0] = re.sub(r"\[`?([^\]]*?)`?\]\(\.\./([^)#]*)[^)]*\)", r"`\2`", source[0])
    source[0] = re.sub(r"\[[\w-]+\.md\]\((?=[\w-]+\.md)", "[](", source[0])


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", adapt_links)
