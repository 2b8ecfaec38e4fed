"""The examples: their data, evaluation, checkpoints and schedule, and whole jobs."""

import argparse
import gzip
import hashlib
import struct
import subprocess
import sys

import pytest
import torch

import farandole.torch as fl
from ranks import GUARD_S, REPOSITORY, free_port, mpirun, run_threads

for package in ("tqdm", "matplotlib"):
    pytest.importorskip(package, reason=f"the examples need {package}")
sys.path.insert(0, str(REPOSITORY / "examples"))

import checkpoint  # noqa: E402
import evaluation  # noqa: E402
import fashion_data  # noqa: E402
import fashion_mnist  # noqa: E402
import reporting  # noqa: E402
import zero  # noqa: E402

EXAMPLE = REPOSITORY / "examples" / "fashion_mnist.py"


def flip_one_bit(model):
    bits = list(model.parameters())[-1].data.view(torch.int32)
    bits[17] ^= 1


@pytest.mark.parametrize("flipped_on", [None, 0, 1, 2])
def test_one_flipped_bit_on_one_rank_makes_the_replicas_differ(flipped_on):
    def body(rank):
        model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 40))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.25)
        if rank == flipped_on:
            flip_one_bit(model)
        return fashion_mnist.compare_replicas(model)

    verdicts, digests = zip(*run_threads(3, body), strict=True)
    assert set(verdicts) == {"identical" if flipped_on is None else "DIFFER"}
    assert digests[0] == digests[1] == digests[2]
    assert len(set(digests[0])) == (1 if flipped_on is None else 2)


def write_idx(path, shape, values):
    content = struct.pack(">HBB", 0, 8, len(shape)) + struct.pack(f">{len(shape)}I", *shape)
    path.write_bytes(gzip.compress(content + bytes(values)))


def test_idx_files_are_read_and_damaged_ones_refused(tmp_path):
    path = tmp_path / "x.gz"
    write_idx(path, (2, 3), range(6))
    assert fashion_data.read_idx(path).tolist() == [[0, 1, 2], [3, 4, 5]]
    write_idx(path, (2, 3), range(5))
    with pytest.raises(ValueError, match="but has 5 bytes"):
        fashion_data.read_idx(path)
    path.write_bytes(gzip.compress(b"\0\0\x0d\1\0\0\0\1\0"))
    with pytest.raises(ValueError, match="not an idx file"):
        fashion_data.read_idx(path)


@pytest.fixture(scope="module")
def small_data(tmp_path_factory):
    """Six hundred easy images: the class is the position of a bright square."""
    folder = tmp_path_factory.mktemp("data")
    generator = torch.Generator().manual_seed(3)
    for part, count in (("train", 500), ("t10k", 101)):
        labels = torch.randint(0, 10, (count,), generator=generator)
        images = torch.randint(0, 60, (count, 28, 28), generator=generator)
        for image, label in zip(images, labels.tolist(), strict=True):
            image[2 * label : 2 * label + 6, 2 * label : 2 * label + 6] = 255
        write_idx(folder / f"{part}-images-idx3-ubyte.gz", images.shape, images.flatten().tolist())
        write_idx(folder / f"{part}-labels-idx1-ubyte.gz", labels.shape, labels.tolist())
    return folder


def test_the_figures_are_those_of_a_single_process_to_the_last_bit(small_data, monkeypatch):
    monkeypatch.setattr(evaluation, "BATCH_SIZE", 16)
    data = fashion_data.load(small_data, "t10k")
    torch.manual_seed(5)
    model = fashion_data.make_model().eval()
    loss, recognised = 0.0, 0
    with torch.no_grad():
        for images, labels in zip(data[0].split(16), data[1].split(16), strict=True):
            scores = fashion_data.forward(model, images)
            labels = labels.long()
            each = torch.nn.functional.cross_entropy(scores, labels, reduction="none")
            loss += each.double().sum().item()
            recognised += int((scores.argmax(1) == labels).sum())
    for size in (1, 2, 3, 4):
        figures = run_threads(size, lambda rank: evaluation.evaluate(model, data))
        assert figures == [(loss / 101, recognised / 101)] * size


