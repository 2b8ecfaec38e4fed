"""``farandole trace``: what all ranks did, on one clock, beside what torch.profiler saw."""

import gzip
import itertools
import json
import math
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import farandole
from farandole.__main__ import main
from hosts import TwoHosts, or_skip
from ranks import run_forked, run_threads

CALLS = 6
NAP_S = 0.02


def calls(rank, folder, late=1, names=("weight",), size=2):
    """Ranks whose timelines begin together; one of them starts each operation after the engines of the others have."""
    others = started.setdefault(folder, threading.Barrier(size))
    farandole.barrier()
    farandole.start_timeline(folder / "timeline.{rank}.json")
    farandole.barrier()
    for _ in range(CALLS):
        if rank == late:
            others.wait()
            time.sleep(NAP_S)
        before = farandole.counters()["submissions"]
        handles = [farandole.allreduce_async(np.ones(8, np.float32), name=name) for name in names]
        if rank != late:
            while farandole.counters()["submissions"] < before + len(names):
                time.sleep(0.001)
            others.wait()
        for handle in handles:
            farandole.synchronize(handle)
    farandole.stop_timeline()


started = {}  # for each folder, what its ranks wait at


def trace(folder, capsys, *words):
    """What it says, and the events of the trace."""
    path = folder / "out.json.gz"
    assert main(["trace", str(folder), "-o", str(path), *map(str, words)]) == 0
    text = capsys.readouterr().out
    with gzip.open(path) as file:
        content = json.load(file)
    path.unlink()
    return text, content


def spans(content, name, rank=None):
    """Ascending by their beginnings."""
    some = [event for event in content["traceEvents"] if event["ph"] == "X" and event["name"] == name]
    return sorted((one for one in some if rank in (None, one["pid"])), key=lambda event: event["ts"])


def move_clock(path, host, by_ns, from_us=0.0):
    """As if the rank had run on another host, whose clock is ahead, from a time on."""
    events = json.loads(path.read_text())
    events[0]["args"]["host"] = host
    for event in events:
        if event.get("ts", -1) >= from_us:
            event["ts"] += by_ns / 1000
    path.write_text(json.dumps(events))


def rewrite(path, change):
    """Changes the events of a timeline."""
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def profile(path, rank, times, **more):
    """A trace of a rank of these threads, as torch.profiler would write it."""
    about = json.loads((path.parent / "timeline.0.json").read_text())[0]["args"]
    events = [{"ph": "M", "name": "process_labels", "pid": about["process"], "args": {"labels": "CPU"}}]
    events += [{"ph": "X", "name": "step", "pid": about["process"], "tid": 1, "ts": ts, "dur": 1.0} for ts in times]
    events += [{"ph": ph, "name": "ac2g", "pid": about["process"], "tid": 1, "ts": times[0], "id": 1} for ph in "sf"]
    path.write_text(json.dumps({"distributedInfo": {"rank": rank}, "traceEvents": events} | more))


def test_each_operation_names_the_rank_that_slept_and_what_the_other_waited(tmp_path, capsys):
    run_threads(2, lambda rank: calls(rank, tmp_path))
    text, content = trace(tmp_path, capsys)
    operations = spans(content, "allreduce.weight")
    assert len(operations) == 2 * CALLS
    assert content["farandole"]["impossible"] == 0  # decided before all had submitted it
    for one in operations:
        told = one["args"]
        assert told["last rank"] == 1 and told["last rank is sure"]
        waited = told["waited for the last rank (us)"]
        assert waited == (0 if one["pid"] == 1 else told["later than the others by (us)"])
        assert (told["Collective name"], told["In msg nelems"], told["dtype"]) == ("allreduce", 8, "Float")
        assert (told["Group size"], told["Process Group Ranks"]) == (2, "[0, 1]")
    waits = [one["args"]["waited for the last rank (us)"] for one in operations if one["pid"] == 0]
    assert min(waits) > NAP_S * 1e6 / 2
    assert f"rank 1: last in {CALLS} of" in text or f"rank 1: last in {CALLS + 1} of" in text  # the barrier's, too
    counters = [one["args"]["us"] for one in content["traceEvents"] if one["ph"] == "C" and one["pid"] == 0]
    assert set(waits) <= set(counters)


