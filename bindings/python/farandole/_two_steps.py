"""Collectives whose sizes ranks tell each other first: allgather and alltoall, for all faces.

Both steps have the user's name. The first says what the user called, so that ranks which call
another collective under that name are refused. The second, which moves the elements, starts when
the first has ended. A blocking call does that by itself. An asynchronous one has a thread for it,
as ranks may synchronize their handles in any order and a rank that computes must not keep the
others waiting.
"""

from __future__ import annotations

import contextvars
import re
import threading
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

from farandole import _context, _interrupted, _work
from farandole._place import Place
from farandole._work import Call, Handle
from farandole.exceptions import HorovodInternalError

_UNNAMED: Final = 256  # in flight at once; as many as the engine has of every other kind


class Piece(NamedTuple):
    """One tensor of this rank.

    Attributes:
        dtype: The C ABI's number.
        shape: [rows, ...]; the dimensions after the first are the same on all ranks.
        address: Of the contiguous elements; None when there are none.
        allocate: Shape -> a new contiguous tensor and its address, None when it is empty.
        memory: Kept alive until the operation has finished.
        place: The GPU it is on, the same for all pieces of a call; None: host memory.
    """

    dtype: int
    shape: tuple[int, ...]
    address: int | None
    allocate: Callable[[tuple[int, ...]], tuple[Any, int | None]]
    memory: object
    place: Place | None = None


class Steps(Protocol):
    """One rank's part of such a collective."""

    function: str  #: As users call it; ``function`` of the first step's parameters.

    def telling(self, name: str) -> Call:
        """The first step, in host memory. Beside the sizes an empty tensor ``[0, ...]`` travels for
        each piece, so that ranks which disagree are refused like in every collective."""
        ...

    def moving(self, name: str, failed: str | None) -> Call | None:
        """The second, after the first; allocates the results, unless this rank ``failed``. None,
        alike on all ranks, if there is nothing to move."""
        ...

    def let_go(self) -> None:
        """Keeps no inputs any longer; the results stay."""
        ...


def run(steps: Steps, place: Place | None, name: str | None, finish: Callable[[], Any]) -> Any:
    """Takes both steps and waits.

    Args:
        steps: What to do.
        place: The GPU of the pieces.
        name: The same on all ranks; None: matched by the order of the unnamed calls.
        finish: Makes the result from ``steps``, which then have theirs.
    Raises:
        MismatchError: Dtypes or dimensions after the first differ.
        ValueError: The name is in flight already.
    """
    collective = _TwoSteps(steps, place, name)
    try:
        collective.proceed()
    except BaseException:  # a signal's: the other ranks count on the second step
        label = (steps.function, name)
        handle = Handle(_context.current(), None, finish, collective, label=label)
        _interrupted.keep(_context.current(), label, handle)
        collective.proceed_in_background()
        raise
    collective.wait()
    return finish()


def start(steps: Steps, place: Place | None, name: str | None, finish: Callable[[], Any]) -> Handle:
    """As :func:`run`, without waiting; ``finish`` makes the handle's result in ``synchronize``."""
    collective = _TwoSteps(steps, place, name)
    collective.proceed_in_background()
    label = (steps.function, name)
    return Handle(_context.current(), None, finish, collective, label=label)


