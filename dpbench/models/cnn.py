"""The small CNN of Tramèr & Boneh 2021 (arXiv:2011.11660), after Papernot et al. 2020 (arXiv:2007.14191).

It is the "CNN 0.551M" of Table 4 of arXiv:2205.10683: six 3x3 convolutions of 32, 32, 64, 64, 128, 128 channels, a max
pool after each pair, and two linear layers. It uses tanh, not ReLU, as both papers do: bounded activations lose less
under clipping. At 32x32 with ten classes it has 550,570 parameters.
"""

from __future__ import annotations

from torch import nn

from dpbench.models.workload import ModelError


def cnn(*, num_classes: int = 10, image_size: int = 32) -> nn.Module:
    """Images [B, 3, S, S] -> logits [B, num_classes]. The first linear layer reads the 128 x (S/8) x (S/8) features.

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
