"""Compression.int8 between two played hosts: bytes, equal bits, what error feedback keeps, and training."""

import pathlib
import re

import pytest
import torch

import farandole.torch as fl
from hosts import FIRST_ADDRESS, TwoHosts, or_skip, run_python
from jobs import on_several

NETWORKS = {"MPI": {}, "TCP": {"FARANDOLE_NETWORK": "tcp", "FARANDOLE_ADDRESS": f"{FIRST_ADDRESS}:29500"}}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with or_skip(TwoHosts(tmp_path_factory.mktemp("hosts"))) as played:
        yield played


@on_several
def test_within_a_host_nothing_is_rounded(job):
    def body(rank):
        x = torch.randn(100_000, generator=torch.Generator().manual_seed(rank))
        return [
            fl.allreduce(x, name=f"{how}", op=fl.Average, compression=getattr(fl.Compression, how))
            for how in ("none", "int8")
        ]

    for plain, int8 in job.run(body):
        assert torch.equal(plain, int8)


ALLREDUCES = """
import torch
import farandole.torch as fl
from hosts import bytes_over_the_link

fl.init()
INT8 = fl.Compression.int8
x = torch.randn(250_003, generator=torch.Generator().manual_seed(fl.rank()))
exact = fl.allreduce(x, name="exact", op=fl.Average)


def reduced(name, tensor=x):
    result = fl.allreduce(tensor, name=name, op=fl.Average, compression=INT8)
    least, most = (fl.allreduce(result, name="compared", op=op) for op in (fl.Min, fl.Max))
    assert torch.equal(least, most), "ranks have other bits"
    return result


def error(results):
    return (sum(results) / len(results) - exact).abs().max().item()


named = [reduced("x") for _ in range(20)]
nameless = [reduced(None) for _ in range(20)]
assert error(named[:1]) > 1e-3, "nothing was rounded"
assert error(named) < error(named[:1]) / 10, "what is left over is lost"
assert error(nameless) > error(named[:1]) / 4, "calls without a name have residuals"

reduced("x", x[:100_000])  # the name stands for another tensor now
assert torch.equal(reduced("x"), named[0]), "residuals outlive the tensor"
assert torch.equal(reduced("integers", x.int()), fl.allreduce(x.int(), name="plain", op=fl.Average))

big = torch.zeros(4 << 20)
fl.barrier()
before = bytes_over_the_link()
reduced_big = fl.allreduce(big, name="big", compression=INT8)
fl.barrier()
moved = [(now - then) / (16 << 20) for now, then in zip(bytes_over_the_link(), before)]
if fl.rank() == 0:
    print(f"sent {moved[0]:.3f}, received {moved[1]:.3f}")
fl.shutdown()
"""


@pytest.mark.mpi
@pytest.mark.parametrize(("network", "ranks", "is_flat"), [("MPI", 2, False), *(
    pytest.param("TCP", ranks, is_flat, marks=pytest.mark.once) for ranks, is_flat in ((1, False), (2, True)))])
def test_a_quarter_of_the_bytes_and_nothing_lost(hosts, network, ranks, is_flat):
    """Of a host; where planes are flat each of two ranks sends its own."""
    hierarchical = {"FARANDOLE_HIERARCHICAL_ALLREDUCE": "0"} if is_flat else {}
    output = run_python(hosts, ranks, ALLREDUCES, **NETWORKS[network], **hierarchical)
    found = re.search(r"sent ([0-9.]+), received ([0-9.]+)", output)
    assert found is not None, output
    for share in found.groups()[: 1 if is_flat else 2]:
        assert 0.25 < float(share) <= (0.54 if is_flat else 0.27), output


TRAINING = """
import sys
import torch
import farandole.torch as fl

folder = sys.argv[1]


def data(rank):
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(256, 40, generator=generator)
    target = torch.sin(x @ torch.linspace(-1, 1, 40 * 8).reshape(40, 8))
    return x, target


def train(compression, steps, resume=False):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 400), torch.nn.Tanh(), torch.nn.Linear(400, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if resume:
        state = torch.load(f"{folder}/checkpoint.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    optimizer = fl.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)
    x, target = data(fl.rank())
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
    fl.check_replicas(model)
    if fl.rank() == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/checkpoint.pt")
    fl.unwrap(optimizer)
    return fl.metric_average(loss.item(), "loss")


fl.init()
p, q = torch.nn.Parameter(torch.zeros(5000)), torch.nn.Parameter(torch.zeros(1))
sgd = fl.DistributedOptimizer(torch.optim.SGD([p, q], lr=1 / 40), compression=fl.Compression.int8)
grad = torch.randn(5000, generator=torch.Generator().manual_seed(1))
for _ in range(40):  # a rank without a gradient
    sgd.zero_grad()
    ((p * grad).sum() if fl.rank() else q.sum()).backward()
    sgd.step()
    assert (p.grad - grad / 2).abs().max() < 0.05, "a residual grows"
assert (p + grad / 2).abs().max() < 0.002, "what is left over is lost"
fl.unwrap(sgd)
start = train(fl.Compression.int8, 1)
plain = train(fl.Compression.none, 200)
int8 = train(fl.Compression.int8, 100)
fl.shutdown()
fl.init()  # as a job that starts again from the checkpoint, without residuals
int8 = train(fl.Compression.int8, 100, resume=True)
power = train(fl.PowerSGD(2), 200)
assert plain < start / 2, (start, plain)
assert abs(int8 - plain) < 0.01 * plain, (int8, plain)
assert power < start / 2, (start, power)
fl.shutdown()
"""


@pytest.mark.mpi
@pytest.mark.once
def test_training_goes_on_from_a_checkpoint_and_ends_where_float32_does(hosts, tmp_path: pathlib.Path):
    run_python(hosts, 1, TRAINING, tmp_path, **NETWORKS["TCP"])
