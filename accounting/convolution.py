"""ε of T steps from the privacy losses of each, by a convolution under an exponential tilt.

One step is a grid: weights w_j ≥ 0 at the losses x_j = o + jh, and a weight w_∞ at ∞, of the loss L = ln P/Q under P. T
steps have the loss of a sum, and

    δ(ε) = 1 − (1 − w_∞)^T + Σ_{x > ε} (1 − e^{ε − x}) w_T(x).

By Chernoff, ln Σ_{x ≥ ε} w_T(x) ≤ T K(θ) − θε with K(θ) = ln Σ w_j e^{θx_j}. At the θ that minimises this bound's ε,
the T-fold sum of the tilted weights v_j = w_j e^{θx_j − K(θ)} is spread about that ε. The tilted weights are
transformed, so that the digits lie where δ is made, be it 1e-5 or 1e-250, and a window of a few standard deviations is
enough:

    δ(ε) = e^{TK(θ) − θε} Σ_{x > ε} (e^{−θ(x − ε)} − e^{−(θ+1)(x − ε)}) v_T(x).

For steps of several kinds (`Part`), on grids of one interval, the K add up and so do the ln f.

These errors are added for an upper bound of ε, and subtracted for a lower one: what the window leaves out, which wraps
around (by Chernoff's bound); the rounding of the transform f, which T ln f multiplies by T; and the rounding of the
weights and of K, T times. ln f is computed as ln(1 + (f − 1)) without the atom at j = 0, so that its rounding is
relative to the weight off that atom (for a million steps of a small rate nearly all weight is on it).

Functions take:
    theta: the tilt θ.
    upper: an upper bound; else a lower one.
    parts: (losses of a step, number of steps) for each kind, on grids of one interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from accounting.mechanism import NoAnswer
from accounting.search import golden
from accounting.series import Array

#: The longest transform.
LONGEST = 2**21
_TRIES = 9
#: The tilt for δ at every ε: negligible.
_LEAST_TILT = 1e-9
#: The tilted weight outside the window, on each side.
_LOG_OUTSIDE = math.log(1e-13)
_EPS = float(np.finfo(float).eps)
#: What rounding of a step's weights may add to ln δ, quadrature included.
_STEP_ROUNDING = 1e-13


@dataclass(frozen=True)
class Losses:
    """One step: `weights` [n] at the losses `offset` + (`first` + 0 .. n − 1)·`interval`, and `at_infinity`."""

    weights: Array
    first: int
    interval: float
    at_infinity: float = 0.0
    offset: float = 0.0

    @property
    def at(self) -> Array:
        """The losses on the grid, [n], rising."""
        return self.offset + self.interval * (self.first + np.arange(self.weights.size))

    def reversed(self) -> Losses:
        """The losses of (Q, P); `at_infinity` must also bound the mass of Q without P."""
        with np.errstate(divide="ignore"):
            weights = np.exp(np.log(self.weights) - self.at)[::-1]
        last = self.first + self.weights.size - 1
        return Losses(weights, -last, self.interval, self.at_infinity, -self.offset)


#: Steps of one kind: the losses of one, and their number.
Part = tuple[Losses, float]


class Tilt:
    """K and its exponential family, for one step."""

    def __init__(self, losses: Losses) -> None:
        kept = losses.weights > 0
        self.at = losses.at[kept]
        self.log_weights = np.log(losses.weights[kept])

    def log_moment(self, theta: float) -> float:
        """K(θ)."""
        terms = self.log_weights + theta * self.at
        top = float(terms.max())
        return top + math.log(float(np.exp(terms - top).sum()))

    def variance(self, theta: float) -> float:
        """The variance of the losses under the tilt."""
        weights = np.exp(self.log_weights + theta * self.at - self.log_moment(theta))
        return float(weights @ (self.at - float(weights @ self.at)) ** 2)


class Tilted:
    """ΣTK: K for the sum of the losses of all steps."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = [(Tilt(losses), steps) for losses, steps in parts]

    def log_moment(self, theta: float) -> float:
        """ΣTK(θ)."""
        return sum(steps * tilt.log_moment(theta) for tilt, steps in self.parts)

    def best(self, log_delta: float) -> float:
        """θ that minimises Chernoff's ε = (ΣTK(θ) − ln δ)/θ, which is unimodal in θ."""

        def bound(log_theta: float) -> float:
            theta = math.exp(log_theta)
            return (self.log_moment(theta) - log_delta) / theta

        largest = max(float(np.abs(tilt.at).max()) for tilt, _ in self.parts)
        high = math.log(1e4) - math.log(max(largest, 1e-300))
        return math.exp(golden(bound, high - 60.0, high, tolerance=0.02)[0])

    def window(self, theta: float) -> tuple[float, float]:
        """The ends between which the sum lies under the tilt, except for e^_LOG_OUTSIDE on each side."""
        here = self.log_moment(theta)
        spread = math.sqrt(sum(max(tilt.variance(theta), 1e-300) * steps for tilt, steps in self.parts))

        def end(sign: float) -> float:
            # slopes for normal and longer tails; each gives a bound, and the nearest end is used
            slopes = (k / spread for k in (0.3, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0))
            return min((self.log_moment(theta + sign * t) - here - _LOG_OUTSIDE) / t for t in slopes)

        return -end(-1.0), end(1.0)


