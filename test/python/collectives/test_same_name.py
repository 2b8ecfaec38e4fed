"""One name for different collectives: refused on all ranks where ranks disagree, and on the rank
itself where both are in flight; one after the other is fine."""

import itertools
import json

import numpy as np
import pytest
import torch

import farandole as fl
import farandole.torch as ft
from ranks import run_mpi, run_threads

ARRAY = np.ones((4, 2), np.float32)
TENSOR = torch.ones(4, 2)

CALLS = {
    "allreduce": lambda name: fl.allreduce(ARRAY, name=name),
    "broadcast": lambda name: fl.broadcast(ARRAY, 0, name=name),
    "allgather": lambda name: fl.allgather(ARRAY, name=name),
    "reducescatter": lambda name: fl.reducescatter(ARRAY, name=name),
    "alltoall": lambda name: fl.alltoall(ARRAY, name=name),
}
FORMS = {
    "torch allreduce": ("allreduce", lambda name: ft.allreduce(TENSOR, name=name)),
    "torch broadcast": ("broadcast", lambda name: ft.broadcast(TENSOR, 0, name=name)),
    "torch allgather": ("allgather", lambda name: ft.allgather(TENSOR, name=name)),
    "torch reducescatter": ("reducescatter", lambda name: ft.reducescatter(TENSOR, name=name)),
    "torch alltoall": ("alltoall", lambda name: ft.alltoall(TENSOR, name=name)),
    "grouped allreduce": ("allreduce", lambda name: ft.grouped_allreduce([TENSOR] * 2, name=name)),
    "grouped allgather": ("allgather", lambda name: ft.grouped_allgather([TENSOR] * 2, name)),
    "grouped reducescatter": (
        "reducescatter",
        lambda name: ft.grouped_reducescatter([TENSOR] * 2, name),
    ),
    "allgather_async": (
        "allgather",
        lambda name: ft.synchronize(ft.allgather_async(TENSOR, name=name)),
    ),
    "sparse_allreduce": (
        "sparse_allreduce_async",
        lambda name: ft.sparse_allreduce_async(torch.eye(3).to_sparse(), name=name)(),
    ),
    "broadcast_object": ("broadcast_object", lambda name: fl.broadcast_object({}, 0, name=name)),
    "allgather_object": ("allgather_object", lambda name: fl.allgather_object({}, name=name)),
}


def refused(call, name):
    with pytest.raises(fl.MismatchError) as raised:
        call(name)
    return str(raised.value)


def check_texts(texts, functions):
    assert len(set(texts)) == 1, texts
    for part in ['"k"', *(f"rank {rank} called {f}" for rank, f in enumerate(functions))]:
        assert part in texts[0], texts[0]


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(CALLS, 2)))
def test_another_collective_of_the_same_name_is_refused_on_all_ranks(first, second):
    def body(rank):
        call = CALLS[[first, second][rank]]
        text = refused(call, "k")
        for _ in range(3):
            np.testing.assert_array_equal(fl.allreduce(ARRAY, name="k"), ARRAY)
        return text

    check_texts(run_threads(2, body, timeout_s=5), [first, second])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("other", ["allreduce", "allgather"])
def test_it_is_refused_in_every_form_of_a_collective(form, other):
    function, call = FORMS[form]
    if function == other:
        other = "alltoall"

    def body(rank):
        return refused([CALLS[other], call][rank], "k")

    check_texts(run_threads(2, body, timeout_s=5), [other, function])


def test_two_calls_of_objects_under_one_name_are_refused():
    def body(rank):
        call = [fl.broadcast_object, fl.allgather_object][rank]
        return refused(lambda name: call("x", name=name), "k")

    check_texts(run_threads(2, body, timeout_s=5), ["broadcast_object", "allgather_object"])


def test_of_three_ranks_the_odd_one_is_told():
    def body(rank):
        call = CALLS["allgather" if rank == 2 else "allreduce"]
        return refused(call, "k")

    texts = run_threads(3, body, timeout_s=5)
    assert len(set(texts)) == 1, texts
    assert "ranks 0, 1 called allreduce, rank 2 called allgather" in texts[0]


def test_a_name_serves_one_collective_after_another():
    def body(rank):
        for _ in range(4):
            for call in CALLS.values():
                call("k")
            for _, call in FORMS.values():
                call("k")
        return True

    assert run_threads(2, body, timeout_s=30) == [True, True]


def test_a_name_in_flight_for_one_collective_is_refused_locally_for_another():
    def body(rank):
        if rank == 1:
            fl.barrier()
            fl.allreduce(ARRAY, name="k")
            fl.barrier()
            rows = fl.allgather(ARRAY, name="rows")
            fl.barrier()
            FORMS["sparse_allreduce"][1]("sparse")
            return rows.shape
        handle = fl.allreduce_async(ARRAY, name="k")
        for call in (CALLS["broadcast"], CALLS["allgather"]):
            with pytest.raises(ValueError, match='"k" is already in flight .* 0, as allreduce'):
                call("k")
        fl.barrier()
        fl.synchronize(handle)
        handle = fl.allgather_async(ARRAY, name="rows")
        with pytest.raises(ValueError, match='"rows" is already in flight on rank 0, as allgather'):
            fl.allreduce(ARRAY, name="rows")
        fl.barrier()
        rows = fl.synchronize(handle)
        finish = ft.sparse_allreduce_async(torch.eye(3).to_sparse(), name="sparse")
        with pytest.raises(ValueError, match='"sparse" is already in flight .* as sparse_allreduce_async'):
            fl.allgather(ARRAY, name="sparse")
        fl.barrier()
        finish()
        return rows.shape

    assert run_threads(2, body, timeout_s=10) == [(8, 2), (8, 2)]


def test_a_barrier_does_not_meet_the_names_of_users():
    def body(rank):
        handle = fl.allreduce_async(ARRAY, name="barrier.noname.0")
        fl.barrier()
        return float(fl.synchronize(handle).sum())

    assert run_threads(2, body, timeout_s=10) == [8.0, 8.0]


@pytest.mark.mpi
def test_it_is_refused_on_all_ranks_under_mpirun():
    script = """
        import json, numpy as np, farandole as fl
        fl.init()
        calls = {
            "allreduce": lambda: fl.allreduce(np.ones((4, 2)), name="k"),
            "allgather": lambda: fl.allgather(np.ones((4, 2)), name="k"),
            "alltoall": lambda: fl.alltoall(np.ones((4, 2)), name="k"),
        }
        for pair in (("allreduce", "allgather"), ("alltoall", "allgather")):
            try:
                calls[pair[fl.rank()]]()
            except fl.MismatchError as error:
                tell(json.dumps(str(error)))
        fl.allgather(np.ones(2), name="k")
        fl.shutdown()
    """
    told = [[json.loads(line) for line in text.splitlines()] for text in run_mpi(2, script, 30)]
    assert len(told[0]) == len(told[1]) == 2
    check_texts([texts[0] for texts in told], ["allreduce", "allgather"])
    check_texts([texts[1] for texts in told], ["alltoall", "allgather"])
