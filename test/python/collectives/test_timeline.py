"""The timeline: what happened when, as chrome://tracing reads it."""

import json
import os
import statistics
import time

import numpy as np
import pytest

import farandole
from farandole.runner import cli
from ranks import on_threads, run_mpi, run_threads


def _spans(path, lane):
    events = json.loads(path.read_text())
    lanes = {
        event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"
    }
    return [event for event in events if event["tid" if "tid" in event else "pid"] == lanes[lane]]


def test_each_rank_writes_its_spans_and_their_bytes(tmp_path):
    def body(rank):
        farandole.start_timeline(tmp_path / "of.{rank}.json", mark_cycles=True)
        farandole.allreduce(np.ones(8, np.float32), name="weight")
        farandole.broadcast(np.ones(4), 0, name="weight")
        farandole.stop_timeline()

    run_threads(2, body)
    for rank in range(2):
        path = tmp_path / f"of.{rank}.json"
        spans = {event["name"]: event for event in _spans(path, "allreduce.weight") if event["ph"] == "X"}
        assert spans.keys() == {"NEGOTIATE_ALLREDUCE", "ALLREDUCE"}
        assert spans["NEGOTIATE_ALLREDUCE"]["args"]["bytes"] == 32
        assert spans["ALLREDUCE"]["ts"] >= spans["NEGOTIATE_ALLREDUCE"]["ts"]
        assert "BROADCAST" in {event["name"] for event in _spans(path, "broadcast.weight")}
        text = path.read_text()
        assert "start_time_since_epoch_in_micros" in text and "CYCLE_START" in text


def test_decisions_and_batches_have_the_times_at_which_they_end(tmp_path):
    path = tmp_path / "t.json"

    def body(rank):
        farandole.start_timeline(path)
        for _ in range(3):
            farandole.allreduce(np.ones(8), name="t")  # decided and done as soon as the engine sees it
        farandole.stop_timeline()

    run_threads(1, body)
    spans = [event for event in json.loads(path.read_text()) if event["ph"] == "X"]
    assert {event["name"] for event in spans} == {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "BATCH"}
    assert [event for event in spans if event["dur"] <= 0] == []


def test_without_a_place_for_the_rank_rank_0_alone_writes(tmp_path):
    def body(rank):
        farandole.start_timeline(tmp_path / "one.json")
        farandole.allreduce(np.ones(8), name="t")
        farandole.stop_timeline()

    run_threads(2, body)
    assert [path.name for path in tmp_path.iterdir()] == ["one.json"]
    assert {event["pid"] for event in json.loads((tmp_path / "one.json").read_text())} == {0}


def test_it_can_be_stopped_and_started_again(tmp_path):
    def body(rank):
        for file in ("a", "b"):
            farandole.start_timeline(tmp_path / file)
            farandole.allreduce(np.ones(8), name="t")
            farandole.stop_timeline()
        farandole.stop_timeline()

    run_threads(1, body)
    for file in ("a", "b"):
        assert "ALLREDUCE" in {event["name"] for event in _spans(tmp_path / file, "allreduce.t")}


@on_threads(1)
def test_a_second_file_and_a_bad_one_are_refused_by_name(rank, tmp_path):
    with pytest.raises(farandole.HorovodInternalError, match="/nowhere/t.json.*No such file"):
        farandole.start_timeline("/nowhere/t.json")
    farandole.start_timeline(tmp_path / "first")
    farandole.start_timeline(tmp_path / "first")
    with pytest.raises(ValueError, match="first.*is being written"):
        farandole.start_timeline(tmp_path / "second")


def test_an_operation_is_in_the_file_within_100_ms(tmp_path):
    path = tmp_path / "t.json"

    def body(rank):
        farandole.start_timeline(path)
        delays = []
        for i in range(11):
            farandole.allreduce(np.ones(8), name=f"weight.{i}")
            ended = time.monotonic()
            while f"allreduce.weight.{i}" not in path.read_text():
                time.sleep(0.001)
            delays.append(time.monotonic() - ended)
        assert statistics.median(delays) < 0.1, delays

    run_threads(1, body)


def test_a_file_that_takes_nothing_holds_up_no_operation_and_no_shutdown(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(pipe, bytes(4096))

    def body(rank):
        farandole.start_timeline(path)
        assert farandole.allreduce(np.ones(8), name="t").tolist() == [1.0] * 8
        with pytest.raises(farandole.HorovodInternalError, match="pipe.*could not be closed within 5000 ms"):
            farandole.stop_timeline()

    run_threads(1, body)
    os.close(pipe)


@pytest.mark.mpi
@pytest.mark.parametrize("variable", ["FARANDOLE_TIMELINE", "HOROVOD_TIMELINE"])
def test_a_variable_starts_it_with_the_job_under_mpi(tmp_path, variable):
    script = """
        import farandole, numpy as np
        farandole.init()
        farandole.allreduce(np.ones(8), name="t")
        farandole.shutdown()
        tell("done")
    """
    assert run_mpi(2, script, **{variable: str(tmp_path / "t.json")}) == ["done", "done"]
    assert "ALLREDUCE" in {event["name"] for event in _spans(tmp_path / "t.json", "allreduce.t")}


def test_the_launcher_passes_its_flags_on():
    options = cli.parse(
        ["-np", "2", "--timeline-filename", "t.json", "--timeline-mark-cycles", "python", "x"]
    )
    assert options.settings["FARANDOLE_TIMELINE"] == "t.json"
    assert options.settings["FARANDOLE_TIMELINE_MARK_CYCLES"] == "1"
