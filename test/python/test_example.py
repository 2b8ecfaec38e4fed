"""The example's own checker of replicas, and its reader of idx files."""

import gzip
import importlib.util
import struct

import pytest
import torch

from ranks import REPOSITORY, mpirun, run_threads

EXAMPLE = REPOSITORY / "examples" / "fashion_mnist.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("fashion_mnist", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def flip_one_bit(model):
    bits = list(model.parameters())[-1].data.view(torch.int32)
    bits[17] ^= 1


@pytest.mark.parametrize("flipped_on", [None, 0, 1, 2])
def test_one_flipped_bit_on_one_rank_makes_the_replicas_differ(example, flipped_on):
    def body(rank):
        model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 40))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.25)
        if rank == flipped_on:
            flip_one_bit(model)
        return example.compare_replicas(model)

    verdicts, digests = zip(*run_threads(3, body), strict=True)
    assert set(verdicts) == {"identical" if flipped_on is None else "DIFFER"}
    assert digests[0] == digests[1] == digests[2]
    assert len(set(digests[0])) == (1 if flipped_on is None else 2)


def write_idx(path, shape, values):
    content = struct.pack(">HBB", 0, 8, len(shape)) + struct.pack(f">{len(shape)}I", *shape)
    path.write_bytes(gzip.compress(content + bytes(values)))


def test_idx_files_are_read_and_damaged_ones_refused(example, tmp_path):
    path = tmp_path / "x.gz"
    write_idx(path, (2, 3), range(6))
    assert example.read_idx(path).tolist() == [[0, 1, 2], [3, 4, 5]]
    write_idx(path, (2, 3), range(5))
    with pytest.raises(ValueError, match="but has 5 bytes"):
        example.read_idx(path)
    path.write_bytes(gzip.compress(b"\0\0\x0d\1\0\0\0\1\0"))
    with pytest.raises(ValueError, match="not an idx file"):
        example.read_idx(path)


@pytest.fixture
def small_data(tmp_path):
    """Six hundred easy images: the class is the position of a bright square."""
    generator = torch.Generator().manual_seed(3)
    for part, count in (("train", 500), ("t10k", 101)):
        labels = torch.randint(0, 10, (count,), generator=generator)
        images = torch.randint(0, 60, (count, 28, 28), generator=generator)
        for image, label in zip(images, labels.tolist(), strict=True):
            image[2 * label : 2 * label + 6, 2 * label : 2 * label + 6] = 255
        write_idx(
            tmp_path / f"{part}-images-idx3-ubyte.gz", images.shape, images.flatten().tolist()
        )
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte.gz", labels.shape, labels.tolist())
    return tmp_path


def test_the_example_runs_under_mpirun_and_ends_with_its_line(small_data):
    curve = small_data / "curve.png"
    arguments = ["--epochs", "6", "--batch-size", "25", "--data-dir", str(small_data)]
    done = mpirun(2, [str(EXAMPLE), *arguments, "--loss-curve", str(curve)], timeout_s=110)
    assert done.returncode == 0, done.stdout
    fields = dict(item.split("=", 1) for item in done.stdout.splitlines()[-1].split())
    assert list(fields) == ["accuracy", "images_per_s", "loss_curve", "replicas"], done.stdout
    assert float(fields["accuracy"]) > 0.9
    assert fields["replicas"] == "identical"
    assert curve.read_bytes().startswith(b"\x89PNG")
    digests = [line.split()[-1] for line in done.stdout.splitlines() if "sha256" in line]
    assert len(digests) == 2 and digests[0] == digests[1]
