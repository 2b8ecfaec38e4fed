"""One fault of each kind, injected as test/fault/inject.py does it by the thousand: who hears what, what is left."""

import random
import sys

import pytest

from ranks import REPOSITORY

sys.path.append(str(REPOSITORY / "test" / "fault"))

import inject
import starts

RANKS = 4
PATIENCE = 10  # times the bound on a machine that has other things to do
#: Take long, and are covered by their neighbours.
LEFT_OUT = ["swapped", "pipe full"]
ENDS = ["SIGKILL", "SIGTERM", "SIGSTOP", "_exit(0)", "_exit(7)", "sys.exit(3)", "exception", *inject.WELL]


def check(kind, launcher):
    seed = random.SystemRandom().randrange(1 << 30)
    count = min(3, inject.FAULTS[kind].per_job)
    try:
        one = inject.run(kind, launcher, RANKS, seed, count)
    except RuntimeError as error:
        if "no hosts can be played here" in str(error):
            pytest.skip(str(error))
        raise
    said = f"{kind}, {launcher}, seed {seed}, rank {one.rank}: {one}"
    assert not one.hangs, said
    assert one.are_codes_right, said
    assert not one.leftovers, said
    if kind in inject.WELL and kind != "work in flight":  # of which what no other rank had announced has failed
        assert not one.output, said
    if launcher == "farandolerun" and kind in ("launcher SIGINT", "launcher SIGTERM"):
        assert f"farandolerun: {kind[9:]}: ending all ranks\n" in one.output, said
    wrong = {heard.rank: heard.wrong for heard in one.heard if heard.wrong}
    assert not wrong, said
    bound_s = PATIENCE * max(1.0, inject.FAULTS[kind].bound_s)
    assert all(heard.after_s is not None and heard.after_s < bound_s for heard in one.heard), said


@pytest.mark.once
@pytest.mark.parametrize("kind", [kind for kind in inject.FAULTS if kind not in LEFT_OUT])
def test_a_fault_is_named_on_every_rank_and_leaves_nothing(kind):
    check(kind, "farandolerun")


@pytest.mark.parametrize("kind", ENDS)
@pytest.mark.once
def test_without_a_launcher_too(kind):
    check(kind, "env")


@pytest.mark.once  # Open MPI 5's mpirun knows no recovery: it ends the other ranks
@pytest.mark.mpi
@pytest.mark.parametrize("kind", [*ENDS, "SIGSEGV", "launcher SIGINT", "launcher SIGTERM"])
def test_under_mpirun_too(kind):
    check(kind, "mpirun")


@pytest.mark.once
def test_nothing_remains_of_a_job_whose_start_is_cut_short():
    seed = random.SystemRandom().randrange(1 << 30)
    assert [starts.die(way, seed) for way in starts.WAYS] == [""] * len(starts.WAYS), seed


@pytest.mark.once
def test_ranks_that_stay_name_those_that_were_killed_and_meet_their_successors():
    seed = random.SystemRandom().randrange(1 << 30)
    assert starts.run_generations(4, 3, seed) == [], seed
