"""What one record can move the sum of a logical batch by, as it is computed: what noise is scaled to."""

from __future__ import annotations

import math
from typing import NamedTuple

from clipping.backends.base import Backend

WORST = 1e-2
"""η up to which noise covers the worst case of all roundings; beyond, roundings at random."""
DEVIATIONS = 12
"""Above its expected size: larger Poisson batches have probability below 1e-30."""


class Sensitivity(NamedTuple):
    """S, what one record can move the computed sum by, and in words of which roundings that holds."""

    bound: float
    words: str


def sensitivity(backend: Backend, batch_size: int) -> Sensitivity:
    """C(1 + η) of a logical batch of an expected size.

    Args:
        backend: that clips; its shapes are those that it has seen.
        batch_size: b. Larger batches, by 12 standard deviations of Poisson samples, are covered.
    """
    clip = backend.clip.sensitivity
    most = math.ceil(batch_size + DEVIATIONS * (math.sqrt(batch_size) + 1))
    bound, words = backend.sensitivity_bound(most, worst=True), "in the worst case"
    if bound > clip * (1 + WORST):
        bound, words = backend.sensitivity_bound(most), "if roundings are random"
    excess = bound / clip - 1 if clip else 0.0
    return Sensitivity(bound, f"C (1 + {excess:.1e}) in floating point, {words}")
