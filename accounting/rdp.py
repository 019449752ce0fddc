"""Rényi differential privacy of the subsampled Gaussian (Mironov, Talwar and Zhang 2019), converted to (ε, δ).

One step has Rényi divergence ρ(a) = ln A_a/(a − 1) of order a > 1 (`accounting.series`); T adaptive steps have Tρ(a),
and each order gives an ε at δ:

    classic    Tρ(a) + ln(1/δ)/(a − 1)                              (Mironov 2017, Proposition 3)
    improved   Tρ(a) + ln((a − 1)/a) − (ln δ + ln a)/(a − 1)        (Canonne, Kamath and Steinke 2020, Proposition 12;
               Balle et al. 2020)

The classic conversion is the tail bound of the moments accountant of 2016, for every order. Every order is valid, so
the smallest ε is used. The search walks downhill over a geometric grid from the minimum for a Gaussian of the same
variance, then uses golden section between the neighbours (only whole orders where a > 1024 or σ is too small for
others).
"""

import functools
import math
from collections.abc import Iterable
from typing import Any, Literal, get_args

import numpy as np

from accounting.base import Accountant
from accounting.gaussian import log_variance
from accounting.mechanism import ArgumentError, SubsampledGaussian, above
from accounting.search import descend
from accounting.series import WHOLE_ORDERS, Array, log_moments

Conversion = Literal["improved", "classic"]

#: λ = a − 1 is searched between these; the detail says if the best is one of them.
SMALLEST, LARGEST = 2.0**-40, 2.0**50


def to_epsilon(lambdas: Array, log_moment: Array, log_delta: float, conversion: Conversion) -> Array:
    """ε at each order a = λ + 1, from `log_moment` = T ln A_a = (a − 1)Tρ(a). [n], never below 0.

    Args:
        lambdas: λ > 0, [n].
        log_moment: of all steps, [n].
        conversion: "classic" or "improved".
    """
    if conversion == "classic":
        return np.maximum(0.0, (log_moment - log_delta) / lambdas)
    orders = lambdas + 1.0
    return np.maximum(0.0, (log_moment - log_delta - np.log(orders)) / lambdas - np.log1p(1.0 / lambdas))


class Rdp(Accountant):
    """ε by the best Rényi order; an upper bound at every order.

    The detail has `order`, `conversion`, and `order_at_edge`: a smaller ε may lie beyond the orders tried.

    Args:
        conversion: from Rényi divergence to ε.
        orders: the orders a > 1 to try; all of them by default.

    Raises:
        ArgumentError: another conversion, no orders, or one that is not a finite number > 1.
    """

    def __init__(self, conversion: Conversion = "improved", orders: Iterable[float] | None = None) -> None:
        if conversion not in get_args(Conversion):
            raise ArgumentError("conversion", f"to be one of {', '.join(get_args(Conversion))}", conversion)
        self.conversion: Conversion = conversion
        self.orders = None if orders is None else np.array(above("orders", 1.0, orders))

    def _inside(self, mechanism: SubsampledGaussian, steps: float, delta: float) -> tuple[float, dict[str, Any]]:
        epsilon, order = self.best(mechanism, steps, delta)
        ends = (SMALLEST + 1.0, LARGEST + 1.0) if self.orders is None else (self.orders[0], self.orders[-1])
        return epsilon, {"order": order, "conversion": self.conversion, "order_at_edge": order in ends}

    def best(self, mechanism: SubsampledGaussian, steps: float, delta: float) -> tuple[float, float]:
        """(ε, its order), inside the edges of `accounting.base`."""
        sigma, q, log_delta = mechanism.noise_multiplier, mechanism.sample_rate, math.log(delta)

        def at(lambdas: Array, log_moment: Array) -> Array:
            with np.errstate(over="ignore"):
                return to_epsilon(lambdas, steps * log_moment, log_delta, self.conversion)

        def of_one(lam: float) -> float:
            return float(at(np.array([lam]), _log_moment(lam, sigma, q))[0])

        if self.orders is not None:
            found = at(self.orders - 1.0, log_moments(self.orders - 1.0, sigma, q))
            place = int(found.argmin())
            return float(found[place]), float(self.orders[place])
        lam, epsilon = descend(of_one, _start(sigma, q, steps, log_delta), SMALLEST, LARGEST)
        return epsilon, lam + 1.0


class Whole(Rdp):
    """ε by the best whole order from 2 to 1,024, valid for the discrete Gaussian too (`moments` has fewer orders)."""

    def __init__(self) -> None:
        super().__init__(orders=range(2, WHOLE_ORDERS + 1))


@functools.lru_cache(maxsize=512)
def _log_moment(lam: float, sigma: float, q: float) -> Array:
    """[1]. A reduction asks at several δ, whose searches share the orders of their grid."""
    return log_moments(lam, sigma, q)


def _start(sigma: float, q: float, steps: float, log_delta: float) -> float:
    """λ that minimises Tλ(λ + 1)v/2 + ln(1/δ) over λ, v = q²(e^{1/σ²} − 1): right for small losses."""
    log_squared = math.log(-2.0 * log_delta) - math.log(steps) - 2.0 * math.log(q) - log_variance(sigma)
    return math.exp(max(-27.0, min(34.0, 0.5 * log_squared)))
