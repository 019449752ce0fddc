"""A certified lower bound under shuffled batches (Chua et al. 2024, "How Private are DP-SGD Implementations?").

An epoch is m = ⌈1/q⌉ batches over all records; a record is in one of them, each with probability 1/m. Let one
coordinate of every other record's gradient be −C and the record's own +C. In units of C, and up to a known shift, an
epoch with the record is w ~ N(2e_t, σ²I) with t uniform on 1 .. m, an epoch with a zero in its place is N(e_t, σ²I)
(zero out), and one with another −C is N(0, σ²I) (replace). The distribution of max_t w_t alone,

    F_a(c) = P[max ≤ c] = Φ((c − a)/σ) Φ(c/σ)^{m−1},   a = 2 against a = 1 or 0,

cut into intervals, reveals no more than w. So δ(ε) of this discrete pair, composed over E = ⌊T/m⌋ epochs, is a lower
bound on δ(ε) of DP-SGD (in the paper: one epoch, by the best single interval). Losses are rounded down. An unfinished
first epoch of r < m batches has F_a = (r/m) Φ((c − a)/σ) Φ(c/σ)^{r−1} + (1 − r/m) Φ(c/σ)^r.
"""

import math
from typing import Any, ClassVar

import numpy as np
from scipy.special import log_ndtr

from accounting.base import Accountant, Kind
from accounting.convolution import Array, Losses, epsilon_of
from accounting.mechanism import NoAnswer, SubsampledGaussian
from accounting.sampling import PROVED, Scheme

_INTERVALS, _GRID = 2**13, 2**17


class ShuffledLowerBound(Accountant):
    """A certified lower bound on ε of DP-SGD over shuffled batches; no guarantee."""

    kind: Kind = "lower_bound"
    supports: ClassVar[frozenset[Scheme]] = frozenset(("shuffled", adjacency) for adjacency in PROVED["shuffled"])

    def _inside(self, mechanism: SubsampledGaussian, steps: float, delta: float) -> tuple[float, dict[str, Any]]:
        sigma, inverse = mechanism.noise_multiplier, 1.0 / mechanism.sample_rate
        if not (1e-3 <= sigma <= 1e6 and inverse <= 1e12 and steps <= 1e12):
            raise NoAnswer("computed for noise multipliers from 1e-3 to 1e6, sample rates from 1e-12, 1e12 steps")
        batches = math.ceil(inverse * (1.0 - 1e-12))
        epochs, seen = int(steps // batches), batches
        if epochs == 0:
            epochs, seen = 1, int(steps)
        other = 0.0 if mechanism.adjacency == "replace_one" else 1.0
        log_with, log_without = (_log_masses(a, sigma, batches, seen) for a in (2.0, other))
        value = max(_epsilon(p, q, epochs, delta) for p, q in ((log_with, log_without), (log_without, log_with)))
        return value, {"epochs": epochs, "batches": batches}


def _log_masses(a: float, sigma: float, batches: int, seen: int) -> Array:
    """ln P[max in interval] for `_INTERVALS` of them from −∞ to ∞."""
    far = sigma * math.sqrt(2.0 * (math.log(seen) + 750.0))
    c = np.linspace(-min(far, 6.0 * sigma), 2.0 + far, _INTERVALS - 1)
    rest, share = log_ndtr(c / sigma), seen / batches
    total = share * _between(log_ndtr((c - a) / sigma) + (seen - 1) * rest)
    if seen < batches:
        total += (1.0 - share) * _between(seen * rest)
    with np.errstate(divide="ignore"):
        return np.log(total)


def _between(log_cdf: Array) -> Array:
    """Mass between neighbouring points and beyond the ends, from the tail in which it keeps its digits."""
    below, above = np.exp(log_cdf), -np.expm1(log_cdf)
    inner = np.where(below[1:] < 0.5, below[1:] - below[:-1], above[:-1] - above[1:])
    return np.maximum(np.concatenate([[below[0]], inner, [above[-1]]]), 0.0)


def _epsilon(log_p: Array, log_q: Array, epochs: int, delta: float) -> float:
    """The lower bound of ε of the discrete pair, `epochs` times."""
    kept = log_p > -700.0
    # closer to underflow Q has few digits; there it is below e^-700, and the loss larger than assumed
    p, loss = np.exp(log_p[kept]), log_p[kept] - np.maximum(log_q[kept], -700.0)
    # rarer losses are negligible; they are rounded down to the largest that is kept
    order = np.argsort(loss)
    p, loss = p[order], loss[order]
    rare = np.cumsum(p[::-1])[::-1] < 1e-4 * delta / epochs
    high = float(loss[~rare].max(initial=loss[0]))
    loss = np.minimum(loss, high)
    low = max(float(loss[0]), -high - 50.0)
    h = (high - low) / _GRID
    if h <= 0:
        return 0.0
    index = np.floor(loss / h * (1.0 - 1e-12) - 1e-9).astype(np.int64)
    first = math.floor(low / h) - 1
    inside = index >= first
    weights: Array = np.bincount(index[inside] - first, weights=p[inside]).astype(np.float64)
    while True:
        try:
            value = epsilon_of(Losses(weights, first, h), epochs, delta, upper=False)[0]
            return max(0.0, value * (1.0 - 1e-9) - 1e-15 * epochs)
        except NoAnswer:  # the window is too long: double the interval, and round down again
            padded = np.concatenate([np.zeros(first % 2), weights, np.zeros((first % 2 + weights.size) % 2)])
            first, h, weights = first // 2, 2.0 * h, padded.reshape(-1, 2).sum(axis=1)
