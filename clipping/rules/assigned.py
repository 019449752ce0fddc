"""Writes of parameters into data: from one copy for each row.

Functions take:
    rows: the tape.
    target, index, value: of a write at an index; the target may be changed as a whole.
    entry: of an index: an integer, a slice, None, a list or a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from clipping.provenance.derived_parameters import Source, is_marked, mark_data, samples_of
from clipping.rules.base import Refused


class Rows(Protocol):
    """The part of a tape that rewrites of operations use.

    Methods take:
        x, source, rows: any object, a tensor's source, the number of copies.
    """

    def source(self, x: Any) -> Source | None:
        """Return the source of a tensor made of parameters alone, else None."""

    def copies(self, source: Source, rows: int) -> Tensor:
        """Copy a source for each row: [rows, *shape of source]."""

    def own(self, source: Source) -> Tensor:
        """Return the tensor of a source that has one row for each row of the batch, as an activation."""


Instead = Callable[[], Any] | None
Rewriting = Callable[..., Instead]
"""(rows, operation, arguments) -> a function to run instead under the tape; None to run the call unchanged."""

FREEZE = "freeze it, or use microbatch or vmap"
INTO_PARAMETERS = "writes data into a tensor made of parameters", "join them by torch.cat or torch.where"


def broadcast_in_place(rows: Rows, func: Any, target: Tensor, *args: Any, **kwargs: Any) -> Instead:
    """target += D and its like; the other operands are broadcast to the target's shape.

    Raises:
        Refused: the target is made of parameters.
    """
    if rows.source(target) is not None:
        raise Refused(*INTO_PARAMETERS)
    if func is torch.Tensor.add_ and not target._is_view():
        return None  # its rule needs no copies

    def broadcast(x: Any) -> Any:
        source = rows.source(x)
        return x if source is None else _for_each_row(rows, source, target.shape)

    args, kwargs = tuple(map(broadcast, args)), {key: broadcast(x) for key, x in kwargs.items()}
    return lambda: func(target, *args, **kwargs)


def assigned(rows: Rows, func: Any, target: Tensor, index: Any, value: Any) -> Instead:
    """target[index] = value. The index must select all samples in order, or use indices or masks.

    Raises:
        Refused: the target is made of parameters, samples are not in the first dimension, or a slice selects only some
            of them.
    """
    entries = index if isinstance(index, tuple) else (index,)
    whole = takes_all(index) and len(entries) <= target.dim()
    source = rows.source(value)
    if rows.source(target) is not None:
        raise Refused(*INTO_PARAMETERS)
    if source is None:
        return None
    places = [samples_of(x) for x in (target, *entries) if isinstance(x, Tensor)]
    if any(isinstance(place, int) and place for place in places):
        raise Refused("sets rows to a parameter where samples are not in the first dimension", "use torch.where")
    if not whole and not all(isinstance(entry, (int, Tensor)) for entry in entries):
        raise Refused("sets some rows of the batch to a parameter", "use torch.where with a mask, or microbatch")
    if whole:
        value = _for_each_row(rows, source, target.detach()[index].shape)
        return lambda: func(target, index, value)
    copies = _beside(rows, source, entries, target.shape)
    return lambda: func(target, index, copies.expand(target.shape)[index])


def width(entry: Any) -> int:
    """Return the number of dimensions that an entry of an index reads."""
    if entry is None or isinstance(entry, bool):
        return 0
    return entry.dim() if _is_mask(entry) else 1


def _is_mask(entry: Any) -> bool:
    return isinstance(entry, Tensor) and entry.dtype == torch.bool


def takes_all(index: Any) -> bool:
    """True if an index selects all rows in order."""
    first = index[0] if isinstance(index, tuple) and index else index
    return first is Ellipsis or (isinstance(first, slice) and first == slice(None))


def _for_each_row(rows: Rows, source: Source, shape: torch.Size) -> Tensor:
    """Return the source as an activation broadcast to `shape`, with rows in the first dimension."""
    x = source.tensor
    if shape and x.dim() == len(shape) and shape[0] == len(x):
        return rows.own(source)
    if x.dim() > len(shape) or (x.dim() == len(shape) and len(x) != 1) or not shape:
        raise Refused(f"no exact rule for a parameter of shape {list(x.shape)} in one of {list(shape)}", FREEZE)
    return _spread(rows.copies(source, shape[0]), x.shape[1:] if x.dim() == len(shape) else x.shape, len(shape))


def _beside(rows: Rows, source: Source, index: tuple[Any, ...], shape: torch.Size) -> Tensor:
    """Copy a source for each row of a target; the target's index applies to it."""
    entry = shape[sum(map(width, index)) :]
    source = source if source.row is None else source.row
    x = source.tensor
    inner = x.shape[1:] if x.dim() == len(entry) + 1 and len(x) == 1 else x.shape
    if len(inner) > len(entry):
        raise Refused("sets rows of the batch to a parameter that has one for each", FREEZE)
    return _spread(rows.copies(source, shape[0]), inner, len(shape))


def _spread(copies: Tensor, inner: Sequence[int], dims: int) -> Tensor:
    """Reshape copies [rows, *] to [rows, 1, ..., 1, *inner] of `dims` dimensions."""
    found = copies.reshape(copies.shape[0], *[1] * (dims - 1 - len(inner)), *inner)
    return mark_data(found, samples_of(copies)) if is_marked(copies) else found
