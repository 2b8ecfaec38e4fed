"""Gradients that autograd makes in memory of the ranks together, where they are reduced without a copy."""

import gc

import pytest
import torch
from torch import nn

import farandole.torch as fl
from farandole.torch.optimizer import _gradient_memory
from ranks import run_forked, run_threads

pytestmark = pytest.mark.filterwarnings("ignore:optimizer.step.. called without")

LARGE = 100_000  # elements: too many for a reduction of small messages


def ones(count=LARGE):
    """A weight whose gradients are large."""
    return nn.Parameter(torch.ones(count))


def test_without_the_optimizer_gradients_stay_and_new_ones_are_made_elsewhere():
    def body(rank):
        p, q = ones(), ones(LARGE + 1)
        optimizer = fl.DistributedOptimizer(torch.optim.SGD([p, q], lr=1.0), share_gradients=True)
        for _ in range(2):
            optimizer.zero_grad()
            ((p * rank).sum() + (q * rank).sum()).backward()
            optimizer.step()
        fl.unwrap(optimizer)
        return p, q

    leaves = run_threads(2, body)
    gc.collect()
    born = {p.grad.data_ptr() for each in leaves for p in each}
    for p, q in leaves:
        assert p.grad.eq(0.5).all() and q.grad.eq(0.5).all()
        p.grad.zero_()
        for leaf in (p, q):
            leaf.grad = None
    for p, q in leaves:
        (p * 2).sum().backward()
        (q * 2).sum().backward()
        assert p.grad.eq(2).all() and q.grad.eq(2).all()
        assert not {p.grad.data_ptr(), q.grad.data_ptr()} & born


def test_arguments_that_do_not_go_with_it_are_refused():
    def body(rank):
        make = lambda **arguments: fl.DistributedOptimizer(  # noqa: E731
            torch.optim.SGD([ones(4)], lr=1.0), share_gradients=True, **arguments
        )
        with pytest.raises(ValueError, match="share_gradients=True is for gradients"):
            make(op=fl.Adasum)

    run_threads(2, body)


@pytest.mark.parametrize(("compiler", "why"), [("/no/such/compiler", "No such file"), ("false", "That failed")])
def test_without_a_compiler_the_wrap_says_what_is_missing(monkeypatch, tmp_path, compiler, why):
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _gradient_memory.allocator.cache_clear()

    def body(rank):
        with pytest.raises(RuntimeError, match=f"share_gradients=True needs a C.* compiler .*{why}"):
            fl.DistributedOptimizer(torch.optim.SGD([ones(4)], lr=1.0), share_gradients=True)
        p = ones(4)
        optimizer = fl.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), gradient_as_bucket_view=True)
        (p * rank).sum().backward()
        assert p.grad.eq(0.5).all()
        optimizer.step()

    with pytest.warns(UserWarning, match=f"gradient_as_bucket_view=True needs a C.* compiler .*{why}"):
        run_threads(2, body)
    assert [file.name for file in (tmp_path / "farandole").iterdir()] == ["lock"]


def test_no_library_is_loaded_from_a_folder_that_others_may_write_to(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "farandole").mkdir()
    (tmp_path / "farandole").chmod(0o777)
    _gradient_memory.allocator.cache_clear()
    with pytest.raises(RuntimeError, match=f"{tmp_path}/farandole must belong to user .* nobody else may write to it"):
        _gradient_memory.allocator()
    assert not list((tmp_path / "farandole").iterdir())


SCRIPT = """
import os
import torch
import farandole
import farandole.torch as fl

fl.init()
mean_rank = (fl.size() - 1) / 2

def wrap(*parameters, **arguments):
    return fl.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), share_gradients=True, **arguments)

def train(optimizer, *parameters, passes=1, steps=2):
    "Trains; tells how many bytes are reduced without a copy."
    farandole.barrier()
    before = farandole.counters()["in_place_bytes"]
    for step in range(steps):
        optimizer.zero_grad()
        for _ in range(passes):
            sum((p * torch.full_like(p, fl.rank() + step)).sum() for p in parameters).backward()
        optimizer.step()
        for p in parameters:
            assert p.grad.eq(passes * (mean_rank + step)).all()
            assert p.grad.stride() == p.stride()
    farandole.barrier()
    tell(farandole.counters()["in_place_bytes"] - before)

p, q = (torch.nn.Parameter(torch.ones(count)) for count in (500_000, 300_000))
optimizer = wrap(p, q)
train(optimizer, p, q, steps=1)  # in which the gradients are defined
train(optimizer, p, q)

added = torch.nn.Parameter(torch.ones(200_000))
optimizer.add_param_group({"params": [added]})
train(optimizer, p, q, added, steps=3)

for parameter in (p, q, added):
    parameter.data = parameter.data.double()
    parameter.grad = None
train(optimizer, p, q, added, steps=1)
train(optimizer, p, q, added)

image = torch.nn.Parameter(torch.ones(4, 8, 50, 40).to(memory_format=torch.channels_last))
last = wrap(image, backward_passes_per_step=3)
train(last, image, passes=3, steps=1)
train(last, image, passes=3)

cnn = torch.nn.Sequential(  # convolutions have temporaries of their gradients' sizes
    torch.nn.Conv2d(1, 16, 3, stride=2), torch.nn.ReLU(), torch.nn.Conv2d(16, 32, 3, stride=2), torch.nn.ReLU(),
    torch.nn.Flatten(), torch.nn.Linear(32 * 36, 80),
)
several = wrap(*cnn.parameters())
for step in range(3):
    before = farandole.counters()["in_place_bytes"]
    several.zero_grad()
    cnn(torch.ones(4, 1, 28, 28)).sum().backward()
    farandole.barrier()
tell((farandole.counters()["in_place_bytes"] - before) / sum(4 * p.numel() for p in cnn.parameters()))

child = os.fork()
if child == 0:  # has the blocks to itself
    image.grad.zero_()
    other = torch.nn.Parameter(torch.ones_like(image))
    for _ in range(2):
        image.grad = other.grad = None
        (other * torch.full_like(other, 7)).sum().backward()
    os._exit(int(other.grad.ne(7).any()))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert image.grad.eq(3 * (mean_rank + 1)).all()
train(last, image, passes=3)

kept = image.grad
fl.shutdown()
kept.zero_()
image.grad = None
(image * torch.full_like(image, 2)).sum().backward()
assert image.grad.data_ptr() != kept.data_ptr()
"""


@pytest.mark.parametrize("shares", [True, False], ids=["shared", "network"])
def test_processes_of_a_host_reduce_what_autograd_made_without_a_copy_and_over_a_network_they_copy(shares):
    for told in run_forked(3, SCRIPT, FARANDOLE_SHARED_MEMORY=str(int(shares))):
        first, plain, added, changed, double, _, image, cnn, image_later = map(float, told.split())
        if not shares:
            assert not any((first, plain, added, changed, double, image, cnn, image_later))
            continue
        assert plain == 2 * 4 * 800_000
        assert added >= 2 * 4 * 1_000_000  # a group that is new may have to be defined first
        assert double == 2 * 8 * 1_000_000
        assert cnn == 1
        assert image == image_later == 2 * 4 * 64_000
