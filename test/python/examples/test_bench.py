"""python -m farandole.bench: what it measures, its report, and that it refuses wrong results."""

import json
import math
import os
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

import farandole
from farandole import bench, compat
from ranks import PYTHON_PATH, mpirun, run_threads

pytestmark = pytest.mark.once


@pytest.fixture
def not_idle(monkeypatch):
    """Saves the time that ranks idle."""
    monkeypatch.setattr(bench, "idle_shares", lambda: [0.0, 0.0])


@pytest.mark.parametrize("text, size_bytes", [
    ("4", 4), ("256B", 256), ("64K", 64 << 10), ("64KiB", 64 << 10), ("16m", 16 << 20), ("1G", 1 << 30),
])  # fmt: skip
def test_sizes_are_read(text, size_bytes):
    assert bench.parse_size(text) == size_bytes


@pytest.mark.parametrize("name, tensors, parameters", [
    ("resnet50", 161, 25_557_032), ("bert-large", 398, 336_226_108), ("gpt2", 148, 124_439_808),
])  # fmt: skip
def test_the_sets_have_the_tensors_of_the_models(name, tensors, parameters):
    shapes = bench.SETS[name]()
    assert (len(shapes), sum(map(math.prod, shapes))) == (tensors, parameters)


@pytest.mark.parametrize("collective, factor", [
    ("allreduce", 1.5), ("broadcast", 1), ("allgather", 0.75), ("reducescatter", 0.75), ("alltoall", 0.75),
])  # fmt: skip
def test_bus_bandwidth_counts_what_each_link_carries(collective, factor):
    assert bench.bus_factor(collective, 4) == factor


@pytest.mark.parametrize("words, message", [
    (["--sizes", "12Q"], "argument --sizes: '12Q' is not a size; write 4, 64K, 16M or 1G"),
    (["--sizes", "0"], "'0' is not a size"),
    (["--rounds", "0"], "argument --rounds: 0 is less than 1"),
    (["--sets", "resnet"], "invalid choice: 'resnet'"),
])  # fmt: skip
def test_a_wrong_option_is_refused(words, message, capsys):
    with pytest.raises(SystemExit) as left:
        bench.parse_arguments(words)
    assert left.value.code == 2 and message in capsys.readouterr().err


def summary_of(figures):
    """Two ranks' rows of a case of 1 MB between farandole, a peer and the yardstick."""
    case = bench.Case("c", "allreduce", 10**6, 1, print, {}, [], {})
    names = ["farandole", "peer", "rmw"]
    rows = run_threads(2, lambda _: bench.summarize(case, names, np.array(figures), dict.fromkeys(names, 0)))
    return {row["implementation"]: row for row in rows[0]}


def test_interrupted_trials_do_not_count_and_ratios_are_of_rounds():
    seconds = [[1e-3, 1e-3, 9e-3], [2e-3, 4e-3, 9e-3], [5e-4] * 3]
    rows = summary_of([seconds, [[0, 0, 7], [0, 0, 0], [0, 0, 0]]])
    assert rows["farandole"]["seconds"][1] == pytest.approx(1e-3)
    assert rows["farandole"]["algorithm_gb_per_s"] == pytest.approx(1.0)
    assert rows["farandole"]["bus_gb_per_s"] == pytest.approx(1.0)
    assert rows["farandole"]["share_of_rmw"] == pytest.approx(0.5)
    assert (rows["farandole"]["clean"], rows["farandole"]["all_kept"]) == (2, False)
    assert rows["peer"]["ratio"] == pytest.approx([2.2, 3.0, 3.8])


def test_all_trials_count_where_fewer_than_a_third_were_not_interrupted():
    seconds = [[1e-3, 2e-3, 3e-3, 4e-3]] * 3
    rows = summary_of([seconds, [[0, 1, 1, 1], [0] * 4, [1] * 4]])
    assert (rows["farandole"]["clean"], rows["farandole"]["all_kept"]) == (1, True)
    assert rows["farandole"]["seconds"][1] == pytest.approx(2.5e-3)
    assert (rows["peer"]["clean"], rows["peer"]["all_kept"]) == (4, False)


def connect_to(allreduce):
    """What PEERS says of a library whose allreduce, and no other call, is ``allreduce``."""

    def make():
        barrier = farandole.barrier
        return bench.Peer("1.0", np.asarray, barrier, [allreduce] * 5, allreduce, lambda _: None)

    return make, "json"


def right(array, name):
    return farandole.allreduce_(array, name=f"fake.{name}", op=farandole.Sum)


def wrong_once(call):
    """An allreduce whose call number ``call`` gives rank 1 one wrong element."""
    calls = {}

    def allreduce(array, name):
        result, rank = right(array, name), farandole.rank()
        calls[rank] = calls.get(rank, 0) + 1
        if (rank, calls[rank]) == (1, call):
            result[3] += 1
        return result

    return allreduce