def epsilon_of(
    losses: Losses, steps: float, delta: float, upper: bool = True, theta: float | None = None
) -> tuple[float, float]:
    """`epsilon_of_parts` for `steps` equal steps.

    Args:
        losses: of one step, on a grid.
    """
    return epsilon_of_parts([(losses, steps)], delta, upper, theta)


def epsilon_of_parts(
    parts: Sequence[Part], delta: float, upper: bool = True, theta: float | None = None
) -> tuple[float, float]:
    """(ε ≥ 0 at δ after all steps, the tilt θ): an upper or lower bound; ∞ if the w_∞ alone exceed δ.

    Args:
        theta: the initial tilt; by default the best by Chernoff's bound, which is nearly optimal.

    Raises:
        NoAnswer: the window has more than `LONGEST` points.
    """
    infinite = _infinite(parts)
    if infinite >= delta:
        return math.inf, 0.0
    tilted, log_target = Tilted(parts), math.log(delta - infinite)
    log_target -= (_STEP_ROUNDING if upper else -_STEP_ROUNDING) * sum(steps for _, steps in parts)
    theta = tilted.best(log_target) if theta is None else theta
    for turn in range(_TRIES):
        at, log_deltas = _log_deltas(parts, tilted, theta, upper)
        found = _crossing(at, log_deltas, log_target, upper)
        if found is not None:
            return found, theta
        if theta * (at[-1] - at[0]) < 0.01:
            break
        theta *= 0.3 if turn < 4 else 1e-3  # far from normal (rare large losses) ε lies before the window
    return (math.inf if upper else 0.0), theta


def deltas_of(parts: Sequence[Part], upper: bool = True) -> tuple[Array, Array]:
    """(ε, δ(ε)), both [n], at all losses where δ has a kink, of either sign.

    Raises:
        NoAnswer: the window has more than `LONGEST` points.
    """
    infinite, rounding = _infinite(parts), _STEP_ROUNDING * sum(steps for _, steps in parts)
    at, log_deltas = _log_deltas(parts, Tilted(parts), _LEAST_TILT, upper)
    return at, np.clip(np.exp(log_deltas + (rounding if upper else -rounding)) + infinite, 0.0, 1.0)


def _infinite(parts: Sequence[Part]) -> float:
    """The probability under P of an infinite loss in any step."""
    if any(losses.at_infinity >= 1 for losses, _ in parts):
        return 1.0
    return -math.expm1(sum(steps * math.log1p(-losses.at_infinity) for losses, steps in parts))


def _log_deltas(parts: Sequence[Part], tilted: Tilted, theta: float, upper: bool) -> tuple[Array, Array]:
    """All losses of the window; and ln δ there, bounded from above or below."""
    h, log_moment = parts[0][0].interval, tilted.log_moment(theta)
    drift = sum(steps * losses.offset for losses, steps in parts)
    low, high = tilted.window(theta)
    begin = math.floor((low - drift) / h)
    points = math.ceil((high - drift) / h) - begin + 1
    if abs(begin) > 2**52:
        raise NoAnswer(f"losses {h:.3g} apart at {low:.3g} are too few floats")
    if points > LONGEST:
        raise NoAnswer(f"{points:,} losses {h:.3g} apart, of {LONGEST:,} at most")
    length = _quick_length(points)
    values, rounding = _convolved(parts, tilted, theta, begin, length)
    first = _sums(values, theta * h)
    sums = first - _sums(values, (theta + 1.0) * h)
    largest = math.exp(-theta * math.log1p(1.0 / theta)) / (1.0 + theta)  # max of e^−θx − e^−(θ+1)x
    all_of_them = math.exp(-theta * h) * math.expm1(-h) / math.expm1(-theta * h) / -math.expm1(-(theta + 1.0) * h)
    error = math.exp(_LOG_OUTSIDE) * largest + rounding * min(length * largest, all_of_them) + 8.0 * _EPS * first
    at = drift + (begin + np.arange(length)) * h
    with np.errstate(divide="ignore"):
        return at, log_moment - theta * at + np.log(np.maximum(sums + (error if upper else -error), 0.0))


