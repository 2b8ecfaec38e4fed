"""The house rules that a machine can check. Each rule gives one finding per offence.

A rule takes the tree as {path: text}, so that `lint_test.py` can show it a small bad sample.
"""

import ast
import json
import posixpath
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath

import yaml

Tree = Mapping[str, str]

LAYERS = ["core", "ops", "coordinator", "bindings", "examples"]
#: Inside a layer, likewise from the left: folders of one set do not include from one another. "" is
#: the layer's own folder; a new folder may be used once it is listed. In `ops` these are the
#: interfaces of planes and devices, what the CPU planes share, and the planes; in `ops/gpu` the plane
#: with the interface of its backends, and the backends; in `ops/p2p` the plane, and its links.
INNER_LAYERS = {
    "coordinator": [
        {"protocol", "membership"}, {"control"}, {"liveness"}, {"engine"}, {"diagnosis", "gradients"}, {"job"},
    ],
    "ops": [{""}, {"cpu"}, {"shm", "p2p", "hierarchical", "gpu"}],
    "ops/gpu": [{""}, {"cuda", "nccl"}],
    "ops/p2p": [{""}, {"mpi", "tcp"}],
}
LEVELLED = (
    "core/", "coordinator/protocol/", "coordinator/membership/", "coordinator/control/", "coordinator/diagnosis/"
)  # fmt: skip
TOP_LEVEL = {
    "CMakeLists.txt", "core", "coordinator", "ops", "bindings", "examples", "test", "setup.py",
    "README.md", "pyproject.toml", "LICENSE", "CHANGELOG.md", "docs", "findings",
    "CMakePresets.json", "MANIFEST.in", "cmake", "CONTRIBUTING.md", "SECURITY.md", "CITATION.cff",
}
MAX_LINES = 800
CODE = (".h", ".cc", ".cu", ".cuh")
TEXT = (*CODE, ".py", ".pyi", ".md", ".txt", ".cmake", ".sh", ".toml", ".proto", ".map")
MACHINE_PATH = re.compile(r"(?<![\w./-])/(?:work|home/\w+|root|Users/\w+)/[\w.]")


def lines_of(tree: Tree, suffixes: tuple[str, ...] = CODE) -> Iterator[tuple[str, int, str]]:
    """Yields (path, line number from 1, line) of every file with one of the suffixes."""
    for path, text in sorted(tree.items()):
        if path.endswith(suffixes):
            for number, line in enumerate(text.splitlines(), 1):
                yield path, number, line


def folder(path: str) -> str:
    """The top-level folder of a path, or "" for a file at the top."""
    parts = PurePosixPath(path).parts
    return parts[0] if len(parts) > 1 else ""


def inner_folder(path: str, layer: str) -> str:
    """The folder below that of a layer, or "" for a file directly in it."""
    parts = PurePosixPath(path).relative_to(layer).parts
    return parts[0] if len(parts) > 1 else ""


def without_comments(line: str) -> str:
    """Drops `//` comments and string contents; good enough for this code, which has few of both."""
    return re.sub(r"//.*", "", re.sub(r'"(?:\\.|[^"\\])*"', '""', line))


def may_include(layer: str, own: str, other: str) -> bool:
    """Whether folder `own` of a layer may include from its folder `other`; see INNER_LAYERS."""
    level = {name: at for at, names in enumerate(INNER_LAYERS[layer]) for name in names}
    if own == other:
        return True
    return own in level and other in level and level[other] < level[own]


def layering(tree: Tree) -> Iterator[str]:
    """A folder includes only from its left: core < ops < coordinator < bindings < examples.

    Inside coordinator and ops likewise, by INNER_LAYERS.
    """
    include = re.compile(r'^\s*#\s*include\s+["<]([\w./-]+)[">]')
    for path, number, line in lines_of(tree):
        found = include.match(line)
        if not found or folder(path) not in LAYERS:
            continue
        target = folder(found.group(1))
        if found.group(1).startswith("."):
            yield f"{path}:{number}: include paths start at the repository's root"
        elif target == "test":
            yield f"{path}:{number}: nothing outside test/ includes from test/"
        elif target in LAYERS and LAYERS.index(target) > LAYERS.index(folder(path)):
            yield f"{path}:{number}: {folder(path)} must not include from {target}"
        for layer in INNER_LAYERS:
            if not (path.startswith(f"{layer}/") and found.group(1).startswith(f"{layer}/")):
                continue
            own, other = inner_folder(path, layer), inner_folder(found.group(1), layer)
            if not may_include(layer, own, other):
                yield f"{path}:{number}: {layer}/{own} must not include from {layer}/{other}"


