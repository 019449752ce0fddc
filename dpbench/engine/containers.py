"""The containers that a `collate_fn` may make: mappings, sequences, named tuples and dataclasses, one in another."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Every tensor of a batch, in order.

    Args:
        batch: tensors in nested mappings, lists and tuples.
    """
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_in(value)
    elif isinstance(batch, (tuple, list)):
        for value in batch:
            yield from tensors_in(value)
    elif _is_record(batch):
        for field in dataclasses.fields(batch):
            yield from tensors_in(getattr(batch, field.name))


def dense_in(batch: Any) -> Iterator[Tensor]:
    """Its tensors of at least one dimension; neither sparse nor nested ones, whose memory is not one block.

    Args:
        batch: tensors in nested mappings, lists and tuples.
    """
    return (x for x in tensors_in(batch) if x.layout == torch.strided and not x.is_nested and x.dim())


def emptied(batch: Any) -> Any:
    """The same without its samples: tensors [0, ...]; what is no tensor stays as it is.

    Args:
        batch: tensors [B, ...] in nested mappings, lists and tuples.

    Raises:
        ValueError: it has no tensors, or one that cannot be empty.
    """
    if next(tensors_in(batch), None) is None:
        raise ValueError(f"expected tensors in tuples, lists, mappings or dataclasses, got {type(batch).__name__}")
    return mapped(_without_rows, batch)


def _without_rows(x: Tensor) -> Tensor:
    if not x.is_nested and not x.dim():  # a number about the batch
        return x
    try:
        return x.index_select(0, torch.zeros(0, dtype=torch.int64, device=x.device)) if x.is_sparse else x[:0]
    except (RuntimeError, NotImplementedError, IndexError) as error:
        kind = "nested" if x.is_nested else str(x.layout)
        raise ValueError(f"expected tensors [B, ...] that may have no rows, got one that is {kind}") from error


def mapped(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """The same containers with `function` of each tensor; what is no tensor stays as it is.

    Args:
        function: from a tensor to what takes its place.
        batch: tensors in nested mappings, lists and tuples.
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, MutableMapping):  # UserDict and BatchEncoding among them, which keep what else they hold
        found = copy.copy(batch)
        for key, value in batch.items():
            found[key] = mapped(function, value)
        return found
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(mapped(function, value) for value in batch))
    if isinstance(batch, (tuple, list)):
        values = (mapped(function, value) for value in batch)
        return type(batch)(values)
    if _is_record(batch):
        fields = {f.name: mapped(function, getattr(batch, f.name)) for f in dataclasses.fields(batch) if f.init}
        return dataclasses.replace(batch, **fields)
    return batch


def _is_record(batch: Any) -> bool:
    return dataclasses.is_dataclass(batch) and not isinstance(batch, type)