def _quick_length(points: int) -> int:
    """The smallest of 2^a·{1, 5/4, 3/2} that is at least `points`: such transforms are fast."""
    power = 1 << max(4, (points - 1).bit_length())
    return next((n for n in (power * 5 // 8, power * 3 // 4) if n >= points), power)


def _convolved(parts: Sequence[Part], tilted: Tilted, theta: float, begin: int, length: int) -> tuple[Array, float]:
    """v_T at index (begin + 0 .. length − 1), with wrap-around; and a bound on the rounding of each."""
    frequencies = np.arange(length // 2 + 1)
    log_power, turns = np.zeros(frequencies.size), frequencies * (begin % length) % length / length
    moved = 0.0  # weight off the atom at 0, all steps
    for (losses, steps), (tilt, _) in zip(parts, tilted.parts, strict=True):
        less, off = _transform(losses, theta, tilt.log_moment(theta), length)
        with np.errstate(divide="ignore"):
            near_one = 0.5 * np.log1p(np.maximum(less.real * (2.0 + less.real) + less.imag**2, -1.0))
            log_magnitude = np.where(np.abs(less) < 0.5, near_one, np.log(np.hypot(1.0 + less.real, less.imag)))
        log_power += steps * np.minimum(log_magnitude, 0.0)
        turned = steps * (np.arctan2(less.imag, 1.0 + less.real) / (2.0 * math.pi))
        turns += turned - np.floor(turned)
        moved += steps * off
    power, phase = np.exp(log_power), 2.0 * math.pi * turns
    values = np.fft.irfft(power * (np.cos(phase) + 1j * np.sin(phase)), length)
    rounding = 8.0 * _EPS * (moved + len(parts) * math.log2(length)) * math.log2(length) * float(power.mean())
    return np.maximum(values, 0.0), rounding


def _transform(losses: Losses, theta: float, log_moment: float, length: int) -> tuple[np.ndarray, float]:
    """f − 1 of the tilted weights of one step, wrapped at `length`; and their weight off the atom at 0."""
    with np.errstate(divide="ignore"):
        tilted = np.exp(np.log(losses.weights) + theta * losses.at - log_moment)
    front = losses.first % length
    folded = np.zeros(-(-(front + tilted.size) // length) * length)
    folded[front : front + tilted.size] = tilted
    folded = folded.reshape(-1, length).sum(axis=0)
    folded[0] = 0.0
    off = float(folded.sum())
    return np.fft.rfft(folded) - off, off


def _sums(values: Array, rate: float) -> Array:
    """Σ_{j ≥ i} e^{−rate (j − i)} values_j for every i: from the right, by doubling."""
    total, reach = values.copy(), 1
    while reach < values.size:
        factor = math.exp(-rate * reach)
        if factor < 1e-30:
            break
        total[:-reach] += factor * total[reach:]
        reach *= 2
    return total


def _crossing(at: Array, log_deltas: Array, log_target: float, upper: bool) -> float | None:
    """The ε ≥ 0 from which on ln δ(ε) is at most the target; None if that is before the window.

    Between two losses δ is linear in e^ε.
    """
    over = np.flatnonzero(log_deltas > log_target)
    if over.size == 0:
        return 0.0 if at[0] <= 0 else None
    last = int(over[-1])
    if last == at.size - 1:
        return math.inf if upper else max(0.0, float(at[-1]))
    left, right = float(at[last]), float(at[last + 1])
    if right - left > 700.0:
        return max(0.0, right if upper else left)
    above, below = math.expm1(min(log_deltas[last] - log_target, 700.0)), math.expm1(log_deltas[last + 1] - log_target)
    return max(0.0, left + math.log1p(above / (above - below) * math.expm1(right - left)))
