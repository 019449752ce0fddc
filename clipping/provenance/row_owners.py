"""Which sample each row of an activation belongs to, where it is not B·k rows with k consecutive ones to a sample.

Experts read the tokens that are routed to them, loops take one sample after another, jagged sequences lie end to end.
Their rows are followed from where they leave the batch: each operation that moves rows moves the numbers of their
samples in the same way, and each other one is taken to leave rows where they are (which
`clipping.checks.sample_independence` looks at).
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from clipping.provenance.static_values import require_numbers, with_numbers

NOBODY = -1
"""The owner of a row that no sample has written to."""


class Rows:
    """The owners of an activation's rows.

    Args:
        owners: the number of the sample, for each index of the activation's leading dimensions; a scalar if all of it
            is one sample's.
        batch_size: B.
        unknown: the operation after which owners are not known any more; "" where they are.
    """

    def __init__(self, owners: Tensor, batch_size: int, unknown: str = "") -> None:
        self.owners, self.batch_size, self.unknown = owners, batch_size, unknown

    def __repr__(self) -> str:
        return f"Rows({list(self.owners.shape)}, {self.batch_size})"

    @cached_property
    def simplest(self) -> int | Rows:
        """The dimension that holds the samples, if one does, k consecutive rows to each; else the fewest dimensions.

        Reads numbers from the device, once.
        """
        owners = self.owners
        if self.unknown:
            return self
        require_numbers(owners)
        if isinstance(owners, FakeTensor):  # without numbers: rows that are as many as they should be are in order
            return self if owners.dim() != 1 or owners.shape[0] % self.batch_size else 0
        with with_numbers():
            return self._simplest(owners)

    def _simplest(self, owners: Tensor) -> int | Rows:
        while owners.dim() > 1 and _alike(owners, owners.dim() - 1):
            owners = owners.amax(-1) if owners.shape[-1] else owners.new_full(owners.shape[:-1], NOBODY)
        for dim in range(owners.dim()):
            if self._in_order(owners.movedim(dim, -1)):
                return dim
        return self if owners.dim() == self.owners.dim() else Rows(owners, self.batch_size)

    @cached_property
    def padded(self) -> Tensor:
        """[B, L]: the rows of each sample, filled up with the number of rows; L is at least 1."""
        with with_numbers():
            return padded(self.owners, self.batch_size)

    def _in_order(self, owners: Tensor) -> bool:
        count = owners.shape[-1]
        if not count or count % self.batch_size:
            return False
        ordered = in_order(count, self.batch_size, owners.device)
        return bool(((owners == ordered) | (owners == NOBODY)).all())


def in_order(count: int, batch_size: int, device: torch.device) -> Tensor:
    """[count]: the owners of as many rows, consecutive ones for each sample.

    Args:
        count: of rows, a multiple of the batch size.
        batch_size: B.
        device: where they are to be.
    """
    with with_numbers():
        return torch.arange(count, device=device) // (count // batch_size)


def padded(owners: Tensor, count: int) -> Tensor:
    """The rows of each of so many owners, [count, L], filled up with len(owners); L is at least 1.

    Args:
        owners: [n], the owner of each row; `NOBODY` is left out.
        count: how many owners there are.
    """
    rows = len(owners)
    ordered, order = owners.sort(stable=True)
    order, ordered = order[ordered >= 0], ordered[ordered >= 0]
    lengths = torch.bincount(ordered, minlength=count)
    longest = max(1, int(lengths.max())) if rows else 1
    starts = lengths.cumsum(0) - lengths
    found = owners.new_full((count, longest), rows)
    found[ordered, torch.arange(len(ordered), device=owners.device) - starts[ordered]] = order
    return found


def taken(x: Tensor, index: Tensor, *, filled: bool = False) -> Tensor:
    """Rows of x by an index [count, L] of `padded`, [count, L, ...]; zeros where it is filled up, if `filled`.

    Elsewhere the first row stands there, which is multiplied by zeros.

    Args:
        x: [n, ...].
        index: [count, L], numbers of rows; n where it is filled up.
        filled: put zeros there.
    """
    inside = index < x.shape[0]
    if not x.shape[0]:
        return x.new_zeros(*index.shape, *x.shape[1:])
    found = x.index_select(0, torch.where(inside, index, 0).flatten()).view(*index.shape, *x.shape[1:])
    return found.masked_fill_(~inside.view(*index.shape, *[1] * (x.dim() - 1)), 0) if filled else found


def _alike(owners: Tensor, dim: int) -> bool:
    """Whether all along a dimension belong to one owner, or to nobody."""
    if owners.shape[dim] <= 1:
        return True
    highest = owners.amax(dim, keepdim=True)
    return bool(((owners == highest) | (owners == NOBODY)).all())
