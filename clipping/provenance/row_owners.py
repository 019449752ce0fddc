"""Track which sample owns each row of an activation, where rows are not B·k with k consecutive ones a sample.

Experts read the tokens routed to them, loops take one sample after another, jagged sequences lie end to end. Rows are
tracked from where they leave the batch's order: an operation that moves rows also moves the indices of their samples.
Other operations are assumed to keep rows in place, which `clipping.checks.sample_independence` verifies.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from clipping.provenance.static_values import at_most, holds, require_numbers, with_numbers

NOBODY = -1
"""Owner of a row without a sample, such as one that was never written."""


class Rows:
    """The owners of an activation's rows.

    Args:
        owners: the sample's index for each index of the activation's leading dimensions; a scalar if one sample owns
            all of it.
        unknown: the operation that lost track of the owners; "" if they are known.
    """

    def __init__(self, owners: Tensor, batch_size: int, unknown: str = "") -> None:
        while owners.dim() > 1 and owners.shape[-1] == 1:  # rows of [n, 1] are also those of [n, d] that they weigh
            owners = owners[..., 0]
        self.owners, self.batch_size, self.unknown = owners, batch_size, unknown

    def __repr__(self) -> str:
        return f"Rows({list(self.owners.shape)}, {self.batch_size})"

    @cached_property
    def simplest(self) -> int | Rows:
        """The dimension of the samples, if it has k consecutive rows for each; else rows in the fewest dimensions.

        Reads values from the device, once.
        """
        owners = self.owners
        if self.unknown:
            return self
        require_numbers(owners)
        if isinstance(owners, FakeTensor):  # without values, rows are in order if their count is right
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
        """[B, L]: the rows of each sample, padded with the number of rows; L is at least 1."""
        with with_numbers():
            return padded(self.owners, self.batch_size)

    def _in_order(self, owners: Tensor) -> bool:
        count = owners.shape[-1]
        if not count or count % self.batch_size:
            return False
        ordered = in_order(count, self.batch_size, owners.device)
        return holds(((owners == ordered) | (owners == NOBODY)).all())


def in_order(count: int, batch_size: int, device: torch.device) -> Tensor:
    """Return the owners [count] of rows in order, consecutive for each sample.

    Args:
        count: number of rows, a multiple of the batch size.
    """
    with with_numbers():
        return torch.arange(count, device=device) // (count // batch_size)


def padded(owners: Tensor, count: int) -> Tensor:
    """Return the rows of each owner, [count, L], padded with len(owners); L is at least 1.

    Args:
        owners: [n], the owner of each row; rows of `NOBODY` are left out.
    """
    rows = len(owners)
    ordered, order = torch.where(owners >= 0, owners, count).sort(stable=True)
    lengths = owners.new_zeros(count + 1).index_add_(0, ordered, torch.ones_like(ordered))
    longest = at_most(lengths[:count])
    place = torch.arange(rows, device=owners.device) - (lengths.cumsum(0) - lengths)[ordered]
    at = torch.where((ordered < count) & (place < longest), ordered * longest + place, count * longest)
    found = owners.new_full((count * longest + 1,), rows)
    found[at] = order
    return found[:-1].view(count, longest)


def of_rows(factors: Tensor, owners: Tensor) -> Tensor:
    """Map factors of samples [B] to factors of rows [n]; 0 for rows without an owner."""
    return torch.where(owners >= 0, factors[owners.clamp(min=0)], torch.zeros_like(factors[:1]))


def taken(x: Tensor, index: Tensor, *, filled: bool = False) -> Tensor:
    """Gather rows of x by an index [count, L] of `padded`: [count, L, ...].

    Padding reads zeros if `filled`, else the first row, which the caller multiplies by zeros.

    Args:
        index: [count, L], row indices; n for padding.
        filled: fill padding with zeros.
    """
    inside = index < x.shape[0]
    if not x.shape[0]:
        return x.new_zeros(*index.shape, *x.shape[1:])
    found = x.index_select(0, torch.where(inside, index, 0).flatten()).view(*index.shape, *x.shape[1:])
    return found.masked_fill_(~inside.view(*index.shape, *[1] * (x.dim() - 1)), 0) if filled else found


def _alike(owners: Tensor, dim: int) -> bool:
    """True if all entries along a dimension have one owner, or none."""
    if owners.shape[dim] <= 1:
        return True
    highest = owners.amax(dim, keepdim=True)
    return holds(((owners == highest) | (owners == NOBODY)).all())
