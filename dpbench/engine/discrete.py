"""Noise without floating-point artefacts: sums on a grid, and discrete Gaussian noise in integers.

The sum x of a logical batch is released as g · (round(x / g) + N_ℤ(0, 4^k I)) with a grid g that is 2^-k of the noise's
deviation. The data decides a vector of whole numbers, whose noise is exact: see `clipping.noise.discrete`. No bit of a
release reveals which sums could have led to it, and no tail is cut.

**Sensitivity.** If the sums of neighbouring data sets differ by at most S, in d coordinates, the rounded sums differ by
S / g + √d (1 + 2^-9), in units of the grid. So for a noise multiplier σ

    2^k = σ (S / g + √d (1 + 2^-9)),    g = σ S / (2^k - σ √d (1 + 2^-9)),

and k makes 2^k about 4,096 times σ √d: the noise grows by at most 1 / 4,095. A total beyond 2^43 grids (that many
deviations over 2^k) is clamped there, which moves no two totals apart.

**Accounting.** Let v, ‖v‖ ≤ 2^k / σ, be a record's shift, and let the record be in the batch with probability q. The
release has the distribution μ = (1 - q) μ₀ + q μ₁ with the record and μ₀ without: discrete Gaussians around points of
the grid, for a fixed sum of the other records (divergences are jointly convex, so the worst fixed sum bounds all). For
whole orders a

    E_{μ₀}[(μ/μ₀)^a] = Σ_l C(a, l) (1 - q)^(a-l) q^l E_{μ₀}[(μ₁/μ₀)^l],    E_{μ₀}[(μ₁/μ₀)^l] ≤ exp((l² - l) / 2σ²),

the last by Canonne, Kamath and Steinke (2020), Proposition 5, in each coordinate; no term is negative. That is the
moment of the continuous Gaussian (`accounting.series`). The other direction is no larger by the argument of Mironov,
Talwar and Zhang (2019, Theorem 5), as the reflection that exchanges μ₀ and μ₁ maps the grid onto itself. So accountants
of whole Rényi orders are valid: `rdp:whole` and `moments`, with Poisson sampling. Numerical composition (`prv`, `pld`)
is not: the one-dimensional pair does not dominate the pair in many coordinates.

Rejection sampling makes the time of a draw depend on the noise, not on the data: an attacker who times it to
microseconds learns something about the noise's size.
"""

import math
from typing import Any

from torch import Tensor

from clipping.noise.chacha import Segments
from clipping.noise.discrete import ROUNDED, add_discrete
from dpbench.engine.noise import At, Secure, emptied_and_divided

FINER = 12
"""2^FINER is the least ratio of 2^k to σ √d."""
FINEST = 40


class Discrete(Secure):
    """The discrete Gaussian on a grid; see the module's text. Keys, places and checkpoints are as in `Secure`.

    Args:
        noise_multiplier: σ > 0.
        coordinates: d, of all parameters.

    Raises:
        ValueError: σ √d is too large for 64-bit integers.
    """

    kind = constant = "discrete"

    def __init__(self, noise_multiplier: float, coordinates: int) -> None:
        super().__init__()
        self._coordinates, rounding = coordinates, _rounding(noise_multiplier, coordinates)
        self._log = max(FINER, math.ceil(math.log2(rounding)) + FINER)
        if self._log > FINEST:
            raise ValueError(
                f"expected noise_multiplier * √(parameters) below {2.0 ** (FINEST - FINER):.3g} with noise='discrete', "
                f"got {rounding:.3g}; take noise='gaussian'"
            )
        self.words = f"discrete Gaussian on a grid of 2^-{self._log} of its deviation (ChaCha20, key of the OS)"

    def deviation(self, noise_multiplier: float, sensitivity: float, coordinates: int = 0) -> float:
        """σS, enlarged by how far rounding to the grid may move sums apart."""
        rounding = _rounding(noise_multiplier, max(coordinates, self._coordinates))
        return noise_multiplier * sensitivity / (1 - rounding / 2.0**self._log)

    def add_to_flat(
        self, flat: Tensor, segments: Segments, deviation: float, step: int, process: int, **given: Any
    ) -> None:
        """As `Noise.add_to_flat`, on the CPU; noisy sums are multiples of the grid, rounded to the sums' precision.

        Raises:
            Misuse: noise was drawn at one of these places, or of a later step.
            ValueError: a number that does not fit 32 bits, a deviation that is negative or not finite.
        """
        if not 0 <= deviation < math.inf:
            raise ValueError(f"expected a finite deviation >= 0, got {deviation!r}")
        if not deviation:
            return
        grid, places = deviation / 2.0**self._log, [At(step, process, label) for label in segments.labels]
        with emptied_and_divided(flat, **given):
            add_discrete(flat, segments, self._log, grid, self._key_for(places), (step, process))


def _rounding(noise_multiplier: float, coordinates: int) -> float:
    """σ √d (1 + 2^-9), the share of 2^k that covers rounding; see the module's text."""
    return noise_multiplier * math.sqrt(max(1, coordinates)) * ROUNDED