def imports_of(code: str, modules: Iterable[str]) -> set[str]:
    """Which of `modules` the code imports, wherever; but for what only a type checker reads."""
    found = set()
    waiting: list[ast.AST] = [ast.parse(code)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= full & set(modules) or {node.module}
    return found & set(modules)


def import_cycles(tree: Tree) -> Iterator[str]:
    """No modules of the package import one another in a circle, inside of functions neither."""
    files = {path: PurePosixPath(path) for path in tree if re.match(r"bindings/python/farandole/.*\.pyi?$", path)}
    names = {path: ".".join((*file.parts[2:-1], file.stem)).removesuffix(".__init__") for path, file in files.items()}
    imports = {name: imports_of(tree[path], names.values()) for path, name in names.items()}
    circle = dict(imports)
    while ends := {name for name, others in circle.items() if not others & circle.keys()}:
        circle = {name: others for name, others in circle.items() if name not in ends}
    while starts := circle.keys() - set().union(*circle.values()):
        circle = {name: others for name, others in circle.items() if name not in starts}
    for name, others in sorted(circle.items()):
        yield f"{name} imports {', '.join(sorted(others & circle.keys()))}, in a circle"


def environment(tree: Tree) -> Iterator[str]:
    """Environment variables are read in core/config.cc alone (scripts, examples and tests excepted)."""
    read = re.compile(r"\b(?:secure_)?getenv\s*\(|\benviron\b")
    for path, number, line in lines_of(tree):
        if folder(path) in ("examples", "test") or path == "core/config.cc":
            continue
        if read.search(without_comments(line)):
            yield f"{path}:{number}: the environment is read in core/config.cc only"


def threads(tree: Tree) -> Iterator[str]:
    """Threads are started by engine, launch queue, timeline, flight recorder, sockets, bootstrap, members, Job, XLA."""
    start = re.compile(r"\bstd::(?:jthread|async)\b|\bstd::thread\b(?!::)|\bpthread_create\b")
    for path, number, line in lines_of(tree):
        if folder(path) in ("examples", "test"):
            continue
        places = ("coordinator/engine/", "coordinator/diagnosis/program_probe.", "ops/gpu/launch_queue.",
                  "core/timeline.", "core/flight_recorder.", "core/threads.", "core/net/stream_hub.",
                  "coordinator/job/bootstrap.", "coordinator/job/member_service.", "bindings/cpp/farandole/job.h",
                  "bindings/xla/")
        if path.startswith(places):
            continue
        if start.search(without_comments(line)):
            yield (
                f"{path}:{number}: threads live in coordinator/engine/, coordinator/diagnosis/program_probe.*, "
                "ops/gpu/launch_queue.*, core/timeline.*, core/flight_recorder.*, core/threads.*, "
                "core/net/stream_hub.*, coordinator/job/bootstrap.*, coordinator/job/member_service.*, "
                "bindings/cpp/farandole/job.h and bindings/xla/ only"
            )


def backend_conditionals(tree: Tree) -> Iterator[str]:
    """An absent backend is a stub source chosen by CMake, never an #if in shared code."""
    condition = re.compile(r"^\s*#\s*(?:el)?if\w*\b.*\b\w*(?:MPI|CUDA|NCCL|TORCH|PROTOBUF)\w*")
    for path, number, line in lines_of(tree):
        if condition.match(line):
            yield f"{path}:{number}: choose a stub source in CMake instead of #if"


def machine_paths(tree: Tree) -> Iterator[str]:
    """Nothing names a directory of one machine."""
    for path, number, line in lines_of(tree, TEXT):
        if MACHINE_PATH.search(line):
            yield f"{path}:{number}: names a path of one machine"


#: Words of our own for which the field has better ones: what is refused, what to say.
REFUSED_WORDS = {
    r"baton": "engine lock",
    r"[Vv]erdicts?": "outcome",
    r"Voters": "contributors",
    r"Outlet": "NegotiationListener",
    r"Meeting|Introduction": "rendezvous, hello",
    r"[Ff]aces?": "frontend, API",
    r"under way": "in flight",
    r"described anew|DescribeAnew": "redefined",
    r"[Pp]ieces?": "slice",
    r"CutsTensors|kinds that cut": "variable-size collectives",
    r"StoreWay|store way": "store policy",
    r"lends?|lent|lending|loans?": "borrow, release",
    r"GiveBack|GivenBack|[Gg]iven? back|[Gg]iv(?:es?|ing) (?:it|them|the \w+) back": "release",
    r"[Gg]ives? back|[Tt]akes? back|[Ll]ets? go": "release",
    r"moment": "event, point in time",
    r"[Hh]omes?(?!/| director)": "default device",
    r"[A-Z]\w+(?:Over|Passed)": "complete",
    r"place_of|place_|[A-Z]\w+Place": "device",
    r"[Gg]roup members?|[Mm]embers? of (?:a|the) (?:key|group)(?!')": "tensor",
    r"[Pp]art of the (?:rows|sum|mean)|(?:[Uu]n)?equal parts": "split, slice",
    r"[Ss]entences?": "error message",
    r"(?:Settle|Emit|Deliver|Tell)[A-Z]\w*": "FlushOutgoing, Broadcast, Dispatch, Notify",
    r"[Oo]rphan(?:ed)?": "detached",
    r"fired|fires": "accumulated",
    r"telling|nobody is left": "report",
}
#: Folders whose words still have to be replaced, and the changelog of what once was.
WORDS_TO_COME = ("CHANGELOG.md", "test/")


def words(tree: Tree) -> Iterator[str]:
    """The field's words, one for each thing; what we once called it ourselves does not come back."""
    refused = {re.compile(rf"\b(?:{old})\b"): new for old, new in REFUSED_WORDS.items()}
    for path, number, line in lines_of(tree, TEXT):
        if path.startswith(WORDS_TO_COME):
            continue
        for old, new in refused.items():
            found = old.search(line)
            if found:
                yield f'{path}:{number}: "{found.group()}"; say {new}'


def sizes(tree: Tree) -> Iterator[str]:
    """A file past 800 lines says in its first ten why it is one thing: a line with `One file:`."""
    for path, text in sorted(tree.items()):
        lines = text.splitlines()
        is_long = path.endswith((*CODE, ".py")) and len(lines) > MAX_LINES
        if is_long and not any("One file:" in line for line in lines[:10]):
            yield f"{path}: {len(lines)} lines; split it, or say near its top `One file: why`"


def reasons(tree: Tree) -> Iterator[str]:
    """A header opens with its reason."""
    for path, text in sorted(tree.items()):
        if path.endswith(".h") and not text.lstrip().startswith(("//", "/*")):
            yield f"{path}: a header opens with a comment that gives its reason"


def top_level(tree: Tree) -> Iterator[str]:
    """The top level holds the agreed names and dotfiles."""
    for name in sorted({PurePosixPath(path).parts[0] for path in tree}):
        if name not in TOP_LEVEL and not name.startswith("."):
            yield f"{name}: not one of the agreed top-level names"


MAX_COLUMNS = 120
SETTINGS_PAGE = "docs/settings.md"


def columns(tree: Tree) -> Iterator[str]:
    """A line of a document is readable in an editor: 120 characters, long addresses not counted."""
    for path, number, line in lines_of(tree, (".md",)):
        length = len(re.sub(r"https?://[^\s)]+", "", line))
        if length > MAX_COLUMNS:
            yield f"{path}:{number}: {length} characters; {MAX_COLUMNS} at most"


def without_code(text: str) -> str:
    """A document without its code, which may look like links and headings."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))


def anchors(text: str) -> set[str]:
    """The anchors of a document's headings, as GitHub and GitLab make them."""
    titles = re.findall(r"^#+ +(.*)", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def links(tree: Tree) -> Iterator[str]:
    """A relative link of a document leads to a file or folder of the tree, and to a heading in it."""
    folders = {str(parent) for path in tree for parent in PurePosixPath(path).parents}
    for path, text in sorted(tree.items()):
        if not path.endswith(".md"):
            continue
        for link in re.findall(r"\]\(([^)\s]+)\)", without_code(text)):
            name, _, anchor = link.partition("#")
            if "://" in name or name.startswith("mailto:"):
                continue
            target = posixpath.normpath(posixpath.join(posixpath.dirname(path), name)) if name else path
            if target not in tree and target not in folders:
                yield f"{path}: {link} leads to no file"
            elif anchor and anchor not in anchors(tree.get(target, "")):
                yield f"{path}: {link} leads to no heading"


def parse_bash(code: str) -> None:
    """Raises if bash would not."""
    subprocess.run(["bash", "-n"], input=code, text=True, check=True, capture_output=True)


PARSERS = {
    "python": lambda code: compile(code, "snippet", "exec"), "bash": parse_bash,
    "json": json.loads, "yaml": yaml.safe_load,
}  # fmt: skip


def snippets(tree: Tree) -> Iterator[str]:
    """Code in a document has no syntax error; of C and C++ test/consumer compiles all."""
    for path, text in sorted(tree.items()):
        if not path.endswith(".md"):
            continue
        for found in re.finditer(r"^```(\w+)\n(.*?)^```", text, re.M | re.S):
            language, code = found.groups()
            try:
                PARSERS.get(language, str)(code)
            except (ValueError, SyntaxError, yaml.YAMLError, subprocess.CalledProcessError) as error:
                line = text.count("\n", 0, found.start()) + 1
                yield f"{path}:{line}: no {language}: {getattr(error, 'stderr', '') or error}"


def labels(tree: Tree) -> Iterator[str]:
    """A label that a document gives to ctest is one that a CMake file of the tests sets."""
    cmake = "\n".join(text for path, text in tree.items() if path.endswith("CMakeLists.txt"))
    known = set(re.findall(r"\bLABELS?\s+([a-z_]+)", cmake))
    for folders in re.findall(r"foreach\(folder ([a-z_ ]+)\)", cmake):
        known.update(folders.split())
    for path, number, line in lines_of(tree, (".md",)):
        for wanted in re.findall(r"""ctest [^`]*?-LE? +["']?([\w|]+)""", line):
            for label in set(wanted.split("|")) - known:
                yield f"{path}:{number}: ctest has no label {label}"


def variables(tree: Tree) -> Iterator[str]:
    """The settings page lists every FARANDOLE_ variable that a script, the package or the launcher reads.

    Those of core/config.cc are compared with the page by a unit test.
    """
    page = tree.get(SETTINGS_PAGE, "")
    for path, number, line in lines_of(tree, (".py", ".sh", ".cc")):
        if path.endswith(".cc") and path != "core/launcher.cc":
            continue
        if path.endswith(".py") and folder(path) == "test":
            continue
        for name in re.findall(r"""(?:\$\{?|["'])(FARANDOLE_(?!TEST_)[A-Z_]+)\b""", line):
            if f"`{name}`" not in page:
                yield f"{path}:{number}: {name} is not on {SETTINGS_PAGE}"


def arrows(tree: Tree) -> Iterator[str]:
    """A source of LEVELLED includes no header that includes its own: what is used does not know its users."""
    includes = {path: [name for name in re.findall(r'^#include "([\w./-]+)"', text, re.M) if name in tree]
                for path, text in tree.items() if path.endswith(CODE)}

    def reaches(header: str, target: str, seen: set[str]) -> bool:
        new = [name for name in includes.get(header, []) if name not in seen]
        seen.update(new)
        return target in new or any(reaches(name, target, seen) for name in new)

    for path, headers in includes.items():
        own = path.removesuffix(".cc") + ".h"
        for header in headers if path.startswith(LEVELLED) and path.endswith(".cc") else []:
            if header != own and reaches(header, own, set()):
                yield f"{path}: {header} includes {own}, so it must not be included here"


RULES = [layering, import_cycles, arrows, environment, threads, backend_conditionals, machine_paths, words, sizes,
         reasons, top_level, columns, links, snippets, labels, variables]


def findings(tree: Tree, rules: Iterable = RULES) -> list[str]:
    """All findings of all rules."""
    return [finding for rule in rules for finding in rule(tree)]
