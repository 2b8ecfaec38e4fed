"""FARANDOLE_RECORD and `farandole report`: what runs leave, and what the page says of them."""

import html.parser
import itertools
import json
import os
import pathlib
import re
import resource
import signal
import stat
import sys
import threading
import time

import numpy as np
import pytest
import torch

import farandole as fl
import farandole.torch as hvd
import farandole.torch.distributed
import ranks
from farandole import _record, ps, report
from farandole.__main__ import main

sys.path.append(str(ranks.REPOSITORY / "test" / "fault"))

from late_ranks import Slow

pytestmark = pytest.mark.once

STEP_S, LATE_S, STEPS = 0.01, 0.02, 40
EMPTY = {"meta"}  # elements without an end


def train(trainer):
    """What each rank runs; the last one is late."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if trainer == "DDP":
        torch.distributed.init_process_group("farandole")
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        hvd.init()
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    late_s = LATE_S if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1 else 0
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(Slow.apply(torch.zeros(1, 4).requires_grad_(), time.sleep, STEP_S + late_s)).sum().backward()
        optimizer.step()


class Page(html.parser.HTMLParser):
    """Its text; every element has its end, and none loads anything."""

    def __init__(self, text):
        super().__init__()
        self.open, self.words = [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        names = {name for name, _ in attributes}
        assert tag not in ("script", "link", "img", "iframe") and not names & {"src", "href", "onload", "onerror"}
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        assert tag == "path", tag  # SVG's

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self):
        return " ".join(self.words)


def page_of(folder, capsys=None):
    assert main(["report", str(folder), "-o", str(folder / "page.html")]) == 0
    text = (folder / "page.html").read_text()
    assert not re.search(r"https?:|//|url\(|@import", text)
    return Page(text).text


def lines_of(folder):
    """By rank in the first generation."""
    files = [[json.loads(line) for line in path.read_text().splitlines()] for path in folder.glob("*.record.jsonl")]
    return {lines[1]["rank"]: lines for lines in files}


@pytest.mark.parametrize("trainer", ["optimizer", "DDP"])
def test_the_page_names_a_rank_that_makes_the_others_wait(tmp_path, trainer):
    folder = tmp_path / "made" / "run"
    ranks.communicate(ranks.start_forked(2, [__file__, trainer], FARANDOLE_RECORD=str(folder), FARANDOLE_WINDOW="3"))
    files = [*folder.iterdir()]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in files] == [0o600] * 2
    lines = lines_of(folder)
    assert lines.keys() == {0, 1}
    for mine in lines.values():
        assert 3 <= len(mine) <= 6 and mine[-1]["end"] == ""  # about a second
        assert mine[-1]["values"][mine[0]["columns"].index("steps")] >= STEPS - 1
    text = page_of(folder)
    assert re.search(r"2 ranks on 1 host ran for [\d.]+ s: (39|40) steps of [\d.]+ ms in the mean\.", text), text
    assert re.search(r"Rank 1 \(host \S+\) made the others wait [\d.]+ ms of [\d.]+ in each step: its computing", text)
    assert text.count("made the others wait") == 2  # the picture's title is the other
    assert re.search(r"FARANDOLE_WINDOW\s+3\s+2", text) and "No errors." in text


def test_the_error_that_ended_the_job_is_on_the_page(tmp_path, capsys):
    script = """
import numpy as np
import farandole as fl
fl.init()
fl.allreduce(np.ones(4), name="x")
if fl.rank() == 1:
    raise ValueError("a <b>broken</b> batch")
fl.allreduce(np.ones(4), name="y")
"""
    ranks.communicate(ranks.start_forked(2, ["-c", script], FARANDOLE_RECORD=str(tmp_path)), [1, 1])
    text = page_of(tmp_path)
    failed = r"rank 1 \(pid \d+ on host \S+\) has left after it failed: ValueError: a <b>broken</b> batch"
    assert re.search(f"It ended by an error: {failed}", text) and re.search(f"Rank 0: {failed}", text), text
    assert "It ended by an error" in capsys.readouterr().out


MEMBER = """
import os, signal
import numpy as np
import farandole as fl
rank = int(os.environ["RANK"])
fl.init(elastic=True, size=2, rank=rank, address="127.0.0.1:" + os.environ["MASTER_PORT"])
fl.allreduce(np.ones(4), name="x")
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    fl.allreduce(np.ones(4), name="y")
except fl.HorovodInternalError:
    fl.reinit()