def test_the_rate_rises_evenly_and_then_stays():
    rates = [fashion_mnist.warmed_up(step, 4, 3.0) for step in range(7)]
    assert rates == [1.0, 1.5, 2.0, 2.5, 3.0, 3.0, 3.0]
    assert fashion_mnist.warmed_up(0, 0, 3.0) == 3.0


def test_every_rank_sees_other_images_and_an_epoch_can_be_entered_anywhere():
    arguments = argparse.Namespace(seed=1, batch_size=3, accumulate=2)

    def body(rank):
        schedule = fashion_mnist.Schedule(arguments, 40)
        whole = [torch.cat(step).tolist() for step in schedule.epoch(1, 0)]
        assert len(whole) == schedule.steps == 3
        assert [torch.cat(step).tolist() for step in schedule.epoch(1, 2)] == whole[2:]
        assert [torch.cat(step).tolist() for step in schedule.epoch(2, 0)] != whole
        with pytest.raises(ValueError, match="8 images are not enough for one step: 2 ranks"):
            fashion_mnist.Schedule(arguments, 8)
        return {image for step in whole for image in step}

    first, second = run_threads(2, body)
    assert len(first) == len(second) == 18 and not first & second


def test_accumulated_batches_give_the_step_of_one_large_batch(small_data):
    data = fashion_data.load(small_data, "train")

    def body(rank):
        stepped = []
        for parts in (1, 4):
            generator = torch.Generator().manual_seed(7)
            model = fashion_data.make_model().eval()  # no dropout
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
            optimizer = fl.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), backward_passes_per_step=parts
            )
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
            training = checkpoint.Training(model, optimizer, scheduler, {})
            mine = torch.arange(rank, 80, 2).chunk(parts)
            loss = fashion_mnist.take_step(training, data, list(mine))
            stepped.append([loss, *(p.detach() for p in model.parameters())])
        for whole, parted in zip(*stepped, strict=True):
            torch.testing.assert_close(parted, whole, rtol=1e-4, atol=1e-6)

    run_threads(2, body)


def make_training(rank, **settings):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return checkpoint.Training(model, optimizer, scheduler, {"seed": 1, **settings})


def test_a_checkpoint_that_cannot_be_finished_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "folder" / "x.pt"
    run_threads(2, lambda rank: checkpoint.save(make_training(rank), path))
    before = path.read_bytes()

    def break_off(content, file):
        file.write(b"half of it")
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", break_off)

    def body(rank):
        if rank == 1:
            return checkpoint.save(make_training(rank), path)
        with pytest.raises(OSError, match="no space left"):
            checkpoint.save(make_training(rank), path)

    run_threads(2, body)
    assert path.read_bytes() == before


def test_a_checkpoint_of_a_job_with_other_settings_is_refused_on_all_ranks(tmp_path):
    path = tmp_path / "x.pt"
    run_threads(2, lambda rank: checkpoint.save(make_training(rank, ranks=2, lr=0.1), path))

    def body(rank):
        with pytest.raises(ValueError) as raised:
            checkpoint.resume(make_training(rank, ranks=2, lr=0.5), path)
        return str(raised.value)

    texts = run_threads(2, body)
    assert texts == [f"{path} was written with lr = 0.1; this job has lr = 0.5"] * 2


def test_a_checkpoint_that_is_not_there_ends_all_ranks(tmp_path):
    def body(rank):
        expected = FileNotFoundError if rank == 0 else fl.HorovodInternalError
        with pytest.raises(expected):
            checkpoint.resume(make_training(rank), tmp_path / "x.pt")

    run_threads(2, body)


def test_scalars_need_no_tensorboard(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)

    def body(rank):
        for folder in (None, tmp_path):
            scalars = reporting.Scalars(folder, 0)
            scalars.add("loss", torch.ones(3), 0)
            scalars.close()

    run_threads(2, body)
    assert capsys.readouterr().err.count("pip install tensorboard") == 1


