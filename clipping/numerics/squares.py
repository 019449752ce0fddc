"""Batched squared norms."""

from __future__ import annotations

import torch
from torch import Tensor

from clipping.core.dtypes import norm_dtype
from clipping.numerics import kernels

SUMMED = 4096
"""Entries to square and add in one operation."""


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
