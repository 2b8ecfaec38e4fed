"""FARANDOLE_NAN_CHECK: a nan or an infinity is named where it is, before a sum hides where it came from."""

import numpy as np
import pytest
import torch

import farandole as fd
import farandole.torch as fl
from models import parameter
from ranks import run_threads


@pytest.fixture
def raises(monkeypatch):
    monkeypatch.setenv("FARANDOLE_NAN_CHECK", "raise")


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("call", ["allreduce", "reducescatter"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_the_operation_is_refused_by_name_on_every_rank_and_others_go_on(raises, call, dtype, value):
    def body(rank):
        data = np.ones(1000, dtype)
        if rank == 1:
            data[17] = float(value)
        with pytest.raises(fd.AbortedError) as raised:
            getattr(fd, call)(data, name="x", op=fd.Sum)
        assert fd.allreduce(np.ones(3, dtype), name="x", op=fd.Sum).tolist() == [3, 3, 3]
        return str(raised.value), raised.value.failed_ranks

    expected = f'{call} "x": rank 1 failed: tensor "x" ({call}, element 17 of 1000) is {value}'
    assert run_threads(3, body) == [(expected, (1,))] * 3


def test_a_group_names_its_tensor_and_bfloat16_is_checked(raises):
    def body(rank):
        tensors = [torch.ones(4, dtype=torch.bfloat16), torch.ones(2, 3)]
        tensors[1 - rank].view(-1)[3] = float("nan")
        with pytest.raises(fd.AbortedError) as raised:
            fl.grouped_allreduce(tensors, name="both")
        return str(raised.value)

    said = run_threads(2, body)
    assert said[0] == said[1]
    assert 'rank 0 failed: tensor "1" of "both" (allreduce, element 3 of 6) is nan' in said[0]
    assert 'rank 1 failed: tensor "0" of "both" (allreduce, element 3 of 4) is nan' in said[0]


def test_what_is_moved_or_absent_or_no_float_is_not_checked(raises):
    def body(rank):
        bad = np.full(4, np.nan, np.float32)
        assert np.isnan(fd.allgather(bad, name="g")).all()
        assert np.isnan(fd.broadcast(bad, 0, name="b")).all()
        assert fd.allreduce(np.full(2, -1, np.int32), op=fd.Sum, name="i").tolist() == [-2, -2]

    run_threads(2, body)


def two_steps(rank, bad_step, bad_rank=1):
    p, q = parameter(1.0), parameter(2.0)
    model = torch.nn.ParameterDict({"weight": p, "bias": q})
    optimizer = fl.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    for step in (1, 2, 3):
        optimizer.zero_grad()
        (p * (float("nan") if (rank, step) == (bad_rank, bad_step) else 1.0) + q).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("bad_step", [1, 3])
def test_a_gradient_is_named_with_its_step(raises, bad_step):
    def body(rank):
        with pytest.raises(fd.HorovodInternalError) as raised:
            two_steps(rank, bad_step)
        return str(raised.value)

    for said in run_threads(2, body):
        assert f'rank 1 failed: gradient "weight" of step {bad_step} (allreduce, element 0 of 1) is nan' in said


def test_warnings_name_a_tensor_at_its_first_second_and_fourth_time(monkeypatch, capfd):
    monkeypatch.setenv("FARANDOLE_NAN_CHECK", "warn")

    def body(rank):
        for _ in range(7):
            data = np.ones(8, np.float32)
            if rank == 1:
                data[5] = np.inf
            assert np.isinf(fd.allreduce(data, name="x")[5])

    run_threads(2, body)
    lines = [line for line in capfd.readouterr().err.splitlines() if "is inf" in line]
    text = '[farandole 1/2] warning: rank 1: tensor "x" (allreduce, element 5 of 8) is inf'
    assert lines == [text, text + "; so far 2 times", text + "; so far 4 times"]


def test_without_the_setting_nan_is_reduced(capfd):
    def body(rank):
        assert np.isnan(fd.allreduce(np.full(2, np.nan if rank else 1.0), name="x")).all()
        two_steps(rank, 2)

    run_threads(2, body)
    assert capfd.readouterr().err == ""
