"""Formats of numbers: of norms and sums, and those in which a graph computed, by which rounding explains a difference.

Parameters do not say it: under autocast they are of float32 and the products of bfloat16, wherever autocast was entered
(by the caller, or inside the model); and a model may cast for itself. The graph does: each of its nodes knows the dtype
of what it gave.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)


def formats(*tensors: Tensor) -> set[torch.dtype]:
    """The floating dtypes of tensors, and of all that was computed for them, as far as their graphs reach."""
    found = {x.dtype for x in tensors if x.is_floating_point()}
    stack: list[Any] = [x.grad_fn for x in tensors if x.grad_fn is not None]
    seen = {None, *stack}
    while stack:
        node = stack.pop()
        found |= {each.dtype for each in node._input_metadata if each.dtype.is_floating_point}
        for child, _ in node.next_functions:
            if child not in seen:
                seen.add(child)
                stack.append(child)
    return found


def coarsest(tensors: Iterable[Tensor], tolerances: Mapping[torch.dtype, float]) -> float:
    """What rounding explains: the largest tolerance of the formats of `tensors`, and of autocast where it is on.

    Args:
        tensors: results, with their graphs if they have any.
        tolerances: relative, by dtype; that of float32 for a dtype that is not among them.
    """
    given = list(tensors)
    found = formats(*given)
    for kind in {x.device.type for x in given}:
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            found.add(torch.get_autocast_dtype(kind))
    return max((tolerances.get(dtype, tolerances[torch.float32]) for dtype in found), default=tolerances[torch.float32])


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Norms are not to be cast down, if the caller is in autocast for the sake of the model.

    Args:
        device: where norms are formed.
    """
    if _has_autocast(device.type) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return _NOTHING


_has_autocast = functools.cache(torch.amp.is_autocast_available)
_NOTHING = nullcontext()


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of sums: float32 for half precision, of which a sum of thousands has no digits left; else the same.

    Args:
        dtype: of what is added up.
    """
    return torch.float32 if dtype in HALF else dtype


def norm_dtype(dtype: torch.dtype) -> torch.dtype:
    """Norms are accumulated in float32 or wider: squares of float16 overflow at 256, bfloat16 keeps 8 bits.

    Args:
        dtype: of the gradients.
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def smallest(dtype: torch.dtype) -> float:
    """Entries below it have squares that are not normal numbers: 2^-63 for float32.

    Args:
        dtype: of the gradients.
    """
    return math.sqrt(torch.finfo(norm_dtype(dtype)).tiny)
