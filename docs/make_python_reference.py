"""Writes docs/python-reference.md from the docstrings of the installed package.

python docs/make_python_reference.py
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pathlib
import re
import textwrap
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import farandole

PAGE = pathlib.Path(__file__).with_name("python-reference.md")
MODULES = ["farandole", "farandole.torch", "farandole.torch.elastic", "farandole.runner"]
HEAD = """# Python reference

The public names of the Python package, by module, with their docstrings. To change a text, change the docstring and run
`python docs/make_python_reference.py`, which writes this page; a test compares. [horovod.md](horovod.md) says what
differs from Horovod, [settings.md](settings.md) lists the environment variables, and
[troubleshooting.md](troubleshooting.md) explains messages.
"""
SECTIONS = {
    "Args": "Arguments", "Attributes": "Attributes", "Returns": "Returns", "Raises": "Raises",
}  # fmt: skip
WIDTH = 116

Definition = ast.FunctionDef | ast.ClassDef


def definition_of(thing: Any) -> Definition:
    """The source of a function or a class; of one of the extension what its stub says.

    A variant of a collective has the source of what describes that, but for the first argument and the
    result.
    """
    source = inspect.unwrap(thing)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(source)))
    except (OSError, TypeError):
        stub = pathlib.Path(farandole.__file__).with_name("_core.pyi").read_text()
        tree = ast.parse(stub)
    name = source.__name__
    found = [node for node in tree.body if isinstance(node, Definition) and node.name == name]
    definition = found[-1]
    if source is not thing and isinstance(definition, ast.FunctionDef):
        first, result = list(thing.__annotations__.items())[:: len(thing.__annotations__) - 1]
        annotation, definition.returns = (
            ast.parse(each[1], mode="eval").body for each in (first, result)
        )
        definition.args.args[0] = ast.arg(first[0], annotation)
    return definition


def signature_of(name: str, function: ast.FunctionDef, is_method: bool) -> str:
    """``name(...) -> ...`` as the source has it, on one line or a parameter on each."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    missing: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    words = [
        parameter_of(parameter, default)
        for parameter, default in zip(positional, [*missing, *arguments.defaults], strict=True)
    ][is_method:]
    if arguments.vararg or arguments.kwonlyargs:
        words.append("*" + (parameter_of(arguments.vararg) if arguments.vararg else ""))
    words += map(parameter_of, arguments.kwonlyargs, arguments.kw_defaults)
    if arguments.kwarg:
        words.append("**" + parameter_of(arguments.kwarg))
    result = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    line = f"{name}({', '.join(words)}){result}"
    if len(line) <= WIDTH:
        return line
    return f"{name}(\n" + "".join(f"    {word},\n" for word in words) + f"){result}"


def parameter_of(parameter: ast.arg, default: ast.expr | None = None) -> str:
    """``name: annotation = default``."""
    annotation = f": {ast.unparse(parameter.annotation)}" if parameter.annotation else ""
    if default is None:
        return parameter.arg + annotation
    equals = " = " if annotation else "="
    return parameter.arg + annotation + equals + ast.unparse(default)


def fence_code(text: str) -> str:
    """Indented blocks as fenced ones, which name their language."""
    block = re.compile(r"(?<=\n\n)(?:    .*\n?|\n(?=    ))+")
    return block.sub(lambda found: f"```python\n{textwrap.dedent(found[0]).rstrip()}\n```\n", text)


def to_markdown(docstring: str) -> str:
    """A Google docstring with its sections as lists."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", inspect.cleandoc(docstring)).replace("``", "`")
    blocks = re.split(rf"^({'|'.join(SECTIONS)}):\n((?:    .*\n?|\n(?=    ))+)", text, flags=re.M)
    lines = [fence_code(blocks[0]).strip()]
    for kind, body, rest in zip(blocks[1::3], blocks[2::3], blocks[3::3], strict=True):
        body = textwrap.dedent(body).strip()
        if kind != "Returns":
            items = re.split(r"\n(?! )", body)
            body = "\n".join("- " + re.sub(r"^([^:\n]+):", r"`\1`:", item) for item in items)
            body = re.sub(r"\n +", "\n  ", body)
        lines += [f"**{SECTIONS[kind]}**", body, rest.strip()]
    return "\n\n".join(filter(None, lines))


def describe(name: str, thing: Any, depth: int = 3) -> Iterator[str]:
    """A heading, the signature and the docstring; of a class also its public methods."""
    yield f"{'#' * depth} {name}"
    if not callable(thing):
        yield to_markdown(thing.__doc__ or "")
        return
    definition = definition_of(thing)
    if isinstance(definition, ast.FunctionDef):
        yield f"```python\n{signature_of(name, definition, False)}\n```"
        yield to_markdown(thing.__doc__ or "")
        return
    functions = [node for node in definition.body if isinstance(node, ast.FunctionDef)]
    for function in functions:
        if function.name == "__init__":
            yield f"```python\n{signature_of(name, function, True)}\n```"
    yield to_markdown(ast.get_docstring(definition) or "")
    choices = [(n, value) for n, value in vars(thing).items() if isinstance(value, type)]
    yield "\n".join(f"- `{name}.{n}`: {value.__doc__}" for n, value in choices)
    for function in functions:
        if not function.name.startswith("_") and ast.get_docstring(function):
            yield from describe_method(name, function)


def describe_method(owner: str, function: ast.FunctionDef) -> Iterator[str]:
    """A method's signature and docstring, or those of a property."""
    is_property = any(ast.unparse(one) == "property" for one in function.decorator_list)
    name = f"{owner}.{function.name}"
    yield f"```python\n{name if is_property else signature_of(name, function, True)}\n```"
    yield to_markdown(ast.get_docstring(function) or "")


def describe_module(module: ModuleType) -> Iterator[str]:
    """The names of ``__all__``; those that ``farandole`` has, too, are only listed."""
    yield f"## {module.__name__}"
    yield to_markdown(module.__doc__ or "")
    things = {name: getattr(module, name) for name in sorted(module.__all__)}
    shared = [n for n, thing in things.items() if getattr(farandole, n, None) is thing]
    if module is farandole:
        shared = []
    if shared:
        names = ", ".join(f"`{name}`" for name in shared)
        yield "\n".join(
            textwrap.wrap(f"As in `farandole`: {names}.", WIDTH, break_on_hyphens=False)
        )
    numbers = [
        f"`{n}` = {thing}"
        for n, thing in things.items()
        if isinstance(thing, int) and n not in shared
    ]
    if numbers:
        yield "Numbers of the reduce operations: " + ", ".join(numbers) + "."
    for name, thing in things.items():
        if name not in shared and not isinstance(thing, (int, ModuleType)):
            yield from describe(name, thing)


def make_page() -> str:
    """The whole page."""
    parts = [HEAD.strip()]
    for name in MODULES:
        parts += describe_module(importlib.import_module(name))
    return "\n\n".join(filter(None, parts)) + "\n"


if __name__ == "__main__":
    PAGE.write_text(make_page())
