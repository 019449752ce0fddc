"""Process a batch in blocks of samples, so that temporaries fit a workspace.

All such loops call `each`, which keeps the result of every block, or `added`, which sums them. Block sizes differ by
at most one, and the last block is one of the largest. It runs when the results of all earlier blocks are allocated, so
memory peaks there. A simulation of the memory therefore runs the last block alone (`taken_by`).

Functions take:
    of_block, blocks: function from the samples of a block to its tensor or tensors; slices of the batch, at least one.
    count, part, way: number of blocks or samples; a summand; the `InTurn` that runs the blocks.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from clipping.core.dtypes import wide_dtype

Parts = tuple[Tensor, ...]
"""The result of a block: tensors [b, ...]."""


def blocks(batch_size: int, bytes_per_sample: int, available: int) -> list[slice]:
    """Split a batch into blocks of at most `available` bytes, and at least one sample.

    Args:
        bytes_per_sample: bytes for each sample of a block.
        available: bytes for one block.
    """
    count = -(-batch_size // max(1, available // max(1, bytes_per_sample)))
    return in_parts(batch_size, count) if count > 1 else [slice(0, batch_size)]


def in_parts(batch_size: int, count: int) -> list[slice]:
    """Split a batch into `count` blocks whose sizes differ by at most one; the last is one of the largest.

    Args:
        count: number of blocks, 1 to B.
    """
    return [slice(i * batch_size // count, (i + 1) * batch_size // count) for i in range(count)]


def power_of_two(count: int) -> int:
    """The least power of two that is at least `count`, and at least 1."""
    return 1 << (max(1, count) - 1).bit_length()


def sum_dtype(part: Tensor) -> torch.dtype:
    """The dtype to accumulate in: float64, so that number and order of parts hardly matter. MPS has no float64."""
    if part.device.type == "mps":
        return wide_dtype(part.dtype)
    return torch.complex128 if part.dtype.is_complex else torch.float64


class InTurn:
    """Runs several blocks one after the other. Only a block's result outlives it."""

    def each(self, of_block: Callable[[slice], Parts], blocks: list[slice]) -> list[Parts]:
        """Return the result of `of_block` for each block; a subclass may run several blocks as one."""
        return [of_block(block) for block in blocks]

    def added(self, of_block: Callable[[slice], Tensor], blocks: list[slice]) -> Tensor:
        """Return the sum of `of_block` over the blocks; all results have one shape."""
        first, *others = blocks
        found = of_block(first)
        total = found.to(sum_dtype(found))
        for block in others:
            total += of_block(block)
        return total.to(wide_dtype(found.dtype))


def each(of_block: Callable[[slice], Parts], blocks: list[slice]) -> list[Parts]:
    """Return the results of `of_block` for all blocks, run by the `InTurn` in force; a single block runs directly."""
    return list(map(of_block, blocks)) if len(blocks) < 2 else _way.each(of_block, blocks)


def added(of_block: Callable[[slice], Tensor], blocks: list[slice]) -> Tensor:
    """Return the sum of `of_block` over the blocks. Several are added in float64, and returned in float32 or wider."""
    return of_block(blocks[0]) if len(blocks) == 1 else _way.added(of_block, blocks)


def concatenated(of_block: Callable[[slice], Tensor], blocks: list[slice]) -> Tensor:
    """Return the results of `of_block` for all blocks, concatenated: [B, ...]."""
    if len(blocks) == 1:
        return of_block(blocks[0])
    return torch.cat([part for (part,) in each(lambda samples: (of_block(samples),), blocks)])


@contextmanager
def taken_by(way: InTurn) -> Iterator[None]:
    """Context in which `way` runs all blocks, in every thread."""
    global _way
    before, _way = _way, way
    try:
        yield
    finally:
        _way = before


_way = InTurn()
