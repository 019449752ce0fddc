"""Strong composition: one theorem for any mechanism, averaging over T steps.

T steps of (ε', qδ₀) each are (ε, Tqδ₀ + δ')-private for every δ' > 0 (Dwork, Rothblum and Vadhan 2010, Theorem III.3)

    ε = ε'√(2T ln(1/δ')) + Tε'(e^ε' − 1),   ε' = ln(1 + q(e^ε₀ − 1)),

with ε₀ of one Gaussian step at δ₀. The split, δ' = xδ and Tqδ₀ = (1 − x)δ, is optimised over x. At every x the right
side grows in T, q, 1/σ and 1/δ, and so does its minimum.

Two choices of ε₀, both upper bounds:

- `classical`: √(2 ln(1.25/δ₀))/σ where that claim is true, else the exact ε₀ (`step` in the detail says which). This
  corrects the method of 2016, so that valid and published curves differ only by its errors.
- `exact`: ε₀ of Balle and Wang 2018 everywhere; smaller.

As *published* in Abadi et al. 2016 (Figure 2), a heuristic and no bound: the classical ε₀ everywhere, linear
amplification ε' = qε₀, Tε'² in place of Tε'(e^ε' − 1), and δ split in halves. Of the forms tried, this one gives the
printed 9.34 (with Tε'(e^ε' − 1) it is 9.35, with Tε'²/2 8.27).

At q = 0.01, σ = 4, T = 10⁴, δ = 1e-5 the three are 26.39, 16.84 and 9.34. With little noise simple composition is
smaller (the detail says so); `accounting.optimal_composition` is never above either.
"""

import math
from typing import Any, Literal

from accounting.base import Accountant, Kind
from accounting.gaussian import amplified, classical_epsilon, classical_holds, exact_epsilon
from accounting.mechanism import ArgumentError, SubsampledGaussian
from accounting.search import lowest
from accounting.simple import Simple

#: The share x of δ is searched as logit x.
_LOGITS = range(-30, 31)


class Strong(Accountant):
    """Strong composition with the best split of δ.

    Args:
        step: which ε₀ a single step has; see the module's text.

    Raises:
        ArgumentError: another step.
    """

    def __init__(self, step: Literal["classical", "exact"] = "classical") -> None:
        if step not in ("classical", "exact"):
            raise ArgumentError("step", "to be one of classical, exact", step)
        self.step = step

    def _inside(self, mechanism: SubsampledGaussian, steps: float, delta: float) -> tuple[float, dict[str, Any]]:
        def at(logit: float) -> tuple[float, dict[str, Any]]:
            log_slack, log_step_delta = split(logit, mechanism.sample_rate, steps, delta)
            name, step = self._step(mechanism.noise_multiplier, log_step_delta)
            each = amplified(step, mechanism.sample_rate)
            epsilon = _spread(each, steps, log_slack) + steps * each * _expm1(each)
            return epsilon, _detail(name, step, log_step_delta, each, log_slack)

        epsilon, detail = at(lowest(lambda logit: at(logit)[0], _LOGITS, tolerance=1e-9))
        simple, _ = Simple()._inside(mechanism, steps, delta)
        return epsilon, {**detail, "simple_is_smaller": simple < epsilon}

    def _step(self, sigma: float, log_step_delta: float) -> tuple[str, float]:
        """(name, ε₀ at δ₀). The classical ε₀, where true, is the larger one, so ε₀ falls in σ and δ₀ everywhere."""
        if self.step == "classical" and log_step_delta < 0 and classical_holds(sigma, log_step_delta):
            return "classical", classical_epsilon(sigma, log_step_delta)
        return "exact", exact_epsilon(sigma, log_step_delta)


class Published(Accountant):
    """Strong composition as published in 2016. A heuristic that can lie below the true ε."""

    kind: Kind = "heuristic"

    def _inside(self, mechanism: SubsampledGaussian, steps: float, delta: float) -> tuple[float, dict[str, Any]]:
        log_slack, log_step_delta = split(0.0, mechanism.sample_rate, steps, delta)
        step = classical_epsilon(mechanism.noise_multiplier, log_step_delta)
        each = mechanism.sample_rate * step
        return _spread(each, steps, log_slack) + steps * each * each, {
            **_detail("classical", step, log_step_delta, each, log_slack),
            "classical_claim": classical_holds(mechanism.noise_multiplier, log_step_delta),
            "reason": "linear amplification (qε, qδ) is no upper bound",
        }


def split(logit: float, q: float, steps: float, delta: float) -> tuple[float, float]:
    """(ln δ', ln δ₀) at the share x of δ.

    Args:
        logit: ln(x/(1 − x)).
    """
    log_delta = math.log(delta)
    log_rest = log_delta - math.log1p(math.exp(logit))
    return log_delta - math.log1p(math.exp(-logit)), log_rest - math.log(q) - math.log(steps)


def _spread(each: float, steps: float, log_slack: float) -> float:
    """ε'√(2T ln(1/δ')), as separate factors because T may be near the largest float."""
    return each * math.sqrt(steps) * math.sqrt(-2.0 * log_slack)


def _expm1(x: float) -> float:
    return math.expm1(x) if x < 709.0 else math.inf


def _detail(step: str, epsilon: float, log_step_delta: float, each: float, log_slack: float) -> dict[str, Any]:
    return {
        "step": step,
        "step_epsilon": epsilon,
        "step_delta": math.exp(min(0.0, log_step_delta)),
        "amplified_epsilon": each,
        "composition_delta": math.exp(log_slack),
    }