def test_scalars_are_written_where_tensorboard_is(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def body(rank):
        scalars = reporting.Scalars(tmp_path, 0)
        scalars.add("loss", torch.tensor([3.0, 2.0]), 7)
        scalars.close()

    run_threads(2, body)
    log = EventAccumulator(str(tmp_path))
    log.Reload()
    assert [(event.step, event.value) for event in log.Scalars("loss")] == [(7, 3.0), (8, 2.0)]


@pytest.mark.once
def test_a_training_by_a_job_is_drawn(small_data, tmp_path):
    script = [sys.executable, str(EXAMPLE.with_name("uninterrupted.py"))]
    words = ["--model", "transformer", "--data", small_data, "--images", "256", "--epochs", "2", "--folder", tmp_path]
    subprocess.run([*script, *words], check=True)
    subprocess.run([*script, "--draw", tmp_path, tmp_path, "--picture", tmp_path / "picture.svg"], check=True)
    assert "one process that nobody disturbed" in (tmp_path / "picture.svg").read_text()


def run_example(small_data, folder, *more, **variables):
    """The job's output; its checkpoint is folder/x.pt, its loss curve folder/curve.png."""
    arguments = ["--epochs", "6", "--batch-size", "12", "--accumulate", "2"]
    arguments += ["--data-dir", str(small_data), "--compression", "fp16", "--checkpoint-every", "3"]
    arguments += ["--checkpoint", str(folder / "x.pt"), "--tensorboard", str(folder)]
    arguments += ["--loss-curve", str(folder / "curve.png")]
    done = mpirun(2, [str(EXAMPLE), *arguments, *more], timeout_s=GUARD_S, **variables)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def uninterrupted(small_data, tmp_path_factory):
    """A job's output and its checkpoint."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    output = run_example(small_data, folder)
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    return output, checkpoint.load(folder / "x.pt")


def digests(output):
    return [line.split()[-1] for line in output.splitlines() if "sha256" in line]


@pytest.mark.mpi
@pytest.mark.torch
def test_the_example_runs_under_mpirun_and_ends_with_its_line(uninterrupted):
    output, _ = uninterrupted
    fields = dict(item.split("=", 1) for item in output.splitlines()[-1].split())
    assert list(fields) == ["accuracy", "images_per_s", "loss_curve", "replicas"], output
    assert float(fields["accuracy"]) > 0.9
    assert fields["replicas"] == "identical"
    first, second = digests(output)
    assert first == second


@pytest.mark.mpi
@pytest.mark.once
def test_ranks_over_tcp_train_the_weights_that_ranks_over_mpi_do(small_data, tmp_path, uninterrupted):
    address = f"127.0.0.1:{free_port()}"
    output = run_example(small_data, tmp_path, FARANDOLE_ADDRESS=address, FARANDOLE_SHARED_MEMORY="0")
    assert digests(output) == digests(uninterrupted[0])


@pytest.mark.mpi
@pytest.mark.once
def test_a_job_that_was_stopped_within_an_epoch_goes_on_bitwise_as_if_it_never_had(small_data, tmp_path, uninterrupted):
    output, whole = uninterrupted
    assert digests(run_example(small_data, tmp_path, "--stop-after", "55")) == []
    stopped = checkpoint.load(tmp_path / "x.pt")
    assert (stopped["progress"]["epoch"], stopped["progress"]["step"]) == (5, 3)
    assert digests(run_example(small_data, tmp_path, "--resume")) == digests(output)
    resumed = checkpoint.load(tmp_path / "x.pt")
    assert resumed["progress"] == whole["progress"]
    assert torch.equal(resumed["generators"], whole["generators"])
    assert not torch.equal(whole["generators"][0], whole["generators"][1])
    sha = hashlib.sha256()
    for name, _ in fashion_data.make_model().named_parameters():
        sha.update(name.encode() + resumed["model"][name].numpy().tobytes())
    assert sha.hexdigest() == digests(output)[0]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_adam_with_its_state_shared_out_is_adam(size):
    model = zero.make_model()
    for figures in run_threads(size, lambda rank: zero.compare(model)):
        assert figures.difference < 1e-6
        part = figures.whole_bytes / size
        assert part - 8 <= figures.part_bytes <= part + 8


@pytest.mark.mpi
@pytest.mark.once
def test_the_example_of_shared_out_state_runs_under_mpirun():
    done = mpirun(2, [str(REPOSITORY / "examples" / "zero.py")])
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("difference=") == 1 and "ranks=2" in done.stdout, done.stdout
