"""``spawn(fn, args, nprocs)``: ranks that are processes of Python's multiprocessing."""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from farandole import basics

if TYPE_CHECKING:  # imported below where it is used: farandolerun does without it
    from multiprocessing import connection
    from multiprocessing.process import BaseProcess

_TICK_S = 0.2
_KILL_AFTER_S = 5.0
_PR_SET_PDEATHSIG = 1


def spawn(
    fn: Callable[..., Any], args: Sequence[Any] = (), nprocs: int = 1, join: bool = True, daemon: bool = False,
    start_method: str = "spawn",
) -> SpawnContext | None:  # fmt: skip
    """Calls ``fn(rank, *args)`` in ``nprocs`` processes of this host, which are the ranks of a job.

    It works as ``torch.multiprocessing.spawn``: it pickles the function and its arguments, so the function must be at
    the top level of a module, and the script must guard its own start with ``if __name__ == "__main__":``. The
    function calls ``init()`` itself. Unless OMP_NUM_THREADS is set, the ranks share the cores.

    Args:
        join: Whether to wait for the end.
        daemon, start_method: As for ``multiprocessing.Process``.

    Returns:
        None; with ``join=False`` an object whose ``join(timeout)`` waits for the ranks.

    Raises:
        RuntimeError: A rank failed and the others were ended; the message names the rank that failed first and ends
            with its traceback. Or this process is a rank itself.
    """
    import multiprocessing

    from farandole.runner import supervisor

    if "FARANDOLE_RANK" in os.environ or basics.find() is not None:
        raise RuntimeError("spawn cannot be called by a rank of a job")
    context = multiprocessing.get_context(start_method)
    key, listener = secrets.token_bytes(32), supervisor.open_listener("127.0.0.1")
    address = "{}:{}".format(*listener.getsockname())
    ranks, reports = [], []
    parent = None if context.get_start_method() == "forkserver" else os.getpid()
    has_threads = bool(os.environ.get(supervisor.THREADS))
    supervisor.limit_threads(nprocs)
    try:
        for rank in range(nprocs):
            ours, theirs = context.Pipe(duplex=False)
            place = (rank, nprocs, address, key, listener if rank == 0 else None)
            process = context.Process(target=_run, args=(fn, args, place, theirs, parent), daemon=daemon)  # type: ignore[attr-defined]
            process.start()
            theirs.close()
            ranks.append(process)
            reports.append(ours)
    except BaseException:
        for process in ranks:
            process.kill()
        raise
    finally:
        listener.close()
        if not has_threads:
            os.environ.pop(supervisor.THREADS, None)
    started = SpawnContext(ranks, reports)
    if not join:
        return started
    started.join()
    return None


class SpawnContext:
    """The ranks that :func:`spawn` started without waiting for them.

    Attributes:
        processes: By rank.
    """

    def __init__(self, processes: list[BaseProcess], reports: list[connection.Connection]) -> None:
        from farandole.runner.output import FirstFailure, Writer

        self.processes = processes
        self._reports = dict(enumerate(reports))
        self._running = dict(enumerate(processes))
        self._failure = FirstFailure(Writer(None, None))

    def pids(self) -> list[int | None]:
        """The ids of the processes, by rank."""
        return [process.pid for process in self.processes]

    def join(self, timeout: float | None = None) -> bool:
        """Waits until all ranks have ended. Returns False if they had not after ``timeout`` seconds.

        Raises:
            RuntimeError: See :func:`spawn`.
        """
        from multiprocessing import connection

        end_s = float("inf") if timeout is None else time.monotonic() + timeout
        try:
            while self._running and self._failure.rank is None:
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    return False
                sentinels = [process.sentinel for process in self._running.values()]
                connection.wait([*self._reports.values(), *sentinels], min(left_s, _TICK_S))
                self._take_news(time.monotonic())
        except BaseException:
            self._end_ranks()
            raise
        self._failure.finish()
        self._end_ranks()
        if self._failure.rank is not None:
            raise RuntimeError(f"{self._failure.message}\n{self._failure.error_text}".rstrip())
        return True

    def _take_news(self, now_s: float) -> None:
        for rank, report in list(self._reports.items()):
            try:
                if report.poll():
                    self._failure.reported(rank, **json.loads(report.recv()), now_s=now_s)
            except EOFError:
                self._reports.pop(rank).close()
        for rank, process in list(self._running.items()):
            if process.exitcode is not None and not (rank in self._reports and self._reports[rank].poll()):
                self._failure.ended(rank, process.exitcode, now_s)
                del self._running[rank]
        self._failure.tick(now_s)

    def _end_ranks(self) -> None:
        for process in self._running.values():
            process.terminate()
        end_s = time.monotonic() + _KILL_AFTER_S
        for process in self._running.values():
            process.join(max(0.0, end_s - time.monotonic()))
            process.kill()
            process.join()
        for report in self._reports.values():
            report.close()
        self._running, self._reports = {}, {}


def _run(
    fn: Callable[..., Any], args: Sequence[Any], place: tuple[int, int, str, bytes, socket.socket | None],
    report: connection.Connection, parent: int | None,
) -> None:  # fmt: skip
    """One rank: reports the error that ends it."""
    _end_with(parent)
    rank, size, address, key, listener = place
    take_place({"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}, address, key, listener)
    try:
        fn(rank, *args)
        basics.shutdown()  # a forked process runs no exit handlers
    except Exception as error:
        report.send(basics.describe_failure(error))
        report.close()
        sys.exit(1)


def _end_with(parent: int | None) -> None:
    """Has the kernel end this process when its parent ends, which may have ended already.

    Args:
        parent: None: a fork server, which ends after the process that called :func:`spawn`.
    """
    import multiprocessing

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    caller = multiprocessing.parent_process()
    has_ended = os.getppid() != parent if parent else caller is not None and not caller.is_alive()
    if has_ended:
        signal.raise_signal(signal.SIGTERM)


def take_place(numbers: Mapping[str, int], address: str, key: bytes, listener: socket.socket | None) -> None:
    """Makes this process a rank, for ``init()``; rank 0 has the listener at ``address``."""
    key_reader, key_writer = os.pipe()
    os.write(key_writer, key)
    os.close(key_writer)
    numbers = {**numbers, "KEY_FD": key_reader}
    if listener is not None:
        numbers["LISTEN_FD"] = listener.detach()
    os.environ.update({f"FARANDOLE_{name}": str(number) for name, number in numbers.items()})
    os.environ["FARANDOLE_ADDRESS"] = address
