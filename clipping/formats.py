"""In which formats of numbers a graph computed, and so what rounding explains of a difference.

Parameters do not say it: under autocast they are of float32 and the products of bfloat16, wherever autocast was entered
(by the caller, or inside the model); and a model may cast for itself. The graph does: each of its nodes knows the dtype
of what it gave.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


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
