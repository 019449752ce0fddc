"""ε under every scheme by the pairs of distributions that dominate its steps (`accounting.dominating_pairs`), composed
on a grid.

The losses h apart that stand for one step have a variance larger by about h²/6, so that ln of the moment at the tilt θ
(`accounting.convolution`) rises by θ(θ + 1)h²/12, and ε by T(θ + 1)h²/12: h is chosen so that this is a small part of
ε, in two or three passes, each on a grid finer than the last. What cannot be had with `_MOST` losses stays an upper
bound, and a looser one; where no grid spans the losses of T steps it is T times the largest loss of one, but for rare
ones.
"""

from __future__ import annotations

import math
from typing import Any

from accounting.convolution import epsilon_of
from accounting.dominating_pairs import Regime, directions, on_grid, reach
from accounting.gaussian import exact_epsilon
from accounting.mechanism import NoAnswer, SubsampledGaussian
from accounting.reductions import epochs_begun

#: Less noise than this is as good as none; more of it, or more rarely sampled, is counted as this.
_LEAST_NOISE, _MOST_NOISE, _LEAST_RATE = 1e-100, 1e9, 1e-200
_MOST_STEPS, _FEWEST, _MOST = 1e15, 2**10, 2**18
#: By how much of itself ε may be too large for the grid's sake.
_TOLERANCE = 3e-4


def epsilon(mechanism: SubsampledGaussian, steps: float, delta: float) -> tuple[float, dict[str, Any]]:
    """(ε, detail): an upper bound inside the edges of `accounting.base`, for a scheme of `accounting.sampling.SCHEMES`.

    Args:
        mechanism: of each step.
        steps: T.
        delta: in (0, 1).

    Raises:
        NoAnswer: there is next to no noise.
    """
    sampling, adjacency = mechanism.scheme
    sigma, q = min(mechanism.noise_multiplier, _MOST_NOISE), max(mechanism.sample_rate, _LEAST_RATE)
    if sigma < _LEAST_NOISE:
        raise NoAnswer(f"noise_multiplier={sigma:g}, of {_LEAST_NOISE:g} at least")
    if sampling in ("one_pass", "shuffled") or (q == 1.0 and sampling != "truncated_poisson"):
        begun = epochs_begun(q, steps)
        each = sigma / (2.0 if adjacency == "replace_one" else 1.0)
        value = exact_epsilon(each / math.sqrt(begun), math.log(delta))
        return value, {"bound": "one Gaussian step an epoch, composed exactly", "epochs": begun}
    sizes = None
    if mechanism.dataset_size is not None and mechanism.max_batch_size is not None:
        sizes = mechanism.dataset_size, mechanism.max_batch_size
    answers = [_one(regimes, steps, delta) for regimes in directions(sampling, adjacency, sigma, q, sizes)]
    value, interval = max(answers)
    return value, {"discretization": interval}


def _one(regimes: list[Regime], steps: float, delta: float) -> tuple[float, float]:
    """(ε, h) in one direction."""
    log_mass = math.log(delta) - math.log(steps) - math.log(1e4)
    low, high = reach(regimes, log_mass)
    span = max(high, 0.0) - min(low, 0.0)
    best = (steps * high, span)
    if not 0 < span < math.inf or best[0] == math.inf or steps > _MOST_STEPS:
        return best
    h = span / 2**12
    for _ in range(6):
        found = _at(regimes, low, high, h, steps, delta)
        if found is None:
            h *= 4.0
            continue
        value, theta = found
        best = min(best, (value, h))
        if value == 0:
            break
        wanted = math.sqrt(12.0 * _TOLERANCE * value / (steps * (theta + 1.0)))
        finer = min(max(wanted, span / _MOST), span / _FEWEST)
        if h <= 1.2 * finer:
            break
        h = finer
    return best[0] * (1.0 + 1e-9) + 1e-15 * steps, best[1]


def _at(
    regimes: list[Regime], low: float, high: float, h: float, steps: float, delta: float
) -> tuple[float, float] | None:
    """(ε, θ) with losses h apart, or None if the window is too long for them."""
    first, last = min(-1, math.floor(low / h)), max(1, math.ceil(high / h))
    try:
        return epsilon_of(on_grid(regimes, first, last, h), steps, delta)
    except NoAnswer:
        return None