def test_phases_lie_in_their_operation_one_after_the_other(tmp_path, capsys):
    names = [f"layer{number}" for number in range(4)]
    run_threads(2, lambda rank: calls(rank, tmp_path, names=names))
    _, content = trace(tmp_path, capsys)
    seen = set()
    for name in names:
        for one in spans(content, f"allreduce.{name}"):
            end_us = one["ts"]
            inside = [event for event in content["traceEvents"] if event.get("cat", "").startswith("farandole.")
                      and (event["pid"], event["tid"]) == (one["pid"], one["tid"])
                      and one["ts"] <= event["ts"] < one["ts"] + one["dur"]]  # fmt: skip
            for phase in sorted(inside, key=lambda event: event["ts"]):
                assert phase["ts"] == pytest.approx(end_us, abs=0.01)
                end_us = phase["ts"] + phase["dur"]
                seen.add(phase["name"])
            assert end_us == pytest.approx(one["ts"] + one["dur"], abs=0.01)
    assert {"waiting", "negotiation", "reduction"} <= seen
    transfers = spans(content, "BATCH", rank=0)
    assert sum(one["args"]["tensors"] for one in transfers if one["args"]["kind"]) == len(names) * CALLS
    assert all(one["dur"] > 0 for one in transfers)


def test_spans_of_one_track_do_not_cross(tmp_path, capsys):
    run_threads(2, lambda rank: calls(rank, tmp_path, names=[f"layer{number}" for number in range(8)]))

    def two_at_a_time(events):  # as batches of two sets are
        (first, second, *_) = (one for one in events if one["name"] == "BATCH")
        second["ts"], second["dur"] = first["ts"], second["ts"] + second["dur"] - first["ts"]
        return events

    rewrite(tmp_path / "timeline.0.json", two_at_a_time)
    _, content = trace(tmp_path, capsys)
    tracks = {}
    for event in content["traceEvents"]:
        if event.get("cat") in ("farandole", "farandole.transfer"):
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(tracks) > 2
    for track in tracks.values():
        track.sort()
        assert all(end <= begin + 0.01 for (_, end), (begin, _) in itertools.pairwise(track))


def test_an_arrow_goes_from_the_last_rank_to_each_other_one(tmp_path, capsys):
    run_threads(3, lambda rank: calls(rank, tmp_path, late=2, size=3))
    _, content = trace(tmp_path, capsys)
    ends = {}
    for event in content["traceEvents"]:
        if event.get("cat") == "last rank":
            ends.setdefault(event["id"], {})[event["ph"]] = event
    assert all(isinstance(key, int) for key in ends)
    mine = [one for one in ends.values() if one["s"]["pid"] == 2]
    assert len(mine) >= 2 * CALLS
    assert all(one.keys() == {"s", "f"} and one["s"]["ts"] <= one["f"]["ts"] for one in ends.values())


@pytest.mark.parametrize("by_ns", [86_400_000_000_000, -123_456_789])
def test_the_offset_of_a_clock_is_right_within_its_stated_error(tmp_path, capsys, by_ns):
    def body(rank):
        calls(rank, tmp_path / "a", late=1)
        calls(rank, tmp_path / "b", late=0)  # so that each of them waits at times

    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    run_threads(2, body)
    for folder in ("a", "b"):
        move_clock(tmp_path / folder / "timeline.1.json", "elsewhere", by_ns)
        _, content = trace(tmp_path / folder, capsys)
        (_, clock) = content["farandole"]["clocks"]
        assert abs(clock["offset_ns"] + by_ns) <= clock["error_ns"], (folder, clock)


