"""What each rank finds of farandole.tensorflow when something goes wrong: each check in a job of its own."""

import functools
import os
import signal
import time

from framework_ranks import raises


def check_shapes_that_differ_and_what_follows(rank, size):
    import tensorflow as tf

    import farandole.tensorflow as hvd

    raises(hvd.MismatchError, "shapes must be equal|shape", hvd.allreduce, tf.ones([2 + rank]), name="eager")
    step = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum, name="graph"))
    raises(tf.errors.OpError, r"MismatchError(.|\n)*shape", step, tf.ones([2 + rank]))
    assert step(tf.ones([3])).numpy().tolist() == [size] * 3


def check_another_order_ends_with_an_error(rank, size):
    import tensorflow as tf

    import farandole.tensorflow as hvd

    names = ["first", "second"] if rank == 0 else ["second", "first"]
    step = tf.function(lambda: [hvd.allreduce(tf.ones([2]), name=name) for name in names])
    start = time.monotonic()
    raises(tf.errors.OpError, "first(.|\n)*second|second(.|\n)*first", step)
    assert time.monotonic() - start < 20


def check_another_order_after_a_graph_ends_with_an_error(rank, size):
    """In which TensorFlow's threads have called, and which this one then did not wait for."""
    import numpy as np
    import tensorflow as tf

    import farandole
    import farandole.tensorflow as hvd

    step = tf.function(lambda name: hvd.allreduce(tf.ones([2]), name=name), autograph=rank == 0)
    for call in (step, lambda name: hvd.allreduce(tf.ones([2]), name=name), step):
        call("same")
    farandole.allreduce(np.ones(2), name="same")
    if rank == 0:
        raises(tf.errors.OpError, 'ranks wait for different.*"one"(.|\n)*"other"', step, "one")
    else:
        raises(hvd.MismatchError, 'ranks wait for different.*"one"(.|\n)*"other"', hvd.allreduce, 1.0, name="other")


def check_daemons_that_wait_are_no_divergence(rank, size):
    """As the main thread may yet call what is missing."""
    import threading

    import tensorflow as tf

    import farandole.tensorflow as hvd

    graph = tf.function(lambda: hvd.allreduce(tf.ones([2]), name="graph"))
    calls = [functools.partial(hvd.allreduce, tf.ones([2]), name=name) for name in ("one", "two")] + [graph]
    for waiting in (calls[:1], calls[:2], calls[2:]):
        made = []
        daemons = [
            threading.Thread(target=lambda call, made: made.append(call()), args=(call, made), daemon=True)
            for call in waiting
        ]
        if rank == 0:
            for daemon in daemons:
                daemon.start()
            time.sleep(4)
        hvd.allreduce(tf.ones([2]), name="main")
        for daemon in daemons:
            if rank == 1:
                daemon.start()
            daemon.join()
        assert [one.numpy().tolist() for one in made] == [[1, 1]] * len(waiting)


def check_a_killed_rank_is_named(rank, size):
    import tensorflow as tf

    import farandole.tensorflow as hvd

    step = tf.function(lambda: hvd.allreduce(tf.ones([2])))
    step()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    raises(tf.errors.OpError, "rank 1", step)
