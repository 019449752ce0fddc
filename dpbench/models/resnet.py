"""Residual networks in their CIFAR form: a 3x3 stem of stride 1, no max pool, GroupNorm, global average pooling.

ResNet-18 to -152: He et al. 2016, arXiv:1512.03385; stages of 64, 128, 256, 512 channels, stride 2 at the 3x3.
WRN-16-4: Zagoruyko & Komodakis 2016, arXiv:1605.07146, pre-activation; the size that De et al. 2022 (arXiv:2204.13650)
train with DP-SGD on CIFAR-10, here without their weight standardisation.
ResNeXt-29 32x4d: Xie et al. 2017, arXiv:1611.05431, three stages, 3x3 convolutions in 32 groups; 32x4d rather than the
paper's 8x64d, which needs seven times the parameters for the same grouped convolutions.

Every ReLU works in place, as in torchvision and timm. Libraries with backward hooks that forbid in-place operations can
switch it off since it is a module. They could not for a sum, so `out + shortcut` allocates a new tensor.

Any image size works.
"""

import functools
from collections.abc import Callable

import torch
from torch import nn

from dpbench.models.adapt import group_norm
from dpbench.models.stacks import Averaged


def _conv(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, groups=groups, bias=False)


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    if inputs == outputs and stride == 1:
        return nn.Identity()
    return nn.Sequential(_conv(inputs, outputs, 1, stride), group_norm(outputs))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions. [B, inputs, S, S] -> [B, width, S/stride, S/stride]."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)
        self.conv1, self.norm1 = _conv(inputs, width, 3, stride), group_norm(width)
        self.conv2, self.norm2 = _conv(width, width, 3), group_norm(width)
        self.shortcut = _shortcut(inputs, width, stride)
        self.outputs = width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        return self.relu(out + self.shortcut(x))


class Bottleneck(nn.Module):
    """1x1, 3x3 (in groups), 1x1 convolutions. [B, inputs, S, S] -> [B, expansion * width, S/stride, S/stride]."""

    def __init__(self, inputs: int, width: int, stride: int, expansion: int = 4, groups: int = 1) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)
        self.outputs = expansion * width
        self.conv1, self.norm1 = _conv(inputs, width, 1), group_norm(width)
        self.conv2, self.norm2 = _conv(width, width, 3, stride, groups), group_norm(width)
        self.conv3, self.norm3 = _conv(width, self.outputs, 1), group_norm(self.outputs)
        self.shortcut = _shortcut(inputs, self.outputs, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.relu(self.norm2(self.conv2(out)))
        out = self.norm3(self.conv3(out))
        return self.relu(out + self.shortcut(x))


class ResNet(nn.Module):
    """Images [B, 3, S, S] -> logits [B, num_classes]: a stem of 64 channels, then stages; all but the first halve S.

    block: (inputs, width, stride) -> a module with the attribute `outputs`.
    stages: (depth, width) of each stage.
    """

    def __init__(
        self, block: Callable[[int, int, int], BasicBlock | Bottleneck], stages: list[tuple[int, int]], num_classes: int
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(_conv(3, 64, 3), group_norm(64), nn.ReLU(inplace=True))
        channels = 64
        blocks: list[nn.Module] = []
        for stage, (depth, width) in enumerate(stages):
            for i in range(depth):
                new = block(channels, width, 2 if stage > 0 and i == 0 else 1)
                channels = new.outputs
                blocks.append(new)
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.blocks(self.stem(images)).mean((2, 3)))


class PreActivationBlock(nn.Module):
    """Norm and ReLU before each of two 3x3 convolutions; a shortcut that changes shapes starts after the first ReLU."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)
        self.norm1, self.conv1 = group_norm(inputs), _conv(inputs, width, 3, stride)
        self.norm2, self.conv2 = group_norm(width), _conv(width, width, 3)
        self.project = None if inputs == width and stride == 1 else _conv(inputs, width, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.norm1(x))
        shortcut = x if self.project is None else self.project(out)
        out = self.conv2(self.relu(self.norm2(self.conv1(out))))
        return out + shortcut


def _resnet(
    block: Callable[[int, int, int], BasicBlock | Bottleneck],
    depths: tuple[int, ...],
    widths: tuple[int, ...] = (64, 128, 256, 512),
    *,
    num_classes: int = 10,
    image_size: int = 32,
) -> ResNet:
    return ResNet(block, list(zip(depths, widths, strict=True)), num_classes)


resnet18 = functools.partial(_resnet, BasicBlock, (2, 2, 2, 2))
resnet34 = functools.partial(_resnet, BasicBlock, (3, 4, 6, 3))
resnet50 = functools.partial(_resnet, Bottleneck, (3, 4, 6, 3))
resnet101 = functools.partial(_resnet, Bottleneck, (3, 4, 23, 3))
resnet152 = functools.partial(_resnet, Bottleneck, (3, 8, 36, 3))
#: Widths in 32 groups, doubled by the last 1x1 convolution.
resnext = functools.partial(_resnet, functools.partial(Bottleneck, expansion=2, groups=32), (3, 3, 3), (128, 256, 512))


def wide_resnet(*, num_classes: int = 10, image_size: int = 32) -> Averaged:
    """WRN-16-4: stages of 64, 128, 256 channels, two blocks each."""
    blocks: list[nn.Module] = [_conv(3, 16, 3)]
    channels = 16
    for width, stride in ((64, 1), (128, 2), (256, 2)):
        blocks += [PreActivationBlock(channels, width, stride), PreActivationBlock(width, width, 1)]
        channels = width
    return Averaged([*blocks, group_norm(channels), nn.ReLU(inplace=True)], channels, num_classes)
