"""Numerical composition of privacy random variables, with certified lower and upper bounds.

As in Gopi, Lee and Wutschitz 2021 the loss ln P/Q of one step, a random variable, is put on a grid, and T of them are
added by fast Fourier transform. They use one grid with a proved distance to the truth; here two grids enclose the truth
(`accounting.discretised`, `accounting.optimistic_grid`: Doroshenko et al. 2022, and the post-processing theorem):

    upper      of the pessimistic grid, the larger of ε on removing and on adding a record
    lower      of the optimistic one, on removing
    estimate   lower + 2/3 (upper − lower): to first order in h², the variance of a step is −h²/3 off in the lower grid
               and h²/6 in the upper one

The bounds include every source of error: grid, tails, wrap-around, and rounding (`accounting.convolution`). The grid is
refined until they are within `ACCURACY` of each other, or the transform is at its longest. q = 1 (the sum of Gaussians
is one) and T = 1 (Balle, Barthe and Gaboardi 2018, Theorem 8) have closed forms.

Other schemes: the upper bound of `accounting.schemes`, by the same composition.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

from accounting.base import Accountant, Kind
from accounting.convolution import Losses, epsilon_of
from accounting.discretised import Step, worse
from accounting.gaussian import amplified, epsilon_of_shift, exact_epsilon, indistinct
from accounting.mechanism import NoAnswer, SubsampledGaussian
from accounting.optimistic_grid import better
from accounting.sampling import HOME, SCHEMES, Scheme

#: The requested upper − lower: relative to upper, and absolute.
ACCURACY, LEAST = 1e-4, 1e-7
_FEWEST, _MOST = 2_000, 500_000
_COARSEST = 300.0  # e^h must be a float
#: The mass beyond the ends of the grid, relative to δ.
_LOG_TAIL = math.log(1e-9)
#: Smaller δ and σ lose all digits of a float, or need too many losses.
LEAST_DELTA, LEAST_SIGMA, MOST_STEPS = 1e-250, 4e-3, 1e13
#: A hint for refusals where floats do not suffice.
OTHERS = "; rdp has a bound here"


@dataclass(frozen=True)
class Bracket:
    """Certified bounds lower ≤ ε ≤ upper, and the grid's interval (0 in closed form)."""

    lower: float
    upper: float
    interval: float = 0.0

    @property
    def estimate(self) -> float:
        """Two thirds of the way from the lower bound to the upper one; the upper one if that is not informative."""
        return self.lower + (self.upper - self.lower) * 2.0 / 3.0 if self.lower < self.upper < math.inf else self.upper

    @property
    def accurate(self) -> bool:
        """Whether the bounds are as close as requested."""
        return self.upper - self.lower <= max(ACCURACY * self.upper, LEAST)


def bracket(sigma: float, q: float, steps: float, delta: float) -> Bracket:
    """Bounds on ε of T Poisson steps under adding or removing one record. Cached.

    Raises:
        NoAnswer: δ, σ or T are beyond what floats resolve, or there is no grid.
    """
    found = _remembered(sigma, q, float(steps), delta)
    if isinstance(found, str):
        raise NoAnswer(found)
    return found


@functools.lru_cache(maxsize=512)
def _remembered(sigma: float, q: float, steps: float, delta: float) -> Bracket | str:
    """The bracket, or why there is none. Cached, because either may take a second."""
    try:
        return _bracket(sigma, q, steps, delta)
    except NoAnswer as error:
        return str(error)