class _TwoSteps:
    """One such collective in flight; to a Handle it is a piece of work.

    Thread safety: ``proceed`` by one thread at a time, the rest by any. Invariant: its name is
    taken from construction until it is done.
    """

    def __init__(self, steps: Steps, place: Place | None, name: str | None) -> None:
        self._rank = _context.current()
        self._steps = steps
        self._name = _take_name(self._rank, steps.function, name)
        self._rank.two_steps[self._name] = self
        self._joins = self._rank.joins
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._own_error: Exception | None = None
        self._moving: Handle | None = None
        self._place = place
        try:
            self._stream = None if place is None else place.stream()
            self._telling = _work.start(steps.telling(self._name), self)
        except BaseException as error:
            self._end(error)
            raise

    def poll(self) -> bool:
        """Whether it has ended, well or not."""
        return self._done.is_set()

    def over(self) -> bool:
        """Whether it keeps no memory; what is in flight keeps its own."""
        return self.poll()

    def error(self) -> str | None:
        """Why it failed, if it did."""
        return None if self._error is None else str(self._error)

    def wait(self, timeout_s: float = -1.0, stream: object = None) -> None:
        """Returns when it has ended well, else raises why not; on a GPU as ``synchronize``."""
        del timeout_s, stream
        self._done.wait()
        if self._error is not None:
            raise self._error
        if self._moving is not None:
            self._moving.wait()
            self._moving = None

    def proceed(self) -> None:
        """Both steps, or what an interruption left of them. Does not raise their errors."""
        if self._done.is_set():
            return
        try:
            if self._moving is None:
                self._telling.wait_until_launched()  # may be called again, after an interruption
                self._moving = self._start()
            if self._moving is not None:
                self._moving.wait_until_launched()
        except Exception as error:
            self._end(self._own_error or self._explained(error))
        else:
            self._end(self._own_error)

    def _start(self) -> Handle | None:
        """The second step. Without memory for the results it is refused on every rank, which this
        one waits for: the name is in flight until then."""
        try:
            call = self._steps.moving(self._name, None)
        except Exception as error:
            self._own_error = error
            call = self._steps.moving(self._name, f"{type(error).__name__}: {error}")
        return None if call is None else self._start_unless_joined(call)

    def _start_unless_joined(self, call: Call) -> Handle:
        """Not after a join: where all ranks have joined by then, nobody else comes to it."""
        with self._rank.join_lock:
            if self._joins == self._rank.joins:
                return _work.start(call, self)
        raise HorovodInternalError(
            f"{self._described()}: rank {self._rank.topology.rank} joined before its rows could "
            "move; synchronize the handle first"
        )

    def proceed_in_background(self) -> None:
        """As :meth:`proceed`, by a thread, which ends at the latest with the context."""
        thread = threading.Thread(
            target=contextvars.copy_context().run, args=(self._proceed_and_leave,), daemon=True
        )
        self._rank.threads.add(thread)
        try:
            thread.start()
        except RuntimeError:  # none is to be had: the others count on the second step all the same
            self._rank.threads.discard(thread)
            self.proceed()

    def _proceed_and_leave(self) -> None:
        if self._place is None or self._stream is None:
            self.proceed()
        else:
            with self._place.using(self._stream):  # the caller's; this thread has another
                self.proceed()
        self._rank.threads.discard(threading.current_thread())

    def _end(self, error: BaseException | None) -> None:
        self._error = error
        self._steps.let_go()
        self._rank.two_steps.pop(self._name, None)
        self._done.set()

    def _explained(self, error: Exception) -> Exception:
        """The first step's error in the user's terms."""
        if not isinstance(error, HorovodInternalError):
            return error
        text = str(error).replace(f"{self._described()}: member", self._steps.function)
        text = re.sub(r"sent (\d+) tensors", _without_the_table, text)
        return type(error)(
            text.replace("shapes must be equal", "only the first dimension, shown as 0, may differ")
        )

    def _described(self) -> str:
        return f'{self._steps.function} "{self._name}"'

    def refusal(self, function: str) -> str:
        """Why ``function`` cannot have the name now."""
        own = self._steps.function
        return (
            f'{function} "{self._name}" is already in flight on rank {self._rank.topology.rank}'
            f"{'' if function == own else f', as {own}'}; wait for it, or use another name"
        )


def _without_the_table(tensors: re.Match[str]) -> str:
    return f"sent {int(tensors[1]) - 1} tensors"


def _take_name(rank: _context.Rank, function: str, name: str | None) -> str:
    """``name`` or that of the next unnamed call, which waits until an earlier one is through."""
    _work.check_name(name)
    if name is None:
        number = rank.unnamed_two_steps.get(function, 0)
        rank.unnamed_two_steps[function] = number + 1
        name = f"noname.{function}.{number % _UNNAMED}"
        earlier = rank.two_steps.get(name)
        if earlier is not None:
            earlier._done.wait()
    elif name in rank.two_steps:
        error = ValueError(rank.two_steps[name].refusal(function))
        _interrupted.tell_way_on(rank, (function, name), error)
        raise error
    return name
