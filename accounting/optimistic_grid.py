"""The optimistic grid: merge outcomes of a step into atoms on the grid, without changing means.

Cell j holds the outcomes with losses in [x_j, x_{j+1}], its P-mass p_j, and

    b_j = P − Q e^{x_j},   a_j = Q e^{x_{j+1}} − P,   both ≥ 0: above the lower end, below the upper one.

A random share α_j of each cell is merged with a share 1 − α_{j+1} of the next into one atom, whose outcomes are no
longer distinguished. This is post-processing, and lowers every δ(ε). The loss ln P/Q of the atom is exactly the grid's
x_{j+1} if

    α_j a_j = (1 − α_{j+1}) b_{j+1}.

From the left end (nothing comes from below: α = 1) this gives all α in turn. Errors die out where cells grow in mass,
so the recursion runs from both ends to the peak. In the peak's cell, the lower and the upper half get separate shares:
two unknowns for two equations. If no shares in [0, 1] solve them (the grid is coarser than the peak), an offset aligns
the grid with the peak. A mass that still lies between two losses is lowered to the first, which on removing a record
lowers the δ(ε) of any sum. Mass beyond both ends is dropped.
"""

import math
from dataclasses import dataclass

import numpy as np

from accounting.convolution import Losses
from accounting.discretised import Step, cells
from accounting.series import Array

#: How often the grid is aligned; the shares of the weight below which losses may fall under the grid.
_TURNS, _QUANTILES = 6, (1e-14, 1e-12, 1e-10, 1e-8, 1e-6, 1e-4, 0.01, 0.1, 0.5)


@dataclass
class _Merged:
    """P-mass at the grid's losses ([n]), and its P − Q e^x ([n], 0 where merged exactly).

    `lost`: P − Q e^x at the peak; `shift`: of the grid, to reduce it.
    """

    weights: Array
    excess: Array
    lost: float = 0.0
    shift: float = 0.0


def better(step: Step, interval: float, theta: float, tolerance: float) -> Losses:
    """A grid that is certainly better than the step, on removing a record.

    Args:
        step: one step of the mechanism.
        theta: the tilt e^{θy} under which it should be close.
        tolerance: the acceptable loss of accuracy per step.
    """
    low, high = step.reach
    first = math.floor(low / interval) - 1
    at = interval * np.arange(first, math.ceil(high / interval) + 2)
    offset = 0.0
    best: tuple[float, float, _Merged] | None = None
    for _ in range(_TURNS):
        found = _merge(step, at + offset)
        if best is None or found.lost < best[0]:
            best = found.lost, offset, found
        if found.lost < tolerance:
            break
        offset = math.remainder(offset + found.shift, interval)
    assert best is not None
    _, offset, found = best
    some = found.weights > 0
    above = np.where(some, -np.log1p(-np.minimum(found.excess / np.where(some, found.weights, 1.0), 0.9)), 0.0)
    with np.errstate(divide="ignore"):
        tilted = np.log(found.weights) + theta * at
    shift = _shift(np.exp(tilted - tilted.max()), above, interval)
    lowered = np.floor((above - shift) / interval).astype(np.int64) + np.arange(at.size)
    start = int(lowered.min())
    return Losses(np.bincount(lowered - start, found.weights), first + start, interval, 0.0, offset + shift)


def _merge(step: Step, at: Array) -> _Merged:
    p, b, a = cells(step, step.outcome(at), at[:-1], at[1:])
    merged, peak = _Merged(np.zeros(at.size), np.zeros(at.size)), int(np.argmax(p))
    rise, fall = slice(peak), slice(peak + 1, None)
    up = np.concatenate([_shares(a[rise], b[rise]), [0.0], 1.0 - _shares(b[fall][::-1], a[fall][::-1])[::-1]])
    down = 1.0 - up
    from_below = up[peak - 1] * a[peak - 1] if peak > 0 else 0.0
    from_above = down[peak + 1] * b[peak + 1] if peak + 1 < p.size else 0.0
    _meet(merged, step, at, peak, from_below, from_above)
    up[peak] = down[peak] = 0.0
    merged.weights[:-1] += down * p
    merged.weights[1:] += up * p
    merged.excess[:-1] += down * b
    merged.excess[1:] -= up * a
    return merged


