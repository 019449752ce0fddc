"""A search space of records, and the worst points found in it.

The tests search it; `FOUND` keeps the worst points as regression cases.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn

from dpbench.conformance.sensitivity.problems import (
    HardRecord,
    Problem,
    Record,
    as_image,
    cancelling,
    nearly_alike,
    normal,
    ordinary,
    twice,
)

CHANNELS = 32
#: A record's positions: rows of a linear layer, rows of one used twice, pixels, or patches.
KINDS = ("linear", "twice", "pointwise", "convolution")


@dataclass(frozen=True)
class Point:
    """One record.

    Attributes:
        kind: of `KINDS`.
        side: positions are its square; images of convolutions have at least that size.
        size, weight: powers of ten of the inputs and of the gradients of outputs.
        spread: power of ten of the relative spread of inputs.
        cancels: whether gradients of outputs sum to zero over positions.
        seed: of all that is random.
        place: position in the batch.
    """

    kind: str
    side: int
    size: float
    weight: float
    spread: float
    cancels: bool
    seed: int
    place: int

    def problem(self, numbers: torch.finfo) -> Problem:
        """Convert to a problem; sizes with products beyond the range of `numbers` are reduced."""
        positions, images = self.side**2, self.kind in ("pointwise", "convolution")
        size, weight = (min(10.0**power, math.sqrt(numbers.max) / 8) for power in (self.size, self.weight))
        own = cancelling(positions, CHANNELS, self.seed) if self.cancels else normal(1, positions, CHANNELS, seed=2)
        seen = self.side + 2 if self.kind == "convolution" else self.side
        shape = (CHANNELS, seen, seen) if images else (positions, CHANNELS)
        inputs = size * nearly_alike(10.0**self.spread, 1, *shape, seed=self.seed)
        weights = weight / 7 * (as_image(own, self.side, self.side) if images else own)
        record = Record(str(self), inputs, weights, self.place)
        return Problem(self.layer(), [ordinary(shape, tuple(weights.shape[1:]), [record])])

    @property
    def case(self) -> HardRecord:
        """Convert to a case."""
        return HardRecord(f"found, {self.kind}", "a search has found it", self.problem)

    def layer(self) -> nn.Module:
        """The layer of its kind."""
        if self.kind == "twice":
            return twice(CHANNELS, CHANNELS)
        if self.kind == "linear":
            return nn.Linear(CHANNELS, CHANNELS, bias=False)
        return nn.Conv2d(CHANNELS, CHANNELS, 3 if self.kind == "convolution" else 1, bias=False)

    def __str__(self) -> str:
        return (
            f"{self.kind}, {self.side**2} positions, inputs 1e{self.size:g}·(1 ± 1e{self.spread:g}), "
            f"{'cancelling ' if self.cancels else ''}weights 1e{self.weight:g}, seed {self.seed}, at {self.place}"
        )


#: The worst of thousands of points: one for each kind, and those that fail two backward passes without a Gram matrix.
FOUND = (
    Point("linear", 2, 12, 4, -8, True, 847, 5),
    Point("twice", 2, 18, -3, -3.5, True, 394, 4),
    Point("twice", 2, 18, 0, -8, True, 672, 4),
    Point("pointwise", 4, 18, -3, -4, True, 309, 2),
    Point("pointwise", 4, 3.5, 6, -8, True, 650, 4),
    Point("convolution", 4, 18, -3, -5, True, 597, 8),
    Point("convolution", 2, 2, 4, -3.5, True, 362, 6),
)
