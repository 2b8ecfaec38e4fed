"""farandole.torch.Job: the same bits for any number of ranks, after any loss and from any checkpoint."""

import functools
import json
import pathlib
import shutil
import time
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import farandole
import farandole.torch as fl
import job_training
import warm_ranks
from farandole import chain
from farandole.exceptions import JobHaltedError, PeerLostError
from farandole.torch.job import _message, _slots
from farandole.torch.job._checkpoints import Checkpoints
from ranks import communicate, environment, run_threads, start_forked

SCRIPT = pathlib.Path(job_training.__file__)


def train(size, name, folder, *words, codes=None, **variables):
    """What each rank of a job said in its last line."""
    ranks = start_forked(size, [SCRIPT, name, folder, *words], **variables)
    return [last_line(output) for output in communicate(ranks, codes)]


def last_line(output):
    return output.strip().splitlines()[-1] if output.strip() else ""


@functools.cache
def undisturbed(name):
    """What one rank says that nothing happens to."""
    (line,) = train(1, name, "")
    return line


def verify(capsys, *folders):
    code = chain.main_verify([str(folder) for folder in folders])
    return code, capsys.readouterr().out


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", job_training.MODELS)
def test_weights_have_the_same_bits_on_any_number_of_ranks(name, size):
    assert train(size, name, "") == [undisturbed(name)] * size


