"""Trees of tensors as one operation, averages of metrics, evaluation over uneven shards."""

import collections
import math

import pytest
import torch
from torch import nn

import farandole.torch as fl
from ranks import on_threads, run_forked, run_threads

Pair = collections.namedtuple("Pair", "left right")


@on_threads(3)
def test_a_tree_of_anything_keeps_its_structure(rank):
    tree = {
        "weights": [torch.full((2, 2), float(rank)), (torch.tensor(rank), 0.5 + rank)],
        "pair": Pair(rank, None),
        "ordered": collections.OrderedDict(b=torch.ones(0), a=True),
    }
    got = fl.allreduce_tree(tree, op=fl.Sum)
    assert tree["weights"][0].eq(rank).all()
    assert got["weights"][0].tolist() == [[3.0, 3.0]] * 2
    assert got["weights"][1][0].tolist() == 3 and got["weights"][1][0].dtype == torch.int64
    assert got["weights"][1][1] == 4.5 and type(got["weights"][1]) is tuple
    assert got["pair"] == Pair(3.0, None)
    assert type(got["ordered"]) is collections.OrderedDict
    assert list(got["ordered"]) == ["b", "a"] and got["ordered"]["a"] == 3.0
    assert got["ordered"]["b"].shape == (0,)


@on_threads(2)
def test_a_tree_is_one_operation_with_allreduces_options_and_an_empty_one_is_none(rank):
    before = fl.counters()["batches"]
    fl.allreduce_tree({str(i): torch.ones(3) for i in range(20)})
    assert fl.counters()["batches"] - before == 1
    assert fl.allreduce_tree({"a": [None, ()]}) == {"a": [None, ()]}
    assert fl.counters()["batches"] - before == 1
    coarse = fl.allreduce_tree([torch.tensor([1 / 3])], compression=fl.Compression.fp16)
    assert coarse[0].item() == torch.tensor(1 / 3).half().item()
    assert fl.allreduce_tree([rank, 5 - rank], op=fl.Max, name="x") == [1.0, 5.0]


def test_entries_are_matched_by_key_whatever_their_order():
    def body(rank):
        items = [("a", 1.0), ("b", 10.0), (3, 100.0)]
        tree = dict(items if rank == 0 else reversed(items))
        return fl.allreduce_tree(tree), list(fl.metric_average(tree).values())

    expected = {"a": 1.0, "b": 10.0, 3: 100.0}
    assert run_threads(2, body) == [(expected, [1, 10, 100]), (expected, [100, 10, 1])]


@pytest.mark.parametrize("call", [fl.allreduce_tree, fl.metric_average])
@on_threads(2)
def test_trees_that_differ_are_refused_on_all_ranks_and_what_is_no_tree_by_its_path(rank, call):
    for tree in ({"a": 1.0, "b": 2.0} if rank else {"a": 1.0}, [torch.ones(2 + rank)]):
        with pytest.raises(fl.MismatchError):
            call(tree)
    for tree, text in (({"a": [1.0, "x"]}, r"\['a'\]\[1\] is of type str; expected tensors, num"),
                       (object(), "it is of type object")):  # fmt: skip
        with pytest.raises(TypeError, match=text):
            call(tree)


@on_threads(2)
def test_metrics_are_averaged_in_float64(rank):
    assert fl.metric_average(1 + rank, "loss") == 1.5
    assert fl.metric_average(0.1) == 0.1
    values = {"a": torch.tensor([1, 2 + rank]), "b": torch.tensor(60000.0).half(), "c": 2**40 + rank}
    got = fl.metric_average(values)
    assert got["a"].tolist() == [1.0, 2.5] and got["a"].dtype == torch.float32
    assert got["b"].item() == 60000 and got["b"].dtype == torch.float16
    assert got["c"] == 2**40 + 0.5
    value = torch.tensor(float(rank), requires_grad=True)
    assert not fl.metric_average(value * 2).requires_grad


@on_threads(3)
def test_weights_of_all_ranks_make_a_mean_over_samples(rank):
    metrics = {"loss": [3.0, math.nan, 6.0][rank], "accuracy": torch.tensor(rank / 2)}
    got = fl.metric_average(metrics, weight=[10, 0, 20][rank])
    assert got["loss"] == 5.0 and abs(got["accuracy"] - 2 / 3) < 1e-7
    assert math.isnan(fl.metric_average(1.0, weight=0))
    with pytest.raises(ValueError, match="weight must be >= 0, not -1"):
        fl.metric_average(1.0, weight=-1)
    with pytest.raises(fl.MismatchError):
        fl.metric_average(1.0, weight=3 if rank else None)


