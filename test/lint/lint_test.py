"""The repository keeps the house rules, and each rule refuses a small bad sample."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

import rules

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("FARANDOLE_TEST_BUILD_DIR", ROOT / "build" / "release"))

# rule -> (a sample it must refuse, a sample next to it that is fine)
SAMPLES = {
    rules.layering: [
        ({"core/a.cc": '#include "ops/data_plane.h"\n'}, {"ops/a.cc": '#include "core/status.h"\n'}),
        ({"ops/a.h": '#include "../core/b.h"\n'}, {"test/a.cc": '#include "bindings/c/farandole.h"\n'}),
        ({"bindings/a.cc": '#include "test/fake.h"\n'}, {"core/a.cc": '#include <vector>\n'}),
        (
            {"coordinator/protocol/a.cc": '#include "coordinator/engine/engine.h"\n'},
            {"coordinator/engine/a.cc": '#include "coordinator/protocol/limits.h"\n'},
        ),
        ({"ops/data_plane.h": '#include "ops/cpu/batch.h"\n'}, {"ops/cpu/a.cc": '#include "ops/device.h"\n'}),
        ({"ops/cpu/a.cc": '#include "ops/shm/plane.h"\n'}, {"ops/shm/a.cc": '#include "ops/cpu/batch.h"\n'}),
        ({"ops/p2p/a.cc": '#include "ops/shm/plane.h"\n'}, {"ops/p2p/a.cc": '#include "ops/p2p/plane.h"\n'}),
        ({"ops/p2p/a.cc": '#include "ops/p2p/mpi/link.h"\n'}, {"ops/p2p/mpi/a.cc": '#include "ops/p2p/link.h"\n'}),
        ({"ops/new/a.cc": '#include "ops/device.h"\n'}, {"ops/new/a.cc": '#include "ops/new/b.h"\n'}),
        (
            {"ops/gpu/plane.cc": '#include "ops/gpu/nccl/backend.h"\n'},
            {"ops/gpu/nccl/a.cc": '#include "ops/gpu/backend.h"\n'},
        ),
    ],
    rules.import_cycles: [
        (
            {
                "bindings/python/farandole/a.py": "from farandole import b\n",
                "bindings/python/farandole/b.py": "def f():\n    import farandole.a\n",
            },
            {
                "bindings/python/farandole/__init__.py": "from farandole import a\nfrom farandole.a import x\n",
                "bindings/python/farandole/_c.pyi": "from farandole.b import X\n",
                "bindings/python/farandole/a.py": "from farandole import _c, b\n",
                "bindings/python/farandole/b.py": "if TYPE_CHECKING:\n    from farandole.a import X\n",
            },
        ),
    ],
    rules.arrows: [
        (
            {"core/a.h": "", "core/b.h": '#include "core/a.h"\n', "core/a.cc": '#include "core/b.h"\n'},
            {"core/a.h": "", "core/b.h": "", "core/a.cc": '#include "core/a.h"\n#include "core/b.h"\n'},
        ),
    ],
    rules.environment: [
        ({"ops/a.cc": 'auto x = std::getenv("X");\n'}, {"core/config.cc": 'std::getenv("X");\n'}),
        ({"core/a.cc": "for (char** e = environ; *e; ++e) {\n"}, {"ops/a.cc": "// getenv(x)\n"}),
    ],
    rules.threads: [
        ({"ops/a.cc": "std::thread t(f);\n"}, {"coordinator/engine/progress_thread.cc": "std::thread t(f);\n"}),
        ({"core/a.cc": "pthread_create(&t, 0, f, 0);\n"}, {"ops/a.cc": "std::thread::id id;\n"}),
        ({"bindings/a.cc": "std::jthread t(f);\n"}, {"test/unit/a.cc": "std::thread t(f);\n"}),
    ],
    rules.backend_conditionals: [
        ({"core/a.cc": "#if HAVE_CUDA\n"}, {"core/a.cc": "#if defined(__GNUC__)\n"}),
        ({"ops/a.h": "#ifdef FARANDOLE_WITH_MPI\n"}, {"ops/a.h": "#ifdef __cplusplus\n"}),
    ],
    rules.machine_paths: [
        ({"docs/a.md": "see /home/" + "anna/x\n"}, {"docs/a.md": "see /usr/lib/x and ~/x\n"}),
        ({"test/run.sh": "cd /work" + "/x\n"}, {"test/run.sh": 'cd "$repository/work/x"\n'}),
    ],
    rules.words: [
        ({"core/a.h": "// Takes the " + "baton.\n"}, {"core/a.h": "// Takes the engine lock.\n"}),
        ({"docs/a.md": "a call under" + " way\n"}, {"test/a.h": "// a call under" + " way\n"}),
        ({"core/a.h": "// gives it" + " back\n"}, {"core/a.h": "// reads it back\n"}),
        ({"core/a.h": "int64_t Rounds" + "Over();\n"}, {"core/a.h": "// Over MPI.\n"}),
        ({"docs/a.md": "members of a" + " key\n"}, {"docs/a.md": "members of the key's set\n"}),
    ],
    rules.sizes: [
        ({"core/a.cc": "int x;\n" * 801}, {"core/a.cc": "int x;\n" * 800}),
        ({"test/a.py": "x = 1\n" * 900}, {"core/a.cc": "// One file: a table.\n" + "int x;\n" * 900}),
    ],
    rules.reasons: [({"core/a.h": "#pragma once\n"}, {"core/a.h": "// Why.\n#pragma once\n"})],
    rules.columns: [
        ({"docs/a.md": "| " + "x" * 119 + "\n"}, {"docs/a.md": "x" * 120 + "\n", "core/a.cc": "x" * 121}),
        ({"a/README.md": "```\n" + "x" * 121 + "\n```\n"}, {"README.md": "[a](https://" + "x" * 120 + ")\n"}),
    ],
    rules.links: [
        ({"docs/a.md": "[b](b.md)\n"}, {"docs/a.md": "[b](b.md) [c](../core/)\n", "docs/b.md": "", "core/x": ""}),
        ({"a.md": "[b](b.md#two)", "b.md": "# One\n"}, {"a.md": "[b](b.md#a-bs-one)", "b.md": "## A `b`'s one\n"}),
        ({"a.md": "[b](#two)\n```\n# two\n```\n"}, {"a.md": "# Two\n[b](#two) `[c](d.md)` [e](https://e.md)\n"}),
    ],
    rules.snippets: [
        ({"a.md": "```python\nx = (\n```\n"}, {"a.md": "```python\nx = ()\n```\n```\nx = (\n```\n"}),
        ({"a.md": "```bash\nif true\n```\n"}, {"a.md": "```bash\npython a.py  # it's one rank\n```\n"}),
        ({"a.md": "```yaml\na: {b\n```\n"}, {"a.md": "```yaml\na: {b: 1}\n```\n"}),
        ({"a.md": "```json\n{a: 1}\n```\n"}, {"a.md": '```json\n{"a": 1}\n```\n'}),
    ],
    rules.labels: [
        ({"a.md": "ctest -L slow\n"}, {"a.md": "ctest --test-dir b -L unit -j2\n", "CMakeLists.txt": "LABEL unit\n"}),
        (
            {"a.md": '`ctest -L "unit|slow"`\n', "CMakeLists.txt": "LABELS unit\n"},
            {"a.md": "ctest -L lint\n", "CMakeLists.txt": "foreach(folder lint python)\n"},
        ),
    ],
    rules.variables: [
        ({"setup.py": 'x["FARANDOLE_X"]\n'}, {"setup.py": 'x["FARANDOLE_X"]\n', "docs/settings.md": "`FARANDOLE_X`"}),
        ({"test/a.sh": "${FARANDOLE_X:-1}\n"}, {"test/a.py": '"FARANDOLE_X"\n', "a.sh": "$FARANDOLE_TEST_X\n"}),
    ],
    rules.top_level: [({"src/a.cc": ""}, {"core/a.cc": "", ".clang-format": "", "README.md": ""})],
}


def repository_files() -> list[str]:
    """Tracked files and those that would be: what git does not ignore."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return [name for name in names if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def tree() -> dict[str, str]:
    return {name: (ROOT / name).read_text(errors="replace") for name in repository_files()}


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.__name__)
def test_the_repository_keeps(rule, tree):
    assert rules.findings(tree, [rule]) == []


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.__name__)
def test_the_rule_refuses_its_bad_samples_and_no_others(rule):
    assert SAMPLES[rule], "a rule without a sample could be one that never fails"
    for bad, good in SAMPLES[rule]:
        assert rules.findings(bad, [rule]) != [], bad
        assert rules.findings(good, [rule]) == [], good


