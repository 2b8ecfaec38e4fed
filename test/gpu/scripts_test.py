"""The scripts of this folder where no GPU is: the table from recorded lines, and polite refusals."""

import fnmatch
import importlib.util
import json
import pathlib
import re
import subprocess
import sys
import tarfile

import pytest

FOLDER = pathlib.Path(__file__).resolve().parent
MACHINE = {
    "gpus": ["NVIDIA H100 80GB HBM3"],
    "driver": 13000,
    "nccl_version": 22809,
    "torch": "2.11.0",
}


def load(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


table = load("table")


def move(tensors, way, share, kernel_us=40.0, copy_us=400.0):
    return {
        "bench": "move", "set": tensors, "way": way, "share_of_copy": share,
        "kernel_us": kernel_us, "copy_per_tensor_us": copy_us, "launches": 1,
    }  # fmt: skip


def good_benches():
    return {
        "bench-move": [
            {"bench": "copy", "device": MACHINE["gpus"][0], "gb_per_s": 2700.0},
            move("1024 x 1 KiB", "pack float32", 0.2),
            move("256 x 1024 KiB", "pack float32", 0.94),
            move("64 x 4096 KiB", "unpack float32", 0.91),
            move("ResNet-50", "pack float32 -> float16", 0.80, 55.0, 500.0),
            move("BERT-large", "pack float32", 0.93),
            move("ResNet-50", "unpack float32, flag", 0.80, 45.0),
            move("ResNet-50", "unpack float32, pinned flag", 0.40, 90.0),
        ],
        "bench-plane": [
            {"bench": "plane", "way": "solo", "host_us": 12.0, "launches_per_batch": 1.0},
            {"bench": "plane", "way": "staged", "host_us": 900.0, "launches_per_batch": 8.0},
        ],
        "bench-plane-nccl": [
            {"bench": "bus", "bytes": 25 << 20, "busbw_gb_per_s": 10.0, "bare_busbw_gb_per_s": 90.0,
             "gap_us": 900.0},
        ],
        "bench-plane-mps": [
            {"bench": "bus", "bytes": 4, "busbw_gb_per_s": 0.6e-3, "bare_busbw_gb_per_s": 1e-3,
             "gap_us": 90.0},
            {"bench": "bus", "bytes": 25 << 20, "busbw_gb_per_s": 95.0, "bare_busbw_gb_per_s": 100.0,
             "gap_us": 12.0},
        ],
        "bench-step": [
            {"bench": "step", "ranks": 1, "plain_ms": 100.0, "overhead_percent": 0.5,
             "ddp_overhead_percent": 1.5, "hidden": None},
        ],
        "bench-step-2": [
            {"bench": "step", "ranks": 2, "plain_ms": 100.0, "farandole_ms": 100.5, "ddp_ms": 101.5,
             "ddp_backend": "nccl", "hidden": 0.95},
        ],
        **{
            f"bench-window-{window}": [
                {"bench": "step", "ranks": 2, "window": window, "farandole_ms": 100.0 + window}
            ]
            for window in (2, 8, 64)
        },
    }  # fmt: skip


def record(folder, benches, steps=(), is_fake=False):
    """What run.sh leaves."""
    (folder / "machine.json").write_text(json.dumps(MACHINE))
    (folder / "fake").write_text(f"{int(is_fake)}\n")
    notes = [*steps, *((name, "passed", "") for name in benches)]
    (folder / "steps.tsv").write_text("".join(f"{n}\t{o}\t3\t{r}\n" for n, o, r in notes))
    for name, lines in benches.items():
        text = "".join(f"[0] {json.dumps(line)}\n" for line in lines)
        (folder / f"{name}.log").write_text("a warning\n" + text)


def verdicts(folder):
    return {line.target: line.verdict for line in table.lines_of(table.read_run(folder))}


def targets(folder):
    """Without the lines of steps."""
    return {k: v for k, v in verdicts(folder).items() if k not in table.STEPS.values()}


def test_every_target_passes_with_good_figures(tmp_path):
    record(tmp_path, good_benches())
    assert len(targets(tmp_path)) == 15
    assert set(targets(tmp_path).values()) == {"pass"}


@pytest.mark.parametrize(
    "bench, number, key, value, target",
    [
        ("bench-move", 2, "share_of_copy", 0.849,
         "pack/cast/unpack >= 85 % of the device copy, tensors >= 1 MiB (goal 93 %)"),
        ("bench-move", 4, "share_of_copy", 0.69, "pack/cast/unpack >= 70 % of the device copy, ResNet-50 set"),
        ("bench-move", 5, "share_of_copy", 0.84, "pack/cast/unpack >= 85 % of the device copy, BERT-large set"),
        ("bench-move", 4, "kernel_us", 61.0, "ResNet-50 fp32 -> fp16 pack <= 60 us on H100"),
        ("bench-move", 4, "copy_per_tensor_us", 329.0,
         "ResNet-50 fp32 -> fp16 pack >= 6 x faster than per-tensor copies"),
        ("bench-move", 6, "kernel_us", 91.0,
         "ResNet-50 unpack: the poison flag by a kernel in device memory, not slower than read in pinned memory"),
        ("bench-plane", 0, "host_us", 300.1, "start to launch of a batch <= 300 us"),
        ("bench-plane", 0, "launches_per_batch", 3.5, "<= 3 launches of ours per batch"),
        ("bench-step", 0, "overhead_percent", 1.6, "world-1 step overhead <= DDP's"),
        ("bench-plane-mps", 1, "busbw_gb_per_s", 89.0,
         "bus bandwidth >= 90 % of a bare ncclAllReduce loop's, batches of 25 MiB"),
        ("bench-plane-mps", 0, "busbw_gb_per_s", 0.4e-3,
         "batches per second >= 50 % of a bare ncclAllReduce loop's, 4 B to 1 MiB"),
        ("bench-plane-mps", 1, "gap_us", 51.0, "gap between batches of 25 MiB on the GPU <= 50 us"),
        ("bench-step-2", 0, "ddp_ms", 100.0, "step <= DDP's with gradient_as_bucket_view=True, 2 ranks"),
        ("bench-window-8", 0, "farandole_ms", 96.0, "a window of 2 batches costs <= 5 % of a step against 8 and 64"),
        ("bench-step-2", 0, "hidden", 0.89, ">= 90 % of communication hidden where there is something to hide"),
    ],
)  # fmt: skip
def test_each_target_fails_by_its_own_figure_alone(tmp_path, bench, number, key, value, target):
    benches = good_benches()
    benches[bench][number][key] = value
    record(tmp_path, benches)
    assert [name for name, verdict in targets(tmp_path).items() if verdict == "fail"] == [target]


def test_what_was_not_run_is_not_measured_and_says_why(tmp_path):
    skipped = ("bench-move", "skipped", "needs a GPU")
    record(tmp_path, {}, [skipped, ("processes-nccl-shared-2", "skipped", "NCCL 22809 was found")])
    lines = table.lines_of(table.read_run(tmp_path))
    assert {line.verdict for line in lines} == {"not measured"}
    measured = {line.target: line.measured for line in lines}
    assert measured["ResNet-50 fp32 -> fp16 pack <= 60 us on H100"] == "needs a GPU"
    assert measured["NCCL, 2 ranks on one GPU, processes"] == "NCCL 22809 was found"
    assert measured["world-1 step overhead <= DDP's"] == "it was not run"


def test_a_failed_step_fails_the_run_and_the_last_try_counts(tmp_path, capsys):
    steps = [
        ("move-test", "passed", ""),
        ("move-test", "failed", "exit status 1, see move-test.log"),
    ]
    record(tmp_path, {}, steps)
    assert table.main([str(tmp_path)]) == 1
    assert "| exit status 1, see move-test.log | fail |" in capsys.readouterr().out
    record(tmp_path, {}, reversed(steps))
    assert table.main([str(tmp_path)]) == 0


def test_a_run_on_fakes_says_so_in_every_line_and_proves_no_target(tmp_path, capsys):
    record(tmp_path, good_benches(), [("conformance-solo", "passed", "")], is_fake=True)
    assert set(targets(tmp_path).values()) == {"not measured"}
    assert table.main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("FAKE GPU: nothing here is proven on a GPU\n")
    assert "| conformance on CUDA, 1 rank | FAKE: passed | pass |" in said
    assert said.count("| FAKE: ") == 16
    assert json.loads((tmp_path / "table.json").read_text())["fake"] is True


def test_ranks_that_share_a_gpu_hide_nothing_and_are_not_compared_with_gloo(tmp_path):
    benches = good_benches()
    benches["bench-step-2"][0] |= {"hidden": None, "ddp_backend": "gloo"}
    record(tmp_path, benches)
    lines = {line.target: line for line in table.lines_of(table.read_run(tmp_path))}
    line = lines[">= 90 % of communication hidden where there is something to hide"]
    assert (line.verdict, line.measured[:17]) == ("not measured", "ranks share a GPU")
    line = lines["step <= DDP's with gradient_as_bucket_view=True, 2 ranks"]
    assert (line.verdict, line.measured) == ("not measured", "100.50 ms against 101.50 ms over gloo")


def test_without_mps_figures_of_ranks_in_time_slices_count(tmp_path):
    benches = good_benches()
    del benches["bench-plane-mps"]
    record(tmp_path, benches)
    lines = {line.target: line for line in table.lines_of(table.read_run(tmp_path))}
    line = lines["gap between batches of 25 MiB on the GPU <= 50 us"]
    assert (line.verdict, line.measured) == ("fail", "900.00 us, median, worst batch, in time slices")


def test_a_step_that_passed_says_what_it_saw_and_one_that_failed_says_why(tmp_path):
    seen = {"bench": "fault-kill", "measured": "error 0.1 s after the kill"}
    steps = [("fault-kill", "failed", "exit status 1, see fault-kill.log")]
    for notes, expected in (([], "passed: error 0.1 s after the kill"), (steps, steps[0][2])):
        record(tmp_path, {"fault-kill": [seen]})
        with (tmp_path / "steps.tsv").open("a") as file:
            file.writelines(f"{name}\t{outcome}\t3\t{why}\n" for name, outcome, why in notes)
        lines = {line.target: line for line in table.lines_of(table.read_run(tmp_path))}
        line = lines["SIGKILL of a rank in mid-batch: the other names it and ends"]
        assert line.measured == expected


def test_a_line_cut_short_by_its_time_is_left_out(tmp_path):
    (tmp_path / "bench-x.log").write_text('{"bench": "copy", "gb_per_s": 1.0}\n{"bench": "mo')
    assert list(table.read_log(tmp_path / "bench-x.log")) == [{"bench": "copy", "gb_per_s": 1.0}]


def make_kit(folder):
    """One with scripts alone."""
    kit = folder / "kit"
    (kit / "test" / "gpu").mkdir(parents=True)
    (kit / "about.json").write_text("{}")
    for script in FOLDER.glob("*.py"):
        (kit / "test" / "gpu" / script.name).write_text(script.read_text())
    return kit


def run_sh(*arguments, **variables):
    environment = {"PATH": "/usr/bin:/bin", "FARANDOLE_PYTHON": sys.executable} | variables
    return subprocess.run(
        ["bash", FOLDER / "run.sh", *arguments],
        env=environment, capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip


def has_gpu():
    return load("machine").gpus()["gpu_count"] > 0


def make_program(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("code", [0, 1])
def test_mps_runs_for_its_step_alone_and_all_results_are_in_one_archive(tmp_path, code):
    kit = make_kit(tmp_path)
    programs = tmp_path / "bin"
    programs.mkdir()
    said = '>>"$LOG"'
    make_program(programs / "mpirun", f'echo ranks in "$CUDA_MPS_PIPE_DIRECTORY" {said}; exit {code}')
    make_program(
        programs / "nvidia-cuda-mps-control", f'echo "mps $*$(cat)" in "$CUDA_MPS_PIPE_DIRECTORY" {said}'
    )
    done = run_sh(
        "--fake", "--kit", str(kit), "--results", str(tmp_path / "results"), "--out", str(tmp_path / "out"),
        "--only", "processes-nccl-mps", PATH=f"{programs}:/usr/bin:/bin", LOG=str(tmp_path / "log"),
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    lines = (tmp_path / "log").read_text().splitlines()
    assert [line.split(" in ")[0] for line in lines] == ["mps -d", "ranks", "mps quit"]
    assert len({line.split(" in ")[1] for line in lines}) == 1
    with tarfile.open(tmp_path / "results.tar.gz") as archive:
        names = archive.getnames()
    assert {"results/table.json", "results/processes-nccl-mps.log", "results/steps.tsv"} <= set(names)
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"results.tar.gz", "table.json"}


def test_the_kernels_tests_that_run_sh_names_are_there():
    tests = re.findall(r"^TEST\((\w+, \w+)\)", (FOLDER / "move_test.cc").read_text(), re.M)
    filters = re.findall(r"gpu_move_test\" --gtest_filter='(\S+)'", (FOLDER / "run.sh").read_text())
    assert len(filters) == 2
    assert all(fnmatch.filter((test.replace(", ", ".") for test in tests), one) for one in filters)


def test_after_eight_minutes_a_quick_run_begins_nothing_more_and_makes_its_table(tmp_path):
    results = tmp_path / "results"
    done = run_sh(
        "--fake", "--quick", "--kit", str(make_kit(tmp_path)), "--results", str(results), SECONDS="456"
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    outcomes = {line.split("\t")[1] for line in (results / "steps.tsv").read_text().splitlines()}
    assert outcomes == {"skipped"}
    assert "| conformance on CUDA, 1 rank | the eight minutes of --quick are over |" in done.stdout


def test_of_a_libnccl_the_code_for_the_named_gpus_is_left(monkeypatch, tmp_path):
    slim_nccl = load("slim_nccl")

    def code(architecture):
        return slim_nccl.ENTRY.pack(2, 1, 32, 8, architecture) + b"kernels!"

    fat = slim_nccl.FATBIN.pack(slim_nccl.MAGIC, 1, 16, 80) + code(80) + code(90)
    (tmp_path / "libnccl.so.2").write_bytes(b"head" + fat + bytes(8) + fat)
    places = {".nv_fatbin": (4, 2 * len(fat) + 8), "__nv_relfatbin": (0, 0)}
    monkeypatch.setattr(slim_nccl, "sections", lambda file: places)
    left = slim_nccl.slim(tmp_path / "libnccl.so.2", {90})
    slim = fat.replace(code(80), code(80)[:-8] + bytes(8))
    assert left == b"head" + slim + bytes(8) + slim
    with pytest.raises(SystemExit, match=r"has no kernels for \[100\]"):
        slim_nccl.slim(tmp_path / "libnccl.so.2", {90, 100})


def test_the_kits_nccl_is_for_ranks_that_share_a_gpu_where_the_machines_is_older(monkeypatch):
    machine = load("machine")
    versions = {"own": 22809, "kit": 23203}

    def nccl_in(files):
        which = "kit" if files == ["/kit/libnccl.so.2"] else "own"
        return {"nccl_version": versions[which], "nccl_file": which, "why_no_nccl": ""}

    monkeypatch.delenv("FARANDOLE_NCCL", raising=False)
    monkeypatch.setattr(machine, "nccl_in", nccl_in)
    found = machine.nccl("/kit/libnccl.so.2")
    assert (found["nccl_file"], found["shared_nccl_file"]) == ("own", "kit")
    versions["own"] = 23007
    assert machine.nccl("/kit/libnccl.so.2")["shared_nccl_file"] == "own"


def judged(folder, check, ends, found):
    """What faults.py makes of what two ranks left."""
    faults = load("faults")
    for rank, (at_s, status) in enumerate(ends):
        (folder / f"{rank}.end").write_text(json.dumps({"at_s": at_s, "status": status}))
    (folder / "1.kill").write_text(json.dumps({"at_s": 10.0}))
    for rank, figures in found.items():
        (folder / f"{rank}.found").write_text(json.dumps(figures))
    return faults.judge(faults.CHECKS[check], folder)


def test_a_kill_is_judged_by_the_time_from_it_to_the_others_error_and_end(tmp_path):
    survivor = {0: {"at_s": 11.0, "error_at_s": 10.5, "idle_s": 0.25}}
    figures = judged(tmp_path, "kill", [(12.0, 0), (10.0, 9)], survivor)
    assert (figures["error_s"], figures["end_s"]) == (0.5, 2.0)


@pytest.mark.parametrize(
    "ends, found, sentence",
    [
        ([(12.0, 0), (10.0, 0)], {0: 10.5}, "rank 1 was to be killed; its status is 0"),
        ([(12.0, 9), (10.0, 9)], {0: 10.5}, "rank 0 failed; wait status 9"),
        ([(12.0, 256), (10.0, 9)], {}, "rank 0 failed; wait status 256"),
        ([(12.0, 0)], {0: 10.5}, "rank 1 did not end"),
        ([(18.0, 0), (10.0, 9)], {0: 17.5}, "it took too long"),
        ([(42.0, 0), (10.0, 9)], {0: 10.5}, "rank 0 took 31.0 s to end"),
    ],
)
def test_a_kill_with_another_outcome_fails_with_a_sentence(tmp_path, ends, found, sentence):
    told = {rank: {"at_s": 11.0, "error_at_s": at_s, "idle_s": 0.1} for rank, at_s in found.items()}
    if found.get(0) == 17.5:
        told[0]["at_s"] = 17.6
    with pytest.raises(SystemExit, match=sentence):
        judged(tmp_path, "kill", ends, told)


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_without_a_gpu_run_sh_says_so_in_one_sentence_and_ends_with_2(tmp_path):
    kit = make_kit(tmp_path)
    home = tmp_path / "home"
    home.mkdir()
    done = run_sh("--kit", str(kit), "--results", str(tmp_path / "results"), HOME=str(home))
    assert done.returncode == 2
    assert done.stderr.startswith("run.sh: no GPU can be used here: ")
    assert done.stderr.count("\n") == 1 and done.stdout == ""
    assert list(home.iterdir()) == []


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--kit", "/no/such/kit"], '"/no/such/kit" is no kit: make one by test/gpu/pack.sh'),
        (["--kit"], "--kit needs a value"),
        (["--fast"], "usage: bash run.sh"),
    ],
)
def test_wrong_use_of_run_sh_is_refused_with_a_sentence(arguments, sentence):
    done = run_sh(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(f"run.sh: {sentence}")
