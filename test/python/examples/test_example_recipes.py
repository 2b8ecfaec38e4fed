"""Every example with --smoke on 2 ranks, and what the ResNet recipe promises."""

import re

import pytest
import torch

from ranks import GUARD_S, REPOSITORY, mpirun
from test_example import small_data  # noqa: F401 (a fixture)

pytest.importorskip("yaml", reason="the recipe needs pyyaml")

import checkpoint
import resnet18
import resnet_model

pytestmark = [pytest.mark.mpi, pytest.mark.torch]

EXAMPLES = REPOSITORY / "examples"


def run_smoke(name, *arguments):
    done = mpirun(2, [str(EXAMPLES / name), "--smoke", *map(str, arguments)], timeout_s=GUARD_S)
    assert done.returncode == 0, done.stdout
    return done.stdout


def figure(name, line):
    return float(re.search(rf"{name}=([\d.]+)", line).group(1))


def test_the_first_steps_learn():
    lines = run_smoke("first_steps.py").splitlines()
    assert [line.split()[0] for line in lines[-2:]] == ["epoch=0", "epoch=1"]
    assert figure("accuracy", lines[-1]) > 0.85
    assert len((EXAMPLES / "first_steps.py").read_text().splitlines()) <= 60


def test_the_first_steps_run_as_one_process_too():
    done = mpirun(1, [str(EXAMPLES / "first_steps.py"), "--smoke"])
    assert done.returncode == 0, done.stdout


def test_fashion_mnist_with_adasum(small_data, tmp_path):  # noqa: F811
    output = run_smoke(
        "fashion_mnist.py", "--data-dir", small_data, "--adasum", "--batch-size", 10,
        "--loss-curve", tmp_path / "curve.png",
    )  # fmt: skip
    assert output.splitlines()[-1].endswith("replicas=identical")


# ResNet-18.


@pytest.fixture(scope="module")
def recipe(small_data, tmp_path_factory):  # noqa: F811
    """Output and checkpoint of two epochs without a break."""
    folder = tmp_path_factory.mktemp("recipe")
    output = run_smoke("resnet18.py", "--data-dir", small_data, f"output={folder}")
    return output, checkpoint.load(folder / "checkpoint.pt")


def test_the_recipe_trains_and_reports_each_epoch(recipe):
    output, content = recipe
    epochs = [line for line in output.splitlines() if line.startswith("epoch=")]
    assert [line.split()[0] for line in epochs] == ["epoch=1", "epoch=2"]
    assert figure("train/loss", epochs[1]) < figure("train/loss", epochs[0])
    assert figure("accuracy", output.splitlines()[-1]) == pytest.approx(figure("test/accuracy", epochs[1]), abs=1e-3)
    assert content["progress"]["epoch"] == 2
    assert content["progress"]["settings"]["compression"] == "fp16"


def test_a_recipe_that_is_resumed_ends_bitwise_as_one_without_a_break(
    recipe,
    small_data,  # noqa: F811
    tmp_path,
):
    arguments = ["--data-dir", small_data, f"output={tmp_path}"]
    run_smoke("resnet18.py", *arguments, "epochs=1")
    output = run_smoke("resnet18.py", *arguments, "--resume")
    assert "epoch=2" in output and "epoch=1 " not in output
    whole, resumed = recipe[1], checkpoint.load(tmp_path / "checkpoint.pt")
    for name, value in whole["model"].items():
        assert torch.equal(value, resumed["model"][name]), name
    assert torch.equal(whole["generators"], resumed["generators"])


def test_the_network_is_resnet18():
    model = resnet_model.make_resnet18(10)
    assert sum(p.numel() for p in model.parameters()) == 11_173_962
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    convolutions = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d)]
    assert len(convolutions) == 1 + 16 + 3


def test_images_become_what_the_network_wants():
    images = torch.zeros(3, 1, 28, 28, dtype=torch.uint8)
    images[:, :, 0, 0] = 163
    values = resnet18.to_network(images, is_training=False)
    assert values.shape == (3, 3, 32, 32)
    assert values[0, :, 2, 2].tolist() == [1.0] * 3
    varied = resnet18.to_network(images, is_training=True)
    assert varied.shape == (3, 3, 32, 32)
    assert all((image == 1.0).sum() == 3 for image in varied)


def test_the_rate_warms_up_to_that_of_all_ranks_and_falls_at_the_milestones():
    settings = resnet18.Settings(warmup_epochs=2.0, milestones=[3, 5])
    rates = [resnet18.learning_rate_factor(step, 10, settings, 4) for step in range(0, 60, 10)]
    assert rates == pytest.approx([1.0, 2.5, 4.0, 0.4, 0.4, 0.04])
    settings = resnet18.Settings(warmup_epochs=0.0, milestones=[])
    assert resnet18.learning_rate_factor(0, 10, settings, 4) == 4


def test_settings_come_from_the_file_and_the_command_line(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("epochs: 7\nlr: 1\nmilestones: [2]\n")
    settings = resnet18.read_settings(path, False, ["lr=0.5", "sync_batch_norm=false"])
    assert (settings.epochs, settings.lr, settings.milestones) == (7, 0.5, [2])
    assert settings.sync_batch_norm is False and settings.width == 64
    assert resnet18.read_settings(path, True, ["width=4"]).width == 4
    for wrong, text in (
        ("speed=3", "there is no setting speed; known: epochs, batch_size"),
        ("epochs=many", "epochs must be of type int, not 'many'"),
        ("epochs=true", "epochs must be of type int, not True"),
        ("width", "expected key=value, got 'width'"),
    ):
        with pytest.raises(ValueError, match=text):
            resnet18.read_settings(path, False, [wrong])
    assert resnet18.read_settings(resnet18.CONFIG, False, []) == resnet18.Settings()
