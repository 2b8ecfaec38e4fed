"""``monitored_barrier``, which says which ranks do not come."""

from __future__ import annotations

import functools
import time
from typing import Any

from torch._C._distributed_c10d import PrefixStore

from farandole.exceptions import OperationTimeoutError
from farandole.torch.distributed._job import LONGEST_S, Job, with_ranks_of_job

_ANSWER = "answer"
#: How long rank 0, with which the store may go, waits for those that came to read the answer.
_FAREWELL_S = 1.0


class MonitoredBarrier:
    """Of a job, at the store where its ranks met: rank 0 waits for the others and writes down what all are told.

    A rank that does not come ends nothing. If it comes later it learns that the call has failed, and the next call of
    all ranks works. Errors have gloo's words.

    Thread safety: one call at a time.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._number = self._passed = 0  # of this rank's last call; of the last one that all have made

    def wait(self, timeout_s: float | None, names_all: bool) -> None:
        """One call.

        Args:
            timeout_s: How long rank 0 waits; None: as long as an operation of the group, as the other ranks do.
            names_all: Whether the error names all ranks that are missing, and not the first.

        Raises:
            OperationTimeoutError: Ranks did not come in time: ``failed_ranks``.
            HorovodInternalError: The group has lost a rank.
        """
        self._job.raise_loss()
        self._number += 1
        limit_s = self._job.timeout_s or LONGEST_S
        if self._job.size == 1:
            return
        try:
            if self._job.rank == 0:
                self._lead(limit_s if timeout_s is None else timeout_s, names_all)
            else:
                self._follow(limit_s)
        except RuntimeError as error:
            raise self._job.cause_of(error, "monitored_barrier: torch's store cannot be reached") from None

    def _lead(self, limit_s: float, names_all: bool) -> None:
        until_s, missing, seen = time.monotonic() + limit_s, list[int](), list[int]()
        for rank in range(1, self._job.size):
            if self._see_call(str(rank), until_s):
                seen.append(rank)
            else:
                missing.append(self._job.ranks[rank])
                if not names_all:
                    break
        if not missing:
            self._passed = self._number
        numbers = [self._number, self._passed, round(limit_s * 1000), *missing]
        self._store.set(_ANSWER, " ".join(map(str, numbers)))
        until_s = time.monotonic() + _FAREWELL_S
        for rank in seen:
            self._see_call(f"{rank} knows", until_s)
        if missing:
            self._fail(f"Rank {self._job.ranks[0]} timed out in monitoredBarrier", numbers[2], missing)

    def _follow(self, limit_s: float) -> None:
        self._store.set(str(self._job.rank), str(self._number))
        root, own = self._job.ranks[0], self._job.ranks[self._job.rank]
        text = (
            f"Rank {own} successfully reached monitoredBarrier, but received errors while waiting for send/recv "
            f"from rank {root}"
        )
        if not self._see_call(_ANSWER, time.monotonic() + limit_s):
            self._fail(text, round(limit_s * 1000), [root])
        _, passed, limit_ms, *missing = self._numbers(_ANSWER)
        self._store.set(f"{self._job.rank} knows", str(self._number))
        if passed < self._number:
            self._fail(text, limit_ms, missing)

    def _fail(self, text: str, limit_ms: int, missing: list[int]) -> None:
        who = f"Rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        error = OperationTimeoutError(f"{text}: {who} failed to pass monitoredBarrier in {limit_ms} ms")
        error.failed_ranks = tuple(missing)
        raise with_ranks_of_job(error)

    @functools.cached_property
    def _store(self) -> Any:
        return PrefixStore("monitored barrier", self._job.own_store())

    def _numbers(self, key: str) -> list[int]:
        return list(map(int, self._store.get(key).split())) if self._store.check([key]) else [0]

    def _see_call(self, key: str, until_s: float) -> bool:
        """Waits until the key has the number of this call, or of a later one."""
        pause_s = 0.0005
        while self._numbers(key)[0] < self._number:
            if time.monotonic() >= until_s:
                return False
            self._job.raise_loss()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
        return True
