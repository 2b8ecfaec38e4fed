"""Python objects between ranks."""

import pickle
import threading

import numpy as np
import pytest

import farandole as fl
import farandole.torch as flt
from farandole import objects
from ranks import on_threads, run_forked, run_threads


class Refuses:
    """Cannot be pickled."""

    def __reduce__(self):
        raise pickle.PicklingError("this holds an open file")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_objects_arrive_equal_and_the_root_keeps_its_own(size):
    def body(rank):
        mine = {"rank": rank, "list": [1.5, None, ("x", b"\0" * rank)]}
        for root in range(size):
            result = fl.broadcast_object(mine, root, name="config")
            assert result == {"rank": root, "list": [1.5, None, ("x", b"\0" * root)]}
            assert (result is mine) == (rank == root)
        assert flt.broadcast_object("whole" if rank == 0 else None) == "whole"
        gathered = fl.allgather_object(mine)
        assert [item["rank"] for item in gathered] == list(range(size))
        assert flt.allgather_object("x" * 100 * rank, name="texts") == ["x" * 100 * r for r in range(size)]

    run_threads(size, body)


def test_functions_travel_where_cloudpickle_is_installed():
    pytest.importorskip("cloudpickle", reason="cloudpickle pickles what pickle cannot")

    def body(rank):
        return fl.broadcast_object((lambda x: x + 10 * rank) if rank == 1 else None, 1)(2)

    assert run_threads(2, body) == [12, 12]


def test_classes_and_functions_of_the_script_arrive_as_the_receivers_own():
    script = """
        import dataclasses, enum, pickle, threading
        import torch
        import farandole.torch as hvd
        class Mode(enum.Enum):
            TRAIN = 1
        @dataclasses.dataclass
        class Config:
            lr: float
            class Error(Exception): pass
        def function(): return lock
        lock = threading.Lock()
        hvd.init(address="env://")
        if hvd.rank() == 0:
            class Missing:
                def made(self): return Config(1), Missing, Mode.TRAIN
            class Unsendable:
                def lock(self): return lock
        def is_ours(mode, config, error, found, keyed):
            kinds = mode is Mode.TRAIN and config == Config(0.5) and type(error) is Config.Error
            return kinds and found is function and keyed[Mode.TRAIN] == 1
        mine = (Mode.TRAIN, Config(0.5), Config.Error("x"), function, {Mode.TRAIN: 1})
        tell(is_ours(*hvd.broadcast_object(mine if hvd.rank() == 0 else None)))
        tell(all(is_ours(*each) for each in hvd.allgather_object(mine)))
        parameter = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        optimizer.state[parameter][Mode.TRAIN] = mine
        hvd.broadcast_optimizer_state(optimizer)
        tell(is_ours(*optimizer.state[parameter][Mode.TRAIN]))
        state = hvd.elastic.ObjectState(mine=mine)
        state.sync()
        tell(is_ours(*state.mine))
        # What only the sender has:
        sent = [Missing(), Missing, Config(1), lambda: Config] if hvd.rank() == 0 else None
        one, kind, config, call = hvd.broadcast_object(sent)
        made, own, mode = one.made()
        tell(made == config == Config(1) and own is kind is type(one) and mode is Mode.TRAIN and call() is Config)
        tell(hvd.allgather_object(kind)[1] is kind)  # and back
        try:
            tell(type(hvd.broadcast_object(Unsendable() if hvd.rank() == 0 else None)).__name__)
        except pickle.UnpicklingError as error:
            tell(error)
    """
    root, other = (text.splitlines() for text in run_forked(2, script))
    assert root == ["True"] * 6 + ["Unsendable"]
    assert other[:6] == ["True"] * 6
    assert "Unsendable of the sender's script is not in this rank's" in other[6]
    assert "cannot pickle '_thread.lock' object" in other[6]


CALLS = {
    "broadcast": lambda obj, rank: fl.broadcast_object(obj if rank == 1 else "fine", 1),
    "broadcast_by_name": lambda obj, rank: fl.broadcast_object(obj, 1, name="setup"),
    "allgather": lambda obj, rank: fl.allgather_object(obj),
    "allgather_by_name": lambda obj, rank: fl.allgather_object(obj, name="setup"),
}


