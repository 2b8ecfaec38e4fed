"""Programs outside the source tree use an installation: C++, C, ctypes, libtorch, and mixed jobs."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONSUMER = ROOT / "test" / "consumer"
BUILD = pathlib.Path(os.environ.get("FARANDOLE_TEST_BUILD_DIR", ROOT / "build" / "release"))
ENVIRONMENT = os.environ | {
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1", "OMP_NUM_THREADS": "1",
}  # fmt: skip


def run(*command: object, timeout_s: float = 600, **variables: str) -> str:
    """Runs a command that must succeed; gives its output."""
    done = subprocess.run(
        [*map(str, command)], env=ENVIRONMENT | variables, timeout=timeout_s, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def mpirun(size: int, *command: object, **variables: str) -> list[str]:
    told = run("mpirun", "--oversubscribe", "-np", size, *command, **variables)
    return lines_of(told)


def pip_prefix() -> pathlib.Path:
    return pathlib.Path(run(sys.executable, "-m", "farandole.config", "--cmake-prefix").strip())


def torch_prefix() -> str:
    torch = pytest.importorskip("torch")
    return str(torch.utils.cmake_prefix_path)


def build(source: pathlib.Path, into: pathlib.Path, compiler: str, *prefixes: object,
          **options: str) -> pathlib.Path:
    """Configures and builds a project that knows the prefixes only."""
    run("cmake", "-S", source, "-B", into, "-G", "Ninja", f"-DCMAKE_CXX_COMPILER={compiler}",
        f"-DCMAKE_PREFIX_PATH={';'.join(map(str, prefixes))}",
        *[f"-D{name}={value}" for name, value in options.items()])
    run("cmake", "--build", into, timeout_s=600)
    return into


@pytest.fixture(scope="session")
def prefix(tmp_path_factory) -> pathlib.Path:
    """What ``cmake --install`` puts under a prefix, which was moved then."""
    if not (BUILD / "cmake_install.cmake").exists():
        pytest.skip(f"there is no build in {BUILD} (FARANDOLE_TEST_BUILD_DIR)")
    folder = tmp_path_factory.mktemp("prefix")
    run("cmake", "--install", BUILD, "--prefix", folder / "before", "--strip")
    return (folder / "before").rename(folder / "moved")


@pytest.fixture(scope="session", params=["prefix and g++", "pip and clang++"])
def programs(request, tmp_path_factory) -> pathlib.Path:
    """The consumer's programs, built against one kind of installation by one compiler."""
    kind, compiler = request.param.split(" and ")
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    where = request.getfixturevalue("prefix") if kind == "prefix" else pip_prefix()
    return build(CONSUMER, tmp_path_factory.mktemp("consumer"), compiler, where)


def lines_of(told: str) -> list[str]:
    """Sorted; mpirun may put a rank's line into that of another one."""
    return sorted(filter(None, re.split(r"\n|(?=rank \d)", told)))


