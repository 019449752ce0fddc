"""The privacy loss of an epoch of balls and bins: each record is in one of t batches, chosen uniformly at random.

Let x be the removed record, and reveal the batches of all others. Given these, the sums of an epoch are produced by the
same random function, one batch after the other, from z ~ P if x is present and z ~ Q if not:

    Q = N(0, σ²I)    P = mean over i of N(e_i, σ²I)    in t dimensions, in units of C.

For a gradient of norm s ≤ 1, whatever it depends on, s z_i plus independent noise of variance (1 − s²)σ² along it has
the law of its part of the noisy sum; all other directions do not depend on x. So (P, Q) dominates an epoch on removing
a record and (Q, P) on adding one, and their products dominate E epochs (Zhu, Dong and Wang 2022). Zeroing the gradient
is the same. Fewer batches are no more private: P is the mean over j of the pair without batch j. The same pair
is in Chua et al. 2024 ("Balls-and-Bins Sampling for DP-SGD") and Feldman and Shenfeld 2025 ("Privacy Amplification by
Random Allocation").

Under Q, P/Q is W = (W_1 + ... + W_t)/t of independent log-normal W_i = exp((2z_i − 1)/2σ²) of mean 1, and

    removed    δ(ε) = E (W − e^ε)₊        added    δ(ε) = E (1 − e^ε W)₊.

Both are means of convex functions, so a distribution larger than W's in convex order bounds both, and sums of
independent variables keep that order. So W_i and each sum of two are put on a grid of their logarithm: mass between two
grid points goes to these two, with its mean kept. Sums are formed by doubling, on finer grids for more terms, because
the spread of k of t terms counts by k/t. All terms are products and sums of positive numbers, so small masses keep
their digits. Mass that is cut off at the ends counts as a loss of ∞, of P on removing and of Q on adding.
"""

import functools
import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import ndtr

from accounting.convolution import Losses
from accounting.dominating_pairs import on_grid, removed
from accounting.mechanism import NoAnswer
from accounting.series import Array

#: Less noise is counted without amplification (masses underflow); more is counted as this (intervals get too small).
LEAST_NOISE, _MOST_NOISE = 0.1, 300.0
#: More batches are counted as this many.
_MOST_BATCHES = 2.0**20
#: The cut of one batch's noise, in σ; the mass cut off sums; the widest interval; the most pairs.
_FAR, _CUT, _WIDEST, _MOST = 10.0, 1e-24, 0.05, 2.0**27


@dataclass(frozen=True)
class Epoch:
    """The losses of one epoch in one direction.

    Attributes:
        sigma: σ, at least `LEAST_NOISE`.
        batches: t of an epoch.
        adds: the record is added; else it is removed.
    """

    sigma: float
    batches: float
    adds: bool

    def reach(self, log_mass: float) -> tuple[float, float]:
        """Losses between which all but e^log_mass lies: no W_i is above, and the mean of ln W_i is below ln W."""
        sigma, t = min(self.sigma, _MOST_NOISE), self.batches
        far = math.sqrt(2.0 * (math.log(t) - log_mass + 1.0)) / sigma
        low = -0.5 / sigma**2 - far / math.sqrt(t)
        high = 0.5 / sigma**2 + far
        if t > 1:
            high = float(np.logaddexp(high - math.log(t), math.log1p(-1.0 / t) + far - 0.5 / sigma**2))
        return (-high, -low) if self.adds else (low, high)

    def on_grid(self, interval: float) -> Losses:
        """A pessimistic grid.

        Raises:
            NoAnswer: the grid needs more than `_MOST` pairs of losses.
        """
        found = _mean(min(self.sigma, _MOST_NOISE), int(min(self.batches, _MOST_BATCHES)), interval)
        if isinstance(found, str):
            raise NoAnswer(found)
        with np.errstate(over="ignore"):
            loss = Losses(found.weights, found.first, interval, offset=-math.log(found.terms))
            if self.adds:
                return replace(
                    loss,
                    weights=loss.weights[::-1],
                    first=1 - loss.first - loss.weights.size,
                    at_infinity=found.lost_q,
                    offset=-loss.offset,
                )
            return replace(loss, weights=loss.weights * np.exp(loss.at), at_infinity=found.lost_p)


@dataclass(frozen=True)
class _Sum:
    """A sum's masses under Q at the logarithms (first + 0 .. n − 1)·interval; and the lost masses of Q and of P."""

    terms: int
    weights: Array
    first: int
    lost_q: float
    lost_p: float


_NONE = _Sum(0, np.zeros(1), 0, 0.0, 0.0)


