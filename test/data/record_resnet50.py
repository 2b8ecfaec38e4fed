"""Records when each gradient of a ResNet-50 becomes ready in a real backward: resnet50_backward.csv.

Run with any torch >= 2.1: ``python test/data/record_resnet50.py > test/data/resnet50_backward.csv``. The tests replay
the recording on a fake clock, so the machine it was taken on only shapes the gaps. The network is that of He et al.,
"Deep residual learning for image recognition", CVPR 2016, table 1: 161 parameters, 25,557,032 elements.
"""

import sys
import time

import torch
from torch import nn


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions with a shortcut; the output has 4 * width channels."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.shortcut = None
        if stride != 1 or channels != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return torch.relu(y + (x if self.shortcut is None else self.shortcut(x)))


def resnet50() -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
                               nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for stage, blocks in enumerate([3, 4, 6, 3]):
        width = 64 << stage
        for block in range(blocks):
            layers.append(Bottleneck(channels, width, 2 if block == 0 and stage > 0 else 1))
            channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


def main() -> None:
    torch.manual_seed(0)
    model = resnet50()
    parameters = list(model.named_parameters())
    assert len(parameters) == 161 and sum(p.numel() for _, p in parameters) == 25_557_032
    ready: dict[str, float] = {}
    for name, parameter in parameters:
        def note(_: torch.Tensor, name: str = name) -> None:
            ready.setdefault(name, time.perf_counter())

        parameter.register_post_accumulate_grad_hook(note)
    for _ in range(2):  # the first run warms up
        loss = model(torch.randn(4, 3, 224, 224)).square().mean()
        ready.clear()
        start = time.perf_counter()
        loss.backward()
    print("name,elements,ready_us")
    sizes = {name: parameter.numel() for name, parameter in parameters}
    for name, moment in sorted(ready.items(), key=lambda item: item[1]):
        print(f"{name},{sizes[name]},{(moment - start) * 1e6:.0f}")


if __name__ == "__main__":
    sys.exit(main())