fl.allreduce(np.ones(4), name="z")
"""


def test_generations_of_an_elastic_job_are_on_the_page(tmp_path):
    folder = str(tmp_path)
    members = ranks.start_forked(2, ["-c", MEMBER], FARANDOLE_RECORD=folder, FARANDOLE_FLIGHT_RECORDER_DIR="")
    ranks.communicate(members, [0, -signal.SIGKILL])
    lines = lines_of(tmp_path)
    begins = [(line["generation"], line["size"]) for line in lines[0][1:] if "generation" in line]
    assert begins == [(1, 2), (2, 1)]
    text = page_of(tmp_path)
    assert "1 to 2 ranks on 1 host" in text and "It ended by an error" not in text
    assert "Generation 1 begins with 2 ranks." in text
    gone = re.escape(f"without process {lines[1][0]['pid']} of {lines[1][0]['host']}, which was rank 1")
    assert re.search(f"Generation 2 begins with 1 rank; {gone}", text), text
    assert re.search(r"Rank 0: .*rank 1 \(pid \d+ on host \S+\) was killed", text), text
    assert f"The last of rank 1 (process {lines[1][0]['pid']}" in text
    assert 'submitted was allreduce "x" (call 1)' in text  # as farandole explain says


def test_a_further_init_goes_on_in_the_same_record(tmp_path):
    script = "import farandole as fl; [(fl.init(), fl.barrier(), fl.shutdown()) for _ in range(2)]"
    ranks.communicate(ranks.start_forked(1, ["-c", script], FARANDOLE_RECORD=str(tmp_path)))
    text = page_of(tmp_path)
    assert "Generation 2 begins with 1 rank." in text and re.search(r"operations\s+2 barrier", text), text


def test_what_cannot_be_written_is_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    script = "import farandole as fl; fl.init(); fl.shutdown(); print('end')"
    (said,) = ranks.communicate(ranks.start_forked(1, ["-c", script], FARANDOLE_RECORD=str(tmp_path / "file" / "run")))
    assert said.count("warning: FARANDOLE_RECORD: no more is recorded in ") == 1 and said.endswith("end\n"), said


def test_bad_metrics_leave_the_record_and_a_forked_child_closes_it(tmp_path):
    script = """
import os, pathlib
import farandole as fl
fl.init(elastic=True, size=1, rank=0, address="127.0.0.1:" + os.environ["MASTER_PORT"])
os.environ["FARANDOLE_METRICS"] = "junk"
fl.reinit()
fl.shutdown()
def is_open():
    return any(".record.jsonl" in os.path.realpath(path) for path in pathlib.Path("/proc/self/fd").iterdir())
