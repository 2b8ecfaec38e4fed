"""``farandole top``: what the ranks of running jobs do, again and again, on this host and on others."""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from farandole.flight import Steps, in_words, printable
from farandole.ps import Lateness, Rank, lateness, look, merge
from farandole.runner import cli, hosts
from farandole.runner.options import Options, UsageError

_ASK_S = 10.0
_LONG_S = 1.0  # in the middle of a step ranks wait for less
_APART = 3.0  # hosts answer at different times: one interval is longer than another
_COLUMNS, _LINES = 80, 24
_PS = [sys.executable, "-m", "farandole", "ps", "--json"]
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # the alternate screen, without a cursor
_HOME, _END_OF_LINE, _BELOW = "\x1b[H", "\x1b[K", "\x1b[J"

_Key = tuple[str, int, int, int]


class Answer(NamedTuple):
    """The ranks of each job that run on a host, or why that cannot be said."""

    groups: list[list[Rank]]
    error: str = ""
    asked_s: float = math.inf  # by time.monotonic(): the ranks were looked at since then


class Host:
    """A host that is asked on a thread. Thread safety: none but that."""

    def __init__(self, name: str) -> None:
        self.name, self.answer = name, Answer([], "has not answered yet")
        self._asked: concurrent.futures.Future[Answer] | None = None
        self._process: subprocess.Popen[str] | None = None
        self._is_closed = False

    def update(self, pool: concurrent.futures.Executor) -> None:
        """Takes the answer if there is one, and asks again if no question is open; at once if it is this host."""
        if self.name == hosts.HERE:
            asked_s = time.monotonic()
            self.answer = Answer([ranks for ranks, _ in look()], asked_s=asked_s)
            return
        if self._asked and not self._asked.done():
            return
        if self._asked:
            self.answer = self._asked.result()
        self._asked = pool.submit(self._ask)

    def wait(self) -> None:
        """For the answer."""
        if self._asked:
            self.answer, self._asked = self._asked.result(), None

    def close(self) -> None:
        """Ends what still asks."""
        self._is_closed = True
        self._kill()

    def _kill(self) -> None:
        if (process := self._process) is not None:  # of its group some may live when it has ended
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _ask(self) -> Answer:
        asked_s = time.monotonic()
        try:
            command = hosts.reach(self.name, _PS, Options(), os.environ)
            # A session of its own: Ctrl-C comes to us alone, and all that an agent starts can be killed.
            with subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True, errors="replace", start_new_session=True,
            ) as process:  # fmt: skip
                self._process = process
                if self._is_closed:
                    self._kill()
                try:
                    said, complaint = process.communicate(timeout=_ASK_S)
                except subprocess.TimeoutExpired:
                    self._kill()
                    return Answer([], f"has not answered within {_ASK_S:g} s")
                finally:
                    self._process = None
        except (OSError, ValueError) as error:  # a UsageError among them
            return Answer([], f"cannot be asked: {error}")
        if process.returncode != 0:
            lines = complaint.strip().splitlines() or [f"exit code {process.returncode}"]
            return Answer([], f"cannot be asked: {lines[-1]}")
        try:
            jobs = json.loads(said)["jobs"]
            return Answer([[Rank.from_json(one) for one in job["ranks"]] for job in jobs], asked_s=asked_s)
        except (LookupError, TypeError, ValueError, ArithmeticError, RecursionError):
            return Answer([], f"cannot be asked: this is not what farandole ps --json prints: {said[:40]!r}")


def find_hosts(given: str | None) -> list[Host]:
    """Those given, or this one.

    Raises:
        UsageError: They are not hosts.
    """
    names = hosts.HERE if given is None else given
    return [Host(name) for name in hosts.slots_by_name(cli.parse_hosts(names.split(","), f'-H "{given}"'))]


class Intervals:
    """What ranks did since they were last looked at; those of a new job, since they began."""

    def __init__(self) -> None:
        self._before: dict[_Key, Steps] = {}
        self._shown: dict[_Key, Steps] = {}

    def since(self, jobs: Sequence[Sequence[Rank]]) -> list[list[Rank]]:
        """The same ranks with the steps since the last call.

        Before each rank of a job has a new answer, which has Steps of its own, and has ended one, what was said last
        still counts; but where others have ended two, a rank takes no part, as one that has joined, and has none.
        """
        before, shown = self._before, self._shown
        self._before, self._shown = {}, {}
        for job in jobs:
            now = {_key(rank): rank.steps for rank in job}
            is_new_job = before.keys().isdisjoint(now)
            begin = {key: before.get(key, Steps() if is_new_job else steps) for key, steps in now.items()}
            done = {key: _minus(steps, begin[key]) for key, steps in now.items()}
            counts = [steps.steps for steps in done.values()]
            is_anew = all(steps is not begin[key] for key, steps in now.items())
            has_news = is_anew and (min(counts) > 0 or max(counts) > 1)
            self._before |= now if has_news else begin
            self._shown |= done if has_news else {key: shown.get(key, Steps()) for key in now}
        return [[rank._replace(steps=self._shown[_key(rank)]) for rank in job] for job in jobs]


