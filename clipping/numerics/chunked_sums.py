"""Sum over a batch in portions that one operation forms together, for GPUs.

Portions of a sum are accumulated in float64 (see `clipping.numerics.rounding_bounds`), and a large batch has dozens.
One after the other, each costs a few kernel launches. Here one operation forms many portions, and one adds them. This
takes more memory, so batches with large portions are split into blocks.

A CPU forms portions one after the other (`clipping.core.microbatching.added`): memory matters there, launches do not.

Functions take:
    form: forms the sums of some portions; it may assign samples to portions in any way.
    most, together: largest number of samples in a portion; samples whose portions may be formed at once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from clipping.core.dtypes import wide_dtype
from clipping.core.microbatching import sum_dtype
from clipping.numerics import kernels
from clipping.numerics.products import full_precision

Form = Callable[[slice, int], Tensor]
"""(samples, count) -> [count, *shape]: the sums of `count` portions of these samples, all of one size."""


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
        with full_precision() if rows.is_cuda else nullcontext():
            return torch.bmm(factors[samples].view(count, 1, -1), some).squeeze(1)

    return added_at_once(form, len(rows), most, len(rows))
