"""Lines on the screen and in files; and which rank failed first, played with times instead of processes."""

import datetime
import io
import itertools
import random

import pytest

from farandole.runner import output
from farandole.runner.output import (
    CONSEQUENCES_AFTER_S,
    MAX_LINE_BYTES,
    MERGE_S,
    REPORT_AFTER_S,
    FirstFailure,
    Line,
    LineSplitter,
    Merger,
    Writer,
)

pytestmark = pytest.mark.once

TRACEBACK = ["Traceback (most recent call last):", '  File "x.py", line 1, in <module>']
ABORTED = [*TRACEBACK, 'farandole.exceptions.AbortedError: allreduce "x": rank 1 has left']
ERROR = [*TRACEBACK, "KeyError: 'x'"]


class Play:
    """A FirstFailure and what it has shown."""

    def __init__(self):
        self.err = io.BytesIO()
        self.failure = FirstFailure(Writer(io.BytesIO(), self.err))

    def writes(self, rank, texts):
        for text in [texts] if isinstance(texts, str) else texts:
            self.failure.line(Line(rank, True, text.encode() + b"\n"))

    def fails(self, rank, texts, at_s):
        """By an uncaught error, which the rank reports and then writes."""
        text = "".join(text + "\n" for text in texts)
        self.failure.reported(rank, text, texts == ABORTED, at_s)
        self.writes(rank, texts)

    def ends(self, rank, code, at_s, **how):
        self.failure.ended(rank, code, at_s, **how)

    @property
    def shown(self):
        return self.err.getvalue().decode().splitlines()

    def blamed(self):
        said = [line.removeprefix("farandolerun: ") for line in self.shown if line.startswith("farandolerun")]
        return [line for line in said if "failed first" in line]


def marked(rank, texts):
    return [f"[{rank}] {text}" for text in texts]


@pytest.fixture
def play():
    return Play()


def test_every_line_is_shown_at_once_a_traceback_and_what_follows_too(play):
    play.writes(0, ERROR)
    play.writes(1, "warning")
    assert play.shown == [*marked(0, ERROR), "[1] warning"]
    play.failure.tick(100.0)
    assert play.failure.finish() is None
    assert play.blamed() == []


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_the_earliest_error_is_blamed_whoever_ends_first_and_shown_below(play, order):
    play.failure.reported(1, "".join(text + "\n" for text in ERROR), False, 1.000)
    play.fails(2, ERROR, 1.001)
    play.writes(1, ERROR)
    play.fails(0, ERROR, 1.002)
    before = len(play.shown)
    for number, rank in enumerate(order):
        play.ends(rank, 1, 1.1 + number / 100)
    play.failure.tick(1.2 + REPORT_AFTER_S)
    assert play.shown[before:] == [
        "farandolerun: rank 1 failed first, with exit code 1; its error once more:", *marked(1, ERROR),
    ]  # fmt: skip
    assert play.failure.finish() == 1
    assert play.failure.error_text == "".join(text + "\n" for text in ERROR)


@pytest.mark.parametrize("is_heard_first", [True, False])
def test_what_the_first_error_knows_is_said_at_once_above_the_tracebacks(play, is_heard_first):
    cause = "rank 1 (pid 77 on host a) was killed by signal 9 (Killed)"
    facts = {"failed_ranks": [1], "cause": cause, "kind": "killed"}
    if is_heard_first:
        play.failure.reported(0, "".join(text + "\n" for text in ABORTED), True, 1.0, facts)
        play.writes(0, ABORTED)
    play.fails(2, ERROR, 1.1)
    assert play.shown[0] == f"farandolerun: {cause if is_heard_first else 'rank 2 has failed: ' + ERROR[-1]}"
    assert sum(line.startswith("farandolerun") for line in play.shown) == 1


def test_ranks_that_wait_for_different_operations_are_not_said_to_have_failed(play):
    cause = "ranks wait for different operations, and none can go on"
    play.failure.reported(1, "", True, 1.0, {"failed_ranks": [0, 1], "cause": cause, "kind": "diverged"})
    play.ends(1, 1, 1.1)
    assert play.shown == [f"farandolerun: {cause}"]


