"""FARANDOLE_HASH_STEPS: ranks compare the gradients of steps, and two runs can be compared."""

import pathlib

import pytest
import torch
from torch import nn

import farandole.torch as fl
from farandole import _core, chain
from ranks import run_threads


@pytest.fixture
def hashed(monkeypatch, tmp_path):
    """Sets how many steps there are from one that is hashed to the next; gives the folder."""

    def choose(every, folder="run"):
        monkeypatch.setenv("FARANDOLE_HASH_STEPS", str(every))
        monkeypatch.setenv("FARANDOLE_HASH_DIR", str(tmp_path / folder))
        return tmp_path / folder

    return choose


def train(steps, size=2, flip=None, names=("model",), closure=False):
    """Trains as many models as there are names; rank 1 flips a bit of a gradient before step ``flip``."""

    def body(rank):
        models = [nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1)) for _ in names]
        for model in models:
            for place, parameter in enumerate(model.parameters()):
                nn.init.constant_(parameter, 0.1 * (place + 1))
        optimizers = [
            fl.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
            for model in models
        ]
        for step in range(steps):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()

                def evaluate(model=model, step=step):
                    loss = model(torch.full((2, 5), 1.0 + step + rank)).square().sum()
                    loss.backward()
                    return loss

                if closure:
                    optimizer.step(evaluate)
                    continue
                evaluate()
                if rank == 1 and step == flip:
                    model[1].weight.grad.view(torch.int32)[0, 2] ^= 1
                optimizer.step()

    return run_threads(size, body)


def steps_of(path):
    return [line["step"] for line in chain.read(path) if "step" in line]


def verify(capsys, *folders):
    code = chain.main_verify([str(folder) for folder in folders])
    return code, capsys.readouterr().out


@pytest.mark.parametrize("closure", [False, True])
def test_each_nth_step_is_written_and_a_run_again_is_the_same(hashed, capsys, closure):
    one, other = hashed(2, "one"), None
    train(5, closure=closure)
    other = hashed(1, "other")
    train(4, size=2, names=("a", "b"))
    assert steps_of(one / "chain.jsonl") == [0, 2, 4]
    assert steps_of(other / "chain.jsonl") == steps_of(other / "chain.1.jsonl") == [0, 1, 2, 3]
    assert verify(capsys, one, other) == (0, "the same: 2 steps, 0 to 2\n")
    header = next(chain.read(one / "chain.jsonl"))
    assert header["settings"] == {"optimizer": "SGD"}
    assert header["tensors"] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_a_flipped_bit_is_named_with_its_step_tensor_and_ranks(hashed, capsys):
    bad, good = hashed(1, "bad"), None
    text = 'step 2: the gradient of "1.weight" was reduced to different values on different ranks; ranks alike: 0 | 1'
    with pytest.raises(fl.MismatchError) as raised:
        train(5, flip=2)
    assert str(raised.value) == f"{text}; 1 of 4 tensors differ" and raised.value.tensor == "1.weight"
    good = hashed(1, "good")
    train(5)
    code, said = verify(capsys, bad, good)
    assert code == 1 and text in said
    hashed(1, "flipped alike")
    train(5, size=1)
    assert verify(capsys, pathlib.Path(good), good.with_name("flipped alike"))[1].startswith("the gradients of step 0")


def test_the_chain_of_a_run_before_is_kept_beside(hashed):
    folder = hashed(1)
    train(2)
    train(3)
    assert steps_of(folder / "chain.jsonl") == [0, 1, 2]
    assert steps_of(folder / "chain.jsonl.before") == [0, 1]


def test_a_digest_changes_with_each_bit_and_each_row():
    data = torch.arange(203, dtype=torch.int32)
    (known,) = _core.digests([data])
    for place in (0, 1, 127, 128, 202):
        seen = {known}
        for bit in range(32):
            changed = data.clone()
            changed[place] ^= torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
            seen.update(_core.digests([changed]))
        assert len(seen) == 1 + 32
    rows = torch.eye(2, 128, dtype=torch.int32)
    assert len(set(_core.digests([rows, rows.flip(0), rows[1:], torch.empty(0)]))) == 4
    with pytest.raises(ValueError, match="array 1 does not lie in host memory, in C order"):
        _core.digests([rows, rows.t()])
