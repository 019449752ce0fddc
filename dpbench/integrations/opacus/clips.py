"""Clipping functions by Opacus' names, at the norms set by a scheduler."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from clipping import Automatic, Flat, PerLayer
from clipping.core.clip_functions import ClipFunction
from dpbench.engine.settings import require_known
from dpbench.integrations.opacus.quantile import STABILISER, Quantile

NAMES = ("flat", "per_layer", "automatic", "adaptive")


@dataclass(frozen=True)
class PerTensor:
    """Clips each trainable parameter at its own threshold: factors min(1, C_l / (‖g_{l,i}‖ + 1e-6)).

    Formal guarantees: ‖c_{l,i} g_{l,i}‖ ≤ C_l in each, hence `sensitivity` = √(Σ_l C_l²). If there are
    more or fewer parameters than thresholds, all have equal shares of the same sensitivity.

    Args:
        thresholds: C_l ≥ 0, in the order of the model's trainable parameters.
    """

    thresholds: tuple[float, ...]
    per_layer = True

    @property
    def sensitivity(self) -> float:
        """√(Σ C_l²)."""
        return math.hypot(*self.thresholds)

    def factors(self, norms: Tensor) -> Tensor:
        """min(1, C_l / (‖g_{l,i}‖ + stabiliser)) for each norm; with C/√L for another number of rows.

        Args:
            norms: [L, B], a row for each tensor.
        """
        if len(norms) != len(self.thresholds):
            return PerLayer(max_grad_norm=self.sensitivity, stabiliser=STABILISER).factors(norms)
        parts = [
            Flat(max_grad_norm=c, stabiliser=STABILISER).factors(row)
            for c, row in zip(self.thresholds, norms, strict=True)
        ]
        return torch.stack(parts)


class Clips:
    """Creates the clipping function of each norm C.

    Args:
        clipping: one of `NAMES`.
        max_grad_norm: C. For "per_layer" a number gives all layers equal shares; a list has a threshold for each
            trainable parameter, in the optimizer's order.
        optimizer, model: of the parameters.
        noise_multiplier: σ.
        options: those of `Quantile` for "adaptive"; none of the others.

    Attributes:
        norm: C.
        quantile: changes C, for "adaptive".

    Raises:
        ValueError, TypeError: an invalid argument, named.
    """

    def __init__(
        self,
        clipping: str,
        max_grad_norm: Any,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        noise_multiplier: float,
        options: dict[str, Any],
    ) -> None:
        require_known("clipping", clipping, NAMES)
        self._clipping = clipping
        wanted = {field.name for field in fields(Quantile)} if clipping == "adaptive" else set()
        if odd := sorted(options.keys() ^ wanted):
            came = f"got {odd[0]!r} beside them" if odd[0] in options else f"got none named {odd[0]!r}"
            raise TypeError(f"expected the arguments of make_private with clipping={clipping!r}, {came}")
        self.quantile = Quantile(**options) if wanted else None
        self.noise_multiplier = noise_multiplier
        """σ."""
        self._shares: tuple[float, ...] | None = None
        if isinstance(max_grad_norm, (list, tuple)):
            self._shares, max_grad_norm = _shares(clipping, max_grad_norm, optimizer, model)
        self.norm = float(max_grad_norm)

    def at(self, norm: float, noise_multiplier: float) -> ClipFunction:
        """Return the clipping function of a norm.

        Args:
            norm: C.
            noise_multiplier: σ.
        """
        if self.quantile is not None:
            return self.quantile.clip(norm, noise_multiplier)
        if self._shares is not None:
            return PerTensor(tuple(share * norm for share in self._shares))
        if self._clipping == "automatic":
            return Automatic(max_grad_norm=norm)
        kind = PerLayer if self._clipping == "per_layer" else Flat
        return kind(max_grad_norm=norm, stabiliser=STABILISER)


def _shares(
    clipping: str, norms: Sequence[float], optimizer: torch.optim.Optimizer, model: nn.Module
) -> tuple[tuple[float, ...], float]:
    """Each trainable parameter's share of the norm, in the model's order; and the norm √(Σ C_l²)."""
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if clipping != "per_layer" or len(norms) != len(trained):
        raise ValueError(
            f"expected a number as max_grad_norm, or with clipping='per_layer' one of each of the {len(trained)} "
            f"trainable parameters, got {len(norms)} with clipping={clipping!r}"
        )
    if not all(isinstance(c, (int, float)) and 0 <= c < math.inf for c in norms) or not any(norms):
        raise ValueError(f"expected max_grad_norm of finite numbers >= 0, not all 0, got {list(norms)!r}")
    whole = math.hypot(*norms)
    of = {id(p): float(c) / whole for p, c in zip(trained, norms, strict=True)}
    return tuple(of.get(id(p), 0.0) for p in model.parameters() if p.requires_grad), whole
