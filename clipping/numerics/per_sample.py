"""Norms, factors and clipped sums of per-sample gradients, and norms by Gram matrices, by torch's operations.

Portions of a sum are accumulated in float64 (see `clipping.numerics.rounding_bounds`), and a large batch has dozens. A
CPU forms them one after the other (`clipping.core.microbatching.added`): memory matters there, launches do not. On a
GPU each portion would cost a few kernel launches, so one operation forms many portions, and one adds them
(`added_at_once`). This takes more memory, so batches with large portions are split into blocks.

Functions take:
    form: returns the sums of some portions [count, *shape]; it may assign samples to portions in any way.
    most, together: largest number of samples in a portion, and in all portions that are formed at once.
    available: bytes that Gram matrices may take.
    a, g: [n, T, d] and [n, T, p], rows of an input and of an output's gradient, of one dtype.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from clipping.core.clip_functions import ClipFunction, factors_by_name
from clipping.core.dtypes import norm_dtype, wide_dtype
from clipping.core.microbatching import added, in_parts, sum_dtype
from clipping.numerics import kernels
from clipping.numerics.products import ALIGNED, multiplied, products
from clipping.numerics.rounding_bounds import portion

SUMMED = 4096
"""Entries to square and add in one operation."""
WIDENED = 2**22
"""Entries of gradients to copy to a wider dtype at once."""
HALVED = 160
"""Number of positions from which to use a Gram matrix's symmetry: below, smaller blocks cost more than it saves."""

SPLIT = 1024
"""Positions from which a GPU forms Gram matrices in halves; halves of fewer cost more launches than they save."""
ROWS = 128
"""Rows of a block of a symmetric Gram matrix; more where there are many rows."""

POINT = ((1, 1), (1, 1), (0, 0), (1, 1))
"""Kernel, stride, padding and dilation of a convolution that is a linear layer."""

Form = Callable[[slice, int], Tensor]
"""(samples, count) -> [count, *shape]: the sums of `count` portions of these samples, all of one size."""


def part(x: Tensor, rows: slice, dim: int = 0) -> Tensor:
    """Return some rows of x; x itself rather than a view if they are all rows, since views cost time in a small step.

    Args:
        dim: dimension of the rows.
        rows: which rows; the slice may extend beyond the last row.
    """
    if rows.start == 0 and rows.stop >= x.shape[dim]:
        return x
    return x.narrow(dim, rows.start, rows.stop - rows.start)


