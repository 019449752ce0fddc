"""The containers that a `collate_fn` may make: mappings, sequences, named tuples and dataclasses, one in another."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

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


def emptied(batch: Any) -> Any:
    """The same without its samples: tensors [0, ...]; what is no tensor stays as it is.

    Args:
        batch: tensors [B, ...] in nested mappings, lists and tuples.
    """
    return mapped(lambda x: x[:0], batch)


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
