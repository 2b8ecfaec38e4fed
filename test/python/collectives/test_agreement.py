"""Blocking calls of known names, which ranks of a host agree to run without votes, beside all else that they may do."""

import pytest

from ranks import run_forked


def agreements(size, call):
    """How many each rank counts after a body of agreement_job.py."""
    script = f"""
        import agreement_job, farandole
        farandole.init()
        agreement_job.{call}
        tell(farandole.counters()["agreements"])
        farandole.barrier()
        farandole.shutdown()
    """
    return [int(told) for told in run_forked(size, script)]


def test_known_blocking_calls_need_no_votes():
    first, second = agreements(2, "known()")
    assert first == second > 0


def test_what_an_id_does_not_say_is_voted_on():
    first, second = agreements(2, "other_votes()")
    assert first == second


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_any_mixture_gives_right_results(size, seed):
    assert len({*agreements(size, f"mixture({seed})")}) == 1


def test_two_threads_of_each_rank_and_a_set_beside_all_ranks():
    agreements(3, "threads()")
