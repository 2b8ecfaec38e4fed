"""What each of the doctor's two ranks does; rank 0 prints a line of JSON."""

from __future__ import annotations

import json
import statistics
import time

import numpy as np

import farandole

SMALL_COUNT, SMALL_TIMES = 1, 300  # float32
LARGE_COUNT, LARGE_TIMES = 16 << 20, 5


def check() -> None:
    """Adds up numbers whose sum is known.

    Raises:
        SystemExit: The sum is wrong.
    """
    numbers = np.arange(1000, dtype=np.float32)
    total = farandole.allreduce(numbers * (farandole.rank() + 1), op=farandole.Sum, name="check")
    size = farandole.size()
    if not np.array_equal(total, numbers * (size * (size + 1) // 2)):
        raise SystemExit("the allreduce gave a wrong sum")


def median_s(count: int, times: int, name: str) -> float:
    """The median time of an allreduce of ``count`` float32, in seconds."""
    numbers = np.zeros(count, np.float32)
    taken_s = []
    for _ in range(times + max(2, times // 10)):
        farandole.barrier()
        started_s = time.perf_counter()
        farandole.allreduce_(numbers, op=farandole.Sum, name=name)
        taken_s.append(time.perf_counter() - started_s)
    return statistics.median(taken_s[-times:])


def main() -> None:
    """Checks, measures, prints."""
    farandole.init()
    check()
    small_s = median_s(SMALL_COUNT, SMALL_TIMES, "small")
    large_s = median_s(LARGE_COUNT, LARGE_TIMES, "large")
    if farandole.rank() == 0:
        found = {
            "ranks": farandole.size(),
            "latency_4_bytes_us": round(small_s * 1e6, 1),
            "bandwidth_64_mib_gb_per_s": round(LARGE_COUNT * 4 / large_s / 1e9, 3),
        }
        print(json.dumps(found))


if __name__ == "__main__":
    main()
