"""Log moments of one step's privacy loss at full precision, for `moments` and `rdp`.

With μ₀ = N(0, σ²), μ₁ = N(1, σ²), μ = (1 − q)μ₀ + qμ₁ and 1 + w = μ/μ₀, the log moment of order a = λ + 1 > 1 is

    ln A_a,   A_a = E_{μ₀}[(1 + w)^a],   so that the Rényi divergence of order a is ln A_a/(a − 1),

and the divergence of μ₀ from μ is no larger (Mironov, Talwar and Zhang 2019, Theorem 5). E[w] = 0, hence

    A_a − 1 = E_{μ₀}[(1 + w)^a − 1 − aw],

whose integrand is positive (Bernoulli). ln A_a = log1p(A_a − 1) keeps the digits that ln of a sum near 1 loses.

- Whole orders: as E_{μ₀}[(μ₁/μ₀)^k] = exp((k² − k)/2σ²),

      A_a − 1 = Σ_{k=2}^{a} C(a,k) q^k (1−q)^{a−k} expm1((k² − k)/2σ²).

  All terms are positive, so their logarithms add up to about 1e-14 relative at any q and σ.
- Other orders: the two-sided series of Mironov, Talwar and Zhang 2019 (section 3.3) alternates, and falls like a power
  if q is not small and σ < 1; libraries drop the orders at which it does not converge. Here the expectation is computed
  directly: the trapezoidal rule in t = z/σ adds up positive terms. Its error is about exp(−2π²σ/h) at step h, because
  the integrand is analytic up to branch points at a distance of πσ (Trefethen and Weideman 2014, Theorem 5.1).
- q = 1: ln A_a = (a² − a)/2σ².
"""

import functools
import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from accounting.gaussian import amplified

Array = NDArray[Any]  # of float64, which numpy cannot always tell

#: The largest order for the sum over k; the most points of a rule, and its least σ. Beyond these the result is an upper
#: bound on ln A, which is close where there is so little noise.
WHOLE_ORDERS, _POINTS, _LEAST_SIGMA = 1024, 50_000, 1e-4
#: Gaussian tails are cut at this many standard deviations: Φ(−9.5) = 1e-21.
_REACH = 9.5
#: ln of 1e-16.5, the relative error of the trapezoidal rule.
_DIGITS = 38.0


def log_moments(lambdas: ArrayLike, sigma: float, q: float) -> Array:
    """ln A_a of one step at the orders a = λ + 1.

    Args:
        lambdas: λ > 0, [n] or a number.

    Returns:
        [n], in (0, ∞], with relative error at most 1e-11. ∞ on overflow, or if more than 5e4 points are needed (large
        orders with little noise, where no bound exists); ∞ is still an upper bound.
    """
    orders = np.atleast_1d(np.asarray(lambdas, dtype=float))
    with np.errstate(over="ignore", divide="ignore"):
        if q == 1.0:
            return 0.5 * orders * (orders + 1.0) / sigma / sigma
        found = np.full(orders.shape, math.inf)
        whole = (orders % 1 == 0) & (orders < WHOLE_ORDERS)
        if whole.any():
            found[whole] = _whole(orders[whole].astype(int) + 1, sigma, q)
        if not whole.all():
            found[~whole] = _fractional(orders[~whole], sigma, q)
        return found


def _whole(orders: NDArray[np.int_], sigma: float, q: float) -> Array:
    """ln A_a by the sum over k, for whole a from 2 to `WHOLE_ORDERS` ([n])."""
    a, k = orders[:, None], np.arange(2, int(orders.max()) + 1)
    factorials = _log_factorials(WHOLE_ORDERS)
    log_terms = factorials[a] - factorials[k] - factorials[np.maximum(a - k, 0)]
    log_terms = log_terms + (k * math.log(q) + _log_expm1(k * (k - 1.0), sigma)) + (a - k) * math.log1p(-q)
    return np.logaddexp(0.0, _log_sum(np.where(k <= a, log_terms, -math.inf)))


@functools.cache
def _log_factorials(largest: int) -> Array:
    """ln n! for n = 0 to `largest`, without the rounding of a running sum."""
    return np.array([math.lgamma(n + 1.0) for n in range(largest + 1)])


def _log_expm1(twice: Array, sigma: float) -> Array:
    """ln expm1(x) at x = twice/2σ²; x itself may over- or underflow."""
    x = 0.5 * twice / sigma / sigma
    tiny = x < 1e-17
    return np.where(tiny, np.log(0.5 * twice) - 2.0 * math.log(sigma), x + np.log(-np.expm1(-np.where(tiny, 1.0, x))))