print("parent", is_open(), flush=True)
if (child := os.fork()) == 0:
    print("child", is_open(), flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""
    (said,) = ranks.communicate(ranks.start_forked(1, ["-c", script], FARANDOLE_RECORD=str(tmp_path)))
    assert 'no metrics: FARANDOLE_METRICS="junk"' in said and "parent True" in said and "child False" in said, said
    assert [line["generation"] for line in lines_of(tmp_path)[0][1:] if "generation" in line] == [1, 2]


def test_without_a_folder_no_thread_runs_and_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FARANDOLE_RECORD", raising=False)
    fl.init()
    threads = [thread.name for thread in threading.enumerate()]
    threads += [path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
    fl.shutdown()
    assert not {"farandole-record", "farandole-files"} & {*threads}
    assert not [*tmp_path.iterdir()]


# The file.


def test_a_long_run_halves_its_resolution_and_keeps_what_begins_and_ends(tmp_path):
    file = _record.File(str(tmp_path), {"columns": ["steps"]}, most_bytes=2000)
    file.append({"at_s": 0, "generation": 1, "rank": 0, "size": 1, "values": [0]})
    now_s = 0
    while now_s < 10_000:
        now_s += file.period_s
        file.append({"at_s": now_s, "values": [now_s]})
        assert file.path.stat().st_size <= 2000
    file.append({"at_s": now_s, "end": "", "values": [now_s]})
    lines = [json.loads(line) for line in file.path.read_text().splitlines()]
    assert lines[0] == {"columns": ["steps"]} and "generation" in lines[1] and "end" in lines[-1]
    times = [line["at_s"] for line in lines[2:-1]]
    assert all(128 <= after - before <= 256 for before, after in itertools.pairwise(times))
    assert file.period_s == 256 and 30 < len(times) < 70
    assert [*tmp_path.iterdir()] == [file.path] and stat.S_IMODE(file.path.stat().st_mode) == 0o600


def test_a_file_full_of_what_has_to_stay_ends(tmp_path):
    file = _record.File(str(tmp_path), {}, most_bytes=1000)
    with pytest.raises(OSError, match=re.escape(f"{file.path} has ")):
        for i in range(100):
            file.append({"at_s": i, "generation": i, "values": []})
    file.append({"at_s": 0, "values": []})  # does nothing
    assert file.path.stat().st_size <= 1000


def test_a_disk_that_fills_while_lines_go_leaves_no_second_file(tmp_path):
    file = _record.File(str(tmp_path), {}, most_bytes=2000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(OSError):
            for i in range(100, 200):  # 25 bytes each
                if file._size_bytes > 1975:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
                file.append({"at_s": i, "values": []})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [*tmp_path.iterdir()] == [file.path] and file.path.stat().st_size > 1900


def test_a_full_disk_is_an_error_once(tmp_path):
    file = _record.File(str(tmp_path), {})
    file.close()
    file._file = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(OSError, match="No space left"):
        file.append({"at_s": 0, "values": []})
    file.append({"at_s": 1, "values": []})


# The page, of given files.

COLUMNS = ["steps", "step_seconds", "step_parts_seconds.blocked", "step_parts_seconds.input", "link_seconds", "stalls"]


def leave(folder, rank, size, rows, begin_s=1e9, head=(), **changes):
    """A rank's file: a row each second, of COLUMNS."""
    said = {"host": f"h{rank}", "pid": rank, "program": "t.py", "launcher": "none", "versions": {"farandole": "1"},
            "settings": [["FARANDOLE_WINDOW", "4", "4"]], "columns": COLUMNS} | dict(head)  # fmt: skip
    lines = [said, *({"at_s": begin_s + i, "values": row} for i, row in enumerate(rows))]
    lines[1] |= {"generation": 1, "rank": rank, "size": size}
    lines[-1] |= {"end": ""} | changes
    (folder / f"{rank}.{int(begin_s)}.record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def steps(blocked_s, input_s, count=60, link_s=0.0, stalls=0):
    """Ten steps of 100 ms in each second."""
    return [[10 * i, i, 10 * i * blocked_s, 10 * i * input_s, 10 * i * link_s, i * stalls] for i in range(count)]


def test_who_is_late_by_its_input_is_said_to_be(tmp_path):
    for rank in range(4):
        leave(tmp_path, rank, 4, steps(0.01, 0.03) if rank == 2 else steps(0.04, 0.002))
    text = page_of(tmp_path)
    late = "Rank 2 (host h2) made the others wait 30 ms of 100 in each step"
    assert f"{late}: its input takes 28 ms longer than on the others." in text
    assert re.search("4 ranks on 4 hosts ran for 59 s: 590 steps of 100 ms in the mean", text)


def test_a_rank_without_a_record_is_named(tmp_path):
    leave(tmp_path, 0, 3, steps(0, 0))
    assert "There is no record of ranks 1 and 2." in page_of(tmp_path)


def test_where_nobody_is_late_the_page_says_so(tmp_path):
    for rank in range(2):
        leave(tmp_path, rank, 2, steps(0.03, 0))
    assert "No rank came late to operations." in page_of(tmp_path)


@pytest.mark.parametrize("link_s, is_slow", [([0.06, 0.07, 0], True), ([0.06, 0.04, 0], False)])
def test_a_network_that_fills_the_steps_is_said_to(tmp_path, link_s, is_slow):
    for rank, one_s in enumerate(link_s):
        leave(tmp_path, rank, 3, steps(0.08, 0, link_s=one_s))
    text = page_of(tmp_path)
    assert "No rank came late to operations." in text and "made the others wait " not in text
    assert ("The network carries data for 60 ms of 100 in each step." in text) == is_slow


def test_computing_is_named_only_where_it_takes_longer(tmp_path):
    """Rank 1's input takes 12 of the 30 ms, and its blocked time in operations of other groups 12."""
    head = {"columns": [*COLUMNS[:4], "step_parts_seconds.other_groups"]}
    for rank, row in enumerate(([0.04, 0, 0], [0.01, 0.012, 0.012], [0.04, 0, 0])):
        leave(tmp_path, rank, 3, [[10 * i, i, *(10 * i * one for one in row)] for i in range(60)], head=head)
    text = page_of(tmp_path)
    assert "made the others wait 30 ms of 100 in each step, of which nothing alone explains half." in text


def test_causes_are_those_of_the_warnings():
    source = (ranks.REPOSITORY / "coordinator" / "diagnosis" / "late_ranks.cc").read_text()
    assert f"kLeastShare = {ps._LEAST_SHARE};" in source and "kLeastNs = kNsPerMs;" in source and ps._LEAST_NS == 1e6
    causes = re.findall(r"LateBy::\w+, &StepTimes::(\w+), ([\d.]+)\}", source)
    assert [(field, float(share)) for field, share in causes] == [(key, share) for key, (_, share) in ps.CAUSES.items()]
    assert all(f'"{words.removesuffix(" for")}' in source for words, _ in ps.CAUSES.values())


def test_the_picture_shows_when_a_rank_was_late(tmp_path):
    late = steps(0.04, 0)[:30]
    late += [[x + y for x, y in zip(late[-1], row)] for row in steps(0.01, 0.03)[1:31]]
    leave(tmp_path, 0, 2, late)
    leave(tmp_path, 1, 2, steps(0.04, 0))
    main(["report", str(tmp_path), "-o", str(tmp_path / "page.html")])
    (path,) = re.findall(r'<path class="shade2" d="M(\d+) 0h(\d+)v1h-\d+z"/>', (tmp_path / "page.html").read_text())
    assert int(path[0]) == 29 and int(path[0]) + int(path[1]) == 59  # of 59 intervals, 0.3 of a step


def test_ranks_whose_samples_are_of_other_times_are_compared(tmp_path):
    leave(tmp_path, 0, 2, steps(0.04, 0))
    late = [[x - 5 for x in row[:1]] + row[1:] for row in steps(0.01, 0.03)]  # half a second, and five steps, before
    leave(tmp_path, 1, 2, late, begin_s=1e9 - 0.5)
    main(["report", str(tmp_path), "-o", str(tmp_path / "page.html")])
    (path,) = re.findall(r'<path class="shade2" d="M(\d+) 1h(\d+)v1h-\d+z"/>', (tmp_path / "page.html").read_text())
    assert int(path[0]) <= 1 and int(path[1]) >= 57


def test_names_are_text_and_nothing_else(tmp_path):
    bad = '<script>"\x1b[2J&\u202e'
    leave(tmp_path, 0, 1, steps(0, 0), head={"host": bad, "program": bad, "versions": {bad: bad},
                                             "settings": [[bad, bad, ""]]}, end=bad)  # fmt: skip
    text = page_of(tmp_path)
    assert text.count('<script>"\\x1b[2J&\\u202e') >= 6 and "\x1b" not in text and "\u202e" not in text


def test_a_page_of_256_ranks_is_below_a_mebibyte(tmp_path):
    draw = np.random.default_rng(1)
    for rank in range(256):
        blocked_s = draw.choice([0.01, 0.04], 60).cumsum() * 10  # many are late, now and then
        leave(tmp_path, rank, 256, [[10 * i, i, blocked_s[i], 0, 0, 0] for i in range(60)])
    page_of(tmp_path)
    assert 50_000 < (tmp_path / "page.html").stat().st_size < 1 << 20


def failure(arguments, capsys):
    assert main(["report", *map(str, arguments)]) == 1
    out, err = capsys.readouterr()
    assert not out and err.startswith("farandole report: ")
    return err


def test_a_folder_without_records_is_named(tmp_path, capsys):
    for folder in (tmp_path, tmp_path / "none"):
        assert f"{folder}: no records (*.record.jsonl) that can be read" in failure([folder], capsys)


BAD_LINES = ["", "{", "[1]", '{"host": 1}', "[" * 100_000, '{"at_s": 1e999, "values": []}']


@pytest.mark.parametrize("line", BAD_LINES, ids=range(len(BAD_LINES)))
@pytest.mark.parametrize("at", [0, 2])
def test_a_file_that_cannot_be_read_is_named(tmp_path, capsys, line, at):
    leave(tmp_path, 0, 2, steps(0, 0))
    leave(tmp_path, 1, 2, steps(0, 0))
    path = next(tmp_path.glob("1.*"))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:at], line + "\n", *lines[at + 1 :]]))
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "page.html")]) == 0
    err = capsys.readouterr().err
    assert err.startswith(f"farandole report: {path}: cannot be read: ") and err.count("\n") == 1


