"""ε of T steps from the privacy losses of one: a T-fold convolution under an exponential tilt.

One step is a grid: weights w_j ≥ 0 at the losses x_j = jh, and a weight w_∞ at ∞, of the distribution of the loss
L = ln P/Q under P. T steps have the loss of a sum, and

    δ(ε) = 1 − (1 − w_∞)^T + Σ_{x > ε} (1 − e^{ε − x}) w_T(x).

By Chernoff, ln Σ_{x ≥ ε} w_T(x) ≤ T K(θ) − θε with K(θ) = ln Σ w_j e^{θx_j}. At the θ that makes this bound's ε
smallest, the tilted weights v_j = w_j e^{θx_j − K(θ)} have their T-fold sum spread about that very ε. It is the tilted
weights that are transformed, so that the digits lie where δ is made, be it 1e-5 or 1e-300, and a window of a few of
their standard deviations is enough:

    δ(ε) = e^{TK(θ) − θε} Σ_{x > ε} (e^{−θ(x − ε)} − e^{−(θ+1)(x − ε)}) v_T(x).

What the window leaves out wraps around; Chernoff's bound of it, and of the rounding of the transform, is added for an
upper bound of ε and taken off for a lower one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from accounting.base import NoAnswer

Array = NDArray[np.float64]
#: The longest transform.
LONGEST = 2**20
#: What the window leaves out of the tilted weights, on each side.
_LOG_OUTSIDE = math.log(1e-13)
_TRIES = 16
_GOLDEN = 0.5 * (math.sqrt(5.0) - 1.0)


@dataclass(frozen=True)
class Losses:
    """One step: `weights` [n] at the losses (first + 0 .. n − 1)·`interval`, and `at_infinity`."""

    weights: Array
    first: int
    interval: float
    at_infinity: float = 0.0


class _Tilt:
    """K and its exponential family."""

    def __init__(self, losses: Losses) -> None:
        kept = losses.weights > 0
        self.at = (losses.first + np.flatnonzero(kept)) * losses.interval
        self.log_weights = np.log(losses.weights[kept])

    def log_moment(self, theta: float) -> float:
        """K(θ)."""
        terms = self.log_weights + theta * self.at
        top = float(terms.max())
        return top + math.log(float(np.exp(terms - top).sum()))

    def best(self, steps: float, log_delta: float) -> tuple[float, float]:
        """(θ, ε) at which Chernoff's ε = (T K(θ) − ln δ)/θ is smallest: unimodal in θ."""

        def bound(log_theta: float) -> float:
            theta = math.exp(log_theta)
            return (steps * self.log_moment(theta) - log_delta) / theta

        high = math.log(1e4 / max(float(np.abs(self.at).max()), 1e-300))
        low = high - 60.0
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        at_left, at_right = bound(left), bound(right)
        while high - low > 0.02:
            if at_left <= at_right:
                high, right, at_right = right, left, at_left
                left = high - _GOLDEN * (high - low)
                at_left = bound(left)
            else:
                low, left, at_left = left, right, at_right
                right = low + _GOLDEN * (high - low)
                at_right = bound(right)
        return math.exp(left), at_left

    def window(self, theta: float, steps: float) -> tuple[float, float]:
        """Between which losses the T-fold sum lies under the tilt, but for e^_LOG_OUTSIDE on each side."""
        here = self.log_moment(theta)
        weights = np.exp(self.log_weights + theta * self.at - here)
        mean = float(weights @ self.at)
        spread = math.sqrt(max(float(weights @ (self.at - mean) ** 2), 1e-300) * steps)
        ends = []
        for sign in (-1.0, 1.0):
            # steps of the right size for normal tails; each gives a bound, and the nearest end counts
            slopes = [sign * k / spread for k in (0.5, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0)]
            ends.append(
                min(
                    (sign * (steps * (self.log_moment(theta + t) - here) - _LOG_OUTSIDE) / t for t in slopes),
                    default=math.inf,
                )
            )
        return -ends[0], ends[1]


