"""Privacy loss distributions of Google's dp-accounting: connect-the-dots (Doroshenko et al. 2022), pessimistic.

Imported when first used, and without torch. Its ε errs upwards with the interval h by about T(θ + 1)h²/12, with the
tilt θ at ε (λ of the best Rényi order). h is chosen for `ACCURACY` of ε. The number of losses that this takes is
predicted by the Chernoff bounds that the library itself uses, so that it is never called for more than it can hold.

The library's transform is not tilted, and its rounding errors are not bounded: for many steps at a small δ its ε can
lie below the certified lower bound, or above the upper one, as if δ were off. So it is called with a δ smaller by
`rounding`, 2e-15 a step. It is not called if that is a large part of δ, or if rounding reaches the masses of the grid's
losses (which are differences of δ(ε), divided by h).

If the library cannot be called, or is looser (rare losses, small q), the same grid composed under a tilt is used
(`accounting.prv`, whose rounding is bounded). Its ε is raised by `ACCURACY`, as the library's is, so that ε does not
fall as T rises where the method changes.
"""

import math
from typing import Any

import numpy as np

from accounting.base import Accountant
from accounting.convolution import Tilt
from accounting.discretised import Step, worse
from accounting.gaussian import indistinct
from accounting.mechanism import NoAnswer, SubsampledGaussian
from accounting.prv import bracket
from accounting.rdp import Rdp

#: The relative error of ε that the grid may cause; the most losses, after composition.
ACCURACY, _MOST = 2e-4, 500_000
#: With fewer than `_FEWEST` losses the library enumerates combinations, and does not end.
_FEWEST, _LEAST_SIGMA, _LEAST_RATE, _MOST_STEPS = 1_200, 1e-2, 1e-12, 1e7
_LOG_TAIL = -50.0


def _rounding(steps: float) -> float:
    """The possible error of the library's δ."""
    return 2e-13 + 2e-15 * steps


class Pld(Accountant):
    """ε by dp-accounting, or by a tilted composition of the same grid (`composed_by` in the detail).

    The detail has h (`discretization`) and roughly what it adds to ε (`discretization_error`).
    """

    composes = True

    def _inside(self, mechanism: SubsampledGaussian, steps: float, delta: float) -> tuple[float, dict[str, Any]]:
        sigma, q = mechanism.noise_multiplier, mechanism.sample_rate
        if indistinct(sigma, q, steps, delta):
            return 0.0, {"reason": "by the distance in total variation alone"}
        answers: list[tuple[float, dict[str, Any]]] = []
        for answer in (_by_library, _tilted):
            try:
                answers.append(answer(mechanism, steps, delta))
            except NoAnswer as error:
                why = error
        if not answers:
            raise why
        return min(answers, key=lambda found: found[0])


def _by_library(mechanism: SubsampledGaussian, steps: float, delta: float) -> tuple[float, dict[str, Any]]:
    """(ε, detail) by dp-accounting.

    Raises:
        NoAnswer: the library is missing, fails, or is not called because it would be wrong or too slow.
    """
    sigma, q = mechanism.noise_multiplier, mechanism.sample_rate
    if delta < 4.0 * _rounding(steps) or sigma < _LEAST_SIGMA or q < _LEAST_RATE or steps > _MOST_STEPS:
        raise NoAnswer("beyond what dp-accounting resolves")
    epsilon, order = Rdp().best(mechanism, steps, delta)
    if epsilon == 0:
        return 0.0, {"reason": "by Rényi divergence alone"}
    interval, losses = _grid(sigma, q, steps, math.sqrt(12.0 * ACCURACY * epsilon / (steps * order)))
    if losses > _MOST or steps * math.sqrt(losses) * 2e-16 > 0.01 * interval:
        raise NoAnswer("too many losses for dp-accounting, or too few digits of them")
    try:
        from dp_accounting.pld import privacy_loss_distribution as library

        with np.errstate(all="ignore"):
            one = library.from_gaussian_mechanism(
                sigma, sampling_prob=q, value_discretization_interval=interval, log_mass_truncation_bound=_LOG_TAIL
            )
            found = float(one.self_compose(int(steps)).get_epsilon_for_delta(delta - _rounding(steps)))
    except Exception as error:  # the package may raise anything
        raise NoAnswer("dp-accounting is missing or fails") from error
    if not found < math.inf:
        raise NoAnswer("the losses of dp-accounting do not reach ε")
    added = steps * order * interval * interval / 12.0
    return found, {
        "discretization": interval,
        "discretization_error": added,
        "rounding": _rounding(steps),
        "composed_by": "dp-accounting",
        "accurate": added <= 1.1 * ACCURACY * found and _rounding(steps) <= 1e-3 * delta,
    }


def _grid(sigma: float, q: float, steps: float, wanted: float) -> tuple[float, float]:
    """(h, losses): h is `wanted`, or as fine as `_MOST` losses allow, of one step or of all together."""
    step = Step(sigma, q, _LOG_TAIL)
    low, high = step.reach
    span = high - low
    tilt = Tilt(worse(step, span / 2000))
    slopes = [k / span for k in range(1, 21)]
    above = min((steps * tilt.log_moment(t) + 36.0) / t for t in slopes)
    below = min((steps * tilt.log_moment(-t) + 36.0) / t for t in slopes)
    widest = max(span, min(steps * span, above + below))
    interval = min(max(wanted, widest / _MOST), span / _FEWEST)
    return interval, widest / interval


def _tilted(mechanism: SubsampledGaussian, steps: float, delta: float) -> tuple[float, dict[str, Any]]:
    """(ε, detail) of the tilted composition, which handles every setting."""
    found = bracket(mechanism.noise_multiplier, mechanism.sample_rate, steps, delta)
    epsilon = found.upper * (1.0 + ACCURACY if found.interval else 1.0)  # closed forms are exact
    return epsilon, {
        "discretization": found.interval,
        "discretization_error": epsilon - found.estimate,
        "composed_by": "tilted transform",
        "accurate": found.accurate,
    }
