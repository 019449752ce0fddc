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
_FEWEST, LEAST_SIGMA, LEAST_RATE, MOST_STEPS = 1_200, 1e-2, 1e-12, 1e7
_LOG_TAIL = -50.0


def _rounding(steps: float) -> float:
    """The possible error of the library's δ."""
    return 2e-13 + 2e-15 * steps


def _library() -> Any:
    """dp-accounting's `privacy_loss_distribution`.

    Raises:
        NoAnswer: it is not installed, or fails when imported.
    """
    try:
        from dp_accounting.pld import privacy_loss_distribution
    except Exception as error:  # the package may raise anything
        why = f"{type(error).__name__}: {error}"
        raise NoAnswer(f"dp-accounting cannot be imported ({why}); pip install dp-accounting") from error
    return privacy_loss_distribution


class Pld(Accountant):
    """ε by dp-accounting, or by a tilted composition of the same grid (`composed_by` in the detail).

    The detail has h (`discretization`) and roughly what it adds to ε (`discretization_error`).
    """

    composes = True

    def _inside(self, mechanism: SubsampledGaussian, steps: float, delta: float) -> tuple[float, dict[str, Any]]:
        sigma, q = mechanism.noise_multiplier, mechanism.sample_rate
        if indistinct(sigma, q, steps, delta):
            return 0.0, {"reason": "by the distance in total variation alone"}
        answers, reasons = [], []
        for answer in (self._by_library, _tilted):
            try:
                answers.append(answer(mechanism, steps, delta))
            except NoAnswer as error:
                reasons.append(str(error))
        if not answers:
            raise NoAnswer(reasons[-1])
        return min(answers, key=lambda found: found[0])

    def _by_library(self, mechanism: SubsampledGaussian, steps: float, delta: float) -> tuple[float, dict[str, Any]]:
        sigma, q = mechanism.noise_multiplier, mechanism.sample_rate
        self._refuse(sigma, q, steps, delta)
        epsilon, order = Rdp().best(mechanism, steps, delta)
        if epsilon == 0:
            return 0.0, {"reason": "by Rényi divergence alone"}
        wanted = math.sqrt(12.0 * ACCURACY * epsilon / (steps * order))
        interval, losses = self._interval(sigma, q, steps, wanted)
        if steps * math.sqrt(losses) * 2e-16 > 0.01 * interval:
            raise NoAnswer(f"losses {interval:.2g} apart have too few digits for {steps:g} steps")
        library = _library()
        try:
            with np.errstate(all="ignore"):  # NaN becomes NoAnswer (`accounting.base`)
                one = library.from_gaussian_mechanism(
                    sigma, sampling_prob=q, value_discretization_interval=interval, log_mass_truncation_bound=_LOG_TAIL
                )
                found = float(one.self_compose(int(steps)).get_epsilon_for_delta(delta - _rounding(steps)))
        except (ValueError, ArithmeticError) as error:
            raise NoAnswer(f"dp-accounting: {' '.join(str(error).split())}") from error
        if found == math.inf:
            raise NoAnswer(f"its losses {interval:.2g} apart do not reach ε at delta={delta:g}")
        added = steps * order * interval * interval / 12.0
        return found, {
            "discretization": interval,
            "discretization_error": added,
            "rounding": _rounding(steps),
            "composed_by": "dp-accounting",
            "accurate": added <= 1.1 * ACCURACY * found and _rounding(steps) <= 1e-3 * delta,
        }

    @staticmethod
    def _refuse(sigma: float, q: float, steps: float, delta: float) -> None:
        if delta < (least := 4.0 * _rounding(steps)):
            raise NoAnswer(f"delta={delta:g} is below {least:g}, which its rounding errors may reach")
        for name, value, bound in (("noise_multiplier", sigma, LEAST_SIGMA), ("sample_rate", q, LEAST_RATE)):
            if value < bound:
                raise NoAnswer(f"{name}={value:g} is below {bound:g}, where its grid is too large or has no digits")
        if steps > MOST_STEPS:
            raise NoAnswer(f"steps={steps:g} is above {MOST_STEPS:g}, which its transform does not resolve")

    @staticmethod
    def _interval(sigma: float, q: float, steps: float, wanted: float) -> tuple[float, float]:
        """(h, the number of losses of one step): h is `wanted`, or as fine as `_MOST` allows.

        Raises:
            NoAnswer: h is too coarse for the library.
        """
        step = Step(sigma, q, _LOG_TAIL)
        low, high = step.reach
        span = high - low
        tilt = Tilt(worse(step, span / 2000))
        slopes = [k / span for k in range(1, 21)]
        above = min((steps * tilt.log_moment(t) + 36.0) / t for t in slopes)
        below = min((steps * tilt.log_moment(-t) + 36.0) / t for t in slopes)
        composed = min(steps * span, above + below)
        finest = max(span, composed) / _MOST
        interval = min(max(wanted, finest), span / _FEWEST)
        if interval < finest:
            raise NoAnswer(f"its grid would need {max(span, composed) / interval:,.0f} losses, of {_MOST:,} at most")
        return interval, span / interval


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
