"""Runs checks on ranks that are processes, with a framework that takes seconds to start: many checks for one start."""

import importlib
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import traceback

from ranks import GUARD_S, environment, free_port


def run(size, checks, *names, **variables):
    """What each rank says of the checks of a module, given by its name or itself, with these names, or of all: by name,
    by rank, "" if it went well, else the error. A rank that ended early says nothing of the rest."""
    module = checks if isinstance(checks, str) else checks.__name__
    with tempfile.TemporaryDirectory() as folder:
        given = environment(
            FARANDOLE_SIZE=str(size), FARANDOLE_ADDRESS=f"127.0.0.1:{free_port()}",
            JAX_PLATFORMS="cpu", TF_CPP_MIN_LOG_LEVEL="2", CUDA_VISIBLE_DEVICES="", **variables,
        )  # fmt: skip
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, folder, module, *names], env=given | {"FARANDOLE_RANK": str(rank)},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for rank in range(size)
        ]  # fmt: skip
        try:
            outputs = [rank.communicate(timeout=GUARD_S)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        files = [pathlib.Path(folder, str(rank)) for rank in range(size)]
        told = [dict(map(json.loads, file.read_text().splitlines())) if file.exists() else {} for file in files]
    silent = [f"rank {rank} said nothing: {output[-2000:]}" for rank, output in enumerate(outputs)]
    results = {name: [one.get(name, silent[r]) for r, one in enumerate(told)] for one in told for name in one}
    assert results, outputs
    codes = [rank.returncode for rank in ranks]
    for said in results.values():
        if not any(said) and any(codes):
            said[0] = f"exit codes {codes}: {outputs}"
    return results


def missing(*modules):
    """Those that are not installed; ModuleNotFoundError where all have to be (FARANDOLE_TEST_FRAMEWORKS)."""
    names = [name for name in modules if importlib.util.find_spec(name) is None]
    if names and "FARANDOLE_TEST_FRAMEWORKS" in os.environ:
        raise ModuleNotFoundError(f"not installed: {names}")
    return names


def skip_without(*modules):
    """Skips a test, or a module of them, likewise."""
    import pytest

    if missing(*modules):
        pytest.skip(f"not installed: {missing(*modules)}", allow_module_level=True)


def names_of(*modules):
    """Of their checks, in order."""
    return [name for module in modules for name in vars(module) if name.startswith("check_")]


def raises(kinds, text, function, *given, **named):
    """Whether a function says what is wrong, a regular expression."""
    try:
        function(*given, **named)
    except kinds as error:
        assert re.search(text, str(error)), f"{error} does not say {text!r}"
    else:
        raise AssertionError(f"no error: expected {text!r}")


def main(folder, module, *names):
    """One rank."""
    import farandole

    farandole.init()
    rank, size = farandole.rank(), farandole.size()
    checks = importlib.import_module(module)
    with open(pathlib.Path(folder, str(rank)), "w") as file:
        for name in names or names_of(checks):
            try:
                getattr(checks, name)(rank, size)
                text = ""
            except BaseException:
                text = traceback.format_exc()
            print(json.dumps([name, text]), file=file, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