def _shares(gives: Array, takes: Array) -> Array:
    """α with α_j gives_j = (1 − α_{j+1}) takes_{j+1}, by alternating sums, from α_0 = 1 on.

    Clipped to [0, 1], where merges are inexact. Computed in pieces over which the products do not overflow.
    """
    shares = np.ones(gives.size)
    some = (gives > 0) & (takes > 0)
    log_product = np.cumsum(np.where(some, np.log(np.where(some, gives, 1.0) / np.where(some, takes, 1.0)), 0.0))
    start, first = 0, 1.0
    while start < gives.size:
        relative = log_product[start:] - log_product[start]
        far = np.flatnonzero(np.abs(relative) > 200.0)
        end = start + (int(far[0]) if far.size else relative.size)
        here, signs = gives[start:end], np.where(np.arange(end - start) % 2, -1.0, 1.0)
        scaled = signs * here * np.exp(-relative[: end - start])
        scaled[0] *= first
        flow = signs * np.exp(relative[: end - start]) * np.cumsum(scaled)
        with np.errstate(over="ignore"):
            found = np.clip(np.where(here > 0, flow / np.where(here > 0, here, 1.0), 1.0), 0.0, 1.0)
        shares[start:end] = found
        if end < gives.size and takes[end] > 0:
            first = min(1.0, max(0.0, 1.0 - found[-1] * here[-1] / takes[end]))
        start = end
    return shares


def _meet(merged: _Merged, step: Step, at: Array, place: int, from_below: float, from_above: float) -> None:
    """Share out the peak's cell, by halves: to its lower end as little as possible beyond `from_below`."""
    low, high = float(at[place]), float(at[place + 1])
    halves = step.outcome(np.array([low, low + 0.5 * (high - low), high]))
    p, b, a = cells(step, halves, np.full(2, low), np.full(2, high))
    kept = _kept(b, a, float(from_below), float(from_above))
    lost = float(kept @ b) - from_below + from_above - float((1.0 - kept) @ a)
    total, over, under = float(p.sum()), float(b.sum()) - from_below, float(a.sum()) - from_above
    merged.weights[place] += float(kept @ p)
    merged.excess[place] += float(kept @ b)
    merged.weights[place + 1] += float((1.0 - kept) @ p)
    merged.excess[place + 1] -= float((1.0 - kept) @ a)
    merged.lost += max(0.0, lost)
    if lost > 0 and total > 0:
        merged.shift = (over if over < under else -under) / total


def _kept(b: Array, a: Array, from_below: float, from_above: float) -> Array:
    """Shares (u, v) of both halves for the lower end, with ub₀ + vb₁ ≥ from_below and (1−u)a₀ + (1−v)a₁ ≤ from_above.

    Minimises the loss u(a₀ + b₀) + v(a₁ + b₁): a corner of the polygon.
    """
    b0, b1, a0, a1 = (float(x) for x in (*b, *a))
    rest = a0 + a1 - from_above

    def second(u: float) -> float:  # the least v for u
        return max(0.0, (from_below - u * b0) / b1 if b1 > 0 else 0.0, (rest - u * a0) / a1 if a1 > 0 else 0.0)

    def first(v: float) -> float:
        return max(0.0, (from_below - v * b1) / b0 if b0 > 0 else 0.0, (rest - v * a1) / a0 if a0 > 0 else 0.0)

    corners = [(0.0, second(0.0)), (1.0, second(1.0)), (first(0.0), 0.0), (first(1.0), 1.0), (1.0, 1.0)]
    determinant = b0 * a1 - b1 * a0
    if determinant:
        corners.append(((from_below * a1 - b1 * rest) / determinant, (b0 * rest - a0 * from_below) / determinant))
    inside = [(u, v) for u, v in corners if 0 <= u <= 1 and 0 <= v <= 1]
    fair = [(u, v) for u, v in inside if v >= second(u) * (1 - 1e-9)] or [(1.0, 1.0)]
    return np.array(min(fair, key=lambda c: c[0] * (a0 + b0) + c[1] * (a1 + b1)))


def _shift(weights: Array, above: Array, interval: float) -> float:
    """The shift of the grid that minimises the weighted mean by which losses are lowered to it."""
    order = np.argsort(above)
    ranked = np.cumsum(weights[order])
    places = np.searchsorted(ranked, ranked[-1] * np.array(_QUANTILES))
    candidates = above[order[np.minimum(places, order.size - 1)]]
    return float(min(candidates, key=lambda candidate: float(weights @ np.mod(above - candidate, interval))))
