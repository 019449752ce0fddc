"""Inverse problems: find the noise, the steps, the epochs or the sample rate at which T steps have a target ε at δ.

ε falls in σ and rises in T and q. In t = −ln σ, ln T or ln q it is close to a power of e^t over decades, so t is
interpolated in ln ε. The search starts from the Gaussian limit (μ = q√(T(e^{1/σ²} − 1)), Bu, Dong, Long and Su 2020),
walks to the other side of the target, then takes secants, with bisection where they are slow. The result was itself
evaluated, and its ε is at most the target despite any rounding of the accountant. It is tight: ε is within `tolerance`
of the target, or a relative change of the unknown by `tolerance` (by 1, for a number of steps) exceeds it. If the
accountant has no answer for that change, the guarantee's detail says so (`not_known`).
"""

import math
import time
from dataclasses import dataclass, replace

from accounting.base import Accountant, Guarantee
from accounting.gaussian import log_variance
from accounting.mechanism import NoAnswer, SubsampledGaussian

#: The unknowns: name -> (smallest value, largest value, words).
UNKNOWNS = {
    "noise_multiplier": (1e-4, 1e9, "noise multiplier"),
    "steps": (1.0, 1e15, "number of steps"),
    "epochs": (1.0, 1e15, "number of steps"),
    "sample_rate": (1e-15, 1.0, "sample rate"),
}
_EVALUATIONS = 80


@dataclass(frozen=True)
class Calibration:
    """The settings with the `unknown` filled in, and the accountant's guarantee, with `guarantee.epsilon` ≤ the target.

    For a risk as target, the guarantee's detail `advantage` or `tpr` is at most the target.
    """

    unknown: str
    mechanism: SubsampledGaussian
    steps: int
    guarantee: Guarantee
    evaluations: int
    seconds: float

    @property
    def epochs(self) -> float:
        """Passes over the data: steps × sample rate."""
        return self.steps * self.mechanism.sample_rate

    @property
    def value(self) -> float:
        """The value of the unknown."""
        given = {"steps": self.steps, "epochs": self.epochs}
        return given[self.unknown] if self.unknown in given else float(getattr(self.mechanism, self.unknown))


@dataclass(frozen=True)
class _Point:
    """A value x of the unknown, its t, and f = ln ε − ln target; if there is no answer, ∞ and the reason."""

    x: float
    t: float
    f: float
    guarantee: Guarantee | None = None
    reason: str = ""


