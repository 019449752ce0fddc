"""A sum over a batch in portions that are all formed at once: for a GPU, to which each operation is a launch.

Portions of a sum are added up in float64 (see `clipping.rounding`), and there are dozens of them in a large batch. One
after the other each takes a few launches. Here one operation forms many, and one adds them up. What is formed at once
takes memory: so a batch whose portions are large goes in blocks.

On a CPU, where memory counts and a call does not, portions are formed one after the other (`clipping.blocks.added`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from clipping.blocks import blocks, sum_dtype
from clipping.formats import wide_dtype
from clipping.kernels import fused

Form = Callable[[slice, int], Tensor]
"""(samples, count) -> [count, *shape]: the sums of `count` portions of equally many of these samples."""


def at_once(x: Tensor) -> bool:
    """Whether portions of a sum over x are formed together: to begin an operation costs its device much."""
    return not x.is_cpu


def added_at_once(form: Form, batch_size: int, most: int, together: int) -> Tensor:
    """The sum over a batch in portions of at most `most` samples: [*shape], in float32 or wider.

    Args:
        form: forms the sums of some portions; which samples are in which portion is its own choice.
        batch_size: B.
        most: samples of a portion, at most.
        together: samples whose portions may be formed at once.
    """
    total: Tensor | None = None
    divided = list(equal_portions(batch_size, most, together))
    for samples, count in divided:
        parts = form(samples, count)
        if len(divided) == 1 and parts.dtype == torch.float32 and fused.runs(parts):
            return fused.added(parts.contiguous())
        found = parts.sum(0, dtype=sum_dtype(parts))
        wide, total = wide_dtype(parts.dtype), found if total is None else total.add_(found)
    assert total is not None
    return total.to(wide)


def equal_portions(batch_size: int, most: int, together: int) -> Iterator[tuple[slice, int]]:
    """Blocks of samples, each with a number of portions that divides it: what is left over is a block of its own."""
    for block in blocks(batch_size, 1, max(1, together)):
        yield from _divided(block.start, block.stop, most)


def _divided(start: int, stop: int, most: int) -> Iterator[tuple[slice, int]]:
    """Portions as few as can be, or up to twice as many where these leave nothing over."""
    samples = stop - start
    least = -(-samples // most)
    for count in range(least, min(2 * least, samples) + 1):
        if samples % count == 0:
            yield slice(start, stop), count
            return
    middle = start + samples // least * least
    yield slice(start, middle), least
    yield from _divided(middle, stop, most)


def weighted_at_once(factors: Tensor, rows: Tensor, most: int) -> Tensor:
    """Σ_i c_i rows_i of [B] and [B, n], of one dtype, in portions of at most `most` rows: [n]."""

    def form(samples: slice, count: int) -> Tensor:
        some = rows[samples].unflatten(0, (count, -1))
        return torch.bmm(factors[samples].view(count, 1, -1), some).squeeze(1)

    return added_at_once(form, len(rows), most, len(rows))
