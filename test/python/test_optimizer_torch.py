"""The wrapped optimizer under torch's own tools: compilation, GradScaler, profiler."""

import contextlib
import threading
import warnings

import pytest
import torch

from farandole.torch._exchange import Exchange
from jobs import Job, on_all, on_all_at_backward, on_several
from models import OPTIMIZERS, Branched, batch, loss_of, parameter, train_alone

pytestmark = pytest.mark.filterwarnings("ignore:optimizer.step.. called without")
STEPS = 4

needs_compile = pytest.mark.skipif(
    not hasattr(torch, "compile"), reason="this torch has no torch.compile"
)
one_at_a_time = threading.Lock()


@needs_compile
@on_all
def test_a_compiled_model_gets_the_same_weights(job):
    expected = train_alone(Branched(), OPTIMIZERS["SGD"], job.size, STEPS)[1]

    def body(rank):
        model = Branched()
        sgd = OPTIMIZERS["SGD"](list(model.parameters()))
        optimizer = job.wrap(sgd, model.named_parameters())
        compiled = torch.compile(model, backend="aot_eager")
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(compiled, batch(rank, step)).backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    for weights in job.run(body):
        for got, want in zip(weights, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


@needs_compile
@on_all
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
def test_a_compiled_step_gets_the_same_weights(job):
    def body(rank):
        p = parameter(1.0)
        optimizer = job.sgd(p)
        step = torch.compile(optimizer.step, backend="eager")
        for _ in range(STEPS):
            optimizer.zero_grad()
            (p * rank).sum().backward()
            step()
        return p.item()

    assert job.run(body) == [1 - STEPS * job.mean_rank] * job.size


@needs_compile
@on_several
def test_under_compiled_autograd_step_completes_and_one_warning_says_so(job, monkeypatch):
    from torch._dynamo import compiled_autograd

    @contextlib.contextmanager
    def compiled():
        with one_at_a_time:  # it is not made for threads
            with compiled_autograd._enable(torch.compile(backend="eager")):
                yield

    def body(rank):
        p = parameter(1.0)
        optimizer = job.sgd(p)
        for _ in range(2):
            optimizer.zero_grad()
            loss = (p * rank).sum()
            with compiled():
                loss.backward()
            optimizer.step()
        return p.item()

    monkeypatch.delattr(Exchange, "_has_warned", raising=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert job.run(body) == [1 - 2 * job.mean_rank] * job.size
    texts = [str(w.message) for w in caught if "compiled autograd" in str(w.message)]
    assert len(texts) == 1 and "reduced in step() or synchronize()" in texts[0]


@on_all
def test_the_profiler_acts(job):
    def body(rank):
        p = parameter(1.0)
        optimizer = job.sgd(p)
        for _ in range(3):
            optimizer.zero_grad()
            (p * rank).sum().backward()
            optimizer.step()
        return p.item()

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert job.run(body) == [1 - 3 * job.mean_rank] * job.size


needs_scaler = pytest.mark.skipif(
    not hasattr(getattr(torch, "amp", None), "GradScaler"),
    reason="this torch has a GradScaler for CUDA only",
)


@needs_scaler
@on_all_at_backward
@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler_needs_no_ritual_and_all_ranks_skip_the_same_steps(job, fused):
    def body(rank):
        p = parameter(1.0)
        sgd = torch.optim.SGD([p], lr=1.0, fused=fused)
        optimizer = job.wrap(sgd, [("p", p)])
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
        seen = []
        for step in range(4):
            optimizer.zero_grad()
            value = float("inf") if (rank, step) == (0, 1) else float(rank)
            scaler.scale((p * value).sum()).backward()
            if not fused:
                scaler.unscale_(optimizer)
                seen.append(p.grad.item())
            scaler.step(optimizer)
            scaler.update()
        if not fused:
            assert seen == [job.mean_rank, float("inf"), job.mean_rank, job.mean_rank]
        return p.item(), scaler.get_scale()

    assert job.run(body) == [(1 - 3 * job.mean_rank, 2.0)] * job.size


@needs_scaler
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_with_complete_step_synchronize_comes_before_unscale(size):
    job = Job(size, "step")

    def body(rank):
        p = parameter(1.0)
        optimizer = job.sgd(p)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale((p * rank).sum()).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
        return p.item()

    assert job.run(body) == [1 - 3 * job.mean_rank] * size