@dataclass
class Problem:
    """A search for one unknown along t, in which ε rises.

    Args:
        accountant: gives ε, or a risk in its place.
        unknown: one of `UNKNOWNS`.
        mechanism, steps, delta: the given settings; the unknown's own value is ignored.
        target: the largest ε allowed.
        mu: of the Gaussian mechanism with the target; computed if None.
        symbol: the name of ε in errors.
    """

    accountant: Accountant
    unknown: str
    mechanism: SubsampledGaussian
    steps: float
    delta: float
    target: float
    mu: float | None = None
    symbol: str = "ε"

    def __post_init__(self) -> None:
        self._sign = -1.0 if self.unknown == "noise_multiplier" else 1.0
        self._whole = self.unknown in ("steps", "epochs")
        low, high, self._words = UNKNOWNS[self.unknown]
        self._ends = sorted((self._t(low), self._t(high)))
        self._reason, self._evaluations, self._began = "", 0, time.perf_counter()

    def solve(self, tolerance: float) -> Calibration:
        """The most generous value of the unknown that meets the target.

        Args:
            tolerance: relative, in [0, 1); 0: to the last step, or to 1e-12.

        Raises:
            NoAnswer: no value meets the target, or every value does; or the accountant has no bound here.
        """
        edge = self._edge()
        if edge is not None:
            return edge
        good: _Point | None = None  # f ≤ 0: the largest such t
        bad: _Point | None = None  # f > 0: the smallest such t
        t, step, widths = self._start(), 1e-3, [math.inf, math.inf]
        while self._evaluations < _EVALUATIONS:
            point = self._at(t)
            good, bad = (point, bad) if point.f <= 0 else (good, point)
            if good and bad:
                if self._close(good, bad, tolerance):
                    break
                widths.append(bad.t - good.t)
                t = self._between(good, bad, tolerance, slow=widths[-1] > 0.5 * widths[-3])
            else:
                if (end := self._ends[0 if bad else 1]) == point.t:
                    break
                step = max(2.0 * step, min(1.2 * abs(point.f), 8.0))
                t = max(end, point.t - step) if bad else min(end, point.t + step)
        return self._finish(good, bad)

    def _edge(self) -> Calibration | None:
        """The most generous value (no noise, or q = 1) if every value spends nothing; else None."""
        if self._whole:
            if self.mechanism.sample_rate == 0 or self.mechanism.noise_multiplier == math.inf or self.delta >= 1:
                raise NoAnswer(f"{self.symbol} is 0 whatever the {self._words}")
            return None
        x = 0.0 if self.unknown == "noise_multiplier" else 1.0
        if x == 0 or self.mechanism.noise_multiplier == math.inf:
            guarantee = self._guarantee(x)
            if guarantee.epsilon <= self.target:
                return self._calibration(x, guarantee)
        return None

    def _finish(self, good: _Point | None, bad: _Point | None) -> Calibration:
        target = f"{self.symbol} = {self.target:g}"
        if good is None:
            assert bad is not None
            why = self._reason or f"at {bad.x:g} it is still {math.exp(bad.f) * self.target:.4g}"
            raise NoAnswer(f"no {self._words} meets {target}: {why}")
        if bad is None and self._whole and good.t == self._ends[1]:
            assert good.guarantee is not None
            told = f"{self.symbol} is {good.guarantee.epsilon:.4g} there"
            raise NoAnswer(f"{good.x:g} steps and more meet {target}: {told}")
        assert good.guarantee is not None
        guarantee = good.guarantee
        if bad is not None and bad.guarantee is None:
            told = f"whether {self._words} {bad.x:g} meets it, too: {bad.reason}"
            guarantee = replace(guarantee, detail={**guarantee.detail, "not_known": told})
        return self._calibration(good.x, guarantee)

    def _calibration(self, x: float, guarantee: Guarantee) -> Calibration:
        mechanism, steps = self._with(x)
        return Calibration(
            self.unknown, mechanism, int(steps), guarantee, self._evaluations, time.perf_counter() - self._began
        )

    def _guarantee(self, x: float) -> Guarantee:
        mechanism, steps = self._with(x)
        return self.accountant.guarantee(mechanism, steps=steps, delta=self.delta)

    def _with(self, x: float) -> tuple[SubsampledGaussian, float]:
        """The mechanism and the steps with x as the unknown."""
        if self._whole:
            return self.mechanism, x
        if self.unknown == "sample_rate":
            return replace(self.mechanism, sample_rate=x), self.steps
        return replace(self.mechanism, noise_multiplier=x), self.steps

    def _at(self, t: float) -> _Point:
        x = self._x(t)
        self._evaluations += 1
        try:
            guarantee = self._guarantee(x)
        except NoAnswer as error:
            self._reason = str(error)
            return _Point(x, self._t(x), math.inf, reason=self._reason)
        if guarantee.epsilon == math.inf or guarantee.epsilon == 0:
            return _Point(x, self._t(x), math.inf if guarantee.epsilon else -math.inf, guarantee)
        # ln(ε/target) may round to 0 for an ε one ulp above the target
        f = math.log(guarantee.epsilon / self.target)
        return _Point(x, self._t(x), max(f, 5e-324) if guarantee.epsilon > self.target else min(f, 0.0), guarantee)

    def _t(self, x: float) -> float:
        return self._sign * math.log(x)

    def _x(self, t: float) -> float:
        x = math.exp(self._sign * t)
        if self.unknown == "sample_rate":
            return min(1.0, x)
        return float(max(1, round(x))) if self._whole and x < 2.0**53 else x

    def _between(self, good: _Point, bad: _Point, tolerance: float, slow: bool) -> float:
        """A t by the secant, where f is a little below 0; if `good` is already that close, the end of its tolerance."""
        t, width, aim = 0.5 * (good.t + bad.t), bad.t - good.t, -0.25 * tolerance
        if not slow and aim <= good.f and tolerance:
            t = min(t, good.t + 0.45 * tolerance)
        elif not slow and math.isfinite(bad.f - good.f):
            share = (aim - good.f) / (bad.f - good.f)
            t = good.t + min(max(share, 0.005), 0.995) * width
        return self._inside(good, bad, t)

    def _inside(self, good: _Point, bad: _Point, t: float) -> float:
        """t; for a whole unknown, t of a whole number strictly between the two."""
        if not self._whole:
            return t
        return self._t(float(min(max(math.floor(self._x(t)), good.x + 1), bad.x - 1)))

    def _close(self, good: _Point, bad: _Point, tolerance: float) -> bool:
        width = bad.t - good.t
        if self._whole and bad.x - good.x <= max(1.0, 0.5 * tolerance * good.x):
            return True
        if 3.0 * good.f >= -tolerance and 3.0 * (bad.f - good.f) >= width > 0 and tolerance:
            return True  # by the slope, the unknown is within the tolerance, too
        return not self._whole and width <= max(1e-12, 0.5 * tolerance if good.f >= -tolerance else 0.0)

    def _start(self) -> float:
        """t by the Gaussian limit with the target ε at δ (its tail alone), or with the target risk."""
        tail = -math.log(min(max(self.delta, 1e-300), 0.5))
        mu = self.mu or 2.0 * self.target / (math.sqrt(2.0 * (tail + self.target)) + math.sqrt(2.0 * tail))
        q, sigma = max(self.mechanism.sample_rate, 1e-150), self.mechanism.noise_multiplier
        steps = float(min(self.steps, 1e18)) or 1.0  # an integer may be larger than any float
        if self.unknown == "noise_multiplier":
            t = 0.5 * math.log(max(math.log1p(mu / q * (mu / q) / steps), 1e-300))
        else:
            squared = 2.0 * math.log(max(mu, 1e-300)) - log_variance(max(sigma, 1e-6))
            t = squared - 2.0 * math.log(q) if self._whole else 0.5 * (squared - math.log(steps))
        return min(max(t, self._ends[0]), self._ends[1])
