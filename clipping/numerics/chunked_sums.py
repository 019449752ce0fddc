"""A sum over a batch in portions that are all formed at once: for a GPU, to which each operation is a launch.

Portions of a sum are added up in float64 (see `clipping.numerics.rounding_bounds`), and there are dozens of them in a
large batch. One after the other each takes a few launches. Here one operation forms many, and one adds them up. What is
formed at once takes memory: so a batch whose portions are large goes in blocks.

On a CPU, where memory counts and a call does not, portions are formed one after the other
(`clipping.core.microbatching.added`).
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
"""(samples, count) -> [count, *shape]: the sums of `count` portions of these samples, equally many in each."""


def at_once(x: Tensor) -> bool:
    """Whether portions of a sum over x are formed together: to begin an operation costs its device much.

    Args:
        x: an operand of the sum.
    """
    return not x.is_cpu


def added_at_once(form: Form, batch_size: int, most: int, together: int) -> Tensor:
    """The sum over a batch in portions of at most `most` samples: [*shape], in float32 or wider.

    Args:
        form: forms the sums of some portions; which samples are in which portion is its own choice.
        batch_size: B.
        most: samples of a portion, at most.
        together: samples whose portions may be formed at once.
    """
    first, *others = of_one_size(batch_size, most, together)
    parts = form(*first)
    # of other sizes there is what is left over, perhaps
    if len(others) < 2 and parts.dtype == torch.float32 and kernels.fused.runs(parts):
        return kernels.fused.added(parts.contiguous(), *(form(*each).contiguous() for each in others))
    total = parts.sum(0, dtype=sum_dtype(parts))
    for each in others:
        parts = form(*each)
        total += parts[0] if len(parts) == 1 else parts.sum(0, dtype=total.dtype)
    return total.to(wide_dtype(parts.dtype))


def of_one_size(batch_size: int, most: int, together: int) -> list[tuple[slice, int]]:
    """Blocks of samples, with a number of portions each: all of one size, but for what is left over, a portion itself.

    Their size is a power of two. So one record more makes what is left over larger by one, and leaves all others as
    they were: of records that are alike all portions are rounded alike, and these errors do not move with the batch.

    Args:
        batch_size: B.
        most: samples of a portion, at most.
        together: samples whose portions may be formed at once.
    """
    size = 1 << (max(1, min(most, together)).bit_length() - 1)
    step, whole = max(1, together // size) * size, batch_size // size * size
    found = [slice(start, min(start + step, whole)) for start in range(0, whole, step)]
    divided = [(samples, (samples.stop - samples.start) // size) for samples in found]
    return [*divided, (slice(whole, batch_size), 1)] if whole < batch_size else divided


def weighted_at_once(factors: Tensor, rows: Tensor, most: int) -> Tensor:
    """Σ_i c_i rows_i of [B] and [B, n], of one dtype, in portions of at most `most` rows: [n].

    Args:
        factors: c [B].
        rows: [B, n].
        most: rows of a portion, at most.
    """

    def form(samples: slice, count: int) -> Tensor:
        some = rows[samples].unflatten(0, (count, -1))
        with full_precision() if rows.is_cuda else nullcontext():
            return torch.bmm(factors[samples].view(count, 1, -1), some).squeeze(1)

    return added_at_once(form, len(rows), most, len(rows))
