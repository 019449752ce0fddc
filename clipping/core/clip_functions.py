"""Clipping functions: from per-sample gradient norms to per-sample factors.

A clipping function states its sensitivity: the largest change in L2 norm of Σ_i c_i g_i when one sample is added or
removed. The noise is proportional to it.

Functions take:
    norms: [B] of the whole gradient, or [L, B] of its layers, float32 or wider; inf and NaN occur.
"""

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from clipping.core.dtypes import smallest


def floor(dtype: torch.dtype) -> float:
    """The norm below which functions that divide by it return 0: 2^-60 in float32, 2^-508 in float64.

    A norm is the root of a sum of squares, and squares below 2^-126 are subnormal in float32.
    """
    return 8 * math.sqrt(torch.finfo(dtype).tiny)


@runtime_checkable
class ClipFunction(Protocol):
    """The interface of a clipping function."""

    @property
    def sensitivity(self) -> float:
        """An upper bound on ‖c·g‖ over every gradient g."""
        ...

    @property
    def per_layer(self) -> bool:
        """True if each parameter has its own factors."""
        ...

    def factors(self, norms: Tensor) -> Tensor:
        """Return factors of the same shape and dtype as `norms`."""
        ...


class _Flat:
    """Shared by the functions of one threshold: C, the stabiliser, and the sensitivity C."""

    per_layer = False
    max_grad_norm: float
    stabiliser: float

    def __post_init__(self) -> None:
        if not self.max_grad_norm >= 0:
            raise ValueError(f"expected max_grad_norm={self.max_grad_norm!r} >= 0")
        if not 0 <= self.stabiliser < math.inf:
            raise ValueError(f"expected stabiliser={self.stabiliser!r} >= 0 and finite")

    @property
    def sensitivity(self) -> float:
        return float(self.max_grad_norm)


@dataclass(frozen=True)
class Flat(_Flat):
    """Flat (Abadi) clipping: c_i = min(1, C / (‖g_i‖ + stabiliser)). (Abadi et al. 2016, arXiv:1607.00133, Algorithm 1)

    Formal guarantees: ‖c_i g_i‖ ≤ C for every finite g_i, hence `sensitivity` = C under add/remove adjacency.

    ============  =======================================================
    C = 0         every factor is 0 (NaN for a norm of inf)
    C = inf       every factor is 1 (ordinary training, no privacy)
    ‖g_i‖ = 0     the factor is 1 (0 if C = 0)
    ‖g_i‖ = inf   the factor is 0; 0·inf leaves NaN in the gradient
    ‖g_i‖ = NaN   the factor is NaN: an invalid gradient is never hidden
    ============  =======================================================

    Args:
        max_grad_norm: C ≥ 0, in units of the gradient.
        stabiliser: added to each norm. 0 by default; other libraries add 1e-6 or 0.01, which changes every factor.
    """

    max_grad_norm: float
    stabiliser: float = 0.0

    def factors(self, norms: Tensor) -> Tensor:
        """min(1, C / (‖g_i‖ + stabiliser)) for each norm."""
        return _at_most(norms, self.max_grad_norm, self.stabiliser)


@dataclass(frozen=True)
class Automatic(_Flat):
    """Automatic clipping: every gradient is scaled to length C, c_i = C / (‖g_i‖ + γ). (Bu et al. 2022,
    arXiv:2206.07136)

    With γ = `stabiliser` = 0 this is AUTO-V; AUTO-S has γ > 0 (0.01 in the paper), which keeps small gradients small.

    Formal guarantees: ‖c_i g_i‖ = C‖g_i‖ / (‖g_i‖ + γ) ≤ C, hence `sensitivity` = C. C must be finite.

    =================  ==========================================================================================
    ‖g_i‖ < `floor`    the factor is 0 if γ = 0: squares of such small norms are subnormal (8.7e-19 in float32)
    ‖g_i‖ = inf        the factor is 0
    ‖g_i‖ = NaN        the factor is NaN
    C = 0              every factor is 0
    =================  ==========================================================================================
    """

    max_grad_norm: float
    stabiliser: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_grad_norm == math.inf:
            raise ValueError("expected a finite max_grad_norm, got inf")

    def factors(self, norms: Tensor) -> Tensor:
        """C / (‖g_i‖ + γ) for each norm; 0 where ‖g_i‖ + γ is below `floor`."""
        norms = norms + self.stabiliser
        return torch.where(norms < floor(norms.dtype), torch.zeros_like(norms), _quotient(self.max_grad_norm, norms))


