"""Norms, factors and the clipped sum of per-sample gradients."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext

import torch
from torch import Tensor

from clipping.core.clip_functions import ClipFunction, factors_by_name
from clipping.core.dtypes import norm_dtype, wide_dtype
from clipping.core.microbatching import added, in_parts
from clipping.numerics import kernels
from clipping.numerics.chunked_sums import at_once, weighted_at_once
from clipping.numerics.products import full_precision
from clipping.numerics.rounding_bounds import portion

SUMMED = 4096
"""Entries to square and add in one operation."""
WIDENED = 2**22
"""Entries of gradients to copy to a wider dtype at once."""


def sum_of_squares(x: Tensor) -> Tensor:
    """Squared norms, [b, ...] to [b], in float32 or wider; in parts, as one long float32 sum loses four digits.

    Args:
        x: [b, ...], of any floating dtype.
    """
    x, dtype = x.reshape(x.shape[0], -1), norm_dtype(x.dtype)
    if x.shape[1] < 2 * SUMMED:
        return torch.linalg.vector_norm(x, dim=1, dtype=dtype).square_()
    if kernels.cpu.in_one_piece(x):
        return kernels.cpu.sum_of_squares(x)
    whole = x.shape[1] // SUMMED * SUMMED
    rest, x = x[:, whole:], x[:, :whole] if whole < x.shape[1] else x
    squares = torch.linalg.vector_norm(x.view(x.shape[0], -1, SUMMED), dim=2, dtype=dtype).square_().sum(1)
    return squares.add_(torch.linalg.vector_norm(rest, dim=1, dtype=dtype).square_()) if rest.numel() else squares


def norms_and_factors(
    grads: dict[str, Tensor], names: Iterable[str], clip: ClipFunction, like: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the norms [B] over all parameters together, and the factors [B] of each of `names`.

    Args:
        grads: per-sample gradients [B, *shape]; a parameter without one has gradient zero, and still counts as a layer.
        names: every trainable parameter.
        like: any tensor [B] of the same device and dtype.
    """
    zero = torch.zeros(like.shape[0], dtype=norm_dtype(like.dtype), device=like.device)
    layers = {name: zero if name not in grads else sum_of_squares(grads[name]).sqrt().to(zero.dtype) for name in names}
    if not layers:
        return zero, {}
    parameters = sum(grad[0].numel() for grad in grads.values()) if len(like) else 0
    return factors_by_name(torch.stack(list(layers.values())), list(layers), clip, parameters)


def weighted_sum(factors: Tensor, grad: Tensor) -> Tensor:
    """Σ_i c_i g_i: [B] and [B, *shape] to [*shape], in float32 or wider.

    Args:
        grad: per-sample gradients [B, *shape].
    """
    rows, wide = grad.reshape(grad.shape[0], -1), wide_dtype(grad.dtype)
    factors = factors.to(wide)[None]
    most = portion(len(rows), 1, wide)
    if len(rows) > most and wide == grad.dtype and at_once(rows):
        return weighted_at_once(factors[0], rows, most).view(grad.shape[1:])
    if wide != grad.dtype:  # a wide copy of some rows at a time
        most = min(most, max(1, WIDENED // max(1, rows.shape[1])))
    with full_precision() if rows.is_cuda else nullcontext():
        if len(rows) <= most:
            return (factors @ rows.to(wide)).view(grad.shape[1:])
        portions = in_parts(len(rows), -(-len(rows) // most))
        found = added(lambda samples: factors[:, samples] @ rows[samples].to(wide), portions)
        return found.view(grad.shape[1:])
