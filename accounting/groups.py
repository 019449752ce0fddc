"""The dominating pair of a Poisson step for a group of records, such as those of one person.

Each of k records is in the sample independently. With probability w_j = C(k,j) q^j (1 − q)^{k−j}, j of them are, and
move the sum by at most jC. With Q = N(0, σ²), the pair on removing all of them is (P, Q), and on adding them (Q, P),

    P = Σ_j w_j N(j, σ²),   loss ℓ(x) = ln Σ_j w_j e^{(jx − j²/2)/σ²}

(Choquette-Choo, Ganesh, Steinke and Thakurta 2023, arXiv:2310.15526, mixtures of Gaussians; dp-accounting's
`MixtureOfGaussiansDpEvent`). In large groups a rare j counts as k. This moves mass upwards; as P/Q rises in x, δ(ε)
only grows, in both directions. ℓ is convex and rising, so Newton's method from the right finds every ℓ⁻¹(ε).
"""

import math

import numpy as np
from scipy.stats import binom

from accounting.dominating_pairs import Pair, Regime, both_ways
from accounting.mechanism import NoAnswer
from accounting.series import Array

#: The probability below which j counts as k; the most parts.
_LOG_RARE, _MOST = math.log(1e-25), 100
_TURNS = 60


def of_group(sigma: float, q: float, size: int) -> list[list[Regime]]:
    """The regimes of one step in both directions: k records removed, and added.

    Args:
        size: k, at least 1.

    Raises:
        NoAnswer: the group has too many parts.
    """
    counts, log_weights = _parts(q, size)
    shares = np.exp(log_weights)

    def loss(x: float) -> float:
        return float(_loss(np.array([x]), counts, log_weights, sigma)[0][0])

    def inverse(eps: Array) -> Array:
        return _inverse(np.asarray(eps, dtype=float), counts, log_weights, sigma)

    parts = tuple((float(share), float(count)) for share, count in zip(shares, counts, strict=True))
    return both_ways(Pair(sigma, parts, ((1.0, 0.0),), loss, inverse))


def _parts(q: float, size: int) -> tuple[Array, Array]:
    """(j, ln w_j), both [m]: the common j, and k with the mass of the rare ones."""
    common = binom.logsf(np.arange(min(size, _MOST)), size, q) > _LOG_RARE
    if common.all() and size > _MOST:
        raise NoAnswer(f"{size * q:,.0f} records of a group in a batch on average, too many for {_MOST} at most")
    last = int(common.sum())
    counts = np.arange(last + 1.0)
    with np.errstate(divide="ignore"):
        log_weights = np.log(binom.pmf(counts, size, q))  # logpmf loses all digits for large k
    if last < size:
        counts, log_weights = np.append(counts, size), np.append(log_weights, binom.logsf(last, size, q))
    log_weights[0] = size * math.log1p(-q)  # exact, because losses may be this small
    kept = log_weights > -700.0
    return counts[kept], log_weights[kept]


def _loss(x: Array, counts: Array, log_weights: Array, sigma: float) -> tuple[Array, Array]:
    """(ℓ(x), ℓ'(x)), both [n], by ln(1 + Σ_j w_j (e^u − 1)), which keeps the digits of small losses."""
    exponents = (counts[:, None] * x - 0.5 * counts[:, None] ** 2) / sigma / sigma
    terms = log_weights[:, None] + exponents
    top = terms.max(axis=0)
    scaled = np.exp(terms - top)
    total = scaled.sum(axis=0)
    small = exponents.max(axis=0) < 30.0
    near = np.exp(log_weights) @ np.expm1(np.where(small, exponents, 0.0))
    values = np.where(small, np.log1p(np.maximum(near, -1.0 + 1e-16)), top + np.log(total))
    return values, (counts @ scaled) / total / sigma / sigma


def _inverse(eps: Array, counts: Array, log_weights: Array, sigma: float) -> Array:
    """ℓ⁻¹(ε), [n]; −∞ where ε ≤ ln w_0."""
    squared = sigma * sigma
    some = counts > 0
    j, log_w = counts[some], log_weights[some]
    x = np.full(eps.shape, math.inf)
    for count, log_weight in zip(j, log_w, strict=True):  # no single term exceeds the sum: x lies left of each of these
        x = np.minimum(x, ((eps - log_weight) * squared + 0.5 * count * count) / count)
    inside = eps > log_weights[0] if counts[0] == 0 else np.ones(eps.shape, dtype=bool)
    x = np.where(inside, x, -math.inf)
    at, target = x[inside], eps[inside]
    for _ in range(_TURNS):
        values, slopes = _loss(at, counts, log_weights, sigma)
        step = np.minimum((values - target) / np.maximum(slopes, 1e-300), np.abs(at) + 40.0 * sigma)
        at = at - np.maximum(step, 0.0)
        if np.all(step <= 1e-13 * np.maximum(np.abs(at), sigma)):
            break
    x[inside] = at
    return x
