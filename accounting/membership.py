"""Membership risk: how well an attack can tell whether a record was in the data.

An attacker who sees every release says "in" or "out". The false positive rate α is the share of absent records called
"in"; the true positive rate β is the same share of the present records. With δ(ε) the smallest δ at ε, of either sign,

    β <= min over ε of δ(ε) + e^ε α,      advantage: max over α of β − α = δ(0),

and some attack attains this β (Dong, Roth and Su 2019: the trade-off curve is the convex conjugate of δ). So an upper
bound on δ(ε), by the pessimistic grid, bounds every attack, and a lower one, by the optimistic grid, is what the best
attack certainly reaches. β is the larger over both directions, records added and removed. Gaussian steps have a closed
form: β = Φ(Φ⁻¹(α) + μ), advantage 2Φ(μ/2) − 1.

(ε, δ) at a single δ says much less: β <= δ + e^ε α and β <= 1 − e^−ε (1 − δ − α), advantage 1 − 2(1 − δ)/(1 + e^ε).

Functions take:
    parts: (mechanism, number of its steps) for each kind, under one adjacency.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import ndtr, ndtri

from accounting.base import Accountant, Guarantee
from accounting.convolution import LONGEST, deltas_of
from accounting.discretised import Step
from accounting.mechanism import ArgumentError, NoAnswer, SubsampledGaussian, within
from accounting.optimistic_grid import better
from accounting.sampling import HOME, SCHEMES
from accounting.schemes import Phase, gaussian, on_grids, phases_of, reach, span_of
from accounting.series import Array
from accounting.varying import Part, guarantee_of_parts, spending

#: The reported false positive rates.
RATES = (0.01, 0.001)
#: The mass beyond the ends of the grid, of all steps; the relative change of a risk at which refining stops.
_LOG_TAIL, _TOLERANCE = math.log(1e-12), 1e-3
_PASSES, _FINEST = 8, 2.0**16


@dataclass(frozen=True)
class TradeOff:
    """Bounds on every attack's true positive rate by its false positive rate.

    Attributes:
        curves: (ε, δ(ε)), both [n], of each direction: δ bounded from above.
        lower: (ε, δ(ε)) of removing a record, δ bounded from below; None without a certified bound.
        mu: the mean shift μ of a Gaussian mechanism, which has no curves.
        exact: whether some attack attains the bound of `mu`.

    Methods take:
        false_positives: the false positive rate, in (0, 1).
    """

    curves: tuple[tuple[Array, Array], ...] = ()
    lower: tuple[Array, Array] | None = None
    mu: float | None = None
    exact: bool = True

    @property
    def advantage(self) -> float:
        """An upper bound on the true minus the false positive rate."""
        if self.mu is not None:
            return float(2.0 * ndtr(0.5 * self.mu) - 1.0)
        return max(_at_zero(*curve, upper=True) for curve in self.curves)

    def true_positives(self, false_positives: float) -> float:
        """An upper bound on the true positive rate."""
        if self.mu is not None:
            return float(ndtr(ndtri(false_positives) + self.mu))
        return max(_conjugate(*curve, false_positives) for curve in self.curves)

    @property
    def least_advantage(self) -> float | None:
        """The advantage that some attack certainly reaches."""
        if self.mu is not None:
            return self.advantage if self.exact else None
        return None if self.lower is None else _at_zero(*self.lower, upper=False)

    def least_true_positives(self, false_positives: float) -> float | None:
        """The true positive rate that some attack certainly reaches."""
        if self.mu is not None:
            return self.true_positives(false_positives) if self.exact else None
        if self.lower is None:
            return None
        at, delta = self.lower
        # for ε below the grid, where δ is at least 1 − e^ε, and at least the first δ of the grid
        below = max(float(delta[0]), 1.0 - math.exp(min(0.0, float(at[0]))) * (1.0 - false_positives)) - 1e-12
        return max(false_positives, min(_conjugate(at, delta, false_positives), below))


def trade_off(parts: Sequence[Part]) -> TradeOff:
    """The curves of all steps, independent of the accountant.

    Raises:
        NoAnswer: the parts have different adjacency, there is almost no noise, or no grid holds the losses.
    """
    return _remembered(tuple(spending(parts).items()))


@functools.lru_cache(maxsize=16)
def _remembered(kinds: tuple[Part, ...]) -> TradeOff:
    """Cached, because it takes seconds and every accountant needs the same steps."""
    if not kinds:
        return TradeOff(mu=0.0)
    if any(mechanism.noise_multiplier == 0 or steps == math.inf for mechanism, steps in kinds):
        return TradeOff(mu=math.inf)
    mu, _ = gaussian(kinds)
    if mu is not None:
        return TradeOff(mu=mu, exact=not any(m.sampling in ("shuffled", "balls_and_bins") for m, _ in kinds))
    total = sum(steps for _, steps in kinds)
    found = [_curve(phases, total) for phases in phases_of(kinds)]
    interval = min(h for *_, h in found)
    return TradeOff(tuple((at, delta) for at, delta, _ in found), _certified(kinds, interval, total))


def trade_off_or_line(parts: Sequence[Part], epsilon: float, delta: float) -> TradeOff:
    """The curves of all steps; if no grid holds the losses, the line that (ε, δ) alone gives.

    Args:
        epsilon, delta: an upper bound on ε of all steps, at δ.
    """
    try:
        return trade_off(parts)
    except NoAnswer:
        return TradeOff((line(epsilon, delta),))


def risk_of_parts(accountant: Accountant, parts: Sequence[Part], *, delta: float) -> dict[str, Any]:
    """`accounting.risk` of steps of several kinds.

    If no grid holds the losses, or the accountant is not `plain`, the risk follows from ε at δ alone.

    Args:
        accountant: one that gives upper bounds.

    Raises:
        ArgumentError: an argument is out of its range.
        NoAnswer: the accountant has no bound here, or is no upper bound.
    """
    found = of_upper_bound(guarantee_of_parts(accountant, parts, delta=delta))
    if not accountant.plain:
        return told(TradeOff((line(found.epsilon, delta),)))
    return told(trade_off_or_line(parts, found.epsilon, delta))


def of_upper_bound(guarantee: Guarantee) -> Guarantee:
    """Return the guarantee if it is an upper bound.

    Args:
        guarantee: to check.

    Raises:
        NoAnswer: it is no upper bound.
    """
    if guarantee.kind != "upper_bound":
        kind = guarantee.kind.replace("_", " ")
        raise NoAnswer(f"no bound on a risk from an ε of kind {kind}: take an accountant of upper bounds")
    return guarantee


def told(curve: TradeOff) -> dict[str, Any]:
    """The result of `accounting.risk`.

    Args:
        curve: of all steps.
    """
    names = {f"{rate:g}": rate for rate in RATES}
    answer: dict[str, Any] = {
        "advantage": curve.advantage,
        "tpr_at_fpr": {name: curve.true_positives(rate) for name, rate in names.items()},
    }
    if (least := curve.least_advantage) is not None:
        rates = {name: curve.least_true_positives(rate) for name, rate in names.items()}
        answer["at_least"] = {"advantage": least, "tpr_at_fpr": rates}
    return answer


class Risk(Accountant):
    """A risk in place of ε, for `accounting.calibration`: the advantage, or the true positive rate.

    Args:
        false_positives: the false positive rate, in (0, 1); None for the advantage.
    """

    supports = SCHEMES

    def __init__(self, false_positives: float | None = None) -> None:
        self.false_positives = (
            None if false_positives is None else within("false_positives", false_positives, open_ends=True)
        )

    def _inside(self, mechanism: SubsampledGaussian, steps: float, delta: float) -> tuple[float, dict[str, Any]]:
        curve = trade_off([(mechanism, steps)])
        return curve.advantage if self.false_positives is None else curve.true_positives(self.false_positives), {}

    @property
    def words(self) -> str:
        """The name of the risk, for errors."""
        return "advantage" if self.false_positives is None else f"TPR at {self.false_positives:g} FPR"

    def mu(self, target: float) -> float:
        """μ of the Gaussian mechanism with this risk.

        Args:
            target: in (0, 1), and above the false positive rate.

        Raises:
            ArgumentError: not a risk, or one that every mechanism has.
        """
        if self.false_positives is None:
            return 2.0 * float(ndtri(0.5 + 0.5 * within("target_advantage", target, open_ends=True)))
        if not self.false_positives < within("target_tpr", target, open_ends=True):
            raise ArgumentError("target_tpr", f"to be above the false positive rate {self.false_positives:g}", target)
        return float(ndtri(target) - ndtri(self.false_positives))


def _curve(phases: list[Phase], total: float) -> tuple[Array, Array, float]:
    """(ε, δ, interval) in one direction, on finer and finer grids until no risk changes."""
    ends = [reach(regimes, _LOG_TAIL - math.log(total)) for regimes, _ in phases]
    span = span_of(ends)
    if not 0 < span < math.inf:
        raise NoAnswer(f"losses of a step up to {span:g} are no numbers for a grid")
    interval, best, before = span / 2**12, None, np.ones(len(RATES) + 1)
    for _ in range(_PASSES):
        try:
            at, delta = deltas_of(on_grids(phases, ends, interval))
        except NoAnswer:  # the window is too long for this interval
            if best is not None:
                break
            interval *= 4.0
            continue
        best = at, delta, interval
        now = np.array([_at_zero(at, delta, upper=True), *(_conjugate(at, delta, rate) for rate in RATES)])
        if interval < span / _FINEST or np.all(before - now <= _TOLERANCE * now):
            break
        interval, before = 0.4 * interval, now
    if best is None:
        raise NoAnswer("no grid holds the losses of all steps")
    return best


def _certified(kinds: Sequence[Part], interval: float, total: float) -> tuple[Array, Array] | None:
    """(ε, δ) from below, on removing; None without an optimistic grid."""
    if any(each.scheme != HOME or each.sample_rate == 1 or each.group_size > 1 for each, _ in kinds):
        return None
    log_tail = _LOG_TAIL - math.log(total)
    try:
        found = [(Step(each.noise_multiplier, each.sample_rate, log_tail), steps) for each, steps in kinds]
        if max(high - low for low, high in (step.reach for step, _ in found)) > LONGEST * interval:
            return None
        grids = [(better(step, interval, 1.0, 1e-9 / total), steps) for step, steps in found]
        return deltas_of(grids, upper=False)
    except NoAnswer:
        return None


def line(epsilon: float, delta: float) -> tuple[Array, Array]:
    """The bounds on δ at −ε, 0 and ε that (ε, δ) alone implies (Kairouz et al. 2015).

    Args:
        epsilon, delta: the guarantee.
    """
    if epsilon == math.inf:
        return np.array([0.0]), np.array([1.0])
    low = min(epsilon, 700.0)
    known = [1.0 - (1.0 - delta) * math.exp(-low), 1.0 - 2.0 * (1.0 - delta) / (1.0 + math.exp(low)), delta]
    return np.array([-low, 0.0, epsilon]), np.array(known)


def _at_zero(at: Array, delta: Array, *, upper: bool) -> float:
    """δ(0), bounded by the nearest ε of the grid, as δ falls."""
    slack = 1e-9 * float(at[-1] - at[0]) / at.size
    place = int(np.searchsorted(at, slack, side="right")) - 1 if upper else int(np.searchsorted(at, -slack))
    if upper:
        return float(delta[place]) if place >= 0 else 1.0
    return float(delta[place]) if place < at.size else 0.0


def _conjugate(at: Array, delta: Array, false_positives: float) -> float:
    """min over ε of δ(ε) + e^ε α, between α and 1."""
    with np.errstate(over="ignore"):
        least = float(np.min(delta + np.exp(at) * false_positives))
    return min(1.0, max(false_positives, least))
