"""What the documents show is there: public names, tests that are named, drawings."""

import importlib
import pathlib
import re
import runpy

import pytest

import farandole

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "python-reference.md"


@pytest.mark.parametrize("name", ["farandole", "farandole.torch", "farandole.torch.elastic", "farandole.runner"])
def test_every_public_name_is_on_the_page_once(name):
    module = importlib.import_module(name)
    public = {one for one in module.__all__ if not isinstance(getattr(module, one), (int, type(module)))}
    if module is not farandole:  # the page says that the others are there, too
        public -= {one for one in public if getattr(farandole, one, None) is getattr(module, one)}
    directive = re.search(rf"automodule:: {name}\n   :members: ([^`]+)", PAGE.read_text())[1]
    listed = re.split(r",\s+", directive.strip())
    assert sorted(listed) == sorted(public - {"Handle"})


def test_the_tests_that_reliability_names_are_there():
    root = PAGE.parents[1]
    text = (root / "docs" / "reliability.md").read_text()
    python, compiled = (set(re.findall(pattern, text)) for pattern in (r"`(test_\w+)::(\w+)`", r"`([A-Z]\w+)\.(\w+)`"))
    files = {file.stem: file.read_text() for file in (root / "test" / "python").rglob("test_*.py")}
    files_of_cases = [*(root / "test").rglob("*_test.cc"), *(root / "test" / "unit").rglob("*.txt")]
    sources = "".join(file.read_text() for file in files_of_cases)
    assert len(python) > 30 and len(compiled) > 5
    assert [one for one in python if f"def {one[1]}(" not in files.get(one[0], "")] == []
    assert [one for one in compiled if not re.search(rf"TEST\w*\({one[0]}, {one[1]}\)|## {one[1]}\b", sources)] == []


def test_the_drawings_are_those_that_their_script_makes_of_the_figures_on_the_page():
    drawings = runpy.run_path(str(PAGE.with_name("drawings.py")))["DRAWINGS"]
    assert [name for name, draw in drawings.items() if PAGE.with_name(name).read_text() != draw()] == []
    pages = "".join(page.read_text() for page in [*PAGE.parent.glob("*.md"), PAGE.parents[1] / "README.md"])
    assert [name for name in drawings if name not in pages] == []