def run_beside(peer, monkeypatch, *words):
    """The exit codes of two ranks that measure a library made up for the test."""
    monkeypatch.setitem(bench.PEERS, "fake", peer)
    argv = ["--sizes", "2M", "--rounds", "3", "--peers", "fake", *words]
    return run_threads(2, lambda _: bench.main(argv))


def test_a_library_that_is_right_is_measured(not_idle, monkeypatch, tmp_path, capsys):
    path = tmp_path / "report.json"
    assert run_beside(connect_to(right), monkeypatch, "--json", str(path)) == [0, 0]
    rows = json.loads(path.read_text())["rows"]
    assert [row["implementation"] for row in rows] == ["farandole", "fake", "rmw"]
    assert "wrong" not in capsys.readouterr().err


@pytest.mark.parametrize("call", [1, 5])
def test_a_wrong_result_in_any_trial_ends_the_run(call, not_idle, monkeypatch, capsys):
    assert run_beside(connect_to(wrong_once(call)), monkeypatch) == [1, 1]
    said = "fake: allreduce float32, 2097152 bytes, is wrong on rank 1: element 3 of tensor 0 is 8.0, "
    assert said + "expected 7.0" in capsys.readouterr().err


def test_a_library_that_one_rank_lacks_is_not_measured(not_idle, monkeypatch, tmp_path, capsys):
    def make():
        if farandole.rank() == 1:
            raise OSError("no such device")
        return connect_to(right)[0]()

    assert run_beside((make, "json"), monkeypatch) == [0, 0]
    assert "not measured: fake: rank 1: OSError: no such device" in capsys.readouterr().out
    assert run_beside((make, "no_such_module"), monkeypatch) == [0, 0]
    assert "not measured: fake: rank 0: ModuleNotFoundError" in capsys.readouterr().out


def test_a_library_without_a_collective_is_not_measured_in_it(not_idle, monkeypatch, capsys):
    def refuse(array, name):
        raise NotImplementedError("later")

    assert run_beside(connect_to(refuse), monkeypatch) == [0, 0]
    said = "not measured: fake, allreduce float32: rank 0: NotImplementedError: later"
    assert said in capsys.readouterr().out


def test_all_ranks_are_ready_when_the_yardstick_starts(monkeypatch):
    began, slept = threading.Event(), threading.Event()

    def sleep(_):
        if farandole.rank() == 1:
            began.wait(0.5)  # in vain: the other one waits for this rank
            slept.set()

    def run():
        began.set()
        return [] if slept.is_set() else [np.ones(1)]

    monkeypatch.setattr(bench, "time", SimpleNamespace(sleep=sleep, perf_counter=time.perf_counter))
    case = bench.Case("c", "allreduce", 1024, 1, lambda: None, {"rmw": run}, [np.zeros(1)], {})
    found = [trial[2] for trial in run_threads(2, lambda _: bench._trial(case, "rmw", {}))]
    assert found == ["", ""], "a rank started while the other one was still asleep"


FIELDS = {"case", "bytes", "implementation", "seconds", "algorithm_gb_per_s", "bus_gb_per_s", "ratio",
          "share_of_rmw", "submit_s", "memory_bytes", "clean", "rounds", "all_kept"}  # fmt: skip


@pytest.mark.mpi
def test_two_processes_measure_every_collective_and_write_a_report(tmp_path):
    path, picture = tmp_path / "report.json", tmp_path / "report.png"
    done = mpirun(2, [
        "-m", "farandole.bench", "--sizes", "64K", "--rounds", "2", "--latency", "--dtypes", "int64",
        "--collectives", *bench.COLLECTIVES, "--json", str(path), "--png", str(picture),
        "--peers", *bench.PEERS,
    ], PYTHONPATH=os.pathsep.join([compat.path(), PYTHON_PATH]))  # fmt: skip
    assert done.returncode == 0, done.stdout
    report = json.loads(path.read_text())
    assert report["fingerprint"].keys() >= {"cpu", "ranks", "hosts", "versions", "load_before", "load_after"}
    assert report["fingerprint"]["ranks"] == 2 and len(report["idle_share"]) == 2
    assert all(0 <= share < 0.05 for share in report["idle_share"])
    assert all(row.keys() == FIELDS for row in report["rows"])
    cases = {(row["case"], row["bytes"]) for row in report["rows"]}
    tables = {(f"{what} int64", size) for what in bench.COLLECTIVES for size in (8, 64 << 10)}
    small_parts = {(f"{what} int64", 16) for what in ("allgather", "reducescatter", "alltoall")}
    whole = {(f"{what} int64", 8) for what in ("allgather", "reducescatter", "alltoall")}
    assert cases == tables - whole | small_parts | {("200 x 256 bytes", 51_200)}
    for row in report["rows"]:
        low, middle, high = row["seconds"]
        assert 0 < low <= middle <= high and row["clean"] <= row["rounds"] == 2
        assert row["algorithm_gb_per_s"] == pytest.approx(row["bytes"] / middle / 1e9)
    submits = {row["implementation"] for row in report["rows"] if row["submit_s"]}
    assert "farandole" in submits and "rmw" not in submits
    measured = report["fingerprint"]["versions"].keys() | report["missing"].keys()
    assert {"farandole", "mpi", "gloo"} <= measured
    assert "is Farandole's own" in report["missing"]["horovod"]
    assert "farandole" in done.stdout and "load_after" in done.stdout
    assert picture.stat().st_size > 0 or "matplotlib cannot be imported" in done.stdout


