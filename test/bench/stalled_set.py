"""How much a stalled process set delays another one of the same ranks: run by hand,

    mpirun -np 3 python test/bench/stalled_set.py

Rank 2 comes 5 s late to an allreduce of all ranks; the latency of 4 bytes in the set of ranks 0 and 1
is printed for the time before, and for those 5 s, with the ratio of the medians.
"""

import statistics
import time

import numpy as np

import farandole as fl

STALL_S = 5.0


def latencies_us(process_set, seconds):
    """Of allreduces of 4 bytes, as many on every rank."""
    one, figures = np.ones(1, np.float32), []
    end = time.monotonic() + seconds
    while fl.allreduce(np.array([time.monotonic() < end]), op=fl.Min, process_set=process_set).all():
        for _ in range(200):
            start = time.perf_counter()
            fl.allreduce_(one, process_set=process_set)
            figures.append(1e6 * (time.perf_counter() - start))
    return figures


def main():
    fl.init()
    busy = fl.add_process_set([0, 1])
    if fl.rank() == 2:
        time.sleep(2.5 + STALL_S)
        fl.allreduce(np.ones(1000))
        return
    latencies_us(busy, 0.5)
    before = latencies_us(busy, 2.0)
    handle = fl.allreduce_async(np.ones(1000))
    during = latencies_us(busy, STALL_S - 0.5)
    assert not fl.poll(handle)
    assert fl.synchronize(handle).tolist() == [1.0] * 1000
    if fl.rank() == 0:
        medians = [statistics.median(figures) for figures in (before, during)]
        print(
            f"p50 {medians[0]:.1f} us before, {medians[1]:.1f} us while the other set is stalled "
            f"({len(before)} and {len(during)} operations): ratio {medians[1] / medians[0]:.2f}"
        )


if __name__ == "__main__":
    main()
