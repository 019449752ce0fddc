"""The moments accountant of Abadi et al. 2016: a tail bound on the privacy loss by its moments of order λ = 1 to 32.

With μ₀ = N(0, σ²), μ₁ = N(1, σ²), μ = (1 − q)μ₀ + qμ₁, the log moments of one step are

    α(λ) = ln max(E_{z~μ}[(μ/μ₀)^λ], E_{z~μ₀}[(μ₀/μ)^λ]),

of which the first is the larger (Mironov, Talwar and Zhang 2019, section 3). They add up over adaptive steps (Theorem
2.1), and Markov's inequality gives ε = min_λ (Tα(λ) − ln δ)/λ (Theorem 2.2).

The first expectation is E_{μ₀}[(μ/μ₀)^a] with a = λ + 1, and as E_{μ₀}[(μ₁/μ₀)^k] = exp((k² − k)/2σ²) it is a
binomial sum. Taking from each term what it is at σ = ∞, where they add up to 1,

    A_a = 1 + Σ_{k=2}^{a} C(a,k) q^k (1−q)^{a−k} expm1((k² − k)/2σ²)

has positive terms only: ln A_a = log1p of their sum is right to about 1e-14 relative, at any q and σ, where ln of the
plain sum loses all digits as A_a → 1. At q = 1 the term k = a is left, and ln A_a = (a² − a)/2σ².
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from accounting.base import Accountant, SubsampledGaussian


def log_moment(order: int, sigma: float, q: float) -> float:
    """α(λ) of one step at the whole order λ = `order` ≥ 1, for σ > 0 and 0 < q ≤ 1; ∞ where it overflows."""
    a = order + 1
    if q == 1.0:
        return 0.5 * (a * a - a) / sigma / sigma
    log_q, log_rest = math.log(q), math.log1p(-q)
    log_terms = [
        math.log(math.comb(a, k)) + k * log_q + (a - k) * log_rest + _log_expm1(k * k - k, sigma)
        for k in range(2, a + 1)
    ]
    top = max(log_terms)
    if top == math.inf:
        return math.inf
    log_sum = top + math.log(math.fsum(math.exp(term - top) for term in log_terms))
    return log_sum + math.log1p(math.exp(-log_sum)) if log_sum > 0 else math.log1p(math.exp(log_sum))


def _log_expm1(twice: int, sigma: float) -> float:
    """ln expm1(x) at x = twice/2σ²; x itself may over- or underflow."""
    x = 0.5 * twice / sigma / sigma
    if x < 1e-17:
        return math.log(0.5 * twice) - 2.0 * math.log(sigma)
    return x + math.log(-math.expm1(-x))


class Moments(Accountant):
    """ε by the best of some whole orders.

    Args:
        orders: the λ that are tried; by default 1 to 32, as published.
    """

    def __init__(self, orders: Iterable[int] = range(1, 33)) -> None:
        self.orders = tuple(orders)

    def _inside(self, mechanism: SubsampledGaussian, steps: float, delta: float) -> tuple[float, dict[str, Any]]:
        log_delta = math.log(delta)
        epsilon, order = min(
            ((steps * log_moment(order, mechanism.noise_multiplier, mechanism.sample_rate) - log_delta) / order, order)
            for order in self.orders
        )
        return epsilon, {"order": order, "largest_order_is_best": order == max(self.orders)}