def test_an_error_that_the_program_handles_is_not_told(play):
    for rank in (0, 2):  # they end with 0; rank 1 raised the error for them
        play.failure.reported(rank, "", True, 1.0, {"failed_ranks": [1], "cause": "TypeError: cannot pickle"})
    for rank in range(3):
        play.ends(rank, 0, 1.1)
    assert play.failure.finish() is None
    assert play.shown == []


@pytest.mark.parametrize("facts", [
    {"failed_ranks": []}, {"failed_ranks": [0, 1, 2], "kind": "diverged", "cause": "ranks wait"},
])  # fmt: skip
@pytest.mark.parametrize("is_mixed", [False, True])
def test_of_an_error_that_all_ranks_raise_no_rank_is_blamed_and_it_is_shown_whole(play, facts, is_mixed):
    text = "".join(text + "\n" for text in [*TRACEBACK, "MismatchError: shapes differ"])
    for rank in (2, 0, 1):
        play.failure.reported(rank, text, False, 1.0 + rank / 100, facts | {"is_shared": True})
    lines = text.splitlines()
    if is_mixed:
        play.writes(0, lines[0])
    for rank, rest in {2: lines, 0: lines[is_mixed:], 1: lines}.items():
        play.writes(rank, rest)
        play.ends(rank, 1, 1.1)
    play.failure.tick(1.1 + REPORT_AFTER_S)
    assert play.shown[0] == "farandolerun: MismatchError: shapes differ"
    blamed = "no rank failed first: ranks 0, 1, 2 ended by the same error, with exit code 1"
    assert play.blamed() == [blamed + "; as rank 0 wrote it:" * is_mixed]
    assert not is_mixed or play.shown[-1] == "[0] MismatchError: shapes differ"
    assert play.failure.finish() == 1


def test_of_an_error_with_many_lines_the_first_is_said(play):
    text = "RuntimeError: CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA\n"
    play.failure.reported(1, text, False, 1.0, {"cause": text.splitlines()[0]})
    assert play.shown == ["farandolerun: rank 1 has failed: RuntimeError: CUDA error: out of memory"]


def test_of_ranks_that_did_not_meet_it_is_said_what_happened_between_whom(play):
    error = "farandole.exceptions.OperationTimeoutError: rank 1 did not "
    why = 'reach rank 0 at gone:1 within 5 s: the host name "gone" cannot be resolved'
    for rank, text in {0: "join rank 0 at a:1 within 5 s", 1: why, 2: "join rank 0 at a:1 in time"}.items():
        facts = {"failed_ranks": [], "is_of_init": True}
        play.failure.reported(rank, f"{TRACEBACK[0]}\n{error}{text}\n", True, 1.0 + rank / 100, facts)
        play.ends(rank, 1, 1.1)
    play.failure.tick(1.1 + CONSEQUENCES_AFTER_S)
    assert play.blamed() == [f"no rank failed first: rank 1 did not {why}; exit code 1"]


@pytest.mark.parametrize("is_uncaught", [True, False])
def test_a_consequence_is_never_first_if_another_fails_by_itself(play, is_uncaught):
    if is_uncaught:
        play.fails(0, ABORTED, 1.0)
    else:  # the program has caught it, wrote it, and ends
        play.writes(0, ABORTED)
        play.failure.reported(0, "", True, 1.05)
    play.ends(0, 1, 1.1)
    play.failure.tick(1.1 + REPORT_AFTER_S)
    assert play.blamed() == []
    play.ends(1, 3, 1.5)
    play.failure.tick(1.5 + REPORT_AFTER_S)
    assert play.blamed() == ["rank 1 failed first, with exit code 3"]
    assert play.failure.finish() == 3


def told(kind, cause, **more):
    place = {"host": "a", "pid": 77}
    return {"failed_ranks": [1], "kind": kind, "cause": f"rank 1 (pid 77 on host a) {cause}", **place, **more}


