"""A batch in blocks of samples, one after the other, so that what is made of it at once stays within a workspace.

All such loops are one of two: `each` keeps what is made of every block, `added` adds it up. Blocks differ in size by
one sample at the most, the last is one of the largest, and what earlier ones leave is there by then: nothing needs more
memory than the last. So a simulation of the memory, which computes nothing, lets the last stand for all
(`taken_by`), and takes no longer for a batch of thousands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from clipping.core.dtypes import wide_dtype

Parts = tuple[Tensor, ...]
"""What is kept of a block: tensors [b, ...]."""


def blocks(batch_size: int, bytes_per_sample: int, available: int) -> list[slice]:
    """Cut a batch into blocks of samples that stay within `available` bytes, or of one sample.

    Args:
        batch_size: B.
        bytes_per_sample: what each sample of a block takes.
        available: bytes that a block may take.
    """
    most = max(1, available // max(1, bytes_per_sample))
    return in_parts(batch_size, max(1, -(-batch_size // most)))


def in_parts(batch_size: int, count: int) -> list[slice]:
    """Cut a batch into `count` blocks that differ in size by one at the most; the last is one of the largest.

    Args:
        batch_size: B.
        count: of blocks, 1 to B.
    """
    return [slice(i * batch_size // count, (i + 1) * batch_size // count) for i in range(count)]


def sum_dtype(part: Tensor) -> torch.dtype:
    """Of a sum of such parts: float64, so that neither how many there are nor their order matters; MPS has none.

    Args:
        part: one of what is added up.
    """
    if part.device.type == "mps":
        return wide_dtype(part.dtype)
    return torch.complex128 if part.dtype.is_complex else torch.float64


class InTurn:
    """How the blocks of a batch are gone through: one after the other. Nothing else of a block outlives it."""

    def each(self, of_block: Callable[[slice], Parts], blocks: list[slice]) -> list[Parts]:
        """What `of_block` makes of each block; several may be joined to one.

        Args:
            of_block: from the samples of a block to its tensors.
            blocks: slices of the batch.
        """
        return [of_block(block) for block in blocks]

    def added(self, of_block: Callable[[slice], Tensor], blocks: list[slice]) -> Tensor:
        """The sum of what `of_block` makes of each block, of the same shape each.

        Args:
            of_block: from the samples of a block to a tensor.
            blocks: slices of the batch, at least one.
        """
        first, *others = blocks
        found = of_block(first)
        if not others:
            return found
        total = found.to(sum_dtype(found))
        for block in others:
            total += of_block(block)
        return total.to(wide_dtype(found.dtype))


def each(of_block: Callable[[slice], Parts], blocks: list[slice]) -> list[Parts]:
    """See `InTurn`.

    Args:
        of_block: from the samples of a block to its tensors.
        blocks: slices of the batch.
    """
    return _way.each(of_block, blocks)


def added(of_block: Callable[[slice], Tensor], blocks: list[slice]) -> Tensor:
    """See `InTurn`: several blocks are added up in float64, and leave in float32 or wider.

    Args:
        of_block: from the samples of a block to a tensor.
        blocks: slices of the batch, at least one.
    """
    return _way.added(of_block, blocks)


def concatenated(of_block: Callable[[slice], Tensor], blocks: list[slice]) -> Tensor:
    """What `of_block` makes of all blocks, [B, ...].

    Args:
        of_block: from the samples of a block, b of them, to a tensor [b, ...].
        blocks: slices of the batch, at least one.
    """
    found = [part for (part,) in each(lambda samples: (of_block(samples),), blocks)]
    return torch.cat(found) if len(found) > 1 else found[0]


@contextmanager
def taken_by(way: InTurn) -> Iterator[None]:
    """Within it, blocks are gone through by another way, in all threads.

    Args:
        way: what goes through them.
    """
    global _way
    before, _way = _way, way
    try:
        yield
    finally:
        _way = before


_way = InTurn()
