#!/usr/bin/env python3
"""Seeds faults in the product and shows which tests find them: ``test/mutate.py --count 20 --seed 7``

Draws a line of all lines of code of FOLDERS, then one of the places in it that fit an operator. Each fault is compiled
and tested with what ``test/quick`` runs for its file, without lint, up to the first failure; then the file is
as it was. One that does not compile is replaced by the next. Faults in Python come first, for they need the
libraries without a fault; an interrupted run may leave one in build/: the next build mends that.
"""

import argparse
import collections
import contextlib
import importlib.machinery
import importlib.util
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.dont_write_bytecode = True
loader = importlib.machinery.SourceFileLoader("quick", str(ROOT / "test" / "quick"))
quick: Any = importlib.util.module_from_spec(importlib.util.spec_from_loader("quick", loader))  # type: ignore[arg-type]
loader.exec_module(quick)

FOLDERS = ["core", "ops", "coordinator", "bindings/c", "bindings/python"]
CPP = (".cc", ".h")
BUILD_S, TEST_S = 900, 300  # on a loaded machine, too, only a loop without end takes longer
PASSED_OVER = re.compile(r"^\s*(#|using |template|static_assert|import |from |@)|\bLog\w*\(|\bwarn\w*\(|\bassert\b")
CPP_TEXT = re.compile(r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<!\w)\'(?:\\.|[^\'\\\n])+\'', re.S)
PYTHON_TEXT = re.compile(r'#[^\n]*|[rbf]{0,2}(?:(""").*?\1|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\')', re.S)
#: Comments and strings: each character is one of Unicode's private ones, from this one, which says its column.
HIDDEN = 0xE000


def swap(*words: str) -> Callable[[re.Match[str]], str]:
    """Of pairs of words: the other one of the word that was found."""
    table = dict(zip(words[::2], words[1::2])) | dict(zip(words[1::2], words[::2]))
    return lambda found: table[found[0]]


def other_value(found: re.Match[str]) -> str:
    """Another value to return: the opposite truth, the next number, or none."""
    word, value, end = found.groups()
    values = {"true": "false", "false": "true", "True": "False", "False": "True"}
    other = values.get(value) or (f"{value} + 1" if value.isdigit() else "{}" if end else "None")
    return f"{word}{other}{end}"


ALL = (*CPP, ".py")
CALL = r"[\w.:\->\[\]*]+\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"  # brackets three deep
#: (kind, pattern of a place, what to write there, suffixes of files)
OPERATORS: list[tuple[str, str, Callable[[re.Match[str]], str], str | tuple[str, ...]]] = [
    ("comparison", r"(?<= )(<=|>=|<|>|==|!=)(?= )", swap("<", "<=", ">", ">=", "==", "!="), ALL),
    ("comparison", r"(?<= )(is not|is|not in)(?= )", swap("is", "is not", "not in", "in"), ".py"),
    ("arithmetic", r"(?<= )[-+](?= )", swap("+", "-"), ALL),
    ("condition", r"(?<=if \()[^;]+(?=\) (?:\{|return|continue|break))", lambda found: f"!({found[0]})", CPP),
    ("condition", r"(?<=if )(?!.* else ).+(?=:$)", lambda found: f"not ({found[0]})", ".py"),
    ("constant", r"(?<![\w.])[01](?![\w.])", swap("0", "1"), ALL),
    ("constant", r"\b([tT]rue|[fF]alse)\b", swap("true", "false", "True", "False"), ALL),
    ("statement", rf"^(\s*)(?!return|throw|delete){CALL};$", lambda found: f"{found[1]};", CPP),
    ("statement", r"^(\s*)[\w.\->\[\]*]+ [-+|&]?= .*;$", lambda found: f"{found[1]};", CPP),
    ("statement", rf"^(\s+){CALL}$", lambda found: f"{found[1]}pass", ".py"),
    ("statement", r"^(\s+)[\w.]+\.\w+ [-+]?= .*[\w)\]]$", lambda found: f"{found[1]}pass", ".py"),
    ("logic", r"(?<= )(&&|\|\||and|or)(?= )", swap("&&", "||", "and", "or"), ALL),
    ("return", r"(return )([^;{}]+)(;)", other_value, CPP),
    ("return", r"(return )(.*[^(\[{,])()$", other_value, ".py"),
]


class Fault(NamedTuple):
    path: str
    line: int
    kind: str
    before: str
    after: str


class Outcome(Exception):
    """What became of a fault, and by which test; the first command that fails raises it."""


def hide(line: str) -> str:
    return "".join(chr(HIDDEN + at) if char == "\0" else char for at, char in enumerate(line))


