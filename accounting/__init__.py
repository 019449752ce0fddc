"""Privacy accountants: what ε do T steps of the subsampled Gaussian mechanism have at δ?

    >>> from accounting import SubsampledGaussian, load_accountant
    >>> step = SubsampledGaussian(noise_multiplier=4.0, sample_rate=0.01)
    >>> round(load_accountant("moments").epsilon(step, steps=10_000, delta=1e-5), 4)
    1.2586

`Accountant.guarantee` gives the same with its kind (an upper bound, or less than that) and how it came about. Nothing
of dpbench is imported here, and no torch; an accountant's module is imported when it is loaded.
"""

from __future__ import annotations

import difflib
import importlib

from accounting.base import (
    ADJACENCIES,
    SAMPLINGS,
    Accountant,
    ArgumentError,
    Guarantee,
    Kind,
    NoAnswer,
    SubsampledGaussian,
)
from accounting.calibration import (
    Calibration,
    calibrate,
    calibrate_epochs,
    calibrate_noise_multiplier,
    calibrate_sample_rate,
    calibrate_steps,
)

__all__ = [
    "ACCOUNTANTS",
    "ADJACENCIES",
    "OF_SCHEMES",
    "SAMPLINGS",
    "VARIANTS",
    "Accountant",
    "ArgumentError",
    "Calibration",
    "Guarantee",
    "Kind",
    "NoAnswer",
    "SubsampledGaussian",
    "calibrate",
    "calibrate_epochs",
    "calibrate_noise_multiplier",
    "calibrate_sample_rate",
    "calibrate_steps",
    "load_accountant",
]

#: name: (reference of the class, one line).
ACCOUNTANTS = {
    "simple": ("accounting.simple:Simple", "ε adds up over the steps (exact Gaussian step, exact amplification)"),
    "strong": ("accounting.strong:Strong", "strong composition (Dwork, Rothblum and Vadhan 2010), best split of δ"),
    "moments": ("accounting.moments:Moments", "moments accountant (Abadi et al. 2016), orders 1 to 32"),
    "rdp": ("accounting.rdp:Rdp", "Rényi differential privacy, best order of all, improved conversion"),
    "gdp": ("accounting.gdp:Gdp", "Gaussian limit of many steps: an estimate (exact at sample rate 1)"),
    "prv": ("accounting.prv:Prv", "numerical composition, certified from both sides: the upper bound"),
    "pld": ("accounting.pld:Pld", "privacy loss distribution of dp-accounting, connect-the-dots"),
    "best": ("accounting.best:Best", "the smallest valid upper bound of all, beside the certified lower bound"),
}
#: name:variant: (reference of the class, its arguments, one line). Loaded by the same function, and not listed.
VARIANTS: dict[str, tuple[str, dict[str, str], str]] = {
    "strong:exact": ("accounting.strong:Strong", {"step": "exact"}, "with the exact Gaussian step everywhere"),
    "strong:published": ("accounting.strong:Published", {}, "as published in 2016: a heuristic, not an upper bound"),
    "strong:kov": ("accounting.kov:Optimal", {}, "optimal composition (Kairouz, Oh and Viswanath 2015)"),
    "moments:extended": ("accounting.moments:Extended", {}, "with all orders, whole or not"),
    "rdp:classic": ("accounting.rdp:Rdp", {"conversion": "classic"}, "with the conversion of 2017, as in older tools"),
    "rdp:whole": ("accounting.rdp:Whole", {}, "with whole orders alone: of discrete Gaussian noise, too"),
    "prv:estimate": ("accounting.prv:Estimate", {}, "between its bounds, where the truth most likely is"),
    "prv:lower": ("accounting.prv:Lower", {}, "its certified lower bound"),
}
#: name: (reference of the class, one line). Of one sampling scheme each; loaded by the same function, and not listed.
OF_SCHEMES = {
    "without_replacement": (
        "accounting.without_replacement:WithoutReplacement",
        "Rényi bound of fixed batches, replacing one record (Wang, Balle and Kasiviswanathan 2019)",
    ),
    "shuffled": (
        "accounting.shuffled:ShuffledLowerBound",
        "certified lower bound of shuffled batches (Chua et al. 2024)",
    ),
}


def load_accountant(name: str) -> Accountant:
    """The accountant of this name: of `ACCOUNTANTS` or `OF_SCHEMES`, or ``"name:variant"`` of `VARIANTS`.

    Raises:
        ArgumentError: a ValueError of one line with all names, and the nearest.
    """
    arguments: dict[str, str] = {}
    if name in ACCOUNTANTS or name in OF_SCHEMES:
        reference = {**ACCOUNTANTS, **OF_SCHEMES}[name][0]
    elif name in VARIANTS:
        reference, arguments, _ = VARIANTS[name]
    else:
        known = [*ACCOUNTANTS, *VARIANTS, *OF_SCHEMES]
        close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
        hint = f" (the nearest is {close[0]!r})" if close else ""
        raise ArgumentError("accountant", f"to be one of {', '.join(known)}{hint}", name)
    module, _, attribute = reference.partition(":")
    accountant: Accountant = getattr(importlib.import_module(module), attribute)(**arguments)
    return accountant