def test_it_goes_on_from_the_newest_undamaged_checkpoint_on_another_number_of_ranks(tmp_path, capsys):
    once, again = tmp_path / "once", tmp_path / "again"
    train(1, "conv", once)
    train(2, "conv", again, "epochs=1")  # 6 steps
    files = sorted(again.glob("*.pt"))
    assert [file.name[:17] for file in files] == ["step-000000000004", "step-000000000006"]
    content = bytearray(files[1].read_bytes())
    content[len(content) // 2] ^= 4
    files[1].write_bytes(content)
    (again / ".step-000000000005-0.pt.1.writing").write_bytes(b"half")
    assert train(1, "conv", again, "workers=2") == [undisturbed("conv")]
    assert not list(again.glob(".*"))
    code, said = verify(capsys, once, again)
    assert (code, said) == (0, "the same: 12 steps, 0 to 11\n")
    steps = [line.get("step") for line in chain.read(again / chain.FILE_NAME) if "step" in line]
    assert steps == [*range(6), *range(4, 12)]


def test_sigterm_on_a_rank_stops_all_after_the_same_step(tmp_path):
    said = train(2, "mlp", tmp_path, "term1=3")
    assert all(line.startswith("steps 4 stopped True") for line in said) and len(set(said)) == 1
    assert train(1, "mlp", tmp_path) == [undisturbed("mlp")]


def test_sigterm_on_a_rank_of_an_elastic_job_makes_it_leave_after_its_step(tmp_path):
    said = train(3, "conv", tmp_path, "term1=3", codes=[0, 143, 0], FARANDOLE_ELASTIC="1")
    assert [said[0], said[2]] == [undisturbed("conv")] * 2


def test_the_last_rank_that_leaves_writes_a_checkpoint_and_does_not_end_like_a_complete_training(tmp_path):
    words = ["term1=4", "notice0=4"]  # rank 0 learns of it when it has told the others that it stays
    assert train(2, "conv", tmp_path, *words, codes=[143, 143], FARANDOLE_ELASTIC="1") == ["", ""]
    assert train(1, "conv", tmp_path) == [undisturbed("conv")]
    steps = [line["next_step"] for line in chain.read(tmp_path / chain.FILE_NAME) if "next_step" in line]
    assert steps == [0, 5, 6]


def test_after_deaths_the_rest_goes_on_with_the_same_bits(tmp_path, capsys):
    said = train(3, "conv", tmp_path / "a", "die0=3", "die2=8", codes=[9, 0, 9], FARANDOLE_ELASTIC="1")
    assert said[1] == undisturbed("conv")
    train(1, "conv", tmp_path / "b")
    assert verify(capsys, tmp_path / "a", tmp_path / "b") == (0, "the same: 12 steps, 0 to 11\n")


def start_two(folder, *words, newcomer):
    """A job of one rank, and another process that it lets in after a step."""
    folder.mkdir()
    (old,) = start_forked(1, [SCRIPT, "varying", folder, "wait0=2", *words], FARANDOLE_ELASTIC="1")
    file = folder / "members"
    while not file.exists() or not file.read_text():
        time.sleep(0.05)
    words = [SCRIPT, newcomer, folder, *words]
    return old, warm_ranks.start(words, environment(FARANDOLE_ELASTIC="1", FARANDOLE_MEMBERS=file.read_text()))


def test_a_newcomer_takes_the_state_and_goes_on_alone(tmp_path):
    ranks = start_two(tmp_path / "run", "die0=6", newcomer="varying")
    assert last_line(communicate(ranks, [9, 0])[1]) == undisturbed("varying")


def test_a_newcomer_with_other_arguments_is_refused_alone(tmp_path):
    ranks = start_two(tmp_path / "run", newcomer="mlp")
    goes_on, refused = map(last_line, communicate(ranks, [0, 1]))
    assert goes_on == undisturbed("varying")
    assert "MismatchError: Job: accumulate is 1 on rank 0 and 2 on rank 1; it is part of the result" in refused


def test_a_flipped_bit_is_named_with_its_step_and_tensor(tmp_path, capsys):
    said = train(2, "mlp", tmp_path / "a", "flip1=2", codes=[1, 1])
    expected = 'step 2: the gradient of "3.weight" was reduced to different values on different ranks; ranks alike:'
    expected += " 0 | 1"
    assert all(expected in line for line in said)
    train(1, "mlp", tmp_path / "b", "flip0=2")
    train(1, "mlp", tmp_path / "c")
    assert verify(capsys, tmp_path / "b", tmp_path / "c") == (
        1, 'the gradients of step 2 differ: first tensor "3.weight"\n'
    )  # fmt: skip
    code, text = verify(capsys, tmp_path / "a", tmp_path / "c")
    assert code == 1 and expected in text


@pytest.mark.parametrize(("target", "said"), [("/dev/full", "No space left"), ("/dev/null/no", "Not a directory")])
def test_a_chain_that_cannot_be_written_is_one_warning(tmp_path, target, said):
    (tmp_path / "link.jsonl").symlink_to(target)
    of_a_full_disk = chain.Chain(tmp_path / "link.jsonl", {"chain": 1})
    with pytest.warns(RuntimeWarning, match=f"the chain of hashes .* is not written any more: .*{said}") as warned:
        of_a_full_disk.start(True, 0, {})
        of_a_full_disk.append(0, lambda: {"step": 0})
        of_a_full_disk.start(True, 1, {})
    assert len(warned) == 1
    of_a_full_disk.close()


def test_checkpoints_that_are_not_written_for_one_reason_are_one_warning(tmp_path):
    folder = tmp_path / "folder"
    files = Checkpoints(folder, 1)
    with pytest.warns(RuntimeWarning, match="checkpoint of step .* was not written: .*File exists") as warned:
        for is_broken in (True, True, False, True, True):
            shutil.rmtree(folder, ignore_errors=True)
            folder.unlink(missing_ok=True)
            (folder.touch if is_broken else folder.mkdir)()
            files.write(len(warned), {}, lambda: None)
            files.wait()
    assert len(warned) == 2


def test_ranks_that_made_other_models_all_get_the_first_tensor_that_differs():
    program = (
        "import torch, farandole as fl, farandole.torch as ft\nfl.init(slots=2)\n"
        "model = torch.nn.Linear(2, 3 + fl.rank())\n"
        "job = ft.Job(model, torch.optim.SGD(model.parameters(), 1), [0] * 2, slots=2, batch_size=1)\n"
        "job.step(print)\n"
        "try: next(job.epochs(1))\nexcept fl.exceptions.MismatchError as error: print(error)\n"
    )
    said = "Job: weight is 'torch.float32 [3, 2]' on rank 0 and 'torch.float32 [4, 2]' on rank 1; it is part of"
    outputs = communicate(start_forked(2, ["-c", program]))
    assert [last_line(output)[: len(said)] for output in outputs] == [said] * 2


def test_chains_of_other_jobs_and_torn_lines(tmp_path, capsys):
    header = chain.settings_line({"seed": 1}, ["w"])
    lines = [header, {"step": 0, "gradients": "1", "tensors": "0001"}, {"step": 1, "gradients": "2", "tensors": "0002"}]
    for name, change in {"a": {}, "b": {"settings": {"seed": 2}}}.items():
        text = "".join(json.dumps({**line, **(change if line is header else {})}) + "\n" for line in lines)
        (tmp_path / f"{name}.jsonl").write_text(text + '{"step": 2, "gra')
    assert verify(capsys, tmp_path / "a.jsonl", tmp_path / "a.jsonl") == (0, "the same: 2 steps, 0 to 1\n")
    assert "seed: 1 and 2" in verify(capsys, tmp_path / "a.jsonl", tmp_path / "b.jsonl")[1]
    assert verify(capsys, tmp_path / "a.jsonl", tmp_path)[0] == 2


def test_a_newcomer_has_imported_what_steps_need_before_it_joins(monkeypatch):
    done = []
    monkeypatch.setattr("farandole.basics.find", lambda: None)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda *_, **__: done.append("torch's settings"))
    monkeypatch.setattr("farandole.init", lambda **_: done.append("init") or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        job_training.make("mlp", None)
    assert {*done[:-1]} == {"torch's settings"} and done[-1] == "init"


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


def job_of(model=None, dataset=None, optimizer=torch.optim.SGD, **arguments):
    model = nn.Linear(3, 2) if model is None else model
    dataset = TensorDataset(torch.zeros(64, 3)) if dataset is None else dataset
    return fl.Job(model, optimizer(model.parameters(), 0.1), dataset, **{"slots": 8, "batch_size": 2, **arguments})


class Extra(nn.Linear):
    def get_extra_state(self):
        return 1

    def set_extra_state(self, state):
        pass


REFUSED = {
    "IterableDataset": ({"dataset": Stream()}, "type Stream: which sample comes next depends on what was read before"),
    "DataLoader": ({"dataset": DataLoader(TensorDataset(torch.zeros(9)))}, "type DataLoader: which sample"),
    "few samples": ({"dataset": TensorDataset(torch.zeros(15, 3))}, "has 15 samples; a step needs 16"),
    "bfloat16": ({"model": nn.Linear(3, 2).bfloat16()}, 'parameter "weight" is torch.bfloat16'),
    "SyncBatchNorm": ({"model": nn.SyncBatchNorm(3)}, "SyncBatchNorm"),
    "LBFGS": ({"optimizer": torch.optim.LBFGS}, "LBFGS"),
    "extra state": ({"model": Extra(3, 2)}, "_extra_state"),
    "plateau": (
        {"schedulers": torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([torch.zeros(1)]))},
        "ReduceLROnPlateau",
    ),
    "slots": ({"slots": 0}, "slots=0"),
}