@dataclass(frozen=True)
class GlobalBound(_Flat):
    """Global clipping: c_i = C/Z if ‖g_i‖ ≤ Z, else 0: small gradients keep their proportions. (Bu et al. 2021,
    arXiv:2106.07830)

    Formal guarantees: ‖c_i g_i‖ ≤ (C/Z)·Z = C, hence `sensitivity` = C.

    ===============  ==================================================
    ‖g_i‖ = Z        the factor is C/Z
    ‖g_i‖ > Z, inf   the factor is 0
    ‖g_i‖ = NaN      the factor is 0; 0·NaN leaves NaN in the gradient
    ‖g_i‖ = 0        the factor is C/Z
    ===============  ==================================================

    Args:
        max_grad_norm: C ≥ 0, finite.
        bound: Z > 0; samples with a larger norm are dropped.
    """

    max_grad_norm: float
    bound: float
    stabiliser: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.bound < math.inf:
            raise ValueError(f"expected bound={self.bound!r} > 0 and finite")
        if self.max_grad_norm == math.inf:
            raise ValueError("expected a finite max_grad_norm, got inf")

    def factors(self, norms: Tensor) -> Tensor:
        """C/Z where norm + stabiliser ≤ Z, else 0."""
        kept = norms + self.stabiliser <= self.bound
        return kept.to(norms.dtype) * (self.max_grad_norm / self.bound)


@dataclass(frozen=True)
class PerLayer(_Flat):
    """Per-layer clipping: each of the L trainable parameters (tensors) is clipped flat at C/√L. (McMahan et al. 2018,
    arXiv:1710.06963)

    Formal guarantees: ‖c_{l,i} g_{l,i}‖ ≤ C/√L in each layer l, hence `sensitivity` = √(Σ_l C²/L) = C.

    =====================  ==============================================================
    C = 0                  every factor is 0 (NaN for a norm of inf)
    C = inf                every factor is 1
    ‖g_{l,i}‖ = 0          that layer's factor is 1 (0 if C = 0)
    ‖g_{l,i}‖ = inf, NaN   that layer's factor is 0, NaN; the other layers keep theirs
    =====================  ==============================================================
    """

    max_grad_norm: float
    stabiliser: float = 0.0
    per_layer = True

    def factors(self, norms: Tensor) -> Tensor:
        """min(1, C/√L / (‖g_{l,i}‖ + stabiliser)) for each norm, [L, B]."""
        return _at_most(norms, self.max_grad_norm / math.sqrt(max(1, norms.shape[0])), self.stabiliser)


def _at_most(norms: Tensor, threshold: float, stabiliser: float) -> Tensor:
    if threshold == 0:
        return norms * 0.0
    if threshold == math.inf:
        return torch.ones_like(norms)
    return _quotient(threshold, norms + stabiliser).clamp(max=1.0)


def _quotient(threshold: float, norms: Tensor) -> Tensor:
    """threshold / norms, rounded such that factor · norm exceeds the threshold by at most one rounding."""
    # number / tensor multiplies by a rounded reciprocal: a norm of exactly C would not get factor 1
    factors = torch.full_like(norms, threshold) / norms
    # a subnormal factor has few digits and may be too large by half; 0 is always safe
    return torch.where(factors < torch.finfo(norms.dtype).tiny, torch.zeros_like(factors), factors)


def factors_by_name(
    layers: Tensor, names: list[str], clip: ClipFunction, parameters: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the norms [B] of the whole gradient, and the factors [B] of each layer by name.

    Args:
        layers: norms [L, B] of each layer.
        names: names of the L layers.
        parameters: number n of entries of one gradient. Entries whose squares underflow add at most √n · `smallest` to
            a norm.
    """
    norms = torch.linalg.vector_norm(layers, dim=0)
    lost = math.sqrt(parameters) * smallest(layers.dtype)
    factors = clip.factors(layers + lost) if clip.per_layer else clip.factors(norms + lost).expand(len(names), -1)
    return norms, dict(zip(names, factors, strict=True))
