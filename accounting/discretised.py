"""One step as losses on a grid: a pessimistic distribution, which is certainly worse than the step.

With z standard normal under Q and μ = 1/σ, the pair that dominates a Poisson step on removing a record is

    P = (1 − q) N(0, 1) + q N(μ, 1),   Q = N(0, 1),   loss y(z) = ln P/Q = ln(1 − q + q e^{μz − μ²/2}),

and the pair on adding one is (Q, P), with losses −y (Zhu, Dong and Wang 2022, Theorem 11).

The pessimistic grid is "connect the dots" (Doroshenko et al. 2022): mass between two neighbouring losses jh goes to
these two so that both P and Q are kept. This spreads L = e^y with its mean under Q kept, so every δ(ε) = E_Q[(L −
e^ε)₊] grows, and so does δ(ε) of a composition, in both directions. Mass beyond the ends goes to losses of ±∞. The
optimistic grid is in `accounting.optimistic_grid`.

Per step the grids differ from the truth by variances of h²/6 and −h²/3, where the loss has a smooth density, at the
same mean of L. So ε moves by a multiple of Th²; rounding up or down would move it by Th, and matching means (Gopi, Lee
and Wutschitz 2021) proves h√T. Masses are sums over Gauss-Legendre nodes, so that no digits are lost to differences of
tails.

Functions take:
    step: one Poisson step.
    losses: y, of any shape.
"""

import math
from dataclasses import dataclass

import numpy as np

from accounting.convolution import Losses
from accounting.mechanism import NoAnswer
from accounting.series import Array, log_ratio, unmixed

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(4)
_NODES, _WEIGHTS = 0.5 * (_NODES + 1.0), 0.5 * _WEIGHTS


@dataclass(frozen=True)
class Step:
    """One Poisson step at σ > 0 and 0 < q < 1; outcomes are cut where P and Q have less than e^`log_tail` beyond."""

    sigma: float
    q: float
    log_tail: float

    @property
    def outcomes(self) -> tuple[float, float]:
        """z between which all of P and Q lies but for e^log_tail on each side (Φ(−t) ≤ e^{−t²/2}/2)."""
        far = math.sqrt(-2.0 * self.log_tail)
        shifted = math.sqrt(max(0.0, -2.0 * (self.log_tail - math.log(self.q))))
        return -far, max(far, 1.0 / self.sigma + shifted)

    @property
    def reach(self) -> tuple[float, float]:
        """The losses at the ends of `outcomes`.

        Raises:
            NoAnswer: there is too much noise for a grid.
        """
        low, high = (float(y) for y in log_ratio(np.array(self.outcomes), self.sigma, self.q))
        if not 1e-100 < high - low < math.inf:
            raise NoAnswer(f"losses of a step from {low:g} to {high:g} are too few floats for a grid")
        return low, high

    def outcome(self, losses: Array) -> Array:
        """z with y(z) = `losses`, clipped to `outcomes`."""
        return np.clip(self.sigma * unmixed(losses, self.q) + 0.5 / self.sigma, *self.outcomes)

    def nodes(self, cuts: Array) -> tuple[Array, Array, np.ndarray]:
        """Losses and P-masses of nodes, [m, 4], and their cells between neighbouring `cuts`, [m].

        A cell is split if the densities change too much within it for four nodes.

        Args:
            cuts: z, rising, [n + 1]: the edges of n cells.
        """
        width, left = np.diff(cuts), cuts[:-1]
        scale = np.maximum(np.maximum(np.abs(left), np.abs(cuts[1:])), max(1.0, 1.0 / self.sigma))
        parts = np.maximum(1, np.ceil(4.0 * width * scale)).astype(np.int64)
        if parts.max(initial=1) > 1:
            cells = np.repeat(np.arange(left.size), parts)
            place = np.arange(cells.size) - np.repeat(np.cumsum(parts) - parts, parts)
            width = width[cells] / parts[cells]
            left = left[cells] + place * width
        else:
            cells = np.arange(left.size)
        z = left[:, None] + width[:, None] * _NODES
        losses = log_ratio(z, self.sigma, self.q)
        masses = (width[:, None] * (_WEIGHTS / math.sqrt(2.0 * math.pi))) * np.exp(losses - 0.5 * z * z)
        return losses, masses, cells


def worse(step: Step, interval: float) -> Losses:
    """The pessimistic grid, for both directions."""
    low, high = step.reach
    first = math.floor(low / interval)
    at = interval * np.arange(first, max(math.ceil(high / interval), first + 1) + 1)
    p, over, _ = cells(step, step.outcome(at), at[:-1], at[1:])
    up = np.minimum(over / -math.expm1(-interval), p)
    weights = np.zeros(at.size)
    weights[1:] += up
    weights[:-1] += p - up
    return Losses(weights, first, interval, 2.0 * math.exp(step.log_tail))


def cells(step: Step, cuts: Array, low: Array, high: Array) -> tuple[Array, Array, Array]:
    """P, P − Qe^low and Qe^high − P of each cell, [n], as sums of positive terms.

    Args:
        cuts: edges of the cells in z, rising, [n + 1].
        low, high: the losses at each cell's ends, [n].
    """
    losses, masses, cell = step.nodes(cuts)

    def total(terms: Array) -> Array:
        return np.bincount(cell, terms.sum(axis=1), minlength=low.size)

    return (
        total(masses),
        total(masses * -np.expm1(np.minimum(low[cell][:, None] - losses, 0.0))),
        total(masses * np.expm1(np.maximum(high[cell][:, None] - losses, 0.0))),
    )
