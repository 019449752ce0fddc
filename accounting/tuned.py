"""The price of tuning: ε of several private runs if only the best is published.

The number of runs must be drawn at random before the first run, independently of results (Papernot and Steinke 2022,
arXiv:2110.03620, theorems 2 and 6), with mean `runs`:

    poisson      any number, including 0; concentrated about the mean
    geometric    1 or more, mostly few
    logarithmic  1 or more, of the widest spread

A fixed number of runs has no such bound. Runs may have any hyperparameters, if each has the accounted noise, rate and
steps (or spends less), and the best may be chosen on the private data. Computed by dp-accounting's
`RepeatAndSelectDpEvent`, from the Rényi divergences of one run (`accounting.series`).
"""

import math
from typing import Any

import numpy as np

from accounting.base import Accountant
from accounting.mechanism import ArgumentError, NoAnswer, SubsampledGaussian, real
from accounting.series import log_moments

DISTRIBUTIONS = ("poisson", "geometric", "logarithmic")
#: The library's shape parameter for each distribution.
_SHAPES = {"poisson": math.inf, "geometric": 1.0, "logarithmic": 0.0}
_ORDERS = np.concatenate(
    [1.0 + np.geomspace(1e-3, 1.0, 60), np.arange(2.25, 16.0, 0.25), np.arange(16.0, 64.0), np.geomspace(64.0, 1e5, 60)]
)
#: Smaller divergences are raised to this: dp-accounting takes the logarithm of 1 − e^−ρ.
_LEAST = 2.0**-52


class Tuned(Accountant):
    """ε of the best of a random number of runs, by Rényi divergences.

    Args:
        runs: the mean number of runs, at least 1.
        distribution: of the number of runs.

    Raises:
        ArgumentError: another distribution, or a mean below 1.
    """

    plain = False

    def __init__(self, runs: float, distribution: str = "geometric") -> None:
        self.runs = real("runs", "to be a finite number >= 1", runs)
        if not 1 <= self.runs < math.inf:
            raise ArgumentError("runs", "to be a finite number >= 1", runs)
        if distribution not in DISTRIBUTIONS:
            raise ArgumentError("distribution", f"to be one of {', '.join(DISTRIBUTIONS)}", distribution)
        self.distribution = distribution

    def _answer(self, mechanism: SubsampledGaussian, steps: float, delta: float) -> tuple[float, dict[str, Any]]:
        if mechanism.sampling == "truncated_poisson":  # the reduction counts the cut batches of one run only
            raise NoAnswer("no bound of tuned runs whose batches are cut: take sampling poisson")
        return super()._answer(mechanism, steps, delta)

    def _inside(self, mechanism: SubsampledGaussian, steps: float, delta: float) -> tuple[float, dict[str, Any]]:
        with np.errstate(over="ignore"):
            moments = steps * log_moments(_ORDERS - 1.0, mechanism.noise_multiplier, mechanism.sample_rate)
        kept = np.isfinite(moments)
        if not kept.any():
            raise NoAnswer("the Rényi divergences of a run are beyond what floats hold")
        orders = _ORDERS[kept]
        divergences = np.maximum(moments[kept] / (orders - 1.0), _LEAST)
        found, order = _selected(orders, divergences, self.runs, self.distribution, delta)
        if math.isnan(found):
            raise NoAnswer("dp-accounting has no number for so many runs")
        return found, {"order": order, "runs": self.runs, "distribution": self.distribution}


def _selected(
    orders: np.ndarray, divergences: np.ndarray, runs: float, distribution: str, delta: float
) -> tuple[float, float]:
    """(ε, its order) by dp-accounting, from a run's divergences at the orders, both [n].

    Raises:
        NoAnswer: dp-accounting is not installed, or too old.
    """
    try:
        from dp_accounting import dp_event
        from dp_accounting.rdp import RdpAccountant

        repeated = dp_event.RepeatAndSelectDpEvent(dp_event.NoOpDpEvent(), runs, _SHAPES[distribution])
    except Exception as error:  # the package may raise anything
        why = f"{type(error).__name__}: {error}"
        raise NoAnswer(f"dp-accounting cannot be imported ({why}); pip install 'dp-accounting>=0.6'") from error

    class OfOurRun(RdpAccountant):
        """Replaces the event without cost by a run of ours."""

        def _maybe_compose(self, event: Any, count: int, do_compose: bool) -> Any:
            if not isinstance(event, dp_event.NoOpDpEvent):
                return super()._maybe_compose(event, count, do_compose)
            if do_compose:
                self._rdp = self._rdp + count * divergences  # type: ignore[has-type]
            return None

    with np.errstate(all="ignore"):
        epsilon, order = OfOurRun(orders).compose(repeated).get_epsilon_and_optimal_order(delta)
    return max(0.0, float(epsilon)), float(order)
