"""Which rank failed first; its words are printed before the others'.

When one rank fails the others fail from it, within a millisecond, and mpirun has its say too. So from
the first line of a traceback on, everything on stderr is held back until a rank has ended badly and
the others have had time to report (then the first one's words come first), or until it is clear that
the traceback was only shown and the program goes on.

A rank has failed when its traceback began, if it ended with exit code 1 after one; else when it
ended. The earliest is the first; but a rank whose traceback says that another has left, failed or
is lost (an echo) comes after all that fail by themselves. A rank that calls ``sys.exit(3)`` ends after its
echoes, because it takes its leave from them first.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable

from farandole.run.lines import Line

HOLD_S = 2.0  # a traceback without a bad end within this was only shown
SETTLE_S = 0.25  # for what happened before a bad end and is still on its way
SETTLE_ECHO_S = 5.0  # the same, while there are only echoes

_ECHO = re.compile(
    rb"farandole\.exceptions\.(?:AbortedError\b|PeerLostError\b|\w+: rank \d+ failed: )"
)
_TRACEBACK = b"Traceback (most recent call last)"


def exit_code(code: int) -> int:
    """A program's end as a shell has it. Args: code: As subprocess has it, negative for a signal."""
    return 128 - code if code < 0 else code


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Verdict:
    """Passes lines on to ``show`` in the order in which they explain a failure.

    Times called ``now_s`` are monotonic and the caller's; ``time_s`` is the ranks' common clock.
    Thread safety: single-threaded.
    """

    def __init__(self, show: Callable[[Line], None], say: Callable[[str], None]) -> None:
        self._show = show
        self._say = say
        self._held: list[Line] = []
        self._release_at_s: float | None = None
        self._settle_at_s: float | None = None
        self._tracebacks: dict[int, float] = {}  # rank -> when its latest began
        self._failures: dict[int, int] = {}  # rank -> code
        self._ended_s: dict[int, float] = {}
        self._echoes: set[int] = set()
        self._lost: dict[int, str] = {}  # rank -> host
        self._first: int | None = None

    @property
    def has_failure(self) -> bool:
        """Whether a rank has ended badly."""
        return bool(self._failures)

    @property
    def is_told(self) -> bool:
        """Whether it has been said which rank failed first."""
        return self._first is not None

    def line(self, line: Line, now_s: float) -> None:
        """Takes a line."""
        if not line.is_error or self.is_told:
            self._show(line)
            return
        is_worth_holding = line.rank is None or self._begins_traceback(line)
        if not (is_worth_holding or self._held or self.has_failure):
            self._show(line)
            return
        self._held.append(line)
        if self._release_at_s is None:
            self._release_at_s = now_s + HOLD_S

    def _begins_traceback(self, line: Line) -> bool:
        """Whether a traceback begins with this line of a rank; notes it, and notes an echo."""
        assert line.rank is not None
        if _ECHO.match(line.text):
            self._echoes.add(line.rank)
        if not line.text.startswith(_TRACEBACK):
            return False
        self._echoes.discard(line.rank)
        if not any(held.rank == line.rank for held in self._held):  # else it is a chain of causes
            self._tracebacks[line.rank] = line.time_s
        return True

    def ended(self, rank: int, code: int, time_s: float, now_s: float) -> None:
        """Takes a rank's end. Args: code: As subprocess has it."""
        if code == 0:
            return
        self._failures[rank] = code
        self._ended_s[rank] = time_s
        only_echoes = self._candidates().keys() <= self._echoes
        settle_at_s = now_s + (SETTLE_ECHO_S if only_echoes else SETTLE_S)
        if self._settle_at_s is None or settle_at_s < self._settle_at_s:
            self._settle_at_s = settle_at_s

    def lost(self, rank: int, host: str, time_s: float, now_s: float) -> None:
        """Takes the loss of a rank, of whose end nobody will tell; it counts as exit code 1."""
        self._lost[rank] = host
        self.ended(rank, 1, time_s, now_s)

    def tick(self, now_s: float) -> None:
        """Lets time pass."""
        if self._settle_at_s is not None:
            if not self.is_told and now_s >= self._settle_at_s:
                self._announce()
        elif self._release_at_s is not None and now_s >= self._release_at_s:
            self._release()

    def finish(self) -> int | None:
        """Shows what is left. Returns the first failing rank's exit code, or None."""
        if self.has_failure and not self.is_told:
            self._announce()
        self._release()
        if self._first is None:
            return None
        code = self._failures.get(self._first, 1)
        # Its traceback came first, but another's end had it killed on its way out.
        was_killed = code < 0 and self._first in self._tracebacks
        return 1 if was_killed else exit_code(code)

    def _candidates(self) -> dict[int, float]:
        """Rank -> when it failed, with those on their way out."""
        times = dict(self._ended_s)
        for rank, began_s in self._tracebacks.items():
            is_held = rank not in times and any(line.rank == rank for line in self._held)
            if is_held or self._failures.get(rank) == 1:
                times[rank] = began_s
        return times

    def _announce(self) -> None:
        times = self._candidates()
        first = self._first = min(times, key=lambda rank: (rank in self._echoes, times[rank]))
        self._say(self._how(first))
        of_mpirun = 1 << 31
        self._held.sort(  # stable; mpirun's come last
            key=lambda line: (line.rank != first, of_mpirun if line.rank is None else line.rank)
        )
        self._release()

    def _how(self, rank: int) -> str:
        if rank in self._lost:
            return f"rank {rank} was lost first: {self._lost[rank]} does not tell of it any more"
        code = self._failures.get(rank, 1)
        if code >= 0 or rank in self._tracebacks:
            return f"rank {rank} failed first, with exit code {max(code, 1)}"
        end = f"ended by {_signal_name(-code)} (exit code {exit_code(code)})"
        return f"rank {rank} failed first, {end}"

    def _release(self) -> None:
        held, self._held, self._release_at_s = self._held, [], None
        for line in held:
            self._show(line)