def _row(who, size_bytes, ratio, case="allreduce float32"):
    return {"case": case, "bytes": size_bytes, "implementation": who, "ratio": [0.1, ratio, 9.0]}


def test_the_report_ends_with_how_fast_it_is_beside_each_library():
    rows = [_row(who, size, ratio) for size, ratio in ((4, 5.12), (1 << 20, 3.0), (4 << 20, 2.2))
            for who in ("farandole", "mpi", "gloo", "rmw")]  # fmt: skip
    rows.append(_row("gloo", 8, 7.0, "200 x 256 bytes"))
    of = "5.12 times as fast as {0} at 4 bytes and 2.20 times as fast as {0} at 4 MiB"
    assert bench.comparison(rows) == f"allreduce float32: Farandole is {of.format('mpi')}; {of.format('gloo')}."
    assert bench.comparison([row for row in rows if row["implementation"] == "farandole"]) == ""
    assert bench.comparison([]) == ""


def test_help_is_printed_by_rank_0_alone(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    assert bench.main(["--help"]) == 0 and capsys.readouterr().out == ""
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit):
        bench.main(["--help"])
    assert capsys.readouterr().out.startswith("usage: farandole bench")


def test_a_picture_has_bars_in_milliseconds_and_one_colour_for_each_library(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    rows = [
        {"case": case, "bytes": size_bytes, "implementation": who, "seconds": [0.01, 0.0205, 0.03], "bus_gb_per_s": 1.0}
        for case, size_bytes in (("allreduce int64", 8), ("allreduce int64", 64 << 10), ("resnet50", 98 << 20))
        for who in ("farandole", "gloo", "rmw")
    ]
    rows += [rows[-3] | {"case": "resnet50 optimizer", "implementation": who} for who in ("farandole", "bare")]
    path = tmp_path / "picture.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # letters, not outlines
        bench.draw(rows, str(path))
    text = path.read_text()
    assert [text.count(f">{words}<") for words in ("64K", "20.5", "Farandole", "gloo")] == [1, 5, 3, 2]
    assert "98 MiB), all started, then waited for: milliseconds" in text
    assert "yardstick: NumPy scales" in text and "yardstick: the step" in text
    farandole_blue, gloo_green = "#1f77b4", "#2ca02c"
    assert text.count(f"fill: {farandole_blue}") > 1 and text.count(f"fill: {gloo_green}") > 0


def test_a_model_is_measured_as_tensors_and_through_the_optimizer(not_idle, monkeypatch, tmp_path):
    pytest.importorskip("torch")
    monkeypatch.setitem(bench.SETS, "gpt2", lambda: [(3, 5), (5,), (7, 2, 2)])
    path = tmp_path / "report.json"
    argv = ["--sizes", "--sets", "gpt2", "--rounds", "2", "--peers", "--json", str(path)]
    assert run_threads(2, lambda _: bench.main(argv)) == [0, 0]
    rows = [(row["case"], row["implementation"]) for row in json.loads(path.read_text())["rows"]]
    assert rows == [
        ("gpt2", "farandole"), ("gpt2", "rmw"), ("gpt2 optimizer", "farandole"), ("gpt2 optimizer", "bare"),
    ]  # fmt: skip


def test_a_set_that_does_not_fit_is_skipped_with_a_message(not_idle, monkeypatch, capsys):
    monkeypatch.setitem(bench.SETS, "gpt2", lambda: [(1 << 42,)])
    argv = ["--sizes", "--sets", "gpt2", "--peers"]
    assert run_threads(2, lambda _: bench.main(argv)) == [0, 0]
    assert "not measured: gpt2: 67108864 MiB per rank do not fit into memory" in capsys.readouterr().out


def test_a_dtype_whose_sums_would_not_be_exact_is_left_out():
    arguments, missing = bench.parse_arguments(["--dtypes", "uint8"]), {}
    cases = run_threads(26, lambda _: list(bench.cases(arguments, {}, missing)))
    assert not any(cases)
    assert missing == {"uint8": "sums of the test data over 26 ranks do not fit into it"}