def test_the_line_that_a_dying_process_wrote_is_left_out(tmp_path):
    leave(tmp_path, 0, 1, steps(0, 0))
    with next(tmp_path.glob("0.*")).open("a") as file:
        file.write('{"at_s": 1000')
    assert "590 steps" in page_of(tmp_path)


def test_of_several_runs_the_last_is_shown(tmp_path, capsys):
    leave(tmp_path, 0, 1, steps(0, 0, 20))
    leave(tmp_path, 0, 1, steps(0, 0, 40), begin_s=2e9)
    assert "390 steps" in page_of(tmp_path)
    assert "files of earlier runs are left out: 1" in capsys.readouterr().err


def test_a_smaller_job_soon_after_another_is_shown_alone(tmp_path, capsys):
    for rank in range(4):
        leave(tmp_path, rank, 4, steps(0, 0, 20))
    for rank in range(2):
        leave(tmp_path, rank, 2, steps(0, 0, 40), begin_s=1e9 + 24)
    text = page_of(tmp_path)
    assert "2 ranks on 2 hosts ran for 39 s: 390 steps" in text and "no record" not in text
    assert "files of earlier runs are left out: 4" in capsys.readouterr().err


def test_what_all_ranks_say_is_said_once_and_leaves_the_error(tmp_path):
    for rank in range(60):
        leave(tmp_path, rank, 60, steps(0, 0, stalls=rank % 2 + 1), end="rank 7 was killed")
    text = page_of(tmp_path)
    assert text.count("Ranks 0, 1, 2,") == 1 and text.count("rank 7 was killed") == 2  # with the head
    assert "and 44 more: rank 7 was killed" in text and "and 14 more: 2 operations waited for a rank" in text


