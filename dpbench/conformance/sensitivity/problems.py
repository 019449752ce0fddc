"""The parts of a hard record: a small model, an ordinary batch, and the records to add to it in turn.

Every loss is Σ output·weight with weights from the record, so the record determines the gradient of an output.

Functions take:
    shape: of the result.
    d, p, ids: channels of the inputs, and of the outputs; the number of ids.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipping import ClipFunction, Flat
from dpbench.conformance.modules import Net
from dpbench.conformance.sensitivity import DTYPES

ORDINARY = 8
"""Number of records in an ordinary batch."""


@dataclass(frozen=True)
class Record:
    """One sample: its description, its inputs and weights [1, ...], and its place in the batch."""

    label: str
    inputs: Tensor
    weights: Tensor
    place: int = 0


@dataclass(frozen=True)
class Batch:
    """Inputs and weights [B, ...], and the records to add, one at a time."""

    inputs: Tensor
    weights: Tensor
    records: Iterable[Record]


@dataclass(frozen=True)
class Problem:
    """A model and its batches. The record that moves the sum furthest counts.

    Tensors are in float64, or integer for ids; the caller casts them and the model.
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
        make: from `torch.finfo` of the parameters' dtype to the problem.
        dtypes: those that make sense, from `DTYPES`.
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
    """A generator with the same random numbers on every machine."""
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int) -> Tensor:
    """N(0, 1) in float64."""
    return torch.randn(*shape, generator=drawn(seed), dtype=torch.float64)


def ordinary(inputs: tuple[int, ...], outputs: tuple[int, ...], records: Iterable[Record]) -> Batch:
    """An ordinary batch of samples of these shapes, N(0, 1), with records to add.

    Args:
        inputs, outputs: shapes of one sample.
        records: to add to the batch.
    """
    return Batch(normal(ORDINARY, *inputs, seed=101), normal(ORDINARY, *outputs, seed=102), records)


def cancelling(positions: int, channels: int, seed: int) -> Tensor:
    """Weights [1, T, p] with zero sum over positions: integers that every dtype represents exactly."""
    whole = torch.randint(-7, 8, (1, positions, channels), generator=drawn(seed)).double()
    whole[:, -1] = -whole[:, :-1].sum(1)
    return whole


def centred(positions: int, channels: int, seed: int) -> Tensor:
    """N(0, 1) [1, T, p] minus its mean over positions: only rounding remains in the sum."""
    whole = normal(1, positions, channels, seed=seed)
    return whole - whole.mean(1, keepdim=True)


def nearly_alike(spread: float, *shape: int, seed: int) -> Tensor:
    """1 + spread·N(0, 1).

    Args:
        spread: distance from 1.
    """
    return 1 + spread * normal(*shape, seed=seed)


def as_image(rows: Tensor, *size: int) -> Tensor:
    """[1, T, p] to [1, p, *size]: channels first.

    Args:
        rows: [1, T, p].
        size: of the image; its product is T.
    """
    return rows.transpose(1, 2).reshape(1, rows.shape[2], *size)


def twice(d: int, p: int) -> Net:
    """A layer with one weight, used once on each half of the positions."""

    def forward(net: Any, x: Tensor) -> Tensor:
        return torch.cat([net.layer(half) for half in x.chunk(2, dim=1)], dim=1)

    return Net(forward, layer=nn.Linear(d, p, bias=False))


def tied(ids: int, d: int) -> Net:
    """An embedding with its table also as the head."""
    table, head = nn.Embedding(ids, d), nn.Linear(d, ids, bias=False)
    head.weight = table.weight
    return Net(lambda net, ids: net.head(net.table(ids)), table=table, head=head)


def attention(d: int) -> Net:
    """Four heads: the backward pass of a softmax takes a difference before it reaches the projection."""

    def forward(net: Any, x: Tensor) -> Tensor:
        heads = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in net.projection(x).chunk(3, -1))
        return F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)

    return Net(forward, projection=nn.Linear(d, 3 * d, bias=False))


def standardised(d: int, p: int) -> Net:
    """A convolution with zero-mean weight: constant images give only rounding."""

    def forward(net: Any, x: Tensor) -> Tensor:
        own = net.weight.flatten(1)
        standard = (own - own.mean(1, keepdim=True)) / own.std(1, keepdim=True)
        return F.conv2d(x, standard.view_as(net.weight).to(x.dtype))

    return Net(forward, weight=torch.randn(p, d, 3, 3))


def cast(d: int, p: int) -> Net:
    """A linear layer that always multiplies in bfloat16."""
    return Net(lambda net, x: F.linear(x.bfloat16(), net.weight.bfloat16()).to(x.dtype), weight=torch.randn(p, d))


def power_of_two(numbers: torch.finfo, share: float) -> float:
    """2^k, at `share` of the way (in exponents) from 1 to the largest number.

    Args:
        share: 0 for 1, 1 for the largest number.
    """
    return 2.0 ** math.floor(share * math.log2(numbers.max))
