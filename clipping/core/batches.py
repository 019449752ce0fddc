"""Batches of tensors in nested containers: batch size, mapping, forward pass and losses.

Functions take:
    tree: tensors in nested mappings, sequences, named tuples, dataclasses and distributions.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from clipping.core.types import LossFunction


def losses_of(model: nn.Module, loss_fn: LossFunction, inputs: Any, targets: Any, batch_size: int) -> Tensor:
    """Run a forward pass and return the losses ℓ [B], with their graph.

    Raises:
        ValueError: the loss has another shape. [B, 1] would broadcast against the factors [B] to [B, B].
    """
    losses = loss_fn(forward(model, inputs), targets)
    shape = list(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
    if shape != [batch_size]:
        raise ValueError(
            f"expected loss_fn to return one loss a sample, shape [{batch_size}], got {shape}; "
            "use reduction='none' and reduce all but the first dimension"
        )
    return losses


def forward(model: nn.Module, inputs: Any) -> Any:
    """model(inputs), model(*inputs) for a tuple, model(**inputs) for a dict."""
    if isinstance(inputs, tuple):
        return model(*inputs)
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(inputs)


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Apply `function` to every tensor in nested containers; other values stay as they are.

    Args:
        function: maps a tensor to its replacement.
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, MutableMapping):  # includes UserDict and BatchEncoding; the copy keeps their other attributes
        found = copy.copy(tree)
        for key, value in tree.items():
            found[key] = map_tensors(function, value)
        return found
    if isinstance(tree, (tuple, list)):
        values = [map_tensors(function, value) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    if _is_record(tree):
        fields = {f.name: map_tensors(function, getattr(tree, f.name)) for f in dataclasses.fields(tree) if f.init}
        return dataclasses.replace(tree, **fields)
    if isinstance(tree, Distribution):
        made = copy.copy(tree)
        vars(made).update(map_tensors(function, vars(tree)))
        return made
    return tree


def tensors_of(tree: Any) -> list[Tensor]:
    """Return every tensor of nested containers, in the order of `map_tensors`."""
    found: list[Tensor] = []
    stack = [tree]
    while stack:
        value = stack.pop()
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, Mapping):
            stack += reversed(list(value.values()))
        elif isinstance(value, (tuple, list)):
            stack += reversed(value)
        elif _is_record(value):
            stack += [getattr(value, field.name) for field in reversed(dataclasses.fields(value))]
        elif isinstance(value, Distribution):
            stack += reversed(list(vars(value).values()))
    return found


def same_values(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have one shape and equal values; NaN equals NaN.

    Args:
        x, y: dense or sparse.
    """
    x, y = (each if each.layout == torch.strided else each.to_dense() for each in (x, y))
    return x.shape == y.shape and torch.allclose(x, y, 0, 0, equal_nan=True)


def leading_dimension(*trees: Any) -> int:
    """Return the batch size B, the first dimension of every tensor in `trees`.

    Raises:
        ValueError: `trees` holds no tensor, a scalar, a nested tensor, or tensors whose first dimensions differ.
    """
    tensors = tensors_of(trees)
    if not tensors:
        raise ValueError("expected at least one tensor in inputs and targets, got none")
    if any(x.is_nested for x in tensors):
        raise ValueError(
            "expected padded tensors in inputs and targets, got a nested one: torch.nested.to_padded_tensor pads it; "
            "pass a mask beside it"
        )
    shapes = [list(x.shape) for x in tensors]
    sizes = {shape[0] if shape else None for shape in shapes}
    if len(sizes) != 1 or None in sizes:
        raise ValueError(f"expected every tensor of inputs and targets to have the same first dimension, got {shapes}")
    return shapes[0][0]


def _is_record(tree: Any) -> bool:
    return dataclasses.is_dataclass(tree) and not isinstance(tree, type)
