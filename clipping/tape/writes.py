"""How operations write rows into tensors: what is written to has, from then on, the owners of what was written.

Rows are followed where the target's, the values' or the index's have left the samples' order. All others are in order
afterwards, too: an assumption, which the first batch's verification tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from clipping.provenance.derived_parameters import mark_data, samples_of
from clipping.provenance.row_owners import NOBODY, Rows
from clipping.rules.assigned import width
from clipping.rules.rewritten import methods
from clipping.tape.mover import Moved, Mover


def _set(it: Mover) -> Moved:
    """x[index] = values."""
    target, index, values = it.args
    return _written(it, target, index if isinstance(index, tuple) else (index,), values)


def _put(it: Mover) -> Moved:
    """x.index_put(indices, values)."""
    target, indices, values = (it.option(i, n) for i, n in enumerate(("input", "indices", "values")))
    return _written(it, target, tuple(indices), values)


def _by_index(it: Mover) -> Moved:
    """x.index_add(0, index, values) and its like."""
    target, dim, index, values = (it.option(i, n) for i, n in enumerate(("input", "dim", "index", "source")))
    if dim % max(1, target.dim()):
        return _beside(it, target, values)
    return _written(it, target, (index,), values)


def _scattered(it: Mover) -> Moved:
    """x.scatter_add(0, index, values) and its like, with one index for each row, expanded over what a row holds."""
    target, dim, index, values = (it.option(i, n) for i, n in enumerate(("input", "dim", "index", "src")))
    if dim % max(1, target.dim()):
        return _beside(it, target, index, values)
    several = any(size > 1 and stride for size, stride in zip(index.shape[1:], index.stride()[1:], strict=True))
    if several or not index.numel() or (isinstance(values, Tensor) and len(index) != len(values)):
        return it.unknown() if _irregular(target, index, values) else None
    rows = mark_data(index[(slice(None), *[0] * (index.dim() - 1))], samples_of(index))
    return _written(it, target, (rows,), values)


def _beside(it: Mover, *operands: Any) -> Moved:
    """Along another dimension than the rows': these stay what they are in the operands that have them."""
    data = _irregular(*operands)
    return it.inherited(data, operands[0]) if data else None


def _irregular(*operands: Any) -> list[Tensor]:
    return [x for x in operands if isinstance(x, Tensor) and isinstance(samples_of(x), Rows)]


def _written(it: Mover, target: Tensor, index: tuple[Any, ...], values: Any) -> Moved:
    """Owners of a target's rows after values are put at an index, or added to what is there.

    Where values are nobody's (a number, a count of ones), rows are their index's, and else stay what they are.
    """
    if not _irregular(target, *index, values):
        return None
    if any(entry is None or entry is Ellipsis for entry in index):
        return _beside(it, target, values)
    dims = sum(width(entry) for entry in index)
    before = it.owners(target, dims)
    after = torch.full(target.shape[:dims], NOBODY, device=target.device) if before is None else before.clone()
    there = after[index]
    written = torch.full_like(there, NOBODY)
    if isinstance(values, Tensor):
        owners = it.owners(values, 0)
        if owners is None or (owners := _broadcast(owners, there, target.dim() - dims - values.dim())) is None:
            return it.unknown()
        written = owners
    if not any(isinstance(entry, slice) for entry in index):
        for entry in index:
            owners = it.owners(entry, entry.dim()) if isinstance(entry, Tensor) else None
            if owners is not None:
                owners = owners[entry] if entry.dtype == torch.bool else owners
                written = torch.where(written == NOBODY, owners, written)
    after[index] = torch.where(written == NOBODY, there, written)
    return it.rows(after)


def _broadcast(owners: Tensor, there: Tensor, more: int) -> Tensor | None:
    """Owners of values' leading dimensions as they are broadcast to where values go; None if that is not known.

    Args:
        owners: of the values.
        there: what has the shape of the owners at the index.
        more: dimensions of a row, less those of the values.
    """
    if not owners.dim():
        return owners.expand(there.shape)
    missing = there.dim() + more
    if missing < 0 or missing + owners.dim() > there.dim():
        return None
    return owners.view(*owners.shape, *[1] * (there.dim() - missing - owners.dim())).expand(there.shape)


WRITES: dict[Any, Callable[[Mover], Moved]] = {
    torch.Tensor.__setitem__: _set,
    **dict.fromkeys(methods("index_put", "index_put_"), _put),
    **dict.fromkeys(methods("index_add", "index_add_", "index_copy", "index_copy_"), _by_index),
    **dict.fromkeys(methods("scatter", "scatter_", "scatter_add", "scatter_add_"), _scattered),
    **dict.fromkeys(methods("scatter_reduce", "scatter_reduce_"), _scattered),
}
"""Operations that write rows into a tensor, perhaps in place."""
