"""What a training job leaves behind for people: a picture of the loss, scalars for TensorBoard."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Sequence

import torch

import farandole.torch as hvd


class Scalars:
    """Figures for TensorBoard, written by rank 0; nothing where ``folder`` is None.

    Args:
        folder: Of the log.
        first_step: An earlier log's figures from here on are dropped: they come again.
    """

    def __init__(self, folder: pathlib.Path | None, first_step: int) -> None:
        self._writer = None
        if folder is None or hvd.rank() != 0:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            print("no scalars: `pip install tensorboard` brings what writes them", file=sys.stderr)
            return
        self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def add(self, name: str, values: torch.Tensor | float, step: int) -> None:
        """One value at ``step``, or several: at ``step``, ``step`` + 1, ..."""
        if self._writer is not None:
            for i, value in enumerate(torch.as_tensor(values).reshape(-1).tolist()):
                self._writer.add_scalar(name, value, step + i)

    def close(self) -> None:
        """Brings everything to the disk."""
        if self._writer is not None:
            self._writer.close()


def draw_loss_curve(losses: torch.Tensor, path: pathlib.Path) -> None:
    """Writes the loss of every step, and its running mean, as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    width = max(1, len(losses) // 50)
    mean = losses.unfold(0, width, 1).mean(1)
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(losses, alpha=0.3, label="each step, mean over ranks")
    axes.plot(range(width - 1, len(losses)), mean, label=f"mean of {width} steps")
    axes.set(xlabel="step", ylabel="cross-entropy", title=f"Fashion-MNIST on {hvd.size()} ranks")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def draw_generations(
    calm: Sequence[float], killed: Sequence[float], generations: Sequence[tuple[int, int]], steps: int,
    path: pathlib.Path,
) -> None:  # fmt: skip
    """Writes a picture of the losses of two runs, by epoch, and of the ranks of the second.

    Args:
        generations: Of the second: the first step and the number of ranks.
        steps: Of all epochs.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "farandole"})
    from matplotlib import pyplot

    starts, sizes = zip(*generations, strict=True)
    lost = [start for start, size, before in zip(starts[1:], sizes[1:], sizes, strict=False) if size < before]
    at = [epoch * steps / len(calm) for epoch in range(1, len(calm) + 1)]
    figure, (above, below) = pyplot.subplots(
        2, sharex=True, figsize=(8.6, 4.4), height_ratios=(3, 1), layout="constrained"
    )
    for axes in (above, below):
        axes.vlines(lost, 0, 1, transform=axes.get_xaxis_transform(), color="tab:red", linewidth=0.6)
    above.plot(at, killed, color="tab:orange", linewidth=6, label=f"ranks were lost {len(lost)} times (red lines)")
    above.plot(at, calm, color="black", linewidth=1.2, label="one process that nobody disturbed")
    above.set(ylabel="loss", ylim=(0, None))
    above.legend()
    below.step([*starts, steps], [*sizes, sizes[-1]], where="post", color="tab:orange", linewidth=2)
    below.set(xlabel="step", ylabel="ranks", xlim=(0, steps), ylim=(0, max(sizes) + 0.5))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