def _bracket(sigma: float, q: float, steps: float, delta: float) -> Bracket:
    if q == 1.0:
        return _closed(epsilon_of_shift(0.5 * math.log(steps) - math.log(sigma), math.log(delta)))
    if steps == 1:
        return _closed(amplified(exact_epsilon(sigma, math.log(delta) - math.log(q)), q))
    if indistinct(sigma, q, steps, delta):
        return Bracket(0.0, 0.0)
    for name, value, least in (("delta", delta, LEAST_DELTA), ("noise_multiplier", sigma, LEAST_SIGMA)):
        if value < least:
            raise NoAnswer(
                f"{name}={value:g} is below {least:g}, where floats have no digits left for this composition{OTHERS}"
            )
    if steps > MOST_STEPS:
        raise NoAnswer(
            f"steps={steps:g} is above {MOST_STEPS:g}, where rounding errors add up to more than the loss{OTHERS}"
        )
    return _refined(Step(sigma, q, math.log(delta) - math.log(steps) + _LOG_TAIL), steps, delta)


def _closed(epsilon: float) -> Bracket:
    return Bracket(epsilon * (1.0 - 1e-12) if epsilon < math.inf else 0.0, epsilon)


def _refined(step: Step, steps: float, delta: float) -> Bracket:
    """Refine both grids. The distance of the bounds falls with h², or with h where h is above the losses."""
    low, high = step.reach
    span = high - low
    interval, lower, upper, too_fine = span / _FEWEST, 0.0, math.inf, 0.0
    grid: Losses | None = None
    while True:
        try:
            pessimistic = worse(step, interval)
            above, theta = epsilon_of(pessimistic, steps, delta)
            if above == math.inf:  # no grid can change that
                break
            optimistic = better(step, interval, theta, 0.01 * ACCURACY * min(above, 1e6) / steps)
            below, _ = epsilon_of(optimistic, steps, delta, upper=False, theta=theta or None)
        except NoAnswer as error:  # the transform is too long
            too_fine, interval = interval, 8.0 * interval if grid is None else math.sqrt(interval * grid.interval)
            if grid is not None and interval > 0.7 * grid.interval:
                break
            if interval > min(100.0 * span, _COARSEST):
                raise NoAnswer(f"no grid for {steps:g} steps: {error}{OTHERS}") from error
            continue
        lower, upper, grid = max(lower, below), min(upper, above), pessimistic
        gap, wanted = upper - lower, max(ACCURACY * upper, LEAST)
        finer = interval * max(1.0 / 16.0, 0.7 * math.sqrt(wanted / gap)) if gap > 0 else interval
        finer = max(finer, span / _MOST, 1.2 * too_fine)
        if gap <= wanted or finer > 0.7 * interval:
            break
        interval = finer
    added = epsilon_of(grid.reversed(), steps, delta)[0] if grid is not None else math.inf
    if grid is None or added == math.inf:
        raise NoAnswer(f"rounding errors of {steps:g} steps leave nothing of delta={delta:g}{OTHERS}")
    return Bracket(lower, max(upper, added), grid.interval)


class _Bracketed(Accountant):
    """One side of the bracket. The detail has both, what lies between, and whether the bounds are `accurate`."""

    side: ClassVar[str]

    def _inside(self, mechanism: SubsampledGaussian, steps: float, delta: float) -> tuple[float, dict[str, Any]]:
        found = bracket(mechanism.noise_multiplier, mechanism.sample_rate, steps, delta)
        sides = {name: getattr(found, name) for name in ("lower", "estimate", "upper")}
        return sides[self.side], {**sides, "discretization": found.interval, "accurate": found.accurate}


class Prv(_Bracketed):
    """ε by numerical composition: the upper bound."""

    supports: ClassVar[frozenset[Scheme]] = SCHEMES
    composes = True
    side = "upper"

    def _inside(self, mechanism: SubsampledGaussian, steps: float, delta: float) -> tuple[float, dict[str, Any]]:
        if mechanism.scheme == HOME:
            return super()._inside(mechanism, steps, delta)
        from accounting.schemes import epsilon as epsilon_elsewhere  # imports scipy, which is slow

        return epsilon_elsewhere(mechanism, steps, delta)


class Lower(_Bracketed):
    """The certified lower bound on ε."""

    kind: Kind = "lower_bound"
    side = "lower"


class Estimate(_Bracketed):
    """The point between the bounds where ε most likely lies."""

    kind: Kind = "estimate"
    side = "estimate"
