"""What a hard record is made of: a small model, an ordinary batch, and the records that are put into it in turn.

Every loss is Σ output·weight with weights that come with the record, so that the gradient of an output is what the
record says it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipping import ClipFunction, Flat
from dpbench.conformance.sensitivity import DTYPES

ORDINARY = 8
"""Records of an ordinary batch."""


@dataclass(frozen=True)
class Record:
    """One sample: what it is in words, its inputs and weights [1, ...], and the place that it takes in the batch."""

    label: str
    inputs: Tensor
    weights: Tensor
    place: int = 0


@dataclass(frozen=True)
class Batch:
    """Inputs and weights [B, ...], and the records of which one at a time comes to them."""

    inputs: Tensor
    weights: Tensor
    records: Iterable[Record]


@dataclass(frozen=True)
class Problem:
    """A model and its batches. The record that moves the sum furthest is the one that counts.

    Tensors are in float64, or whole numbers where they are ids; who measures casts them, and the model with them.
    """

    model: nn.Module
    batches: Iterable[Batch]
    clip: ClipFunction = field(default_factory=lambda: Flat(max_grad_norm=1.0))


@dataclass(frozen=True)
class HardRecord:
    """A case.

    Attributes:
        name: in a few words.
        doc: why it is hard, in one sentence.
        make: from what the dtype of the parameters can hold to the problem.
        dtypes: those in which it makes sense, of `DTYPES`.
    """

    name: str
    doc: str
    make: Callable[[torch.finfo], Problem]
    dtypes: tuple[str, ...] = DTYPES


def weighted_sum(outputs: Tensor, weights: Tensor) -> Tensor:
    """Σ output·weight of each sample, [B]: the gradient of an output is its weight.

    Args:
        outputs: [B, ...].
        weights: of the same shape.
    """
    return (outputs * weights).flatten(1).sum(1)


def drawn(seed: int) -> torch.Generator:
    """Random numbers that are the same on every machine.

    Args:
        seed: of the numbers.
    """
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int) -> Tensor:
    """N(0, 1) in float64.

    Args:
        shape: of the numbers.
        seed: of the numbers.
    """
    return torch.randn(*shape, generator=drawn(seed), dtype=torch.float64)


def ordinary(inputs: tuple[int, ...], outputs: tuple[int, ...], records: Iterable[Record]) -> Batch:
    """An ordinary batch of samples of these shapes, N(0, 1), for the records to come to.

    Args:
        inputs, outputs: shapes of one sample.
        records: that come to the batch.
    """
    return Batch(normal(ORDINARY, *inputs, seed=101), normal(ORDINARY, *outputs, seed=102), records)


def cancelling(positions: int, channels: int, seed: int) -> Tensor:
    """Weights [1, T, p] that sum to exactly zero over positions: whole numbers that every dtype holds.

    Args:
        positions: T.
        channels: p.
        seed: of the numbers.
    """
    whole = torch.randint(-7, 8, (1, positions, channels), generator=drawn(seed)).double()
    whole[:, -1] = -whole[:, :-1].sum(1)
    return whole


def centred(positions: int, channels: int, seed: int) -> Tensor:
    """N(0, 1) [1, T, p] less its mean over positions: the sum is what rounding leaves.

    Args:
        positions: T.
        channels: p.
        seed: of the numbers.
    """
    whole = normal(1, positions, channels, seed=seed)
    return whole - whole.mean(1, keepdim=True)


def nearly_alike(spread: float, *shape: int, seed: int) -> Tensor:
    """1 + spread·N(0, 1).

    Args:
        spread: how far from 1.
        shape: of the numbers.
        seed: of the numbers.
    """
    return 1 + spread * normal(*shape, seed=seed)


def as_image(rows: Tensor, *size: int) -> Tensor:
    """[1, T, p] to [1, p, *size]: channels first.

    Args:
        rows: [1, T, p].
        size: of the image; its product is T.
    """
    return rows.transpose(1, 2).reshape(1, rows.shape[2], *size)


class Twice(nn.Module):
    """A layer with one weight, used once on each half of the positions."""

    def __init__(self, d: int, p: int) -> None:
        super().__init__()
        self.layer = nn.Linear(d, p, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.layer(half) for half in x.chunk(2, dim=1)], dim=1)


class Tied(nn.Module):
    """An embedding whose table is the head, too."""

    def __init__(self, ids: int, d: int) -> None:
        super().__init__()
        self.table = nn.Embedding(ids, d)
        self.head = nn.Linear(d, ids, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        output: Tensor = self.head(self.table(ids))
        return output


class Bias(nn.Module):
    """A linear layer of which the bias alone is trained."""

    def __init__(self, d: int, p: int) -> None:
        super().__init__()
        self.layer = nn.Linear(d, p)
        self.layer.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        return output


class Attention(nn.Module):
    """Four heads: the backward pass of a softmax is a difference, before it comes to the projection."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.projection = nn.Linear(d, 3 * d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.projection(x).chunk(3, -1))
        return F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)


class Standardised(nn.Module):
    """A convolution whose weight has no mean: constant images move nothing, but for rounding."""

    def __init__(self, d: int, p: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(p, d, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        own = self.weight.flatten(1)
        standard = (own - own.mean(1, keepdim=True)) / own.std(1, keepdim=True)
        return F.conv2d(x, standard.view_as(self.weight).to(x.dtype))


class Cast(nn.Module):
    """A linear layer that multiplies in bfloat16, whatever its parameters are."""

    def __init__(self, d: int, p: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(p, d))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.bfloat16(), self.weight.bfloat16()).to(x.dtype)


def power_of_two(numbers: torch.finfo, share: float) -> float:
    """2^k, at `share` of the way (in exponents) from 1 to the largest number.

    Args:
        numbers: of the dtype.
        share: 0 for 1, 1 for the largest number.
    """
    return 2.0 ** math.floor(share * math.log2(numbers.max))
