"""Simple composition: T steps of (ε', δ₀q) each are (Tε', Tqδ₀)-private (Dwork and Roth 2014, Theorem 3.16).

δ₀ = δ/(qT); ε₀ is the ε of the exact Gaussian mechanism at δ₀; ε' = ln(1 + q(e^ε₀ − 1)). Exact at T = 1 and q = 1.
"""

import math
from typing import Any

from accounting.base import Accountant
from accounting.gaussian import amplified, exact_epsilon
from accounting.mechanism import SubsampledGaussian


class Simple(Accountant):
    """ε = Tε': the cost of composition without averaging."""

    def _inside(self, mechanism: SubsampledGaussian, steps: float, delta: float) -> tuple[float, dict[str, Any]]:
        sigma, q = mechanism.noise_multiplier, mechanism.sample_rate
        log_step_delta = math.log(delta) - math.log(q) - math.log(steps)
        step = exact_epsilon(sigma, log_step_delta)
        each = amplified(step, q)
        return steps * each, {
            "step": "exact",
            "step_epsilon": step,
            "step_delta": math.exp(min(0.0, log_step_delta)),
            "amplified_epsilon": each,
        }
