"""Broadcasting the state of optimizers, on ranks that are threads."""

import copy

import pytest
import torch

import farandole.torch as fl
from ranks import run_forked, run_threads

SHAPES = [(4, 3), (3,), (2, 3, 2, 2), ()]


def sparse_loss(parameters, rank, step):
    rows = torch.tensor([step % 4, (rank + 1) % 4])
    return torch.nn.functional.embedding(rows, parameters[0], sparse=True).square().sum()


def dense_loss(parameters, rank, step):
    return sum(((p - rank - 0.1 * step) ** 2).sum() for p in parameters)


def matrices(parameters):
    return [p for p in parameters if p.dim() == 2]


ADAMS = {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.1}
CASES = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "SGD without state": {"lr": 0.1},
    "Adam": ADAMS | {"amsgrad": True},
    "AdamW": ADAMS,
    "Adam with a tensor as its rate": {"lr": torch.tensor(0.01)},
    "Adamax": ADAMS,
    "NAdam": ADAMS,
    "RAdam": ADAMS,
    "SparseAdam": {"lr": 0.01},
    "Adadelta": {},
    "Adagrad": {"lr_decay": 0.1},
    "Adafactor": {},
    "ASGD": {"t0": 1},
    "Rprop": {},
    "RMSprop": {"centered": True, "momentum": 0.9},
    "LBFGS": {"max_iter": 3, "history_size": 2, "line_search_fn": "strong_wolfe"},
    "Muon": {},
}


def class_of(case):
    return getattr(torch.optim, case.split()[0], None)


def make(case, rank):
    """Parameters and an optimizer whose options differ between ranks."""
    generator = torch.Generator().manual_seed(rank)
    parameters = [torch.randn(shape, generator=generator) for shape in SHAPES]
    if case != "LBFGS":  # which flattens by view()
        parameters[2] = parameters[2].to(memory_format=torch.channels_last)
    for parameter in parameters:
        parameter.requires_grad_()
    if case in ("SparseAdam", "Muon"):
        parameters = matrices(parameters)
    options = copy.deepcopy(CASES[case])
    optimizer = class_of(case)(parameters, **options)
    optimizer.param_groups[0]["lr"] = options.get("lr", 0.1) * (1 + rank)
    return parameters, optimizer


def train(case, parameters, optimizer, rank, steps):
    loss_of = sparse_loss if case == "SparseAdam" else dense_loss

    def closure():
        optimizer.zero_grad()
        loss = loss_of(parameters, rank, step)
        loss.backward()
        return loss

    for step in range(steps):
        optimizer.step(closure)


def same(a, b):
    """Equal structure, types and bits."""
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.stride() == b.stride()
            and torch.equal(a, b)
        )  # fmt: skip
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def test_every_optimizer_of_torch_is_in_the_table():
    shipped = {
        name for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    }  # fmt: skip
    assert shipped - {"Optimizer"} <= {case.split()[0] for case in CASES}


