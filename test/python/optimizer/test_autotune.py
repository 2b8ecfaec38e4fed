"""FARANDOLE_AUTOTUNE: sizes of groups are tried while training, and results stay the same bits."""

import itertools
import re

import pytest
import torch
from torch import nn

import farandole.torch as fl
from ranks import run_threads

STEPS = 330  # more than are tried: 15 trials of sizes and 14 of pairs, of 10 steps each


def train(steps=STEPS, size=2, widths=(256, 256, 256, 256, 256), joins_at=None):
    """Gives each rank's weights. With ``joins_at`` rank 1 joins before that step, and both go on after the join."""

    def body(rank):
        generator = torch.Generator().manual_seed(1)
        model = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
        optimizer = fl.DistributedOptimizer(torch.optim.SGD(model.parameters(), 1e-4), model.named_parameters())
        data = torch.randn(steps, 1, widths[0], generator=torch.Generator().manual_seed(rank))
        for step, inputs in enumerate(data):
            if step == joins_at and rank == 1:
                fl.join()
            if joins_at is not None and step == joins_at + 25 and rank == 0:
                fl.join()
            if joins_at is not None and rank == 1 and joins_at <= step < joins_at + 25:
                continue
            optimizer.zero_grad()
            model(inputs).square().sum().backward()
            optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    return run_threads(size, body)


@pytest.fixture
def tuned(monkeypatch, tmp_path):
    """The file that tuning writes."""
    monkeypatch.setenv("FARANDOLE_AUTOTUNE", "1")
    monkeypatch.setenv("FARANDOLE_AUTOTUNE_LOG", str(tmp_path / "tuned.env"))
    return tmp_path / "tuned.env"


def said(capfd):
    return [line for line in capfd.readouterr().err.splitlines() if "autotuning" in line]


def test_the_results_are_the_same_bits_and_what_was_found_is_logged_and_kept(tuned, capfd, monkeypatch):
    weights = train()
    (line,) = said(capfd)
    assert re.search(r"\[farandole 0/2\] warning: autotuning has ended: groups of \d+ [KM]iB.*: \d+\.\d\d ms", line)
    text = tuned.read_text()
    assert re.search(r"^FARANDOLE_GROUP_BYTES=\d+$", text, re.M)
    assert len(re.findall(r"^# \d+:( \d+\.\d\d ms){3,10}$", text, re.M)) == 5
    monkeypatch.setenv("FARANDOLE_AUTOTUNE", "0")
    plain = train()
    assert torch.isfinite(plain[0]).all() and torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], plain[0])
    assert said(capfd) == []


def test_a_join_in_the_middle_of_it_keeps_ranks_together(tuned, capfd):
    weights = train(STEPS + 60, joins_at=34)
    assert torch.isfinite(weights[0]).all() and torch.isfinite(weights[1]).all()
    assert len(said(capfd)) == 1 and tuned.exists()


def test_a_rank_by_itself_and_a_program_that_ends_before_say_nothing(tuned, capfd):
    train(40, size=1, widths=(2, 2))
    train(40, widths=(2, 2))
    assert said(capfd) == [] and not tuned.exists()


def test_a_file_that_cannot_be_written_is_an_error_in_the_log_and_training_goes_on(tuned, monkeypatch, capfd):
    monkeypatch.setenv("FARANDOLE_AUTOTUNE_LOG", str(tuned / "below" / "it"))
    train(widths=(2, 2))
    assert re.search(r'error: FARANDOLE_AUTOTUNE_LOG=".*it" cannot be written: No such file', capfd.readouterr().err)