def test_a_rank_that_always_waits_leaves_an_error_as_large_as_it_waits(tmp_path, capsys):
    run_threads(2, lambda rank: calls(rank, tmp_path))
    move_clock(tmp_path / "timeline.1.json", "elsewhere", 0)
    path = tmp_path / "timeline.0.json"
    events = json.loads(path.read_text())
    path.write_text(json.dumps([one for one in events if "BARRIER" not in one["name"]]))
    text, content = trace(tmp_path, capsys)
    (_, clock) = content["farandole"]["clocks"]
    assert clock["error_ns"] > NAP_S * 1e9 / 4
    assert f"right to within {clock['error_ns'] / 1000:.1f} us" in text


def test_a_clock_that_drifts_gets_another_offset(tmp_path, capsys):
    run_threads(2, lambda rank: calls(rank, tmp_path))
    path = tmp_path / "timeline.1.json"
    names = [one["ts"] for one in json.loads(path.read_text()) if one["name"] == "NEGOTIATE_ALLREDUCE"]
    move_clock(path, "elsewhere", 1_000_000_000, from_us=names[CALLS // 2])
    text, content = trace(tmp_path, capsys)
    _, *clocks = content["farandole"]["clocks"]
    assert [abs(one["offset_ns"] + moved) <= one["error_ns"] for one, moved in zip(clocks, (0, 1e9), strict=True)] == [
        True, True]  # fmt: skip
    assert "its clock drifts: 2 offsets" in text


def test_what_cannot_be_on_one_host_is_said(tmp_path, capsys):
    run_threads(2, lambda rank: calls(rank, tmp_path))
    path = tmp_path / "timeline.1.json"
    move_clock(path, json.loads(path.read_text())[0]["args"]["host"], 5_000_000_000)
    text, content = trace(tmp_path, capsys)
    assert content["farandole"]["impossible"] >= CALLS
    assert "do not trust the others" in text


def test_nobody_is_surely_the_last_where_a_rank_left_no_file(tmp_path, capsys):
    run_threads(3, lambda rank: calls(rank, tmp_path, late=2, size=3))
    (tmp_path / "timeline.2.json").unlink()
    text, content = trace(tmp_path, capsys)
    assert "rank 2 of 3 left no file here" in text
    assert content["farandole"]["missing"] == [2]
    assert {one["args"]["last rank is sure"] for one in spans(content, "allreduce.weight")} == {False}


@pytest.mark.parametrize(("key", "value"), [("size", 3), ("generation", 7), ("job", "slurm 7.0")])
def test_files_of_an_earlier_job_are_passed_over(tmp_path, capsys, key, value):
    run_threads(2, lambda rank: calls(rank, tmp_path))
    earlier = json.loads((tmp_path / "timeline.1.json").read_text())
    earlier[0]["pid"] = 2
    earlier[0]["args"] |= {"start_time_since_epoch_in_micros": 1, key: value}
    (tmp_path / "timeline.2.json").write_text(json.dumps(earlier))
    assert main(["trace", str(tmp_path), "-o", str(tmp_path / "out.json")]) == 0
    said = capsys.readouterr()
    assert "ranks 0 and 1: " in said.out
    assert f"{tmp_path / 'timeline.2.json'}: of job " in said.err


def test_what_a_host_agreed_on_is_not_matched_once_its_count_is_lost(tmp_path, capsys):
    run_threads(2, lambda rank: calls(rank, tmp_path))

    def agreed(events):  # as ranks of a host do without a decision, which has a number
        for event in events:
            if event["name"].startswith("NEGOTIATE_"):
                event["args"]["number"] = 0
        return events

    def lossy(events):
        at = [i for i, event in enumerate(events) if event["name"] == "NEGOTIATE_ALLREDUCE"][2]
        lost = {"name": "SPANS_DROPPED", "ph": "i", "pid": 1, "tid": 0, "ts": events[at]["ts"], "args": {"number": 2}}
        return [*events[:at], lost, *events[at + 2 :]]

    for rank in range(2):
        rewrite(tmp_path / f"timeline.{rank}.json", agreed)
    rewrite(tmp_path / "timeline.1.json", lossy)
    _, content = trace(tmp_path, capsys)
    assert content["farandole"]["impossible"] == 0
    matched = ["last rank" in one["args"] for one in spans(content, "allreduce.weight", rank=0)]
    assert matched == [True] * 2 + [False] * (CALLS - 2)


def test_an_operation_that_never_ended_is_drawn_to_the_last_time_known(tmp_path, capsys):
    run_threads(2, lambda rank: calls(rank, tmp_path))

    def unended(events):
        *_, last = (one for one in events if one["name"] == "ALLREDUCE")
        return [one for one in events if one is not last]

    rewrite(tmp_path / "timeline.0.json", unended)
    _, content = trace(tmp_path, capsys)
    *ended, last = spans(content, "allreduce.weight", rank=0)
    assert len(ended) == CALLS - 1 and not any("end is unknown" in one["args"] for one in ended)
    ends = [one["ts"] + one["dur"] for one in content["traceEvents"] if one["ph"] == "X" and one["pid"] == 0]
    assert last["args"]["end is unknown"] and last["ts"] + last["dur"] == pytest.approx(max(ends), abs=0.01)


def test_a_trace_of_older_torch_says_its_rank_alone_and_times_of_the_day(tmp_path, capsys):
    run_threads(2, lambda rank: calls(rank, tmp_path))
    now_us = time.time() * 1e6
    for rank in range(2):
        profile(tmp_path / f"{rank}.pt.trace.json", rank, [now_us])
    _, content = trace(tmp_path, capsys)
    (last, *_) = reversed(spans(content, "allreduce.weight", rank=1))
    for rank in range(2):
        (step,) = spans(content, "step", rank)
        assert 0 < step["ts"] - last["ts"] < 60e6
    arrows = [(one["pid"], one["id"]) for one in content["traceEvents"] if one["name"] == "ac2g"]
    assert len(arrows) == 4 and len(set(arrows)) == 2 and len({number for _, number in arrows}) == 2
    assert all(isinstance(number, int) for _, number in arrows)


@pytest.mark.parametrize("ts", [float("nan"), float("inf")])
def test_a_foreign_trace_with_a_time_that_is_no_number_is_passed_over_as_a_whole(tmp_path, capsys, ts):
    run_threads(2, lambda rank: calls(rank, tmp_path))
    profile(tmp_path / "bad.json", 0, [1.0, ts], baseTimeNanoseconds=0, host_name=socket.gethostname())
    (tmp_path / "large.json").write_text((tmp_path / "bad.json").read_text().replace("Infinity", "1e999"))
    assert main(["trace", str(tmp_path), "-o", str(tmp_path / "out.json")]) == 0
    said = capsys.readouterr()
    for name in ("bad", "large"):
        assert f"{name}.json: is no trace of torch.profiler" in said.err
    assert not spans(json.loads((tmp_path / "out.json").read_text()), "step")


def test_a_trace_that_cannot_be_written_leaves_the_one_before(tmp_path, capsys):
    run_threads(2, lambda rank: calls(rank, tmp_path))
    profile(tmp_path / "bad.json", 0, [1.0], baseTimeNanoseconds=0, host_name=socket.gethostname())
    text = (tmp_path / "bad.json").read_text()
    (tmp_path / "bad.json").write_text(text.replace('"dur": 1.0', '"dur": 1e999'))
    out = tmp_path / "out"
    out.write_text("before")
    assert main(["trace", str(tmp_path), "-o", str(out)]) == 1
    assert "out: cannot be written: Out of range float" in capsys.readouterr().err
    assert out.read_text() == "before" and not list(tmp_path.glob(".out*"))


def test_one_name_in_two_sets_is_two_operations(tmp_path, capsys):
    def body(rank):
        sets = [farandole.add_process_set([0, 1]), farandole.add_process_set([2, 3])]
        farandole.start_timeline(tmp_path / "timeline.{rank}.json")
        for _ in range(3):
            farandole.allreduce(np.ones(4), name="same", process_set=sets[rank // 2])
        farandole.stop_timeline()

    run_threads(4, body)
    _, content = trace(tmp_path, capsys)
    members = {(one["pid"], one["args"]["Process Group Ranks"]) for one in spans(content, "allreduce.same")}
    assert members == {(0, "[0, 1]"), (1, "[0, 1]"), (2, "[2, 3]"), (3, "[2, 3]")}


def test_bad_files_are_named_and_passed_over(tmp_path, capsys):
    assert main(["trace", str(tmp_path)]) == 1
    assert f"{tmp_path}: no files of flight recorders" in capsys.readouterr().err
    run_threads(2, lambda rank: calls(rank, tmp_path))
    (tmp_path / "cut.json").write_text('[{"name"')
    (tmp_path / "old.json").write_text('[{"name":"process_name","ph":"M","pid":0,"args":{"name":"rank 0"}}]')
    (tmp_path / "number.json").write_text("5")
    (tmp_path / "timeless.trace.json").write_text('{"traceEvents": []}')
    (tmp_path / "r.pt.trace.json").write_text('{"baseTimeNanoseconds": 0, "traceEvents": [{"name": "x"}]}')
    assert main(["trace", str(tmp_path), "-o", str(tmp_path / "out.json")]) == 0
    said = capsys.readouterr()
    assert "ranks 0 and 1" in said.out
    for words in ("cut.json: cannot be read: JSONDecodeError", "old.json: is no timeline of this version",
                  "timeless.trace.json: does not say which time of day",
                  "r.pt.trace.json: is of no process that left a timeline"):  # fmt: skip
        assert words in said.err
    assert main(["trace", str(tmp_path), "-o", str(tmp_path / "out.json")]) == 0  # which is no input


def test_without_timelines_flight_recorders_serve(tmp_path, capsys):
    script = f"""
        import os, pathlib, signal, time
        import farandole, numpy as np
        farandole.init()
        folder = pathlib.Path({str(tmp_path)!r})
        for call in range({CALLS}):
            while farandole.rank() == 1 and not (folder / str(call)).exists():
                time.sleep(0.001)
            before = farandole.counters()["submissions"]
            handle = farandole.allreduce_async(np.ones(8, np.float32), name="weight")
            while farandole.counters()["submissions"] == before:
                time.sleep(0.001)
            (folder / str(call)).touch()
            farandole.synchronize(handle)
        os.kill(os.getpid(), signal.SIGUSR1)
        while not list(folder.glob(f"*-rank{{farandole.rank()}}.json")):
            time.sleep(0.01)
        farandole.barrier()
        farandole.shutdown()
        tell("done")
    """
    assert run_forked(2, script, FARANDOLE_FLIGHT_RECORDER_DIR=str(tmp_path)) == ["done", "done"]
    _, content = trace(tmp_path, capsys)
    operations = spans(content, "allreduce.weight")
    assert len(operations) == 2 * CALLS
    assert {one["args"]["last rank"] for one in operations} == {1}


#: On the second host the clock is ahead by argv[2] seconds. Ranks are late by turns.
PROFILED = """
import sys, time
import torch
import farandole.torch as hvd
from torch.profiler import profile, record_function

folder = sys.argv[1]
hvd.init()
with profile() as profiler:
    for call in range(24):
        if call % 4 == hvd.rank():
            time.sleep(0.03)
        with record_function(f"call {call}"):
            hvd.allreduce(torch.ones(1000), name="weight")
profiler.export_chrome_trace(f"{folder}/{hvd.rank()}.pt.trace.json")
hvd.shutdown()
"""
AHEAD_S = 86_400


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """The folder of a job of two hosts with two ranks each, whose monotonic clocks are a day apart."""
    folder = tmp_path_factory.mktemp("profiled")
    on_second = ["sh", "-c", f'[ "$(hostname)" = played2 ] && exec unshare --time --monotonic {AHEAD_S} --fork "$@"\n'
                 'exec "$@"', "sh"]  # fmt: skip
    if subprocess.run(["unshare", "--time", "--monotonic", "1", "--fork", "true"], check=False).returncode != 0:
        pytest.skip("no clock can be moved here")
    with or_skip(TwoHosts(folder)) as hosts:
        done = hosts.mpirun(2, [*on_second, sys.executable, "-c", PROFILED, str(folder)],
                            FARANDOLE_TIMELINE=str(folder / "timeline.{rank}.json"))  # fmt: skip
    assert done.returncode == 0, done.stdout
    return folder


def submitted(folder, rank):
    """When the rank submitted each operation, on the clock of the first host."""
    events = json.loads((folder / f"timeline.{rank}.json").read_text())
    start_us = events[0]["args"]["start_ns"] / 1000 - (AHEAD_S * 1e6 if rank >= 2 else 0)
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    some = [event for event in events if event["name"] == "NEGOTIATE_ALLREDUCE"]
    return [start_us + event["ts"] for event in some if tracks[event["tid"]] == "allreduce.weight"]


@pytest.mark.mpi
def test_two_hosts_whose_clocks_differ_by_a_day_are_within_the_stated_error(profiled, capsys):
    text, content = trace(profiled, capsys)
    first, second = content["farandole"]["clocks"]
    assert (first["host"], first["offset_ns"], first["error_ns"]) == ("played1", 0, 0)
    assert abs(second["offset_ns"] + AHEAD_S * 10**9) <= second["error_ns"] < 10**9
    assert content["farandole"]["impossible"] == 0
    assert "host played1: ranks 0 and 1; all times are on its clock" in text
    told = [one["args"] for one in spans(content, "allreduce.weight", rank=0)]
    times = zip(*(submitted(profiled, rank) for rank in range(4)), strict=True)  # of each operation, by rank
    truth = [max(range(4), key=one.__getitem__) for one in times]
    sure = [(args["last rank"], last) for args, last in zip(told, truth, strict=True) if args["last rank is sure"]]
    assert sure and all(ours == last for ours, last in sure)


@pytest.mark.mpi
def test_what_torch_profiler_saw_lies_around_the_operation_it_waited_for(profiled, capsys):
    _, content = trace(profiled, capsys)
    tolerance_us = 1000  # between the time of day and the monotonic clock, as either profiler read them
    for rank in range(4):
        operations = spans(content, "allreduce.weight", rank)
        seen = [one for call in range(24) for one in spans(content, f"call {call}", rank)]
        assert len(operations) == len(seen) == 24
        for mine, outer in zip(operations, seen, strict=True):
            assert outer["ts"] <= mine["ts"] + tolerance_us
            assert mine["ts"] + mine["dur"] <= outer["ts"] + outer["dur"] + tolerance_us


@pytest.mark.mpi
def test_holistic_trace_analysis_reads_a_file_of_each_rank(profiled, tmp_path, capsys):
    analysis = pytest.importorskip("hta.trace_analysis")
    _, content = trace(profiled, capsys, "--split", tmp_path)
    read = analysis.TraceAnalysis(trace_dir=str(tmp_path))
    breakdown = read.get_temporal_breakdown(visualize=False).set_index("rank")
    _, kernels = read.get_gpu_kernel_breakdown(visualize=False)
    assert sorted(breakdown.index) == [0, 1, 2, 3]
    for rank in range(4):
        transfers = [one for one in spans(content, "BATCH", rank) if one["args"]["kind"] == "allreduce"]
        # It counts whole microseconds inside of each.
        us = sum(math.floor(one["ts"] + one["dur"]) - math.ceil(one["ts"]) for one in transfers)
        assert breakdown["non_compute_time(us)"][rank] == us
        (kernel,) = kernels[kernels["rank"] == rank].to_dict("records")
        assert (kernel["name"], kernel["sum (us)"]) == ("ncclDevKernel_AllReduce_farandole", us)