LEFT = "rank 1 failed first: it ended with exit code 0 while other ranks waited for it"
STOPPED = "is stopped (SIGSTOP or Ctrl-Z); it has not run for 2.0 s"
KILLED = told("killed", "was killed by signal 9 (Killed)")
#: What happens, after how long it is reported, who is blamed, and the exit code.
BLAMES = {
    "an error that stands first is not repeated": (
        lambda play: (play.fails(1, ERROR, 1.0), play.fails(0, ABORTED, 1.1), play.ends(1, 1, 1.2)),
        1.2 + REPORT_AFTER_S, "rank 1 failed first, with exit code 1", 1,
    ),
    "consequences alone, after a longer while": (
        lambda play: (play.fails(0, ABORTED, 1.0), play.ends(0, 1, 1.1)),
        1.1 + CONSEQUENCES_AFTER_S, "rank 0 failed first, with exit code 1", 1,
    ),
    "a rank that left with 0 is the cause of mpirun's signals": (
        lambda play: (play.ends(1, 0, 1.0), *[play.ends(rank, -15, 1.1, by_mpirun=True) for rank in (0, 2)]),
        1.1 + REPORT_AFTER_S, LEFT, 1,
    ),
    "and of the others' errors": (
        lambda play: (play.ends(1, 0, 1.0), play.fails(0, ABORTED, 1.05), play.ends(0, 1, 1.1)),
        1.1 + REPORT_AFTER_S, LEFT, 1,
    ),
    "a rank that others than mpirun kill is the cause": (
        lambda play: (play.ends(1, 0, 1.0), play.ends(0, -9, 1.1)),
        1.1 + REPORT_AFTER_S, "rank 0 failed first, ended by SIGKILL (exit code 137)", 137,
    ),
    "an error that was only logged is not blamed for a later end": (
        lambda play: (play.writes(1, ERROR), play.ends(0, -11, 60.0)),
        60.0 + REPORT_AFTER_S, "rank 0 failed first, ended by SIGSEGV (exit code 139)", 139,
    ),
    "who caught an engine's error and ends with 0 has not failed": (
        lambda play: (play.failure.reported(1, "", True, 1.0), play.ends(0, -9, 1.1)),
        1.1 + REPORT_AFTER_S, "rank 0 failed first, ended by SIGKILL (exit code 137)", 137,
    ),
    "what others know of the first is said with it": (
        lambda play: (
            play.ends(1, -9, 1.0),
            play.failure.reported(0, "", True, 1.1, KILLED | {"last": 'allreduce "x"', "last_age_s": 0.31}),
            play.ends(0, 1, 1.2),
        ),
        1.2 + REPORT_AFTER_S,
        "rank 1 failed first, ended by SIGKILL (exit code 137); pid 77 on host a; its last operation: "
        'allreduce "x", 0.3 s before', 137,
    ),
    "a rank that stands still, not those that gave it up": (
        lambda play: (play.failure.reported(0, "", True, 1.0, told("stopped", STOPPED)), play.ends(0, 1, 1.1)),
        1.1 + REPORT_AFTER_S, f"rank 1 failed first: it {STOPPED}; pid 77 on host a", 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BLAMES)
def test_who_is_blamed(play, case):
    happens, at_s, blamed, code = BLAMES[case]
    happens(play)
    play.failure.tick(at_s)
    assert (play.shown[-1], play.blamed()) == (f"farandolerun: {blamed}", [blamed])
    assert play.failure.finish() == code


def test_a_rank_killed_after_its_error_failed_with_1(play):
    play.fails(1, ERROR, 1.0)
    play.fails(0, ABORTED, 1.1)
    play.ends(0, 1, 1.2)
    play.failure.tick(1.2 + REPORT_AFTER_S)
    play.ends(1, -15, 1.6)
    assert play.blamed() == ["rank 1 failed first, with exit code 1"]
    assert play.failure.finish() == 1


CHAINED = [*ERROR, "", "During handling of the above exception, another exception occurred:", "", *ERROR]
STALL = "[farandole {}/3] warning: stalled for 10 s: missing: rank 1"
#: What ranks write, one line in turn ("out: " to stdout), and what is shown.
MERGED = {
    "a traceback of all, however they mix": (
        {0: ERROR, 1: ERROR, 2: ERROR}, [f"[0-2] {line}" for line in ERROR],
    ),
    "of some, and another one": (
        {0: ERROR, 1: ABORTED, 2: ERROR, 4: ERROR}, [*(f"[0,2,4] {line}" for line in ERROR), *marked(1, ABORTED)],
    ),
    "with what it is chained to": (
        {0: CHAINED, 1: CHAINED}, [f"[0-1] {line}" for line in CHAINED],
    ),
    "a line of Farandole's log": (
        {0: [STALL.format(0)], 2: [STALL.format(2)]}, ["[0,2] " + STALL.replace(" {}/3", "")],
    ),
    "not what one rank alone says": ({0: [STALL.format(0)]}, marked(0, [STALL.format(0)])),
    "each rank's lines stay in order": (
        {0: [STALL.format(0), "a", STALL.format(0)], 1: [STALL.format(1), "b", "c"]},
        ["[0-1] " + STALL.replace(" {}/3", ""), "[0] a", f"[0] {STALL.format(0)}", "[1] b", "[1] c"],
    ),
    "nor lines of the program": ({0: ["a"], 1: ["a"]}, ["[0] a", "[1] a"]),
    "nor its output": (
        {0: [STALL.format(0), "out: a"], 1: [STALL.format(1), "out: a"]},
        ["[0-1] " + STALL.replace(" {}/3", ""), "[0] a", "[1] a"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MERGED)
def test_errors_and_warnings_of_several_ranks_are_shown_once(case):
    said, shown = MERGED[case]
    both = io.BytesIO()
    writer = Writer(both, both)
    merger = Merger(writer.show)
    for texts in itertools.zip_longest(*said.values()):
        for rank, text in zip(said, texts):
            if text is not None:
                line = text.removeprefix("out: ")
                merger.add(Line(rank, line == text, line.encode() + b"\n"), 1.0)
    merger.tick(1.0 + MERGE_S)
    assert both.getvalue().decode().splitlines() == shown


def test_of_many_ranks_each_text_is_looked_at_once(monkeypatch):
    texts, text_of = [], output._text_of
    monkeypatch.setattr(output, "_text_of", lambda block: texts.append(text_of(block)) or texts[-1])
    shown = []
    merger = Merger(shown.append)
    for rank in range(1000):
        for text in [*ERROR, f"own {rank}", *ERROR]:
            merger.add(Line(rank, True, text.encode() + b"\n"), 1.0)
    merger.flush()
    assert len(texts) == 3 * 1000
    # Rank 0's first, then its own line; the second one waits until the others' own lines are shown.
    assert [line.mark for line in shown[: len(ERROR) + 1]] == ["0-999"] * len(ERROR) + ["0"]
    assert len(shown) == len(ERROR) + 1000 * (1 + len(ERROR))


def test_a_line_that_waits_has_the_time_at_which_it_came(monkeypatch):
    came_s = 1_700_000_000.25
    monkeypatch.setattr(output.time, "time", lambda: came_s)
    both = io.BytesIO()
    merger = Merger(Writer(both, both, with_timestamp=True).show)
    for rank in range(2):
        merger.add(Line(rank, True, STALL.format(rank).encode() + b"\n"), 1.0)
    merger.flush()
    came = datetime.datetime.fromtimestamp(came_s).isoformat(" ", "milliseconds")
    assert both.getvalue().decode().startswith(f"{came} [0-1] [farandole] warning: ")


def test_only_errors_and_warnings_wait_for_those_of_others():
    shown = []
    merger = Merger(shown.append)
    for level in ("info", "debug"):
        merger.add(Line(0, True, f"[farandole 0/2] {level}: x\n".encode()), 1.0)
    assert len(shown) == 2
    for line in ("[farandole 0/2] warning: x", "[farandole 0/2] info: y"):  # its own stay in order
        merger.add(Line(0, True, line.encode()), 1.0)
    assert len(shown) == 2


def test_a_rank_that_is_late_is_shown_by_itself():
    both = io.BytesIO()
    merger = Merger(Writer(both, both).show)
    for rank, at_s in enumerate((1.0, 1.1, 1.0 + MERGE_S)):
        merger.tick(at_s)
        merger.add(Line(rank, True, STALL.format(rank).encode() + b"\n"), at_s)
    merger.flush()
    lines = both.getvalue().decode().splitlines()
    assert [line.split()[0] for line in lines] == ["[0-1]", "[2]"]


def test_lines_come_out_whole_however_they_are_split():
    seed = random.randrange(1 << 30)
    print("seed", seed)
    generator = random.Random(seed)
    lines = [bytes(generator.choices(b"ab", k=generator.randrange(9))) + b"\n" for _ in range(200)]
    splitter, found, rest = LineSplitter(), [], b"".join(lines) + b"end"
    while rest:
        size = generator.randrange(1, 12)
        found += splitter.add(rest[:size])
        rest = rest[size:]
    assert found == lines
    assert splitter.take_rest() == b"end"


def test_a_line_without_an_end_is_passed_on_after_its_limit():
    splitter = LineSplitter(MAX_LINE_BYTES)
    for _ in range(2):
        assert splitter.add(b"x" * (MAX_LINE_BYTES - 1)) == []
        assert splitter.add(b"x") == [b"x" * MAX_LINE_BYTES]
    assert splitter.add(b"end\n") == [b"end\n"]


def test_a_progress_bars_lines_end_with_a_carriage_return():
    splitter = LineSplitter()
    assert splitter.add(b"10%\r20%\r\nx") == [b"10%\r", b"20%\r\n"]


def test_a_prompt_gets_a_line_of_its_own_unless_the_user_ended_it():
    out = io.BytesIO()
    writer = Writer(out, out)
    writer.show(Line(0, False, b"(Pdb) "))
    writer.show(Line(1, False, b"a\n"))
    writer.show(Line(0, False, b"(Pdb) "))
    writer.end_open_line()
    writer.show(Line(0, False, b"b\n"))
    assert out.getvalue() == b"[0] (Pdb) \n[1] a\n[0] (Pdb) [0] b\n"


def test_a_line_that_was_shown_unfinished_goes_on_where_it_stopped():
    out = io.BytesIO()
    writer = Writer(out, out)
    writer.show(Line(0, False, b"loss: "))
    writer.show(Line(0, False, b"0.5\n"))
    writer.show(Line(0, True, b"10%"))
    writer.show(Line(0, True, b"\r"))
    writer.show(Line(0, True, b"20%\n"))
    writer.show(Line(0, False, b"end"))
    writer.close()
    assert out.getvalue() == b"[0] loss: 0.5\n[0] 10%\r[0] 20%\n[0] end\n"


def test_a_full_disk_is_reported_once_and_the_rest_goes_on(tmp_path):
    err = io.BytesIO()
    (tmp_path / "rank.0").mkdir()
    (tmp_path / "rank.0" / "stdout").symlink_to("/dev/full")
    with open("/dev/full", "wb") as full:
        writer = Writer(full, err, str(tmp_path))
        for _ in range(2):
            writer.keep(0, False, b"x\n")
            writer.show(Line(0, False, b"x\n"))
            writer.flush()
        writer.say("still here")
        assert err.getvalue().decode().splitlines() == [
            f'farandolerun: the files of --output-filename end here: "{tmp_path}/rank.0/stdout": '
            "No space left on device",
            "farandolerun: stdout cannot be written any more: No space left on device",
            "farandolerun: still here",
        ]
        assert writer.is_incomplete and not writer.is_closed


def test_of_a_rank_that_was_killed_the_end_is_waited_for(play):
    play.failure.reported(0, "", True, 1.0, KILLED)
    play.ends(0, 1, 1.1)
    play.failure.tick(1.1 + REPORT_AFTER_S)
    assert play.blamed() == []
    play.ends(1, -9, 2.0)
    play.failure.tick(2.0 + REPORT_AFTER_S)
    assert play.blamed() == ["rank 1 failed first, ended by SIGKILL (exit code 137); pid 77 on host a"]
