"""VGG (Simonyan & Zisserman 2015, arXiv:1409.1556) in its CIFAR form: the convolutions, and one linear layer.

As in the networks of arXiv:2205.10683: 3x3 convolutions with bias, a norm after each (GroupNorm here), five max pools,
which reduce 32x32 to 1x1, and one Linear(512, num_classes) in place of VGG's three large ones. Every ReLU works in
place, as in torchvision.
"""

from __future__ import annotations

import functools

import torch
from torch import nn

from dpbench.models.adapt import group_norm
from dpbench.models.workload import ModelError

WIDTHS = (64, 128, 256, 512, 512)


class VGG(nn.Module):
    """Images [B, 3, S, S] with S >= 32 -> logits [B, num_classes]; final features larger than 1x1 are averaged."""

    def __init__(self, depths: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width, depth in zip(WIDTHS, depths, strict=True):
            for _ in range(depth):
                layers += [nn.Conv2d(channels, width, 3, padding=1), group_norm(width), nn.ReLU(inplace=True)]
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(images).mean((2, 3)))


def _vgg(name: str, depths: tuple[int, ...], *, num_classes: int = 10, image_size: int = 32) -> VGG:
    if image_size < 32:
        raise ModelError(f"image_size of at least 32 for {name}", image_size)
    return VGG(depths, num_classes)


#: Configurations A, B, D and E of the paper: 8, 10, 13 and 16 convolutions.
vgg11 = functools.partial(_vgg, "vgg11", (1, 1, 2, 2, 2))
vgg13 = functools.partial(_vgg, "vgg13", (2, 2, 2, 2, 2))
vgg16 = functools.partial(_vgg, "vgg16", (2, 2, 3, 3, 3))
vgg19 = functools.partial(_vgg, "vgg19", (2, 2, 4, 4, 4))
