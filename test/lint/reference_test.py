"""docs/python-reference.md has every public name of the package."""

import importlib
import pathlib
import re

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
