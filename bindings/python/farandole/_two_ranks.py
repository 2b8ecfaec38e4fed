"""What each of the two ranks of ``farandole doctor`` runs: ``python -m farandole._two_ranks``."""

from __future__ import annotations

import json
import statistics
import time

import numpy as np

import farandole


def _median_s(count: int, times: int, name: str) -> float:
    """The median time of an allreduce of ``count`` float32, in seconds."""
    numbers = np.zeros(count, np.float32)
    taken_s = []
    for _ in range(times + max(2, times // 10)):
        farandole.barrier()
        started_s = time.perf_counter()
        farandole.allreduce_(numbers, op=farandole.Sum, name=name)
        taken_s.append(time.perf_counter() - started_s)
    return statistics.median(taken_s[-times:])


def _measure() -> None:
    """What each of the two ranks does: checks a sum, measures; rank 0 prints a line of JSON."""
    farandole.init()
    size = farandole.size()
    numbers = np.arange(1000, dtype=np.float32)
    total = farandole.allreduce(numbers * (farandole.rank() + 1), op=farandole.Sum, name="check")
    if not np.array_equal(total, numbers * (size * (size + 1) // 2)):
        raise SystemExit("the allreduce gave a wrong sum")
    small_s, large_s = _median_s(1, 300, "small"), _median_s(16 << 20, 5, "large")
    if farandole.rank() == 0:
        print(json.dumps([size, round(small_s * 1e6, 1), round((64 << 20) / large_s / 1e9, 3)]))


if __name__ == "__main__":
    _measure()
