"""Dominating pairs (P, Q) of one step, and their privacy losses ln P/Q on a grid.

With y(x) = (2x − 1)/2σ², the loss of N(1, σ²) to N(0, σ²) at x, and ℓ(x) = ln(1 − q + q e^{y(x)}):

    removed    P = (1 − q) N(0, σ²) + q N(1, σ²)   Q = N(0, σ²)                       loss  ℓ(x)
    added      P = N(0, σ²)                        Q = (1 − q) N(0, σ²) + q N(−1, σ²)  loss −ℓ(−x)
    replaced   P = (1 − q) N(0, σ²) + q N(1, σ²)   Q = (1 − q) N(0, σ²) + q N(−1, σ²)  loss  ℓ(x) − ℓ(−x)

all rising in x, with the inverses x = σ² ln(1 + (e^ε − 1)/q) + 1/2, its mirror image, and x = σ²(ε/2 + asinh((1 − q)/q
e^{1/2σ²} sinh(ε/2))). A step whose regime is drawn first, with known probabilities that do not depend on the record,
has the losses of the regimes in these shares.

- *Poisson*: removed and added, each direction composed separately (Zhu, Dong and Wang 2022, Theorem 11); replaced
  (Schuchardt et al. 2024, Unified Mechanism-Specific Amplification by Subsampling: one insertion and one deletion).
- *without replacement*: to remove (see `accounting.sampling`) the pairs at σ/2. To replace, δ(ε) of one step is that of
  "removed" at σ/2 for ε ≥ 0 and of "added" for ε < 0 (Zhu, Dong and Wang 2022, Theorem 11). This curve is convex in
  e^ε, so it is one distribution of losses: the first's losses above 0, the second's below 0, the rest at 0.
  Zeroing a gradient replaces it by a zero.
- *truncated Poisson*, n records, at most B kept. Let k ~ Bin(n − 1, q) others be drawn. With k < B the record fits: a
  Poisson step. Else the others kept are B drawn uniformly from all others, whatever k, and the record takes the place
  of one with probability q' = P[Bin(n, q) > B] B/n / P[k ≥ B]: a step without replacement. So the step mixes both with
  weights P[k < B] and P[k ≥ B]. (dp-accounting has the same idea, with "replaced" for the second.) A zeroed record is
  drawn as before: in the first it is like a removed one, in the second like a replaced one.

The grid is pessimistic ("connect the dots", Doroshenko et al. 2022): mass of P and of Q between two neighbouring losses
goes to these two so that both are kept. This can only raise δ(ε), and leaves it unchanged at the grid's points.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import betainc, betaincc, ndtr

from accounting.convolution import Array, Losses
from accounting.series import log_mixed, unmixed


@dataclass(frozen=True)
class Pair:
    """(P, Q) on the real line, with a rising loss; P and Q are mixtures of (share, mean) parts N(mean, σ²)."""

    sigma: float
    p: tuple[tuple[float, float], ...]
    q: tuple[tuple[float, float], ...]
    loss: Callable[[float], float]
    inverse: Callable[[Array], Array]

    def reach(self, log_mass: float) -> tuple[float, float]:
        """Losses between which all but e^log_mass of P lies, on each side."""
        each = log_mass - math.log(len(self.p))
        ends = [  # rarer parts may lie outside
            (mean, self.sigma * math.sqrt(2.0 * (math.log(share) - each)))
            for share, mean in self.p
            if share > 0 and math.log(share) > each
        ]
        return self.loss(min(mean - far for mean, far in ends)), self.loss(max(mean + far for mean, far in ends))

    def reversed(self) -> Pair:
        """(Q, P), mirrored at 0 so that its loss rises, too."""
        p, q = (tuple((share, -mean) for share, mean in parts) for parts in (self.q, self.p))
        return Pair(self.sigma, p, q, lambda x: -self.loss(-x), lambda eps: -self.inverse(-eps))

    def masses(self, edges: Array) -> tuple[Array, Array]:
        """P and Q between neighbouring losses of `edges` [n], and beyond the first and the last: both [n + 1].

        Args:
            edges: losses, rising, [n].
        """
        x = np.concatenate([[-np.inf], self.inverse(edges), [np.inf]])
        return _between(x, self.sigma, self.p), _between(x, self.sigma, self.q)


def _between(x: Array, sigma: float, parts: tuple[tuple[float, float], ...]) -> Array:
    total = np.zeros(x.size - 1)
    for share, mean in parts:
        z = (x - mean) / sigma
        low, high = z[:-1], z[1:]
        upper = low > 0  # in the tails, differences of small numbers keep their digits
        total += share * np.where(upper, ndtr(-low) - ndtr(-high), ndtr(high) - ndtr(low))
    return total


def removed(sigma: float, q: float) -> Pair:
    """The pair for removing a record: (1 − q) N(0, σ²) + q N(1, σ²) against N(0, σ²)."""
    squared = sigma * sigma
    return Pair(
        sigma,
        ((1 - q, 0.0), (q, 1.0)),
        ((1.0, 0.0),),
        lambda x: _loss(x, sigma, q),
        lambda eps: squared * unmixed(eps, q) + 0.5,
    )


def replaced(sigma: float, q: float) -> Pair:
    """The pair for replacing a record: mixtures with N(1, σ²) and with N(−1, σ²)."""
    log_ratio = math.log1p(-q) - math.log(q) + 0.5 / sigma / sigma if q < 1 else -math.inf

    def inverse(eps: Array) -> Array:
        half = 0.5 * np.abs(eps)
        with np.errstate(divide="ignore", over="ignore"):
            log_sinh = np.where(half < 20, np.log(np.sinh(np.minimum(half, 20))), half - math.log(2.0))
            log_a = log_ratio + log_sinh
            asinh = np.where(log_a < 20, np.arcsinh(np.exp(np.minimum(log_a, 20))), log_a + math.log(2.0))
        return sigma * sigma * np.sign(eps) * (half + asinh)

    parts = ((1 - q, 0.0), (q, 1.0)), ((1 - q, 0.0), (q, -1.0))
    return Pair(sigma, *parts, lambda x: _loss(x, sigma, q) - _loss(-x, sigma, q), inverse)


def _loss(x: float, sigma: float, q: float) -> float:
    """ℓ(x)."""
    return float(log_mixed(np.asarray((x - 0.5) / sigma / sigma), q))


#: (share, pair, sign of the losses that belong to it: 1, −1, or 0 for all)
Regime = tuple[float, Pair, int]


def directions(
    sampling: str, adjacency: str, sigma: float, q: float, sizes: tuple[int, int] | None
) -> list[list[Regime]]:
    """The regimes of one step in each direction; ε is the larger of the directions'.

    Args:
        sampling, adjacency: names of `accounting.sampling`.
        sizes: n, the records, and B, the largest batch, under truncated sampling; else None.
    """
    if sampling == "truncated_poisson":
        assert sizes is not None
        n, most = sizes
        # P[k ≥ B] and P[k < B]; bdtrc overflows from n = 2³¹ on, and has lost nine digits before
        full = float(betainc(most, n - most, q)) if most < n else 0.0
        if full > 0.0:
            within = min(q, float(betainc(most + 1, n - most, q)) * most / n / full)
            parts = [
                (float(betaincc(most, n - most, q)), "poisson", sigma, q),
                (full, "without_replacement", sigma, within),
            ]
            each = [directions(name, adjacency, s, rate, None) for _, name, s, rate in parts if rate > 0]
            shares = [share for share, _, _, rate in parts if rate > 0]
            count = max(len(found) for found in each)
            return [
                [
                    (share * inner, pair, sign)
                    for share, found in zip(shares, each, strict=True)
                    for inner, pair, sign in found[min(direction, len(found) - 1)]
                ]
                for direction in range(count)
            ]
        sampling = "poisson"
    if sampling == "without_replacement":
        sigma *= 0.5
        if adjacency != "add_remove":
            pair = removed(sigma, q)
            return [[(1.0, pair, 1), (1.0, pair.reversed(), -1)]]
    elif adjacency == "replace_one":
        return [[(1.0, replaced(sigma, q), 0)]]
    return both_ways(removed(sigma, q))


def both_ways(pair: Pair) -> list[list[Regime]]:
    """A pair and its reverse, one direction each.

    Args:
        pair: of removing records.
    """
    return [[(1.0, pair, 0)], [(1.0, pair.reversed(), 0)]]


def reach(regimes: list[Regime], log_mass: float) -> tuple[float, float]:
    """Losses between which all but e^log_mass of each regime lies, on each side."""
    ends = [pair.reach(log_mass) for _, pair, _ in regimes]
    return min(low for low, _ in ends), max(high for _, high in ends)


def on_grid(regimes: list[Regime], first: int, last: int, interval: float) -> Losses:
    """The pessimistic grid at `first` to `last` (whole numbers, first ≤ 0 ≤ last, first < last) times `interval`.

    Args:
        first, last: the ends of the grid, in intervals.
    """
    edges = np.arange(first, last + 1, dtype=np.float64) * interval
    weights, infinite = np.zeros(edges.size), 0.0
    for share, pair, sign in regimes:
        p, q = pair.masses(edges)
        if sign:  # bins on one side of the loss 0, an edge
            above = np.arange(p.size) > -first
            p, q = (np.where(above if sign > 0 else ~above, mass, 0.0) for mass in (p, q))
        inner_p, inner_q = p[1:-1], q[1:-1]
        with np.errstate(over="ignore", invalid="ignore"):
            high = (inner_p - inner_q * np.exp(edges[:-1])) / -math.expm1(-interval)
        high = np.where(edges[:-1] < 700.0, np.clip(np.nan_to_num(high), 0.0, inner_p), inner_p)
        own_weights = np.zeros(edges.size)
        own_weights[1:] += high
        own_weights[:-1] += inner_p - high
        own_weights[0] += p[0]
        infinite += share * p[-1]
        weights += share * own_weights
    halves = [share for share, _, sign in regimes if sign]
    if halves:  # the rest has a loss of 0
        weights[-first] += max(0.0, sum(share for share, _, sign in regimes if sign >= 0) - weights.sum() - infinite)
    return Losses(weights, first, interval, infinite)
