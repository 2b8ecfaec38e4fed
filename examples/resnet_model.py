"""ResNet-18 for images of 32 x 32 pixels.

Source: He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition", CVPR 2016,
arXiv:1512.03385, with the first layers of its section 4.2: one 3 x 3 convolution and no pooling.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Two convolutions beside a shortcut, which has one of its own where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )
        # Each block begins as its shortcut, which makes large batches easier to train (Goyal et al.,
        # 2017, arXiv:1706.02677, section 5.1).
        nn.init.zeros_(self.norm2.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of [n, inputs, height, width]."""
        hidden = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(hidden)) + self.shortcut(x))


def make_resnet18(classes: int, width: int = 64) -> nn.Sequential:
    """Eight blocks in four stages; ``width`` channels in the first, 11 million parameters for 64."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
    ]  # fmt: skip
    inputs = width
    for stage in range(4):
        outputs = width << stage
        layers.append(Block(inputs, outputs, stride=1 if stage == 0 else 2))
        layers.append(Block(outputs, outputs, stride=1))
        inputs = outputs
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)]
    return nn.Sequential(*layers)