def unformatted(paths: list[pathlib.Path]) -> list[str]:
    """The sentences of clang-format about files it would change."""
    command = ["clang-format", "--dry-run", "--Werror", f"--style=file:{ROOT / '.clang-format'}"]
    done = subprocess.run([*command, *map(str, paths)], capture_output=True, text=True)
    return [line for line in done.stderr.splitlines() if "error:" in line] if done.returncode else []


def test_clang_format_would_change_nothing():
    sources = [ROOT / name for name in repository_files() if name.endswith(rules.CODE)]
    assert unformatted(sources) == []


def test_the_format_check_refuses_a_badly_formatted_file(tmp_path):
    bad = tmp_path / "bad.cc"
    bad.write_text("int  f( ){return 1 ;}\n")
    assert unformatted([bad]) != []


def found_by_ruff(*paths: object) -> str:
    pytest.importorskip("ruff")
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format=concise"]
    settings = ["--config", ROOT / "pyproject.toml"]
    done = subprocess.run([*command, *settings, *paths], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout if done.returncode else ""


def test_ruff_finds_nothing():
    assert found_by_ruff(ROOT) == ""


def test_ruff_refuses_a_name_that_is_not_used(tmp_path):
    (tmp_path / "bad.py").write_text("import os\n")
    assert "F401" in found_by_ruff(tmp_path)


def found_by_clang_tidy(paths: list[pathlib.Path], build: pathlib.Path) -> str:
    """Its errors about sources that the build's compile_commands.json knows."""
    if shutil.which("clang-tidy", path=pathlib.Path(sys.executable).parent) is None:
        pytest.skip("clang-tidy is not installed (pip install clang-tidy)")
    if not (build / "compile_commands.json").exists():
        pytest.skip(f"there is no compile_commands.json in {build} (FARANDOLE_TEST_BUILD_DIR)")
    known = {pathlib.Path(one["file"]) for one in json.loads((build / "compile_commands.json").read_text())}
    command = [pathlib.Path(sys.executable).with_name("clang-tidy"), "--quiet", "-p", build,
               f"--config-file={ROOT / '.clang-tidy'}"]  # fmt: skip
    # What GCC alone knows of its options is no finding.
    command.append("--extra-arg=-Wno-unknown-warning-option")
    checked = [path for path in paths if path in known]
    done = subprocess.run([*command, *checked], capture_output=True, text=True) if checked else None
    return "\n".join(line for line in done.stdout.splitlines() if " error: " in line) if done else ""


def product_sources(*names: str) -> list[pathlib.Path]:
    folders = ("core/", "coordinator/", "ops/", "bindings/")
    return [ROOT / name for name in names if name.startswith(folders) and name.endswith(".cc")]


def test_clang_tidy_finds_nothing_in_what_has_changed():
    """All of it takes a minute and a half: ``FARANDOLE_TEST_TIDY=all pytest test/lint -k clang_tidy``."""
    names = repository_files()
    if os.environ.get("FARANDOLE_TEST_TIDY") != "all":
        command = ["git", "-C", str(ROOT), "diff", "--name-only", "--relative", "HEAD~1"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip("there is no commit before this one")
        names = [name for name in done.stdout.splitlines() if (ROOT / name).is_file()]
    assert found_by_clang_tidy(product_sources(*names), BUILD) == ""


def test_clang_tidy_refuses_a_use_after_a_move(tmp_path):
    bad = tmp_path / "bad.cc"
    bad.write_text("#include <string>\n#include <utility>\nstd::string f(std::string a) "
                   "{ std::string b = std::move(a); return a + b; }\n")  # fmt: skip
    commands = [{"directory": str(tmp_path), "file": str(bad), "command": f"c++ -std=c++20 -c {bad}"}]
    (tmp_path / "compile_commands.json").write_text(json.dumps(commands))
    assert "bugprone-use-after-move" in found_by_clang_tidy([bad], tmp_path)
