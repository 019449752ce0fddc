"""From per-sample gradients to their clipped sum: norms [B], factors [B], Σ_i c_i g_i."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from clipping.functions import ClipFunction
from clipping.interface import norm_dtype


def norms_and_factors(
    grads: dict[str, Tensor], names: Iterable[str], clip: ClipFunction, like: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Norms [B] over all parameters together, and the factors [B] of each of `names`.

    Args:
        grads: per-sample gradients [B, *shape]; a parameter without one has gradient zero, and counts as a layer.
        names: every trainable parameter.
        clip: the clipping function.
        like: any tensor [B] of the device and dtype.
    """
    zero = torch.zeros(like.shape[0], dtype=norm_dtype(like.dtype), device=like.device)
    layers = {name: zero if name not in grads else _norms(grads[name]).to(zero.dtype) for name in names}
    if not layers:
        return zero, {}
    return factors_by_name(torch.stack(list(layers.values())), list(layers), clip)


def _norms(grad: Tensor) -> Tensor:
    return torch.linalg.vector_norm(grad.reshape(grad.shape[0], -1), dim=1, dtype=norm_dtype(grad.dtype))


def factors_by_name(layers: Tensor, names: list[str], clip: ClipFunction) -> tuple[Tensor, dict[str, Tensor]]:
    """From the norms of each layer [L, B] to those of the whole gradient [B], and the factors [B] of each layer."""
    norms = torch.linalg.vector_norm(layers, dim=0)
    factors = clip.factors(layers) if clip.per_layer else clip.factors(norms).expand(len(names), -1)
    return norms, dict(zip(names, factors, strict=True))


def weighted_sum(factors: Tensor, grad: Tensor, total: Tensor | None = None) -> Tensor:
    """Σ_i c_i g_i: [B] and [B, *shape] to [*shape]; added to `total` in place, if there is one."""
    rows, factors = grad.reshape(grad.shape[0], -1), rounded_down(factors, grad.dtype)[None]
    if total is None:
        return (factors @ rows).view(grad.shape[1:])
    total.view(1, -1).addmm_(factors, rows)
    return total


def rounded_down(factors: Tensor, dtype: torch.dtype) -> Tensor:
    """Factors in the precision of what they multiply, never larger than they were, or ‖c·g‖ would exceed its bound."""
    if norm_dtype(dtype) == dtype:
        return factors if factors.dtype == dtype else factors.to(dtype)
    return (factors * (1 - torch.finfo(dtype).eps)).to(dtype)
