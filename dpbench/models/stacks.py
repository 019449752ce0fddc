"""Stacks of layers without branches, for images [B, 3, S, S]: the CNN of Tramèr & Boneh, an MLP, and VGG."""

import functools

import torch
from torch import nn

from dpbench.models.adapt import group_norm
from dpbench.models.workload import ModelError

_MLP_WIDTH = 1024
_VGG_WIDTHS = (64, 128, 256, 512, 512)


def mlp(*, num_classes: int = 10, image_size: int = 32) -> nn.Module:
    """Images [B, 3, S, S] -> logits [B, num_classes], by two hidden layers of 1024 units with ReLU.

    Linear layers alone, whose per-sample gradients are outer products.
    """
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(3 * image_size**2, _MLP_WIDTH),
        nn.ReLU(inplace=True),
        nn.Linear(_MLP_WIDTH, _MLP_WIDTH),
        nn.ReLU(inplace=True),
        nn.Linear(_MLP_WIDTH, num_classes),
    )


def cnn(*, num_classes: int = 10, image_size: int = 32) -> nn.Module:
    """Images [B, 3, S, S] -> logits [B, num_classes]: Tramèr & Boneh 2021 (arXiv:2011.11660), after arXiv:2007.14191.

    It is the "CNN 0.551M" of Table 4 of arXiv:2205.10683: six 3x3 convolutions of 32, 32, 64, 64, 128, 128 channels, a
    max pool after each pair, and two linear layers, the first of which reads the 128 x (S/8) x (S/8) features. It uses
    tanh, not ReLU, as both papers do: bounded activations lose less under clipping. At 32x32 with ten classes it has
    550,570 parameters.

    Raises:
        ModelError: image_size is below 8, which three poolings need.
    """
    if image_size < 8:
        raise ModelError("image_size of at least 8 for cnn", image_size)
    layers: list[nn.Module] = []
    channels = 3
    for width in (32, 64, 128):
        for _ in range(2):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.Tanh()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    features = channels * (image_size // 8) ** 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, 128), nn.Tanh(), nn.Linear(128, num_classes))


class Averaged(nn.Module):
    """Images [B, 3, S, S] -> logits [B, num_classes]: features, averaged over pixels, and a linear layer.

    Args:
        features: layers from images to `channels` of any size.
        channels, num_classes: of the linear layer.
    """

    def __init__(self, features: list[nn.Module], channels: int, num_classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(*features)
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(images).mean((2, 3)))


def _vgg(name: str, depths: tuple[int, ...], *, num_classes: int = 10, image_size: int = 32) -> Averaged:
    """VGG in its CIFAR form: images [B, 3, S, S] with S >= 32 -> logits [B, num_classes].

    Simonyan & Zisserman 2015, arXiv:1409.1556, as in the networks of arXiv:2205.10683: 3x3 convolutions with bias, a
    norm after each (GroupNorm here), five max pools, which reduce 32x32 to 1x1 (larger final features are averaged),
    and one Linear(512, num_classes) in place of VGG's three large ones. Every ReLU works in place, as in torchvision.
    """
    if image_size < 32:
        raise ModelError(f"image_size of at least 32 for {name}", image_size)
    layers: list[nn.Module] = []
    channels = 3
    for width, depth in zip(_VGG_WIDTHS, depths, strict=True):
        for _ in range(depth):
            layers += [nn.Conv2d(channels, width, 3, padding=1), group_norm(width), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return Averaged(layers, channels, num_classes)


#: Configurations A, B, D and E of the paper: 8, 10, 13 and 16 convolutions.
vgg11 = functools.partial(_vgg, "vgg11", (1, 1, 2, 2, 2))
vgg13 = functools.partial(_vgg, "vgg13", (2, 2, 2, 2, 2))
vgg16 = functools.partial(_vgg, "vgg16", (2, 2, 3, 3, 3))
vgg19 = functools.partial(_vgg, "vgg19", (2, 2, 4, 4, 4))
