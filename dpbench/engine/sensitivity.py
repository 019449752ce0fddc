"""Bound how far one record can move the computed sum of a logical batch, which noise is scaled to."""

from __future__ import annotations

import math
from typing import NamedTuple

from clipping.backends.base import Backend

WORST = 1e-2
"""Largest η for which noise covers the worst case of all roundings; beyond it, random roundings."""
DEVIATIONS = 12
"""Deviations above the expected batch size: larger Poisson batches have probability below 1e-30."""


class Sensitivity(NamedTuple):
    """S, a bound on how far one record can move the computed sum, and in words the roundings that it holds for."""

    bound: float
    words: str


def sensitivity(backend: Backend, batch_size: int) -> Sensitivity:
    """C(1 + η) for a logical batch.

    Args:
        backend: clips; η depends on the shapes that it has seen.
        batch_size: b. Batches larger by 12 standard deviations of Poisson samples are covered.
    """
    clip = backend.clip.sensitivity
    most = math.ceil(batch_size + DEVIATIONS * (math.sqrt(batch_size) + 1))
    bound, words = backend.sensitivity_bound(most, worst=True), "in the worst case"
    if bound > clip * (1 + WORST):
        bound, words = backend.sensitivity_bound(most), "if roundings are random"
    excess = bound / clip - 1 if clip else 0.0
    return Sensitivity(bound, f"C (1 + {excess:.1e}) in floating point, {words}")
