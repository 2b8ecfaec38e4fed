"""Ranks that call by known names, alone and beside all else; test_agreement.py starts them as processes."""

import random
import threading

import numpy as np

import farandole as fl


def known():
    """Nothing but known blocking calls."""
    rank = fl.rank()
    for step in range(2_000):
        assert fl.allreduce(np.float32([rank, step]), op=fl.Sum, name="loss").tolist() == [1, 2 * step]
        fl.barrier()


def other_votes():
    """Of a known name: rows that change, a shape that changes, and a call that differs on another rank."""
    rank = fl.rank()
    for step in range(300):
        rows, first = (2, 2) if step % 7 else (3 + rank, 3)
        gathered = fl.allgather(np.full((rows, 2), step + rank), name="rows")
        assert gathered[:, 0].tolist() == [step] * first + [step + 1] * (len(gathered) - first)
        count = 4 if step % 5 else 6
        assert fl.allreduce(np.ones(count), op=fl.Sum, name="shape").tolist() == [2] * count
        if step % 50 == 49:
            try:
                fl.allreduce(np.ones(4 + rank), op=fl.Sum, name="shape")
            except fl.MismatchError as error:
                assert 'allreduce "shape"' in str(error), error
            else:
                raise AssertionError("no MismatchError")


def mixture(seed):
    """Kinds and names drawn anew for each call, asynchronous ones in between, and joins."""
    draw = random.Random(seed)
    for step in range(1_500):
        kind = draw.choice(["allreduce", "allgather", "broadcast", "barrier", "async"])
        one_call(kind, f"{kind}.{draw.randrange(3)}", fl.rank(), fl.size(), step)
        if step % 250 == 249:
            fl.join()


def one_call(kind, name, rank, size, step):
    """Makes a call and checks its result."""
    value = np.arange(6, dtype=np.float64) + rank + step
    all_values = [np.arange(6, dtype=np.float64) + other + step for other in range(size)]
    if kind == "allreduce":
        np.testing.assert_array_equal(fl.allreduce(value, op=fl.Sum, name=name), sum(all_values))
    elif kind == "allgather":
        np.testing.assert_array_equal(fl.allgather(value, name=name), np.concatenate(all_values))
    elif kind == "broadcast":
        np.testing.assert_array_equal(fl.broadcast(value, size - 1, name=name), all_values[-1])
    elif kind == "barrier":
        fl.barrier()
    else:
        handles = [fl.allreduce_async(value * k, op=fl.Sum, name=f"{name}.{k}") for k in range(3)]
        for k, handle in reversed(list(enumerate(handles))):
            np.testing.assert_array_equal(fl.synchronize(handle), k * sum(all_values))


def threads():
    """Two threads of each rank, while ranks 0 and 1 call on a set of their own."""
    context, pair, rank = fl.basics.current(), fl.add_process_set([0, 1]), fl.rank()
    failures = []

    def call(name):
        try:
            with fl.basics.using(context):
                for step in range(500):
                    assert fl.allreduce(np.float64([rank + step]), op=fl.Sum, name=name)[0] == 3 + 3 * step
        except BaseException as error:
            failures.append(error)

    callers = [threading.Thread(target=call, args=(f"of thread {k}",)) for k in range(2)]
    for caller in callers:
        caller.start()
    for step in range(500 if rank < 2 else 0):
        assert fl.allreduce(np.float64([step]), op=fl.Sum, name="pair", process_set=pair)[0] == 2 * step
    for caller in callers:
        caller.join()
    assert not failures, failures
