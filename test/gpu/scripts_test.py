"""The scripts of this folder where no GPU is: the table from recorded lines, and polite refusals."""

import importlib.util
import json
import pathlib
import subprocess
import sys

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
        ],
        "bench-plane": [
            {"bench": "plane", "way": "solo", "host_us": 12.0, "launches_per_batch": 1.0},
            {"bench": "plane", "way": "staged", "host_us": 900.0, "launches_per_batch": 8.0},
        ],
        "bench-step": [
            {"bench": "step", "ranks": 1, "plain_ms": 100.0, "overhead_percent": 0.5,
             "ddp_overhead_percent": 1.5, "hidden": None},
        ],
        "bench-overlap": [
            {"bench": "step", "ranks": 2, "plain_ms": 100.0, "overhead_percent": 0.5,
             "ddp_overhead_percent": 1.5, "hidden": 0.95},
        ],
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
    assert len(targets(tmp_path)) == 9
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
        ("bench-plane", 0, "host_us", 300.1, "start to launch of a batch <= 300 us"),
        ("bench-plane", 0, "launches_per_batch", 2.5, "<= 2 launches of ours per batch"),
        ("bench-step", 0, "overhead_percent", 1.6, "world-1 step overhead <= DDP's"),
        ("bench-overlap", 0, "hidden", 0.89, ">= 90 % of communication hidden where there is something to hide"),
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
    assert said.count("| FAKE: ") == 10
    assert json.loads((tmp_path / "table.json").read_text())["fake"] is True


def test_a_line_cut_short_by_its_time_is_left_out(tmp_path):
    (tmp_path / "bench-x.log").write_text('{"bench": "copy", "gb_per_s": 1.0}\n{"bench": "mo')
    assert list(table.read_log(tmp_path / "bench-x.log")) == [{"bench": "copy", "gb_per_s": 1.0}]


def run_sh(*arguments, **variables):
    environment = {"PATH": "/usr/bin:/bin", "FARANDOLE_PYTHON": sys.executable} | variables
    return subprocess.run(
        ["bash", FOLDER / "run.sh", *arguments],
        env=environment, capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip


def has_gpu():
    return load("machine").gpus()["gpu_count"] > 0


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_without_a_gpu_run_sh_says_so_in_one_sentence_and_ends_with_2(tmp_path):
    kit = tmp_path / "kit"
    (kit / "test" / "gpu").mkdir(parents=True)
    (kit / "about.json").write_text("{}")
    (kit / "test" / "gpu" / "machine.py").write_text((FOLDER / "machine.py").read_text())
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
