"""Privacy accountants: the ε of T steps of the subsampled Gaussian mechanism at δ.

    >>> from accounting import SubsampledGaussian, load_accountant
    >>> step = SubsampledGaussian(noise_multiplier=4.0, sample_rate=0.01)
    >>> round(load_accountant("moments").epsilon(step, steps=10_000, delta=1e-5), 4)
    1.2586

`Accountant.guarantee` also returns the kind of ε (an upper bound, or less) and how it was computed. The package imports
neither dpbench nor torch. An accountant's module is imported when it is loaded.

Functions take:
    mechanism: the `SubsampledGaussian` of each step.
    steps, delta: T, and δ in (0, 1).
    sigma, q: the noise multiplier σ > 0, in units of the sensitivity, and the sample rate in (0, 1].
    log_delta, log_mass: ln δ, and ln of a probability, < 0.
    interval: between neighbouring losses of a grid, > 0.
    regimes: of a step, in one direction.
"""

from accounting.base import Accountant, Guarantee, Kind
from accounting.calibration import Calibration, calibrate, calibrate_noise_multiplier
from accounting.composition import Composition, compose, risk
from accounting.mechanism import ArgumentError, NoAnswer, SubsampledGaussian
from accounting.registry import ACCOUNTANTS, OF_SCHEMES, VARIANTS, AccountantInfo, load_accountant
from accounting.sampling import ADJACENCIES, SAMPLINGS

__all__ = [
    "ACCOUNTANTS",
    "ADJACENCIES",
    "OF_SCHEMES",
    "SAMPLINGS",
    "VARIANTS",
    "Accountant",
    "AccountantInfo",
    "ArgumentError",
    "Calibration",
    "Composition",
    "Guarantee",
    "Kind",
    "NoAnswer",
    "SubsampledGaussian",
    "calibrate",
    "calibrate_noise_multiplier",
    "compose",
    "load_accountant",
    "risk",
]
