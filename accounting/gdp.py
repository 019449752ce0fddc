"""Gaussian differential privacy: T steps as one Gaussian mechanism with mean shift μ (Dong, Roth and Su 2022).

    q = 1    μ = √T/σ: ε is exact, and an upper bound
    q < 1    μ = q√(T(e^{1/σ²} − 1)), the limit of many steps with q√T fixed (Bu, Dong, Long and Su 2020, Theorem 5); at
             most μ at q = 1

The limit is an estimate without an error bound, and often lies below the certified lower bound. ε(δ) of μ is exact
(`accounting.gaussian`).
"""

import math
from typing import Any

from accounting.base import Accountant, Kind
from accounting.gaussian import epsilon_of_shift, log_variance
from accounting.mechanism import SubsampledGaussian


class Gdp(Accountant):
    """ε of the limiting Gaussian mechanism: an `estimate`; at q = 1 an exact `upper_bound`."""

    kind: Kind = "estimate"

    def _inside(self, mechanism: SubsampledGaussian, steps: float, delta: float) -> tuple[float, dict[str, Any]]:
        sigma, q = mechanism.noise_multiplier, mechanism.sample_rate
        of_step = -math.log(sigma)
        if q < 1.0:  # the limit is too large as q → 1 with little noise; sampling never increases ε
            of_step = min(of_step, math.log(q) + 0.5 * log_variance(sigma))
        log_mu = 0.5 * math.log(steps) + of_step
        epsilon = epsilon_of_shift(log_mu, math.log(delta))
        mu = math.exp(log_mu) if log_mu < 709.0 else math.inf
        if q == 1.0:
            return epsilon, {"kind": "upper_bound", "mu": mu, "exact": True}
        return epsilon, {"mu": mu, "exact": False, "reason": "central limit theorem: no bound on its error is known"}
