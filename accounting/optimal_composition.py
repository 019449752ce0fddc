"""Optimal composition of T steps that are only known to be (ε', δ₀)-private.

The worst such steps are randomised responses that fail with probability δ₀. Composing them gives (Kairouz, Oh and
Viswanath 2015, Theorem 3.3): T steps are (ε, 1 − (1 − δ₀)^T (1 − δ'))-private, where δ' is the δ(ε) of T randomised
responses; ℓ ~ Bin(T, 1/(1 + e^ε')) of them lower the loss and the others raise it:

    δ' = Σ_{ℓ: x_ℓ > ε} C(T, ℓ) e^{(T − ℓ)ε'}/(1 + e^ε')^T (1 − e^{ε − x_ℓ}),   x_ℓ = (T − 2ℓ)ε'.

Terms are positive, and summed in logarithms over the few standard deviations of ℓ that count. The result is never above
strong composition, which bounds the same quantity, nor above Tε'. Above 10⁷ steps the explicit form (Theorem 3.4) is
used.
"""

import math
from typing import Any

import numpy as np

from accounting.base import Accountant
from accounting.gaussian import amplified, exact_epsilon
from accounting.mechanism import SubsampledGaussian
from accounting.search import lowest
from accounting.strong import split

_MOST_STEPS = 1e7
#: The share x of δ for the composition is searched as logit x.
_LOGITS = range(-12, 13, 2)


def composed_epsilon(each: float, steps: float, log_slack: float) -> float:
    """ε of `steps` randomised responses of ε' = `each` at δ' = e^`log_slack` < 1; never above steps·ε'.

    Args:
        each: ε' of one of them, at least 0.
        log_slack: ln δ', below 0.
    """
    if each == 0 or steps == 1 or not each * steps < math.inf:
        return each * steps
    if steps > _MOST_STEPS:
        return _explicit(each, steps, log_slack)
    log_low, log_high = -each - math.log1p(math.exp(-each)), -math.log1p(math.exp(-each))
    mean, count = steps * math.exp(log_low), int(steps)
    reach = math.sqrt(2.0 * mean * (45.0 - log_slack))  # Chernoff: the rest is e^-45 of δ'
    start, end = max(0, math.floor(mean - reach)), min(count, math.ceil(mean + 9.0 * math.sqrt(mean) + 60.0))
    ell = np.arange(start, end + 1, dtype=float)
    log_chance = _log_binomial(count, start) + np.concatenate(
        [[0.0], np.cumsum(np.log((count - ell[:-1]) / (ell[:-1] + 1.0)))]
    )
    loss = (count - 2.0 * ell) * each
    log_p = log_chance + ell * log_low + (count - ell) * log_high
    total_p, total_q = np.logaddexp.accumulate(log_p), np.logaddexp.accumulate(log_p - loss)
    log_slack -= 4e-16 * (math.lgamma(steps + 1.0) + ell.size)  # rounding of ln C(T, ℓ)
    over = np.maximum(log_slack - total_p, -745.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        candidates = np.where(over < 0, total_p + np.log(-np.expm1(np.minimum(over, 0.0))) - total_q, -math.inf)
    # δ(ε) is the largest of A_i − e^ε B_i: ε is the largest of their roots
    return min(count * each, max(0.0, float(candidates.max())) + 1e-13)


def _log_binomial(n: int, k: int) -> float:
    return math.lgamma(n + 1.0) - math.lgamma(k + 1.0) - math.lgamma(n - k + 1.0)


def _explicit(each: float, steps: float, log_slack: float) -> float:
    """Theorem 3.4, the simplest bounds: Tε', and a drift plus a spread."""
    drift = each * math.tanh(0.5 * each) * steps
    return min(steps * each, drift + each * math.sqrt(steps) * math.sqrt(-2.0 * log_slack))


class Optimal(Accountant):
    """Optimal composition of exact Gaussian steps with exact amplification, with the best split of δ."""

    def _inside(self, mechanism: SubsampledGaussian, steps: float, delta: float) -> tuple[float, dict[str, Any]]:
        sigma, q = mechanism.noise_multiplier, mechanism.sample_rate

        def at(logit: float) -> tuple[float, float, float]:
            log_slack, log_step_delta = split(logit, q, steps, delta)
            each = amplified(exact_epsilon(sigma, log_step_delta), q)
            return composed_epsilon(each, steps, log_slack), each, math.exp(log_slack)

        epsilon, each, slack = at(lowest(lambda logit: at(logit)[0], _LOGITS, tolerance=1e-3))
        alone = amplified(exact_epsilon(sigma, math.log(delta) - math.log(q) - math.log(steps)), q)
        if steps * alone <= epsilon:  # simple composition is no larger
            epsilon, each, slack = steps * alone, alone, 0.0
        exact = steps <= _MOST_STEPS
        return epsilon, {"amplified_epsilon": each, "composition_delta": slack, "exact": exact}
