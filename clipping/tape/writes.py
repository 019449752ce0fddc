"""Track operations that write rows into tensors: the target takes the owners of the values.

Owners are tracked if rows of the target, the values or the index are out of the samples' order. Otherwise the result is
assumed to be in order, which the first batch's verification tests; in a constant, the samples take the dimension that
they have in the first values.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from clipping.provenance.derived_parameters import mark_data, methods, samples_of
from clipping.provenance.row_owners import NOBODY, Rows
from clipping.tape.mover import Moved, Mover
from clipping.tape.rewritten import entries_of, width


def _set(it: Mover) -> Moved:
    """x[index] = values."""
    target, index, values = it.args
    entries = entries_of(index)
    if _irregular(target, *entries, values):
        return _written(it, target, entries, values)
    place = samples_of(values) if any(x is values for x in it.data) else None
    is_constant = target._base is None and not any(x is target for x in it.data)
    basic = all(entry is Ellipsis or type(entry) in (int, slice) for entry in entries)
    if place is None or not is_constant or not basic:
        return None
    return _aligned(target.dim(), entries, place - values.dim())


def _aligned(dims: int, index: tuple[Any, ...], place: int) -> int | None:
    """Return the dimension of x that one of x[index] is, which values are written to.

    Args:
        dims: dimensions of x.
        index: integers, slices and Ellipsis.
        place: the dimension of x[index], counted from the end.
    """
    rest = dims - sum(entry is not Ellipsis for entry in index)
    kept: list[int] = []
    dim = 0
    for entry in index if Ellipsis in index else (*index, Ellipsis):
        size = rest if entry is Ellipsis else 1
        if type(entry) is not int:
            kept += range(dim, dim + size)
        dim += size
    return kept[place] or None


def _put(it: Mover) -> Moved:
    """x.index_put(indices, values)."""
    target, indices, values = (it.option(i, n) for i, n in enumerate(("input", "indices", "values")))
    return _written(it, target, tuple(indices), values)


def _by_index(it: Mover) -> Moved:
    """x.index_add(0, index, values) and similar operations."""
    target, dim, index, values = (it.option(i, n) for i, n in enumerate(("input", "dim", "index", "source")))
    if dim % max(1, target.dim()):
        return _beside(it, target, values)
    return _written(it, target, (index,), values)


def _scattered(it: Mover) -> Moved:
    """x.scatter_add(0, index, values) and similar ones, with one index for each row, expanded over the row."""
    target, dim, index, values = (it.option(i, n) for i, n in enumerate(("input", "dim", "index", "src")))
    if dim % max(1, target.dim()):
        return _beside(it, target, index, values)
    several = any(size > 1 and stride for size, stride in zip(index.shape[1:], index.stride()[1:], strict=True))
    if several or not index.numel() or (isinstance(values, Tensor) and len(index) != len(values)):
        return it.unknown() if _irregular(target, index, values) else None
    rows = mark_data(index[(slice(None), *[0] * (index.dim() - 1))], samples_of(index))
    return _written(it, target, (rows,), values)


def _beside(it: Mover, *operands: Any) -> Moved:
    """Writes along another dimension: operands keep the owners of their rows."""
    data = _irregular(*operands)
    return it.inherited(data, operands[0]) if data else None


def _irregular(*operands: Any) -> list[Tensor]:
    return [x for x in operands if isinstance(x, Tensor) and isinstance(samples_of(x), Rows)]


def _written(it: Mover, target: Tensor, index: tuple[Any, ...], values: Any) -> Moved:
    """Return the owners of a target's rows after values are written, or added, at an index.

    If values have no owner (a number, a count of ones), the rows take the index's owners, or else keep theirs.
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
    """Broadcast the owners of values to the place of the write; None if unknown.

    Args:
        owners: owners of the values.
        there: tensor of the shape of the owners at the index.
        more: dimensions of a row minus those of the values.
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