@pytest.mark.parametrize("call", CALLS)
def test_an_object_that_cannot_be_pickled_raises_on_all_ranks(call):
    def body(rank):
        with pytest.raises(fl.HorovodInternalError) as raised:
            CALLS[call](Refuses() if rank == 1 else "fine", rank)
        cause = raised.value.__cause__
        assert (type(cause) is pickle.PicklingError) == (rank == 1)
        assert fl.allgather_object(rank) == [0, 1, 2]
        return str(raised.value)

    texts = run_threads(3, body)
    assert len(set(texts)) == 1
    assert "rank 1 failed: PicklingError: this holds an open file" in texts[0]


PLAIN = [
    None, True, -(2**70), 0.1, float("inf"), -0.0, "text\n", b"\0\xff", [], (1, [2]), {},
    {1: "a", (2, None): {"b": [b""]}}, ["dict", "tuple"],
]  # fmt: skip


def test_without_pickles_plain_values_travel_and_nothing_else(monkeypatch):
    monkeypatch.setenv("FARANDOLE_ALLOW_PICKLE", "0")

    def body(rank):
        assert repr(fl.broadcast_object(PLAIN if rank == 1 else None, 1)) == repr(PLAIN)
        assert repr(fl.allgather_object([PLAIN, rank])) == repr([[PLAIN, 0], [PLAIN, 1]])
        texts = []
        for call in ("broadcast", "allgather"):
            with pytest.raises(fl.HorovodInternalError) as raised:
                CALLS[call]([{"deep": 1j}] if rank == 1 else 0, rank)
            texts.append(str(raised.value))
        return texts

    first, second = run_threads(2, body)
    assert first == second
    for text in first:
        assert "rank 1 failed: TypeError: an object of type complex" in text
        assert "FARANDOLE_ALLOW_PICKLE=0" in text


def test_no_pickle_is_made_or_read_where_they_are_refused(monkeypatch):
    monkeypatch.setenv("FARANDOLE_ALLOW_PICKLE", "0")
    read = []
    monkeypatch.setattr(pickle, "loads", lambda text: read.append(text))
    monkeypatch.setattr(pickle, "dumps", lambda obj: pytest.fail("a pickle was made"))
    assert run_threads(2, lambda rank: fl.broadcast_object("x")) == ["x", "x"]
    assert not read


def test_a_switch_is_zero_or_one(monkeypatch):
    monkeypatch.setenv("FARANDOLE_ALLOW_PICKLE", "never")
    with pytest.raises(ValueError, match='FARANDOLE_ALLOW_PICKLE="never" is not 0 or 1'):
        run_threads(1, lambda rank: None)


def test_there_must_be_such_a_root():
    def body(rank):
        with pytest.raises(ValueError, match="root rank 2 is not in 0..1"):
            fl.broadcast_object("x", 2)
        return fl.broadcast_object(rank, 1)

    assert run_threads(2, body) == [1, 1]


@pytest.mark.parametrize("step", ["_finish", "_result"], ids=["the size", "the pickle"])
def test_an_interrupted_broadcast_goes_on_where_it_stopped(monkeypatch, step):
    interrupts = []

    def interrupting(plain):
        def interrupted(*arguments):
            if threading.current_thread().name == "rank to interrupt" and not interrupts:
                interrupts.append(step)
                raise KeyboardInterrupt
            return plain(*arguments)

        return interrupted

    def body(rank):
        if rank == 1:
            return fl.broadcast_object(None, name="x")
        threading.current_thread().name = "rank to interrupt"
        with pytest.raises(KeyboardInterrupt):
            fl.broadcast_object([1, 2], name="x")
        return fl.synchronize(fl.interrupted("x"))

    monkeypatch.setattr(objects._Broadcast, step, interrupting(getattr(objects._Broadcast, step)))
    assert run_threads(2, body) == [[1, 2]] * 2


@pytest.mark.parametrize(("text", "arrives"), [
    pytest.param("x" + 4000 * "\u00e9", "x" + 1000 * "\u00e9", id="long"),
    pytest.param("file\udcff", "file?", id="surrogate"),
    pytest.param("\0", "", id="nul"),
])  # fmt: skip
@on_threads(2)
def test_a_failure_text_of_any_characters_reaches_the_other_ranks(rank, text, arrives):
    def make():
        raise ValueError(text)

    with pytest.raises(fl.AbortedError) as raised:
        objects.broadcast_made(make, 0, "what")
    assert str(raised.value).startswith(f'broadcast_object "what": rank 0 failed: ValueError: {arrives}')
    assert fl.allreduce(np.ones(1), name="after").tolist() == [1.0]
