"""farandole.in_process: ranks that are threads of this process."""

import threading

import numpy as np
import pytest
import torch

import farandole as fl
import farandole.torch as flt


def test_each_rank_gives_its_result_and_the_job_is_left():
    def body(offset, factor=1):
        mean = fl.allreduce(np.full(2, float(fl.rank())))
        return fl.rank(), fl.size(), mean.tolist(), offset * factor

    assert flt.in_process is fl.in_process
    ranks = fl.in_process(3)
    expected = [(rank, 3, [1.0, 1.0], 14) for rank in range(3)]
    assert ranks.run(body, 7, factor=2) == expected
    assert ranks.run(body, 7, factor=2) == expected  # another job
    assert not fl.is_initialized()


def test_a_handle_of_an_ended_generation_says_so():
    def start():
        handle = flt.allreduce_async(torch.ones(2))
        fl.barrier()  # a rank that leaves before the other has started ends it
        return handle

    left = fl.in_process(2).run(start)

    def body():
        if fl.rank() == 1:
            flt.synchronize(left[1])
        fl.allreduce(np.ones(1))  # ends because rank 1 has left, which explains less

    with pytest.raises(fl.GenerationEndedError, match="has begun another one"):
        fl.in_process(2).run(body)


def test_the_exception_of_a_rank_is_raised_with_its_number():
    def body():
        if fl.rank() == 2:
            raise KeyError("no such batch")
        fl.allreduce(np.ones(1))  # ends because rank 2 has left

    with pytest.raises(KeyError, match="no such batch") as raised:
        fl.in_process(3).run(body)
    if hasattr(raised.value, "__notes__"):  # Python >= 3.11
        assert raised.value.__notes__ == ["raised by rank 2 of 3"]


def test_of_the_same_error_on_all_ranks_the_first_ranks_is_raised():
    with pytest.raises(fl.MismatchError) as raised:
        fl.in_process(2).run(lambda: fl.allreduce(np.ones(1 + fl.rank()), name="x"))
    assert getattr(raised.value, "__notes__", ["raised by rank 0 of 2"]) == ["raised by rank 0 of 2"]


def test_ranks_that_do_not_return_in_time_are_named():
    go_on = threading.Event()

    def body():
        return fl.rank() if fl.rank() == 0 else go_on.wait(30)

    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] of 2 did not finish in 0.3 s"):
        fl.in_process(2, timeout_s=0.3).run(body)  # rank 0 waits for rank 1 to leave
    go_on.set()


def test_there_is_at_least_one_rank():
    with pytest.raises(ValueError, match="at least 1"):
        fl.in_process(0).run(fl.rank)
