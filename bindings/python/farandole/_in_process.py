"""Ranks that are threads of this process, for tests and notebooks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple, ParamSpec, TypeVar

from farandole import _core, _horovod, basics
from farandole.exceptions import AbortedError, GenerationEndedError, OperationTimeoutError

P = ParamSpec("P")
T = TypeVar("T")


def in_process(size: int, timeout_s: float | None = None) -> InProcess:
    """Ranks that are threads of this process, without a launcher and without ``init()``.

    ``in_process(4).run(function, *args, **kwargs)`` calls the function on four ranks at the same time, and
    returns the results by rank. Each run is a job of its own, which a rank leaves when
    the function returns. Ranks share the interpreter, and so torch's global random generator.

    Args:
        size: How many ranks.
        timeout_s: For each run; None: no limit.
    Raises:
        BaseException: A rank's exception, with a note that names the rank (Python >= 3.11). If several ranks
            raise, that of the lowest rank whose exception is not a consequence of another rank's.
        TimeoutError: Some ranks have not returned in time; their threads are left behind.
    """
    return InProcess(size, timeout_s)


class InProcess(NamedTuple):
    """What :func:`in_process` gives."""

    size: int
    timeout_s: float | None

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Calls ``function`` on every rank and gives the results by rank."""
        results: dict[int, T] = {}
        errors: list[tuple[bool, int, BaseException]] = []

        def act(core: _core.Context) -> None:
            rank = core.topology()[0]
            try:
                with basics.using(basics.Context(core)) as context:
                    try:
                        results[rank] = function(*args, **kwargs)
                    finally:
                        context.close()
            except BaseException as error:
                is_echo = isinstance(error, AbortedError | OperationTimeoutError)
                is_echo = is_echo and not isinstance(error, GenerationEndedError)  # this rank's own mistake
                errors.append((is_echo, rank, error))

        with _horovod.settings():
            cores = _core.Context.in_process(self.size)
        _horovod.report(0, self.size)
        threads = [threading.Thread(target=act, args=(core,), daemon=True) for core in cores]
        until = time.monotonic() + (threading.TIMEOUT_MAX if self.timeout_s is None else self.timeout_s)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(until - time.monotonic(), 0))
        for _, rank, error in sorted(errors, key=lambda item: item[:2]):
            if hasattr(error, "add_note"):
                error.add_note(f"raised by rank {rank} of {self.size}")
            raise error
        late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
        if late:
            raise TimeoutError(f"ranks {late} of {self.size} did not finish in {self.timeout_s} s")
        return [results[rank] for rank in range(self.size)]
