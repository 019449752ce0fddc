"""Create the engine's noise by name, and check that accountant and sampling have a bound for it."""

from __future__ import annotations

import torch

from dpbench.engine.correlated import Banded, Buffered
from dpbench.engine.discrete import Discrete
from dpbench.engine.noise import Noise, Pseudo, Secure
from dpbench.engine.settings import Settings

NOISES = ("gaussian", "discrete", "banded:N", "blt:N")
CORRELATED = {
    "banded": ("bands", 2, "poisson", "batches are Poisson samples of groups of records in turn"),
    "blt": ("buffers", 1, "one_pass", "the steps of a record must be an epoch apart"),
}
"""Name -> what N counts, the least N, the only sampling with a bound on ε, and the reason."""
ACCOUNTANTS = ("rdp:whole", "moments")
"""Accountants that are valid for discrete noise; the first is the default."""


def source_of(name: str, settings: Settings, coordinates: int, generator: torch.Generator | None) -> Noise:
    """Create the engine's noise.

    Raises:
        ValueError: a generator with discrete noise.
    """
    if name == "discrete" and generator is not None:
        raise ValueError("expected noise='discrete' or a generator, got both: what is seeded is not private")
    noise_multiplier = settings.mechanism.noise_multiplier
    if name == "discrete" and noise_multiplier:
        return Discrete(noise_multiplier, coordinates)
    source: Noise = Secure() if generator is None else Pseudo(generator)
    if settings.blt is not None:
        return Buffered(source, settings.blt)
    return Banded(source, settings.bands, settings.planned_steps) if settings.bands > 1 else source


def accountant_for(name: str, accountant: str | None, sampling: str) -> str:
    """Return the accountant's name, or the noise's default one.

    Raises:
        ValueError: no such noise, or the accountant has no bound for it.
    """
    if name not in NOISES[:2] and not correlation_of(name):
        raise ValueError(f"expected noise, one of {', '.join(NOISES)}, got {name!r}")
    if name != "discrete":
        return "prv" if accountant is None else accountant
    if accountant is not None and accountant not in ACCOUNTANTS:
        raise ValueError(
            f"expected accountant, one of {', '.join(ACCOUNTANTS)} with noise='discrete', got {accountant!r}: "
            "its bound is the continuous Gaussian's"
        )
    if sampling != "poisson":
        raise ValueError(f"expected sampling='poisson' with noise='discrete', got {sampling!r}")
    return accountant or ACCOUNTANTS[0]


def correlation_of(noise: str, sampling: str | None = None, group_size: int = 1) -> dict[str, int]:
    """{"bands": N} of "banded:N", {"buffers": N} of "blt:N"; {} of noise that is independent in each step.

    Raises:
        ValueError: N is not a whole number or too small, or the noise has no bound for this sampling or group size.
    """
    name, colon, digits = str(noise).partition(":")
    if name not in CORRELATED or not colon:
        return {}
    counted, least, scheme, reason = CORRELATED[name]
    if not (digits.isascii() and digits.isdigit()) or int(digits) < least:
        raise ValueError(f"expected noise='{name}:N' with a whole number N >= {least}, got {noise!r}")
    if sampling not in (None, scheme):
        raise ValueError(f"expected sampling={scheme!r} with noise={noise!r}, got {sampling!r}: {reason}")
    if group_size != 1:
        raise ValueError(
            f"expected group_size=1 with noise={noise!r}, got {group_size!r}: there is no bound for groups"
        )
    return {counted: int(digits)}
