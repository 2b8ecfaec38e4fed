"""Sphinx: these documents as one site; the references are by autodoc and Doxygen. `bash docs/build.sh`."""

import pathlib
import re
import sys
from typing import Any

import tomllib

DOCS = pathlib.Path(__file__).resolve().parent

project = "Farandole"
release = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]["version"]
extensions = ["myst_parser", "breathe", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
pygments_style = "friendly"  # has colours for the lines of a diff, which the theme's own has not
html_title = f"Farandole {release}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_show_copyright = False

highlight_language = "none"  # of code blocks that name no language
myst_heading_anchors = 4  # as forges make them
sys.path.insert(0, str(DOCS.parent / "bindings" / "python"))
autodoc_mock_imports = ["farandole._core"]  # compiled; nothing here is built
autodoc_default_options = {"show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_use_rtype = False
breathe_default_project = "farandole"
breathe_show_include = False
breathe_domain_by_file_pattern = {"*/farandole.h": "c"}
# Headers share a namespace; C has a name for an enum and one for its type.
suppress_warnings = ["duplicate_declaration.c", "duplicate_declaration.cpp"]


def adapt_page(app: Any, page: str, source: list[str]) -> None:
    """Makes pages that forges show, too, ones of the site.

    A line that is a link to a file out of this folder becomes that file. Of other links to such files those to a file
    that has a page lead there, and the rest become names. Links with a page's name as text get its title. Comments
    with words become entries of the index, which the site's search finds first.
    """
    text = re.sub(r"^\[[^\]]*\]\(\.\./([\w/]+\.\w+)\)$", _file, source[0], flags=re.M)
    text = re.sub(r"\]\(\.\./examples/(\w+)\.py\)", r"](examples.md#\1py)", text)
    text = text.replace("](../SECURITY.md)", "](security.md)")
    text = re.sub(r"\[`?([^\]]*?)`?\]\(\.\./([^)#]*)[^)]*\)", r"`\2`", text)
    text = re.sub(r"\[[\w-]+\.md\]\((?=[\w-]+\.md)", "[](", text)
    source[0] = re.sub(r"^<!-- search: (.*) -->$", _index, text, flags=re.M)


def _file(link: re.Match[str]) -> str:
    if not link[1].endswith(".md"):
        return f"```{{literalinclude}} ../{link[1]}\n:language: python\n```"
    text = (DOCS.parent / link[1]).read_text().partition("\n## Read on\n")[0]  # README.md's list of pages
    return re.sub(r"\]\((?!https?:|#)(docs/)?", lambda to: "](" if to[1] else "](../", text)


def _index(words: re.Match[str]) -> str:
    # An entry that is a main one ("!") comes before all titles in the site's search.
    return "```{index} " + ", ".join(f"! {word}" for word in words[1].split(", ")) + "\n```"


def adapt_docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Indented lines after a paragraph are code in docstrings of this package; to reStructuredText a quotation."""
    if str(getattr(obj, "__module__", name)).startswith("farandole"):
        code = r"\1\n.. code-block:: python\n\n"
        text = re.sub(r"^([^\s:.].*[^\s:]\n)\n(?= {4}\S)", code, "\n".join(lines), flags=re.M)
        lines[:] = text.split("\n")


def adapt_signature(
    app: Any, what: str, name: str, obj: Any, options: Any, arguments: str | None, returned: str | None
) -> tuple[str, str] | None:
    """Calls the class of handles by its public name."""
    if arguments is None:
        return None
    public = [(text or "").replace("farandole._core.Work", "farandole.Handle") for text in (arguments, returned)]
    return public[0], public[1]


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", adapt_page)
    app.connect("autodoc-process-docstring", adapt_docstring)
    app.connect("autodoc-process-signature", adapt_signature)
