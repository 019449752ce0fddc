"""Banded Toeplitz noise (BandMF), correlated over steps: its coefficients and its accounting.

**Mechanism.** C is lower triangular and Toeplitz with b bands: C[t, s] = c_{t-s} for 0 ≤ t - s < b, else 0, and ‖c‖ =
1. The rows of G [T, d] are the sums of clipped gradients, and one record moves each row by at most S. Z [T, d] has
independent N(0, σ²S²) entries. The mechanism releases the rows of

    G + C⁻¹Z = C⁻¹(CG + Z),    a function of CG + Z.

Later noise cancels part of earlier noise in the prefix sums of the rows, which are SGD's iterates.

**Sensitivity.** Let a record be in steps s_1 < s_2 < ... at least b apart (b-min-separation), with clipped gradients
g_i, ‖g_i‖ ≤ S. It moves CG by Σ_i C[:, s_i] g_iᵀ. Column s is zero except in the rows s, ..., s + b - 1, so columns b
apart share no row, and the squared norm of the movement is Σ_i ‖C[:, s_i]‖² ‖g_i‖² ≤ k S² for k steps. The last columns
are cut off at row T, which only shortens them. A stream that restarts at some row (every later row independent of the
earlier ones) replaces entries of C by 0, which lowers bands and column norms.

**Cyclic Poisson sampling.** Each record is put into one of b groups, independently and once. Step t takes each record
of group t mod b with probability q' = bB/n, so that a batch has B records on average. A record of group j can be in the
steps j, j + b, ... only; the rows of CG fall into blocks [j + ib, j + (i + 1)b), and the record's step j + ib moves
block i alone. Hold the other records' coins fixed. Given the rows before it, each row of the block is normal around
f(earlier rows) + c_{t-s} g, where the second term is present with probability q' (one coin for the whole block), and g
is a function of the earlier blocks. So the likelihood ratio of the block depends on its projection onto c ⊗ g, of
length at most S, and the block is one step of the Poisson-subsampled Gaussian mechanism with σ and q'. (δ is jointly
convex over the coins, and over the groups.) T steps have at most ⌈T/b⌉ blocks, adaptively composed. They are accounted
as ⌈T/b⌉ Poisson steps with σ and q', adding or removing one record (`accounting.reductions.as_poisson`). With q' = 1
these are passes over fixed batches in a fixed order.

Choquette-Choo, Ganesh, McKenna, McMahan, Rush, Thakurta and Xu (2023), "(Amplified) Banded Matrix Factorization",
arXiv:2306.08153, Theorem 4.
"""

import functools
import math

import numpy as np
from scipy.optimize import minimize
from scipy.signal import lfilter

from accounting.mechanism import whole
from accounting.series import Array


@functools.lru_cache(maxsize=64)
def coefficients(bands: int, steps: int) -> tuple[float, ...]:
    """c_0, ..., c_{b-1} with ‖c‖ = 1 that minimise `error`, by L-BFGS from the bands of the square root of A.

    A is the matrix of prefix sums, A[t, s] = 1 for s ≤ t. Independent of the data.

    Args:
        bands: b, at least 1; at most `steps` are used.

    Raises:
        ArgumentError: a number below 1.
    """
    count, length = int(whole("bands", bands, least=1)), int(whole("steps", steps, least=1))
    used = min(count, length)
    start = np.cumprod(np.concatenate([[1.0], (2.0 * np.arange(1, used) - 1.0) / (2.0 * np.arange(1, used))]))
    found = np.ones(1)
    if used > 1:
        best = minimize(_log_error, start[1:], args=(length,), jac=True, method="L-BFGS-B", options={"maxiter": 1000})
        found = np.concatenate([[1.0], best.x])
    return (*(found / np.linalg.norm(found)).tolist(), *[0.0] * (count - used))


def error(c: tuple[float, ...], steps: int) -> float:
    """Root mean squared error of the T prefix sums, ‖AC⁻¹‖_F ‖c‖ / √T, in units of σS.

    Independent noise has √((T+1)/2).

    Args:
        c: the coefficients, the first of them not 0.
    """
    scaled = np.asarray(c) / c[0]
    value, _ = _log_error(scaled[1:], int(whole("steps", steps, least=1)))
    return math.exp(0.5 * value)


def _log_error(rest: Array, steps: int) -> tuple[float, Array]:
    """ln of the mean squared error with c = (1, *rest), and its gradient.

    All columns of AC⁻¹ repeat the first one, shifted and cut off: s = 1/(c(x)(1 - x)) as a power series. So ‖AC⁻¹‖_F² =
    Σ_k (T - k) s_k². As ∂s/∂c_i = -xⁱ s/c(x), the gradient is one more filter, run backwards.
    """
    c = np.concatenate([[1.0], rest])
    with np.errstate(over="ignore", invalid="ignore"):
        s = lfilter([1.0], c, np.ones(steps))
        weights = np.arange(steps, 0, -1.0)
        total = float(weights @ np.square(s))
        if not math.isfinite(total):  # C⁻¹ explodes; the search steps back
            return 1e10, np.zeros(len(rest))
        back = lfilter([1.0], c, (2.0 * weights * s)[::-1])[::-1]
    slopes = np.array([-float(back[i:] @ s[: max(0, steps - i)]) for i in range(1, len(c))])
    norm = float(c @ c)
    return math.log(total) + math.log(norm) - math.log(steps), slopes / total + 2.0 * rest / norm
