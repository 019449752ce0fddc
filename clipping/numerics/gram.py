"""Batched Gram matrices by torch's operations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from clipping.core.dtypes import norm_dtype
from clipping.numerics import kernels
from clipping.numerics.per_sample import sum_of_squares
from clipping.numerics.products import products

HALVED = 160
"""Number of positions above which to use a Gram matrix's symmetry: smaller blocks cost more than they save."""

ROWS = 128
"""Rows of a block of a symmetric Gram matrix; more where there are many rows."""

POINT = ((1, 1), (1, 1), (0, 0), (1, 1))
"""Kernel, stride, padding and dilation of a convolution that is a linear layer."""


def part(x: Tensor, rows: slice, dim: int = 0) -> Tensor:
    """Return some rows of x; x itself rather than a view if they are all rows, since views cost time in a small step.

    Args:
        dim: dimension of the rows.
        rows: which rows; the slice may extend beyond the last row.
    """
    if rows.start == 0 and rows.stop >= x.shape[dim]:
        return x
    return x.narrow(dim, rows.start, rows.stop - rows.start)


def gram_product(a: Tensor, g: Tensor, available: int) -> Tensor:
    """Σ_{t,s} (a_t · a_s)(g_t · g_s) = ‖gᵀa‖², with positions before features, blocked over rows t.

    A block computes only the columns up to its own, and counts those before it twice: half of the work where blocks are
    many. It has `ROWS` rows or more, or fewer where T² entries exceed the available bytes.

    Args:
        a: [n, T, d].
        g: [n, T, p].
        available: bytes that Gram matrices may take.

    Returns:
        [n], float32 or wider.
    """
    a = a.to(g.dtype)
    if a.shape[1] == 1:
        return sum_of_squares(g).mul_(sum_of_squares(a))
    count, positions, _ = g.shape
    most = max(1, available // max(1, 2 * count * positions * norm_dtype(g.dtype).itemsize))
    rows = positions if positions < HALVED else max(min(ROWS, -(-positions // 2)), -(-positions // 8))
    rows = min(rows, most)
    sums = []
    for start in range(0, positions, rows):
        block, before = slice(start, min(start + rows, positions)), slice(0, min(start + rows, positions))
        found = products(part(g, block, 1), part(g, before, 1))
        found *= products(part(a, block, 1), part(a, before, 1))
        if start:
            sums.append(2 * found[:, :, :start].sum((1, 2)))
        sums.append(part(found, slice(start, before.stop), 2).sum((1, 2)))
    return torch.stack(sums).sum(0) if len(sums) > 1 else sums[0]


def gram_norms_and_reach(a: Tensor, g: Tensor, lost: tuple[float, float]) -> Tensor:
    """`gram_product` by whole Gram matrices, with the reach that their diagonals hold: [n, 4].

    On a GPU, by the library's products and one kernel that reads both matrices once.

    Args:
        a: [n, T, d].
        g: [n, T, p], of a's dtype.
        lost: from `clipping.numerics.rounding_bounds.of_lost`.
    """
    positions, of_a = a.shape[1], products(a, a).unsqueeze(1)
    found: Tensor = kernels.fused.shifted_norms(of_a, products(g, g), POINT, (1, positions), (1, 1), positions, lost)
    return found


def within(found: Callable[[slice], Tensor], rows: int, columns: Tensor, available: int) -> Tensor:
    """Sum the entries of a matrix [n, rows, S], [n], in blocks of rows of at most `available` bytes.

    Args:
        found: maps rows to their part of the matrix.
        rows: number of rows.
        columns: [n, S, *], the other factor.
        available: bytes that two such matrices may take.
    """
    count, others, _ = columns.shape
    step = max(1, available // max(1, 2 * count * others * columns.element_size()))
    parts = [found(slice(start, start + step)).sum((1, 2)) for start in range(0, rows, step)]
    return torch.stack(parts).sum(0) if parts else columns.new_zeros(count)
