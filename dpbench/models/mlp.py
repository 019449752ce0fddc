"""A multilayer perceptron: linear layers alone, whose per-sample gradients are outer products."""

from __future__ import annotations

from torch import nn

WIDTH = 1024


def mlp(*, num_classes: int = 10, image_size: int = 32) -> nn.Module:
    """Images [B, 3, S, S] -> logits [B, num_classes], by two hidden layers of 1024 units with ReLU."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(3 * image_size**2, WIDTH),
        nn.ReLU(inplace=True),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(inplace=True),
        nn.Linear(WIDTH, num_classes),
    )