@pytest.mark.parametrize(("arguments", "text"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_repeated_is_refused_by_name(arguments, text):
    def body(_rank):
        with pytest.raises((TypeError, ValueError), match=text):
            job_of(**arguments)

    run_threads(1, body)


@pytest.mark.parametrize(
    ("function", "error", "text"),
    [
        (lambda model, x: None, ValueError, "no parameter got a gradient"),
        (lambda model, x: model(x).square().sum().backward(create_graph=True), RuntimeError, "create_graph=True"),
        (lambda model, x: [model(x).sum().backward()], TypeError, "returned a list"),
        (lambda model, x: torch.histc(x).put_(torch.zeros(2).long(), x[0, :2]), RuntimeError, "deterministic"),
        (lambda model, x: {"x": model.table.add_(1)[0]}, ValueError, 'buffer "table" with 70000 elements'),
    ],
)
def test_a_step_that_cannot_be_repeated_is_an_error(function, error, text):
    def body(_rank):
        model = nn.Linear(3, 2)
        model.register_buffer("table", torch.zeros(70_000))
        job = job_of(model)
        job.step(lambda batch: function(model, batch[0]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's of create_graph
            with pytest.raises(error, match=text):
                list(job.epochs(1))

    run_threads(1, body)


def test_a_rank_that_the_others_went_on_without_says_that(monkeypatch):
    def halt():
        raise JobHaltedError("gone on")

    monkeypatch.setattr(farandole, "change_is_due", lambda: True)
    monkeypatch.setattr(farandole, "reinit", halt)

    def body(_rank):
        model = nn.Linear(3, 2)
        job = job_of(model)
        job.step(lambda batch: model(batch[0]).sum().backward())
        with pytest.raises(JobHaltedError) as caught:
            list(job.epochs(1))
        assert caught.value.__context__ is None

    run_threads(1, body)


def test_a_rank_that_leaves_while_another_is_lost_leaves(monkeypatch):
    def lose():
        raise PeerLostError("rank 1 was killed")

    monkeypatch.setattr(farandole, "shutdown", lose)
    monkeypatch.setattr(farandole, "members", lambda: "here:1")

    def body(_rank):
        model = nn.Linear(3, 2)
        job = job_of(model)
        job.step(lambda batch: model(batch[0]).sum().backward())
        job.leave()
        with pytest.raises(SystemExit, match="143"):
            list(job.epochs(1))

    run_threads(1, body)


def test_the_program_keeps_its_generators_and_settings():
    def body(_rank):
        model, seen = nn.Linear(3, 2), []
        job = job_of(model, threads=2, clip_norm=1.0)

        @job.step
        def train(batch):
            seen.append((torch.get_num_threads(), float(torch.rand(1))))
            model(batch[0] + 1).sum().backward()
            assert model.weight.grad is None  # a change of it would not be the same on every number of ranks

        torch.manual_seed(5)
        before, threads = torch.get_rng_state(), torch.get_num_threads()
        assert [epoch.number for epoch in job.epochs(1)] == [0]
        assert torch.equal(before, torch.get_rng_state()) and torch.get_num_threads() == threads
        assert {count for count, _ in seen} == {2} and len({number for _, number in seen}) == len(seen) == 32
        assert job.is_final(job.steps - 2) and not job.is_final(job.steps)

    run_threads(1, body)


def test_sums_in_the_tree_and_messages():
    rows = torch.tensor([[2.0**60], [1.0], [1.0], [-(2.0**60)], [1.0], [1.0]], dtype=torch.float64)
    assert _slots.sum_over_slots(rows).item() == ((2.0**60 + 1) + (1 - 2.0**60)) + 2
    notes = _message.Notes(0, 1, 0, 0, -1, 77, -5)
    sums = torch.tensor([0.5], dtype=torch.float64)
    first = _message.encode(notes._replace(durable=12), [1, 0], [-(2**62) - 1], sums)
    second = _message.encode(notes._replace(stops=0), [1, 0], [0], sums)
    decoded, present, integers, total = _message.decode(first + second, 2, 2, 1)
    assert decoded == _message.Notes(0, 1, 0, 0, 12, 1, 1)
    assert (present, integers, total.tolist()) == ([2, 0], [-(2**62) - 1], [1.0])
    other = _message.encode(notes._replace(digest=-5 ^ 1 << 63), [1, 0], [0], sums)
    assert not _message.decode(first + other, 2, 2, 1)[0].digest
