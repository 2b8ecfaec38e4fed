"""Which rank failed first, played with times instead of processes."""

import random

import pytest

from farandole.run.lines import Line, Pieces
from farandole.run.verdict import HOLD_S, SETTLE_ECHO_S, SETTLE_S, Verdict

TRACEBACK = ["Traceback (most recent call last):", '  File "x.py", line 1, in <module>']
ECHO = [*TRACEBACK, 'farandole.exceptions.AbortedError: allreduce "x": rank 1 has left']
ERROR = [*TRACEBACK, "KeyError: 'x'"]


class Play:
    """A verdict and what it has shown."""

    def __init__(self):
        self.shown = []
        self.verdict = Verdict(
            lambda line: self.shown.append((line.rank, line.text.decode())), self.say
        )

    def say(self, sentence):
        self.shown.append(("launcher", sentence))

    def writes(self, rank, texts, at_s, is_error=True):
        for text in [texts] if isinstance(texts, str) else texts:
            self.verdict.line(Line(at_s, rank, is_error, text.encode()), at_s)

    def ends(self, rank, code, at_s):
        self.verdict.ended(rank, code, at_s, at_s)

    def blamed(self):
        return [what for who, what in self.shown if who == "launcher"]


@pytest.fixture
def play():
    return Play()


def test_lines_pass_at_once_while_nothing_is_wrong(play):
    play.writes(0, "a", 1.0)
    play.writes(1, "b", 1.0, is_error=False)
    assert play.shown == [(0, "a"), (1, "b")]
    assert play.verdict.finish() is None


def test_a_traceback_that_was_only_logged_passes_after_a_while(play):
    play.writes(0, ERROR, 1.0)
    play.writes(1, "warning", 1.1)
    play.verdict.tick(1.0 + HOLD_S / 2)
    assert play.shown == []
    play.verdict.tick(1.0 + HOLD_S)
    assert play.shown == [*((0, text) for text in ERROR), (1, "warning")]
    assert play.blamed() == []


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_the_earliest_traceback_comes_first_whoever_ends_first(play, order):
    play.writes(2, ERROR, 1.001)
    play.writes(None, "mpirun's words", 1.0015)
    play.writes(1, ERROR, 1.000)  # came later over the network
    play.writes(0, ERROR, 1.002)
    for number, rank in enumerate(order):
        play.ends(rank, 1, 1.1 + number / 100)
    play.verdict.tick(1.2 + SETTLE_S)
    assert play.shown[0] == ("launcher", "rank 1 failed first, with exit code 1")
    assert [who for who, _ in play.shown[1:]] == [1] * 3 + [0] * 3 + [2] * 3 + [None]
    assert play.verdict.finish() == 1


@pytest.mark.parametrize(
    "error",
    [
        'AbortedError: allreduce "x": rank 1 has left',
        "OperationTimeoutError: rank 1 failed: allreduce batch made no progress",
        "HorovodInternalError: rank 1 failed: no memory is left",
    ],
)
def test_an_echo_is_never_first_if_another_fails_by_itself(play, error):
    play.writes(0, [*TRACEBACK, f"farandole.exceptions.{error}"], 1.0)
    play.ends(0, 1, 1.1)
    play.verdict.tick(1.1 + SETTLE_S)
    assert play.shown == []
    play.ends(1, 3, 1.5)
    play.verdict.tick(1.5 + SETTLE_S)
    assert play.blamed() == ["rank 1 failed first, with exit code 3"]
    assert play.verdict.finish() == 3


def test_echoes_alone_are_told_after_a_longer_while(play):
    play.writes(0, ECHO, 1.0)
    play.ends(0, 1, 1.1)
    play.verdict.tick(1.1 + SETTLE_ECHO_S)
    assert play.blamed() == ["rank 0 failed first, with exit code 1"]


def test_a_rank_killed_after_its_traceback_failed_with_1(play):
    play.writes(1, ERROR, 1.0)
    play.writes(0, ECHO, 1.1)
    play.ends(0, 1, 1.2)
    play.verdict.tick(1.2 + SETTLE_S)
    play.ends(1, -15, 1.6)
    assert play.blamed() == ["rank 1 failed first, with exit code 1"]
    assert play.verdict.finish() == 1


def test_a_signal_is_named_and_its_lines_follow(play):
    play.ends(1, -11, 1.0)
    play.writes(0, ECHO, 1.1)
    play.ends(0, 1, 1.15)
    play.verdict.tick(1.2 + SETTLE_S)
    assert play.shown[0] == ("launcher", "rank 1 failed first, ended by SIGSEGV (exit code 139)")
    assert play.verdict.finish() == 139


def test_a_chain_of_causes_stays_one_traceback(play):
    play.writes(
        1,
        [*ERROR, "", "During handling of the above exception, another exception occurred:", *ERROR],
        1.0,
    )
    play.writes(0, ERROR, 1.01)
    play.ends(0, 1, 1.02)
    play.ends(1, 1, 1.03)
    assert play.verdict.finish() == 1
    assert play.blamed() == ["rank 1 failed first, with exit code 1"]


def test_lines_come_out_whole_however_they_are_cut():
    seed = random.randrange(1 << 30)
    print("seed", seed)
    generator = random.Random(seed)
    text = (
        b"".join(
            bytes(generator.choices(b"ab", k=generator.randrange(9))) + b"\n" for _ in range(200)
        )
        + b"end"
    )
    pieces, found, rest = Pieces(), [], text
    while rest:
        size = generator.randrange(1, 12)
        found += pieces.add(rest[:size])
        rest = rest[size:]
    found += pieces.end()
    assert found == (text + b"\n").splitlines(keepends=True)


def test_a_progress_bars_lines_end_with_a_carriage_return():
    assert list(Pieces().add(b"10%\r20%\r\nx")) == [b"10%\r", b"20%\r\n"]
