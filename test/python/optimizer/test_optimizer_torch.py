"""The wrapped optimizer under torch's own tools: compilation, GradScaler, profiler."""

import contextlib
import threading
import warnings

import pytest
import torch

import farandole.torch as fl
from farandole.torch.optimizer import _backward_end
from jobs import Job, on_all, on_several
from models import parameter
from ranks import run_forked

pytestmark = pytest.mark.filterwarnings("ignore:optimizer.step.. called without")

STEPS = 3
needs_compiled_autograd = pytest.mark.skipif(
    torch.__version__ < (2, 2), reason="compiled autograd of torch 2.1 refuses hooks after accumulation"
)
one_at_a_time = threading.Lock()  # what is compiled may not run in two threads at once
compiled = []  # nor die in one thread while another one runs: torch's guards go with it


def compiled_autograd():
    """Backward passes are compiled inside, by a private function of torch that has had two names."""
    from torch._dynamo import compiled_autograd as module

    enable = getattr(module, "_enable", None) or module.enable
    return enable(torch.compile(backend="eager"))


def train_compiled(wrap, rank, kind, lock=None):
    """A weight after some steps with one part of the loop compiled; expected: 1 - 3 * mean rank."""
    lock = contextlib.nullcontext() if lock is None else lock
    layer = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    optimizer = wrap(torch.optim.SGD(layer.parameters(), lr=1.0, foreach=False))
    model, step, around = layer, optimizer.step, contextlib.nullcontext
    if kind in ("model", "model and gradients"):
        backend = "eager" if kind == "model" else "aot_eager"
        model = torch.compile(layer, backend=backend)
    elif kind == "step":
        step = torch.compile(optimizer.step, backend="eager")
    else:
        around = compiled_autograd
    compiled.append((layer, optimizer, model, step))
    for _ in range(STEPS):
        optimizer.zero_grad()
        with lock:
            loss = model(torch.full((1, 1), float(rank))).sum()
        with lock if kind == "autograd" else contextlib.nullcontext(), around():
            loss.backward()
        if lock is one_at_a_time and kind == "step":
            optimizer.synchronize()  # the ranks wait for each other here, not in the locked part
        with lock if kind == "step" else contextlib.nullcontext(), optimizer.skip_synchronize():
            step()
    return layer.weight.item()


@on_all
@pytest.mark.parametrize("kind", ["model", "model and gradients", "step"])
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
def test_compiled_models_and_steps_get_the_same_weights(job, kind):
    def body(rank):
        return train_compiled(job.wrap, rank, kind, one_at_a_time)

    assert job.run(body) == [1 - STEPS * job.mean_rank] * job.size


@needs_compiled_autograd
@on_several
@pytest.mark.filterwarnings("ignore:compiled autograd tells no end")
def test_under_compiled_autograd_a_second_backward_with_sum_is_refused(job):
    def body(rank):
        p = parameter(1.0)
        optimizer = job.sgd(p, op=fl.Sum)

        def run():
            with one_at_a_time, compiled_autograd():
                (p * 1).sum().backward()

        run()
        optimizer.step()
        with pytest.raises(RuntimeError, match='"p0" already holds a reduced value'):
            run()

    job.run(body)


@needs_compiled_autograd
@on_several
def test_under_compiled_autograd_step_completes_and_one_warning_says_so(job, monkeypatch):
    def body(rank):
        return train_compiled(job.wrap, rank, "autograd", one_at_a_time)

    monkeypatch.setattr(_backward_end, "_has_warned", False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert job.run(body) == [1 - STEPS * job.mean_rank] * job.size
    texts = [str(w.message) for w in caught if "compiled autograd" in str(w.message)]
    assert len(texts) == 1 and "reduced in step() or synchronize()" in texts[0]


COMPILED = """
    import functools, itertools
    import torch
    import farandole.torch as fl
    from test_optimizer_torch import train_compiled

    torch.set_num_threads(1)
    fl.init()
    kinds = ("model", "step", "autograd") if torch.__version__ >= (2, 2) else ("model", "step", "step")
    for complete, kind in itertools.product(("backward", "step"), kinds):
        wrap = functools.partial(fl.DistributedOptimizer, complete=complete)
        tell(train_compiled(wrap, fl.rank(), kind))
"""


def test_compilation_in_processes_gets_the_same_weights():
    told = run_forked(2, COMPILED, timeout_s=110)
    assert [lines.split() for lines in told] == [[str(1 - STEPS * 0.5)] * 6] * 2


@pytest.mark.parametrize("size", [1, 2])
def test_scalers_are_left_alone_where_there_is_one_rank(size, monkeypatch):
    adapted = []
    monkeypatch.setattr("farandole.torch.optimizer.adapt_scalers", lambda: adapted.append(1))
    Job(size).run(lambda rank: [Job(size).sgd(parameter(1.0)), None][1])
    assert len(adapted) == (size if size > 1 else 0)