# evaluate()


def make_data(count):
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    return inputs, torch.arange(count) % 2


def make_model():
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5), nn.BatchNorm1d(2)).double()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter) + number)
    return model


def measure(model, batch):
    inputs, labels = batch
    assert not model.training and not torch.is_grad_enabled()
    scores = model(inputs)
    right = (scores.argmax(1) == labels).double()
    of_class = torch.stack([right[labels == c].sum() for c in range(2)]) / len(labels)
    loss = nn.functional.cross_entropy(scores, labels)
    return {"loss": loss, "nested": [right.mean().item(), of_class]}, len(labels)


def shard(data, batch_size):
    """This rank's batches: every size()-th sample."""
    mine = [part[fl.rank() :: fl.size()] for part in data]
    batches = zip(*(part.split(batch_size) for part in mine), strict=True)
    return list(batches) if len(mine[0]) else []


@pytest.mark.parametrize(("count", "size", "pickles"), [(17, 1, "1"), (17, 2, "0"), (11, 3, "1"), (2, 4, "1")])
def test_uneven_shards_have_the_figures_of_one_process(monkeypatch, count, size, pickles):
    monkeypatch.setenv("FARANDOLE_ALLOW_PICKLE", pickles)
    data = make_data(count)
    expected, _ = measure_alone(data)

    def body(rank):
        model = make_model()
        model[2].eval()
        got = fl.evaluate(model, shard(data, 2), measure)
        assert [m.training for m in model.modules()] == [True, True, True, False]
        return got

    for got in run_threads(size, body):
        assert got["loss"] == pytest.approx(expected["loss"].item(), rel=1e-12)
        assert got["nested"][0] == pytest.approx(expected["nested"][0], rel=1e-12)
        torch.testing.assert_close(got["nested"][1], expected["nested"][1])
        assert type(got["loss"]) is float


def measure_alone(data):
    with torch.no_grad():
        return measure(make_model().eval(), data)


def test_a_failure_on_one_rank_ends_the_evaluation_on_all():
    data = make_data(8)

    def body(rank):
        def failing(model, batch):
            if rank == 1:
                raise KeyError("no such label")
            return measure(model, batch)

        model = make_model()
        with pytest.raises((KeyError, fl.HorovodInternalError)) as raised:
            fl.evaluate(model, shard(data, 2), failing)
        assert model.training
        assert fl.evaluate(model, shard(data, 2), measure)["loss"] > 0
        return str(raised.value)

    told = run_threads(3, body)
    assert told.pop(1) == "'no such label'"
    assert told == ["evaluate: rank 1 failed: KeyError: 'no such label'"] * 2


@on_threads(2)
def test_metrics_that_differ_and_empty_data_are_refused_on_all_ranks(rank):
    model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="evaluate: no rank has a sample"):
        fl.evaluate(model, [], lambda model, batch: (1.0, 1))
    with pytest.raises(ValueError, match=r"metrics of ranks 0 and 1 differ in path or shape: .*'loss'.*'error'"):
        fl.evaluate(model, [0], lambda model, batch: ({"error" if rank else "loss": 1.0}, 1))
    with pytest.raises((ValueError, fl.HorovodInternalError), match="metrics of two batches"):
        batches = [1, 2] if rank else [2, 2]
        fl.evaluate(model, batches, lambda model, batch: (torch.ones(batch), 1))


def test_everything_runs_in_processes():
    told = run_forked(
        2,
        """
        import torch
        import farandole.torch as fl
        import test_metrics as test

        fl.init()
        assert fl.allreduce_tree({"a": [torch.ones(3), 2.0]}, op=fl.Sum)["a"][1] == 4
        assert fl.metric_average(fl.rank(), weight=fl.rank() + 1) == 2 / 3
        data = test.make_data(7)
        expected, _ = test.measure_alone(data)
        got = fl.evaluate(test.make_model(), test.shard(data, 2), test.measure)
        assert abs(got["loss"] - expected["loss"]) < 1e-12
        tell("done")
        """,
    )
    assert told == ["done"] * 2


def test_a_process_set_has_its_own_averages():
    def body(rank):
        members = fl.add_process_set([0, 2])
        if rank == 1:
            return None
        model = nn.Linear(1, 1)
        return (
            fl.allreduce_tree([rank], op=fl.Sum, process_set=members),
            fl.metric_average(rank, weight=1 + rank, process_set=members),
            fl.evaluate(model, [rank], lambda model, batch: (batch, 1), process_set=members),
        )

    assert run_threads(3, body) == [([2.0], 1.5, 1.0), None, ([2.0], 1.5, 1.0)]