def lines_of_code(only: str) -> list[tuple[str, int, str, str]]:
    """(path, number from 1, line, line with hidden texts) of the product's files below ``only``."""
    names = subprocess.run(["git", "ls-files", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = []
    for path in filter(lambda path: path.endswith(ALL) and path.startswith(only), names.split()):
        text = (ROOT / path).read_text()
        texts = PYTHON_TEXT if path.endswith(".py") else CPP_TEXT
        code = texts.sub(lambda found: re.sub(r"[^\n]", "\0", found[0]), text)
        found += [(path, number, line, hide(hidden))
                  for number, (line, hidden) in enumerate(zip(text.split("\n"), code.split("\n")), 1)
                  if hidden.strip("\0 ") and not PASSED_OVER.search(hidden)]  # fmt: skip
    return found


def with_fault(text: str, fault: Fault) -> str:
    lines = text.split("\n")
    lines[fault.line - 1] = fault.after
    return "\n".join(lines)


def is_right(fault: Fault) -> bool:
    """Whether it changes something and, in Python, compiles."""
    with contextlib.suppress(SyntaxError):
        if fault.path.endswith(".py"):
            compile(with_fault((ROOT / fault.path).read_text(), fault), fault.path, "exec")
        return fault.after != fault.before
    return False


def faults(lines: list[tuple[str, int, str, str]], draw: random.Random) -> Iterator[Fault]:
    """One of each line that has a place for one, in random order."""
    for path, number, line, hidden in draw.sample(lines, len(lines)):
        places = [(kind, write, found) for kind, pattern, write, suffixes in OPERATORS if path.endswith(suffixes)
                  for found in re.finditer(pattern, hidden)]  # fmt: skip
        if places:
            kind, write, found = draw.choice(places)
            after = hidden[: found.start()] + write(found) + hidden[found.end() :]
            after = "".join(line[ord(char) - HIDDEN] if ord(char) >= HIDDEN else char for char in after)
            yield from filter(is_right, [Fault(path, number, kind, line, after)])


def run(is_python: bool, *command: object, **variables: str) -> bool:
    """Takes the place of ``quick.run``, for a fault: shows nothing, ends at the first failure."""
    words = list(map(str, command))
    is_build = words[0] == "cmake"
    if is_build and is_python:
        return True
    words += ["-x", "--tb=no"] if "pytest" in words else [] if is_build else ["--gtest_fail_fast"]
    with subprocess.Popen(words, cwd=ROOT, env=os.environ | variables, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, start_new_session=True) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=BUILD_S if is_build else TEST_S)
        except subprocess.TimeoutExpired:
            raise Outcome("killed", "the time") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode not in (0, quick.NONE_LEFT):
        test = re.search(r"^(?:\[  FAILED  \]|FAILED|ERROR) (\S+)", output, re.M)
        by = test[1] if test else f"{pathlib.Path(words[0]).name}, exit code {process.returncode}"
        raise Outcome("does not compile" if is_build else "killed", by)
    return True


def outcome(fault: Fault) -> tuple[str, str]:
    """What became of it, and the test that found it."""
    file = ROOT / fault.path
    text = file.read_text()
    quick.run = lambda *command, **variables: run(fault.path.endswith(".py"), *command, **variables)
    quick.has_good_form = lambda paths: True
    try:
        file.write_text(with_fault(text, fault))
        return ("survived", "") if quick.main([str(file)]) == 0 else ("killed", "test/quick")
    except Outcome as found:
        return found.args[0], found.args[1]
    finally:
        file.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20, help="of faults that compile")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--only", default="", help="the beginning of paths, such as core/net/")
    parser.add_argument("--json", type=pathlib.Path, help="a file for the results")
    chosen = parser.parse_args()
    print(f"seed {chosen.seed}", flush=True)
    drawn = faults(lines_of_code(chosen.only), random.Random(chosen.seed))
    waiting = sorted((next(drawn) for _ in range(chosen.count)), key=lambda fault: not fault.path.endswith(".py"))
    results: list[dict[str, object]] = []
    while waiting:
        fault, start_s = waiting.pop(0), time.monotonic()
        what, by = outcome(fault)
        print(f"{what} {by} ({time.monotonic() - start_s:.0f} s)  {fault.path}:{fault.line} {fault.kind}\n"
              f"  - {fault.before.strip()}\n  + {fault.after.strip()}", flush=True)  # fmt: skip
        if what == "does not compile":
            waiting.append(next(fault for fault in drawn if fault.path.endswith(CPP)))
            continue
        results.append({**fault._asdict(), "outcome": what, "by": by})
        if chosen.json:
            chosen.json.write_text(json.dumps({"seed": chosen.seed, "faults": results}, indent=1))
    survivors = collections.Counter(result["kind"] for result in results if result["outcome"] == "survived")
    print(f"{len(results) - survivors.total()} of {len(results)} killed; survived: {dict(survivors)}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    main()