def _key(rank: Rank) -> _Key:
    return rank.host, rank.pid, rank.rank, rank.size


def _minus(now: Steps, before: Steps) -> Steps:
    """None if the rank has begun anew."""
    return Steps(*(a - b for a, b in zip(now, before))) if now.steps >= before.steps else Steps()


def lines_of(job: Sequence[Rank], most: int, age_s: float = 0) -> Iterator[str]:
    """What a job does: in words, and the ranks, of many those that look worst.

    Args:
        job: With the steps of a while.
        most: Rows at most.
        age_s: So long ago some of its ranks may have been looked at.
    """
    late = {one.rank: one for one in lateness([rank for rank in job if rank.steps.steps > 0], 1, _APART)}
    names = sorted({_plain(rank.host) for rank in job})
    on = names[0] if len(names) == 1 else f"{len(names)} hosts"
    yield f"{len(job)} of {job[0].size} ranks, on {on}: {_sum(job)}"
    for one in sorted(late.values(), key=lambda one: -one.late_ns)[:3]:
        if one.is_late:
            yield f"  Rank {one.rank} makes the others wait {one} in each step."
    missing = _missing(job, age_s)
    if missing:
        longest = max(job, key=lambda rank: rank.waits_s)
        what = f"{longest.waits_in} for {longest.waits_s:.1f} s"
        yield f"  {in_words(missing).capitalize()} {'has' if len(missing) == 1 else 'have'} not come to {_plain(what)}."
    yield f"{'rank':>6} {'host':12} {'pid':>8} {'step ms':>8} {'late ms':>8} {'MB/s':>8}  state"
    worst = sorted(job, key=lambda rank: _badness(rank, late.get(rank.rank), missing), reverse=True)
    shown = worst[:most] if len(job) > most else job
    yield from (_row(rank, late.get(rank.rank)) for rank in shown)
    if rest := worst[most:]:
        waiting_s = [rank.waits_s for rank in rest if rank.waits_in]
        waits = f"; {len(waiting_s)} wait, for {max(waiting_s):.1f} s at most" if waiting_s else ""
        yield f"  {len(rest)} more: {_sum(rest)}{waits}"


def _missing(job: Sequence[Rank], age_s: float) -> list[int]:
    """Whom most of the others have waited for, for long; of operations of all ranks, if all ranks are known.

    A rank that waits for another operation may well have submitted this one, too.
    """
    longest = max(job, key=lambda rank: rank.waits_s)
    if longest.waits_s < _LONG_S + age_s or " of process set " in longest.waits_in or len(job) < job[0].size:
        return []
    idle = [rank.rank for rank in job if not rank.waits_in]
    return idle if 2 * len(idle) <= len(job) else []


def _badness(rank: Rank, late: Lateness | None, missing: Sequence[int]) -> tuple[bool, float, bool, float, int]:
    late_ns = late.late_ns if late and late.is_late else 0
    return rank.state != "running", late_ns, rank.rank in missing, rank.waits_s, -rank.rank


def _sum(ranks: Sequence[Rank]) -> str:
    steps, ns = (sum(getattr(rank.steps, name) for rank in ranks) for name in ("steps", "ns"))
    step = f"{ns / steps / 1e6:.3g} ms a step" if steps else "no steps"
    return f"{step}, {sum(rank.bytes_per_s for rank in ranks) / 1e6:.1f} MB/s"


def _row(rank: Rank, late: Lateness | None) -> str:
    steps, state = rank.steps, rank.state
    step = f"{steps.ns / steps.steps / 1e6:.1f}" if steps.steps else "-"
    behind = f"{late.late_ns / 1e6:.1f}" if late else "-"
    if state == "running" and rank.waits_in:
        state = f"{rank.waits_s:.1f} s in {rank.waits_in}"
    host = _cut(_plain(rank.host), 12)
    row = f"{rank.rank:>6} {host:12} {rank.pid:>8} {step:>8} {behind:>8} {rank.bytes_per_s / 1e6:>8.1f}"
    return f"{row}  {_plain(state)}"


def _plain(text: str) -> str:
    """What takes one column for each character, whatever was read from memory."""
    return printable(text).encode("ascii", "backslashreplace").decode()


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 2] + ".."


