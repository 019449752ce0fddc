"""Writes of parameters into data, and of data into tensors made of parameters: on one copy for each row."""

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

    def let_go(self, x: Tensor) -> None:
        """Stop treating a tensor as a source, as it now depends on data."""


Instead = Callable[[], Any] | None
Rewriting = Callable[..., Instead]
"""(rows, operation, arguments) -> a function to run instead under the tape; None to run the call unchanged."""

FREEZE = "freeze it, or use microbatch or vmap"
INTO_PARAMETERS = "writes data into a tensor made of parameters", "join them by torch.cat or torch.where"


def broadcast_in_place(rows: Rows, func: Any, target: Tensor, *args: Any, **kwargs: Any) -> Instead:
    """target += D and its like; the other operands are broadcast to the target's shape.

    Args:
        rows: the tape.
        func, target: the operation and the tensor that it changes; the other arguments follow.
    """
    if func is torch.Tensor.add_ and rows.source(target) is None and not target._is_view():
        return None  # its rule needs no copies
    others = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    aligned = any(x.dim() == target.dim() > 0 and len(x) == len(target) for x in others if rows.source(x) is None)

    def broadcast(x: Any) -> Any:
        source = rows.source(x)
        return x if source is None else _for_each_row(rows, source, target.shape)

    args, kwargs = tuple(map(broadcast, args)), {key: broadcast(x) for key, x in kwargs.items()}
    _as_activation(rows, target, aligned)
    return lambda: func(target, *args, **kwargs)


def assigned(rows: Rows, func: Any, target: Tensor, index: Any, value: Any) -> Instead:
    """target[index] = value. The index must select all samples in order, or use indices or masks.

    Args:
        rows: the tape.
        func, target, index, value: the operation and its arguments.

    Raises:
        Refused: samples are not in the first dimension, or a slice selects only some of them.
    """
    entries = index if isinstance(index, tuple) else (index,)
    whole = takes_all(index) and len(entries) <= target.dim()
    source, known = rows.source(value), whole or all(isinstance(entry, (int, Tensor)) for entry in entries)
    if source is None and rows.source(target) is None:
        return None
    _require_first(target, *entries, value)
    if source is not None and not known:
        raise Refused("sets some rows of the batch to a parameter", "use torch.where with a mask, or microbatch")
    _as_activation(rows, target, known)
    if source is None:
        return lambda: func(target, index, value)
    if whole:
        value = _for_each_row(rows, source, target.detach()[index].shape)
        return lambda: func(target, index, value)
    copies = _beside(rows, source, entries, target.shape)
    return lambda: func(target, index, copies.expand(target.shape)[index])


def put(rows: Rows, func: Any, input: Tensor, indices: Any, values: Tensor, accumulate: bool = False) -> Instead:
    """input.index_put(indices, values).

    Args:
        rows: the tape.
        func, input, indices, values, accumulate: the operation and its arguments.

    Raises:
        Refused: samples are not in the first dimension, or data is written into a parameter itself.
    """
    target, source, entries = rows.source(input), rows.source(values), tuple(indices)
    if target is None and source is None:
        return None
    _require_first(input, *entries, values)
    if target is not None and (target.is_parameter or func is torch.Tensor.index_put_):
        raise Refused(*INTO_PARAMETERS)
    into = input if target is None else rows.own(target)
    if source is None:
        return lambda: func(into, indices, values, accumulate)
    copies = _beside(rows, source, entries, input.shape)
    return lambda: func(into, indices, copies.expand(input.shape)[entries], accumulate)


def _require_first(*operands: Any) -> None:
    places = [samples_of(x) for x in operands if isinstance(x, Tensor)]
    if any(isinstance(place, int) and place for place in places):
        raise Refused("sets rows to a parameter where samples are not in the first dimension", "use torch.where")


def width(entry: Any) -> int:
    """Return the number of dimensions that an entry of an index reads.

    Args:
        entry: an integer, a slice, None, a list or a tensor.
    """
    if entry is None or isinstance(entry, bool):
        return 0
    return entry.dim() if _is_mask(entry) else 1


def _is_mask(entry: Any) -> bool:
    return isinstance(entry, Tensor) and entry.dtype == torch.bool


def takes_all(index: Any) -> bool:
    """True if an index selects all rows in order.

    Args:
        index: index of a tensor, or a tuple of entries.
    """
    first = index[0] if isinstance(index, tuple) and index else index
    return first is Ellipsis or (isinstance(first, slice) and first == slice(None))


def _as_activation(rows: Rows, target: Tensor, aligned: bool) -> None:
    """Replace a target made of parameters by one copy for each row, so that data may be written to it."""
    source = rows.source(target)
    if source is None:
        return
    if not aligned or target._is_view() or source.is_parameter:
        raise Refused(*INTO_PARAMETERS)
    activation = rows.own(source)
    rows.let_go(target)
    target.detach_().copy_(activation)  # its origins are no longer read


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