def test_a_run_of_days_has_days_on_its_axis(tmp_path):
    day_s = 86400
    said = {"host": "h", "pid": 1, "program": "", "launcher": "", "versions": {}, "settings": [], "columns": COLUMNS}
    begin = {"at_s": 1e9, "generation": 1, "rank": 0, "size": 1, "values": []}
    lines = [said, begin, {"at_s": 1e9 + 2 * day_s, "end": "", "values": [100, 10]}]
    (tmp_path / "0.record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page_of(tmp_path)
    days = [time.strftime("<span>%Y-%m-%d %H:%M:%S</span>", time.localtime(1e9 + day * day_s)) for day in range(3)]
    assert "".join(days) in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("seconds, text", [(59, "59 s"), (61, "1 min 1 s"), (7170, "2 h 0 min"), (7200, "2 h 0 min")])
def test_a_duration_is_rounded_as_a_whole(seconds, text):
    assert report._duration(seconds) == text


def test_several_jobs_at_a_time_are_an_error(tmp_path, capsys):
    leave(tmp_path, 0, 1, steps(0, 0))
    leave(tmp_path, 0, 1, steps(0, 0), begin_s=1e9 + 5, head={"pid": 7})
    assert "records of several jobs at a time" in failure([tmp_path], capsys)


def test_a_page_that_cannot_be_written_is_an_error(tmp_path, capsys):
    leave(tmp_path, 0, 1, steps(0, 0))
    assert "No such file" in failure([tmp_path, "-o", tmp_path / "none" / "page.html"], capsys)


if __name__ == "__main__":
    train(sys.argv[1])