class Watch:
    """Hosts that are asked, and the lines that say what was found."""

    def __init__(self, asked: Sequence[Host], rows: int) -> None:
        self._hosts, self._rows, self._intervals = asked, rows, Intervals()

    def lines(self) -> Iterator[str]:
        """What the hosts have said."""
        for host in self._hosts:
            if host.answer.error:
                yield f"{_plain(host.name)} {_plain(host.answer.error)}"
        age_s = max(time.monotonic() - host.answer.asked_s for host in self._hosts)
        jobs = self._intervals.since(merge(group for host in self._hosts for group in host.answer.groups))
        for job in jobs:
            yield from lines_of(job, self._rows, age_s)
            yield ""
        if not jobs:
            yield "no ranks of this user run here"

    def print_once(self, pool: concurrent.futures.Executor, interval_s: float) -> None:
        """Waits for all of them, twice."""
        for is_last in (False, True):
            for host in self._hosts:
                host.update(pool)
            for host in self._hosts:
                host.wait()
            lines = [*self.lines()]
            if not is_last:
                time.sleep(interval_s)
        print("\n".join(_cut(line, _COLUMNS) for line in lines).rstrip())

    def show(self, pool: concurrent.futures.Executor, interval_s: float) -> None:
        """On the terminal, until its user has enough."""
        with _Screen() as screen:
            while True:
                for host in self._hosts:
                    host.update(pool)
                head = f"farandole top, {time.strftime('%H:%M:%S')}; q ends it"
                lines = [head, "", *self.lines()]
                end_s = time.monotonic() + interval_s
                while (left_s := end_s - time.monotonic()) > 0:
                    screen.show(lines)
                    if screen.wait(left_s):
                        return


class _Screen:
    """A context: the terminal, which at the end, and while this process is stopped, is as it was.

    Thread safety: of the main thread alone.
    """

    def __enter__(self) -> _Screen:
        self._undo = contextlib.ExitStack()
        try:
            self._begin()
        except BaseException:  # a signal
            self._undo.close()
            raise
        return self

    def _begin(self) -> None:
        self._keys = sys.stdin.fileno() if sys.stdin and sys.stdin.isatty() else None
        self._settings = termios.tcgetattr(self._keys) if self._keys is not None else []
        self._news, news = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._undo.callback(os.close, self._news)
        self._undo.callback(os.close, news)
        self._undo.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(news, warn_on_full_buffer=False))
        handlers: dict[int, Callable[..., Any]] = {signal.SIGWINCH: lambda *_: None, signal.SIGTSTP: self._pause}
        for number, handler in handlers.items():
            self._undo.callback(signal.signal, number, signal.signal(number, handler))
        self._undo.callback(self._give_back)
        self._take()

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError, termios.error):  # the terminal is gone
            self._undo.close()

    def _take(self) -> None:
        if self._keys is not None:
            tty.setcbreak(self._keys)
        _write(_ENTER)

    def _give_back(self) -> None:
        try:
            if self._keys is not None:
                termios.tcsetattr(self._keys, termios.TCSADRAIN, self._settings)
        finally:
            _write(_LEAVE)

    def _pause(self, *_: object) -> None:
        self._give_back()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._take()

    def show(self, lines: Sequence[str]) -> None:
        """Fits them into the terminal as large as it is now."""
        columns, count = shutil.get_terminal_size((_COLUMNS, _LINES))
        if len(lines) > count:
            lines = [*lines[: count - 1], f"{len(lines) - count + 1} more lines"]
        text = (_END_OF_LINE + "\n").join(_cut(line, columns) for line in lines)
        _write(_HOME + text + _END_OF_LINE + _BELOW)

    def wait(self, timeout_s: float) -> bool:
        """For a signal, a key or so long. True: the user has enough."""
        files = [self._news] + ([] if self._keys is None else [self._keys])
        ready, _, _ = select.select(files, [], [], timeout_s)
        if self._news in ready:
            os.read(self._news, 1 << 10)
        return self._keys is not None and self._keys in ready and os.read(self._keys, 1 << 10)[:1] in (b"", b"q")


def _write(text: str) -> None:
    """Not by Python's buffer, which a handler of a signal must not use."""
    left = text.encode()
    while left:
        left = left[os.write(sys.stdout.fileno(), left) :]


def _at_least(kind: Callable[[str], float], least: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            if least <= (value := kind(text)) < math.inf:
                return value
        raise argparse.ArgumentTypeError(f'"{text}" is not a number from {least:g}')

    return parse


def main(argv: Sequence[str]) -> int:
    """``farandole top``. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="farandole top", description="Shows what the ranks of running jobs do, until q or Ctrl-C."
    )
    parser.add_argument("-H", metavar="HOSTS", help="ask these, a,b,..., over ssh; else this one")
    parser.add_argument("--once", action="store_true", help="print plain text, as without a terminal")
    parser.add_argument(
        "--interval", metavar="S", type=_at_least(float, 0.1), default=1.0, help="seconds, 1 if not set"
    )
    parser.add_argument("--rows", metavar="N", type=_at_least(int, 1), default=10, help="ranks of a job, 10 if not set")
    options = parser.parse_args(argv)
    try:
        asked = find_hosts(options.H)
    except UsageError as error:
        print(f"farandole top: {error}", file=sys.stderr)
        return cli.USAGE_ERROR
    watch = Watch(asked, options.rows)
    has_screen = sys.stdout.isatty() and not options.once and os.environ.get("TERM") != "dumb"
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    try:
        with concurrent.futures.ThreadPoolExecutor(len(asked)) as pool, contextlib.ExitStack() as closing:
            for host in asked:
                closing.callback(host.close)
            (watch.show if has_screen else watch.print_once)(pool, options.interval)
    except KeyboardInterrupt:
        return 0 if has_screen else 128 + signal.SIGINT
    return 0
