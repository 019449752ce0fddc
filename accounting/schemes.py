"""ε under every scheme: the dominating pairs of its steps (`accounting.dominating_pairs`), composed on a grid.

Steps of several kinds are composed as they are, in each direction separately.

A grid of losses h apart raises the variance of a step by about h²/6. So ln of the moment at the tilt θ
(`accounting.convolution`) rises by θ(θ + 1)h²/12, and ε by T(θ + 1)h²/12. h is chosen to keep this a small part of ε,
in two or three passes on finer and finer grids, and further until a finer grid changes nothing (the formula fails for
rare losses). If that takes more than `_MOST` losses, the result is a looser upper bound; if no grid spans the losses of
T steps, it is T times the largest loss of one step, apart from rare ones.

Functions take:
    parts: (mechanism, number of steps); at least one, with σ > 0, q > 0 and steps >= 1 each.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from accounting.convolution import Losses, Part, epsilon_of_parts
from accounting.dominating_pairs import Regime, directions, on_grid
from accounting.dominating_pairs import reach as reach_of_regimes
from accounting.gaussian import epsilon_of_shift
from accounting.groups import of_group
from accounting.mechanism import NoAnswer, SubsampledGaussian
from accounting.random_allocation import LEAST_NOISE, Epoch
from accounting.reductions import at_home, batches_of_epoch, bound_elsewhere, epochs_begun
from accounting.sampling import BY_EPOCH, HOME, SCHEMES

#: Less noise than this counts as none. More noise, or a smaller rate, is replaced by the limit.
_LEAST_NOISE, _MOST_NOISE, _LEAST_RATE = 1e-100, 1e9, 1e-200
_MOST_STEPS, _FEWEST, _MOST, _PASSES = 1e15, 2**10, 2**18, 8
#: The relative error of ε that the grid may cause.
_TOLERANCE = 3e-4


def epsilon(mechanism: SubsampledGaussian, steps: float, delta: float) -> tuple[float, dict[str, Any]]:
    """(ε, detail): an upper bound inside the edges of `accounting.base`, for a scheme of `accounting.sampling.SCHEMES`.

    Raises:
        NoAnswer: there is almost no noise.
    """
    if mechanism.scheme == ("balls_and_bins", "replace_one"):
        found = bound_elsewhere(epsilon, SCHEMES - {mechanism.scheme}, mechanism, steps, delta)
        assert found is not None
        return found
    return epsilon_of_mechanisms([(at_home(mechanism), steps)], delta)


def epsilon_of_mechanisms(
    parts: Sequence[tuple[SubsampledGaussian, float]], delta: float
) -> tuple[float, dict[str, Any]]:
    """(ε, detail) for steps of several kinds, under one adjacency.

    Raises:
        NoAnswer: there is almost no noise.
    """
    mu, begun = gaussian(parts)
    if mu is not None:
        value = epsilon_of_shift(math.log(mu), math.log(delta))
        return value, {"bound": "one Gaussian step an epoch, composed exactly", "epochs": begun}
    value, interval = max(_one(phases, delta) for phases in phases_of(parts))
    mu, _ = gaussian([(replace(m, sampling="shuffled") if m.sampling in BY_EPOCH else m, steps) for m, steps in parts])
    if mu is not None:  # as if the order were known: smaller if δ is below the resolution of the grid
        value = min(value, epsilon_of_shift(math.log(mu), math.log(delta)))
    return value, {"discretization": interval}


def gaussian(parts: Sequence[tuple[SubsampledGaussian, float]]) -> tuple[float | None, float]:
    """(μ, epochs) if all parts are Gaussian steps on all records, or one an epoch: together exactly μ-GDP.

    Raises:
        NoAnswer: there is almost no noise.
    """
    found = [_epochs(mechanism, steps) for mechanism, steps in parts]
    shifts = [math.sqrt(epochs) / sigma for sigma, epochs in filter(None, found)]
    mu = math.hypot(*shifts) if len(shifts) == len(parts) else None
    return mu, sum(epochs for _, epochs in filter(None, found))


def _epochs(mechanism: SubsampledGaussian, steps: float) -> tuple[float, float] | None:
    """(σ, epochs) for one Gaussian step an epoch; None if sampling amplifies, or each step draws a fresh batch.

    Raises:
        NoAnswer: there is almost no noise.
    """
    sigma, q = _kept(mechanism)
    amplified = mechanism.adjacency != "replace_one" and sigma >= LEAST_NOISE and q <= 0.5  # for balls and bins
    by_epoch = mechanism.sampling in BY_EPOCH and not (mechanism.sampling == "balls_and_bins" and amplified)
    if by_epoch or (q == 1.0 and mechanism.sampling != "truncated_poisson"):
        moved = mechanism.group_size * (2.0 if mechanism.adjacency == "replace_one" else 1.0)
        return sigma / moved, epochs_begun(q, steps)
    return None


def _kept(mechanism: SubsampledGaussian) -> tuple[float, float]:
    """(σ, q) limited to the supported range."""
    if mechanism.noise_multiplier < _LEAST_NOISE:
        raise NoAnswer(f"noise_multiplier={mechanism.noise_multiplier:g}, of {_LEAST_NOISE:g} at least")
    return min(mechanism.noise_multiplier, _MOST_NOISE), max(mechanism.sample_rate, _LEAST_RATE)


#: The regimes of a step, or an epoch of several; and how many.
Phase = tuple[list[Regime] | Epoch, float]


def phases_of(parts: Sequence[tuple[SubsampledGaussian, float]]) -> list[list[Phase]]:
    """The regimes of each part's steps, in each direction.

    Raises:
        NoAnswer: there is almost no noise.
    """
    found: list[list[Phase]] = []
    for mechanism, steps in parts:
        (sigma, q), (sampling, adjacency), sizes = _kept(mechanism), mechanism.scheme, None
        if epoch := _epochs(mechanism, steps):
            (sigma, steps), q, sampling, adjacency = epoch, 1.0, "poisson", "add_remove"
        elif mechanism.group_size > 1:
            if mechanism.scheme != HOME:
                raise NoAnswer(
                    "no bound for a group of records but under Poisson sampling, or in passes over all records"
                )
            found.append([(regimes, steps) for regimes in of_group(sigma, q, mechanism.group_size)])
            continue
        elif sampling == "balls_and_bins":
            if len(parts) > 1:
                raise NoAnswer(
                    "no bound of unlike steps under balls and bins, whose batches are drawn an epoch at a time"
                )
            count, batches = epochs_begun(q, steps), batches_of_epoch(q)
            found.append([(Epoch(sigma, batches, adds), count) for adds in (False, True)])
            continue
        if mechanism.dataset_size is not None and mechanism.max_batch_size is not None:
            sizes = mechanism.dataset_size, mechanism.max_batch_size
        found.append([(regimes, steps) for regimes in directions(sampling, adjacency, sigma, q, sizes)])
    count = max(len(each) for each in found)  # a Gaussian step has one direction
    return [[each[min(place, len(each) - 1)] for each in found] for place in range(count)]


def _one(phases: list[Phase], delta: float) -> tuple[float, float]:
    """(ε, h) in one direction."""
    total = sum(steps for _, steps in phases)
    log_mass = math.log(delta) - math.log(total) - math.log(1e4)
    ends = [reach(regimes, log_mass) for regimes, _ in phases]
    span = span_of(ends)
    best = (sum(steps * high for (_, high), (_, steps) in zip(ends, phases, strict=True)), span)
    if not 0 < span < math.inf or best[0] == math.inf or total > _MOST_STEPS:
        return best
    h, before = span / 2**12, math.inf
    for _ in range(_PASSES):
        try:
            value, theta = epsilon_of_parts(on_grids(phases, ends, h), delta)
        except NoAnswer:  # the window is too long for this interval
            if before < math.inf:
                break
            h *= 4.0
            continue
        best = min(best, (value, h))
        finer = max(span / _MOST, min(math.sqrt(12.0 * _TOLERANCE * value / (total * (theta + 1.0))), 0.5 * h))
        if value == 0 or h < 1.2 * finer or (before - value <= _TOLERANCE * value and h <= span / _FEWEST):
            break
        h, before = finer, value
    return best[0] * (1.0 + 1e-9) + 1e-15 * total, best[1]


def reach(losses: list[Regime] | Epoch, log_mass: float) -> tuple[float, float]:
    """Losses between which all but about e^log_mass lies, on each side.

    Args:
        losses: of one direction.
    """
    return losses.reach(log_mass) if isinstance(losses, Epoch) else reach_of_regimes(losses, log_mass)


def span_of(ends: Sequence[tuple[float, float]]) -> float:
    """The distance between the extreme losses of a step, including 0.

    Args:
        ends: the smallest and the largest loss of each kind of step.
    """
    return max(max(high, 0.0) - min(low, 0.0) for low, high in ends)


def on_grids(phases: Sequence[Phase], ends: Sequence[tuple[float, float]], interval: float) -> list[Part]:
    """The losses of each phase's steps, `interval` apart, and the number of steps.

    Args:
        phases: of one direction.
        ends: the smallest and the largest loss of a step of each.

    Raises:
        NoAnswer: an epoch of balls and bins needs too many losses.
    """

    def of(losses: list[Regime] | Epoch, low: float, high: float) -> Losses:
        if isinstance(losses, Epoch):
            return losses.on_grid(interval)
        return on_grid(losses, min(-1, math.floor(low / interval)), max(1, math.ceil(high / interval)), interval)

    return [(of(losses, *each), steps) for (losses, steps), each in zip(phases, ends, strict=True)]
