"""Dtypes of norms, of sums, and of the computation behind a tensor.

The dtypes of parameters do not tell the precision of a computation: autocast, entered by the caller or by the model,
runs float32 parameters in bfloat16, and a model may cast by itself. Each node of the graph records the dtype of its
output.
"""

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from clipping.core.autograd import nodes

HALF = (torch.bfloat16, torch.float16)


def formats(*tensors: Tensor) -> set[torch.dtype]:
    """Return the floating dtypes of `tensors` and of every node in their graphs."""
    made = {each.dtype for node in nodes(x.grad_fn for x in tensors) for each in node._input_metadata}
    return {dtype for dtype in made.union(x.dtype for x in tensors) if dtype.is_floating_point}


def is_autocast(device: torch.device) -> bool:
    """True within the caller's autocast for this kind of device."""
    return _has_autocast(device.type) and torch.is_autocast_enabled(device.type)


def as_autocast(x: Tensor) -> Tensor:
    """Cast as autocast does before a product; one call serves several products of x."""
    wanted = x.dtype != torch.float64 and is_autocast(x.device)
    return x.to(torch.get_autocast_dtype(x.device.type)) if wanted and x.is_floating_point() else x


_has_autocast = functools.cache(torch.amp.is_autocast_available)
without_autocast: Callable[[], AbstractContextManager[None]] = torch._C._DisableAutocast
"""Returns a context without autocast on any device, so that norms are not computed in half precision."""


@functools.cache
def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a sum: float32 for half precision, which would lose all digits; else `dtype`."""
    return torch.float32 if dtype in HALF else dtype


@functools.cache
def norm_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of norms, float32 or wider: squares of float16 overflow at 256, bfloat16 keeps 8 bits."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@functools.cache
def smallest(dtype: torch.dtype) -> float:
    """The smallest entry whose square is a normal number: 2^-63 for float32."""
    return math.sqrt(torch.finfo(norm_dtype(dtype)).tiny)