def all_right(size: int) -> list[str]:
    return [f"rank {rank} of {size}: all right" for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_cpp_api_works_between_threads(programs, tmp_path, size):
    told = run(programs / "cpp_api", "threads", size, tmp_path)
    assert told == f"{size} ranks as threads: all right\n"


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_cpp_api_cuts_rows_between_threads(programs, size):
    told = run(programs / "row_api", "threads", size)
    assert told == f"{size} ranks as threads: all right\n"


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_cpp_api_cuts_rows_under_mpirun(programs, size):
    assert mpirun(size, programs / "row_api", "job") == all_right(size)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_cpp_api_works_under_mpirun(programs, tmp_path, size):
    assert mpirun(size, programs / "cpp_api", "job", tmp_path) == all_right(size)


def test_process_sets_come_and_go_under_mpirun(programs):
    assert mpirun(3, programs / "cpp_api", "churn") == all_right(3)


def farandolerun(size: int, *command: object) -> list[str]:
    """The lines of programs that say how a Job has ended."""
    told = run(sys.executable, "-m", "farandole.runner", "-np", size, *command)
    return re.findall(r"\] (\d \d+ [0-9a-f]{64})$", told, re.M)


def generations(folder: pathlib.Path) -> list[int]:
    return [int(size) for size in re.findall(r'"size": (\d+)', (folder / "chain.jsonl").read_text())]


def verify(*folders: pathlib.Path) -> str:
    return run(sys.executable, "-m", "farandole", "verify", *folders)


@pytest.fixture(scope="session")
def undisturbed(programs, tmp_path_factory) -> tuple[pathlib.Path, str]:
    """The folder of a Job of one rank, and what it says."""
    folder = tmp_path_factory.mktemp("job")
    return folder, run(programs / "job_api", folder, 12).strip()


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_job_has_the_same_bits_on_any_number_of_ranks(programs, undisturbed, tmp_path, size):
    assert farandolerun(size, programs / "job_api", tmp_path, 12) == [undisturbed[1]] * size
    assert verify(undisturbed[0], tmp_path) == "the same: 12 steps, 0 to 11\n"


def test_a_job_goes_on_after_a_death_and_with_a_newcomer(programs, undisturbed, tmp_path):
    told = farandolerun(3, "--elastic", programs / "job_api", tmp_path, 12, "kill1=5", "wait0=8")
    assert told == [undisturbed[1]] * 3 and generations(tmp_path) == [3, 2, 3]
    # A rank 0 that was a step behind got the state, and not the line of that step.
    assert re.fullmatch("the same: 1[12] steps, 0 to 11\n", verify(undisturbed[0], tmp_path))


def test_sigterm_makes_a_rank_of_an_elastic_job_leave_and_another_job_stop(programs, undisturbed, tmp_path):
    left, stopped = tmp_path / "left", tmp_path / "stopped"
    told = farandolerun(2, "--elastic", programs / "job_api", left, 12, "term0=5", "wait1=8")
    assert told.count(undisturbed[1]) == 2 and generations(left) == [2, 1, 2]
    told = farandolerun(2, programs / "job_api", stopped, 12, "term1=5")
    assert [line[:4] for line in told] == ["1 6 "] * 2 and told[0] == told[1]
    (newest,) = stopped.glob("step-000000000006-*.state")
    newest.write_bytes(newest.read_bytes()[:-1] + b"?")
    told = farandolerun(3, programs / "job_api", stopped, 12)
    assert told == [undisturbed[1]] * 3 and len([*stopped.glob("step-*.state")]) == 3
    assert verify(undisturbed[0], stopped) == "the same: 12 steps, 0 to 11\n"


def test_a_job_of_other_settings_is_refused(programs, undisturbed, tmp_path):
    for folder, words in [(undisturbed[0], ["seed0=4", "seed1=4"]), (tmp_path, ["seed1=9"])]:
        done = subprocess.run(
            [sys.executable, "-m", "farandole.runner", "-np", "2", programs / "job_api", folder, "12", *words],
            text=True, capture_output=True, check=False,
        )  # fmt: skip
        assert done.returncode == 1 and '"slots": 5, "seed": ' in done.stderr, done.stderr


@pytest.fixture(params=["nccl", "staged"])
def fake_gpus(request) -> dict[str, str]:
    """Settings of a job on fake GPUs; ``way`` is how its batches travel then."""
    fakes = BUILD / "test" / "fakes"
    if not (fakes / "libfarandole_fake_cuda.so").exists():
        pytest.skip(f"there are no fakes in {fakes} (FARANDOLE_TEST_BUILD_DIR)")
    of_way = {
        "nccl": {"FARANDOLE_NCCL": str(fakes / "nccl" / "libnccl.so.2")},
        "staged": {"FARANDOLE_TEST_CUDA_DEVICES": "1", "FARANDOLE_LOG_LEVEL": "error"},
    }
    return {
        "way": request.param,
        "FARANDOLE_CUDA_PLUGIN": str(fakes / "libfarandole_fake_cuda.so"),
        **of_way[request.param],
    }


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_cpp_api_orders_streams_of_fake_gpus_between_threads(programs, fake_gpus, size):
    way = fake_gpus.pop("way")
    told = run(programs / "device_api", "threads", size, way, **fake_gpus)
    assert told == f"{size} ranks as threads: all right\n"


def test_the_cpp_api_orders_streams_of_fake_gpus_under_mpirun(programs, fake_gpus):
    way = fake_gpus.pop("way")
    assert mpirun(2, programs / "device_api", "job", way, **fake_gpus) == all_right(2)


@pytest.mark.parametrize(("wrong", "sentence"), [
    ("optimizer.step();", "needs a farandole::Stream first"),
    ("optimizer.step(1);", "needs a farandole::Stream first"),
    ("optimizer.ready(0);", "need the farandole::Stream they are made and used in"),
    ("optimizer.synchronize();", "need the farandole::Stream they are made and used in"),
    ("context.allreduce(farandole::DeviceSpan<float>());", "DeviceSpan"),
    ("context.allreduce(farandole::DeviceSpan<const float>(), stream);", "written in place"),
    ("optimizer.ready(0, stream); optimizer.step(stream);", ""),
])  # fmt: skip
def test_memory_of_a_gpu_without_a_stream_does_not_compile(prefix, tmp_path, wrong, sentence):
    source = tmp_path / "wrong.cc"
    source.write_text(f"""
        #include <farandole/optimizer.h>
        struct Sgd {{
          std::vector<farandole::DeviceParameter<float>> list;
          std::vector<farandole::DeviceParameter<float>>& parameters() {{ return list; }}
          template <class... Arguments> void step(const Arguments&...) {{}}
        }};
        void use(farandole::Context& context, farandole::DistributedOptimizer<Sgd>& optimizer,
                 const farandole::Stream& stream) {{ (void)context; (void)stream; {wrong} }}
    """)
    done = subprocess.run(["g++", "-std=c++17", "-fsyntax-only", f"-I{prefix / 'include'}", source],
                          text=True, capture_output=True, check=False)  # fmt: skip
    assert (done.returncode == 0) == (not sentence)
    assert sentence in done.stderr


@pytest.mark.parametrize("size", [1, 2])
def test_a_plain_c_program_uses_the_abi(programs, size):
    assert mpirun(size, programs / "c_program") == all_right(size)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_c_program_that_returns_0_without_shutdown_ends_well(programs, size):
    told = mpirun(size, programs / "c_program", 4, FARANDOLE_SHUTDOWN_TIMEOUT_S="1")
    assert told == all_right(size)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_plain_c_program_cuts_rows(programs, size):
    assert mpirun(size, programs / "c_rows") == all_right(size)


PYTHON_RANK = """
import numpy as np
import farandole as fl
fl.init()
mean = fl.allreduce(np.array([20, 25, 30], np.float32), name="shared")
told = fl.broadcast(np.array([-1], np.int64), 0, name="told")
assert mean.tolist() == [10.5, 13.5, 16.5] and told.tolist() == [41], (mean, told)
fl.shutdown()
print(f"rank {1} of {2}: all right")
"""


def test_a_cpp_rank_and_a_python_rank_reduce_the_same_names(programs):
    told = run("mpirun", "--oversubscribe", "-np", 1, programs / "cpp_api", "mixed", ":",
               "-np", 1, sys.executable, "-c", PYTHON_RANK)  # fmt: skip
    assert lines_of(told) == all_right(2)


PYTHON_RANK_WITH_ROWS = """
import numpy as np
import farandole as fl
fl.init()
rows = fl.allgather(np.array([[10, 20], [30, 40]], np.float32), name="shared")
again = fl.allgather(np.array([6, 7], np.float32))
assert rows.tolist() == [[1, 2], [10, 20], [30, 40]] and again.tolist() == [5, 6, 7], (rows, again)
piece, splits = fl.alltoall(np.array([10, 20, 30], np.int32), [2, 1], name="pieces")
assert piece.tolist() == [2, 3, 30] and splits.tolist() == [2, 1], (piece, splits)
fl.alltoall(np.empty(0, np.int32), [0, 0], name="nothing")
fl.allgather(np.empty(0, np.int32), name="nothing")
assert fl.reducescatter(np.array([10.0, 20.0, 30.0])).tolist() == [16.5]
fl.shutdown()
print(f"rank {1} of {2}: all right")
"""


def test_a_cpp_rank_and_a_python_rank_gather_and_exchange_rows(programs):
    told = run("mpirun", "--oversubscribe", "-np", 1, programs / "row_api", "mixed", ":",
               "-np", 1, sys.executable, "-c", PYTHON_RANK_WITH_ROWS)  # fmt: skip
    assert lines_of(told) == all_right(2)


def test_python_reaches_the_abi_through_ctypes():
    library = run(sys.executable, "-m", "farandole.config", "--library").strip()
    script = f"""
import ctypes
library = ctypes.CDLL({library!r})
library.farandole_last_error.restype = ctypes.c_char_p
assert library.farandole_abi_version() == 1
contexts = (ctypes.c_void_p * 1)()
assert library.farandole_init_in_process(1, contexts) == 0
ranks = (ctypes.c_int32 * 1)(7)
assert library.farandole_set_find(ctypes.c_void_p(contexts[0]), ranks, 1, None) == 1
assert b"NULL" in library.farandole_last_error()
for context in contexts:
    library.farandole_release(ctypes.c_void_p(context))
print("all right")
"""
    assert run(sys.executable, "-c", script) == "all right\n"


def test_the_exported_symbols_are_those_of_the_list():
    library = pip_prefix() / "libfarandole.so.1"
    lines = run("nm", "-D", "--defined-only", "--with-symbol-versions", library).splitlines()
    exported = sorted(line.split()[-1] for line in lines)
    listed = (CONSUMER / "exported_symbols.txt").read_text().splitlines()
    assert exported == listed


def test_headers_of_another_abi_are_refused_with_a_sentence(programs, prefix, tmp_path):
    shutil.copytree(prefix / "include", tmp_path / "include")
    header = tmp_path / "include" / "farandole" / "farandole.h"
    header.write_text(header.read_text().replace("FARANDOLE_ABI_VERSION 1", "FARANDOLE_ABI_VERSION 9"))
    run("g++", "-std=c++17", ROOT / "examples/cpp/allreduce.cc", f"-I{tmp_path / 'include'}",
        f"-L{prefix / 'lib'}", "-lfarandole", f"-Wl,-rpath,{prefix / 'lib'}", "-o", tmp_path / "old")
    done = subprocess.run([tmp_path / "old"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.fullmatch(r"this program was compiled for Farandole's ABI 9, but libfarandole.so "
                        r"\S+ has ABI 1; compile it with that library's headers\n", done.stderr)


def test_pkg_config_builds_the_first_example_in_one_line(prefix, tmp_path):
    if shutil.which("pkg-config") is None:
        pytest.skip("pkg-config is not installed")
    line = (f"g++ -std=c++17 allreduce.cc $(pkg-config --cflags --libs farandole) "
            f"-o {tmp_path / 'allreduce'}")
    subprocess.run(line, shell=True, check=True, cwd=ROOT / "examples" / "cpp",
                   env=ENVIRONMENT | {"PKG_CONFIG_PATH": str(prefix / "lib" / "pkgconfig")})
    assert mpirun(2, tmp_path / "allreduce") == ["rank 0 of 2: mean 0.50", "rank 1 of 2: mean 0.50"]


@pytest.mark.parametrize(
    ("page", "compiler", "shown"),
    [("cpp.md", "g++ -std=c++17", r"rank 0 of 2: 0\.5\d*,rank 1 of 2: 0\.5\d*"),
     ("c-abi.md", "cc -std=c99", "rank 0 of 2: 6,rank 1 of 2: 6")],
)  # fmt: skip
def test_the_first_program_of_a_page_is_built_by_pkg_config_and_runs(prefix, tmp_path, page, compiler, shown):
    if shutil.which("pkg-config") is None:
        pytest.skip("pkg-config is not installed")
    language, code = re.search(r"^```(cpp|c)\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.M | re.S).groups()
    source = tmp_path / {"cpp": "first.cc", "c": "first.c"}[language]
    source.write_text(code)
    line = f"{compiler} {source} $(pkg-config --cflags --libs farandole) -o {tmp_path / 'first'}"
    variables = ENVIRONMENT | {"PKG_CONFIG_PATH": str(prefix / "lib" / "pkgconfig")}
    subprocess.run(line, shell=True, check=True, env=variables)
    assert re.fullmatch(shown, ",".join(mpirun(2, tmp_path / "first")))


@pytest.fixture(scope="session")
def examples(prefix, tmp_path_factory) -> pathlib.Path:
    return build(ROOT / "examples" / "cpp", tmp_path_factory.mktemp("examples"), "g++", prefix,
                 torch_prefix())


def result_of(program: pathlib.Path, *arguments: object) -> dict[str, str]:
    [line] = mpirun(2, program, *arguments, FARANDOLE_LOG_LEVEL="error")  # on a busy machine a rank may be late
    return dict(re.findall(r"(\w+)=(\S+)", line))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["train_mlp", "train_libtorch"])
def test_the_examples_learn_and_keep_their_replicas_equal(examples, name):
    result = result_of(examples / name, 1, 20_000)
    assert result["replicas"] == "identical" and float(result["accuracy"]) > 0.7, result


@pytest.mark.timeout(900)
def test_the_example_of_a_job_has_the_same_weights_after_its_first_rank_was_killed(examples):
    command = [sys.executable, "-m", "farandole.runner", "-np", "3", "--elastic", examples / "uninterrupted", "1200"]
    launcher = subprocess.Popen(command, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    told = ""
    for line in launcher.stdout:
        told += line
        if "step 300:" in line:
            os.kill(int(re.search(r"rank 0 of 3 is process (\d+)", told)[1]), signal.SIGKILL)
    assert launcher.wait() == 0 and "2 ranks go on" in told, told
    [weights] = set(re.findall("weights .*", told))
    assert run(examples / "uninterrupted", 1200).splitlines()[-1] == weights


@pytest.fixture(scope="session")
def torch_programs(prefix, tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("torch")
    return build(CONSUMER, folder, "g++", prefix, torch_prefix(), WITH_TORCH="ON")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_libtorch_adapter_trains_as_one_process_does(torch_programs, size):
    assert mpirun(size, torch_programs / "libtorch_api") == all_right(size)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("stream", [0, 5])
def test_the_libtorch_adapter_trains_on_fake_gpus(torch_programs, fake_gpus, stream):
    if not (torch_programs / "torch_device_api").exists():
        pytest.skip("this libtorch has CUDA: its tensors cannot be faked")
    way = fake_gpus.pop("way")
    slow = {"FARANDOLE_TEST_CUDA_SLOW_US": "200"}  # an order that is missing shows
    program = torch_programs / "torch_device_api"
    assert mpirun(2, program, way, stream, **fake_gpus, **slow) == all_right(2)


DOCUMENTS = [ROOT / "docs" / "cpp.md", ROOT / "docs" / "c-abi.md"]
SNIPPETS = [
    (document.name, number, language, code)
    for document in DOCUMENTS
    for number, (language, code) in enumerate(
        re.findall(r"^```(cpp|c)\n(.*?)^```", document.read_text(), re.M | re.S)
    )
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "number", "language", "code"), SNIPPETS)
def test_the_code_in_the_documents_compiles(prefix, tmp_path, name, number, language, code):
    source = tmp_path / f"snippet.{language}"
    source.write_text(code)
    includes = [f"-I{prefix / 'include'}"]
    if "farandole/torch.h" in code:
        folder = pathlib.Path(torch_prefix()).parents[1] / "include"
        includes += [f"-isystem{folder}", f"-isystem{folder / 'torch/csrc/api/include'}"]
    command, standard = ("g++", "c++17") if language == "cpp" else ("gcc", "c11")
    run(command, f"-std={standard}", "-fsyntax-only", "-Wall", "-Wextra", *includes, source)


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> pathlib.Path:
    """The documents as a site. A document, header or link that Doxygen or Sphinx warns of is an error."""
    if shutil.which("doxygen") is None:
        pytest.skip("doxygen is not installed")
    folder = tmp_path_factory.mktemp("docs") / "site"
    run("bash", ROOT / "docs" / "build.sh", folder, timeout_s=300)
    return folder


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("index", "From Horovod"),
        ("guide", "metric_average"),
        ("launching", "farandolerun"),
        ("python-reference", "broadcast_optimizer_state"),
        ("c-reference", "farandole_start_allocating"),
        ("cpp-reference", "DistributedOptimizer"),
        ("settings", "FARANDOLE_FUSION_THRESHOLD"),
        ("horovod", "broadcast_optimizer_state"),
        ("performance", "performance.svg"),
        ("index", "farandole.torch.watch()"),
        ("examples", "make_data"),
        ("security", "Report a vulnerability"),
    ],
)
def test_a_page_of_the_site_holds_what_it_is_for(site, page, text):
    assert text in (site / f"{page}.html").read_text()


def test_the_examples_of_docstrings_are_code(site):
    page = (site / "python-reference.html").read_text()
    quoted = re.findall(r"<blockquote>(.*?)</blockquote>", page, re.S)
    assert [text for text in quoted if "torch.distributed." not in text] == []  # in torch's own docstrings
    first = re.sub(r"<[^>]+>", "", re.search(r"<pre>(.*?)</pre>", page, re.S)[1])
    assert first.splitlines()[:2] == ["import farandole", "import numpy as np"]


def search(site: pathlib.Path, query: str) -> str:
    """The page that the site's search lists first: scored as by its searchtools.js, without the texts of pages."""
    text = (site / "searchindex.js").read_text()
    index = json.loads(text[text.index("(") + 1 : text.rindex(")")])
    found = [(15, "only texts of pages")]  # is the most that such a hit is worth

    def score(most: int, name: str) -> int:
        return round(most * len(query) / len(name)) if query in name.lower() and 2 * len(query) >= len(name) else 0

    for name, places in index["alltitles"].items():
        found += [(score(15, name) + (index["titles"][page] == name), index["docnames"][page]) for page, _ in places]
    for name, places in index["indexentries"].items():
        found += [(score(100, name), index["docnames"][page]) for page, _, is_main in places if is_main]
    for objects in index["objects"].values():
        for page, _, priority, _, name in objects:
            named = 11 if name.lower() == query else 6 if query in name.lower() else 0
            found.append((named and named + {0: 15, 1: 5, 2: -5}[priority], index["docnames"][page]))
    return str(max(found)[1])


@pytest.mark.parametrize(
    ("page", "queries"),
    [
        ("recipes", "gradient accumulation, no_sync, mixed precision, autocast, gradscaler, gradient clipping"),
        ("recipes", "learning rate, resume, checkpoint, evaluation, metrics, batchnorm, syncbatchnorm, replicas"),
        ("troubleshooting", "hang, stall, slow rank"),
        ("torch-distributed", "watch, fsdp, lightning, deepspeed, transformers"),
        ("from-ddp", "ddp"), ("launching", "elastic"), ("cluster", "slurm"), ("horovod", "from horovod"),
    ],
)  # fmt: skip
def test_the_sites_search_finds_the_words_of_users(site, page, queries):
    words = queries.split(", ")
    assert {word: search(site, word) for word in words} == dict.fromkeys(words, page)


def test_links_within_the_site_lead_somewhere(site):
    pages = {page.name: page.read_text() for page in site.glob("*.html")}
    anchors = {name: set(re.findall(r'\bid="([^"]+)"', text)) for name, text in pages.items()}
    lost = []
    for name, text in pages.items():
        for link in re.findall(r'(?:href|src)="([^":]+)"', text):
            file, _, anchor = link.partition("#")
            target = file.partition("?")[0] or name
            if not (site / target).exists() or (anchor and anchor not in anchors.get(target, {anchor})):
                lost.append(f"{name}: {link}")
    assert len(pages) > 15 and lost == []
