"""Clipping functions: from per-sample norms to per-sample factors, apart from the way the norms were found.

A clipping function states its own sensitivity: the most by which the sum Σ_i c_i g_i can move, in L2 norm, when one
sample is added or removed. Noise is scaled by it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch


@runtime_checkable
class ClipFunction(Protocol):
    """What a backend asks of a clipping function."""

    @property
    def sensitivity(self) -> float:
        """An upper bound on ‖c(n)·g‖ over every g with ‖g‖ = n."""
        ...

    def factors(self, norms: torch.Tensor) -> torch.Tensor:
        """Norms [B] before clipping to factors c [B], of the same dtype."""
        ...


@dataclass(frozen=True)
class Flat:
    """Flat (Abadi) clipping: c_i = min(1, C / (‖g_i‖ + stabiliser)). (Abadi et al. 2016, arXiv:1607.00133, Algorithm 1)

    Formal guarantees: ‖c_i g_i‖ ≤ C for every finite g_i, hence `sensitivity` = C under add/remove adjacency.

    ============  =======================================================
    C = 0         every factor is 0
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

    def __post_init__(self) -> None:
        if not self.max_grad_norm >= 0:
            raise ValueError(f"expected max_grad_norm={self.max_grad_norm!r} >= 0")
        if not 0 <= self.stabiliser < math.inf:
            raise ValueError(f"expected stabiliser={self.stabiliser!r} >= 0 and finite")

    @property
    def sensitivity(self) -> float:
        return float(self.max_grad_norm)

    def factors(self, norms: torch.Tensor) -> torch.Tensor:
        if self.max_grad_norm == 0:
            return norms * 0.0
        if self.max_grad_norm == math.inf:
            return torch.ones_like(norms)
        # number / tensor multiplies by a rounded reciprocal: a norm of exactly C would not get the factor 1
        return (torch.full_like(norms, self.max_grad_norm) / (norms + self.stabiliser)).clamp(max=1.0)
