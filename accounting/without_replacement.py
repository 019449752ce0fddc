"""The Rényi bound of batches drawn without replacement, under replacing one record.

A step on b of n records, q = b/n, of a mechanism that is (j, ρ(j))-Rényi private when one record is replaced, has

    e^{(a−1)ρ'(a)} ≤ 1 + C(a,2) q² min(4(e^{ρ(2)} − 1), 2e^{ρ(2)}) + Σ_{j=3}^{a} 2 C(a,j) q^j e^{(j−1)ρ(j)}

at whole orders a ≥ 2 (Wang, Balle and Kasiviswanathan 2019, Theorem 9). Replacing a record moves a sum of clipped
gradients by 2C, so ρ(j) = 2j/σ² here; a library that takes ρ(j) = j/2σ² counts the noise twice. At q = 1 it is the
Gaussian mechanism. T steps add up, and ε = Tρ' + ln(1 − 1/a) − (ln δ + ln a)/(a − 1) (Canonne, Kamath and Steinke 2020,
Proposition 12).
"""

import math
from typing import Any, ClassVar

import numpy as np

from accounting.base import Accountant
from accounting.mechanism import SubsampledGaussian
from accounting.rdp import to_epsilon
from accounting.sampling import Scheme

_ORDERS = np.array([*range(2, 65), 80, 96, 128, 192, 256, 384, 512])


def _log_moment(order: int, sigma: float, q: float) -> float:
    """(a − 1)ρ' of one step at a whole order a; ∞ on overflow."""

    def rho(j: int) -> float:
        return 2.0 * j / sigma / sigma

    if q == 1.0:
        return (order - 1) * rho(order)
    second = rho(2)
    least = math.log(2.0) + second  # ln of the minimum
    if second < math.log(2.0):
        least = math.log(4.0) + (
            math.log(math.expm1(second)) if second > 1e-300 else math.log(4.0) - 2.0 * math.log(sigma)
        )
    log_terms = [math.log(math.comb(order, 2)) + 2.0 * math.log(q) + least]
    log_terms += [
        math.log(2.0) + math.log(math.comb(order, j)) + j * math.log(q) + (j - 1) * rho(j) for j in range(3, order + 1)
    ]
    top = max(log_terms)
    if top == math.inf:
        return math.inf
    log_sum = top + math.log(math.fsum(math.exp(term - top) for term in log_terms))
    return min(float(np.logaddexp(0.0, log_sum)), (order - 1) * rho(order))


class WithoutReplacement(Accountant):
    """ε by the best of whole orders from 2 to 512."""

    supports: ClassVar[frozenset[Scheme]] = frozenset({("without_replacement", "replace_one")})

    def _inside(self, mechanism: SubsampledGaussian, steps: float, delta: float) -> tuple[float, dict[str, Any]]:
        sigma, q = mechanism.noise_multiplier, mechanism.sample_rate
        with np.errstate(over="ignore"):
            moments = steps * np.array([_log_moment(int(order), sigma, q) for order in _ORDERS])
            found = to_epsilon(_ORDERS - 1.0, moments, math.log(delta), "improved")
        place = int(found.argmin())
        return float(found[place]), {"order": int(_ORDERS[place])}