def epsilon_of(losses: Losses, steps: float, delta: float, upper: bool = True) -> tuple[float, float]:
    """(ε at δ after `steps` steps, the tilt θ); ε is an upper bound, or else a lower one; ∞ if w_∞ alone is above δ.

    Raises:
        NoAnswer: the window has more than `LONGEST` points.
    """
    infinite = -math.expm1(steps * math.log1p(-losses.at_infinity)) if losses.at_infinity else 0.0
    if infinite >= delta:
        return math.inf, 0.0
    tilt, target = _Tilt(losses), delta - infinite
    theta, chernoff = tilt.best(steps, math.log(target))
    for _ in range(_TRIES):
        low, high = tilt.window(theta, steps)
        window = min(low, chernoff), max(high, chernoff)
        log_deltas, at = _log_deltas(losses, theta, tilt.log_moment(theta), steps, window, upper)
        found = _crossing(at, log_deltas - math.log(target), upper)
        if found is not None:
            return found, theta
        theta *= 0.25  # far from normal, as of few steps with rare large losses, ε lies before the window begins
    return (math.inf if upper else 0.0), theta


def _log_deltas(
    losses: Losses, theta: float, log_moment: float, steps: float, window: tuple[float, float], upper: bool
) -> tuple[Array, Array]:
    """ln δ, bounded from above or below, at all losses of the window; and these losses."""
    h = losses.interval
    begin, end = math.floor(window[0] / h), math.ceil(window[1] / h)
    length = 1 << max(4, (end - begin).bit_length())
    if length > LONGEST:
        raise NoAnswer(f"{length} losses {h:g} apart, of {LONGEST} at most")
    values, rounding = _convolved(losses, theta, log_moment, steps, begin, length)
    sums = _sums(values, theta * h) - _sums(values, (theta + 1.0) * h)
    error = math.exp(_LOG_OUTSIDE) + rounding * min(length, 1.0 / -math.expm1(-theta * h))
    at = (begin + np.arange(length)) * h
    with np.errstate(divide="ignore"):
        log_sums = np.log(np.maximum(sums + (error if upper else -error), 0.0))
    return steps * log_moment - theta * at + log_sums, at


def _convolved(
    losses: Losses, theta: float, log_moment: float, steps: float, begin: int, length: int
) -> tuple[Array, float]:
    """v_T at (begin + 0 .. length − 1)·h, what lies outside wrapped around; and a bound on each one's rounding."""
    index = losses.first + np.arange(losses.weights.size)
    with np.errstate(divide="ignore"):
        tilted = np.exp(np.log(losses.weights) + theta * losses.interval * index - log_moment)
    folded = np.zeros(-(-tilted.size // length) * length)
    folded[: tilted.size] = tilted
    transform = np.fft.rfft(folded.reshape(-1, length).sum(axis=0))
    magnitude = np.minimum(np.abs(transform), 1.0)
    with np.errstate(divide="ignore"):
        power = np.exp(steps * np.log(magnitude))
    values = np.fft.irfft(power * np.exp(1j * ((steps * np.angle(transform)) % (2.0 * math.pi))), length)
    # relative to |f|^T each angle is off by T ulp, and each magnitude by as much where it counts
    rounding = 16.0 * np.finfo(float).eps * (steps + math.log2(length)) * float(power.mean())
    shift = (begin - int(steps) * losses.first) % length
    return np.maximum(np.roll(values, -shift), 0.0), rounding


def _sums(values: Array, rate: float) -> Array:
    """Σ_{j ≥ i} e^{−rate (j − i)} values_j for every i: from the right, by doubling."""
    total, reach = values.copy(), 1
    while reach < values.size:
        factor = math.exp(-rate * reach)
        if factor == 0.0:
            break
        total[:-reach] += factor * total[reach:]
        reach *= 2
    return total


def _crossing(at: Array, log_ratios: Array, upper: bool) -> float | None:
    """ε ≥ 0 where ln δ(ε)/target, bounded from above or below, falls to 0; None if that is before the window begins.

    Between two losses δ is linear in e^ε, if these are all the losses there are. Far from the middle of the tilt a
    bound from below has no digits left and is −∞: the last one above 0 counts.
    """
    above = np.flatnonzero(log_ratios > 0)
    if above.size == 0:
        return 0.0 if upper and at[0] <= 0 else None
    first = int(above[-1]) + 1
    if first == at.size:
        return math.inf if upper else max(0.0, float(at[-1]))
    left, right = float(at[first - 1]), float(at[first])
    under = log_ratios[first]
    if not upper or right - left > 700.0 or log_ratios[first - 1] > 700.0:
        return max(0.0, right if upper else left)
    over = math.exp(log_ratios[first - 1])
    share = (over - 1.0) / (over - math.exp(under))
    return max(0.0, left + math.log1p(share * math.expm1(right - left)))
