"""Process sets: who is in them, what collectives do on them, how they come and go."""

import re

import numpy as np
import pytest
import torch

import farandole as fl
import farandole.torch as flt
from farandole import basics
from ranks import on_threads, run_mpi, run_threads


def registered():
    """The ranks of every registered set, by its id; 0 is the global one."""
    known = basics.current().process_sets
    return {0: fl.global_process_set.ranks} | {number: known[number].ranks for number in sorted(known)}


def halves(rank):
    """Registers {0, 2} and {1, 3}; gives the one that this rank is in, and the other."""
    sets = [fl.add_process_set([0, 2]), fl.add_process_set(fl.ProcessSet([3, 1]))]
    return sets[rank % 2], sets[1 - rank % 2]


@on_threads(4)
def test_objects_parameters_and_states_travel_within_a_set(rank):
    mine, _ = halves(rank)
    low, high = mine.ranks
    assert fl.broadcast_object(("of", rank), high, process_set=mine) == ("of", high)
    assert fl.allgather_object(rank, process_set=mine) == [low, high]
    weight = torch.nn.Parameter(torch.full((2,), float(rank)))
    flt.broadcast_parameters({"w": weight}, low, process_set=mine)
    assert weight.tolist() == [low, low]
    optimizer = torch.optim.SGD([weight], lr=float(rank + 1))
    flt.broadcast_optimizer_state(optimizer, high, process_set=mine)
    assert optimizer.param_groups[0]["lr"] == high + 1
    sparse = torch.sparse_coo_tensor([[rank // 2]], [float(rank)], (2,))
    mean = flt.sparse_allreduce_async(sparse, process_set=mine)()
    assert mean.to_dense().tolist() == [low / 2, high / 2]


def test_a_set_knows_its_ranks_and_this_rank_its_number_in_it():
    def body(rank):
        mine, other = halves(rank)
        assert (mine.size(), mine.rank(), mine.included()) == (2, rank // 2, True)
        assert (other.size(), other.included()) == (2, False)
        with pytest.raises(ValueError, match=f"rank {rank} is not in"):
            other.rank()
        everybody = fl.global_process_set
        assert (everybody.process_set_id, everybody.ranks) == (0, [0, 1, 2, 3])
        assert (everybody.size(), everybody.rank(), everybody.included()) == (4, rank, True)
        assert registered() == {0: [0, 1, 2, 3], 1: [0, 2], 2: [1, 3]}
        return str(mine)

    texts = run_threads(4, body)
    assert texts[0] == "ProcessSet(process_set_id=1, ranks=[0, 2], mpi_comm=None)"


def test_a_new_set_has_the_smallest_number_that_is_free():
    def body(rank):
        sets = [fl.add_process_set(ranks) for ranks in ([0], [1], [2], [0, 1])]
        assert [s.process_set_id for s in sets] == [1, 2, 3, 4]
        assert fl.remove_process_set(sets[1]) and sets[1].process_set_id is None
        assert not fl.remove_process_set(sets[1])
        assert not fl.remove_process_set(fl.global_process_set)
        again = fl.add_process_set([1])
        assert again.process_set_id == 2 and fl.add_process_set([1, 2]).process_set_id == 5
        return rank not in again.ranks or fl.allreduce(np.ones(1), process_set=again).item()

    assert run_threads(3, body) == [True, 1, True]


@on_threads(4)
def test_a_rank_outside_is_refused_before_anybody_waits(rank):
    mine, other = halves(rank)
    for call in (
        lambda: fl.allreduce(np.ones(1), process_set=other),
        lambda: flt.allgather(torch.ones(1), process_set=other),
        lambda: fl.broadcast(np.ones(1), other.ranks[0], process_set=other),
        lambda: fl.barrier(process_set=other),
    ):
        with pytest.raises(ValueError, match=f"Rank {rank} is not a member of the provided"):
            call()
    with pytest.raises(ValueError, match="invalid root rank .* for provided process set"):
        fl.broadcast(np.ones(1), other.ranks[0], process_set=mine)
    assert fl.allreduce(np.ones(1), op=fl.Sum, process_set=mine).item() == 2.0


@on_threads(4)
def test_what_is_not_registered_or_registered_twice_is_refused_and_ranks_that_add_other_sets_are_told(rank):
    removed = fl.add_process_set([0])
    fl.remove_process_set(removed)
    for unknown in (fl.ProcessSet([0]), object(), removed):
        with pytest.raises(TypeError, match="does not exist, or has not been registered"):
            fl.allreduce(np.ones(1), process_set=unknown)
    assert removed.size() is None and removed.rank() is None
    first = fl.add_process_set([1, 0, 2])
    for again in ([0, 1, 2], first):
        with pytest.raises(ValueError, match="already|the same ranks"):
            fl.add_process_set(again)
    with pytest.raises(fl.MismatchError):
        fl.add_process_set([rank])
    assert (fl.add_process_set([1]).process_set_id, fl.allreduce(np.ones(1)).item()) == (2, 1.0)


def test_what_waits_in_a_set_ends_when_it_is_removed_and_does_not_hold_others_up():
    def body(rank):
        pair = fl.add_process_set([0, 1])
        handle = fl.allreduce_async(np.ones(1), name="x", process_set=pair) if rank == 0 else None
        for i in range(5):
            assert fl.allreduce(np.ones(1), name=f"{i}").item() == 1
        fl.remove_process_set(pair)
        if handle is not None:
            with pytest.raises(fl.AbortedError):
                fl.synchronize(handle)
        pair = fl.add_process_set([0, 1])
        return rank == 2 or fl.allreduce(np.ones(1), name="x", op=fl.Sum, process_set=pair).item()

    assert run_threads(3, body) == [2.0, 2.0, True]


@on_threads(2)
def test_64_sets_come_and_go(_rank):
    before = basics.current().core.in_flight
    for _ in range(64):
        mine = fl.add_process_set([0])
        if fl.rank() == 0:
            fl.allreduce(np.ones(8), name="x", process_set=mine)
        fl.remove_process_set(mine)
    assert (registered(), basics.current().core.in_flight - before) == ({0: [0, 1]}, 0)


@pytest.mark.mpi
def test_sets_are_registered_at_init():
    told = run_mpi(
        2,
        """
        import numpy as np
        import farandole as fl
        sets = [fl.ProcessSet([1]), fl.ProcessSet([0])]
        fl.init(process_sets=sets)
        mine = sets[1 - fl.rank()]
        tell([s.process_set_id for s in sets])
        tell(fl.allreduce(np.array([fl.rank()]), process_set=mine).item())
        fl.shutdown()
        tell([s.process_set_id for s in sets])
        try:
            fl.init(process_sets=[fl.ProcessSet([1]), fl.ProcessSet([1])])
        except ValueError as error:
            tell(fl.is_initialized())
        fl.init(comm=[0, 1], process_sets="dynamic")
        tell(fl.size())
        fl.shutdown()
        try:
            fl.init(comm=[0])
        except ValueError as error:
            tell("use a process set" in str(error))
        """,
    )
    assert told[0].split("\n") == ["[1, 2]", "0", "[None, None]", "False", "2", "True"]
    assert told[1].split("\n") == ["[1, 2]", "1", "[None, None]", "False", "2", "True"]


#: Sets that ranks pass -> the error of all.
DISUNITED = {
    "[fl.ProcessSet(half), fl.ProcessSet(half.Dup())]": "ValueError .*[0, 2] is a duplicate: rank 0 ",
    "[fl.ProcessSet(half)] + [fl.ProcessSet([0, 2])] * (world.rank == 2)": "ValueError .*: rank 2 passed 2",
    "[fl.ProcessSet(world.Dup())]": "ValueError .*global process set",
    "[fl.ProcessSet([world.rank])]": "MismatchError .*[0] was passed by ranks [0], but not by ranks [1, 2]",
    "[fl.ProcessSet(half)] * (world.rank != 2)": "MismatchError .*[0, 2] .* not by ranks [2]",
}


@pytest.mark.mpi
def test_sets_are_made_of_communicators_and_those_that_cannot_be_united_are_refused_on_all_ranks():
    pytest.importorskip("mpi4py")
    script = """
        from mpi4py import MPI
        import numpy as np
        import farandole as fl
        world = MPI.COMM_WORLD
        half = world.Split(world.rank % 2)
        for sets in DISUNITED:
            try:
                fl.init(process_sets=eval(sets))
            except (ValueError, fl.MismatchError) as error:
                tell(f"{type(error).__name__} {error}".replace("\\n", " "))
        group = world.Get_group().Incl([2, 0])
        even = fl.ProcessSet(world.Create_group(group) if world.rank != 1 else [0, 2])
        fl.init(comm=world, process_sets=[even])
        tell((even.ranks, even.process_set_id))
        tell(world.rank == 1 or fl.allreduce(np.ones(1), op=fl.Sum, process_set=even).item())
        """
    for rank, text in enumerate(run_mpi(3, script.replace("DISUNITED", repr(list(DISUNITED))))):
        *errors, made, result = text.split("\n")
        for error, expected in zip(errors, DISUNITED.values(), strict=True):
            assert re.match(expected.replace("[", "\\[").replace("]", "\\]"), error), error
        assert (made, result) == ("([0, 2], 1)", "True" if rank == 1 else "2.0")


@pytest.mark.mpi
@pytest.mark.once
def test_ranks_pass_the_communicators_that_they_are_in():
    """Split gives ranks different communicators; their sets are registered on all ranks alike."""
    pytest.importorskip("mpi4py")
    told = run_mpi(
        4,
        """
        from mpi4py import MPI
        import numpy as np
        import farandole as fl
        from farandole import basics
        world = MPI.COMM_WORLD
        mine = fl.ProcessSet(world.Split(world.rank % 2))
        some = world.Create(world.Get_group().Incl([3, 1, 2]))
        sets = [mine, fl.ProcessSet([0])] + ([fl.ProcessSet(some)] if world.rank > 0 else [])
        fl.init(comm=world, process_sets=sets)
        tell({i: s.ranks for i, s in basics.current().process_sets.items()})
        tell((mine.process_set_id, mine.ranks, sets[1].process_set_id))
        tell(fl.allreduce(np.array([fl.rank()]), op=fl.Sum, process_set=mine).item())
        """,
    )
    known = "{1: [0, 2], 2: [1, 3], 3: [0], 4: [1, 2, 3]}"
    even, odd = [known, "(1, [0, 2], 3)", "2"], [known, "(2, [1, 3], 3)", "4"]
    assert [text.split("\n") for text in told] == [even, odd, even, odd]


@pytest.mark.parametrize("complete", ["backward", "step"])
def test_an_optimizer_shares_gradients_within_its_set_alone(complete):
    def body(rank):
        mine, other = halves(rank)
        weights = {}
        for label, group in (("mine", mine), ("other", other), ("all", fl.global_process_set)):
            weight = weights[label] = torch.nn.Parameter(torch.zeros(1))
            embedding = torch.nn.Embedding(4, 1, sparse=True)
            torch.nn.init.zeros_(embedding.weight)
            optimizer = flt.DistributedOptimizer(
                torch.optim.SGD([weight, embedding.weight], lr=1.0),
                process_set=group, complete=complete,
            )  # fmt: skip
            for _ in range(3):
                optimizer.zero_grad()
                (weight * (rank + 1.0) + embedding(torch.tensor([rank])) * 4.0).sum().backward()
                optimizer.step()
            weights[label + " rows"] = embedding.weight.detach().ravel().tolist()
        fl.barrier()
        return {k: v.item() if hasattr(v, "item") else v for k, v in weights.items()}

    for rank, got in enumerate(run_threads(4, body)):
        low = rank % 2
        assert got["mine"] == -3 * (low + 2.0)
        assert got["mine rows"] == [-6.0 if r % 2 == low else 0.0 for r in range(4)]
        assert got["other"] == -3 * (rank + 1.0)
        assert got["other rows"] == [-12.0 if r == rank else 0.0 for r in range(4)]
        assert got["all"] == -3 * 2.5 and got["all rows"] == [-3.0] * 4
