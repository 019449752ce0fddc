"""Track which dimension of an activation holds the samples, for models that use sequences first, [T, B, d].

The batch starts as the first dimension. A transposition moves it; an operation that keeps its size keeps its position.
After any other operation the first dimension is assumed, which the first batch's verification tests.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clipping.provenance.derived_parameters import TRANSPOSITIONS, methods, samples_of

PERMUTATIONS = TRANSPOSITIONS | methods("unbind")
"""Operations that only permute dimensions, as their arguments say."""

VIEWS = methods("view", "reshape", "flatten", "unflatten")
"""Operations that keep the order of entries and change the dimensions."""

ELEMENTWISE = methods("add", "sub", "mul")
CATENATIONS = methods("cat", "concat")
POSITIONWISE = {F.linear, F.embedding, F.layer_norm, F.rms_norm, *methods("rms_norm", "matmul")}
MOVABLE = ELEMENTWISE | CATENATIONS | POSITIONWISE
"""Operations that do not depend on which leading dimension holds the samples."""


def dimension_after(func: Any, args: Any, kwargs: Any, data: list[Tensor], output: Tensor, batch_size: int) -> int:
    """Return the dimension of the samples in the output of an operation on `data`."""
    if func in PERMUTATIONS:
        permutation = func, samples_of(data[0]), data[0].dim(), args[1:], tuple(kwargs.items())
        try:
            return _permuted(*permutation)
        except TypeError:  # an argument is a list, which is not hashable
            return _permuted.__wrapped__(*permutation)
    if func in VIEWS:
        x = data[0]
        if (at := samples_of(x)) or output.shape[:1] == (1,) != x.shape[:1]:
            return _viewed(x.shape, output.shape, at, batch_size)
    for x in data:
        at = samples_of(x)
        if not at or not isinstance(at, int):  # or an index of rows; its owners are not the output's
            continue
        if output.dim() == x.dim() and output.shape[at] % batch_size == 0:  # heads may be folded in
            return at
        if output.shape[: at + 1] == x.shape[: at + 1]:
            return at
    return 0


def _viewed(before: torch.Size, after: torch.Size, at: int, batch_size: int) -> int:
    """Find dimension `at` in a view: the dimension after as many entries, ignoring dimensions of size 1."""
    if batch_size == 1:
        return 0  # one sample has all rows, and a dimension of size 1 cannot be tracked
    count, entries = 1, before[:at].numel()
    for dim, size in enumerate(after):
        if count == entries and size % batch_size == 0:
            return dim
        count *= size
    return 0


@functools.cache
def _permuted(func: Any, before: int, dims: int, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> int:
    """Find dimension `before` after a permutation; the first if it no longer is one dimension."""
    probe = torch.empty([2 + i for i in range(dims)], device="meta")  # each dimension has its own size
    found = func(probe, *args, **dict(kwargs))
    sizes = list((found if isinstance(found, Tensor) else found[0]).shape)
    return sizes.index(2 + before) if 2 + before in sizes else 0


def samples_first(func: Any, args: Any, kwargs: Any, at: int, data: list[Tensor]) -> tuple[Any, Any]:
    """Return the arguments of a movable operation with dimension `at` of its activations moved to the front.

    Args:
        at: dimension of the samples.
    """
    activations, dims = {id(x) for x in data}, max(x.dim() for x in data)

    def moved(value: Any) -> Any:
        if isinstance(value, (tuple, list)) and func in CATENATIONS:
            return [moved(item) for item in value]
        if not isinstance(value, Tensor):
            return value
        if id(value) in activations:
            return value.transpose(0, at)
        if func in POSITIONWISE or value.dim() < dims - at:
            return value  # a weight, or broadcast along the samples
        return value.reshape((1,) * (dims - value.dim()) + tuple(value.shape)).transpose(0, at)

    args, kwargs = tuple(moved(value) for value in args), {key: moved(value) for key, value in kwargs.items()}
    if func in CATENATIONS:
        dim = (kwargs.pop("dim") if "dim" in kwargs else args[1] if len(args) > 1 else 0) % dims
        return (args[0], {0: at, at: 0}.get(dim, dim)), kwargs
    return args, kwargs
