"""docs/python-reference.md is what the generator makes of the installed package's docstrings."""

import pathlib
import runpy

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_the_page_is_what_the_docstrings_give():
    generator = runpy.run_path(str(ROOT / "docs" / "make_python_reference.py"))
    is_current = generator["PAGE"].read_text() == generator["make_page"]()
    assert is_current, "run python docs/make_python_reference.py"
