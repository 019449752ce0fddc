"""Buffered linear Toeplitz noise (BLT), correlated over all steps: its coefficients and its accounting.

**Mechanism.** C [T, T] is lower triangular and Toeplitz, C[t, s] = c_{t-s} for s ≤ t, with D buffers:

    c_0 = 1,    c_t = Σ_j ω_j θ_j^{t-1} for t ≥ 1,    ω_j ≥ 0,  0 ≤ θ_j < 1,  Σ_j ω_j ≤ 1,

so that the entries are not negative and never rise. The rows of G [T, d] are the sums of clipped gradients, and one
record moves each row by at most S. Z [T, d] has independent N(0, σ²S²) entries. The mechanism releases the rows of G +
C⁻¹Z, a function of CG + Z. Later noise cancels part of earlier noise in the prefix sums of the rows, which are SGD's
iterates.

**Sensitivity.** Let a record be in m ≤ k steps s_1 < ... < s_m, each at least b after the one before
(b-min-separation), with clipped gradients g_i, ‖g_i‖ ≤ S. With c(s) = C[:, s], it moves CG by Σ_i c(s_i) g_iᵀ, and

    ‖Σ_i c(s_i) g_iᵀ‖² = Σ_{i,j} ⟨c(s_i), c(s_j)⟩ ⟨g_i, g_j⟩ ≤ S² Σ_{i,j} ⟨c(s_i), c(s_j)⟩,

as no product of columns is negative. For i ≤ j, s_j ≥ (j - 1)b and s_j - s_i ≥ (j - i)b. As entries never rise, and a
sum of fewer non-negative terms is smaller,

    ⟨c(s_i), c(s_j)⟩ = Σ_{r < T-s_j} c_{r+s_j-s_i} c_r ≤ Σ_{r < T-(j-1)b} c_{r+(j-i)b} c_r = ⟨c((i-1)b), c((j-1)b)⟩.

So the movement is at most Δ S with Δ = ‖Σ_{i<k} C[:, ib]‖, attained by k steps b apart from the first one on. Here k =
⌈T/b⌉, the most there can be. (Kalinin and Lampert 2024, arXiv:2405.13763, Theorem 2.)

Setting entries of C to 0 increases no product, so the bound also holds if the noise stream restarts at some row. If it
restarts for some coordinates only, let G_u be the part of G in the coordinates u of one such group: the last sum above
has Σ_u ‖g_iu‖ ‖g_ju‖ ≤ S² in place of S². Rows that are not released may be left out: a skipped batch is such a row,
and the stream restarts after it. The stream also restarts when a checkpoint is loaded: at most b - 1 such rows for each
abandoned step put a record's steps b or more apart again.

**Accounting.** All T steps together are one Gaussian mechanism with μ = Δ/σ, under zeroing one record's gradient. Given
the earlier rows of CG + Z, row t is normal around two centres for two neighbours, v_t apart, where v_t is a function of
these rows, and Σ_t ‖v_t‖² ≤ Δ²S² whatever they are: the other records' gradients are the same functions of them. (Add a
row of its own noise that makes it an equality; that releases more.) The log likelihood ratio is (X ± Δ²S²/2)/(σ²S²)
with X = Σ_t ⟨v_t, z_t⟩, and E exp(iλX) = exp(-λ²Δ²σ²S⁴/2), since exp(iλX_t + λ²σ²S²Σ_{s≤t}‖v_s‖²/2) is a martingale. So
X is normal, and the ratio is that of N(0, 1) and N(μ, 1): one step of the Gaussian mechanism with the noise multiplier
σ/Δ, for any accountant. Sampling does not amplify: the steps of a record must be known to be b apart, as in passes over
the data in one order, where b is the steps of an epoch.

McMahan, Xu and Zhang (2024), "A Hassle-free Algorithm for Strong Differential Privacy in Federated Learning Systems",
arXiv:2408.08868; Dvijotham, McMahan, Pillutla, Steinke and Thakurta (2024), "Efficient and Near-Optimal Noise
Generation for Streaming Differential Privacy", arXiv:2404.16706.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize
from scipy.signal import lfilter
from scipy.special import expit, logit, softmax

from accounting.mechanism import ArgumentError, SubsampledGaussian, whole
from accounting.series import Array


@dataclass(frozen=True)
class Blt:
    """C, for any number of steps T.

    Args:
        omega, theta: ω and θ, one each for every buffer.
        separation: b, at least 1.

    Raises:
        ArgumentError: an entry of C would be negative, or above the one before it.
    """

    omega: tuple[float, ...]
    theta: tuple[float, ...]
    separation: int

    def __post_init__(self) -> None:
        whole("separation", self.separation, least=1)
        if not (all(w >= 0 for w in self.omega) and sum(self.omega) <= 1):
            raise ArgumentError("omega", "to be numbers >= 0 with a sum <= 1", self.omega)
        if not all(0 <= x < 1 for x in self.theta) or len(self.theta) != len(self.omega):
            raise ArgumentError("theta", f"to be {len(self.omega)} numbers in [0, 1)", self.theta)

    def coefficients(self, steps: int) -> Array:
        """c_0, ..., c_{T-1}, for T ≥ 1."""
        powers = np.power.outer(np.asarray(self.theta), np.arange(steps - 1.0))
        found: Array = np.concatenate([[1.0], np.asarray(self.omega) @ powers])
        return found

    def sensitivity(self, steps: int) -> float:
        """Δ of T steps: the most that one record moves CG, in units of S. Grows faster than √T."""
        passes = -(-steps // self.separation)
        c = np.zeros(passes * self.separation)
        c[:steps] = self.coefficients(steps) if steps else 0.0
        columns = np.cumsum(c.reshape(passes, self.separation), axis=0).reshape(-1)[:steps]
        return float(np.linalg.norm(columns))

    def error(self, steps: int) -> float:
        """Root mean squared error of the T prefix sums, Δ‖AC⁻¹‖_F/√T, in units of S/μ; A is `accounting.banded`'s.

        Independent noise has √(k(T + 1)/2).
        """
        return self.sensitivity(steps) * math.sqrt(_mean_square(self.omega, self.theta, steps))

    def mechanism(self, noise_multiplier: float, steps: int) -> SubsampledGaussian:
        """The Gaussian mechanism that T steps are together.

        Args:
            noise_multiplier: σ.
        """
        return SubsampledGaussian(noise_multiplier / self.sensitivity(steps), 1.0)


@functools.lru_cache(maxsize=64)
def best(buffers: int, steps: int, separation: int) -> Blt:
    """The BLT with the least `error`, by L-BFGS, adding one buffer at a time. Independent of the data.

    Stops at fewer buffers if one more lowers the error by less than a thousandth. ω and 1 - θ are rounded to four
    digits, so that other machines find the same.

    Args:
        buffers: D, the most to use, at least 1.
        separation: b, at least 1.

    Raises:
        ArgumentError: a number out of its range.
    """
    count, length = int(whole("buffers", buffers, least=1)), int(whole("steps", steps, least=1))
    apart = int(whole("separation", separation, least=1))
    if count == 1:
        starts, fewer = [np.array([0.0, -0.5 * math.log(length)])], None
    else:
        fewer = best(count - 1, length, apart)
        if len(fewer.omega) < count - 1:
            return fewer
        omega, gaps = np.asarray(fewer.omega), 1.0 - np.asarray(fewer.theta)
        weights = np.append(np.log(np.maximum(omega, 1e-9) / (1.0 - omega.sum())), -3.0)
        places = logit(np.clip(gaps, 1e-9, 1 - 1e-9))
        starts = [np.concatenate([weights, places, [place]]) for place in (places.min() - 2.0, places.max() + 2.0)]

    def log_error(x: Array) -> float:
        return math.log(_blt(x, apart).error(length))

    limits = {"method": "L-BFGS-B", "bounds": [(-25.0, 25.0)] * 2 * count, "options": {"eps": 1e-6}}
    found = min((minimize(log_error, start, **limits) for start in starts), key=lambda result: float(result.fun))
    blt = _blt(found.x, apart, digits=4)
    return blt if fewer is None or blt.error(length) < 0.999 * fewer.error(length) else fewer


def _blt(x: Array, separation: int, digits: int = 17) -> Blt:
    """ω and 1 - θ from unconstrained numbers."""
    omega, gaps = softmax([*x[: len(x) // 2], 0.0])[:-1], expit(x[len(x) // 2 :])
    short = [[float(f"{value:.{digits - 1}e}") for value in each] for each in (omega, gaps)]
    return Blt(tuple(short[0]), tuple(1.0 - gap for gap in short[1]), separation)


def _mean_square(omega: tuple[float, ...], theta: tuple[float, ...], steps: int) -> float:
    """‖AC⁻¹‖_F²/T. With c(x) = N(x)/P(x), P(x) = Π_j (1 - θ_j x), the first column of AC⁻¹ is P/(N (1 - x))."""
    below = np.poly(theta)
    above = below.copy()
    for j, weight in enumerate(omega):
        above[1:] += weight * np.poly(np.delete(theta, j))
    s = lfilter(below, above, np.ones(steps))
    return float(np.arange(steps, 0, -1.0) @ np.square(s)) / steps
