"""Ranks that disagree: one error, the same everywhere, at once, and the next operation works."""

import time

import numpy as np
import pytest

import farandole as fl
from farandole import objects
from ranks import run_threads


def shape(rank, name):
    return fl.allreduce(np.ones((4, 2 + rank), np.float32), name=name)


def dtype(rank, name):
    return fl.allreduce(np.ones(4, [np.float32, np.float64][rank]), name=name)


def reduction(rank, name):
    return fl.allreduce(np.ones(4), name=name, op=[fl.Sum, fl.Max][rank])


def root(rank, name):
    return fl.broadcast(np.ones(4), rank, name=name)


def good(rank, name, call):
    if call is root:
        return fl.broadcast(np.ones(4), 0, name=name)
    return fl.allreduce(np.ones((4, 2), np.float32), name=name)


VALUES = {
    shape: ["[4,2]", "[4,3]"],
    dtype: ["float32", "float64"],
    reduction: ["sum", "max"],
    root: ["root 0", "root 1"],
}


@pytest.mark.parametrize("call", list(VALUES), ids=lambda call: call.__name__)
@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
def test_a_disagreement_is_refused_on_all_ranks_within_100_ms(call, known):
    def body(rank):
        for _ in range(5 if known else 0):
            good(rank, "layer.weight", call)
        fl.barrier()
        submitted = time.perf_counter()
        with pytest.raises(fl.MismatchError) as raised:
            call(rank, "layer.weight")
        refused = time.perf_counter()
        for _ in range(3):
            good(rank, "layer.weight", call)
        return submitted, refused, str(raised.value)

    results = run_threads(2, body)
    last_submit = max(submitted for submitted, _, _ in results)
    assert max(refused for _, refused, _ in results) - last_submit < 0.1
    first, second = [text for _, _, text in results]
    assert first == second
    for part in ['"layer.weight"', "rank 0", "rank 1", *VALUES[call]]:
        assert part in first, first


@pytest.mark.parametrize(("text", "arrives"), [
    pytest.param("x" + 4000 * "\u00e9", "x" + 1000 * "\u00e9", id="long"),
    pytest.param("file\udcff", "file?", id="surrogate"),
    pytest.param("\0", "", id="nul"),
])  # fmt: skip
def test_a_failure_text_of_any_characters_reaches_the_other_ranks(text, arrives):
    def body(rank):
        def make():
            raise ValueError(text)

        with pytest.raises(fl.AbortedError) as raised:
            objects.broadcast_made(make, 0, "what")
        assert str(raised.value).startswith(f'broadcast_object "what": rank 0 failed: ValueError: {arrives}')
        return fl.allreduce(np.ones(1), name="after").tolist()

    assert run_threads(2, body) == [[1.0]] * 2