def _fractional(lambdas: Array, sigma: float, q: float) -> Array:
    """ln A at λ by the trapezoidal rule over t = z/σ, from −9.5 to a/σ + 9.5 for the largest order. [n].

    For a ≤ 2 there are only two bumps, at 0 and a/σ; the gap between distant ones is skipped. Orders share one rule if
    that takes few enough points.
    """
    if sigma < _LEAST_SIGMA:
        return np.array([_minkowski(float(lam), sigma, q) for lam in lambdas])
    largest = float(lambdas.max())
    last, step = (largest + 1.0) / sigma, _step(float(lambdas.min()), sigma, q)
    spans = [(-_REACH, last + _REACH)]
    if lambdas.size == 1 and largest <= 1.0 and last > 2.0 * _REACH:
        spans = [(-_REACH, _REACH), (last - _REACH, last + _REACH)]
    if not lambdas.size * sum(high - low for low, high in spans) / step < _POINTS:
        if lambdas.size > 1:
            return np.concatenate([_fractional(lambdas[place : place + 1], sigma, q) for place in range(lambdas.size)])
        return np.array([_minkowski(largest, sigma, q)])
    t = step * np.concatenate([np.arange(math.floor(low / step), math.ceil(high / step) + 1) for low, high in spans])
    log_terms = log_excess(lambdas[:, None], log_ratio(t, sigma, q)) - 0.5 * t * t
    return np.logaddexp(0.0, _log_sum(log_terms) + math.log(step / math.sqrt(2.0 * math.pi)))


def _minkowski(lam: float, sigma: float, q: float) -> float:
    """An upper bound: the norm of order a of 1 − q + qμ₁/μ₀ is at most 1 − q + q exp(λ/2σ²)."""
    return (lam + 1.0) * amplified(0.5 * lam / sigma / sigma, q)


def _step(lam: float, sigma: float, q: float) -> float:
    """The step h for which exp(−2πd/h + d²/2), d = πσ, times the density at the branch points is small enough.

    The branch points lie at z = z₀ ± iπσ², where both parts of μ are equal; with little noise this is far out in both
    tails. A Gaussian alone needs no step below 0.5.
    """
    centre = min(1e3, max(0.0, sigma * (math.log1p(-q) - math.log(q)) + 0.5 / sigma))
    needed = min(_DIGITS, max(0.0, _DIGITS - 2.0 * math.log(q) - min(0.0, math.log(lam)) - 0.5 * centre * centre))
    distance = math.pi * min(sigma, 2.5)
    return min(0.5, 2.0 * math.pi * distance / (needed + 0.5 * distance * distance))


def log_ratio(t: Array, sigma: float, q: float) -> Array:
    """ln(1 + w) = ln μ/μ₀ at z = tσ.

    Args:
        t: z/σ, of any shape.
    """
    return log_mixed(t / sigma - 0.5 / sigma / sigma, q)


def log_mixed(y: Array, q: float) -> Array:
    """ln(1 − q + qe^y): the loss of a step on a sample; relative error a few ulp.

    Args:
        y: the loss of a step on all records, of any shape.
    """
    if q == 1.0:
        return y
    near = np.log1p(q * np.expm1(np.minimum(y, 600.0)))
    return np.where(y < 600.0, near, np.logaddexp(0.0, y + math.log(q)))  # ln(1 − q) is negligible there


def unmixed(losses: Array, q: float) -> Array:
    """y with log_mixed(y, q) = `losses`; −∞ where losses are at most ln(1 − q).

    Args:
        losses: of any shape.
    """
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        near = np.log1p(np.maximum(np.expm1(np.minimum(losses, 30.0)) / q, -1.0)) if q < 1.0 else losses
        return np.where(losses < 30.0, near, losses - math.log(q))


def log_excess(lam: Array, s: Array) -> Array:
    """ln[(1 + w)^a − 1 − aw] at s = ln(1 + w), a = λ + 1: the integrand; −∞ at s = 0.

    Args:
        lam, s: λ > 0, and s; they broadcast.
    """
    a = lam + 1.0
    powers = s * a
    small, large = np.abs(powers) < 0.05, powers > 30.0
    series, log_a = np.zeros_like(powers), np.log1p(lam)
    for k in range(9, 1, -1):  # Σ (a^k − a)s^k/k!, over s²; a^k − a without loss as a → 1
        series = series * s + a * np.expm1((k - 1) * log_a) / math.factorial(k)
    middle = np.where(small | large, 1.0 / a, s)
    direct = np.exp(middle) * np.expm1(lam * middle) - lam * np.expm1(middle)
    far = np.where(large, s, 0.0)
    beyond = a * far + np.log1p(np.where(large, lam * np.exp(-a * far) - a * np.exp(-lam * far), 0.0))
    with np.errstate(divide="ignore"):
        near = 2.0 * np.log(np.abs(s)) + np.log(np.where(small, series, 1.0))
    return np.where(small, near, np.where(large, beyond, np.log(direct)))


def _log_sum(log_terms: Array) -> Array:
    """ln Σ exp over the last axis."""
    top = log_terms.max(axis=-1, keepdims=True)
    finite = np.isfinite(top)
    summed = np.log(np.exp(np.where(finite, log_terms - np.where(finite, top, 0.0), 0.0)).sum(-1, keepdims=True))
    return np.where(finite, top + summed, top)[..., 0]
