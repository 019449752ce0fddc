"""Statistical tests of a DP-SGD run's claims, for a tester who knows its noise and its batches.

Each returns a p-value, or an upper bound on it: the probability of a result at least as extreme if the claim is true.

    noise      in each coordinate an independent N(0, σ²)
    batches    each record in each of T batches independently, with probability q
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import beta, binom, chi2, kstest

Array = np.ndarray[Any, np.dtype[np.float64]]


def bonferroni(p_values: ArrayLike) -> float:
    """Combine the p-values of dependent tests: the smallest times their number, at most 1.

    Args:
        p_values: of any shape; 1 if empty.
    """
    found = np.ravel(p_values)
    return min(1.0, float(found.min()) * found.size) if found.size else 1.0


def too_small(squares: ArrayLike, count: ArrayLike) -> Array:
    """Test that noise is no smaller than claimed: the exact one-sided test of a variance.

    Args:
        squares: the sum of `count` squares of noise over σ: χ² with `count` degrees of freedom.
        count: of each sum.
    """
    found: Array = np.asarray(chi2.cdf(squares, count))
    return found


def correlated(products: ArrayLike, squares: ArrayLike, others: ArrayLike, count: ArrayLike) -> Array:
    """Test that two draws of noise are independent: the exact two-sided test of the angle between them.

    The square of its cosine is Beta(1/2, (n - 1)/2), whatever the deviation. A draw of zeros has no angle: p = 1.

    Args:
        products: Σ x_i y_i over n coordinates.
        squares, others: Σ x_i² and Σ y_i².
        count: n >= 2.
    """
    lengths = np.asarray(squares, dtype=float) * np.asarray(others, dtype=float)
    cosine = np.divide(np.square(products), lengths, out=np.zeros_like(lengths), where=lengths > 0)
    found: Array = np.asarray(beta.sf(np.minimum(cosine, 1.0), 0.5, (np.asarray(count) - 1) / 2))
    return found


def not_gaussian(noise: ArrayLike) -> float:
    """Test that noise is Gaussian of any deviation: Kolmogorov-Smirnov, after division by the root mean square.

    The estimated deviation makes the distance smaller, so p is too large, never too small. Zeros give p = 1.

    Args:
        noise: the numbers that were drawn, of any shape.
    """
    x = np.ravel(noise)
    scale = np.sqrt(np.mean(np.square(x))) if x.size else 0.0
    return float(kstest(x / scale, "norm", method="asymp").pvalue) if scale > 0 else 1.0


def not_poisson(drawn: ArrayLike, sample_rate: float) -> float:
    """Test that batches are Poisson samples: for each k the number of records drawn k times or more, and batch sizes.

    Each count has an exact distribution, and is tested on both sides; sizes are tested by the largest distance from nq.

    Args:
        drawn: [T, n] bool, T >= 1: is the record in the batch?
        sample_rate: q.
    """
    found = np.asarray(drawn, dtype=bool)
    steps, records = found.shape
    times = np.arange(1, steps + 1)
    often = (found.sum(0)[:, None] >= times).sum(0)
    rates = binom.sf(times - 1, steps, sample_rate)
    farthest = float(np.abs(found.sum(1) - records * sample_rate).max())
    sizes = np.abs(np.arange(records + 1) - records * sample_rate)
    each = binom.pmf(np.arange(records + 1), records, sample_rate)
    slack = 1e-9 * records  # rounding of nq
    within, nearer = (min(1.0, float(each[sizes <= farthest + sign * slack].sum())) for sign in (1, -1))
    too_few, too_many = binom.cdf(often, records, rates), binom.sf(often - 1, records, rates)
    return bonferroni([*too_few, *too_many, within**steps, -np.expm1(steps * np.log(max(1e-300, nearer)))])