@pytest.mark.parametrize("pickles", ["0", "1"])
@pytest.mark.parametrize("steps", [(3, 0, 0), (0, 2, 3), (2, 3, 1)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_all_ranks_go_on_bitwise_like_the_root(case, steps, pickles, monkeypatch):
    """The root has taken ``steps[0]`` steps, the others as many as is said, none more comes; also wrapped."""
    monkeypatch.setenv("FARANDOLE_ALLOW_PICKLE", pickles)
    go_on_like_the_root(case, steps)


def go_on_like_the_root(case, steps):
    if class_of(case) is None:
        pytest.skip(f"torch {torch.__version__} has no {case}")

    def body(rank):
        parameters, optimizer = make(case, rank)
        train(case, parameters, optimizer, rank, steps[rank])
        if steps[0] == 2:
            optimizer = fl.DistributedOptimizer(optimizer)
        before = [p.detach().clone() for p in parameters]
        roots = copy.deepcopy(optimizer.state_dict())
        fl.broadcast_optimizer_state(optimizer)  # of rank 0
        assert all(torch.equal(p, b) for p, b in zip(parameters, before, strict=True))
        state = copy.deepcopy(optimizer.state_dict())
        assert rank > 0 or same(state, roots)
        fl.broadcast_parameters(parameters, 0)
        train(case, parameters, optimizer, rank if steps[0] == 2 else 0, 2)
        return state, [p.detach() for p in parameters]

    (state, parameters), *others = run_threads(3, body)
    for other_state, other_parameters in others:
        assert same(state, other_state)
        assert same(parameters, other_parameters)


def test_options_and_groups_keep_their_identity_and_what_only_the_root_has_arrives():
    def body(rank):
        weights = [torch.ones(2, requires_grad=True) for _ in range(2)]
        optimizer = torch.optim.SGD(
            [{"params": weights[:1]}, {"params": weights[1:], "lr": 5.0}], lr=0.1 * (rank + 1)
        )
        if rank == 1:
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            optimizer.param_groups[0]["note"] = "kept", 1, None
        else:
            optimizer.param_groups[0]["stale"] = True
        groups = optimizer.param_groups
        first = groups[0]
        fl.broadcast_optimizer_state(optimizer, root_rank=1)
        assert optimizer.param_groups is groups and groups[0] is first
        assert first["params"][0] is weights[0]
        assert (first["note"], "stale" in first) == (("kept", 1, None), False)
        return [group["lr"] for group in groups], first["initial_lr"]

    assert run_threads(2, body) == [([0.2, 5.0], 0.2)] * 2


def test_a_tensor_in_two_places_stays_one_tensor():
    def body(rank):
        weight = torch.zeros(3, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        if rank == 0:
            shared = torch.arange(3.0)
            optimizer.state[weight] = {"a": shared, "deep": [(shared, 1), {"b": shared}]}
            optimizer.state["own key"] = {"count": torch.tensor(7)}
        fl.broadcast_optimizer_state(optimizer, 0)
        state = optimizer.state[weight]
        assert state["a"] is state["deep"][0][0] is state["deep"][1]["b"]
        assert state["a"].tolist() == [0, 1, 2] and state["deep"][0][1] == 1
        assert optimizer.state["own key"]["count"].item() == 7

    run_threads(2, body)


def test_different_parameters_are_a_mismatch_on_all_ranks():
    def body(rank):
        for other in ([(2,), (5,)], [(2,)], [(2,), (3,), (4,)]):
            shapes = [(2,), (3,)] if rank == 0 else other
            optimizer = torch.optim.SGD([torch.ones(s, requires_grad=True) for s in shapes], lr=1)
            with pytest.raises(fl.MismatchError, match="optimizer parameters"):
                fl.broadcast_optimizer_state(optimizer, 0)

    run_threads(2, body)


@pytest.mark.parametrize("groups", [1, 2])
def test_another_class_on_some_rank_is_a_mismatch_on_all_ranks(groups):
    """Also where the numbers of parameters differ, which is then the consequence."""

    def body(rank):
        count = groups if rank == 0 else 1
        weights = [torch.zeros(3, requires_grad=True) for _ in range(count)]
        kind = torch.optim.SGD if rank == 0 else torch.optim.Adam
        optimizer = kind(weights, lr=0.1)
        text = r"rank 0 sent .*torch.optim.sgd.SGD.*ranks 1, 2 sent .*torch.optim.adam.Adam"
        with pytest.raises(fl.MismatchError, match=text):
            fl.broadcast_optimizer_state(optimizer, 1)
        assert not optimizer.state

    run_threads(3, body)


@pytest.mark.parametrize("kind", ["a generator", "a sparse tensor"])
def test_state_that_cannot_be_sent_raises_on_all_ranks(kind):
    def body(rank):
        weight = torch.zeros(3, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        if rank == 1:
            is_sparse = kind == "a sparse tensor"
            value = torch.eye(2).to_sparse() if is_sparse else (i for i in [1])
            optimizer.state[weight] = {"x": value}
        with pytest.raises(fl.HorovodInternalError, match=r"rank 1 failed: (Type|Value)Error"):
            fl.broadcast_optimizer_state(optimizer, 1)
        fl.broadcast_optimizer_state(optimizer, 0)
        assert not optimizer.state

    run_threads(2, body)


def test_one_rank_alone_is_left_as_it_is_and_wrong_arguments_are_refused():
    def body(rank):
        parameters, optimizer = make("Adam", rank)
        train("Adam", parameters, optimizer, rank, 2)
        before = copy.deepcopy(optimizer.state_dict())
        fl.broadcast_optimizer_state(optimizer, 0)
        assert same(before, optimizer.state_dict())
        with pytest.raises(ValueError, match=r"must be a torch.optim.Optimizer, not .*dict"):
            fl.broadcast_optimizer_state({}, 0)
        with pytest.raises(ValueError, match="root rank 7"):
            fl.broadcast_optimizer_state(make("Adam", 0)[1], 7)
        with pytest.raises(ValueError, match=r'params\["x"\] is of type dict'):
            fl.broadcast_parameters({"x": {}}, 0)

    run_threads(1, body)


def test_state_objects_and_rows_travel_between_processes():
    told = run_forked(
        3,
        """
        import farandole.torch as fl
        import test_state
        import torch

        fl.init()
        rank = fl.rank()
        for case in ("Adam", "LBFGS"):
            parameters, optimizer = test_state.make(case, rank)
            test_state.train(case, parameters, optimizer, rank, rank)
            fl.broadcast_parameters(parameters, 2)
            fl.broadcast_optimizer_state(optimizer, 2)
            test_state.train(case, parameters, optimizer, 0, 2)
            everybody = fl.allgather_object([optimizer.state_dict(), parameters])
            assert all(test_state.same(everybody[0], other) for other in everybody)
        rows = fl.allgather(torch.full((rank, 2), rank))
        assert rows.tolist() == [[1, 1], [2, 2], [2, 2]]
        names = ["a", "b"] if rank else ["b", "a"]
        handles = [fl.allgather_async(torch.ones(1 << 20), name=name) for name in names]
        total = fl.allreduce(torch.ones(1), op=fl.Sum)
        assert all(fl.synchronize(handle).sum() == 3 << 20 for handle in handles)
        for call in (fl.broadcast_object, fl.allgather_object):
            try:
                call((i for i in range(3)) if rank == 0 else None)
            except fl.HorovodInternalError as error:
                tell(str(error).split(": ", 1)[1])
        try:
            fl.allgather(torch.ones(2, 2 + (rank == 1)), name="rows")
        except fl.MismatchError as error:
            tell(error)
        """,
    )
    assert told[0] == told[1] == told[2]
    first, second, third = told[0].splitlines()
    assert first.startswith("rank 0 failed: TypeError: cannot pickle 'generator' object")
    assert second == first
    assert third.startswith(
        'allgather "rows": ranks 0, 2 sent float32 [0,2], rank 1 sent float32 [0,3]; only the '
    )