def sum_of_squares(x: Tensor) -> Tensor:
    """Squared norms, [b, ...] to [b], in float32 or wider; in parts, as one long float32 sum loses four digits."""
    x, dtype = x.reshape(x.shape[0], -1), norm_dtype(x.dtype)
    if x.shape[1] < 2 * SUMMED:
        return torch.linalg.vector_norm(x, dim=1, dtype=dtype).square_()
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
    if len(rows) <= most:
        return multiplied(factors, rows.to(wide)).view(grad.shape[1:])
    portions = in_parts(len(rows), -(-len(rows) // most))
    found = added(lambda samples: multiplied(factors[:, samples], rows[samples].to(wide)), portions)
    return found.view(grad.shape[1:])


def at_once(x: Tensor) -> bool:
    """True if portions of a sum over x should be formed together: each launch on its device is expensive."""
    return not x.is_cpu


def added_at_once(form: Form, batch_size: int, most: int, together: int) -> Tensor:
    """The sum over a batch in portions of at most `most` samples: [*shape], in float32 or wider."""
    return added_in(form, of_one_size(batch_size, most, together))


def added_in(form: Form, blocks: list[tuple[slice, int]]) -> Tensor:
    """The sum over blocks of samples, each formed at once: [*shape], in float32 or wider.

    Args:
        blocks: samples and number of portions of each, at least one.
    """
    first, *others = blocks
    parts = form(*first)
    if not others and len(parts) == 1:
        return parts[0].to(wide_dtype(parts.dtype))
    if len(others) < 2 and parts.dtype == torch.float32 and kernels.fused.runs(parts):
        return kernels.fused.added(parts.contiguous(), *(form(*each).contiguous() for each in others))
    total = parts.sum(0, dtype=sum_dtype(parts))
    for each in others:
        parts = form(*each)
        total += parts[0] if len(parts) == 1 else parts.sum(0, dtype=total.dtype)
    return total.to(wide_dtype(parts.dtype))


def of_one_size(batch_size: int, most: int, together: int) -> list[tuple[slice, int]]:
    """Return blocks of samples with their number of portions; all portions have one size, except a remainder.

    The size is a power of two, so adding a record changes only the remainder. For equal records, all portions are
    rounded equally, and their errors do not change with the batch.
    """
    size = 1 << (max(1, min(most, together)).bit_length() - 1)
    step, whole = max(1, together // size) * size, batch_size // size * size
    found = [slice(start, min(start + step, whole)) for start in range(0, whole, step)]
    divided = [(samples, (samples.stop - samples.start) // size) for samples in found]
    return [*divided, (slice(whole, batch_size), 1)] if whole < batch_size or not divided else divided


def weighted_at_once(factors: Tensor, rows: Tensor, most: int) -> Tensor:
    """Σ_i c_i rows_i, [n], in portions of at most `most` rows.

    Args:
        rows: [B, n].
    """

    def form(samples: slice, count: int) -> Tensor:
        some = rows[samples].unflatten(0, (count, -1))
        return multiplied(factors[samples].view(count, 1, -1), some).squeeze(1)

    return added_at_once(form, len(rows), most, len(rows))


def gram_product(a: Tensor, g: Tensor, available: int) -> Tensor:
    """Σ_{t,s} (a_t · a_s)(g_t · g_s) = ‖gᵀa‖², with positions before features, blocked over rows t.

    A block computes only the columns up to its own, and counts those before it twice: half of the work where blocks are
    many. It has `ROWS` rows or more, or fewer where T² entries exceed the available bytes.

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


def gram_norms_and_reach(
    a: Tensor, g: Tensor, lost: tuple[float, float], *, bias: bool = False, beside: Sequence[Tensor] = ()
) -> Tensor:
    """`gram_product` by whole Gram matrices, with the reach that their diagonals hold: [n, 4].

    On a GPU, by the library's products and one kernel that reads both matrices once. Many positions are halved, as the
    products of the one half with the other are needed once only.

    Args:
        lost: from `clipping.numerics.rounding_bounds.of_lost`.
        bias: rows of a have one more entry, 1.
        beside: output gradients of other layers of the same input, whose results are added.
    """
    count, positions, _ = g.shape
    half, several = positions // 2, (g, *beside)
    if positions >= SPLIT and not positions % (2 * ALIGNED) and all(x.is_contiguous() for x in (a, *several)):
        left, *right = (x.view(2 * count, half, x.shape[2]) for x in (a, *several))
        both = gram_norms_and_reach(left, right[0], lost, bias=bias, beside=right[1:]).view(count, 2, 4).sum(1)
        of_a = products(a[:, :half], a[:, half:])
        of_a = of_a.add_(1) if bias else of_a
        for each in several:
            across = products(each[:, :half], each[:, half:]).mul_(of_a)
            both[:, 0].add_(across.sum((1, 2)), alpha=2)
        return both
    of_a = products(a, a).unsqueeze(1)
    sizes = (1, positions), (1, 1), positions
    norms = kernels.fused.shifted_norms
    found: list[Tensor] = [norms(of_a, products(each, each), POINT, *sizes, lost, bias=bias) for each in several]
    return torch.stack(found).sum(0) if beside else found[0]


def within(found: Callable[[slice], Tensor], rows: int, columns: Tensor, available: int) -> Tensor:
    """Sum the entries of a matrix [n, rows, S], [n], in blocks of rows of at most `available` bytes.

    Args:
        found: maps rows to their part of the matrix.
        rows: number of rows.
        columns: [n, S, *], the other factor.
    """
    count, others, _ = columns.shape
    step = max(1, available // max(1, 2 * count * others * columns.element_size()))
    parts = [found(slice(start, start + step)).sum((1, 2)) for start in range(0, rows, step)]
    return torch.stack(parts).sum(0) if parts else columns.new_zeros(count)