@functools.lru_cache(maxsize=32)
def _mean(sigma: float, t: int, interval: float) -> _Sum | str:
    """The sum of t W_i, built from sums of 1, 2, 4, ... of them; or why there is none."""

    def wider(terms: int) -> int:
        """The power of two by which the interval of sums of so many terms is wider."""
        return max(0, int(min(0.5 * math.log2(t / terms), math.log2(_WIDEST / interval))))

    power = wider(1)
    doubled, total = _one(sigma, interval * 2**power), _NONE
    for bit in range(t.bit_length()):
        finer = power - wider(doubled.terms)
        power -= finer
        doubled, total, h = _finer(doubled, finer), _finer(total, finer), interval * 2**power
        if (doubled.weights.size + total.weights.size) ** 2 > _MOST:
            return f"losses {interval:.3g} apart are too many pairs of an epoch's"
        if t >> bit & 1:
            total = _cut(_added(total, doubled, h), h, t) if total.terms else doubled
        if t >> bit > 1:
            doubled = _cut(_added(doubled, doubled, h), h, t)
    return _finer(total, power)


def _finer(total: _Sum, halvings: int) -> _Sum:
    """The same sum on a finer grid."""
    weights = np.zeros((total.weights.size - 1) * 2**halvings + 1)
    weights[:: 2**halvings] = total.weights
    return replace(total, weights=weights, first=total.first * 2**halvings)


def _one(sigma: float, h: float) -> _Sum:
    """W_i, between the losses at z = −`_FAR`σ of Q and `_FAR`σ of P."""
    low, high = -0.5 / sigma**2 - _FAR / sigma, 0.5 / sigma**2 + _FAR / sigma
    losses = on_grid([(1.0, removed(sigma, 1.0), 0)], math.floor(low / h), math.ceil(high / h), h)
    return _Sum(1, losses.weights * np.exp(-losses.at), losses.first, 2.0 * float(ndtr(-_FAR)), losses.at_infinity)


def _added(a: _Sum, b: _Sum, h: float) -> _Sum:
    first, last = max(a.first, b.first), max(a.first + a.weights.size, b.first + b.weights.size)
    weights = np.zeros(last - first + int(math.log(2.0) / h) + 3)
    _put(weights, first, a, b, h, 0)
    _put(weights, first, b, a, h, 1)
    terms = a.terms + b.terms
    lost_p = (a.terms * (a.lost_p + b.lost_q) + b.terms * (b.lost_p + a.lost_q)) / terms
    return _Sum(terms, weights, first, a.lost_q + b.lost_q, lost_p)


def _put(weights: Array, first: int, small: _Sum, large: _Sum, h: float, least: int) -> None:
    """Add the pairs whose large term is at least `least` intervals above the small one, to masses from `first` on.

    e^(jh) + e^((j − d)h) is e^(jh) times a number that depends only on d. So all d for which the sum lies in the same
    interval above jh are added by one convolution of the small term's masses with the shares of the interval's ends.
    """
    least = max(least, large.first - small.first - small.weights.size + 1)
    apart = np.arange(least, large.first + large.weights.size - small.first)
    above = np.log1p(np.exp(-apart * h))
    steps = np.floor(above / h).astype(np.int64)  # falling
    upper = np.expm1(np.clip(above - steps * h, 0.0, h)) / math.expm1(h)
    bounds = [*np.flatnonzero(np.diff(steps, prepend=-1)).tolist(), apart.size]
    for start, end in itertools.pairwise(bounds):
        j = small.first + least + start  # the first index of the convolution
        low, high = max(j, large.first), min(j + small.weights.size + end - start - 1, large.first + large.weights.size)
        if low < high:
            masses = large.weights[low - large.first : high - large.first]
            at = low + int(steps[start]) - first
            for place, shares in ((at + 1, upper[start:end]), (at, 1.0 - upper[start:end])):
                sums = np.convolve(small.weights, shares)[low - j : high - j]
                weights[place : place + high - low] += masses * sums


def _cut(total: _Sum, h: float, t: int) -> _Sum:
    """Cut off the ends with negligible mass of Q below, and of P above."""
    q = total.weights
    with np.errstate(over="ignore", under="ignore"):
        p = q * np.exp((total.first + np.arange(q.size)) * h - math.log(total.terms))
    least = _CUT * total.terms / t
    low = int(np.searchsorted(np.cumsum(q), least))
    high = q.size - int(np.searchsorted(np.cumsum(p[::-1]), least))
    lost_q = total.lost_q + float(q[:low].sum() + q[high:].sum())
    lost_p = total.lost_p + float(p[:low].sum() + p[high:].sum())
    kept = q[low:high] * ((1.0 - lost_q) / q[low:high].sum())  # else rounding would double with the terms
    return _Sum(total.terms, kept, total.first + low, lost_q, lost_p)
